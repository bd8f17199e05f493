package report

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"html"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/eval"
	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/profile"
)

var update = flag.Bool("update", false, "write the golden files")

const fixture = "testdata/run" // see scripts/fixtures_report.sh

// folder copies the fixture, so that a test can change it.
func folder(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "run")
	if err := os.CopyFS(dir, os.DirFS(fixture)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func open(t *testing.T, dir string, evals ...string) *Inputs {
	t.Helper()
	in, err := Open(dir, evals...)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// page makes the report of inputs and checks what holds for every page.
func page(t *testing.T, in *Inputs) (*Report, string) {
	t.Helper()
	r, err := New(in)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := r.WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	checkPage(t, b.String())
	seen := map[string]bool{}
	for _, f := range r.Figures() {
		if seen[f.ID] {
			t.Errorf("figure %s stands there twice", f.ID)
		}
		seen[f.ID] = true
		checkFigure(t, f)
	}
	return r, b.String()
}

// checkPage checks that a page asks for nothing from outside, that its policy lets its own script and style run and
// nothing else, and that tags are balanced.
func checkPage(t *testing.T, page string) {
	t.Helper()
	for _, m := range regexp.MustCompile(`(?i)\s(?:src|href|srcset|action|data|poster)\s*=\s*"([^"]*)"`).FindAllStringSubmatch(page, -1) {
		if !strings.HasPrefix(m[1], "#") && m[1] != "data:," {
			t.Errorf("the page refers to %q", m[1])
		}
	}
	for _, bad := range []string{"@import", "url(", "fetch(", "XMLHttpRequest", "import(", "eval(", "://"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %s", bad)
		}
	}
	policy := html.UnescapeString(regexp.MustCompile(`Content-Security-Policy" content="([^"]*)"`).FindStringSubmatch(page)[1])
	for _, x := range []struct{ directive, pattern string }{{"style-src", `(?s)<style>(.*?)</style>`}, {"script-src", `(?s)<script>(.*?)</script>`}} {
		texts := regexp.MustCompile(x.pattern).FindAllStringSubmatch(page, -1)
		if len(texts) != 1 {
			t.Fatalf("%d texts for %s", len(texts), x.directive)
		}
		h := sha256.Sum256([]byte(texts[0][1]))
		if want := x.directive + " 'sha256-" + base64.StdEncoding.EncodeToString(h[:]) + "'"; !strings.Contains(policy, want) {
			t.Errorf("the policy %q lacks %q", policy, want)
		}
	}
	if regexp.MustCompile(`(?i)<[^>]*\s(style|on[a-z]+)\s*=`).MatchString(page) {
		t.Error("the page has attributes that its policy forbids")
	}
	// Beside elements that have no end, every tag is closed in turn.
	body := regexp.MustCompile(`(?s)<(script|style)[^>]*>.*?</(script|style)>`).ReplaceAllString(page, "")
	void := map[string]bool{"meta": true, "link": true, "!doctype": true}
	var stack []string
	ids := map[string]bool{}
	for _, m := range regexp.MustCompile(`<(/?)([a-zA-Z!][a-zA-Z0-9]*)([^>]*?)(/?)>`).FindAllStringSubmatch(body, -1) {
		name := strings.ToLower(m[2])
		if id := regexp.MustCompile(`\sid="([^"]*)"`).FindStringSubmatch(m[3]); id != nil {
			if ids[id[1]] {
				t.Errorf("id %q stands there twice", id[1])
			}
			ids[id[1]] = true
		}
		switch {
		case void[name] || m[4] == "/":
		case m[1] == "":
			stack = append(stack, name)
		case len(stack) == 0 || stack[len(stack)-1] != name:
			t.Fatalf("</%s> closes %v", name, stack)
		default:
			stack = stack[:len(stack)-1]
		}
	}
	if len(stack) > 0 {
		t.Errorf("%v are not closed", stack)
	}
	for _, m := range regexp.MustCompile(`href="#([^"]*)"`).FindAllStringSubmatch(body, -1) {
		if !ids[m[1]] {
			t.Errorf("a link leads to #%s, which is not there", m[1])
		}
	}
}

// checkFigure checks that a figure is XML with marks that have numbers, that all lies within it, and that it can be drawn.
func checkFigure(t *testing.T, f *Figure) {
	t.Helper()
	if !regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`).MatchString(f.ID) {
		t.Errorf("a figure has the name %q", f.ID)
	}
	var b bytes.Buffer
	if err := f.WriteSVG(&b); err != nil {
		t.Fatal(err)
	}
	if s := b.String(); strings.Contains(s, "NaN") || strings.Contains(s, "Inf") || strings.Contains(s, "var(") {
		t.Errorf("%s has NaN, Inf or variables", f.ID)
	}
	if _, err := rasterise(b.Bytes()); err != nil {
		t.Errorf("%s: %v", f.ID, err)
	}
	marks, titles := 0, 0
	d := xml.NewDecoder(&b)
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("%s: %v", f.ID, err)
		}
		e, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		if e.Name.Local == "title" {
			titles++
		}
		at := map[string]string{}
		for _, a := range e.Attr {
			at[a.Name.Local] = a.Value
		}
		if slices.Contains(strings.Fields(at["class"]), "m") {
			marks++
		}
		for _, x := range []struct {
			name string
			end  float64
		}{{"x", f.Width}, {"x1", f.Width}, {"x2", f.Width}, {"cx", f.Width}, {"y", f.Height}, {"y1", f.Height}, {"y2", f.Height}, {"cy", f.Height}} {
			if s := at[x.name]; s != "" {
				var v float64
				if _, err := fmt.Sscan(s, &v); err != nil || v < -1 || v > x.end+1 {
					t.Errorf("%s: %s of %s is %q, outside of the figure", f.ID, x.name, e.Name.Local, s)
				}
			}
		}
	}
	if marks == 0 || titles != marks+1 {
		t.Errorf("%s has %d marks and %d titles", f.ID, marks, titles)
	}
	if f.Title == "" || f.Label == "" {
		t.Errorf("%s has no title or no label", f.ID)
	}
}

// outline is what a report says, without its drawing.
func outline(r *Report) string {
	var b strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	figure := func(f *Figure) {
		p("  figure %s, %s x %s: %s: %s", f.ID, px(f.Width), px(f.Height), f.Title, f.Label)
		for _, m := range regexp.MustCompile(`(?s)<title>(.*?)</title>`).FindAllStringSubmatch(f.body, -1) {
			p("    %s", strings.ReplaceAll(html.UnescapeString(m[1]), "\n", " | "))
		}
	}
	p("%s", r.Model)
	for _, f := range r.Facts {
		p("fact: %s %s", f.Value, f.Name)
	}
	for _, w := range r.Warnings {
		p("warning: %s", w)
	}
	for _, s := range r.Sections {
		p("section %s: %s", s.ID, s.Title)
		for _, x := range s.Texts {
			p("  %s", x)
		}
		for _, x := range s.Missing {
			p("  missing: %s", x)
		}
		for i := range s.Figures {
			figure(&s.Figures[i])
		}
		if s.Maps {
			for _, x := range r.maps.Samples {
				p("  maps of %s: %d x %d cells of %d tokens, %d characters", x.Name, x.Size, x.Size, x.Tile, len(x.Data))
			}
		}
		for _, g := range s.Choices {
			p("  choice %s", g.Label)
			for i := range g.figures {
				figure(&g.figures[i])
			}
		}
		for _, x := range s.Tables {
			p("  table %s", x.Caption)
			for _, row := range append([][]string{x.Header}, x.Rows...) {
				p("    %s", strings.Join(row, " | "))
			}
		}
	}
	return b.String()
}

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		a, b := strings.Split(got, "\n"), strings.Split(string(want), "\n")
		for i := range min(len(a), len(b)) {
			if a[i] != b[i] {
				t.Fatalf("%s, line %d (-update writes it anew):\n got %s\nwant %s", path, i+1, a[i], b[i])
			}
		}
		t.Fatalf("%s has %d lines, want %d", path, len(a), len(b))
	}
}

func TestGolden(t *testing.T) {
	r, first := page(t, open(t, fixture))
	golden(t, "testdata/outline.txt", outline(r))
	if got := strings.Join(r.Missing(), "\n"); got != "Retention is left out: the full cache gets no prompt right." {
		t.Errorf("a whole folder lacks %v", got)
	}
	_, second := page(t, open(t, fixture))
	if first != second {
		t.Error("the same folder gives other bytes")
	}
	for _, f := range r.Figures() {
		if f.ID == "gates" || f.ID == "evaluation-loss" {
			var b strings.Builder
			if err := f.WriteSVG(&b); err != nil {
				t.Fatal(err)
			}
			golden(t, "testdata/"+f.ID+".svg", b.String())
		}
	}
}

// What stands in a hover text and a table is what the plan and the evaluation say.
func TestNumbersAreThePlans(t *testing.T) {
	in := open(t, fixture)
	r, _ := page(t, in)
	text := outline(r)
	u := in.Plan.Usage(plan.Request{PromptTokens: 4096, Batch: 8})
	for _, want := range []string{
		fmt.Sprintf("4k tokens, 8 sequences | full cache %s | plan %s", decimalBytes(float64(u.FullBytes)), decimalBytes(float64(u.Bytes))),
		fmt.Sprintf("plan | %s, by kvprofile", in.Plan.Digest()),
		"seed | 42",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	e := in.Evals[0].Result
	for i := range e.Runs {
		x := &e.Runs[i]
		s := e.Overall(x)
		if want := fmt.Sprintf("%s | %s | %d of %d", in.label(x), percent(s.Kept), s.Right, s.N); !strings.Contains(text, want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	if !strings.Contains(text, "choice this plan (this at 50 %)") {
		t.Error("the run of the folder's plan is not told apart")
	}
}

// Marks stand where their values are.
func TestChartScales(t *testing.T) {
	c := chart{id: "x", title: "t", label: "l", x: axis{low: 1, high: 16, transform: math.Log2, format: plain}, y: axis{low: 0, high: 10, ticks: []float64{0, 10}, format: plain},
		series: []series{{name: "a", bars: false, points: []point{at(1, 0, "low"), at(4, 5, "middle"), at(16, 10, "high"), at(1e9, 99, "beyond")}}}}
	f := c.figure()
	var x, y [4]float64
	for i, m := range regexp.MustCompile(`<circle cx="([0-9.]+)" cy="([0-9.]+)"`).FindAllStringSubmatch(f.body, -1) {
		fmt.Sscan(m[1], &x[i])
		fmt.Sscan(m[2], &y[i])
	}
	if math.Abs(x[1]-(x[0]+x[2])/2) > 0.11 || math.Abs(y[1]-(y[0]+y[2])/2) > 0.11 || y[0]-y[2] != 200 || x[0] >= x[2] {
		t.Errorf("marks stand at %v, %v", x, y)
	}
	if x[3] != x[2] || y[3] != y[2] {
		t.Errorf("a value beyond the axes stands at %v, %v", x[3], y[3])
	}
}

func TestNiceTicks(t *testing.T) {
	for _, x := range []struct{ low, high float64 }{{0, 1}, {0, 0.013}, {0, 90}, {0, 2048}, {3, 17}, {0, 1e9}, {-1, 1}} {
		got := niceTicks(x.low, x.high, 5)
		if len(got) < 2 || len(got) > 7 || got[0] > x.low || got[len(got)-1] < x.high*(1-1e-9) || !slices.IsSorted(got) {
			t.Errorf("from %v to %v: %v", x.low, x.high, got)
		}
	}
	if got := niceTicks(2, 2, 5); len(got) != 1 {
		t.Errorf("without a span: %v", got)
	}
}

// With each artefact missing, the rest is shown, and the page says what is not.
func TestMissing(t *testing.T) {
	for name, says := range map[string]string{
		"plan.json": "no plan.json", "gates": "no gates", "fastgen.json": "no fastgen.json", "pyramid.json": "no pyramid.json",
		"record": "no record", "eval.json": "no eval.json", "run.json": "no run.json",
	} {
		dir := folder(t)
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		r, html := page(t, open(t, dir))
		if !strings.Contains(strings.Join(r.Missing(), "\n"), says) || !strings.Contains(html, says) {
			t.Errorf("without %s: %v", name, r.Missing())
		}
		if len(r.Figures()) == 0 {
			t.Errorf("without %s: no figures", name)
		}
		// And each alone.
		if name == "run.json" {
			continue
		}
		alone := t.TempDir()
		from := filepath.Join(fixture, name)
		if info, err := os.Stat(from); err != nil {
			t.Fatal(err)
		} else if info.IsDir() {
			err = os.CopyFS(filepath.Join(alone, name), os.DirFS(from))
			if err != nil {
				t.Fatal(err)
			}
		} else if b, err := os.ReadFile(from); err != nil {
			t.Fatal(err)
		} else if err := os.WriteFile(filepath.Join(alone, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
		page(t, open(t, alone))
	}
	var empty *EmptyError
	if _, err := Open(t.TempDir()); !errors.As(err, &empty) {
		t.Errorf("an empty folder gives %v", err)
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no folder gives %v", err)
	}
	if _, err := Open(filepath.Join(fixture, "plan.json")); err == nil || !strings.Contains(err.Error(), "is no folder") {
		t.Errorf("a file gives %v", err)
	}
	if _, err := Open(fixture, "none.json"); err == nil || !strings.Contains(err.Error(), "none.json") {
		t.Errorf("an evaluation that is not there gives %v", err)
	}
}

// A record of which parts are missing is left out, as its run may not have ended.
func TestIncompleteRecord(t *testing.T) {
	dir := folder(t)
	if err := os.RemoveAll(filepath.Join(dir, "record", "heads")); err != nil {
		t.Fatal(err)
	}
	r, _ := page(t, open(t, dir))
	if !strings.Contains(strings.Join(r.Missing(), "\n"), "not complete") {
		t.Errorf("missing: %v", r.Missing())
	}
}

// What cannot be read is an error that names the file.
func TestMalformed(t *testing.T) {
	names := []string{"plan.json", "run.json", "fastgen.json", "pyramid.json", "eval.json", "gates/gates.parquet", "gates/agreement.json",
		"record/samples/part-00000.parquet", "record/heads/part-00000.parquet", "record/maps/part-00000.parquet"}
	for _, name := range names {
		for _, damage := range []func(b []byte) []byte{
			func(b []byte) []byte { return b[:len(b)/2] },
			func([]byte) []byte { return []byte("{}") },
			func(b []byte) []byte { return bytes.Repeat([]byte{0xff}, len(b)) },
		} {
			dir := folder(t)
			path := filepath.Join(dir, name)
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, damage(b), 0o644); err != nil {
				t.Fatal(err)
			}
			in, err := Open(dir)
			if err == nil {
				_, err = New(in)
			}
			// The first part of the name is enough where parts of a table are read together.
			if err == nil || !strings.Contains(err.Error(), filepath.Join(dir, strings.Split(name, "/")[0])) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func TestOtherModel(t *testing.T) {
	for _, name := range []string{"fastgen.json", "pyramid.json", "eval.json", "run.json"} {
		dir := folder(t)
		path := filepath.Join(dir, name)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(`("weights": ?")([0-9a-f])`).FindSubmatchIndex(b)
		if m == nil {
			t.Fatalf("%s names no weights", name)
		}
		if b[m[4]] == '0' {
			b[m[4]] = '1'
		} else {
			b[m[4]] = '0'
		}
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		var other *ModelError
		if _, err := Open(dir); !errors.As(err, &other) || other.What != "the hash of its weights" {
			t.Errorf("%s of other weights: %v", name, err)
		}
	}
	// Gates of another shape.
	dir := folder(t)
	in := open(t, dir)
	in.Gates.Values = in.Gates.Values[:1]
	in.Gates.Scores, in.Gates.Agreement = nil, nil
	if err := in.Gates.Save(filepath.Join(dir, "gates")); err != nil {
		t.Fatal(err)
	}
	var other *ModelError
	if _, err := Open(dir); !errors.As(err, &other) || other.What != "the number of layers" {
		t.Errorf("gates of another shape: %v", err)
	}
}

// Texts from artefacts are texts in the page, whatever stands in them.
func TestHostileTexts(t *testing.T) {
	evil := "</script></title></style><img src=x onerror=alert(1)>\"'`{{.}}]]>\x00\x1b&lt;\u2028é\U0001F600" + strings.Repeat("W", 300)
	in := open(t, fixture)
	in.Plan.Model.Name = evil
	in.Plan.Warnings = []string{evil}
	policies := map[string]plan.Policy{}
	for name, q := range in.Plan.Policies {
		policies[name+evil] = q
	}
	in.Plan.Policies = policies
	for _, row := range in.Plan.Layers {
		for k := range row {
			row[k] += evil
		}
	}
	for i := range in.Plan.Evidence.Agreement {
		in.Plan.Evidence.Agreement[i].A += evil
	}
	in.Manifest.Arguments = []string{evil}
	in.Manifest.Stages[0].Name = evil
	for i := range in.FastGen.Lattice {
		in.FastGen.Lattice[i].Name = evil
	}
	in.Evals[0].Name = evil
	e := in.Evals[0].Result
	for i := range e.Runs {
		e.Runs[i].Name += evil
	}
	for _, x := range append([]*eval.Run{&e.Full}, &e.Runs[0], &e.Runs[1], &e.Runs[2], &e.Runs[3], &e.Runs[4]) {
		for i := range x.Outcomes {
			x.Outcomes[i].Task += evil
		}
	}
	_, text := page(t, in)
	if strings.Contains(text, "<img") || strings.Contains(text, "\x00") {
		t.Error("a text from an artefact is part of the page's markup")
	}
	if strings.Count(text, "</script>") != 2 {
		t.Errorf("%d scripts end", strings.Count(text, "</script>"))
	}
}

// All shapes that plans may have are drawn: many heads and layers, one of each, every kind of policy.
func TestShapes(t *testing.T) {
	for _, shape := range [][2]int{{1, 1}, {80, 8}, {64, 64}, {2, 1}} {
		in := open(t, fixture)
		p := in.Plan
		p.Model.NLayers, p.Model.NKVHeads, p.Model.NHeads = shape[0], shape[1], 4*shape[1]
		p.Model.MaxPosition = 1 << uint(shape[1]%21)
		p.Policies = map[string]plan.Policy{"full": plan.Full{},
			"stream":  plan.Streaming{SinkTokens: 4, RecentTokens: 64, Evict: plan.EvictAlways, Decode: plan.DecodeRolling, Positions: "original"},
			"topk":    plan.TopK{BudgetRatio: 0.25, ObservationWindow: 8, Pool: plan.Pool{Kind: "max", Kernel: 7}, Aggregate: plan.AggregateMean, Evict: plan.EvictPrefillEnd, Decode: plan.DecodeStatic, Positions: "original"},
			"fastgen": plan.FastGen{FrequentRatio: 0.3, LocalRatio: 0.3, MaxRatio: 0.7},
			"h2o":     plan.H2O{HeavyTokens: 32, RecentTokens: 32}}
		names := []string{"full", "stream", "topk", "fastgen", "h2o"}
		p.Layers = make([][]string, shape[0])
		for l := range p.Layers {
			for k := range shape[1] {
				p.Layers[l] = append(p.Layers[l], names[(l+k)%len(names)])
			}
		}
		_, _ = page(t, &Inputs{Plan: p})
	}
}

// The maps in the page are those of the record, within their rounding, and coarser ones keep the sum of every row.
func TestAttentionMaps(t *testing.T) {
	in := open(t, fixture)
	a, err := in.attentionMaps()
	if err != nil {
		t.Fatal(err)
	}
	maps, err := in.Record.Maps(in.Record.Samples()[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	s := a.Samples[0]
	data, err := base64.StdEncoding.DecodeString(s.Data)
	if err != nil {
		t.Fatal(err)
	}
	per := s.Size * (s.Size + 1) / 2
	if len(data) != per*len(maps) {
		t.Fatalf("%d numbers for %d maps", len(data), len(maps))
	}
	checked := 0
	for i := range maps {
		cells, size, tile := coarser(&maps[i], s.Tokens, 64)
		if size != s.Size || tile != s.Tile {
			t.Fatalf("%d cells of %d tokens, the page says %d of %d", size, tile, s.Size, s.Tile)
		}
		for r := range size {
			sum := 0.0
			for c := range r + 1 {
				v := float64(cells[r*size+c])
				sum += v
				q := data[i*per+r*(r+1)/2+c]
				shown := 0.0
				if q > 0 {
					shown = math.Pow(mapLow, 1-float64(q-1)/254) // as the page's script
				}
				if v >= mapLow && math.Abs(shown/v-1) > 0.025 || v < mapLow && q != 0 {
					t.Fatalf("map %d, cell %d, %d: %v is shown as %v", i, r, c, v, shown)
				}
				checked++
			}
			if math.Abs(sum-1) > 0.01 { // cells were stored in half precision
				t.Errorf("map %d: row %d sums to %v", i, r, sum)
			}
		}
	}
	if checked < 1000 {
		t.Errorf("%d cells checked", checked)
	}
}

// coarser against sums over single tokens.
func TestCoarser(t *testing.T) {
	const n, fine = 23, 3 // 8 tiles of 3 tokens, the last of 2
	exact := func(r, c int) float64 {
		if c > r {
			return 0
		}
		return float64(1+(r*7+c*3)%5) / 100
	}
	tiles := func(tile int) (out []float32, size int) {
		size = (n + tile - 1) / tile
		out = make([]float32, size*size)
		for R := range size {
			rows := min(tile, n-R*tile)
			for r := R * tile; r < R*tile+rows; r++ {
				for c := range n {
					out[R*size+c/tile] += float32(exact(r, c) / float64(rows))
				}
			}
		}
		return out, size
	}
	cells, size := tiles(fine)
	for _, want := range []int{8, 4, 3, 2} {
		got, rows, tile := coarser(&profile.Map{Size: size, Tile: fine, Cells: cells}, n, want)
		brute, bruteSize := tiles(tile)
		if rows != bruteSize || rows > want {
			t.Fatalf("at most %d cells: %d of %d tokens", want, rows, tile)
		}
		for i := range brute {
			if math.Abs(float64(got[i]-brute[i])) > 1e-6 {
				t.Fatalf("%d cells: cell %d is %v, want %v", rows, i, got[i], brute[i])
			}
		}
	}
}

// Maps of large models are coarser, and always within the limit.
func TestMapsFit(t *testing.T) {
	for _, heads := range []int{4, 270, 1024, 80 * 64, 1 << 16, 1 << 20} {
		samples, size := mapsFit(heads, mapsSamples)
		if base64.StdEncoding.EncodedLen(samples*heads*size*(size+1)/2) > mapsLimit+4 {
			t.Errorf("%d heads: %d samples of size %d", heads, samples, size)
		}
		if (samples == 0) != (heads*8*9/2 > mapsLimit*3/4) {
			t.Errorf("%d heads: %d samples of size %d", heads, samples, size)
		}
	}
}

// The bootstrap interval of many losses is that of the normal distribution.
func TestLossInterval(t *testing.T) {
	r := &eval.Result{}
	x := &eval.Run{}
	var sum, squares float64
	const n = 400
	for i := range n {
		loss := float64((i*37)%100) / 50
		r.Full.Outcomes = append(r.Full.Outcomes, eval.Outcome{LogProb: -1})
		x.Outcomes = append(x.Outcomes, eval.Outcome{LogProb: -1 - loss})
		sum, squares = sum+loss, squares+loss*loss
	}
	mean := sum / n
	half := 1.96 * math.Sqrt((squares/n-mean*mean)/n)
	low, high := lossInterval(r, x)
	if math.Abs(low-(mean-half)) > 0.15*half || math.Abs(high-(mean+half)) > 0.15*half {
		t.Errorf("%v to %v, want about %v to %v", low, high, mean-half, mean+half)
	}
}

func TestWriteFigures(t *testing.T) {
	r, err := New(open(t, fixture))
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "figures")
	paths, err := r.WriteFigures(dir)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != len(paths) || len(paths) != 2*len(r.Figures()) {
		t.Errorf("%d files, %d paths, %d figures", len(entries), len(paths), len(r.Figures()))
	}
}

// Two evaluations stand beside one another, and names of files tell them apart.
func TestTwoEvaluations(t *testing.T) {
	other := filepath.Join(t.TempDir(), "after.json")
	in := open(t, fixture)
	e := in.Evals[0].Result
	e.Question = "after"
	if err := e.Write(other); err != nil {
		t.Fatal(err)
	}
	r, text := page(t, open(t, fixture, other))
	for _, want := range []string{"(after.json)", "(eval.json)", "the question comes after eviction", `id="evaluation-2"`} {
		if !strings.Contains(text, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if n := len(r.Sections); n != 10 {
		t.Errorf("%d sections", n)
	}
}

// Needle grids are bounded, and what is left out is said.
func TestManyGrids(t *testing.T) {
	in := open(t, fixture)
	e := in.Evals[0].Result
	var big []eval.Run
	for i := range 400 {
		x := e.Runs[0]
		x.Name, x.PlanSHA256 = fmt.Sprintf("method-%d", i), ""
		big = append(big, x)
	}
	e.Runs = big
	r, text := page(t, in)
	if !strings.Contains(strings.Join(r.Missing(), "\n"), "needle grids of") || len(text) > 6_000_000 {
		t.Errorf("%d bytes, missing: %v", len(text), r.Missing())
	}
}

// The data of the maps is JSON that the page's script can read.
func TestMapData(t *testing.T) {
	_, text := page(t, open(t, fixture))
	m := regexp.MustCompile(`(?s)<script type="application/json" id="map-data">(.*?)</script>`).FindStringSubmatch(text)
	if m == nil {
		t.Fatal("no data")
	}
	var a attention
	if err := json.Unmarshal([]byte(m[1]), &a); err != nil {
		t.Fatal(err)
	}
	if a.Layers != 2 || len(a.Samples) != 1 {
		t.Errorf("%d layers, %d samples", a.Layers, len(a.Samples))
	}
}

// Retention with its bound, and grids whose depths are gathered in tenths.
func TestRetentionAndGrid(t *testing.T) {
	in := open(t, fixture)
	e := in.Evals[0].Result
	answer := func(x *eval.Run, i int, right bool) {
		o := &x.Outcomes[i]
		o.Right, o.Share = right, 0
		if right {
			o.Share = 1
		}
	}
	for i := range e.Full.Outcomes {
		answer(&e.Full, i, i%2 == 0)
		for j := range e.Runs {
			answer(&e.Runs[j], i, i%4 == 0)
		}
		for _, x := range append([]*eval.Run{&e.Full}, &e.Runs[0], &e.Runs[1], &e.Runs[2], &e.Runs[3], &e.Runs[4]) {
			x.Outcomes[i].Task, x.Outcomes[i].Depth, x.Outcomes[i].Length = "single", float64(i)/19, 600
			x.Outcomes[i].Sample = i
		}
	}
	if err := e.Validate(); err != nil {
		t.Fatal(err)
	}
	r, _ := page(t, in)
	text := outline(r)
	// 5 of 10: the one-sided 95 % Clopper-Pearson lower bound is 0.2224 in published tables.
	if !strings.Contains(text, "right 5 of 20, full cache 10") || !strings.Contains(text, "retention 50.0 %, lower bound 22.2 %") {
		t.Error("retention or its bound is wrong or missing")
	}
	if !strings.Contains(text, "fact: 50.0 % retention on 10 prompts (lower bound 22.2 %)") {
		t.Error("the plan's retention does not stand in the head of the page")
	}
	for _, f := range r.Figures() {
		if f.ID == "evaluation-grid-0-0-single" {
			if n := strings.Count(f.body, `class="m"`); n != 10 {
				t.Errorf("20 depths give %d cells, want one for each tenth", n)
			}
			if !strings.Contains(f.body, "depth 0 to 5.3 %") || !strings.Contains(f.body, "right 1 of 2 (full cache 1)") {
				t.Error("cells do not say what is in them")
			}
			return
		}
	}
	t.Error("there is no grid")
}
