package cpu

import (
	"context"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// A whole model on every tier agrees with float64: logits with and without cache, loss and gate gradients of the student.
func TestModel(t *testing.T) {
	ctx := context.Background()
	cfg := enginetest.Tiny()
	tokens := enginetest.Tokens(cfg, 90, 3)
	rows := []int{60, 75, 89}
	gates := [][]float64{{.3, .9}, {.5, .2}, {.7, .4}}
	type result struct{ logits, cached, loss, gradient []float64 }
	run := func(b engine.Backend) (r result) {
		m, err := engine.New(cfg, enginetest.Weights{Config: cfg, Seed: 4}, b)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		check := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		s := &engine.Sequence{Tokens: tokens, LogitRows: rows}
		check(m.Forward(ctx, s))
		for _, l := range s.Logits {
			r.logits = append(r.logits, l...)
		}
		cache := m.NewCache(len(tokens))
		defer cache.Free()
		for lo := 0; lo < len(tokens); {
			hi := min(len(tokens), lo+1+lo/2) // 1, 1, 2, 3, 5, ... tokens at a time
			step := &engine.Sequence{Tokens: tokens[lo:hi], Cache: cache, LogitRows: []int{hi - lo - 1}}
			check(m.Forward(ctx, step))
			r.cached = append(r.cached, step.Logits[0]...)
			lo = hi
		}
		teacher, err := m.Teach(ctx, tokens)
		check(err)
		defer teacher.Free()
		for _, limit := range []int64{0, 1 << 30} { // activations computed again, and kept
			student, err := m.Study(ctx, tokens, teacher, gates, engine.Mask{Sink: 2, Recent: 9}, rows, limit)
			check(err)
			g, err := student.Backward(ctx, 1)
			check(err)
			r.loss = append(r.loss, student.Loss)
			for _, x := range g {
				r.gradient = append(r.gradient, x...)
			}
			student.Free()
		}
		return r
	}
	want := run(ref.New[float64]())
	for _, b := range backends(t, 2) {
		got := run(b)
		within(t, b.Name()+" logits", got.logits, want.logits, 5e-6)
		within(t, b.Name()+" logits with a cache", got.cached, want.cached, 5e-6)
		within(t, b.Name()+" loss", got.loss, want.loss, 1e-5)
		within(t, b.Name()+" gates' gradient", got.gradient, want.gradient, 1e-4)
	}
}
