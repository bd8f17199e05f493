package distill

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/devices"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// fixture is what scripts/fixtures_distill.py computed with PyTorch in float64.
type fixture struct {
	Config struct {
		Layers, Heads, Hidden, Intermediate, Vocab int
		KVHeads                                    int `json:"kv_heads"`
		HeadDim                                    int `json:"head_dim"`
		Theta, Eps                                 float64
		Bias, Norm                                 bool
	}
	Sink, Recent int
	Samples      []struct {
		Tokens        []int32
		FirstLabelled int `json:"first_labelled"`
	}
	Gates    [][]float64
	AtRandom []struct {
		Loss     float64
		Gradient [][]float64
	} `json:"at_random"`
	Training struct {
		Steps                int
		Peak, Regularisation float64
		Order                []int
		Losses               []float64
		Gates                [][]float64
	}
	DataLight [][]float64 `json:"data_light"`

	tensors map[string]engine.Matrix
}

var fixtures = []string{"llama", "qwen"}

func loadFixture(t testing.TB, name string) *fixture {
	t.Helper()
	read := func(file string) []byte {
		data, err := os.ReadFile(filepath.Join("testdata", file))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	f := &fixture{tensors: map[string]engine.Matrix{}}
	if err := json.Unmarshal(read(name+".json"), f); err != nil {
		t.Fatal(err)
	}
	data := read(name + ".f32")
	// In order of the file: the numbers of all tensors stand one after another.
	d := json.NewDecoder(strings.NewReader(string(read(name + ".tensors.json"))))
	if _, err := d.Token(); err != nil {
		t.Fatal(err)
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			t.Fatal(err)
		}
		var shape []int
		if err := d.Decode(&shape); err != nil {
			t.Fatal(err)
		}
		m := engine.Matrix{Name: key.(string), Rows: 1, Cols: shape[len(shape)-1], DType: dtype.F32}
		if len(shape) == 2 {
			m.Rows = shape[0]
		}
		n := 4 * m.Rows * m.Cols
		m.Data, data = data[:n], data[n:]
		f.tensors[m.Name] = m
	}
	if len(data) != 0 {
		t.Fatalf("%d bytes of %s.f32 belong to no tensor", len(data), name)
	}
	return f
}

// Matrix implements engine.Weights.
func (f *fixture) Matrix(name string) (engine.Matrix, error) {
	m, ok := f.tensors[name]
	if !ok {
		return m, fmt.Errorf("no tensor %s", name)
	}
	return m, nil
}

func (f *fixture) model(t testing.TB, b engine.Backend) *engine.Model {
	t.Helper()
	c := f.Config
	m, err := engine.New(engine.Config{Architecture: "llama", Layers: c.Layers, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Hidden: c.Hidden, Intermediate: c.Intermediate, Vocab: c.Vocab, MaxPosition: 512, NormEps: c.Eps, RoPE: engine.RoPE{Theta: c.Theta},
		TiedEmbeddings: true, QKVBias: c.Bias, QKNorm: c.Norm}, f, b)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// dataset labels the samples: haystack, a needle, and from first_labelled on a question and its answer.
func (f *fixture) dataset() *datasets.Dataset {
	ds := &datasets.Dataset{}
	for i, s := range f.Samples {
		n := len(s.Tokens)
		ds.Samples = append(ds.Samples, datasets.Sample{ID: i, Task: datasets.TaskPasskeys, Tokens: s.Tokens, TargetTokens: n,
			Spans: []datasets.Span{{Kind: datasets.SpanSink, Start: 0, End: 1}, {Kind: datasets.SpanHaystack, Start: 1, End: 10},
				{Kind: datasets.SpanNeedle, Start: 10, End: 15}, {Kind: datasets.SpanHaystack, Index: 1, Start: 15, End: s.FirstLabelled},
				{Kind: datasets.SpanQuestion, Start: s.FirstLabelled, End: n - 4}, {Kind: datasets.SpanAnswer, Start: n - 4, End: n}},
			Depths: []float64{0.5}, AskedDepths: []float64{0.5}, Expected: []string{"x"}})
	}
	ds.Meta.ContentHash = datasets.HashSamples(ds.Samples)
	return ds
}

// options are those of the fixture's training, for a run of so many steps.
func (f *fixture) options(steps int) Options {
	return Options{Recipe: "fixture", Steps: steps, LearningRate: f.Training.Peak, Regularisation: f.Training.Regularisation, InitialGate: 1,
		Sink: f.Sink, Recent: f.Recent, Seed: 7, AllowLowRate: true, StashLimit: 1 << 40, TeacherLimit: 1 << 40, Model: "fixture"}
}

// worst is the largest difference of two matrices, relative to the largest entry of b.
func worst(t testing.TB, a, b [][]float64) float64 {
	t.Helper()
	if err := sameShape(a, b); err != nil {
		t.Fatal(err)
	}
	var diff, scale float64
	for l := range b {
		for k := range b[l] {
			diff = math.Max(diff, math.Abs(a[l][k]-b[l][k]))
			scale = math.Max(scale, math.Abs(b[l][k]))
		}
	}
	return diff / scale
}

// Loss and gradient at random gates equal PyTorch's autograd, with activations kept and computed again.
func TestGradientEqualsAutograd(t *testing.T) {
	for _, name := range fixtures {
		f := loadFixture(t, name)
		m := f.model(t, ref.New[float64]())
		ds := f.dataset()
		for _, stash := range []int64{0, 1 << 40} {
			opt := f.options(1)
			opt.StashLimit = stash
			opt.TeacherLimit = 0
			loss := newStudentLoss(devices.Of(m), ds, opt, []int{0, 1, 2})
			var flat []float64
			for _, g := range f.Gates {
				flat = append(flat, g...)
			}
			for i, want := range f.AtRandom {
				loss.step = i
				got, err := loss.forward(context.Background(), flat)
				if err != nil {
					t.Fatal(err)
				}
				grad, err := loss.vjp(context.Background(), flat, 1)
				if err != nil {
					t.Fatal(err)
				}
				dl, dg := math.Abs(got/want.Loss-1), worst(t, square(grad, f.Config.KVHeads), want.Gradient)
				t.Logf("%s, sample %d: loss %.6g off by %.1e, gradient by %.1e", name, i, got, dl, dg)
				if dl > 1e-9 || dg > 1e-9 {
					t.Errorf("%s, sample %d: loss is off by %g, gradient by %g", name, i, dl, dg)
				}
			}
		}
	}
}

// The gates after 50 steps of the whole recipe equal those of torch.optim.Adam with schedule, regularisation and clamp.
func TestTrainingEqualsPyTorch(t *testing.T) {
	for _, name := range fixtures {
		f := loadFixture(t, name)
		tr, err := newTrainer(devices.Of(f.model(t, ref.New[float64]())), f.dataset(), f.options(f.Training.Steps), f.Training.Order)
		if err != nil {
			t.Fatal(err)
		}
		defer tr.close()
		g, err := tr.train(context.Background(), nil)
		if err != nil {
			t.Fatal(err)
		}
		d := worst(t, g.Values, f.Training.Gates)
		var dl float64
		for i, p := range g.Curve {
			dl = math.Max(dl, math.Abs(p.Loss-f.Training.Losses[i])/f.Training.Losses[10])
		}
		t.Logf("%s: gates off by %.1e, losses by %.1e", name, d, dl)
		if d > 1e-6 || dl > 1e-6 {
			t.Errorf("%s: gates are off by %g, losses by %g", name, d, dl)
		}
	}
}

func TestDataLightEqualsPyTorch(t *testing.T) {
	for _, name := range fixtures {
		f := loadFixture(t, name)
		var texts [][]int32
		for _, s := range f.Samples {
			texts = append(texts, s.Tokens)
		}
		s, err := DataLight(context.Background(), f.model(t, ref.New[float64]()), texts)
		if err != nil {
			t.Fatal(err)
		}
		// The script rotates by angles rounded to float32, DataLight by exact ones.
		if d := worst(t, s.Values, f.DataLight); d > 1e-4 {
			t.Errorf("%s: scores are off by %g", name, d)
		} else {
			t.Logf("%s: scores off by %.1e", name, d)
		}
	}
}
