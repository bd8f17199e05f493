//go:build linux

package fakecuda

import (
	"fmt"
	"math"
	"unsafe"
)

// matrix is an operand as cuBLAS takes it: column-major, ld values from column to column.
type matrix struct {
	at     uint64
	kind   int32 // 0: float32, 14: bfloat16
	ld     int32
	stride int64 // values from matrix to matrix of a batch
}

func (m matrix) size() int {
	if m.kind == 14 {
		return 2
	}
	return 4
}

type gemm struct {
	ta, tb, m, n, k int32
	alpha, beta     float32
	a, b, c         matrix
	batch           int32
}

// gemm checks a product as cuBLAS does, and queues it.
func (f *Driver) gemm(name string, h uintptr, g gemm, compute int32) int32 {
	known := func(m matrix) bool { return m.kind == 0 || m.kind == 14 }
	if g.a.kind != g.b.kind || !known(g.a) || !known(g.c) || compute != 68 || g.a.kind == 0 && g.c.kind != 0 {
		f.fail(blasNotSupported, "%s of types %d, %d, %d in %d", name, g.a.kind, g.b.kind, g.c.kind, compute)
		return blasNotSupported
	}
	ra, rb := g.m, g.k
	if g.ta != 0 {
		ra = g.k
	}
	if g.tb != 0 {
		rb = g.n
	}
	if g.m < 0 || g.n < 0 || g.k < 0 || g.batch < 0 || g.a.ld < max(1, ra) || g.b.ld < max(1, rb) || g.c.ld < max(1, g.m) {
		return f.fail(blasInvalidValue, "%s: m %d n %d k %d, leading dimensions %d, %d, %d", name, g.m, g.n, g.k, g.a.ld, g.b.ld, g.c.ld)
	}
	at, ok := f.blas[h]
	if !ok {
		return f.fail(blasInvalidValue, "%s: no handle %#x", name, h)
	}
	if f.queue(name, at, func(on *gpu) error { return f.multiply(on, g) }) != okay {
		return blasExecution
	}
	f.gemmFLOP += 2 * int64(g.m) * int64(g.n) * int64(g.k) * int64(g.batch)
	return okay
}

// multiply computes c = alpha * op(a) * op(b) + beta * c, with sums in float32.
func (f *Driver) multiply(on *gpu, g gemm) error {
	if f.options.Trace != nil {
		f.options.Trace(Work{M: int(g.m), N: int(g.n), K: int(g.k), Batch: int(g.batch), Half: g.a.kind == 14, Accumulate: g.beta != 0})
		return nil
	}
	m, n, k := int(g.m), int(g.n), int(g.k)
	for z := range int64(g.batch) {
		// Rows of op(a) and columns of op(b), each k values side by side.
		rows, err := on.vectors(g.a, z, m, k, g.ta != 0)
		if err != nil {
			return fmt.Errorf("a: %w", err)
		}
		columns, err := on.vectors(g.b, z, n, k, g.tb == 0)
		if err != nil {
			return fmt.Errorf("b: %w", err)
		}
		size := g.c.size()
		c, err := on.device.Bytes(g.c.at+uint64(z*g.c.stride)*uint64(size), ((n-1)*int(g.c.ld)+m)*size)
		if err != nil {
			return fmt.Errorf("c: %w", err)
		}
		for j := range n {
			y := columns[j*k : (j+1)*k]
			for i := range m {
				x := rows[i*k : (i+1)*k]
				var s0, s1 float32
				l := 0
				for ; l+2 <= k; l += 2 {
					s0 += x[l] * y[l]
					s1 += x[l+1] * y[l+1]
				}
				if l < k {
					s0 += x[l] * y[l]
				}
				s := g.alpha * (s0 + s1)
				to := c[(j*int(g.c.ld)+i)*size:]
				if g.beta != 0 {
					s += g.beta * read(to, g.c.kind)
				}
				write(to, g.c.kind, s)
			}
		}
	}
	return nil
}

// vectors copies count vectors of k values: with contiguous set, vector i is column i of the matrix in memory, else row i.
func (f *gpu) vectors(m matrix, z int64, count, k int, contiguous bool) ([]float32, error) {
	size, ld := m.size(), int(m.ld)
	rows, cols := count, k
	if contiguous {
		rows, cols = k, count
	}
	raw, err := f.device.Bytes(m.at+uint64(z*m.stride)*uint64(size), ((cols-1)*ld+rows)*size)
	if err != nil {
		return nil, err
	}
	out := make([]float32, count*k)
	for c := range cols {
		for r := range rows {
			v := read(raw[(c*ld+r)*size:], m.kind)
			if contiguous {
				out[c*k+r] = v
			} else {
				out[r*k+c] = v
			}
		}
	}
	return out, nil
}

func read(p []byte, kind int32) float32 {
	if kind == 14 {
		return math.Float32frombits(uint32(p[0])<<16 | uint32(p[1])<<24)
	}
	return *(*float32)(unsafe.Pointer(&p[0]))
}

func write(p []byte, kind int32, v float32) {
	if kind == 0 {
		*(*float32)(unsafe.Pointer(&p[0])) = v
		return
	}
	u := math.Float32bits(v)
	if v == v {
		u += 0x7fff + u>>16&1
	}
	p[0], p[1] = byte(u>>16), byte(u>>24)
}
