// Package selfcheck compares the operations of one backend with those of another on the machine at hand, so that a user can see
// whether a device computes what it should.
package selfcheck

import (
	"encoding/binary"
	"math"
	"math/rand/v2"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
)

// Result is the outcome of one operation: the norm of the difference over the norm of what was expected, and what is allowed.
type Result struct {
	Operation string  `json:"operation"`
	Error     float64 `json:"error"`
	Bound     float64 `json:"bound"`
}

// OK reports whether the error is within the bound; one that is no number is not.
func (r Result) OK() bool { return r.Error <= r.Bound }

// Size is the size of the problems. The larger, the more of the device is used.
type Size struct{ Rows, Heads, KVHeads, HeadDim int }

// Run runs every operation on both backends. exact is the relative error that operations in float32 may have, rounded that of
// products, which may be in a lower precision. A failing device is an error.
func Run(got, want engine.Backend, size Size, exact, rounded float64) (results []Result, err error) {
	defer engine.Catch(&err)
	for _, o := range operations() {
		bound := exact
		if o.product {
			bound = rounded
		}
		a := o.run(&side{got, rand.New(rand.NewPCG(1, 2)), nil, nil}, size)
		b := o.run(&side{want, rand.New(rand.NewPCG(1, 2)), nil, nil}, size)
		results = append(results, Result{o.name, distance(a, b), bound})
	}
	return results, nil
}

// side is one of the two backends, and the source of its inputs, which is the same for both.
type side struct {
	engine.Backend
	r       *rand.Rand
	tensors []engine.Tensor
	weights []engine.Weight
}

func (s *side) values(n int) []float64 {
	v := make([]float64, n)
	for i := range v {
		v[i] = float64(float32(s.r.NormFloat64()))
	}
	return v
}

func (s *side) empty(rows, cols int) engine.Tensor {
	t := s.New(rows, cols)
	s.tensors = append(s.tensors, t)
	return t
}

func (s *side) random(rows, cols int) engine.Tensor {
	t := s.empty(rows, cols)
	s.Upload(t, s.values(rows*cols))
	return t
}

func (s *side) weight(rows, cols int) engine.Weight {
	data := make([]byte, 0, 4*rows*cols)
	for _, v := range s.values(rows * cols) {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(v)))
	}
	w, err := s.Load(engine.Matrix{Name: "check", Rows: rows, Cols: cols, DType: dtype.F32, Data: data})
	if err != nil {
		panic(&engine.Failure{Err: err})
	}
	s.weights = append(s.weights, w)
	return w
}

// take downloads tensors one after the other, and gives all memory back.
func (s *side) take(ts ...engine.Tensor) (all []float64) {
	for _, t := range ts {
		v := make([]float64, t.Rows()*t.Cols())
		s.Download(v, t)
		all = append(all, v...)
	}
	s.Free(s.tensors...)
	for _, w := range s.weights {
		s.Unload(w)
	}
	return all
}

type operation struct {
	name    string
	product bool // of matrices
	run     func(s *side, z Size) []float64
}

func (z Size) width() int   { return z.Heads * z.HeadDim }
func (z Size) kvWidth() int { return z.KVHeads * z.HeadDim }

func (z Size) spec() engine.AttentionSpec {
	return engine.AttentionSpec{Heads: z.Heads, KVHeads: z.KVHeads, HeadDim: z.HeadDim}
}

// streaming is a mask that hides something from most rows.
func (z Size) streaming() engine.AttentionSpec {
	spec := z.spec()
	for range z.KVHeads {
		spec.Masks = append(spec.Masks, engine.Mask{Sink: 4, Recent: 1 + z.Rows/4})
	}
	return spec
}

func table(s *side, d, positions int) *engine.Rotary {
	t := &engine.Rotary{HeadDim: d}
	for i := range positions * d / 2 {
		sin, cos := math.Sincos(float64(i))
		t.Cos, t.Sin = append(t.Cos, float32(cos)), append(t.Sin, float32(sin))
	}
	return t
}

func operations() []operation {
	attention := func(spec func(Size) engine.AttentionSpec, backward bool) func(s *side, z Size) []float64 {
		return func(s *side, z Size) []float64 {
			q, k, v, dout := s.random(z.Rows, z.width()), s.random(z.Rows, z.kvWidth()), s.random(z.Rows, z.kvWidth()), s.random(z.Rows, z.width())
			out := s.empty(z.Rows, z.width())
			s.Attention(out, q, k, v, spec(z), nil)
			if !backward {
				return s.take(out)
			}
			dq, dk, dv := s.empty(z.Rows, z.width()), s.empty(z.Rows, z.kvWidth()), s.empty(z.Rows, z.kvWidth())
			s.AttentionBackward(dq, dk, dv, dout, q, k, v, out, spec(z))
			return s.take(dq, dk, dv)
		}
	}
	return []operation{
		{"embedding", true, func(s *side, z Size) []float64 {
			w, out := s.weight(50, z.width()), s.empty(3, z.width())
			s.Embed(out, w, []int32{49, 0, 7})
			return s.take(out)
		}},
		{"product", true, func(s *side, z Size) []float64 {
			x, w, y := s.random(z.Rows, z.width()), s.weight(z.kvWidth(), z.width()), s.random(z.Rows, z.kvWidth())
			s.MatMul(y, x, w, true)
			return s.take(y)
		}},
		{"product, backward", true, func(s *side, z Size) []float64 {
			dy, w, dx := s.random(z.Rows, z.kvWidth()), s.weight(z.kvWidth(), z.width()), s.empty(z.Rows, z.width())
			s.MatMulBackward(dx, dy, w, false)
			return s.take(dx)
		}},
		{"norm", false, func(s *side, z Size) []float64 {
			x, dy, w, y, dx := s.random(z.Rows, z.width()), s.random(z.Rows, z.width()), s.weight(1, z.width()), s.empty(z.Rows, z.width()), s.random(z.Rows, z.width())
			s.RMSNorm(y, x, w, 1e-5)
			s.RMSNormBackward(dx, dy, x, w, 1e-5)
			return s.take(y, dx)
		}},
		{"split, bias, rotation", false, func(s *side, z Size) []float64 {
			qkv, bias := s.random(z.Rows, z.width()+2*z.kvWidth()), s.weight(1, z.width()+2*z.kvWidth())
			q, k, v, back := s.empty(z.Rows, z.width()), s.empty(z.Rows, z.kvWidth()), s.empty(z.Rows, z.kvWidth()), s.empty(z.Rows, z.width()+2*z.kvWidth())
			s.AddBias(qkv, bias)
			s.Split(q, k, v, qkv)
			s.RoPE(q, table(s, z.HeadDim, z.Rows+2), 2, false)
			s.RoPE(k, table(s, z.HeadDim, z.Rows+2), 0, true)
			s.SplitBackward(back, q, k, v)
			return s.take(back)
		}},
		{"activation", false, func(s *side, z Size) []float64 {
			gu, dy, y, dgu := s.random(z.Rows, 2*z.width()), s.random(z.Rows, z.width()), s.empty(z.Rows, z.width()), s.empty(z.Rows, 2*z.width())
			s.SwiGLU(y, gu)
			s.SwiGLUBackward(dgu, dy, gu)
			return s.take(y, dgu)
		}},
		{"gated merge", false, func(s *side, z Size) []float64 {
			full, stream, dout := s.random(z.Rows, z.width()), s.random(z.Rows, z.width()), s.random(z.Rows, z.width())
			out, ds, gates := s.empty(z.Rows, z.width()), s.empty(z.Rows, z.width()), s.values(z.KVHeads)
			s.GatedMerge(out, full, stream, gates, z.HeadDim)
			dg := s.GatedMergeBackward(ds, dout, full, stream, gates, z.HeadDim)
			return append(s.take(out, ds), dg...)
		}},
		{"loss", false, func(s *side, z Size) []float64 {
			a, b, da := s.random(z.Rows, z.width()), s.random(z.Rows, z.width()), s.empty(z.Rows, z.width())
			loss := s.SquaredError(da, a, b, []int{0, z.Rows - 1})
			first := s.Finite(a)
			return append(s.take(da), loss, float64(first))
		}},
		{"attention", true, attention(Size.spec, false)},
		{"attention, backward", true, attention(Size.spec, true)},
		{"streaming attention", true, attention(Size.streaming, false)},
		{"streaming attention, backward", true, attention(Size.streaming, true)},
		{"attention statistics", true, func(s *side, z Size) []float64 {
			q, k, v, out := s.random(z.Rows, z.width()), s.random(z.Rows, z.kvWidth()), s.random(z.Rows, z.kvWidth()), s.empty(z.Rows, z.width())
			tap := &engine.Tap{Prompt: z.Rows - 2, Far: []int{z.Rows / 3}, Windows: []int{8, 32}, VarianceWindow: 16, Recent: []int{8, z.Rows / 2},
				Answer: []int{z.Rows - 2}, Map: 16}
			s.Attention(out, q, k, v, z.spec(), tap)
			var all []float64
			for _, h := range tap.Heads {
				for _, list := range [][]float32{h.Total, h.Far[0], h.Window[0], h.Window[1], h.Answer, h.Map} {
					for _, x := range list {
						all = append(all, float64(x))
					}
				}
				all = append(append(all, h.Recent...), h.Entropy, h.Variance)
			}
			for _, kv := range tap.KV {
				all = append(all, kv.ValueNorm, kv.ValueNormMax)
			}
			s.take(out)
			return all
		}},
		{"decoding over pages", false, func(s *side, z Size) []float64 {
			const block = 16
			n := z.Rows / block * block
			pages := &engine.Pages{Keys: s.random(z.KVHeads*n, z.HeadDim), Values: s.random(z.KVHeads*n, z.HeadDim), Block: block}
			var lanes []engine.Lane
			for h := range z.KVHeads {
				l := engine.Lane{Spans: []engine.Span{{Lo: 0, Hi: 3}, {Lo: n / 2, Hi: n}}, Write: n - 1, Key: n - 1, Query: n - 1}
				for p := range n / block {
					l.Table = append(l.Table, int32((n/block-1-p)*z.KVHeads+h))
				}
				lanes = append(lanes, l)
			}
			q, k, v, out := s.random(1, z.width()), s.random(1, z.kvWidth()), s.random(1, z.kvWidth()), s.empty(1, z.width())
			s.PagedAttention(out, q, k, v, pages, [][]engine.Lane{lanes}, table(s, z.HeadDim, n), z.spec())
			return s.take(out)
		}},
	}
}

// distance is the norm of the difference over the norm of want.
func distance(got, want []float64) float64 {
	if len(got) != len(want) {
		return math.Inf(1)
	}
	var d, n float64
	for i, w := range want {
		d += (got[i] - w) * (got[i] - w)
		n += w * w
	}
	return math.Sqrt(d / max(n, math.SmallestNonzeroFloat64))
}
