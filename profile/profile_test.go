package profile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// testClasses calls ids below 3 special and multiples of 7 punctuation.
type testClasses struct{}

func (testClasses) IsSpecial(id int32) bool     { return id < 3 }
func (testClasses) IsPunctuation(id int32) bool { return id%7 == 0 } // 0 is special first

func testModel(t testing.TB) *engine.Model {
	t.Helper()
	cfg := enginetest.Tiny()
	m, err := engine.New(cfg, enginetest.Weights{Config: cfg, Seed: 7}, ref.New[float64]())
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// testSample lays out sink, haystack, two needles, and two questions with answers that repeat the needles.
func testSample(id int, haystack int, seed uint64) datasets.Sample {
	r := rand.New(rand.NewPCG(seed, uint64(id)))
	s := datasets.Sample{ID: id, Task: "test", Seed: seed, Haystack: "prose",
		Depths: []float64{.2, .7}, AskedDepths: []float64{.2, .7}, Expected: []string{"a", "b"}}
	counts := map[datasets.SpanKind]int{}
	put := func(kind datasets.SpanKind, tokens ...int32) {
		s.Spans = append(s.Spans, datasets.Span{Kind: kind, Index: counts[kind], Start: len(s.Tokens), End: len(s.Tokens) + len(tokens)})
		counts[kind]++
		s.Tokens = append(s.Tokens, tokens...)
	}
	draw := func(n int) []int32 {
		out := make([]int32, n)
		for i := range out {
			out[i] = int32(r.IntN(50))
		}
		return out
	}
	a, b := draw(4), draw(3)
	put(datasets.SpanSink, 0)
	put(datasets.SpanHaystack, draw(haystack)...)
	put(datasets.SpanNeedle, a...)
	put(datasets.SpanHaystack, draw(haystack)...)
	put(datasets.SpanNeedle, b...)
	put(datasets.SpanQuestion, draw(3)...)
	put(datasets.SpanAnswer, a...)
	put(datasets.SpanQuestion, draw(2)...)
	put(datasets.SpanAnswer, b...)
	s.TargetTokens = len(s.Tokens)
	return s
}

// plainSample has no needles and no answers.
func plainSample(id, tokens int) datasets.Sample {
	s := datasets.Sample{ID: id, Task: "test", Haystack: "prose", Tokens: enginetest.Tokens(enginetest.Tiny(), tokens, 3), TargetTokens: tokens,
		Spans: []datasets.Span{{Kind: datasets.SpanSink, Start: 0, End: 1}}}
	if tokens > 1 {
		s.Spans = append(s.Spans, datasets.Span{Kind: datasets.SpanHaystack, Start: 1, End: tokens})
	}
	return s
}

func testDataset() *datasets.Dataset {
	d := &datasets.Dataset{Meta: datasets.Meta{Task: "test", Purpose: datasets.Calibration, Seed: 11, Tokenizer: "tok"},
		Samples: []datasets.Sample{testSample(0, 9, 1), testSample(1, 20, 1), plainSample(2, 17), plainSample(3, 1)}}
	d.Meta.ContentHash = datasets.HashSamples(d.Samples)
	return d
}

func testOptions(dir string) Options {
	return Options{Dir: dir, Tool: "v1", ModelName: "tiny", SHA256: map[string]string{"weights": "w", "config": "c"},
		Grid: Grid{LocalRatios: []float64{.1, .3}, Windows: []int{4, 8, 64}, Recent: []int{3, 10, 1000}, Sinks: []int{1, 4, 6}, KeysEvery: 4,
			Masses: []float64{.5, .9}, VarianceWindow: 5, MapSamples: 2, MapSize: 8, ExactHeads: []Head{{1, 2}, {0, 0}}, ExactSamples: []int{0, 2}}}
}

func mustRun(t *testing.T, m *engine.Model, d *datasets.Dataset, o Options) {
	t.Helper()
	if err := Run(t.Context(), m, d, testClasses{}, o, nil); err != nil {
		t.Fatal(err)
	}
}

// attention returns the full maps of all tokens, [layer][head][query*tokens+key].
func attention(t *testing.T, m *engine.Model, tokens []int32) [][][]float32 {
	t.Helper()
	maps := make([][][]float32, m.Config.Layers)
	err := m.Forward(context.Background(), &engine.Sequence{Tokens: tokens,
		Tap: func(int) *engine.Tap { return &engine.Tap{Prompt: len(tokens), Exact: []int{0, 1, 2, 3}} },
		Tapped: func(l int, tap *engine.Tap) error {
			for h := range tap.Heads {
				maps[l] = append(maps[l], tap.Heads[h].Exact)
			}
			return nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	return maps
}

func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if !(math.Abs(got-want) <= 1e-5*max(1, math.Abs(want))) {
		t.Errorf("%s is %g, want %g", what, got, want)
	}
}

func nearList(t *testing.T, what string, got []float32, n int, want func(j int) float64) {
	t.Helper()
	if len(got) != n {
		t.Fatalf("%s has %d values, want %d", what, len(got), n)
	}
	for j, x := range got {
		near(t, fmt.Sprintf("%s[%d]", what, j), float64(x), want(j))
	}
}

// Everything in the record against what full attention maps say.
func TestRecordEqualsFullMaps(t *testing.T) {
	m, d, o := testModel(t), testDataset(), testOptions(t.TempDir())
	mustRun(t, m, d, o)
	rec, err := Open(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	g := rec.Meta().Grid
	if !reflect.DeepEqual(g, o.Grid) {
		t.Errorf("grid %+v, want %+v", g, o.Grid)
	}
	for id, s := range rec.Samples() {
		src := &d.Samples[id]
		if s.ID != id || !slices.Equal(s.Tokens, src.Tokens) || !slices.Equal(s.Spans, src.Spans) || s.Prompt != src.PromptLen() ||
			!slices.Equal(s.Answers, src.AnswerRows()) || s.Task != src.Task || s.Seed != src.Seed {
			t.Errorf("sample %d reads back as %+v", id, s)
		}
		for i, tok := range s.Tokens {
			want := Other
			if tok < 3 {
				want = Special
			} else if tok%7 == 0 {
				want = Punctuation
			}
			if s.Classes[i] != want {
				t.Errorf("sample %d token %d is of class %d, want %d", id, i, s.Classes[i], want)
			}
		}
		maps := attention(t, m, s.Tokens)
		heads, err := rec.Heads(id)
		if err != nil {
			t.Fatal(err)
		}
		n, all := s.Prompt, len(s.Tokens)
		inNeedle := func(j int) bool {
			for _, sp := range src.Find(datasets.SpanNeedle) {
				if j >= sp.Start && j < sp.End {
					return true
				}
			}
			return false
		}
		for l := range m.Config.Layers {
			columns, err := rec.Columns(id, l)
			if err != nil {
				t.Fatal(err)
			}
			for h := range m.Config.Heads {
				p := func(i, j int) float64 { return float64(maps[l][h][i*all+j]) }
				over := func(ok func(i, j int) bool) (sum float64) {
					for i := range all {
						for j := 0; j <= i; j++ {
							if ok(i, j) {
								sum += p(i, j)
							}
						}
					}
					return sum
				}
				column := func(j int, ok func(i int) bool) float64 {
					return over(func(i, k int) bool { return k == j && ok(i) })
				}
				name := fmt.Sprintf("sample %d layer %d head %d ", id, l, h)
				c, st := columns[h], heads[l*m.Config.Heads+h]
				if st.Layer != l || st.Head != h || st.KVHead != h/2 {
					t.Fatalf("%s reads as %d:%d of %d", name, st.Layer, st.Head, st.KVHead)
				}
				nearList(t, name+"total", c.Total, n, func(j int) float64 { return column(j, func(i int) bool { return i < n }) })
				for x, r := range g.LocalRatios {
					dist := Tokens(r, n)
					far := func(j int) float64 { return column(j, func(i int) bool { return i < n && i-j >= dist }) }
					nearList(t, name+"far", c.Far[x], n, far)
					first, second := SplitFar(c.Far[x], c.Half, dist)
					nearList(t, name+"far first", first, n, func(j int) float64 { return column(j, func(i int) bool { return i < n/2 && i-j >= dist }) })
					nearList(t, name+"far second", second, n, func(j int) float64 { return column(j, func(i int) bool { return i >= n/2 && i < n && i-j >= dist }) })
				}
				for x, r := range g.LocalRatios {
					dist := Tokens(r, n/2)
					nearList(t, name+"first far", c.FirstFar[x], n/2, func(j int) float64 { return column(j, func(i int) bool { return i < n/2 && i-j >= dist }) })
				}
				for x, w := range g.Windows {
					nearList(t, name+"window", c.Window[x], n, func(j int) float64 { return column(j, func(i int) bool { return i < n && i >= n-w }) })
				}
				nearList(t, name+"half", c.Half, n, func(j int) float64 { return column(j, func(i int) bool { return i < n && i >= n/2 }) })
				answers := len(s.Answers)
				if answers == 0 && c.Answer != nil {
					t.Errorf("%s has an answer list without answers", name)
				}
				if answers > 0 {
					nearList(t, name+"answer", c.Answer, all, func(j int) float64 { return column(j, func(i int) bool { return slices.Contains(s.Answers, i) }) })
					near(t, name+"answer needle", st.AnswerNeedle, over(func(i, j int) bool { return slices.Contains(s.Answers, i) && inNeedle(j) })/float64(answers))
					near(t, name+"copy", st.Copy, copyScore(src, s.Answers, p))
				}
				rows := float64(n)
				mean := func(ok func(i, j int) bool) float64 {
					return over(func(i, j int) bool { return i < n && ok(i, j) }) / rows
				}
				for x, k := range g.Sinks {
					near(t, name+"sink", st.Sink[x], mean(func(_, j int) bool { return j < k }))
				}
				for x, w := range g.Recent {
					near(t, name+"recent", st.Recent[x], mean(func(i, j int) bool { return i-j < w }))
					nearList(t, name+"sink far", st.SinkFar[x], min(6, n), func(j int) float64 { return column(j, func(i int) bool { return i < n && i-j >= w }) })
				}
				near(t, name+"special", st.Special, mean(func(_, j int) bool { return s.Classes[j] == Special }))
				near(t, name+"punctuation", st.Punctuation, mean(func(_, j int) bool { return s.Classes[j] == Punctuation }))
				near(t, name+"needle", st.Needle, mean(func(_, j int) bool { return inNeedle(j) }))
				var entropy float64
				for i := range n {
					for j := 0; j <= i; j++ {
						if x := p(i, j); x > 0 {
							entropy -= x * math.Log(x) / rows
						}
					}
				}
				near(t, name+"entropy", st.Entropy, entropy)
				if st.Keys[0] < 1 || st.Keys[1] < st.Keys[0] || st.ValueNormMax < st.ValueNorm || st.ValueNorm <= 0 {
					t.Errorf("%s keys %v, value norms %g and %g", name, st.Keys, st.ValueNorm, st.ValueNormMax)
				}
			}
		}
		checkMaps(t, rec, id, maps, all)
	}
}

// copyScore by its definition: the answer row's largest probability is on its own needle's token, and that token is
// the next one.
func copyScore(s *datasets.Sample, rows []int, p func(i, j int) float64) float64 {
	hits, at := 0, 0
	for _, answer := range s.Find(datasets.SpanAnswer) {
		needle := s.Find(datasets.SpanNeedle)[answer.Index]
		for range answer.Len() {
			i := rows[at]
			at++
			best := 0
			for j := range i + 1 {
				if p(i, j) > p(i, best) {
					best = j
				}
			}
			if best >= needle.Start && best < needle.End && s.Tokens[best] == s.Tokens[i+1] {
				hits++
			}
		}
	}
	return float64(hits) / float64(len(rows))
}

func checkMaps(t *testing.T, rec *Record, id int, maps [][][]float32, all int) {
	t.Helper()
	n := rec.Samples()[id].Prompt
	pooled, err := rec.Maps(id)
	if err != nil {
		t.Fatal(err)
	}
	exact, err := rec.ExactMaps(id)
	if err != nil {
		t.Fatal(err)
	}
	if wantPooled := map[bool]int{true: 12}[id < 2]; len(pooled) != wantPooled {
		t.Fatalf("sample %d has %d pooled maps, want %d", id, len(pooled), wantPooled)
	}
	if wantExact := map[bool]int{true: 2}[id == 0 || id == 2]; len(exact) != wantExact {
		t.Fatalf("sample %d has %d exact maps, want %d", id, len(exact), wantExact)
	}
	for _, x := range pooled {
		for a := range x.Size {
			for b := range x.Size {
				var sum float64
				hi := min((a+1)*x.Tile, n)
				for i := a * x.Tile; i < hi; i++ {
					for j := b * x.Tile; j < min((b+1)*x.Tile, n); j++ {
						sum += float64(maps[x.Layer][x.Head][i*all+j])
					}
				}
				sum /= float64(hi - a*x.Tile)
				if got := float64(x.Cells[a*x.Size+b]); math.Abs(got-sum) > 1e-3*sum+1e-7 {
					t.Errorf("sample %d map %d:%d cell %d,%d is %g, want %g", id, x.Layer, x.Head, a, b, got, sum)
				}
			}
		}
	}
	for _, x := range exact {
		if x.Size != n || x.Tile != 1 {
			t.Fatalf("exact map of %d x %d", x.Size, x.Tile)
		}
		for i := range n {
			for j := range n {
				if got, want := x.Cells[i*n+j], maps[x.Layer][x.Head][i*all+j]; got != want {
					t.Errorf("sample %d exact map %d:%d at %d,%d is %g, want %g", id, x.Layer, x.Head, i, j, got, want)
				}
			}
		}
	}
}

// folder reads all files of a record.
func folder(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		out[rel], err = os.ReadFile(path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func sameFolder(t *testing.T, what, got, want string) {
	t.Helper()
	a, b := folder(t, got), folder(t, want)
	for name := range b {
		if !bytes.Equal(a[name], b[name]) {
			t.Errorf("%s: %s differs", what, name)
		}
	}
	for name := range a {
		if _, ok := b[name]; !ok {
			t.Errorf("%s: %s is left over", what, name)
		}
	}
}

// Stopped after any step, damaged or taken up in batches: the same bytes.
func TestResume(t *testing.T) {
	m, d := testModel(t), testDataset()
	whole := testOptions(t.TempDir())
	steps := 0
	if err := Run(t.Context(), m, d, testClasses{}, whole, func(Progress) { steps++ }); err != nil {
		t.Fatal(err)
	}
	if want := 1 + 4*(m.Config.Layers+1); steps != want {
		t.Fatalf("%d reports of progress, want %d", steps, want)
	}
	for stop := 1; stop <= steps; stop += 3 {
		o := testOptions(t.TempDir())
		ctx, cancel := context.WithCancel(t.Context())
		n := 0
		err := Run(ctx, m, d, testClasses{}, o, func(Progress) {
			if n++; n == stop {
				cancel()
			}
		})
		cancel()
		if stop < steps-1 && !errors.Is(err, context.Canceled) {
			t.Fatalf("stopped at %d: %v", stop, err)
		}
		if left, _ := filepath.Glob(filepath.Join(o.Dir, "*", ".*")); left != nil {
			t.Errorf("stopped at %d: %v are left", stop, left)
		}
		// What a killed process would leave.
		if err := os.WriteFile(filepath.Join(o.Dir, "heads", ".part-00001.parquet"+tempMark+"123"), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		mustRun(t, m, d, o)
		sameFolder(t, fmt.Sprintf("stopped at %d", stop), o.Dir, whole.Dir)
	}

	o := testOptions(t.TempDir())
	o.Batch = 3
	mustRun(t, m, d, o)
	sameFolder(t, "in batches", o.Dir, whole.Dir)

	for _, damage := range []func(path string) error{
		os.Remove,
		func(path string) error { return os.Truncate(path, 100) },
		func(path string) error { return os.WriteFile(path, nil, 0o644) },
		func(path string) error { return os.WriteFile(path, []byte("PAR1 no Parquet PAR1"), 0o644) },
	} {
		for _, name := range []string{"samples/part-00000.parquet", "heads/part-00001.parquet", "columns/part-00002.parquet", "maps/part-00000.parquet"} {
			if err := damage(filepath.Join(o.Dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		mustRun(t, m, d, o)
		sameFolder(t, "damaged", o.Dir, whole.Dir)
	}

	// Nothing is done again.
	n := 0
	if err := Run(t.Context(), m, d, testClasses{}, o, func(Progress) { n++ }); err != nil || n != 1 {
		t.Errorf("a finished record takes %d steps, %v", n, err)
	}
}

func TestMismatch(t *testing.T) {
	m, d := testModel(t), testDataset()
	o := testOptions(t.TempDir())
	mustRun(t, m, d, o)
	before := folder(t, o.Dir)
	other := testDataset()
	other.Samples[0].Tokens[5]++
	other.Meta.ContentHash = datasets.HashSamples(other.Samples)
	cfg := enginetest.Tiny()
	single, err := engine.New(cfg, enginetest.Weights{Config: cfg, Seed: 7}, ref.New[float32]())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what  string
		m     *engine.Model
		d     *datasets.Dataset
		alter func(*Options)
	}{
		{"model.sha256.weights", m, d, func(o *Options) { o.SHA256 = map[string]string{"weights": "x", "config": "c"} }},
		{"model.sha256.config", m, d, func(o *Options) { o.SHA256 = map[string]string{"weights": "w"} }},
		{"model.name", m, d, func(o *Options) { o.ModelName = "other" }},
		{"tool", m, d, func(o *Options) { o.Tool = "v2" }},
		{"grid.windows", m, d, func(o *Options) { o.Grid.Windows = []int{8} }},
		{"grid.local_ratios", m, d, func(o *Options) { o.Grid.LocalRatios = []float64{.1} }},
		{"grid.map_samples", m, d, func(o *Options) { o.Grid.MapSamples = NoMaps }},
		{"dataset.hash", m, other, func(*Options) {}},
		{"engine", single, d, func(*Options) {}},
	} {
		p := o
		c.alter(&p)
		err := Run(t.Context(), c.m, c.d, testClasses{}, p, nil)
		var mismatch *MismatchError
		if !errors.As(err, &mismatch) || mismatch.What != c.what {
			t.Errorf("%s: %v", c.what, err)
		}
	}
	if after := folder(t, o.Dir); !reflect.DeepEqual(before, after) {
		t.Error("a refused run changed the record")
	}
}

// badWeights puts a NaN into one tensor.
type badWeights struct {
	enginetest.Weights
	name string
}

func (w badWeights) Matrix(name string) (engine.Matrix, error) {
	x, err := w.Weights.Matrix(name)
	if name == w.name {
		copy(x.Data, []byte{0, 0, 0xc0, 0x7f})
	}
	return x, err
}

func TestNonFinite(t *testing.T) {
	cfg := enginetest.Tiny()
	m, err := engine.New(cfg, badWeights{enginetest.Weights{Config: cfg, Seed: 7}, "model.layers.1.mlp.down_proj.weight"}, ref.New[float32]())
	if err != nil {
		t.Fatal(err)
	}
	d := testDataset()
	for _, batch := range []int{1, 4} {
		o := testOptions(t.TempDir())
		o.Batch = batch
		err := Run(t.Context(), m, d, testClasses{}, o, nil)
		var bad *NonFiniteError
		if !errors.As(err, &bad) || bad.Layer != 1 || bad.Sample != 0 || !strings.Contains(err.Error(), "sample 0: the output of layer 1") {
			t.Errorf("%v", err)
		}
		if files := folder(t, o.Dir); len(files) != 0 {
			t.Errorf("%d files are left", len(files))
		}
	}
}

func TestBadOptions(t *testing.T) {
	m, d := testModel(t), testDataset()
	for name, alter := range map[string]func(*Options, *datasets.Dataset){
		"no folder":     func(o *Options, _ *datasets.Dataset) { o.Dir = "" },
		"no samples":    func(_ *Options, d *datasets.Dataset) { d.Samples = nil },
		"ratio 1":       func(o *Options, _ *datasets.Dataset) { o.Grid.LocalRatios = []float64{1} },
		"ratio NaN":     func(o *Options, _ *datasets.Dataset) { o.Grid.LocalRatios = []float64{math.NaN()} },
		"masses twice":  func(o *Options, _ *datasets.Dataset) { o.Grid.Masses = []float64{.5, .5} },
		"window 0":      func(o *Options, _ *datasets.Dataset) { o.Grid.Windows = []int{0} },
		"no sinks":      func(o *Options, _ *datasets.Dataset) { o.Grid.Sinks = []int{} },
		"head":          func(o *Options, _ *datasets.Dataset) { o.Grid.ExactHeads = []Head{{3, 0}} },
		"exact sample":  func(o *Options, _ *datasets.Dataset) { o.Grid.ExactSamples = []int{4} },
		"map size":      func(o *Options, _ *datasets.Dataset) { o.Grid.MapSize = 1 << 20 },
		"negative maps": func(o *Options, _ *datasets.Dataset) { o.Grid.MapSamples = -2 },
	} {
		o, e := testOptions(t.TempDir()), *d
		alter(&o, &e)
		err := Run(t.Context(), m, &e, testClasses{}, o, nil)
		var bad *OptionError
		if !errors.As(err, &bad) {
			t.Errorf("%s: %v", name, err)
		}
	}
	e := *d
	e.Meta.ContentHash = "0"
	var hash *datasets.HashError
	if err := Run(t.Context(), m, &e, testClasses{}, testOptions(t.TempDir()), nil); !errors.As(err, &hash) {
		t.Errorf("changed dataset: %v", err)
	}
}

func TestOpenRefuses(t *testing.T) {
	m, d := testModel(t), testDataset()
	o := testOptions(t.TempDir())
	mustRun(t, m, d, o)
	other := testOptions(t.TempDir())
	other.SHA256 = map[string]string{"weights": "x", "config": "c"}
	mustRun(t, m, d, other)
	move := func(from, to string) func(dir string) error {
		return func(dir string) error {
			b, err := os.ReadFile(filepath.Join(other.Dir, from))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, to), b, 0o644)
		}
	}
	var part *PartError
	var incomplete *IncompleteError
	var mismatch *MismatchError
	for _, c := range []struct {
		name   string
		target any
		damage func(dir string) error
	}{
		{"truncated", &part, func(dir string) error { return os.Truncate(filepath.Join(dir, "heads/part-00001.parquet"), 1000) }},
		{"empty", &part, func(dir string) error { return os.Truncate(filepath.Join(dir, "samples/part-00001.parquet"), 0) }},
		{"text", &part, func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "columns/part-00000.parquet"), []byte("hello"), 0o644)
		}},
		{"no heads", &incomplete, func(dir string) error { return os.Remove(filepath.Join(dir, "heads/part-00002.parquet")) }},
		{"no maps", &incomplete, func(dir string) error { return os.Remove(filepath.Join(dir, "maps/part-00000.parquet")) }},
		{"nothing", &incomplete, func(dir string) error {
			return errors.Join(os.RemoveAll(filepath.Join(dir, "samples")), os.Mkdir(filepath.Join(dir, "samples"), 0o777),
				os.RemoveAll(filepath.Join(dir, "heads")), os.RemoveAll(filepath.Join(dir, "columns")), os.RemoveAll(filepath.Join(dir, "maps")))
		}},
		{"mixed", &mismatch, move("heads/part-00002.parquet", "heads/part-00002.parquet")},
		{"wrong table", &part, func(dir string) error {
			return os.Rename(filepath.Join(dir, "heads/part-00002.parquet"), filepath.Join(dir, "columns/part-x.parquet"))
		}},
		{"twice", &part, func(dir string) error {
			b, err := os.ReadFile(filepath.Join(dir, "heads/part-00002.parquet"))
			return errors.Join(err, os.WriteFile(filepath.Join(dir, "heads/again.parquet"), b, 0o644))
		}},
	} {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(o.Dir)); err != nil {
			t.Fatal(err)
		}
		if err := c.damage(dir); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir); !errors.As(err, c.target) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if _, err := Open(t.TempDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no record: %v", err)
	}
	rec, err := Open(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rec.Heads(4); err == nil {
		t.Error("heads of a sample that is not there")
	}
	if _, err := rec.Columns(0, 3); err == nil {
		t.Error("columns of a layer that is not there")
	}
}

// Damaged anywhere, a part is refused or reads the same: pages have checksums. Nothing panics.
func TestFlippedBytes(t *testing.T) {
	m, d := testModel(t), testDataset()
	o := testOptions(t.TempDir())
	mustRun(t, m, d, o)
	good, err := Open(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	wantHeads, _ := good.Heads(0)
	wantColumns, _ := good.Columns(0, 1)
	r := rand.New(rand.NewPCG(1, 2))
	refused := 0
	for _, name := range []string{"heads/part-00000.parquet", "columns/part-00000.parquet", "samples/part-00000.parquet", "maps/part-00000.parquet"} {
		path := filepath.Join(o.Dir, name)
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for range 60 {
			bad := slices.Clone(whole)
			bad[r.IntN(len(bad))] ^= 1 << r.IntN(8)
			if err := os.WriteFile(path, bad, 0o644); err != nil {
				t.Fatal(err)
			}
			rec, err := Open(o.Dir)
			if err != nil {
				refused++
				continue
			}
			heads, err1 := rec.Heads(0)
			columns, err2 := rec.Columns(0, 1)
			_, err3 := rec.Maps(0)
			if errors.Join(err1, err2, err3) != nil {
				refused++
				continue
			}
			if !reflect.DeepEqual(heads, wantHeads) || !reflect.DeepEqual(columns, wantColumns) {
				t.Errorf("%s reads otherwise after damage", name)
			}
		}
		if err := os.WriteFile(path, whole, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if refused < 100 {
		t.Errorf("%d of 240 damaged parts were refused", refused)
	}
}

func TestDigest(t *testing.T) {
	m, d := testModel(t), testDataset()
	digest := func(dir string) string {
		rec, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		s, err := rec.Digest()
		if err != nil || len(s) != 64 {
			t.Fatal(s, err)
		}
		return s
	}
	o := testOptions(t.TempDir())
	mustRun(t, m, d, o)
	first := digest(o.Dir)
	// Other names in another order.
	for i, table := range []string{"samples", "heads", "columns"} {
		for id := range 4 {
			if err := os.Rename(partName(o.Dir, table, id), filepath.Join(o.Dir, table, fmt.Sprintf("p%d-%d.parquet", i, 9-id))); err != nil {
				t.Fatal(err)
			}
		}
	}
	if digest(o.Dir) != first {
		t.Error("the digest depends on the names of parts")
	}
	cfg := enginetest.Tiny()
	m2, err := engine.New(cfg, enginetest.Weights{Config: cfg, Seed: 8}, ref.New[float64]())
	if err != nil {
		t.Fatal(err)
	}
	p := testOptions(t.TempDir())
	mustRun(t, m2, d, p)
	if digest(p.Dir) == first {
		t.Error("other attention has the same digest")
	}
}

func TestEstimate(t *testing.T) {
	m, d := testModel(t), testDataset()
	o := testOptions(t.TempDir())
	mustRun(t, m, d, o)
	var sizes []Size
	for i := range d.Samples {
		s := &d.Samples[i]
		sizes = append(sizes, Size{len(s.Tokens), s.PromptLen(), len(s.AnswerRows())})
	}
	got, err := Estimate(m.Config, o.Grid, sizes)
	if err != nil {
		t.Fatal(err)
	}
	// The lists of the columns table, counted by hand: 12 query heads, 2 + 3 + 2 lists of prompt rows, 2 of their first halves, and answers.
	var want int64
	for _, s := range sizes {
		want += 12 * int64(12+4*(7*s.Prompt+2*(s.Prompt/2)))
		if s.Answers > 0 {
			want += 12 * 4 * int64(s.Tokens)
		}
	}
	if got.Columns != want || got.Total() <= got.Columns {
		t.Errorf("estimate %+v, want columns of %d", got, want)
	}
	// SmolLM2 at 2,048 tokens: 30 layers of 9 query heads.
	smol, err := Estimate(engine.Config{Layers: 30, Heads: 9, KVHeads: 3}, Grid{MapSamples: NoMaps}, []Size{{2048, 2000, 40}})
	if err != nil {
		t.Fatal(err)
	}
	if mb := float64(smol.Columns) / 1e6; mb < 16 || mb > 17 {
		t.Errorf("SmolLM2 at 2,048 tokens: %.1f MB", mb)
	}
	if _, err := Estimate(m.Config, Grid{}, []Size{{4, 5, 0}}); err == nil {
		t.Error("a prompt longer than its sample")
	}
}

func TestTokens(t *testing.T) {
	for _, c := range []struct {
		ratio float64
		n     int
		want  int
	}{{.3, 10, 3}, {.07, 100, 7}, {.3, 11, 4}, {.1, 30, 3}, {.29, 100, 29}, {.3, 1, 1}, {0, 5, 0}, {1, 7, 7}, {.7, 10, 7}} {
		if got := Tokens(c.ratio, c.n); got != c.want {
			t.Errorf("Tokens(%g, %d) = %d, want %d", c.ratio, c.n, got, c.want)
		}
	}
}

// The reader of safetensors and GGUF is the reference for 16-bit floats.
func TestHalfFloats(t *testing.T) {
	decode := func(h uint16) float32 {
		var out [1]float32
		dtype.F16.Decode(out[:], []byte{byte(h), byte(h >> 8)})
		return out[0]
	}
	for h := range 1 << 16 {
		if h>>10&31 == 31 {
			continue
		}
		x := decode(uint16(h))
		if got := fromHalf(uint16(h)); math.Float32bits(got) != math.Float32bits(x) {
			t.Fatalf("%#04x reads as %g, want %g", h, got, x)
		}
		if got := toHalf(x); got != uint16(h) {
			t.Fatalf("%g writes as %#04x, want %#04x", x, got, h)
		}
	}
	// Between two neighbours the nearer one, in the middle the even one.
	for h := uint16(0); h < 0x7bff; h++ {
		a, b := float64(decode(h)), float64(decode(h+1))
		mid := float32((a + b) / 2)
		want := h + h&1
		if got := toHalf(mid); got != want {
			t.Fatalf("%g writes as %#04x, want %#04x", mid, got, want)
		}
		if got := toHalf(math.Nextafter32(mid, 0)); got != h {
			t.Fatalf("below %g writes as %#04x, want %#04x", mid, got, h)
		}
		if got := toHalf(math.Nextafter32(mid, 1e9)); got != h+1 {
			t.Fatalf("above %g writes as %#04x, want %#04x", mid, got, h+1)
		}
	}
}

// Lists longer than a page.
func TestLongLists(t *testing.T) {
	dir := t.TempDir()
	g := DefaultGrid()
	table := columnsTable(g)
	if err := os.Mkdir(filepath.Join(dir, table.name), 0o777); err != nil {
		t.Fatal(err)
	}
	const n = 300_000
	meta := Meta{Format: formatName, Version: formatVersion, Model: Model{Layers: 1, Heads: 3, KVHeads: 1}, Grid: g, Dataset: Dataset{Samples: 1}}
	w, err := newPart(dir, table, meta, 0)
	if err != nil {
		t.Fatal(err)
	}
	lists := make([][]float32, 3)
	r := rand.New(rand.NewPCG(1, 1))
	for h := range lists {
		lists[h] = make([]float32, n)
		for i := range lists[h] {
			lists[h][i] = r.Float32()
		}
		row := []any{int32(0), int32(0), int32(h)}
		for range 7 {
			row = append(row, lists[h])
		}
		if err := w.add(append(row, []float32(nil))...); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.finish(), w.commit()); err != nil {
		t.Fatal(err)
	}
	p, err := openPart(partName(dir, table.name, 0))
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	for _, name := range []string{"total", "half", "window_64"} {
		v, lengths, err := readColumn[float32](p, 0, name)
		if err != nil || !slices.Equal(lengths, []int{n, n, n}) {
			t.Fatal(lengths, err)
		}
		for h := range lists {
			if !slices.Equal(v[h*n:(h+1)*n], lists[h]) {
				t.Errorf("%s of head %d differs", name, h)
			}
		}
	}
	if v, lengths, err := readColumn[float32](p, 0, "answer"); err != nil || len(v) != 0 || !slices.Equal(lengths, []int{0, 0, 0}) {
		t.Error(len(v), lengths, err)
	}
}
