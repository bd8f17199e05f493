package cpu

import "math"

// kernels are the inner loops of one tier. Strides are counted in elements. Every function has a plain Go twin, which
// is its oracle, its fallback and the whole of the tier "go". All of them compute a result by an order of operations that
// depends on the lengths alone.
type kernels struct {
	tier  string
	lanes int           // vector width; dotRows wants d to be a multiple of it
	cols  int           // columns of a panel: the width of the matrix kernels
	block int           // rows of the largest matrix kernel
	strip int           // query rows that attention takes at once
	note  string        // why a better tier is not used, for Name
	split *splitKernels // matrix unit for products with weights, or nil

	// gemm: C[rows x cols] (+)= A[rows x k] B[k x cols], A[i,x] = a[i*lda+x]; gemmT: A[i,x] = a[x*lda+i]. Each element
	// is one chain of fused multiply-adds over x, whatever rows is, so that results do not depend on the blocking of rows.
	gemm, gemmT func(rows, k int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int, acc bool)
	// dotRows: out[j] = <q, row j of k>, j < n.
	dotRows func(n int, q, k []float32, ldk int, out []float32)
	// expRow: x = 2^(x-top) in place; z is the sum, zt the sum of 2^t*t with t = x-top.
	expRow func(x []float32, top float32) (z, zt float32)
	rowMax func(x []float32) float32
	// columns: out[j] = sum over rows of z[r]*e[r*lde+j]; len(out) is a multiple of the lanes.
	columns func(rows int, e []float32, lde int, z, out []float32)

	add   func(dst, x []float32)                       // dst += x
	scale func(dst, x []float32, c float32)            // dst = c*x
	dot   func(x, y []float32) float32                 // sum of x*y
	dot3  func(x, y, w []float32) float32              // sum of x*y*w
	norm  func(y, x, w []float32, c float32)           // y = c*x*w
	back  func(dx, dy, x, w []float32, r, c float32)   // dx += r*dy*w - c*x
	spoil func(x []float32) float32                    // 0 when all are finite, else NaN
	merge func(out, full, stream []float32, c float32) // out = stream + c*(full-stream)
	// mergeBack: dstream = c*dout; returns the sum of dout*(full-stream).
	mergeBack func(dstream, dout, full, stream []float32, c float32) float32
	// swiglu: y = gate*sigmoid(gate)*up.
	swiglu     func(y, gate, up []float32)
	swigluBack func(dgate, dup, dy, gate, up []float32)
	// rope: lo, hi = lo*cos - hi*sin*sign, hi*cos + lo*sin*sign.
	rope func(lo, hi, cos, sin []float32, sign float32)
	// softmaxBack: e *= z, dp = c*e*(dp-mean): from numerators to probabilities, and the gradient of the scores.
	softmaxBack func(e, dp []float32, z, mean, c float32)
	// above: sum and number of the values > threshold; len(x) is a multiple of the lanes.
	above func(x []float32, threshold float32) (mass float32, count int)
	// moments: with x = z*p and d = x-mean: mean += c*d, m2 += d*(x-mean), the deviation from the new mean.
	moments func(p []float32, z float32, c float64, mean, m2 []float64)
}

// goKernels is the tier of plain Go.
func goKernels() *kernels {
	k := &kernels{tier: "go", lanes: 1, cols: 8, block: 4, strip: 16}
	k.gemm = func(rows, n int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int, acc bool) {
		gemmGo(rows, k.cols, n, a, lda, 1, b, ldb, c, ldc, acc)
	}
	k.gemmT = func(rows, n int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int, acc bool) {
		gemmGo(rows, k.cols, n, a, 1, lda, b, ldb, c, ldc, acc)
	}
	k.dotRows, k.expRow, k.rowMax, k.columns = dotRowsGo, expRowGo, rowMaxGo, columnsGo
	k.add, k.scale, k.dot, k.dot3, k.norm, k.back, k.spoil = addGo, scaleGo, dotGo, dot3Go, normGo, backGo, spoilGo
	k.merge, k.mergeBack, k.swiglu, k.swigluBack = mergeGo, mergeBackGo, swigluGo, swigluBackGo
	k.rope, k.softmaxBack, k.above, k.moments = ropeGo, softmaxBackGo, aboveGo, momentsGo
	return k
}

// gemmGo: A[i,x] = a[i*rs+x*cs]. Two rows and four columns stay in registers.
func gemmGo(rows, cols, k int, a []float32, rs, cs int, b []float32, ldb int, c []float32, ldc int, acc bool) {
	for i := 0; i < rows; i += 2 {
		two := i+1 < rows
		a0 := a[i*rs:]
		a1 := a0
		if two {
			a1 = a[(i+1)*rs:]
		}
		for j := 0; j < cols; j += 4 {
			var s00, s01, s02, s03, s10, s11, s12, s13 float32
			for x := range k {
				p := b[x*ldb+j : x*ldb+j+4 : x*ldb+j+4]
				u, v := a0[x*cs], a1[x*cs]
				s00 += u * p[0]
				s01 += u * p[1]
				s02 += u * p[2]
				s03 += u * p[3]
				s10 += v * p[0]
				s11 += v * p[1]
				s12 += v * p[2]
				s13 += v * p[3]
			}
			store4(c[i*ldc+j:], acc, s00, s01, s02, s03)
			if two {
				store4(c[(i+1)*ldc+j:], acc, s10, s11, s12, s13)
			}
		}
	}
}

func store4(c []float32, acc bool, s0, s1, s2, s3 float32) {
	c = c[:4]
	if acc {
		s0, s1, s2, s3 = s0+c[0], s1+c[1], s2+c[2], s3+c[3]
	}
	c[0], c[1], c[2], c[3] = s0, s1, s2, s3
}

func dotRowsGo(n int, q, k []float32, ldk int, out []float32) {
	for j := range n {
		out[j] = dotGo(q, k[j*ldk:j*ldk+len(q)])
	}
}

// exp2Go is 2^t for t <= 127 with relative error below 2e-7; below 2^-126 it is 2^-126. The polynomial interpolates 2^f
// at the Chebyshev nodes of [-1/2, 1/2]; the assembly generator computes the same coefficients.
func exp2Go(t float32) float32 {
	t = max(t, -126)
	n := float32(math.RoundToEven(float64(t)))
	f := t - n
	r := float32(0.00015461445)
	r = r*f + 0.0013400428
	r = r*f + 0.009618057
	r = r*f + 0.05550327
	r = r*f + 0.2402265
	r = r*f + 0.6931472
	r = r*f + 1
	return r * math.Float32frombits(uint32(int32(n)+127)<<23)
}

func expRowGo(x []float32, top float32) (z, zt float32) {
	for j, v := range x {
		t := v - top
		e := exp2Go(t)
		x[j] = e
		z += e
		zt += e * t
	}
	return z, zt
}

func rowMaxGo(x []float32) float32 {
	m := x[0]
	for _, v := range x[1:] {
		m = max(m, v)
	}
	return m
}

func columnsGo(rows int, e []float32, lde int, z, out []float32) {
	clear(out)
	for r := range rows {
		c := z[r]
		for j, v := range e[r*lde : r*lde+len(out)] {
			out[j] += c * v
		}
	}
}

func addGo(dst, x []float32) {
	dst = dst[:len(x)]
	for i, v := range x {
		dst[i] += v
	}
}

func scaleGo(dst, x []float32, c float32) {
	dst = dst[:len(x)]
	for i, v := range x {
		dst[i] = c * v
	}
}

// dotGo keeps four sums: a single chain would wait for every addition.
func dotGo(x, y []float32) float32 {
	y = y[:len(x)]
	var s0, s1, s2, s3 float32
	i := 0
	for ; i+4 <= len(x); i += 4 {
		s0 += x[i] * y[i]
		s1 += x[i+1] * y[i+1]
		s2 += x[i+2] * y[i+2]
		s3 += x[i+3] * y[i+3]
	}
	for ; i < len(x); i++ {
		s0 += x[i] * y[i]
	}
	return s0 + s1 + (s2 + s3)
}

func dot3Go(x, y, w []float32) (s float32) {
	for i, v := range x {
		s += v * y[i] * w[i]
	}
	return s
}

func normGo(y, x, w []float32, c float32) {
	for i, v := range x {
		y[i] = c * v * w[i]
	}
}

func backGo(dx, dy, x, w []float32, r, c float32) {
	for i, v := range x {
		dx[i] += r*dy[i]*w[i] - c*v
	}
}

func spoilGo(x []float32) (s float32) {
	for _, v := range x {
		s += v * 0
	}
	return s
}

func mergeGo(out, full, stream []float32, c float32) {
	for i, v := range stream {
		out[i] = v + c*(full[i]-v)
	}
}

func mergeBackGo(dstream, dout, full, stream []float32, c float32) (s float32) {
	for i, v := range dout {
		s += v * (full[i] - stream[i])
		dstream[i] = c * v
	}
	return s
}

func sigmoidGo(x float32) float32 { return 1 / (1 + exp2Go(min(126, -math.Log2E*x))) }

func swigluGo(y, gate, up []float32) {
	for i, v := range gate {
		y[i] = v * sigmoidGo(v) * up[i]
	}
}

// With s = sigmoid(gate): dup = dy*gate*s, dgate = dy*up*s*(1+gate*(1-s)).
func swigluBackGo(dgate, dup, dy, gate, up []float32) {
	for i, v := range gate {
		s := sigmoidGo(v)
		d := dy[i] * s
		dgate[i] = d * (1 + v*(1-s)) * up[i]
		dup[i] = d * v
	}
}

func ropeGo(lo, hi, cos, sin []float32, sign float32) {
	for i, u := range lo {
		c, s, v := cos[i], sin[i]*sign, hi[i]
		lo[i], hi[i] = u*c-v*s, v*c+u*s
	}
}

func softmaxBackGo(e, dp []float32, z, mean, c float32) {
	for i, v := range e {
		p := v * z
		e[i] = p
		dp[i] = c * p * (dp[i] - mean)
	}
}

func aboveGo(x []float32, threshold float32) (mass float32, count int) {
	for _, v := range x {
		if v > threshold {
			mass += v
			count++
		}
	}
	return mass, count
}

func momentsGo(p []float32, z float32, c float64, mean, m2 []float64) {
	for j, v := range p {
		x := float64(v * z)
		d := x - mean[j]
		mean[j] += d * c
		m2[j] += d * (x - mean[j])
	}
}
