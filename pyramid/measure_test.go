package pyramid

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/profile"
)

// made is a record of two samples, three layers and two KV heads of two query heads. Layer 0 attends to one token,
// layer 2 evenly to all, layer 1 to half of them.
type made struct{ meta profile.Meta }

func newMade() *made {
	return &made{profile.Meta{Model: profile.Model{Layers: 3, Heads: 4, KVHeads: 2},
		Grid: profile.Grid{Masses: []float64{.9, .99}, Windows: []int{8, 32}}}}
}

func (m *made) Meta() profile.Meta { return m.meta }
func (m *made) Samples() []profile.Sample {
	return []profile.Sample{{ID: 0, Prompt: 8}, {ID: 1, Prompt: 16}}
}
func (m *made) Digest() (string, error) { return strings.Repeat("d", 64), nil }

func (m *made) Heads(sample int) ([]profile.HeadStats, error) {
	var out []profile.HeadStats
	for l := range 3 {
		for h := range 4 {
			out = append(out, profile.HeadStats{Layer: l, Head: h, KVHead: h / 2, ValueNormMax: 2,
				Keys: []float64{float64(10*l + h + sample), 100}, Entropy: float64(l), Variance: .25})
		}
	}
	return out, nil
}

func (m *made) Columns(sample, layer int) ([]profile.Columns, error) {
	n := 8 << sample
	out := make([]profile.Columns, 4)
	for h := range out {
		w := make([]float32, n)
		for j := range w[:[]int{1, n / 2, n}[layer]] {
			w[j] = .5
		}
		out[h] = profile.Columns{Total: w, Window: [][]float32{nil, w}}
	}
	return out, nil
}

func TestMeasure(t *testing.T) {
	m, err := Measure(t.Context(), newMade(), MeasureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	near := func(what string, got []float64, want ...float64) {
		t.Helper()
		for l := range want {
			if len(got) != len(want) || math.Abs(got[l]-want[l]) > 1e-12 {
				t.Errorf("%s: %v, want %v", what, got, want)
			}
		}
	}
	near("keys", m.Keys, 2, 12, 22)         // mean of 0..3, over samples + .5
	near("variation", m.Variation, 0, 4, 8) // (4 heads * l) * (4 * .25)
	even := func(of, n float64) float64 { return math.Log(of) / math.Log(n) }
	near("entropy", m.Entropy, (even(2, 16)+even(2, 32))/2, (even(8, 16)+even(16, 32))/2, 1)

	warm, err := Measure(t.Context(), newMade(), MeasureOptions{Mass: .99, Tau1: 2, Tau2: .5})
	if err != nil {
		t.Fatal(err)
	}
	near("keys", warm.Keys, 100, 100, 100)
	near("variation", warm.Variation, 0, 2, math.Sqrt(8))
	for _, o := range []MeasureOptions{{Mass: .5}, {Window: 64}, {Tau1: -1}, {Tau2: math.NaN()}} {
		var bad *RequestError
		if _, err := Measure(t.Context(), newMade(), o); !errors.As(err, &bad) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Measure(ctx, newMade(), MeasureOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestArtefact(t *testing.T) {
	rec := newMade()
	rec.meta.Model.SlidingWindow = []int{0, 40, 0}
	a, err := Build(t.Context(), rec, "v1", MeasureOptions{}, Request{Mode: Keys, Length: 100, Total: 120, Floor: NoFloor, Window: NoWindow})
	if err != nil {
		t.Fatal(err)
	}
	// By weights 2, 12, 22 of 36: 6.67, 40, 73.33 of 120.
	if want := []int{7, 40, 73}; !reflect.DeepEqual(a.Budgets, want) || a.Total() != 120 {
		t.Errorf("%v, want %v", a.Budgets, want)
	}
	other, err := a.Divide(Request{Mode: Arithmetic, Length: 100, Total: 90})
	if err != nil || other.Total() != 90 || other.Budgets[0] <= other.Budgets[2] {
		t.Errorf("%v, %v", other, err)
	}
	short, err := Build(t.Context(), rec, "v1", MeasureOptions{}, Request{Mode: Entropy, Total: 30})
	if err != nil || short.Request.Length != 16 {
		t.Errorf("length %d, %v", short.Request.Length, err)
	}

	path := filepath.Join(t.TempDir(), "pyramid.json")
	if err := a.Save(path); err != nil {
		t.Fatal(err)
	}
	back, err := Load(path)
	if err != nil || !reflect.DeepEqual(back, a) {
		t.Fatalf("reads back otherwise: %v\n%+v\n%+v", err, back, a)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range [][2]string{
		{`"version": 1`, `"version": 9`},
		{`"kvprofile.pyramid"`, `"kvprofile.fastgen"`},
		{`"budgets"`, `"budget"`},
		{`"total": 120`, `"total": 121`},
		{`"layers": 3`, `"layers": 2`},
		{`"keys": [`, `"keys": [1,`},
		{`    7,`, `    8,`},
		{`"mode": "measured-keys"`, `"mode": "arithmetic"`},
		{"}\n", ""},
	} {
		bad := strings.Replace(string(text), c[0], c[1], 1)
		if bad == string(text) {
			t.Fatalf("no %s in the file", c[0])
		}
		if err := os.WriteFile(path, []byte(bad), 0o644); err != nil {
			t.Fatal(err)
		}
		var format *FormatError
		if _, err := Load(path); !errors.As(err, &format) {
			t.Errorf("%s for %s: %v", c[1], c[0], err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	a, err := Build(f.Context(), newMade(), "v", MeasureOptions{}, Request{Mode: Keys, Total: 30})
	if err != nil {
		f.Fatal(err)
	}
	path := filepath.Join(f.TempDir(), "x.json")
	if err := a.Save(path); err != nil {
		f.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(text))
	f.Add(`{"format":"kvprofile.pyramid","version":1}`)
	f.Add(`{"format":"kvprofile.pyramid","version":1,"model":{"layers":1},"measurement":{"keys":[1],"variation":[0],"entropy":[0]},"request":{"mode":"uniform","layers":1,"length":1,"total":1},"budgets":[1]}`)
	f.Fuzz(func(t *testing.T, s string) {
		a, err := decode(strings.NewReader(s))
		if err == nil && len(a.Budgets) != a.Model.Layers {
			t.Errorf("%d budgets for %d layers", len(a.Budgets), a.Model.Layers)
		}
	})
}
