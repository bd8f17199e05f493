package cpu

import "golang.org/x/sys/cpu"

//go:generate go run -C asmgen . -out ../kernels_amd64.s -stubs ../stubs_amd64.go -pkg cpu -amx ../amx_amd64.s

// tiers lists the kernel sets that this processor can run, best first.
func tiers() []*kernels {
	var ts []*kernels
	if x := cpu.X86; x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VL && x.HasAVX2 && x.HasFMA && x.HasBMI2 {
		wide := avx512Kernels()
		amx, refusal := amxTier()
		if amx != nil {
			ts = append(ts, amx)
		}
		wide.note = refusal
		ts = append(ts, wide)
	}
	if x := cpu.X86; x.HasAVX2 && x.HasFMA {
		ts = append(ts, avx2Kernels())
	}
	return append(ts, goKernels())
}

// gemmFunc is a matrix kernel of a fixed number of rows.
type gemmFunc func(k int, a *float32, lda int, b *float32, ldb int, c *float32, ldc int, acc int)

// sized is a matrix kernel and its number of rows.
type sized struct {
	rows int
	f    gemmFunc
}

// allRows covers any number of rows with kernels that are listed from the largest to the one of a single row. step is
// 0 when rows of A are lda apart, 1 when they are next to each other.
func allRows(fs []sized, transposed bool) func(rows, k int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int, acc bool) {
	return func(rows, k int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int, acc bool) {
		add, step := 0, lda
		if acc {
			add = 1
		}
		if transposed {
			step = 1
		}
		i := 0
		for _, f := range fs {
			for rows-i >= f.rows {
				f.f(k, &a[i*step], lda, &b[0], ldb, &c[i*ldc], ldc, add)
				i += f.rows
			}
		}
	}
}

// vectorKernels are the assembly functions of one instruction set.
type vectorKernels struct {
	tier        string
	lanes       int
	gemm, gemmT []sized
	dotRows     func(n, d int, q, k *float32, ldk int, out *float32)
	expRow      func(n int, x *float32, top float32) (z, zt float32)
	rowMax      func(n int, x *float32) float32
	columns     func(n, rows int, e *float32, lde int, z, out *float32)
	add         func(n int, dst, x *float32)
	scale       func(n int, dst, x *float32, c float32)
	dot         func(n int, x, y *float32) float32
	dot3        func(n int, x, y, w *float32) float32
	norm        func(n int, y, x, w *float32, c float32)
	normBack    func(n int, dx, dy, x, w *float32, r, c float32)
	spoil       func(n int, x *float32) float32
	merge       func(n int, out, full, stream *float32, c float32)
	mergeBack   func(n int, dstream, dout, full, stream *float32, c float32) float32
	swiglu      func(n int, y, gate, up *float32)
	swigluBack  func(n int, dgate, dup, dy, gate, up *float32)
	rope        func(n int, lo, hi, cos, sin *float32, sign float32)
	softmaxBack func(n int, e, dp *float32, z, mean, c float32)
	above       func(n int, x *float32, threshold float32) (mass float32, count int)
	moments     func(n int, p *float32, z float32, c float64, mean, m2 *float64)
}

// kernels wraps the assembly: slices for pointers, and the Go twins for what is left over of a vector.
func (v *vectorKernels) kernels() *kernels {
	block := v.gemm[0].rows
	k := &kernels{tier: v.tier, lanes: v.lanes, cols: 2 * v.lanes, block: block, strip: block * (28 / block)}
	whole := func(n int) int { return n &^ (v.lanes - 1) }
	k.gemm, k.gemmT = allRows(v.gemm, false), allRows(v.gemmT, true)
	k.dotRows = func(n int, q, keys []float32, ldk int, out []float32) {
		v.dotRows(n, len(q), &q[0], &keys[0], ldk, &out[0])
	}
	k.expRow = func(x []float32, top float32) (z, zt float32) { return v.expRow(len(x), &x[0], top) }
	k.rowMax = func(x []float32) float32 { return v.rowMax(len(x), &x[0]) }
	k.columns = func(rows int, e []float32, lde int, z, out []float32) {
		v.columns(len(out), rows, &e[0], lde, &z[0], &out[0])
	}
	k.add = func(dst, x []float32) {
		n := whole(len(x))
		if n > 0 {
			v.add(n, &dst[0], &x[0])
		}
		addGo(dst[n:], x[n:])
	}
	k.scale = func(dst, x []float32, c float32) {
		n := whole(len(x))
		if n > 0 {
			v.scale(n, &dst[0], &x[0], c)
		}
		scaleGo(dst[n:], x[n:], c)
	}
	k.dot = func(x, y []float32) (s float32) {
		n := whole(len(x))
		if n > 0 {
			s = v.dot(n, &x[0], &y[0])
		}
		return s + dotGo(x[n:], y[n:])
	}
	k.dot3 = func(x, y, w []float32) (s float32) {
		n := whole(len(x))
		if n > 0 {
			s = v.dot3(n, &x[0], &y[0], &w[0])
		}
		return s + dot3Go(x[n:], y[n:], w[n:])
	}
	k.norm = func(y, x, w []float32, c float32) {
		n := whole(len(x))
		if n > 0 {
			v.norm(n, &y[0], &x[0], &w[0], c)
		}
		normGo(y[n:], x[n:], w[n:], c)
	}
	k.back = func(dx, dy, x, w []float32, r, c float32) {
		n := whole(len(x))
		if n > 0 {
			v.normBack(n, &dx[0], &dy[0], &x[0], &w[0], r, c)
		}
		backGo(dx[n:], dy[n:], x[n:], w[n:], r, c)
	}
	k.spoil = func(x []float32) (s float32) {
		n := whole(len(x))
		if n > 0 {
			s = v.spoil(n, &x[0])
		}
		return s + spoilGo(x[n:])
	}
	k.merge = func(out, full, stream []float32, c float32) {
		n := whole(len(stream))
		if n > 0 {
			v.merge(n, &out[0], &full[0], &stream[0], c)
		}
		mergeGo(out[n:], full[n:], stream[n:], c)
	}
	k.mergeBack = func(dstream, dout, full, stream []float32, c float32) (s float32) {
		n := whole(len(dout))
		if n > 0 {
			s = v.mergeBack(n, &dstream[0], &dout[0], &full[0], &stream[0], c)
		}
		return s + mergeBackGo(dstream[n:], dout[n:], full[n:], stream[n:], c)
	}
	k.swiglu = func(y, gate, up []float32) {
		n := whole(len(gate))
		if n > 0 {
			v.swiglu(n, &y[0], &gate[0], &up[0])
		}
		swigluGo(y[n:], gate[n:], up[n:])
	}
	k.swigluBack = func(dgate, dup, dy, gate, up []float32) {
		n := whole(len(gate))
		if n > 0 {
			v.swigluBack(n, &dgate[0], &dup[0], &dy[0], &gate[0], &up[0])
		}
		swigluBackGo(dgate[n:], dup[n:], dy[n:], gate[n:], up[n:])
	}
	k.rope = func(lo, hi, cos, sin []float32, sign float32) {
		n := whole(len(lo))
		if n > 0 {
			v.rope(n, &lo[0], &hi[0], &cos[0], &sin[0], sign)
		}
		ropeGo(lo[n:], hi[n:], cos[n:], sin[n:], sign)
	}
	k.softmaxBack = func(e, dp []float32, z, mean, c float32) {
		n := whole(len(e))
		if n > 0 {
			v.softmaxBack(n, &e[0], &dp[0], z, mean, c)
		}
		softmaxBackGo(e[n:], dp[n:], z, mean, c)
	}
	k.above = func(x []float32, threshold float32) (float32, int) { return v.above(len(x), &x[0], threshold) }
	k.moments = func(p []float32, z float32, c float64, mean, m2 []float64) {
		n := whole(len(p))
		if n > 0 {
			v.moments(n, &p[0], z, c, &mean[0], &m2[0])
		}
		momentsGo(p[n:], z, c, mean[n:], m2[n:])
	}
	return k
}

func avx512Kernels() *kernels {
	v := &vectorKernels{tier: "avx512", lanes: 16,
		gemm:    []sized{{14, gemm14AVX512}, {8, gemm8AVX512}, {4, gemm4AVX512}, {2, gemm2AVX512}, {1, gemm1AVX512}},
		gemmT:   []sized{{14, gemmT14AVX512}, {8, gemmT8AVX512}, {4, gemmT4AVX512}, {2, gemmT2AVX512}, {1, gemmT1AVX512}},
		dotRows: dotRowsAVX512, expRow: expRowAVX512, rowMax: rowMaxAVX512, columns: columnsAVX512,
		add: addAVX512, scale: scaleAVX512, dot: dotAVX512, dot3: dot3AVX512, norm: normAVX512, normBack: normBackAVX512, spoil: spoilAVX512,
		merge: mergeAVX512, mergeBack: mergeBackAVX512, swiglu: swigluAVX512, swigluBack: swigluBackAVX512, rope: ropeAVX512,
		softmaxBack: softmaxBackAVX512, above: aboveAVX512, moments: momentsAVX512}
	return v.kernels()
}

func avx2Kernels() *kernels {
	v := &vectorKernels{tier: "avx2", lanes: 8,
		gemm:    []sized{{6, gemm6AVX2}, {4, gemm4AVX2}, {2, gemm2AVX2}, {1, gemm1AVX2}},
		gemmT:   []sized{{6, gemmT6AVX2}, {4, gemmT4AVX2}, {2, gemmT2AVX2}, {1, gemmT1AVX2}},
		dotRows: dotRowsAVX2, expRow: expRowAVX2, rowMax: rowMaxAVX2, columns: columnsAVX2,
		add: addAVX2, scale: scaleAVX2, dot: dotAVX2, dot3: dot3AVX2, norm: normAVX2, normBack: normBackAVX2, spoil: spoilAVX2,
		merge: mergeAVX2, mergeBack: mergeBackAVX2, swiglu: swigluAVX2, swigluBack: swigluBackAVX2, rope: ropeAVX2,
		softmaxBack: softmaxBackAVX2, above: aboveAVX2, moments: momentsAVX2}
	return v.kernels()
}
