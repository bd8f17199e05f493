package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

func floats(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

// close32 fails where got is further from want than tolerance times the larger of 1 and |want|.
func close32(t *testing.T, what string, got, want []float32, tolerance float64) {
	t.Helper()
	for i := range want {
		g, w := float64(got[i]), float64(want[i])
		if !(math.Abs(g-w) <= tolerance*max(1, math.Abs(w))) {
			t.Fatalf("%s: value %d is %g, the twin's is %g", what, i, g, w)
		}
	}
}

// assembly calls f for every tier but the twins' own.
func assembly(t *testing.T, f func(t *testing.T, k *kernels)) {
	ran := false
	for _, k := range tiers() {
		if k.tier != "go" {
			ran = true
			t.Run(k.tier, func(t *testing.T) { f(t, k) })
		}
	}
	if !ran {
		t.Skip("this processor has no assembly kernels")
	}
}

func TestMatrixKernels(t *testing.T) {
	assembly(t, func(t *testing.T, k *kernels) {
		r := enginetest.Seeded(21)
		for rows := 1; rows <= 2*k.block+3; rows++ {
			for _, depth := range []int{1, 2, 3, 4, 5, 8, 13, 64, 129} {
				lda, ldb, ldc := max(rows, depth)+3, k.cols+5, k.cols+7
				a, b := floats(r, max(rows, depth)*lda), floats(r, depth*ldb)
				for _, acc := range []bool{false, true} {
					for _, transposed := range []bool{false, true} {
						got := floats(r, rows*ldc)
						want := slices.Clone(got)
						if transposed {
							k.gemmT(rows, depth, a, lda, b, ldb, got, ldc, acc)
							gemmGo(rows, k.cols, depth, a, 1, lda, b, ldb, want, ldc, acc)
						} else {
							k.gemm(rows, depth, a, lda, b, ldb, got, ldc, acc)
							gemmGo(rows, k.cols, depth, a, lda, 1, b, ldb, want, ldc, acc)
						}
						// What lies between the rows must be as it was: the comparison covers it.
						close32(t, fmt.Sprintf("rows %d, depth %d, acc %t, transposed %t", rows, depth, acc, transposed), got, want, 2e-5)
					}
				}
			}
		}
	})
}

// The value of an element must not depend on the rows that are computed with it.
func TestRowsDoNotMix(t *testing.T) {
	assembly(t, func(t *testing.T, k *kernels) {
		r := enginetest.Seeded(22)
		const depth = 77
		rows := k.block + 9
		a, b := floats(r, rows*depth), floats(r, depth*k.cols)
		all := make([]float32, rows*k.cols)
		k.gemm(rows, depth, a, depth, b, k.cols, all, k.cols, false)
		for i := range rows {
			one := make([]float32, k.cols)
			k.gemm(1, depth, a[i*depth:], depth, b, k.cols, one, k.cols, false)
			if !slices.Equal(one, all[i*k.cols:(i+1)*k.cols]) {
				t.Fatalf("row %d alone differs from row %d of %d", i, i, rows)
			}
		}
	})
}

func TestVectorKernels(t *testing.T) {
	assembly(t, func(t *testing.T, k *kernels) {
		r := enginetest.Seeded(23)
		twin := goKernels()
		for n := 1; n <= 150; n++ {
			x, y, w, u := floats(r, n), floats(r, n), floats(r, n), floats(r, n)
			// both runs a kernel and its twin on copies of the same inputs and compares all that they wrote and returned.
			both := func(what string, tolerance float64, f func(k *kernels, v [][]float32) []float32, inputs ...[]float32) {
				t.Helper()
				var out [2][]float32
				for i, kk := range []*kernels{k, twin} {
					var v [][]float32
					for _, in := range inputs {
						v = append(v, append(slices.Clone(in), 77)) // a guard behind the end
					}
					for j := range v {
						v[j] = v[j][:n]
					}
					out[i] = f(kk, v)
					for _, s := range v {
						out[i] = append(out[i], s[:n+1]...)
					}
				}
				close32(t, fmt.Sprintf("%s of %d", what, n), out[0], out[1], tolerance)
			}
			both("add", 0, func(k *kernels, v [][]float32) []float32 { k.add(v[0], v[1]); return nil }, x, y)
			both("scale", 0, func(k *kernels, v [][]float32) []float32 { k.scale(v[0], v[1], 1.7); return nil }, x, y)
			both("dot", 1e-5, func(k *kernels, v [][]float32) []float32 { return []float32{k.dot(v[0], v[1])} }, x, y)
			both("dot3", 1e-5, func(k *kernels, v [][]float32) []float32 { return []float32{k.dot3(v[0], v[1], v[2])} }, x, y, w)
			both("norm", 1e-6, func(k *kernels, v [][]float32) []float32 { k.norm(v[0], v[1], v[2], .3); return nil }, u, x, y)
			both("back", 1e-6, func(k *kernels, v [][]float32) []float32 { k.back(v[0], v[1], v[2], v[3], .3, .7); return nil }, u, x, y, w)
			both("spoil", 0, func(k *kernels, v [][]float32) []float32 { return []float32{k.spoil(v[0])} }, x)
			both("merge", 1e-6, func(k *kernels, v [][]float32) []float32 { k.merge(v[0], v[1], v[2], .4); return nil }, u, x, y)
			both("mergeBack", 1e-5, func(k *kernels, v [][]float32) []float32 {
				return []float32{k.mergeBack(v[0], v[1], v[2], v[3], .4)}
			}, u, x, y, w)
			both("rope", 1e-6, func(k *kernels, v [][]float32) []float32 { k.rope(v[0], v[1], v[2], v[3], -1); return nil }, u, x, y, w)
			wide := make([]float32, n)
			for i := range wide {
				wide[i] = 40 * x[i]
			}
			both("swiglu", 1e-6, func(k *kernels, v [][]float32) []float32 { k.swiglu(v[0], v[1], v[2]); return nil }, u, wide, y)
			both("swigluBack", 1e-5, func(k *kernels, v [][]float32) []float32 {
				k.swigluBack(v[0], v[1], v[2], v[3], v[4])
				return nil
			}, u, w, y, wide, y)
			both("softmaxBack", 1e-6, func(k *kernels, v [][]float32) []float32 { k.softmaxBack(v[0], v[1], .2, .1, .5); return nil }, x, y)
			both("rowMax", 0, func(k *kernels, v [][]float32) []float32 { return []float32{k.rowMax(v[0])} }, wide)
			both("expRow", 2e-6, func(k *kernels, v [][]float32) []float32 {
				z, zt := k.expRow(v[0], rowMaxGo(v[0]))
				return []float32{z, zt}
			}, wide)
		}
	})
}

func TestStripKernels(t *testing.T) {
	assembly(t, func(t *testing.T, k *kernels) {
		r := enginetest.Seeded(24)
		for _, vectors := range []int{1, 2, 3, 7, 8, 9, 20} {
			n := vectors * k.lanes
			for _, rows := range []int{1, 2, 13, 28} {
				lde := n + 5
				e, z := floats(r, rows*lde), floats(r, rows)
				got, want := make([]float32, n), make([]float32, n)
				k.columns(rows, e, lde, z, got)
				columnsGo(rows, e, lde, z, want)
				close32(t, fmt.Sprintf("columns %d x %d", rows, n), got, want, 1e-5)
			}
			x := floats(r, n)
			for _, limit := range []float32{-10, -.3, 0, x[n/2], 10} {
				mass, count := k.above(x, limit)
				wantMass, wantCount := aboveGo(x, limit)
				if count != wantCount {
					t.Fatalf("%d of %d values above %g, the twin counts %d", count, n, limit, wantCount)
				}
				close32(t, "mass above", []float32{mass}, []float32{wantMass}, 1e-5)
			}
		}
		for _, d := range []int{k.lanes, 3 * k.lanes, 8 * k.lanes} {
			q, keys := floats(r, d), floats(r, 9*(d+3))
			got, want := make([]float32, 9), make([]float32, 9)
			k.dotRows(9, q, keys, d+3, got)
			dotRowsGo(9, q, keys, d+3, want)
			close32(t, "dotRows", got, want, 1e-5)
		}
		for n := 1; n < 40; n++ {
			p := floats(r, n)
			var mean, m2 [2][]float64
			for i, kk := range []*kernels{k, goKernels()} {
				mean[i], m2[i] = make([]float64, n), make([]float64, n)
				for c := 1; c <= 3; c++ {
					kk.moments(p, float32(c), 1/float64(c), mean[i], m2[i])
				}
			}
			enginetest.Within(t, "mean", mean[0], mean[1], 1e-14)
			enginetest.Within(t, "squared deviations", m2[0], m2[1], 1e-14)
		}
	})
}

// Every exponential must be within 2e-7 of the true one, over the whole range that a softmax can give it.
func TestExponential(t *testing.T) {
	for _, k := range tiers() {
		worst := 0.0
		x := make([]float32, 0, 1<<16)
		for i := range 1 << 16 {
			x = append(x, -125*float32(i)/(1<<16))
		}
		got := slices.Clone(x)
		k.expRow(got, 0)
		for i, v := range x {
			want := math.Exp2(float64(v))
			worst = max(worst, math.Abs(float64(got[i])-want)/want)
		}
		if worst > 2e-7 {
			t.Errorf("%s: relative error %.3g", k.tier, worst)
		}
		tail := []float32{0, -127, -200, -1e6, -3e38}
		k.expRow(tail, 0)
		if tail[0] != 1 {
			t.Errorf("%s: 2^0 is %g", k.tier, tail[0])
		}
		for _, v := range tail[1:] {
			if !(v >= 0 && v < 2e-38) {
				t.Errorf("%s: a vanishing exponential is %g", k.tier, v)
			}
		}
	}
}

// What is not a number must not vanish in a softmax or an activation.
func TestNaNSurvives(t *testing.T) {
	nan := float32(math.NaN())
	for _, k := range tiers() {
		for _, n := range []int{1, 5, 16, 40} {
			for at := range n {
				x, ones, y := make([]float32, n), make([]float32, n), make([]float32, n)
				for i := range ones {
					ones[i] = 1
				}
				x[at] = nan
				k.swiglu(y, x, ones)
				z, _ := k.expRow(x, 0)
				if z == z || x[at] == x[at] || y[at] == y[at] {
					t.Fatalf("%s: NaN at %d of %d: sum %g, exponential %g, activation %g", k.tier, at, n, z, x[at], y[at])
				}
			}
		}
	}
}

func TestHolders(t *testing.T) {
	for _, b := range backends(t, 1) {
		e := make([]float32, 32)
		copy(e, []float32{.125, 1, .25, .25, .25, .125}) // sum 2
		for _, c := range []struct{ share, want float64 }{{.1, 1}, {.5, 1}, {.51, 2}, {.625, 2}, {.63, 3}, {.75, 3}, {.87, 4}, {.9, 5}, {.999, 6}} {
			got := []float64{10}
			b.holders(e, []float64{c.share}, got)
			if got[0] != 10+c.want {
				t.Errorf("%s: %g keys hold %g, want %g", b.k.tier, got[0]-10, c.share, c.want)
			}
		}
	}
}

func TestNoGoroutineStays(t *testing.T) {
	before := runtime.NumGoroutine()
	b := newBackend(t, Options{Threads: 8})
	r := enginetest.Seeded(25)
	x, w, y := enginetest.Random(r, 500, 64).On(b), enginetest.Random(r, 300, 64).Weight(t, b), b.New(500, 300)
	for range 20 {
		b.MatMul(y, x, w, false)
	}
	// A goroutine that has signalled its end may take a moment to be gone.
	for range 100 {
		if runtime.NumGoroutine() <= before {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Errorf("%d goroutines, %d before", runtime.NumGoroutine(), before)
}
