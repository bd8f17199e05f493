// Command asmgen writes the assembly kernels of package cpu. It is a module of its own, so that the generator's
// dependencies are not those of the program; run it with go generate in the parent folder.
//
// Every kernel exists for AVX-512 (16 lanes) and AVX2 with FMA (8 lanes). Matrices are float32, strides are counted in
// elements. Vector kernels take lengths that are multiples of the lanes unless they say otherwise. Parameters are never
// named g: that is a register of Go's assembler.
package main

import (
	"flag"
	"fmt"
	"math"
	"os"
	"sync"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// isa is an instruction set and its vector width.
type isa struct {
	suffix string
	lanes  int
	rows   []int // rows of the matrix kernels, which are two vectors wide
	vec    func() reg.VecVirtual
	phys   []reg.VecPhysical
}

var avx512 = isa{"AVX512", 16, []int{14, 8, 4, 2, 1}, ZMM, []reg.VecPhysical{reg.Z0, reg.Z1, reg.Z2, reg.Z3, reg.Z4, reg.Z5, reg.Z6, reg.Z7,
	reg.Z8, reg.Z9, reg.Z10, reg.Z11, reg.Z12, reg.Z13, reg.Z14, reg.Z15, reg.Z16, reg.Z17, reg.Z18, reg.Z19, reg.Z20, reg.Z21, reg.Z22, reg.Z23,
	reg.Z24, reg.Z25, reg.Z26, reg.Z27, reg.Z28, reg.Z29, reg.Z30, reg.Z31}}

var avx2 = isa{"AVX2", 8, []int{6, 4, 2, 1}, YMM, []reg.VecPhysical{reg.Y0, reg.Y1, reg.Y2, reg.Y3, reg.Y4, reg.Y5, reg.Y6, reg.Y7,
	reg.Y8, reg.Y9, reg.Y10, reg.Y11, reg.Y12, reg.Y13, reg.Y14, reg.Y15}}

func (s isa) bytes() int { return 4 * s.lanes }

func (s isa) zero(v reg.Register) {
	if s.lanes == 16 {
		VPXORQ(v, v, v)
	} else {
		VXORPS(v, v, v)
	}
}

func (s isa) zeros(n int) []reg.VecVirtual {
	vs := make([]reg.VecVirtual, n)
	for i := range vs {
		vs[i] = s.vec()
		s.zero(vs[i])
	}
	return vs
}

// constant fills a vector with 32 bits.
func (s isa) constant(bits uint32) reg.VecVirtual {
	r, x, v := GP32(), XMM(), s.vec()
	MOVL(U32(bits), r)
	VMOVD(r, x)
	VBROADCASTSS(x, v)
	return v
}

func (s isa) float(f float64) reg.VecVirtual { return s.constant(math.Float32bits(float32(f))) }

// operand is a vector of equal values to compute with: a register where there are 32 of them, otherwise memory.
func (s isa) operand(bits uint32) Op {
	if s.lanes == 16 {
		return s.constant(bits)
	}
	name := fmt.Sprintf("vector%08x", bits)
	m, ok := tables[name]
	if !ok {
		m = GLOBL(name, RODATA|NOPTR)
		for i := range s.lanes {
			DATA(4*i, U32(bits))
		}
		tables[name] = m
	}
	return m
}

// tables are the constants in memory, each declared once.
var tables = map[string]Mem{}

// broadcast fills a vector with a float32 parameter.
func (s isa) broadcast(param string) reg.VecVirtual {
	v := s.vec()
	c, err := Param(param).Resolve()
	if err != nil {
		panic(err)
	}
	VBROADCASTSS(c.Addr, v)
	return v
}

// sum adds the lanes of v into lane 0 of the result.
func (s isa) sum(v reg.VecVirtual) reg.VecVirtual {
	y := v
	if s.lanes == 16 {
		y = YMM()
		VEXTRACTF64X4(Imm(1), v, y)
		VADDPS(v.AsY(), y.AsY(), y.AsY())
	}
	x := XMM()
	VEXTRACTF128(Imm(1), y.AsY(), x)
	VADDPS(y.AsX(), x, x)
	VHADDPS(x, x, x)
	VHADDPS(x, x, x)
	return x
}

func at(base reg.Register, bytes int) Mem { return Mem{Base: base, Disp: bytes} }

func start(s isa, name, signature, doc string) {
	TEXT(name+s.suffix, NOSPLIT, signature)
	Doc(doc)
	Pragma("noescape")
}

func load(name string) reg.GPVirtual { return Load(Param(name), GP64()).(reg.GPVirtual) }

func end() {
	VZEROUPPER()
	RET()
}

// loop runs body while n, counted down by step, is at least step.
func loop(label string, n reg.GPVirtual, step int, body func()) {
	Label(label)
	CMPQ(n, U32(uint32(step)))
	JLT(LabelRef(label + "_end"))
	body()
	SUBQ(U32(uint32(step)), n)
	JMP(LabelRef(label))
	Label(label + "_end")
}

// matrix writes the micro-kernel C[rows x 2 vectors] (+)= A B. A's rows are strided, or its columns when transposed:
// A[i,k] stands at a[i*lda+k], or at a[k*lda+i].
func matrix(s isa, rows int, transposed bool) {
	name, doc := fmt.Sprintf("gemm%d", rows), "A[i,k] = a[i*lda+k]"
	if transposed {
		name, doc = fmt.Sprintf("gemmT%d", rows), "A[i,k] = a[k*lda+i]"
	}
	start(s, name, "func(k int, a *float32, lda int, b *float32, ldb int, c *float32, ldc int, acc int)",
		fmt.Sprintf("C[%d x %d] (+)= A B with %s, B[k,j] = b[k*ldb+j], C[i,j] = c[i*ldc+j]; acc 1 adds to C.", rows, 2*s.lanes, doc))
	w := s.bytes()
	k, b, ldb, lda := load("k"), load("b"), load("ldb"), load("lda")
	SHLQ(U8(2), ldb)
	SHLQ(U8(2), lda)
	// One base register per three rows; the others by index.
	bases := []reg.GPVirtual{load("a")}
	if !transposed {
		for i := 3; i < rows; i += 3 {
			next := GP64()
			LEAQ(Mem{Base: bases[len(bases)-1], Index: lda, Scale: 2}, next)
			ADDQ(lda, next)
			bases = append(bases, next)
		}
	}
	acc := s.phys[:2*rows]
	for _, v := range acc {
		s.zero(v)
	}
	free := s.phys[len(s.phys)-4:]
	step := func(u int) {
		VMOVUPS(at(b, 0), free[0])
		VMOVUPS(at(b, w), free[1])
		if s.lanes == 16 {
			PREFETCHT0(at(b, 1024))
			PREFETCHT0(at(b, 1024+64))
		} else {
			PREFETCHT0(at(b, 512))
		}
		ADDQ(ldb, b)
		for i := range rows {
			m := Mem{Base: bases[0], Disp: 4 * i}
			if !transposed {
				m = Mem{Base: bases[i/3], Disp: 4 * u}
				if i%3 > 0 {
					m.Index, m.Scale = lda, uint8(i%3)
				}
			}
			t := free[2+i%2]
			VBROADCASTSS(m, t)
			VFMADD231PS(free[0], t, acc[2*i])
			VFMADD231PS(free[1], t, acc[2*i+1])
		}
		if transposed {
			ADDQ(lda, bases[0])
		}
	}
	quads := GP64()
	MOVQ(k, quads)
	SHRQ(U8(2), quads)
	JZ(LabelRef("tail"))
	Label("quad")
	for u := range 4 {
		step(u)
	}
	if !transposed {
		for _, r := range bases {
			ADDQ(U8(16), r)
		}
	}
	DECQ(quads)
	JNZ(LabelRef("quad"))
	Label("tail")
	ANDQ(U8(3), k)
	JZ(LabelRef("done"))
	Label("single")
	step(0)
	if !transposed {
		for _, r := range bases {
			ADDQ(U8(4), r)
		}
	}
	DECQ(k)
	JNZ(LabelRef("single"))
	Label("done")
	c, ldc, add := load("c"), load("ldc"), load("acc")
	SHLQ(U8(2), ldc)
	TESTQ(add, add)
	JZ(LabelRef("store"))
	old := GP64()
	MOVQ(c, old)
	for i := range rows {
		VADDPS(at(old, 0), acc[2*i], acc[2*i])
		VADDPS(at(old, w), acc[2*i+1], acc[2*i+1])
		if i+1 < rows {
			ADDQ(ldc, old)
		}
	}
	Label("store")
	for i := range rows {
		VMOVUPS(acc[2*i], at(c, 0))
		VMOVUPS(acc[2*i+1], at(c, w))
		if i+1 < rows {
			ADDQ(ldc, c)
		}
	}
	end()
}

// dotRows writes out[j] = <q, row j of k>: scores of one query for few-row attention.
func dotRows(s isa) {
	start(s, "dotRows", "func(n int, d int, q *float32, k *float32, ldk int, out *float32)", "out[j] = sum over d of q[x]*k[j*ldk+x]; d a multiple of the lanes.")
	n, d, q, k, ldk, out := load("n"), load("d"), load("q"), load("k"), load("ldk"), load("out")
	SHLQ(U8(2), ldk)
	SHLQ(U8(2), d)
	off := GP64()
	loop("rows", n, 1, func() {
		acc := s.vec()
		s.zero(acc)
		XORQ(off, off)
		Label("columns")
		v := s.vec()
		VMOVUPS(Mem{Base: q, Index: off, Scale: 1}, v)
		VFMADD231PS(Mem{Base: k, Index: off, Scale: 1}, v, acc)
		ADDQ(U8(s.bytes()), off)
		CMPQ(off, d)
		JLT(LabelRef("columns"))
		VMOVSS(s.sum(acc).AsX(), at(out, 0))
		ADDQ(U8(4), out)
		ADDQ(ldk, k)
	})
	end()
}

// exponential computes 2^t of t <= 128 in place of r, with relative error below 2e-7. The polynomial is that of
// 2^f on [-1/2, 1/2] of degree 6, near minimax (its own error is 2e-9).
type exponential struct {
	s    isa
	p    []Op
	low  reg.VecVirtual
	bias Op
}

func newExponential(s isa) exponential {
	e := exponential{s: s}
	for _, c := range expCoefficients {
		e.p = append(e.p, s.operand(math.Float32bits(float32(c))))
	}
	if s.lanes == 8 {
		e.low = s.float(-126)
		e.bias = s.operand(127)
	}
	return e
}

// expCoefficients interpolate 2^f at the Chebyshev nodes of [-1/2, 1/2]; c0 is then set to 1, so that 2^0 is 1.
var expCoefficients = chebyshev(7)

// chebyshev returns the coefficients, lowest first, of the polynomial with n coefficients that interpolates 2^f.
func chebyshev(n int) []float64 {
	x, c := make([]float64, n), make([]float64, n)
	for i := range x {
		x[i] = math.Cos(math.Pi*(float64(i)+0.5)/float64(n)) / 2
		c[i] = math.Exp2(x[i])
	}
	for j := 1; j < n; j++ { // Newton's divided differences
		for i := n - 1; i >= j; i-- {
			c[i] = (c[i] - c[i-1]) / (x[i] - x[i-j])
		}
	}
	p := make([]float64, n)
	for i := n - 1; i >= 0; i-- { // Horner on polynomials: p = p*(f-x[i]) + c[i]
		for j := n - 1; j > 0; j-- {
			p[j] = p[j-1] - x[i]*p[j]
		}
		p[0] = c[i] - x[i]*p[0]
	}
	p[0] = 1
	return p
}

// of returns 2^t and keeps t.
func (e exponential) of(t reg.VecVirtual) reg.VecVirtual {
	s := e.s
	whole, f, r := s.vec(), s.vec(), s.vec()
	if s.lanes == 16 {
		VRNDSCALEPS(Imm(8), t, whole)
		VSUBPS(whole, t, f)
	} else {
		// Below 2^-126 the result stays at 2^-126: AVX2 has no scaling that reaches zero. A NaN stays one in this order.
		VMAXPS(t, e.low, f)
		VROUNDPS(Imm(8), f, whole)
		VSUBPS(whole, f, f)
	}
	top := len(e.p) - 1
	VMOVUPS(e.p[top], r)
	for i := top - 1; i >= 0; i-- {
		VFMADD213PS(e.p[i], f, r)
	}
	if s.lanes == 16 {
		VSCALEFPS(whole, r, r)
	} else {
		VCVTPS2DQ(whole, whole)
		VPADDD(e.bias, whole, whole)
		VPSLLD(U8(23), whole, whole)
		VMULPS(whole, r, r)
	}
	return r
}

// laneMask is a mask of the first n lanes: an opmask register or a vector of all ones and zeros.
func (s isa) laneMask(n reg.GPVirtual) reg.Register {
	if s.lanes == 16 {
		one, k := GP64(), K()
		MOVQ(U32(1), one)
		SHLXQ(n, one, one)
		DECQ(one)
		KMOVW(one.As32(), k)
		return k
	}
	x, limit, mask := XMM(), s.vec(), s.vec()
	VMOVD(n.As32(), x)
	VPBROADCASTD(x, limit)
	VPCMPGTD(laneNumbers(), limit, mask)
	return mask
}

// laneNumbers is a table of 0 to 7, declared once.
var laneNumbers = sync.OnceValue(func() Mem {
	m := GLOBL("lanes", RODATA|NOPTR)
	for i := range 8 {
		DATA(4*i, U32(uint32(i)))
	}
	return m
})

// expRow: the softmax's numerators of a segment of a row.
func expRow(s isa) {
	start(s, "expRow", "func(n int, x *float32, top float32) (z float32, zt float32)",
		"x[j] = 2^(x[j]-top); z is their sum, zt the sum of 2^t*t with t = x[j]-top. Any n.")
	n, x := load("n"), load("x")
	top := s.broadcast("top")
	e := newExponential(s)
	z := s.zeros(4)
	body := func(m Mem, z, zt reg.VecVirtual) {
		t := s.vec()
		VMOVUPS(m, t)
		VSUBPS(top, t, t)
		r := e.of(t)
		VMOVUPS(r, m)
		VADDPS(r, z, z)
		VFMADD231PS(r, t, zt)
	}
	w := s.bytes()
	loop("pair", n, 2*s.lanes, func() {
		body(at(x, 0), z[0], z[2])
		body(at(x, w), z[1], z[3])
		ADDQ(U32(uint32(2*w)), x)
	})
	loop("one", n, s.lanes, func() {
		body(at(x, 0), z[0], z[2])
		ADDQ(U32(uint32(w)), x)
	})
	TESTQ(n, n)
	JZ(LabelRef("done"))
	mask := s.laneMask(n)
	t := s.vec()
	if s.lanes == 16 {
		VMOVUPS_Z(at(x, 0), mask, t)
		VSUBPS(top, t, t)
		r := e.of(t)
		VMOVUPS(r, mask, at(x, 0))
		VADDPS(r, z[1], mask, z[1])
		VFMADD231PS(r, t, mask, z[3])
	} else {
		VMASKMOVPS(at(x, 0), mask, t)
		VSUBPS(top, t, t)
		r := e.of(t)
		VMASKMOVPS(r, mask, at(x, 0))
		VANDPS(mask, r, r)
		VADDPS(r, z[1], z[1])
		VFMADD231PS(r, t, z[3])
	}
	Label("done")
	VADDPS(z[1], z[0], z[0])
	VADDPS(z[3], z[2], z[2])
	Store(s.sum(z[0]).AsX(), Return("z"))
	Store(s.sum(z[2]).AsX(), Return("zt"))
	end()
}

// rowMax: the largest of n values.
func rowMax(s isa) {
	start(s, "rowMax", "func(n int, x *float32) float32", "rowMax is the largest of n >= 1 values.")
	n, x := load("n"), load("x")
	low := s.constant(0xff800000)
	m := make([]reg.VecVirtual, 4)
	for i := range m {
		m[i] = s.vec()
		VMOVAPS(low, m[i])
	}
	w := s.bytes()
	loop("four", n, 4*s.lanes, func() {
		for u := range m {
			VMAXPS(at(x, w*u), m[u], m[u])
		}
		ADDQ(U32(uint32(4*w)), x)
	})
	loop("one", n, s.lanes, func() {
		VMAXPS(at(x, 0), m[0], m[0])
		ADDQ(U32(uint32(w)), x)
	})
	TESTQ(n, n)
	JZ(LabelRef("done"))
	mask := s.laneMask(n)
	if s.lanes == 16 {
		VMAXPS(at(x, 0), m[1], mask, m[1])
	} else {
		t := s.vec()
		VMASKMOVPS(at(x, 0), mask, t)
		VBLENDVPS(mask, t, low, t)
		VMAXPS(t, m[1], m[1])
	}
	Label("done")
	VMAXPS(m[1], m[0], m[0])
	VMAXPS(m[3], m[2], m[2])
	VMAXPS(m[2], m[0], m[0])
	y := m[0]
	if s.lanes == 16 {
		y = YMM()
		VEXTRACTF64X4(Imm(1), m[0], y)
		VMAXPS(m[0].AsY(), y.AsY(), y.AsY())
	}
	a, b := XMM(), XMM()
	VEXTRACTF128(Imm(1), y.AsY(), a)
	VMAXPS(y.AsX(), a, a)
	VPERMILPS(Imm(0x4e), a, b)
	VMAXPS(b, a, a)
	VPERMILPS(Imm(0xb1), a, b)
	VMAXPS(b, a, a)
	Store(a, ReturnIndex(0))
	end()
}

// columns: weighted column sums of a strip.
func columns(s isa) {
	start(s, "columns", "func(n int, rows int, e *float32, lde int, z *float32, out *float32)", "out[j] = sum over rows of z[r]*e[r*lde+j].")
	n, rows, e, lde, z, out := load("n"), load("rows"), load("e"), load("lde"), load("z"), load("out")
	SHLQ(U8(2), lde)
	w := s.bytes()
	p, r := GP64(), GP64()
	block := func(label string, vectors int) {
		loop(label, n, vectors*s.lanes, func() {
			acc := s.zeros(vectors)
			f := s.vec()
			MOVQ(e, p)
			XORQ(r, r)
			Label(label + "_rows")
			VBROADCASTSS(Mem{Base: z, Index: r, Scale: 4}, f)
			for u, v := range acc {
				VFMADD231PS(at(p, w*u), f, v)
			}
			ADDQ(lde, p)
			INCQ(r)
			CMPQ(r, rows)
			JLT(LabelRef(label + "_rows"))
			for u, v := range acc {
				VMOVUPS(v, at(out, w*u))
			}
			ADDQ(U32(uint32(w*vectors)), e)
			ADDQ(U32(uint32(w*vectors)), out)
		})
	}
	block("eight", 8)
	block("one", 1)
	end()
}

// elementwise writes a kernel whose body handles one vector at byte offset off of every pointer parameter.
func elementwise(s isa, name, signature, doc string, prepare func(), body func(v func(param string) Mem), finish func(), pointers ...string) {
	start(s, name, signature, doc+" n a multiple of the lanes.")
	n := load("n")
	base := map[string]reg.GPVirtual{}
	for _, p := range pointers {
		base[p] = load(p)
	}
	if prepare != nil {
		prepare()
	}
	off := GP64()
	XORQ(off, off)
	SHLQ(U8(2), n)
	JZ(LabelRef("done"))
	Label("loop")
	body(func(param string) Mem { return Mem{Base: base[param], Index: off, Scale: 1} })
	ADDQ(U8(s.bytes()), off)
	CMPQ(off, n)
	JLT(LabelRef("loop"))
	Label("done")
	if finish != nil {
		finish()
	}
	end()
}

func vectors(s isa) {
	vec := s.vec
	elementwise(s, "add", "func(n int, dst *float32, x *float32)", "dst += x.", nil, func(v func(string) Mem) {
		a := vec()
		VMOVUPS(v("dst"), a)
		VADDPS(v("x"), a, a)
		VMOVUPS(a, v("dst"))
	}, nil, "dst", "x")

	var c reg.VecVirtual
	elementwise(s, "scale", "func(n int, dst *float32, x *float32, c float32)", "dst = c*x.", func() { c = s.broadcast("c") }, func(v func(string) Mem) {
		a := vec()
		VMULPS(v("x"), c, a)
		VMOVUPS(a, v("dst"))
	}, nil, "dst", "x")

	var acc reg.VecVirtual
	zero := func() { acc = s.zeros(1)[0] }
	store := func() { Store(s.sum(acc).AsX(), ReturnIndex(0)) }
	elementwise(s, "dot", "func(n int, x *float32, y *float32) float32", "dot is the sum of x*y.", zero, func(v func(string) Mem) {
		a := vec()
		VMOVUPS(v("x"), a)
		VFMADD231PS(v("y"), a, acc)
	}, store, "x", "y")
	elementwise(s, "dot3", "func(n int, x *float32, y *float32, w *float32) float32", "dot3 is the sum of x*y*w.", zero, func(v func(string) Mem) {
		a := vec()
		VMOVUPS(v("x"), a)
		VMULPS(v("w"), a, a)
		VFMADD231PS(v("y"), a, acc)
	}, store, "x", "y", "w")

	elementwise(s, "norm", "func(n int, y *float32, x *float32, w *float32, c float32)", "y = c*x*w.", func() { c = s.broadcast("c") }, func(v func(string) Mem) {
		a := vec()
		VMULPS(v("x"), c, a)
		VMULPS(v("w"), a, a)
		VMOVUPS(a, v("y"))
	}, nil, "y", "x", "w")
	var b reg.VecVirtual
	elementwise(s, "normBack", "func(n int, dx *float32, dy *float32, x *float32, w *float32, r float32, c float32)", "dx += r*dy*w - c*x.",
		func() { c, b = s.broadcast("r"), s.broadcast("c") }, func(v func(string) Mem) {
			a, o := vec(), vec()
			VMULPS(v("dy"), c, a)
			VMOVUPS(v("dx"), o)
			VFMADD231PS(v("w"), a, o)
			VFNMADD231PS(v("x"), b, o)
			VMOVUPS(o, v("dx"))
		}, nil, "dx", "dy", "x", "w")

	// sigmoid(x) = 1 / (1 + 2^(-x log2 e)). Above -x log2 e = 126 the exponential would overflow in AVX2's scaling.
	var e exponential
	var slope, ceiling Op
	var one reg.VecVirtual
	prepare := func() {
		e = newExponential(s)
		slope, one, ceiling = s.operand(math.Float32bits(-math.Log2E)), s.float(1), s.operand(math.Float32bits(126))
	}
	sigmoid := func(x reg.VecVirtual) reg.VecVirtual {
		t := vec()
		VMULPS(slope, x, t)
		VMINPS(ceiling, t, t)
		r := e.of(t)
		VADDPS(one, r, r)
		VDIVPS(r, one, r)
		return r
	}
	elementwise(s, "swiglu", "func(n int, y *float32, gate *float32, up *float32)", "y = gate*sigmoid(gate)*up.", prepare, func(v func(string) Mem) {
		x := vec()
		VMOVUPS(v("gate"), x)
		r := sigmoid(x)
		VMULPS(x, r, r)
		VMULPS(v("up"), r, r)
		VMOVUPS(r, v("y"))
	}, nil, "y", "gate", "up")
	elementwise(s, "swigluBack", "func(n int, dgate *float32, dup *float32, dy *float32, gate *float32, up *float32)",
		"With s = sigmoid(gate): dup = dy*gate*s, dgate = dy*up*s*(1+gate*(1-s)).", prepare, func(v func(string) Mem) {
			x, d, t := vec(), vec(), vec()
			VMOVUPS(v("gate"), x)
			VMOVUPS(v("dy"), d)
			r := sigmoid(x)
			VSUBPS(r, one, t)
			VFMADD213PS(one, x, t) // 1 + gate*(1-s)
			VMULPS(r, d, d)        // dy*s
			VMULPS(d, t, t)
			VMULPS(v("up"), t, t)
			VMULPS(x, d, d)
			VMOVUPS(d, v("dup"))
			VMOVUPS(t, v("dgate"))
		}, nil, "dgate", "dup", "dy", "gate", "up")

	elementwise(s, "rope", "func(n int, lo *float32, hi *float32, cos *float32, sin *float32, sign float32)",
		"lo, hi = lo*cos - hi*sin*sign, hi*cos + lo*sin*sign.", func() { c = s.broadcast("sign") }, func(v func(string) Mem) {
			x, y, sn, cs, a, h := vec(), vec(), vec(), vec(), vec(), vec()
			VMOVUPS(v("lo"), x)
			VMOVUPS(v("hi"), y)
			VMULPS(v("sin"), c, sn)
			VMOVUPS(v("cos"), cs)
			VMULPS(cs, x, a)
			VFNMADD231PS(sn, y, a)
			VMULPS(cs, y, h)
			VFMADD231PS(sn, x, h)
			VMOVUPS(a, v("lo"))
			VMOVUPS(h, v("hi"))
		}, nil, "lo", "hi", "cos", "sin")

	elementwise(s, "merge", "func(n int, out *float32, full *float32, stream *float32, c float32)", "out = stream + c*(full-stream).",
		func() { c = s.broadcast("c") }, func(v func(string) Mem) {
			a, f := vec(), vec()
			VMOVUPS(v("stream"), a)
			VMOVUPS(v("full"), f)
			VSUBPS(a, f, f)
			VFMADD231PS(f, c, a)
			VMOVUPS(a, v("out"))
		}, nil, "out", "full", "stream")
	elementwise(s, "mergeBack", "func(n int, dstream *float32, dout *float32, full *float32, stream *float32, c float32) float32",
		"dstream = c*dout; returns the sum of dout*(full-stream).", func() { c = s.broadcast("c"); zero() }, func(v func(string) Mem) {
			d, f := vec(), vec()
			VMOVUPS(v("dout"), d)
			VMOVUPS(v("full"), f)
			VSUBPS(v("stream"), f, f)
			VFMADD231PS(f, d, acc)
			VMULPS(c, d, d)
			VMOVUPS(d, v("dstream"))
		}, store, "dstream", "dout", "full", "stream")

	elementwise(s, "softmaxBack", "func(n int, e *float32, dp *float32, z float32, mean float32, c float32)",
		"e *= z; dp = c*e*(dp-mean): probabilities and gradient of the scores.",
		func() { c, b, acc = s.broadcast("z"), s.broadcast("mean"), s.broadcast("c") }, func(v func(string) Mem) {
			p, d := vec(), vec()
			VMULPS(v("e"), c, p)
			VMOVUPS(v("dp"), d)
			VSUBPS(b, d, d)
			VMULPS(p, d, d)
			VMULPS(acc, d, d)
			VMOVUPS(p, v("e"))
			VMOVUPS(d, v("dp"))
		}, nil, "e", "dp")

	// A NaN or an infinity times zero is NaN, and NaN survives addition.
	elementwise(s, "spoil", "func(n int, x *float32) float32", "spoil is 0 when every value is finite, otherwise NaN.", func() { zero(); c = s.zeros(1)[0] }, func(v func(string) Mem) {
		VFMADD231PS(v("x"), c, acc)
	}, store, "x")
}

// above: mass and number of the values over a threshold.
func above(s isa) {
	start(s, "above", "func(n int, x *float32, threshold float32) (mass float32, count int)", "above returns the sum and the number of the values > threshold. n a multiple of the lanes.")
	n, x := load("n"), load("x")
	limit := s.broadcast("threshold")
	sum := s.zeros(4) // two sums, two counts
	var one reg.VecVirtual
	if s.lanes == 16 {
		one = s.constant(1)
	}
	w := s.bytes()
	body := func(u int) {
		v := s.vec()
		VMOVUPS(at(x, w*u), v)
		if s.lanes == 16 {
			k := K()
			VCMPPS(Imm(14), limit, v, k)
			VADDPS(v, sum[u], k, sum[u])
			VPADDD(one, sum[2+u], k, sum[2+u])
		} else {
			m := s.vec()
			VCMPPS(Imm(14), limit, v, m)
			VPSUBD(m, sum[2+u], sum[2+u])
			VANDPS(m, v, v)
			VADDPS(v, sum[u], sum[u])
		}
	}
	loop("pair", n, 2*s.lanes, func() {
		body(0)
		body(1)
		ADDQ(U32(uint32(2*w)), x)
	})
	loop("one", n, s.lanes, func() {
		body(0)
		ADDQ(U32(uint32(w)), x)
	})
	VADDPS(sum[1], sum[0], sum[0])
	VPADDD(sum[3], sum[2], sum[2])
	Store(s.sum(sum[0]).AsX(), Return("mass"))
	y := sum[2]
	if s.lanes == 16 {
		y = YMM()
		VEXTRACTI64X4(Imm(1), sum[2], y)
		VPADDD(sum[2].AsY(), y.AsY(), y.AsY())
	}
	c, total := XMM(), GP32()
	VEXTRACTI128(Imm(1), y.AsY(), c)
	VPADDD(y.AsX(), c, c)
	VPHADDD(c, c, c)
	VPHADDD(c, c, c)
	VMOVD(c, total)
	wide := GP64()
	MOVL(total, wide.As32())
	Store(wide, Return("count"))
	end()
}

// moments: running mean and squared deviations in float64, half a vector at a time.
func moments(s isa) {
	start(s, "moments", "func(n int, p *float32, z float32, c float64, mean *float64, m2 *float64)",
		"x = z*p; d = x-mean; mean += c*d; m2 += d*(x-mean). n a multiple of the lanes.")
	n, p, mean, m2 := load("n"), load("p"), load("mean"), load("m2")
	half := XMM
	if s.lanes == 16 {
		half = YMM
	}
	z, c := half(), s.vec()
	narrow, err := Param("z").Resolve()
	if err != nil {
		panic(err)
	}
	VBROADCASTSS(narrow.Addr, z)
	double, err := Param("c").Resolve()
	if err != nil {
		panic(err)
	}
	VBROADCASTSD(double.Addr, c)
	loop("loop", n, s.lanes/2, func() {
		f, x, m, d := half(), s.vec(), s.vec(), s.vec()
		VMULPS(at(p, 0), z, f)
		VCVTPS2PD(f, x)
		VMOVUPD(at(mean, 0), m)
		VSUBPD(m, x, d)
		VFMADD231PD(d, c, m)
		VMOVUPD(m, at(mean, 0))
		VSUBPD(m, x, x)
		VMULPD(x, d, d)
		VADDPD(at(m2, 0), d, d)
		VMOVUPD(d, at(m2, 0))
		ADDQ(U32(uint32(s.bytes()/2)), p)
		ADDQ(U32(uint32(s.bytes())), mean)
		ADDQ(U32(uint32(s.bytes())), m2)
	})
	end()
}

// peak is a loop of independent fused multiply-adds, for calibrating benchmarks: 24 (AVX-512) or 10 (AVX2) a turn.
func peak(s isa, chains int) {
	TEXT("peak"+s.suffix, NOSPLIT, "func(n int)")
	Doc(fmt.Sprintf("peak%s runs n turns of %d independent vector FMAs.", s.suffix, chains))
	n := load("n")
	for _, v := range s.phys {
		s.zero(v)
	}
	last := len(s.phys) - 1
	Label("loop")
	for i := range chains {
		VFMADD231PS(s.phys[last], s.phys[last-1], s.phys[i])
	}
	DECQ(n)
	JNZ(LabelRef("loop"))
	end()
}

func main() {
	for _, s := range []isa{avx512, avx2} {
		for _, rows := range s.rows {
			matrix(s, rows, false)
			matrix(s, rows, true)
		}
		dotRows(s)
		expRow(s)
		rowMax(s)
		columns(s)
		vectors(s)
		above(s)
		moments(s)
	}
	peak(avx512, 24)
	peak(avx2, 10)
	amx := flag.String("amx", "", "file for the AMX kernels")
	Generate() // parses the flags
	if err := writeAMX(*amx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
