package engine_test

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

func newModel(t *testing.T, c engine.Config) *engine.Model {
	t.Helper()
	return enginetest.NewModel(t, c, 3, ref.New[float64]())
}

func logits(t *testing.T, m *engine.Model, s *engine.Sequence) [][]float64 {
	t.Helper()
	if err := m.Forward(context.Background(), s); err != nil {
		t.Fatal(err)
	}
	return s.Logits
}

// farthest is the largest difference of two values.
func farthest(a, b []float64) (d float64) {
	for i := range a {
		d = max(d, math.Abs(a[i]-b[i]))
	}
	return d
}

func TestCacheGivesTheSameLogits(t *testing.T) {
	for name, c := range enginetest.Variants() {
		t.Run(name, func(t *testing.T) {
			m := newModel(t, c)
			tokens := enginetest.Tokens(c, 17, 1)
			rows := make([]int, len(tokens))
			for i := range rows {
				rows[i] = i
			}
			want := logits(t, m, &engine.Sequence{Tokens: tokens, LogitRows: rows})
			cache := m.NewCache(len(tokens))
			defer cache.Free()
			got := logits(t, m, &engine.Sequence{Tokens: tokens[:9], Cache: cache, LogitRows: rows[:9]})
			for i := 9; i < len(tokens); i++ {
				got = append(got, logits(t, m, &engine.Sequence{Tokens: tokens[i : i+1], Cache: cache, LogitRows: []int{0}})...)
			}
			for i := range want {
				if d := farthest(got[i], want[i]); d > 1e-12 {
					t.Fatalf("logits at token %d differ by %g", i, d)
				}
			}
			if err := m.Forward(context.Background(), &engine.Sequence{Tokens: tokens[:1], Cache: cache}); err == nil {
				t.Fatal("a full cache took another token")
			}
		})
	}
}

func TestBatchIsEachSequenceAlone(t *testing.T) {
	m := newModel(t, enginetest.Tiny())
	a := &engine.Sequence{Tokens: enginetest.Tokens(m.Config, 11, 1), LogitRows: []int{10}}
	b := &engine.Sequence{Tokens: enginetest.Tokens(m.Config, 4, 2), LogitRows: []int{0, 3}}
	if err := m.Forward(context.Background(), a, b); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*engine.Sequence{a, b} {
		alone := logits(t, m, &engine.Sequence{Tokens: s.Tokens, LogitRows: s.LogitRows})
		for i := range alone {
			if farthest(alone[i], s.Logits[i]) != 0 {
				t.Fatal("a sequence's logits depend on its batch")
			}
		}
	}
}

// Hiding a key must matter exactly to the rows that can no longer see it.
func TestMasksHide(t *testing.T) {
	m := newModel(t, enginetest.Tiny())
	tokens := enginetest.Tokens(m.Config, 12, 1)
	masks := make([][]engine.Mask, m.Config.Layers)
	for l := range masks {
		masks[l] = []engine.Mask{{Sink: 1, Recent: 4}, {Sink: 1, Recent: 4}}
	}
	rows := []int{4, 5, 11}
	full := logits(t, m, &engine.Sequence{Tokens: tokens, LogitRows: rows})
	masked := logits(t, m, &engine.Sequence{Tokens: tokens, LogitRows: rows, Masks: masks})
	if d := farthest(full[0], masked[0]); d != 0 {
		t.Errorf("row 4 sees keys 0..4 either way, yet its logits moved by %g", d)
	}
	if farthest(full[1], masked[1]) == 0 || farthest(full[2], masked[2]) == 0 {
		t.Error("rows 5 and 11 lost keys, yet their logits did not move")
	}
}

// The gates' gradient through the whole model equals central differences of the loss, with and without a stash.
func TestGateGradient(t *testing.T) {
	for name, c := range enginetest.Variants() {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			m := newModel(t, c)
			tokens, rows := enginetest.Tokens(c, 16, 1), []int{12, 13, 15}
			teacher, err := m.Teach(ctx, tokens)
			if err != nil {
				t.Fatal(err)
			}
			defer teacher.Free()
			r := rand.New(rand.NewPCG(7, 7))
			gates := make([][]float64, c.Layers)
			for l := range gates {
				for range c.KVHeads {
					gates[l] = append(gates[l], .1+.8*r.Float64())
				}
			}
			study := func(stash int64) *engine.Student {
				s, err := m.Study(ctx, tokens, teacher, gates, engine.Mask{Sink: 2, Recent: 3}, rows, stash)
				if err != nil {
					t.Fatal(err)
				}
				return s
			}
			var grads [2][][]float64
			for i, stash := range []int64{0, math.MaxInt64} {
				s := study(stash)
				if grads[i], err = s.Backward(ctx, 1); err != nil {
					t.Fatal(err)
				}
				s.Free()
			}
			const h = 1e-6
			for l := range gates {
				for k := range gates[l] {
					old := gates[l][k]
					gates[l][k] = old + h
					up := study(0).Loss
					gates[l][k] = old - h
					down := study(0).Loss
					gates[l][k] = old
					want := (up - down) / (2 * h)
					if got := grads[0][l][k]; math.Abs(got-want) > 1e-6*(1e-3+math.Abs(want)) {
						t.Errorf("gate %d,%d: gradient %.10g, central difference %.10g", l, k, got, want)
					}
					if grads[0][l][k] != grads[1][l][k] {
						t.Errorf("gate %d,%d: %g recomputed, %g from the stash", l, k, grads[0][l][k], grads[1][l][k])
					}
				}
			}
		})
	}
}

// With every gate at 1 the student is the teacher.
func TestOpenGatesLoseNothing(t *testing.T) {
	ctx := context.Background()
	m := newModel(t, enginetest.Tiny())
	tokens := enginetest.Tokens(m.Config, 16, 1)
	teacher, err := m.Teach(ctx, tokens)
	if err != nil {
		t.Fatal(err)
	}
	gates := [][]float64{{1, 1}, {1, 1}, {1, 1}}
	s, err := m.Study(ctx, tokens, teacher, gates, engine.Mask{Sink: 1, Recent: 2}, []int{15}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if s.Loss > 1e-24 {
		t.Errorf("loss is %g", s.Loss)
	}
}

// poisoned has a NaN in one weight.
type poisoned struct {
	enginetest.Weights
	name string
}

func (p poisoned) Matrix(name string) (engine.Matrix, error) {
	m, err := p.Weights.Matrix(name)
	if name == p.name {
		copy(m.Data, []byte{0, 0, 0xc0, 0x7f})
	}
	return m, err
}

func TestNonFiniteNamesTheLayer(t *testing.T) {
	c := enginetest.Tiny()
	m, err := engine.New(c, poisoned{enginetest.Weights{Config: c, Seed: 3}, "model.layers.1.mlp.down_proj.weight"}, ref.New[float64]())
	if err != nil {
		t.Fatal(err)
	}
	err = m.Forward(context.Background(), &engine.Sequence{Tokens: []int32{1, 2}})
	var bad *engine.NonFiniteError
	if !errors.As(err, &bad) || bad.Layer != 1 || bad.Row != 0 {
		t.Fatalf("got %v, want layer 1, token 0", err)
	}
}

type resized struct {
	enginetest.Weights
	name string
	edit func(*engine.Matrix)
}

func (p resized) Matrix(name string) (engine.Matrix, error) {
	m, err := p.Weights.Matrix(name)
	if name == p.name {
		p.edit(&m)
	}
	return m, err
}

func TestBadWeightsNameTheTensor(t *testing.T) {
	c := enginetest.Tiny()
	w := enginetest.Weights{Config: c, Seed: 3}
	for what, edit := range map[string]func(*engine.Matrix){
		"rows":  func(m *engine.Matrix) { m.Rows-- },
		"cols":  func(m *engine.Matrix) { m.Cols-- },
		"short": func(m *engine.Matrix) { m.Data = m.Data[:8] },
		"type":  func(m *engine.Matrix) { m.DType = dtype.F32; m.RowMap = []int32{0} },
	} {
		const name = "model.layers.2.self_attn.k_proj.weight"
		_, err := engine.New(c, resized{w, name, edit}, ref.New[float64]())
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v does not name %s", what, err, name)
		}
	}
	c.QKNorm, c.Layers = true, 1
	if _, err := engine.New(c, missing{w}, ref.New[float64]()); err == nil || !strings.Contains(err.Error(), "q_norm") {
		t.Errorf("error %v does not name the missing tensor", err)
	}
}

type missing struct{ enginetest.Weights }

func (m missing) Matrix(name string) (engine.Matrix, error) {
	if strings.Contains(name, "q_norm") {
		return engine.Matrix{}, errors.New("model.safetensors: no tensor " + name)
	}
	return m.Weights.Matrix(name)
}

func TestSequenceIsChecked(t *testing.T) {
	m := newModel(t, enginetest.Tiny())
	for name, s := range map[string]*engine.Sequence{
		"no tokens":       {},
		"negative":        {Tokens: []int32{-1}},
		"beyond":          {Tokens: []int32{50}},
		"logit row":       {Tokens: []int32{1}, LogitRows: []int{1}},
		"mask layers":     {Tokens: []int32{1}, Masks: make([][]engine.Mask, 2)},
		"mask KV heads":   {Tokens: []int32{1}, Masks: make([][]engine.Mask, 3)},
		"logit row minus": {Tokens: []int32{1}, LogitRows: []int{-1}},
	} {
		if err := m.Forward(context.Background(), s); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestCancel(t *testing.T) {
	m := newModel(t, enginetest.Tiny())
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := m.Forward(ctx, &engine.Sequence{Tokens: []int32{1}}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
