package eval

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/run"
)

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestWriteMarkdown(t *testing.T) {
	r := synthetic()
	r.Question = "in-prompt"
	path := filepath.Join(t.TempDir(), "docs", "results.md")
	if err := WriteMarkdown(path, r); err != nil {
		t.Fatal(err)
	}
	first := read(t, path)
	golden(t, "results.md", []byte(first))
	svg := read(t, filepath.Join(filepath.Dir(path), "results-tiny-1m-b.svg"))
	golden(t, "results-tiny-1m-b.svg", []byte(svg))
	if err := WriteMarkdown(path, r); err != nil {
		t.Fatal(err)
	}
	if again := read(t, path); again != first {
		t.Errorf("a second time the page differs:\n%s", again)
	}

	// Comments stay where they are, word for word; what stands outside of them does not.
	remark := "Why *snapkv*\r\nloses:\n\n| a |\n|---|\n\n<!-- a comment -->\n"
	begin, end := "<!-- comment:begin tiny-1m-b-bytes -->\n", "<!-- comment:end tiny-1m-b-bytes -->\n"
	commented := strings.Replace(first, begin+end, begin+remark+end, 1) + "\nlost\n"
	if !strings.Contains(commented, remark) {
		t.Fatal("no place for a comment")
	}
	if err := os.WriteFile(path, []byte(commented), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := WriteMarkdown(path, r); err != nil {
		t.Fatal(err)
	}
	if got := read(t, path); got != strings.Replace(first, begin+end, begin+remark+end, 1) {
		t.Errorf("comments are not kept:\n%s", got)
	}
	// When the place is gone, they move to the end, and back again with it.
	other := synthetic()
	other.Model.Name = "another"
	if err := WriteMarkdown(path, other); err != nil {
		t.Fatal(err)
	}
	if got := read(t, path); !strings.HasSuffix(got, "## Further comments\n\n"+begin+remark+strings.TrimSpace(end)+"\n") || strings.Contains(got, "snapkv-50") {
		t.Errorf("a comment without a place is lost:\n%s", got)
	}
	if err := WriteMarkdown(path, other, r); err != nil {
		t.Fatal(err)
	}
	got := read(t, path)
	if strings.Contains(got, "## Further") || strings.Count(got, remark) != 1 || strings.Index(got, remark) < strings.Index(got, "## Tiny") {
		t.Errorf("a comment does not come back:\n%s", got)
	}
	if strings.Index(got, "## another") > strings.Index(got, "## Tiny 1M &lt;b&gt;: the question is in the prompt") {
		t.Error("results are not in order")
	}
}

func TestMarkdownRefuses(t *testing.T) {
	r := synthetic()
	for name, text := range map[string]string{
		"somebody's page":  "# README\n",
		"nested":           pageMark + "\n<!-- comment:begin a -->\n<!-- comment:begin b -->\n<!-- comment:end b -->\n<!-- comment:end a -->\n",
		"open":             pageMark + "\n<!-- comment:begin a -->\nx\n",
		"not begun":        pageMark + "\n<!-- comment:end a -->\n",
		"crossed":          pageMark + "\n<!-- comment:begin a -->\nx\n<!-- comment:end b -->\n",
		"twice":            pageMark + "\n" + strings.Repeat("<!-- comment:begin a -->\nx\n<!-- comment:end a -->\n", 2),
		"twice, one empty": pageMark + "\n<!-- comment:begin a -->\n<!-- comment:end a -->\n<!-- comment:begin a -->\nx\n<!-- comment:end a -->\n",
	} {
		path := filepath.Join(t.TempDir(), "x.md")
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		var format *run.FormatError
		if err := WriteMarkdown(path, r); !errors.As(err, &format) {
			t.Errorf("%s: %v", name, err)
		}
		if read(t, path) != text {
			t.Errorf("%s: the file was changed", name)
		}
	}
	empty := filepath.Join(t.TempDir(), "x.md")
	if err := os.WriteFile(empty, []byte("\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := WriteMarkdown(empty, r); err != nil {
		t.Errorf("an empty file: %v", err)
	}
}

// TestMarkdownOfLittle: pages of odd results are pages all the same.
func TestMarkdownOfLittle(t *testing.T) {
	for name, change := range map[string]func(r *Result){
		"nothing right": func(r *Result) {
			for i := range r.Full.Outcomes {
				r.Full.Outcomes[i].Right = false
			}
		},
		"no texts": func(r *Result) {
			r.Full.Texts = nil
			for i := range r.Runs {
				r.Runs[i].Texts = nil
			}
		},
		"texts alone": func(r *Result) {
			r.Full.Outcomes = nil
			for i := range r.Runs {
				r.Runs[i].Outcomes = nil
			}
		},
		"no runs":       func(r *Result) { r.Runs = nil },
		"one plan":      func(r *Result) { r.Runs = r.Runs[:1]; r.Runs[0].Budget = 0 },
		"one budget":    func(r *Result) { r.Runs = slices.DeleteFunc(r.Runs, func(x Run) bool { return x.Budget != 0.5 }) },
		"no datasets":   func(r *Result) { r.Datasets, r.Device, r.Tool.Version = nil, "", "" },
		"search":        func(r *Result) { r.Purpose = datasets.Search },
		"odd names":     func(r *Result) { r.Model.Name = "\xff|`*\n#"; r.Runs[0].Name = "a|b\nc <script> & \x00" },
		"no bytes kept": func(r *Result) { r.Runs[0].Outcomes[0].Bytes = 0 },
		"question after": func(r *Result) {
			r.Question = "after"
		},
	} {
		r := synthetic()
		change(r)
		path := filepath.Join(t.TempDir(), "results.md")
		if err := WriteMarkdown(path, r, r); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		page := read(t, path)
		for _, bad := range []string{"NaN", "Inf", "%!", "<script", "\n\n\n"} {
			if strings.Contains(page, bad) {
				t.Errorf("%s: %q in\n%s", name, bad, page)
			}
		}
		// All rows of a table have as many cells.
		cells := 0
		for line := range strings.Lines(page) {
			if !strings.HasPrefix(line, "|") {
				cells = 0
				continue
			}
			n := strings.Count(strings.ReplaceAll(strings.ReplaceAll(line, `\\`, ""), `\|`, ""), "|")
			if cells != 0 && n != cells {
				t.Errorf("%s: a row of %d cells after one of %d: %s", name, n, cells, line)
			}
			cells = n
		}
		files, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*.svg"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if !strings.Contains(page, "("+filepath.Base(f)+")") {
				t.Errorf("%s: %s is not shown", name, f)
			}
			text := read(t, f)
			wellFormed(t, text)
			if strings.Contains(text, "NaN") || strings.Contains(text, "Inf") {
				t.Errorf("%s: no number in\n%s", name, text)
			}
		}
		want := 2
		switch name {
		case "texts alone", "no runs", "one plan", "one budget":
			want = 0
		}
		if len(files) != want {
			t.Errorf("%s: %d figures, want %d", name, len(files), want)
		}
	}
}

func wellFormed(t *testing.T, text string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(text))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Errorf("%v in\n%s", err, text)
			return
		}
	}
}

// TestFigureOfMany: more methods than colours are still told apart, their labels do not overlap.
func TestFigureOfMany(t *testing.T) {
	r := synthetic()
	for i := range 12 {
		for _, b := range []float64{0.5, 0.25, 0.125} {
			x := *r.Find("window", b)
			x.Name = "window-" + string(rune('a'+i))
			r.Runs = append(r.Runs, x)
		}
	}
	text := r.figure()
	wellFormed(t, text)
	if !strings.Contains(text, dashes()[1]) || !strings.Contains(text, dashes()[2]) {
		t.Error("no dashes")
	}
}

func TestSpread(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		n := 1 + r.IntN(20)
		wanted := make([]float64, n)
		for i := range wanted {
			wanted[i] = float64(r.IntN(30)) * 10
		}
		got := spread(wanted, 13, -20, 330)
		gap := min(13, 350/float64(max(1, n-1)))
		sorted := slices.Clone(got)
		slices.Sort(sorted)
		for i, v := range sorted {
			if v < -20-1e-9 || v > 330+1e-9 || i > 0 && v-sorted[i-1] < gap-1e-9 {
				t.Fatalf("%v of %v", got, wanted)
			}
		}
		for i := range wanted {
			for j := range wanted {
				if wanted[i] < wanted[j] && got[i] > got[j] {
					t.Fatalf("order: %v of %v", got, wanted)
				}
			}
		}
		// Who has room stays.
		for i := range wanted {
			alone := wanted[i] >= -20+13*float64(n) && wanted[i] <= 330-13*float64(n)
			for j := range wanted {
				alone = alone && (i == j || max(wanted[i]-wanted[j], wanted[j]-wanted[i]) > 13*float64(n))
			}
			if alone && got[i] != wanted[i] {
				t.Fatalf("moved without need: %v of %v", got, wanted)
			}
		}
	}
	if got := spread(nil, 13, 0, 10); len(got) != 0 {
		t.Error(got)
	}
}

// TestFindings: a method that is far better beats the others; copies of one do not beat one another.
func TestFindings(t *testing.T) {
	r := synthetic()
	all, err := r.findingsAt(0.25)
	if err != nil {
		t.Fatal(err)
	}
	has := func(winner, loser string, right bool) bool {
		return slices.ContainsFunc(all, func(f finding) bool {
			return f.winner == winner && f.loser == loser && f.right == right && f.by > 0
		})
	}
	if !has("steady", "window", true) || !has("steady", "window", false) || !has("snapkv", "streaming-llm", false) || has("window", "steady", true) {
		t.Errorf("%+v", all)
	}
	best := *r.Find("steady", 0.25)
	r.Runs = nil
	for _, name := range []string{"a", "b", "c"} {
		x := best
		x.Name = name
		r.Runs = append(r.Runs, x)
	}
	if all, err = r.findingsAt(0.25); err != nil || len(all) != 0 {
		t.Errorf("%+v, %v", all, err)
	}
	var page bytes.Buffer
	path := filepath.Join(t.TempDir(), "p.md")
	if err := WriteMarkdown(path, r); err != nil {
		t.Fatal(err)
	}
	page.WriteString(read(t, path))
	if !strings.Contains(page.String(), "no method beats another significantly") {
		t.Error(page.String())
	}
}

func FuzzComments(f *testing.F) {
	f.Add("<!-- comment:begin a -->\nx\n<!-- comment:end a -->\n")
	f.Add("<!-- comment:begin a -->\r\nx\r\n<!-- comment:end a -->")
	f.Fuzz(func(t *testing.T, page string) {
		c, err := parseComments(page)
		if err != nil {
			return
		}
		out := ""
		for _, name := range c.names {
			out += c.block(name)
		}
		again, err := parseComments(out)
		if err != nil {
			t.Fatalf("%v in %q", err, out)
		}
		for name, text := range c.texts {
			if again.texts[name] != text {
				t.Errorf("%q becomes %q", text, again.texts[name])
			}
		}
	})
}
