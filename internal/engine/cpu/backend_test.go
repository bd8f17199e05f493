package cpu

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// backends returns one backend per tier that this machine has.
func backends(t testing.TB, threads int) []*Backend {
	var bs []*Backend
	for _, k := range tiers() {
		bs = append(bs, newBackend(t, Options{Tier: k.tier, Threads: threads}))
	}
	return append(bs, twinOfMatrixUnit(t, threads, 0))
}

func newBackend(t testing.TB, o Options) *Backend {
	b, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b.(*Backend)
}

// twinOfMatrixUnit is a backend whose matrix unit is plain Go: what leads to the unit is tested where there is none.
func twinOfMatrixUnit(t testing.TB, threads int, limit int64) *Backend {
	b := newBackend(t, Options{Tier: "go", Threads: threads, PackLimit: limit})
	b.split = goSplit()
	return b
}

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 7)) }

func normal(r *rand.Rand, n int, scale float64) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(float32(r.NormFloat64() * scale))
	}
	return x
}

// matrix is a host matrix that both backends get.
type matrix struct {
	rows, cols int
	v          []float64
}

func random(r *rand.Rand, rows, cols int) matrix {
	return matrix{rows, cols, normal(r, rows*cols, 1)}
}

func (m matrix) on(b engine.Backend) engine.Tensor {
	t := b.New(m.rows, m.cols)
	b.Upload(t, m.v)
	return t
}

func (m matrix) weight(t testing.TB, b engine.Backend) engine.Weight {
	w, err := b.Load(m.stored())
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func (m matrix) stored() engine.Matrix {
	data := make([]byte, 0, 4*len(m.v))
	for _, v := range m.v {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(v)))
	}
	return engine.Matrix{Name: "w", Rows: m.rows, Cols: m.cols, DType: dtype.F32, Data: data}
}

func download(b engine.Backend, t engine.Tensor) []float64 {
	x := make([]float64, t.Rows()*t.Cols())
	b.Download(x, t)
	return x
}

// distance is the norm of the difference over the norm of want.
func distance(got, want []float64) float64 {
	var d, n float64
	for i, w := range want {
		d += (got[i] - w) * (got[i] - w)
		n += w * w
	}
	if n == 0 {
		return math.Sqrt(d)
	}
	return math.Sqrt(d / n)
}

func within(t *testing.T, what string, got, want []float64, tolerance float64) {
	t.Helper()
	if d := distance(got, want); !(d <= tolerance) || len(got) != len(want) {
		t.Errorf("%s: relative error %.3g, want at most %g", what, d, tolerance)
	}
}

// compare runs an operation on a backend and on the float64 reference and compares all tensors that it returns.
func compare(t *testing.T, what string, b engine.Backend, tolerance float64, f func(b engine.Backend) []engine.Tensor) {
	t.Helper()
	oracle := ref.New[float64]()
	got, want := f(b), f(oracle)
	for i := range want {
		within(t, fmt.Sprintf("%s, %s, result %d", b.Name(), what, i), download(b, got[i]), download(oracle, want[i]), tolerance)
	}
}

func TestMatMul(t *testing.T) {
	r := seeded(1)
	shapes := [][3]int{{1, 1, 1}, {1, 33, 7}, {2, 32, 16}, {13, 31, 5}, {14, 32, 64}, {15, 65, 577}, {29, 100, 96}, {200, 40, 30}, {141, 300, 600}, {7, 960, 576}}
	for range 10 {
		shapes = append(shapes, [3]int{1 + r.IntN(60), 1 + r.IntN(120), 1 + r.IntN(700)})
	}
	for _, limit := range []int64{0, -1} {
		units := []*Backend{twinOfMatrixUnit(t, 2, limit)}
		for _, k := range tiers() {
			units = append(units, newBackend(t, Options{Tier: k.tier, Threads: 2, PackLimit: limit}))
		}
		for i, b := range units {
			for _, s := range shapes {
				if i == 0 && s[0]*s[1]*s[2] > 1<<22 {
					continue // the twin is slow
				}
				x, w, y, dx := random(r, s[0], s[2]), random(r, s[1], s[2]), random(r, s[0], s[1]), random(r, s[0], s[2])
				// Stacked from two parts where there are rows for it.
				load := func(b engine.Backend) engine.Weight {
					cut := s[1] / 3
					if cut == 0 {
						return w.weight(t, b)
					}
					top, bottom := matrix{cut, s[2], w.v[:cut*s[2]]}, matrix{s[1] - cut, s[2], w.v[cut*s[2]:]}
					all, err := b.Load(top.stored(), bottom.stored())
					if err != nil {
						t.Fatal(err)
					}
					return all
				}
				compare(t, fmt.Sprintf("product %v, pack limit %d", s, limit), b, 1e-6, func(b engine.Backend) []engine.Tensor {
					lw := load(b)
					fresh, sum, gf, gs := y.on(b), y.on(b), dx.on(b), dx.on(b)
					b.MatMul(fresh, x.on(b), lw, false)
					b.MatMul(sum, x.on(b), lw, true)
					b.MatMulBackward(gf, y.on(b), lw, false)
					b.MatMulBackward(gs, y.on(b), lw, true)
					b.Unload(lw)
					return []engine.Tensor{fresh, sum, gf, gs}
				})
			}
			if limit < 0 && b.packed != 0 {
				t.Errorf("%d bytes packed beyond the limit", b.packed)
			}
		}
	}
}

func TestElementwise(t *testing.T) {
	for _, b := range backends(t, 2) {
		r := seeded(2)
		for _, s := range [][3]int{{1, 1, 2}, {1, 2, 8}, {3, 1, 16}, {5, 3, 64}, {33, 2, 80}, {70, 3, 128}} {
			n, heads, d := s[0], s[1], s[2]
			w := heads * d
			what := func(op string) string { return fmt.Sprintf("%s %v", op, s) }
			x, y, u, gain := random(r, n, w), random(r, n, w), random(r, n, w), random(r, 1, w)
			compare(t, what("norm"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
				out, dx, same := b.New(n, w), u.on(b), x.on(b)
				b.RMSNorm(out, x.on(b), gain.weight(t, b), 1e-5)
				b.RMSNorm(same, same, gain.weight(t, b), 1e-5)
				b.RMSNormBackward(dx, y.on(b), x.on(b), gain.weight(t, b), 1e-5)
				return []engine.Tensor{out, same, dx}
			})
			gu, dgu := random(r, n, 2*w), random(r, n, w)
			for i := range gu.v {
				gu.v[i] *= 20
			}
			compare(t, what("swiglu"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
				out, back := b.New(n, w), b.New(n, 2*w)
				b.SwiGLU(out, gu.on(b))
				b.SwiGLUBackward(back, dgu.on(b), gu.on(b))
				return []engine.Tensor{out, back}
			})
			compare(t, what("bias, copy"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
				biased, copied := x.on(b), b.New(n, w)
				b.AddBias(biased, gain.weight(t, b))
				b.Copy(copied, biased)
				return []engine.Tensor{biased, copied}
			})
			table := &engine.Rotary{HeadDim: d}
			for i := range (n + 3) * d / 2 {
				sin, cos := math.Sincos(float64(i))
				table.Cos, table.Sin = append(table.Cos, float32(1.1*cos)), append(table.Sin, float32(1.1*sin))
			}
			compare(t, what("rope"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
				turned, back := x.on(b), x.on(b)
				b.RoPE(turned, table, 3, false)
				b.RoPE(back, table, 2, true)
				return []engine.Tensor{turned, back}
			})
			gates := normal(r, heads, .3)
			gradient := map[string][]float64{}
			compare(t, what("merge"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
				out, ds := b.New(n, w), b.New(n, w)
				b.GatedMerge(out, x.on(b), y.on(b), gates, d)
				gradient[b.Name()] = b.GatedMergeBackward(ds, u.on(b), x.on(b), y.on(b), gates, d)
				return []engine.Tensor{out, ds}
			})
			within(t, what("gate gradient"), gradient[b.Name()], gradient["ref f64"], 2e-6)
			rows := []int{0, n - 1}
			losses := map[string]float64{}
			compare(t, what("squared error"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
				da := u.on(b)
				losses[b.Name()] = b.SquaredError(da, x.on(b), y.on(b), rows)
				return []engine.Tensor{da}
			})
			within(t, what("loss"), []float64{losses[b.Name()]}, []float64{losses["ref f64"]}, 1e-6)
			compare(t, what("split"), b, 0, func(b engine.Backend) []engine.Tensor {
				p := func() engine.Tensor { return b.New(n, w) }
				q, k, v, back := p(), b.New(n, d), b.New(n, d), b.New(n, w+2*d)
				b.Split(q, k, v, random(seeded(9), n, w+2*d).on(b))
				b.SplitBackward(back, q, k, v)
				return []engine.Tensor{q, k, v, back}
			})
		}
	}
}

func TestEmbed(t *testing.T) {
	for _, b := range backends(t, 2) {
		w := random(seeded(3), 40, 24)
		compare(t, "embed", b, 0, func(b engine.Backend) []engine.Tensor {
			out := b.New(3, 24)
			b.Embed(out, w.weight(t, b), []int32{39, 0, 7})
			return []engine.Tensor{out}
		})
	}
}

func TestFinite(t *testing.T) {
	for _, b := range backends(t, 3) {
		for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
			for _, at := range []int{0, 36, 37, 37*70 + 5, 37*90 - 1} {
				m := random(seeded(4), 90, 37)
				if row := b.Finite(m.on(b)); row != -1 {
					t.Fatalf("%s: finite values reported at row %d", b.Name(), row)
				}
				m.v[at] = bad
				if row := b.Finite(m.on(b)); row != at/37 {
					t.Errorf("%s: %g of row %d reported at row %d", b.Name(), bad, at/37, row)
				}
			}
		}
	}
}

// Memory that is used again must read as zeros, through views too.
func TestNewIsZero(t *testing.T) {
	b := newBackend(t, Options{})
	for i := range 5 {
		m := random(seeded(5), 20, 10)
		b.Free(m.on(b))
		x := b.New(20, 9+i%2)
		if i%2 == 1 {
			b.Copy(b.Slice(x, 3, 4), b.New(1, x.Cols()))
		}
		for _, v := range download(b, b.Reshape(x, 1, 20*x.Cols())) {
			if v != 0 {
				t.Fatal("a new tensor is not zero")
			}
		}
		b.Free(x)
	}
}

// attentionCase is one attention problem.
type attentionCase struct {
	n    int
	spec engine.AttentionSpec
}

func (c attentionCase) String() string { return fmt.Sprintf("n %d %+v", c.n, c.spec) }

// attentionCases covers edges by hand and the rest at random.
func attentionCases() []attentionCase {
	s := func(h, kv, d int) engine.AttentionSpec {
		return engine.AttentionSpec{Heads: h, KVHeads: kv, HeadDim: d}
	}
	masks := func(a engine.AttentionSpec, window int, ms ...engine.Mask) engine.AttentionSpec {
		a.Window, a.Masks = window, ms
		return a
	}
	cases := []attentionCase{
		{1, s(1, 1, 8)}, {2, s(2, 1, 16)}, {27, s(3, 1, 64)}, {28, s(1, 1, 64)}, {29, s(2, 2, 80)}, {100, s(4, 2, 96)}, {130, s(2, 1, 128)},
		{33, s(2, 1, 6)}, {200, masks(s(2, 1, 64), 50)}, {300, masks(s(4, 2, 32), 0, engine.Mask{}, engine.Mask{Sink: 4, Recent: 40})},
		{300, masks(s(4, 2, 32), 120, engine.Mask{Sink: 0, Recent: 1}, engine.Mask{Sink: 33, Recent: 64})},
		{257, masks(s(2, 2, 64), 40, engine.Mask{Sink: 3, Recent: 200}, engine.Mask{Sink: 128, Recent: 1})},
		{90, masks(s(1, 1, 64), 0, engine.Mask{Sink: 1, Recent: 29})},
	}
	r := seeded(6)
	for range 25 {
		kv, group, d := 1+r.IntN(3), 1+r.IntN(3), []int{2, 8, 16, 24, 64, 80, 96, 128}[r.IntN(8)]
		c := attentionCase{1 + r.IntN(170), s(kv*group, kv, d)}
		if r.IntN(3) == 0 {
			c.spec.Window = 1 + r.IntN(100)
		}
		if r.IntN(2) == 0 {
			for range kv {
				m := engine.Mask{Sink: r.IntN(70), Recent: r.IntN(80)}
				c.spec.Masks = append(c.spec.Masks, m)
			}
		}
		cases = append(cases, c)
	}
	return cases
}

func (c attentionCase) inputs(keys int) (q, k, v, dout matrix) {
	r := seeded(uint64(c.n))
	d := c.spec.HeadDim
	q, k = random(r, c.n, c.spec.Heads*d), random(r, keys, c.spec.KVHeads*d)
	for i := range q.v {
		q.v[i] *= 1.5
	}
	return q, k, random(r, keys, c.spec.KVHeads*d), random(r, c.n, c.spec.Heads*d)
}

func TestAttention(t *testing.T) {
	for _, b := range backends(t, 2) {
		for _, c := range attentionCases() {
			for _, start := range []int{0, 1, 77} {
				spec := c.spec
				spec.Start = start
				q, k, v, _ := c.inputs(start + c.n)
				compare(t, fmt.Sprintf("attention %v start %d", c, start), b, 2e-6, func(b engine.Backend) []engine.Tensor {
					out := b.New(c.n, q.cols)
					b.Attention(out, q.on(b), k.on(b), v.on(b), spec, nil)
					return []engine.Tensor{out}
				})
			}
		}
	}
}

func TestAttentionBackward(t *testing.T) {
	for _, b := range backends(t, 2) {
		for _, c := range attentionCases() {
			q, k, v, dout := c.inputs(c.n)
			compare(t, fmt.Sprintf("attention backward %v", c), b, 4e-6, func(b engine.Backend) []engine.Tensor {
				out, dq, dk, dv := b.New(c.n, q.cols), b.New(c.n, q.cols), b.New(c.n, k.cols), b.New(c.n, k.cols)
				tq, tk, tv := q.on(b), k.on(b), v.on(b)
				b.Attention(out, tq, tk, tv, c.spec, nil)
				b.AttentionBackward(dq, dk, dv, dout.on(b), tq, tk, tv, out, c.spec)
				return []engine.Tensor{dq, dk, dv}
			})
		}
	}
}

// tapCases are attention problems with the statistics wanted of them.
func tapCases() map[string]struct {
	attentionCase
	tap engine.Tap
} {
	type kase = struct {
		attentionCase
		tap engine.Tap
	}
	full := engine.AttentionSpec{Heads: 4, KVHeads: 2, HeadDim: 64}
	window := full
	window.Window = 70
	masked := full
	masked.Masks = []engine.Mask{{Sink: 4, Recent: 40}, {}}
	everything := engine.Tap{Prompt: 290, Far: []int{1, 29, 100, 400}, Windows: []int{8, 32, 64}, VarianceWindow: 40, Recent: []int{64, 1, 16, 64, 1000},
		Answer: []int{289, 290, 291, 299}, KeysEvery: 4, Masses: []float64{.5, .9, .99}, Map: 128, Exact: []int{1, 3}}
	short := everything
	short.Prompt, short.Answer, short.Map = 20, []int{20, 27}, 7
	plain := engine.Tap{Prompt: 1}
	return map[string]kase{
		"everything":     {attentionCase{300, full}, everything},
		"sliding window": {attentionCase{300, window}, everything},
		"masked heads":   {attentionCase{300, masked}, everything},
		"short":          {attentionCase{28, full}, short},
		"one token":      {attentionCase{1, full}, plain},
	}
}

func TestTaps(t *testing.T) {
	for _, b := range backends(t, 2) {
		for name, c := range tapCases() {
			t.Run(b.k.tier+" "+name, func(t *testing.T) {
				q, k, v, _ := c.inputs(c.n)
				checkTap(t, b, c.attentionCase, c.tap, q, k, v)
			})
		}
	}
}

// Full maps in float64 are the oracle, at the length that profiles are made with by default.
func TestTapsLong(t *testing.T) {
	if testing.Short() {
		t.Skip("full maps of 2,048 tokens take a few seconds")
	}
	c := attentionCase{2048, engine.AttentionSpec{Heads: 1, KVHeads: 1, HeadDim: 64}}
	q, k, v, _ := c.inputs(c.n)
	tap := engine.Tap{Prompt: 2000, Far: []int{600, 614}, Windows: []int{8, 32, 64}, VarianceWindow: 32, Recent: []int{16, 64, 256, 1024},
		Answer: []int{1999, 2001, 2047}, KeysEvery: 16, Masses: []float64{.9, .95, .99}, Map: 128}
	checkTap(t, backends(t, 2)[0], c, tap, q, k, v)
}

func checkTap(t *testing.T, b *Backend, c attentionCase, tap engine.Tap, q, k, v matrix) {
	oracle := ref.New[float64]()
	want, got := tap, tap
	var out [2]engine.Tensor
	for i, side := range []struct {
		b   engine.Backend
		tap *engine.Tap
	}{{oracle, &want}, {b, &got}} {
		out[i] = side.b.New(c.n, q.cols)
		side.b.Attention(out[i], q.on(side.b), k.on(side.b), v.on(side.b), c.spec, side.tap)
	}
	within(t, "output", download(b, out[1]), download(oracle, out[0]), 2e-6)
	const tolerance = 1e-5
	list := func(what string, got, want []float32) {
		t.Helper()
		g, w := make([]float64, len(got)), make([]float64, len(want))
		for i, v := range got {
			g[i] = float64(v)
		}
		for i, v := range want {
			w[i] = float64(v)
		}
		if len(g) != len(w) {
			t.Errorf("%s has %d values, want %d", what, len(g), len(w))
			return
		}
		within(t, what, g, w, tolerance)
		// No single value may hide behind large ones either.
		for i := range w {
			if math.Abs(g[i]-w[i]) > tolerance*(1e-3+w[i]) {
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
		within(t, at("recent", 0), g.Recent, w.Recent, tolerance)
		within(t, at("entropy", 0), []float64{g.Entropy}, []float64{w.Entropy}, tolerance)
		within(t, at("variance", 0), []float64{g.Variance}, []float64{w.Variance}, tolerance)
		if !slices.Equal(g.Top, w.Top) {
			t.Errorf("%s is %v, want %v", at("top", 0), g.Top, w.Top)
		}
		if g.MapSize != w.MapSize || g.MapTile != w.MapTile || len(g.Keys) != len(w.Keys) {
			t.Errorf("%s: %d x %d, %d keys; want %d x %d, %d", at("map", 0), g.MapSize, g.MapTile, len(g.Keys), w.MapSize, w.MapTile, len(w.Keys))
			continue
		}
		for x := range w.Keys {
			// A share that is met to within rounding may take one key more or less in a row.
			rows := tap.Prompt / tap.KeysEvery
			if math.Abs(g.Keys[x]-w.Keys[x])*float64(rows) > 1.5 {
				t.Errorf("%s is %g, want %g over %d rows", at("keys", x), g.Keys[x], w.Keys[x], rows)
			}
		}
	}
	for kv, w := range want.KV {
		g := got.KV[kv]
		within(t, "value norms", []float64{g.ValueNorm, g.ValueNormMax}, []float64{w.ValueNorm, w.ValueNormMax}, 1e-6)
	}
}

// Every result must be the same, bit for bit, for any number of threads.
func TestThreadsChangeNothing(t *testing.T) {
	type result struct {
		tensors [][]float64
		taps    []engine.HeadStats
		kv      []engine.KVStats
		gates   []float64
	}
	run := func(b *Backend) (all result) {
		r := seeded(8)
		keep := func(ts ...engine.Tensor) {
			for _, x := range ts {
				all.tensors = append(all.tensors, download(b, x))
			}
		}
		x, w := random(r, 300, 150), random(r, 200, 150)
		y, dx := b.New(300, 200), b.New(300, 150)
		lw := w.weight(t, b)
		b.MatMul(y, x.on(b), lw, false)
		b.MatMulBackward(dx, y, lw, false)
		keep(y, dx)
		for _, name := range []string{"everything", "short"} {
			c := tapCases()[name]
			q, k, v, dout := c.inputs(c.n)
			tap := c.tap
			tq, tk, tv := q.on(b), k.on(b), v.on(b)
			out, dq, dk, dv := b.New(c.n, q.cols), b.New(c.n, q.cols), b.New(c.n, k.cols), b.New(c.n, k.cols)
			b.Attention(out, tq, tk, tv, c.spec, &tap)
			b.AttentionBackward(dq, dk, dv, dout.on(b), tq, tk, tv, out, c.spec)
			keep(out, dq, dk, dv)
			all.taps, all.kv = append(all.taps, tap.Heads...), append(all.kv, tap.KV...)
			ds := b.New(c.n, q.cols)
			all.gates = append(all.gates, b.GatedMergeBackward(ds, dq, out, tq, []float64{.2, .7}, c.spec.HeadDim)...)
			keep(ds)
		}
		return all
	}

	first := map[string]string{}
	for _, threads := range []int{1, 2, 3, 8} {
		for _, b := range backends(t, threads) {
			got := fmt.Sprintf("%v", run(b))
			if old, ok := first[b.Name()]; ok && got != old {
				t.Errorf("%s: %d threads change the result", b.Name(), threads)
			}
			first[b.Name()] = got
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, o := range []Options{{Tier: "sse9"}, {Precision: "f8"}, {Threads: -1}, {Tier: "go", Precision: "split"}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v accepted", o)
		}
	}
}
