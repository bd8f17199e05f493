package cpu

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// goSplit are the twins of the matrix unit's kernels, in plain Go.
func goSplit() *splitKernels { return &splitKernels{panel: splitPanelGo, rows: splitRowsGo} }

// Weights that are stored in bfloat16 take the path of one part.
func TestMatMulBF16(t *testing.T) {
	bs := backends(t, 2)
	bs = append(bs, twinOfMatrixUnit(t, 2, -1))
	r := enginetest.Seeded(31)
	for _, s := range [][3]int{{1, 33, 31}, {5, 32, 64}, {33, 65, 70}, {64, 40, 97}, {20, 30, 600}} {
		m := engine.Matrix{Name: "w", Rows: s[1], Cols: s[2], DType: dtype.BF16}
		for range s[1] * s[2] {
			h, _ := bfloat(float32(r.NormFloat64()))
			m.Data = binary.LittleEndian.AppendUint16(m.Data, h)
		}
		x, dy := enginetest.Random(r, s[0], s[2]), enginetest.Random(r, s[0], s[1])
		for _, b := range bs {
			enginetest.Compare(t, fmt.Sprintf("bf16 product %v", s), b, 1e-6, func(b engine.Backend) []engine.Tensor {
				w, err := b.Load(m)
				if err != nil {
					t.Fatal(err)
				}
				y, dx := dy.On(b), x.On(b)
				b.MatMul(y, x.On(b), w, true)
				b.MatMulBackward(dx, dy.On(b), w, false)
				return []engine.Tensor{y, dx}
			})
		}
	}
}

// The three parts of a float32 must hold all of it.
func TestSplitIsExact(t *testing.T) {
	for _, v := range floats(enginetest.Seeded(32), 1000) {
		h, rest := bfloat(v)
		m, rest := bfloat(rest)
		l, rest := bfloat(rest)
		if rest != 0 || fromBfloat(h)+(fromBfloat(m)+fromBfloat(l)) != v {
			t.Fatalf("%g is split into %g, %g, %g and leaves %g", v, fromBfloat(h), fromBfloat(m), fromBfloat(l), rest)
		}
	}
}

func TestSelfTest(t *testing.T) {
	if !goSplit().selfTest() {
		t.Error("the twins fail the self-test")
	}
	wrong := map[string]*splitKernels{"panel": goSplit(), "rows": goSplit()}
	wrong["panel"].panel = func(parts, steps, strips int, a, b []uint16, c []float32, ldc int, acc bool) {
		splitPanelGo(parts, steps, strips, a, b, c, ldc, false)
	}
	wrong["rows"].rows = func(steps, rows int, src []float32, lda int, dst []uint16) {
		splitRowsGo(steps, rows-1, src, lda, dst)
	}
	for name, k := range wrong {
		if k.selfTest() {
			t.Errorf("a wrong %s kernel passes the self-test", name)
		}
	}
}

func TestAMX(t *testing.T) {
	i := slices.IndexFunc(tiers(), func(k *kernels) bool { return k.tier == "amx" })
	if i < 0 {
		t.Skip("this processor has no AMX, or the system refuses it")
	}
	k, twin, r := tiers()[i].split, goSplit(), enginetest.Seeded(33)
	for _, parts := range []int{1, 3} {
		for _, strips := range []int{1, 2, 8} {
			for _, count := range []int{1, 2, 18} {
				src := floats(r, 16*count*step)
				a, b := make([]uint16, strips*count*3*tilePair), make([]uint16, count*parts*tilePair)
				for half := range 2 * strips {
					k.rows(count, 16, src, count*step, a[half/2*count*3*tilePair+half%2*512:])
				}
				for j := range 32 {
					for x := range count * step {
						put(b, parts, j, x, float32(r.NormFloat64()))
					}
				}
				got, want := make([]float32, strips*32*32), make([]float32, strips*32*32)
				k.panel(parts, count, strips, a, b, got, 32, false)
				twin.panel(parts, count, strips, a, b, want, 32, false)
				close32(t, fmt.Sprintf("%d parts, %d strips, %d steps", parts, strips, count), got, want, 2e-5)
			}
		}
	}
}
