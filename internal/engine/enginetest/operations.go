package enginetest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// MatMul compares products of n rows with a weight of shape [out, in], forward and backward, written over what was there and added to it.
// The weight is stacked from two parts where it has rows for that.
func MatMul(t testing.TB, what string, b engine.Backend, tolerance float64, r *rand.Rand, n, out, in int) {
	t.Helper()
	x, w, y, dx := Random(r, n, in), Random(r, out, in), Random(r, n, out), Random(r, n, in)
	parts := []engine.Matrix{w.Stored()}
	if cut := out / 3; cut > 0 {
		parts = []engine.Matrix{Matrix{cut, in, w.V[:cut*in]}.Stored(), Matrix{out - cut, in, w.V[cut*in:]}.Stored()}
	}
	Compare(t, what, b, tolerance, func(b engine.Backend) []engine.Tensor {
		lw := load(t, b, parts...)
		fresh, sum, gf, gs := y.On(b), y.On(b), dx.On(b), dx.On(b)
		tx, ty := x.On(b), y.On(b)
		b.MatMul(fresh, tx, lw, false)
		b.MatMul(sum, tx, lw, true)
		b.MatMulBackward(gf, ty, lw, false)
		b.MatMulBackward(gs, ty, lw, true)
		b.Unload(lw)
		return []engine.Tensor{fresh, sum, gf, gs}
	})
}

// Elementwise compares the operations that stay within a row, for n rows of heads of d values.
func Elementwise(t testing.TB, b engine.Backend, tolerance float64, r *rand.Rand, n, heads, d int) {
	w := heads * d
	what := func(op string) string { return fmt.Sprintf("%s [%d %d %d]", op, n, heads, d) }
	// numbers compares what an operation returns beside tensors; Compare calls the backend first, then the oracle.
	numbers := func(op string, all [][]float64, tolerance float64) {
		t.Helper()
		Within(t, b.Name()+", "+what(op), all[0], all[1], tolerance)
	}
	x, y, u, gain := Random(r, n, w), Random(r, n, w), Random(r, n, w), Random(r, 1, w)
	Compare(t, what("norm"), b, tolerance, func(b engine.Backend) []engine.Tensor {
		out, dx, same := b.New(n, w), u.On(b), x.On(b)
		b.RMSNorm(out, x.On(b), gain.Weight(t, b), 1e-5)
		b.RMSNorm(same, same, gain.Weight(t, b), 1e-5)
		b.RMSNormBackward(dx, y.On(b), x.On(b), gain.Weight(t, b), 1e-5)
		return []engine.Tensor{out, same, dx}
	})
	gu, dgu := Random(r, n, 2*w), Random(r, n, w)
	for i := range gu.V {
		gu.V[i] *= 20
	}
	Compare(t, what("swiglu"), b, tolerance, func(b engine.Backend) []engine.Tensor {
		out, back := b.New(n, w), b.New(n, 2*w)
		b.SwiGLU(out, gu.On(b))
		b.SwiGLUBackward(back, dgu.On(b), gu.On(b))
		return []engine.Tensor{out, back}
	})
	Compare(t, what("bias, copy"), b, tolerance, func(b engine.Backend) []engine.Tensor {
		biased, copied := x.On(b), b.New(n, w)
		b.AddBias(biased, gain.Weight(t, b))
		b.Copy(copied, biased)
		return []engine.Tensor{biased, copied}
	})
	table := &engine.Rotary{HeadDim: d}
	for i := range (n + 3) * d / 2 {
		sin, cos := math.Sincos(float64(i))
		table.Cos, table.Sin = append(table.Cos, float32(1.1*cos)), append(table.Sin, float32(1.1*sin))
	}
	Compare(t, what("rope"), b, tolerance, func(b engine.Backend) []engine.Tensor {
		turned, back := x.On(b), x.On(b)
		b.RoPE(turned, table, 3, false)
		b.RoPE(back, table, 2, true)
		return []engine.Tensor{turned, back}
	})
	gates := Normal(r, heads, .3)
	var gradients, losses [][]float64
	Compare(t, what("merge"), b, tolerance, func(b engine.Backend) []engine.Tensor {
		out, ds := b.New(n, w), b.New(n, w)
		b.GatedMerge(out, x.On(b), y.On(b), gates, d)
		gradients = append(gradients, b.GatedMergeBackward(ds, u.On(b), x.On(b), y.On(b), gates, d))
		return []engine.Tensor{out, ds}
	})
	numbers("gate gradient", gradients, 2*tolerance) // sums over rows and heads
	Compare(t, what("squared error"), b, tolerance, func(b engine.Backend) []engine.Tensor {
		da := u.On(b)
		losses = append(losses, []float64{b.SquaredError(da, x.On(b), y.On(b), []int{0, n - 1, 0})})
		return []engine.Tensor{da}
	})
	numbers("loss", losses, tolerance)
	Compare(t, what("split"), b, 0, func(b engine.Backend) []engine.Tensor {
		q, k, v, back := b.New(n, w), b.New(n, d), b.New(n, d), b.New(n, w+2*d)
		b.Split(q, k, v, Random(Seeded(9), n, w+2*d).On(b))
		b.SplitBackward(back, q, k, v)
		return []engine.Tensor{q, k, v, back}
	})
}

// Finite puts what is no number at several places of a matrix, which must be found in the first row that has such.
func Finite(t testing.TB, b engine.Backend, rows, cols int) {
	t.Helper()
	find := func(m Matrix) int {
		x := m.On(b)
		defer b.Free(x)
		return b.Finite(x)
	}
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		for _, at := range []int{0, cols - 1, cols, rows*3/4*cols + 5, rows*cols - 1} {
			m := Random(Seeded(4), rows, cols)
			if row := find(m); row != -1 {
				t.Fatalf("%s: finite values reported at row %d", b.Name(), row)
			}
			m.V[at] = bad
			if row := find(m); row != at/cols {
				t.Errorf("%s: %g of row %d reported at row %d", b.Name(), bad, at/cols, row)
			}
			m.V[len(m.V)-1] = bad
			if row := find(m); row != at/cols {
				t.Errorf("%s: %g of row %d, and of the last, reported at row %d", b.Name(), bad, at/cols, row)
			}
		}
	}
}

// NewIsZero fails where memory that is used again does not read as zeros, through views too.
func NewIsZero(t testing.TB, b engine.Backend) {
	t.Helper()
	for i := range 5 {
		m := Random(Seeded(5), 20, 10)
		b.Free(m.On(b))
		x := b.New(20, 9+i%2)
		if i%2 == 1 {
			b.Copy(b.Slice(x, 3, 4), b.New(1, x.Cols()))
		}
		for _, v := range Download(b, b.Reshape(x, 1, 20*x.Cols())) {
			if v != 0 {
				t.Fatal("a new tensor is not zero")
			}
		}
		b.Free(x)
	}
}
