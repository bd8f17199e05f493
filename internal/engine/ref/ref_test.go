package ref

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
)

// f64 is the backend under test; gradients are checked in it against central differences.
type f64 = Tensor[float64]

func random(r *rand.Rand, rows, cols int) *f64 {
	t := &f64{rows, cols, make([]float64, rows*cols)}
	for i := range t.Data {
		t.Data[i] = r.NormFloat64()
	}
	return t
}

func zeros(like *f64) *f64 { return &f64{like.rows, like.cols, make([]float64, len(like.Data))} }

// asWeight gives a tensor to the backend as a weight, through float32.
func asWeight(t *testing.T, b *Backend[float64], x *f64) engine.Weight {
	data := make([]byte, 0, 4*len(x.Data))
	for _, v := range x.Data {
		u := math.Float32bits(float32(v))
		data = append(data, byte(u), byte(u>>8), byte(u>>16), byte(u>>24))
	}
	w, err := b.Load(engine.Matrix{Name: "w", Rows: x.rows, Cols: x.cols, DType: dtype.F32, Data: data})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// checkGradient compares grad with central differences of sum(seed * f()) with respect to every value of x.
func checkGradient(t *testing.T, name string, x, grad, seed *f64, f func() *f64) {
	t.Helper()
	value := func() (s float64) {
		for i, v := range f().Data {
			s += v * seed.Data[i]
		}
		return s
	}
	const h = 1e-5
	for i := range x.Data {
		old := x.Data[i]
		x.Data[i] = old + h
		up := value()
		x.Data[i] = old - h
		down := value()
		x.Data[i] = old
		want := (up - down) / (2 * h)
		if math.Abs(grad.Data[i]-want) > 1e-7*(1+math.Abs(want)) {
			t.Fatalf("%s: gradient of value %d is %.10g, central difference %.10g", name, i, grad.Data[i], want)
		}
	}
}

func TestGradients(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	b := New[float64]()

	t.Run("matmul", func(t *testing.T) {
		x, w, dy := random(r, 3, 5), asWeight(t, b, random(r, 4, 5)), random(r, 3, 4)
		dx := random(r, 3, 5)
		before := append([]float64(nil), dx.Data...)
		b.MatMulBackward(dx, dy, w, true)
		for i := range before {
			dx.Data[i] -= before[i]
		}
		checkGradient(t, "accumulated", x, dx, dy, func() *f64 {
			y := &f64{3, 4, make([]float64, 12)}
			b.MatMul(y, x, w, false)
			return y
		})
		b.MatMulBackward(dx, dy, w, false)
		checkGradient(t, "overwritten", x, dx, dy, func() *f64 {
			y := random(r, 3, 4)
			old := &f64{3, 4, append([]float64(nil), y.Data...)}
			b.MatMul(y, x, w, true)
			for i := range y.Data {
				y.Data[i] -= old.Data[i]
			}
			return y
		})
	})
	t.Run("rmsnorm", func(t *testing.T) {
		x, w, dy := random(r, 3, 6), asWeight(t, b, random(r, 1, 6)), random(r, 3, 6)
		dx := zeros(x)
		b.RMSNormBackward(dx, dy, x, w, 1e-3)
		checkGradient(t, "x", x, dx, dy, func() *f64 { y := zeros(x); b.RMSNorm(y, x, w, 1e-3); return y })
	})
	t.Run("swiglu", func(t *testing.T) {
		gu, dy := random(r, 3, 8), random(r, 3, 4)
		dgu := zeros(gu)
		b.SwiGLUBackward(dgu, dy, gu)
		checkGradient(t, "gate and up", gu, dgu, dy, func() *f64 { y := zeros(dy); b.SwiGLU(y, gu); return y })
	})
	t.Run("rope", func(t *testing.T) {
		x, dy := random(r, 3, 8), random(r, 3, 8)
		table := &engine.Rotary{HeadDim: 4}
		for i := range 10 {
			sin, cos := math.Sincos(float64(i))
			table.Cos, table.Sin = append(table.Cos, float32(1.1*cos)), append(table.Sin, float32(1.1*sin))
		}
		dx := &f64{3, 8, append([]float64(nil), dy.Data...)}
		b.RoPE(dx, table, 2, true)
		checkGradient(t, "x", x, dx, dy, func() *f64 {
			y := &f64{3, 8, append([]float64(nil), x.Data...)}
			b.RoPE(y, table, 2, false)
			return y
		})
	})
	t.Run("split", func(t *testing.T) {
		x, dy := random(r, 2, 8), random(r, 2, 8)
		dx := zeros(x)
		parts := func(m *f64) (q, k, v *f64) {
			q, k, v = &f64{2, 4, make([]float64, 8)}, &f64{2, 2, make([]float64, 4)}, &f64{2, 2, make([]float64, 4)}
			b.Split(q, k, v, m)
			return
		}
		q, k, v := parts(dy)
		b.SplitBackward(dx, q, k, v)
		checkGradient(t, "qkv", x, dx, dy, func() *f64 {
			q, k, v := parts(x)
			y := zeros(x)
			for i := range 2 {
				copy(y.row(i), append(append(append([]float64(nil), q.row(i)...), k.row(i)...), v.row(i)...))
			}
			return y
		})
	})
	t.Run("merge", func(t *testing.T) {
		full, stream, dout := random(r, 3, 8), random(r, 3, 8), random(r, 3, 8)
		gates := &f64{1, 2, []float64{.3, .8}}
		dstream := zeros(stream)
		dg := b.GatedMergeBackward(dstream, dout, full, stream, gates.Data, 2)
		merge := func() *f64 { y := zeros(dout); b.GatedMerge(y, full, stream, gates.Data, 2); return y }
		checkGradient(t, "stream", stream, dstream, dout, merge)
		checkGradient(t, "gates", gates, &f64{1, 2, dg}, dout, merge)
	})
	t.Run("squared error", func(t *testing.T) {
		a, c, rows := random(r, 4, 3), random(r, 4, 3), []int{1, 3}
		da := zeros(a)
		b.SquaredError(da, a, c, rows)
		checkGradient(t, "a", a, da, &f64{1, 1, []float64{1}}, func() *f64 {
			return &f64{1, 1, []float64{b.SquaredError(zeros(a), a, c, rows)}}
		})
	})
	for name, spec := range map[string]engine.AttentionSpec{
		"full":           {},
		"sliding window": {Window: 3},
		"streaming":      {Masks: []engine.Mask{{Sink: 1, Recent: 2}, {Sink: 2, Recent: 3}}},
		"mixed":          {Window: 5, Masks: []engine.Mask{{}, {Sink: 1, Recent: 2}}},
	} {
		t.Run("attention "+name, func(t *testing.T) {
			spec.Heads, spec.KVHeads, spec.HeadDim = 4, 2, 2
			q, k, v, dout := random(r, 7, 8), random(r, 7, 4), random(r, 7, 4), random(r, 7, 8)
			dq, dk, dv, out := zeros(q), zeros(k), zeros(v), zeros(q)
			attend := func() *f64 { y := zeros(q); b.Attention(y, q, k, v, spec, nil); return y }
			b.Attention(out, q, k, v, spec, nil)
			b.AttentionBackward(dq, dk, dv, dout, q, k, v, out, spec)
			checkGradient(t, "q", q, dq, dout, attend)
			checkGradient(t, "k", k, dk, dout, attend)
			checkGradient(t, "v", v, dv, dout, attend)
		})
	}
}

// A head that attends to known places must give the statistics that follow from them by hand.
func TestStatisticsByHand(t *testing.T) {
	rows := [][]float64{{1, 0, 0, 0}, {.5, .5, 0, 0}, {.25, .25, .5, 0}, {.1, .2, .3, .4}}
	tap := &engine.Tap{Prompt: 3, Far: []int{1, 2}, Windows: []int{1, 8}, Recent: []int{1, 2}, Answer: []int{3},
		KeysEvery: 1, Masses: []float64{.5, .9}, VarianceWindow: 2, Map: 2}
	st := Statistics(tap, rows, true)
	for _, c := range []struct {
		name      string
		got, want []float32
	}{
		{"total", st.Total, []float32{1.75, .75, .5, 0}},
		{"far 1", st.Far[0], []float32{.75, .25, 0, 0}},
		{"far 2", st.Far[1], []float32{.25, 0, 0, 0}},
		{"window 1", st.Window[0], []float32{.25, .25, .5, 0}},
		{"window 8", st.Window[1], []float32{1.75, .75, .5, 0}},
		{"answer", st.Answer, []float32{.1, .2, .3, .4}},
		{"map", st.Map, []float32{1, 0, .5, .5}},
		{"exact", st.Exact, []float32{1, 0, 0, .5, .5, 0, .25, .25, .5}},
	} {
		if fmt.Sprint(c.got) != fmt.Sprint(c.want) {
			t.Errorf("%s is %v, want %v", c.name, c.got, c.want)
		}
	}
	near := func(name string, got, want float64) {
		if math.Abs(got-want) > 1e-12 {
			t.Errorf("%s is %g, want %g", name, got, want)
		}
	}
	near("recent 1", st.Recent[0], 2./3)
	near("recent 2", st.Recent[1], 2.75/3)
	near("entropy", st.Entropy, (math.Ln2+1.5*math.Ln2)/3)
	near("keys for .5", st.Keys[0], 1)
	near("keys for .9", st.Keys[1], 2)
	near("variance", st.Variance, 2*.125*.125+.25*.25)
	if st.Top[0] != 3 {
		t.Errorf("top key is %d, want 3", st.Top[0])
	}
}
