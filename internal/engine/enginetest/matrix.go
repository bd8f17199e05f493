package enginetest

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// Seeded is the source of a test's values.
func Seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 7)) }

// Normal draws n values that float32 holds, so that no backend begins with a rounding of its own.
func Normal(r *rand.Rand, n int, scale float64) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(float32(r.NormFloat64() * scale))
	}
	return x
}

// Matrix is a host matrix that all backends of a comparison get.
type Matrix struct {
	Rows, Cols int
	V          []float64 // row-major
}

// Random draws a matrix with a spread of 1.
func Random(r *rand.Rand, rows, cols int) Matrix {
	return Matrix{rows, cols, Normal(r, rows*cols, 1)}
}

// On uploads the matrix.
func (m Matrix) On(b engine.Backend) engine.Tensor {
	t := b.New(m.Rows, m.Cols)
	b.Upload(t, m.V)
	return t
}

// Weight loads the matrix as a weight.
func (m Matrix) Weight(t testing.TB, b engine.Backend) engine.Weight {
	t.Helper()
	return load(t, b, m.Stored())
}

func load(t testing.TB, b engine.Backend, parts ...engine.Matrix) engine.Weight {
	t.Helper()
	w, err := b.Load(parts...)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// Stored is the matrix as a file holds it, in float32.
func (m Matrix) Stored() engine.Matrix {
	data := make([]byte, 0, 4*len(m.V))
	for _, v := range m.V {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(v)))
	}
	return engine.Matrix{Name: "w", Rows: m.Rows, Cols: m.Cols, DType: dtype.F32, Data: data}
}

// Download returns a tensor's values.
func Download(b engine.Backend, t engine.Tensor) []float64 {
	x := make([]float64, t.Rows()*t.Cols())
	b.Download(x, t)
	return x
}

// Distance is the norm of the difference over the norm of want.
func Distance(got, want []float64) float64 {
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

// Within fails where got is further from want than the tolerance, relative to want's norm.
func Within(t testing.TB, what string, got, want []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %d values, want %d", what, len(got), len(want))
		return
	}
	if d := Distance(got, want); !(d <= tolerance) {
		t.Errorf("%s: relative error %.3g, want at most %g", what, d, tolerance)
	}
}

// Compare runs an operation on a backend, then on the float64 oracle, and compares all tensors that it returns. They are given back
// afterwards: what is made next on the backend may find their values in its memory.
func Compare(t testing.TB, what string, b engine.Backend, tolerance float64, f func(b engine.Backend) []engine.Tensor) {
	t.Helper()
	oracle := ref.New[float64]()
	got, want := f(b), f(oracle)
	for i := range want {
		Within(t, fmt.Sprintf("%s, %s, result %d", b.Name(), what, i), Download(b, got[i]), Download(oracle, want[i]), tolerance)
	}
	b.Free(got...)
}

// Rotary is a RoPE table of base 10,000.
func Rotary(d, positions int) *engine.Rotary {
	t := &engine.Rotary{HeadDim: d}
	for p := range positions {
		for j := range d / 2 {
			sin, cos := math.Sincos(float64(p) * math.Pow(1e4, -2*float64(j)/float64(d)))
			t.Cos, t.Sin = append(t.Cos, float32(cos)), append(t.Sin, float32(sin))
		}
	}
	return t
}
