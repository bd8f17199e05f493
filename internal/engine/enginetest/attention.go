package enginetest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// AttentionCase is an attention problem of N query rows.
type AttentionCase struct {
	N    int
	Spec engine.AttentionSpec
}

func (c AttentionCase) String() string { return fmt.Sprintf("n %d %+v", c.N, c.Spec) }

// Attention is a problem of full causal attention.
func Attention(n, heads, kvHeads, headDim int) AttentionCase {
	return AttentionCase{n, engine.AttentionSpec{Heads: heads, KVHeads: kvHeads, HeadDim: headDim}}
}

// Under is the problem with a sliding window, where that is not 0, and masks.
func (c AttentionCase) Under(window int, masks ...engine.Mask) AttentionCase {
	c.Spec.Window, c.Spec.Masks = window, masks
	return c
}

// After is the problem with start key rows before the first query's.
func (c AttentionCase) After(start int) AttentionCase {
	c.Spec.Start = start
	return c
}

// RandomAttention draws problems of up to longest rows and one of the head dimensions: a third has a window, half have masks.
func RandomAttention(r *rand.Rand, count, longest int, headDims ...int) (cases []AttentionCase) {
	for range count {
		kv, group, d := 1+r.IntN(3), 1+r.IntN(3), headDims[r.IntN(len(headDims))]
		c := Attention(1+r.IntN(longest), kv*group, kv, d)
		if r.IntN(3) == 0 {
			c.Spec.Window = 1 + r.IntN(2*longest/3)
		}
		if r.IntN(2) == 0 {
			for range kv {
				c.Spec.Masks = append(c.Spec.Masks, engine.Mask{Sink: r.IntN(longest / 2), Recent: r.IntN(longest / 2)})
			}
		}
		cases = append(cases, c)
	}
	return cases
}

// Inputs are the problem's queries, keys and values, and a gradient of its output.
func (c AttentionCase) Inputs() (q, k, v, dout Matrix) {
	r := Seeded(uint64(c.N))
	d, keys := c.Spec.HeadDim, c.Spec.Start+c.N
	q, k = Random(r, c.N, c.Spec.Heads*d), Random(r, keys, c.Spec.KVHeads*d)
	for i := range q.V {
		q.V[i] *= 1.5
	}
	return q, k, Random(r, keys, c.Spec.KVHeads*d), Random(r, c.N, c.Spec.Heads*d)
}

// Forward is the attention's output.
func (c AttentionCase) Forward(b engine.Backend) []engine.Tensor {
	q, k, v, _ := c.Inputs()
	out := b.New(q.Rows, q.Cols)
	b.Attention(out, q.On(b), k.On(b), v.On(b), c.Spec, nil)
	return []engine.Tensor{out}
}

// Backward is the gradient of the queries, the keys and the values. The problem must start at 0.
func (c AttentionCase) Backward(b engine.Backend) []engine.Tensor {
	q, k, v, dout := c.Inputs()
	out, dq, dk, dv := b.New(q.Rows, q.Cols), b.New(q.Rows, q.Cols), b.New(k.Rows, k.Cols), b.New(v.Rows, v.Cols)
	tq, tk, tv := q.On(b), k.On(b), v.On(b)
	b.Attention(out, tq, tk, tv, c.Spec, nil)
	b.AttentionBackward(dq, dk, dv, dout.On(b), tq, tk, tv, out, c.Spec)
	return []engine.Tensor{dq, dk, dv}
}

// TapCase is an attention problem with the statistics wanted of it.
type TapCase struct {
	AttentionCase
	Tap engine.Tap
}

// TapCases ask for everything of n tokens: of all, under a sliding window, and with one of two KV heads masked; for less of a few tokens;
// and for nothing in particular of one.
func TapCases(n, headDim, window int, everything engine.Tap) map[string]TapCase {
	full := func(n int) AttentionCase { return Attention(n, 4, 2, headDim) }
	short := everything
	short.Prompt, short.Answer, short.Map = 20, []int{20, 27}, 7
	return map[string]TapCase{
		"everything":     {full(n), everything},
		"sliding window": {full(n).Under(window), everything},
		"masked heads":   {full(n).Under(0, engine.Mask{Sink: 4, Recent: 40}, engine.Mask{}), everything},
		"short":          {full(28), short},
		"one token":      {full(1), engine.Tap{Prompt: 1}},
	}
}

// Compare compares the output and all statistics with those of the float64 oracle, which come from the whole map, given the problem's
// inputs. The tolerances are of the output and of the statistics.
func (c TapCase) Compare(t testing.TB, b engine.Backend, q, k, v Matrix, output, statistics float64) {
	t.Helper()
	want, got := c.Tap, c.Tap
	run := func(b engine.Backend, tap *engine.Tap) []float64 {
		out := b.New(c.N, q.Cols)
		b.Attention(out, q.On(b), k.On(b), v.On(b), c.Spec, tap)
		return Download(b, out)
	}
	expected := run(ref.New[float64](), &want)
	Within(t, "output", run(b, &got), expected, output)
	list := func(what string, got, want []float32) {
		t.Helper()
		g, w := widen(got), widen(want)
		if len(g) != len(w) {
			t.Errorf("%s has %d values, want %d", what, len(g), len(w))
			return
		}
		Within(t, what, g, w, statistics)
		// No single value may hide behind large ones either.
		for i := range w {
			if !(math.Abs(g[i]-w[i]) <= statistics*(1e-3+w[i])) {
				t.Errorf("%s[%d] is %g, want %g", what, i, g[i], w[i])
				return
			}
		}
	}
	for h, w := range want.Heads {
		g := got.Heads[h]
		at := func(s string, x int) string { return fmt.Sprintf("head %d %s %d", h, s, x) }
		list(at("total", 0), g.Total, w.Total)
		for x := range w.Far {
			list(at("far", x), g.Far[x], w.Far[x])
		}
		for x := range w.Window {
			list(at("window", x), g.Window[x], w.Window[x])
		}
		list(at("answer", 0), g.Answer, w.Answer)
		list(at("map", 0), g.Map, w.Map)
		list(at("exact", 0), g.Exact, w.Exact)
		Within(t, at("recent", 0), g.Recent, w.Recent, statistics)
		Within(t, at("entropy", 0), []float64{g.Entropy}, []float64{w.Entropy}, statistics)
		Within(t, at("variance", 0), []float64{g.Variance}, []float64{w.Variance}, statistics)
		if !slices.Equal(g.Top, w.Top) {
			t.Errorf("%s is %v, want %v", at("top", 0), g.Top, w.Top)
		}
		if g.MapSize != w.MapSize || g.MapTile != w.MapTile || len(g.Keys) != len(w.Keys) {
			t.Errorf("%s: %d x %d, %d keys; want %d x %d, %d", at("map", 0), g.MapSize, g.MapTile, len(g.Keys), w.MapSize, w.MapTile, len(w.Keys))
			continue
		}
		for x := range w.Keys {
			// A share that is met to within rounding may take one key more or less in a row.
			rows := c.Tap.Prompt / c.Tap.KeysEvery
			if !(math.Abs(g.Keys[x]-w.Keys[x])*float64(rows) <= 1.5) {
				t.Errorf("%s is %g, want %g over %d rows", at("keys", x), g.Keys[x], w.Keys[x], rows)
			}
		}
	}
	for kv, w := range want.KV {
		g := got.KV[kv]
		Within(t, fmt.Sprintf("KV head %d value norms", kv), []float64{g.ValueNorm, g.ValueNormMax}, []float64{w.ValueNorm, w.ValueNormMax}, 1e-6)
	}
}

func widen(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}
