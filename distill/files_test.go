package distill

import (
	"errors"
	"io/fs"
	"math"
	mathrand "math/rand"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/quick"
)

func randomGates(seed uint64) *Gates {
	r := rand.New(rand.NewPCG(seed, 9))
	m := func() [][]float64 {
		out := make([][]float64, 5)
		for l := range out {
			for range 3 {
				out[l] = append(out[l], r.Float64())
			}
		}
		return out
	}
	return &Gates{Values: m(), Meta: Meta{Model: "m", Dataset: "d", Sink: 128, Recent: 256},
		Scores: []Score{{Name: ScoreDataLight, Values: m()}, {Name: ScoreCopy, Values: m()}},
		Curve:  []CurvePoint{{Step: 0, Sample: 3, Others: []int{0, 12}, Tokens: 9, Loss: 0.1, Regularisation: 1e-300, Rate: 0.02, Mean: 1.0 / 3, Open: 2}}}
}

func TestGatesRoundTrip(t *testing.T) {
	g := randomGates(1)
	opt, err := RecipeNamed("cpu")
	if err != nil {
		t.Fatal(err)
	}
	g.Meta.Options = &Options{Recipe: "cpu", Steps: opt.Options.Steps, LearningRate: 0.02}
	if err := g.Agree(1); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := g.Save(dir); err != nil {
		t.Fatal(err)
	}
	back, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(g, back) {
		t.Errorf("read back\n%+v, saved\n%+v", back, g)
	}
	duo, im, err := LoadDuo(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(duo.Values, g.Values) || im.Clamped != 0 || len(im.Ties) != 0 {
		t.Errorf("the TSV gives %v, %+v", duo.Values, im)
	}
	if duo.Meta.Sink != 128 || duo.Meta.Recent != 256 {
		t.Errorf("the TSV's config gives sink %d, recent %d", duo.Meta.Sink, duo.Meta.Recent)
	}
	if !reflect.DeepEqual(files(t, g), files(t, back)) {
		t.Error("saving what was read gives other bytes")
	}
}

func TestGatesRefused(t *testing.T) {
	for name, change := range map[string]func(*Gates){
		"none":     func(g *Gates) { g.Values = nil },
		"ragged":   func(g *Gates) { g.Values[2] = g.Values[2][:1] },
		"range":    func(g *Gates) { g.Values[1][1] = 1.01 },
		"nan":      func(g *Gates) { g.Values[1][1] = math.NaN() },
		"score":    func(g *Gates) { g.Scores[0].Values = g.Scores[0].Values[1:] },
		"infinite": func(g *Gates) { g.Scores[0].Values[0][0] = math.Inf(1) },
		"name":     func(g *Gates) { g.Scores[0].Name = "gate" },
		"twice":    func(g *Gates) { g.Scores[1].Name = g.Scores[0].Name },
	} {
		g := randomGates(2)
		change(g)
		if err := g.Save(t.TempDir()); err == nil {
			t.Errorf("%s: saved", name)
		}
	}
	if _, err := Load(t.TempDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an empty folder: %v", err)
	}
	dir := t.TempDir()
	if err := randomGates(2).Save(dir); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{CurveFile, GatesFile} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte("step\n1"), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("damaged %s: %v", file, err)
		}
	}
}

// The authors' published files, read as they are. The figures were counted from the files with another program.
func TestPublishedPatterns(t *testing.T) {
	for name, want := range map[string]struct {
		open          float64 // share of gates > .5
		ones, clamped int
		lowest        float64
	}{
		"Meta-Llama-3.1-8B-Instruct": {0.9140625, 57, 0, 0},
		"Mistral-7B-Instruct-v0.2":   {0.953125, 110, 5, -0.00011968612670898438},
	} {
		dir := filepath.Join("testdata", "duo", name)
		g, im, err := LoadDuo(dir)
		if err != nil {
			t.Fatal(err)
		}
		if len(g.Values) != 32 || len(g.Values[0]) != 8 || g.Meta.Sink != 128 || g.Meta.Recent != 256 || !strings.Contains(g.Meta.Source, name) {
			t.Errorf("%s: %d x %d, %+v", name, len(g.Values), len(g.Values[0]), g.Meta)
		}
		open := 0
		for _, vs := range g.Values {
			for _, v := range vs {
				if v > 0.5 {
					open++
				}
			}
		}
		if float64(open)/256 != want.open {
			t.Errorf("%s: share of gates > .5 is %g, want %g", name, float64(open)/256, want.open)
		}
		if im.Clamped != want.clamped || im.Lowest != want.lowest || im.Highest != 1 {
			t.Errorf("%s: %d clamped from [%g, %g]", name, im.Clamped, im.Lowest, im.Highest)
		}
		if len(im.Ties) == 0 || im.Ties[0].Value != 1 || len(im.Ties[0].Heads) != want.ones {
			t.Errorf("%s: most frequent tie %+v, want %d ones", name, im.Ties[0], want.ones)
		}
		if want.clamped > 0 {
			continue
		}
		out := t.TempDir()
		if err := g.SaveDuo(out); err != nil {
			t.Fatal(err)
		}
		a, err := os.ReadFile(filepath.Join(dir, DuoFile))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(out, DuoFile))
		if err != nil {
			t.Fatal(err)
		}
		if string(a) != string(b) {
			t.Errorf("%s: exporting the import gives another file", name)
		}
	}
}

func TestDuoRefused(t *testing.T) {
	for name, c := range map[string][3]string{
		"word":    {"0.5\tx\n", `{"sink_size":4,"recent_size":8}`, "line 1, column 2"},
		"ragged":  {"0.5\t1\n0.5\n", `{"sink_size":4,"recent_size":8}`, "line 2"},
		"nan":     {"0.5\tNaN\n", `{"sink_size":4,"recent_size":8}`, "line 1, column 2"},
		"far out": {"0.5\t-0.2\n", `{"sink_size":4,"recent_size":8}`, "line 1, column 2"},
		"empty":   {"", `{"sink_size":4,"recent_size":8}`, "line 1"},
		"config":  {"0.5\n", `{"sink_size":4}`, "recent_size"},
		"json":    {"0.5\n", `{`, DuoConfigFile},
	} {
		dir := t.TempDir()
		for file, text := range map[string]string{DuoFile: c[0], DuoConfigFile: c[1]} {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := LoadDuo(dir); err == nil || !strings.Contains(err.Error(), c[2]) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzDecodeGates(f *testing.F) {
	for seed := range uint64(2) {
		data, err := randomGates(seed).parquet()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
		f.Add(data[:len(data)/2])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if g, err := decode(data); err == nil {
			if err := g.Check(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func FuzzParseDuo(f *testing.F) {
	f.Add("1.0\t0.5\n-0.01\t0\n")
	f.Add("1e400\n")
	f.Add("\t\n\r\n")
	f.Fuzz(func(t *testing.T, text string) {
		values, err := parseDuo(text)
		if err != nil {
			return
		}
		for _, vs := range values {
			if len(vs) != len(values[0]) {
				t.Fatal("ragged")
			}
			for _, v := range vs {
				if !(v >= -overshoot && v <= 1+overshoot) {
					t.Fatalf("value %g", v)
				}
			}
		}
	})
}

func TestSelection(t *testing.T) {
	v := [][]float64{{0.5, 1, 0.2}, {1, 0.5, 0.5}}
	s, err := Sparsest(v, 0.5)
	if err != nil {
		t.Fatal(err)
	}
	want := Selection{Full: [][]bool{{true, true, false}, {true, false, false}}, Count: 3, Cut: 0.5, Tied: []Head{{0, 0}, {1, 1}, {1, 2}}}
	if !reflect.DeepEqual(s, want) {
		t.Errorf("half of the heads: %+v, want %+v", s, want)
	}
	s = Threshold(v, 0.5)
	want = Selection{Full: [][]bool{{true, true, false}, {true, true, true}}, Count: 5, Cut: 0.5}
	if !reflect.DeepEqual(s, want) {
		t.Errorf("threshold .5: %+v, want %+v", s, want)
	}
	if s, err := Sparsest(v, 1); err != nil || s.Count != 0 {
		t.Errorf("sparsity 1: %+v, %v", s, err)
	}
	for _, bad := range []float64{-0.1, 1.1, math.NaN()} {
		if _, err := Sparsest(v, bad); err == nil {
			t.Errorf("sparsity %g was taken", bad)
		}
	}
	ties := Ties(v)
	if !reflect.DeepEqual(ties, []Tie{{0.5, []Head{{0, 0}, {1, 1}, {1, 2}}}, {1, []Head{{0, 1}, {1, 0}}}}) {
		t.Errorf("ties %+v", ties)
	}
}

// No streaming head has a larger value than a full one; the count is as asked; more sparsity keeps a subset.
func TestSelectionProperties(t *testing.T) {
	property := func(raw [4][5]uint8, a, b uint16) bool {
		values := make([][]float64, 4)
		for l := range raw {
			for _, x := range raw[l] {
				values[l] = append(values[l], float64(x%8)/7) // many ties
			}
		}
		lo, hi := float64(min(a, b))/65535, float64(max(a, b))/65535
		dense, err := Sparsest(values, lo)
		if err != nil {
			return false
		}
		sparse, err := Sparsest(values, hi)
		if err != nil {
			return false
		}
		count, least, most := 0, 2.0, -1.0
		for l := range values {
			for k, v := range values[l] {
				if sparse.Full[l][k] && !dense.Full[l][k] {
					return false
				}
				if dense.Full[l][k] {
					count++
					least = min(least, v)
				} else {
					most = max(most, v)
				}
			}
		}
		return count == dense.Count && count == 20-int(math.Round(lo*20)) && least >= most && (least == most) == (len(dense.Tied) > 0)
	}
	if err := quick.Check(property, &quick.Config{MaxCount: 300, Rand: mathrand.New(mathrand.NewSource(1))}); err != nil {
		t.Error(err)
	}
}

func TestSpearman(t *testing.T) {
	for name, c := range map[string]struct {
		a, b []float64
		want float64
	}{
		// The worked example of Wikipedia's "Spearman's rank correlation coefficient": -29/165.
		"iq": {[]float64{106, 100, 86, 101, 99, 103, 97, 113, 112, 110}, []float64{7, 27, 2, 50, 28, 29, 20, 12, 6, 17}, -29.0 / 165},
		// Ranks (1, 2.5, 2.5, 4) and (1.5, 1.5, 3, 4) by hand: covariance 3.75, variances 4.5 and 4.5.
		"ties":     {[]float64{1, 2, 2, 3}, []float64{0, 0, 5, 9}, 3.75 / 4.5},
		"same":     {[]float64{1, 2, 3}, []float64{10, 20, 1000}, 1},
		"opposite": {[]float64{1, 2, 3}, []float64{3, 2, -8}, -1},
	} {
		if got, ok := spearman(c.a, c.b); !ok || math.Abs(got-c.want) > 1e-12 {
			t.Errorf("%s: %g, want %g", name, got, c.want)
		}
	}
	same := [][]float64{{1, 1, 1}}
	cs, err := Correlate([]Score{{"a", same}, {"b", [][]float64{{1, 2, 3}}}}, 1)
	if err != nil || cs[0].Undefined == "" || cs[0].Rho != 0 {
		t.Errorf("a constant score: %+v, %v", cs, err)
	}
	if _, err := Correlate([]Score{{"a", same}, {"b", [][]float64{{1, 2}}}}, 1); err == nil {
		t.Error("scores of different shapes were compared")
	}
	g := randomGates(4)
	if err := g.Agree(3); err != nil {
		t.Fatal(err)
	}
	first := g.Agreement
	if len(first) != 3 || first[0].A != ScoreGate || first[0].N != 15 {
		t.Errorf("agreement %+v", first)
	}
	for _, c := range first {
		if !(c.Low <= c.Rho && c.Rho <= c.High) || c.Low == c.High {
			t.Errorf("interval [%g, %g] around %g", c.Low, c.High, c.Rho)
		}
	}
	if err := g.Agree(3); err != nil || !reflect.DeepEqual(first, g.Agreement) {
		t.Error("the same seed gives another interval")
	}
}

func TestGroupMean(t *testing.T) {
	s, err := GroupMean("x", [][]float64{{1, 3, 10, 20}}, 2)
	if err != nil || !reflect.DeepEqual(s.Values, [][]float64{{2, 15}}) {
		t.Errorf("%v, %v", s, err)
	}
	if _, err := GroupMean("x", [][]float64{{1, 3, 10}}, 2); err == nil {
		t.Error("3 query heads were shared among 2 KV heads")
	}
}
