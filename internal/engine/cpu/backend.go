// Package cpu is the fast engine.Backend for processors: float32 arithmetic in assembly kernels that are chosen at run
// time by what the processor can do, on several threads. docs/cpu.md says what was measured.
//
// Results are bit-identical for any number of threads: work is divided among threads by rows and columns of results
// only, and every sum has an order that depends on the shapes alone. They differ between tiers by rounding.
package cpu

import (
	"fmt"
	"math"
	"runtime"
	"strings"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// Options choose how the backend computes. The zero value means: everything automatic.
type Options struct {
	// Threads is the number of goroutines that compute at once; 0 means GOMAXPROCS.
	Threads int
	// Tier is the set of kernels: "auto", "amx", "avx512", "avx2" or "go". "" means auto, the best that the processor has.
	Tier string
	// Precision is the arithmetic of products with weights: "f32", "split" (bfloat16 parts that together are as exact
	// as float32, on processors with a matrix unit) or "auto", split where there is a unit. "" means auto.
	Precision string
	// PackLimit is the memory in bytes that weights may take in the form that the kernels read. Weights beyond it are
	// converted from their stored form at every use, so that a model larger than memory runs. 0 means half of the
	// memory of the machine, a negative value none.
	PackLimit int64
}

// Backend implements engine.Backend.
type Backend struct {
	k       *kernels
	split   *splitKernels // nil: products with weights are in float32
	threads int
	arena   arena
	memory  pool
	limit   int64 // for packed weights, bytes
	packed  int64
	work    []*workspace
}

var _ engine.Backend = (*Backend)(nil)

// New returns a backend, or an error that says what the options can be.
func New(o Options) (engine.Backend, error) {
	b := &Backend{threads: o.Threads, limit: o.PackLimit}
	b.memory.arena = &b.arena
	if b.threads == 0 {
		b.threads = runtime.GOMAXPROCS(0)
	}
	if b.threads < 0 {
		return nil, fmt.Errorf("%d threads, want 1 or more", o.Threads)
	}
	if b.limit == 0 {
		b.limit = physicalMemory() / 2
	}
	switch o.Precision {
	case "", "auto", "f32", "split":
	default:
		return nil, fmt.Errorf("precision %q is not known to the CPU backend, want auto, f32 or split", o.Precision)
	}
	var names []string
	for _, k := range tiers() {
		names = append(names, k.tier)
		automatic := (o.Tier == "" || o.Tier == "auto") && b.k == nil
		// With the arithmetic in float32, the tier of a matrix unit is that of its vector unit.
		if o.Tier == k.tier || (automatic && (k.split == nil || o.Precision != "f32")) {
			b.k, b.split = k, k.split
		}
	}
	if b.k == nil {
		return nil, fmt.Errorf("CPU tier %q is not known or not offered by this processor, want auto or one of %s", o.Tier, strings.Join(names, ", "))
	}
	if (o.Precision == "split") != (b.split != nil) && o.Precision != "" && o.Precision != "auto" {
		return nil, fmt.Errorf("CPU tier %s does not compute in precision %s", b.k.tier, o.Precision)
	}
	for range b.threads {
		b.work = append(b.work, &workspace{arena: &b.arena})
	}
	return b, nil
}

// Name says tier and precision, for instance "cpu avx512 f32", and why a better tier is not used.
func (b *Backend) Name() string {
	name := "cpu " + b.k.tier + " f32"
	if b.split != nil {
		name = "cpu " + b.k.tier + " split"
	}
	if b.k.note != "" {
		name += " (" + b.k.note + ")"
	}
	return name
}

// Close gives all memory back, that of tensors and weights too.
func (b *Backend) Close() error {
	b.memory, b.work, b.packed = pool{arena: &b.arena}, nil, 0
	b.arena.close()
	return nil
}

// workspace holds one worker's buffers between uses.
type workspace struct {
	arena   *arena
	buffers [buffers][]float32
}

// buffer returns buffer i with n values of any content.
func (w *workspace) buffer(i, n int) []float32 {
	if cap(w.buffers[i]) < n {
		w.arena.put(w.buffers[i])
		w.buffers[i] = nil
		w.buffers[i] = w.arena.get(n + n/8)
	}
	return w.buffers[i][:n]
}

func (b *Backend) Copy(dst, src engine.Tensor) {
	x, y := values(src), whole(dst)
	b.ranges(len(x), 1, func(lo, hi int) { copy(y[lo:hi], x[lo:hi]) })
}

func (b *Backend) Upload(dst engine.Tensor, src []float64) {
	y := values(dst)
	b.ranges(len(src), 1, func(lo, hi int) {
		for i, v := range src[lo:hi] {
			y[lo+i] = float32(v)
		}
	})
}

func (b *Backend) Download(dst []float64, src engine.Tensor) {
	x := values(src)
	b.ranges(len(x), 1, func(lo, hi int) {
		for i, v := range x[lo:hi] {
			dst[lo+i] = float64(v)
		}
	})
}

func (b *Backend) Embed(dst engine.Tensor, w engine.Weight, ids []int32) {
	m, y, d := w.(*weight), whole(dst), dst.Cols()
	b.ranges(len(ids), d, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			m.decodeRow(y[i*d:(i+1)*d], int(ids[i]))
		}
	})
}

func (b *Backend) AddBias(x engine.Tensor, bias engine.Weight) {
	y, n, v := values(x), x.Cols(), bias.(*weight).values
	b.ranges(x.Rows(), n, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			b.k.add(y[i*n:(i+1)*n], v)
		}
	})
}

// inverseRMS is 1 / sqrt(mean(x^2) + eps).
func (b *Backend) inverseRMS(x []float32, eps float64) float32 {
	return float32(1 / math.Sqrt(float64(b.k.dot(x, x))/float64(len(x))+eps))
}

func (b *Backend) RMSNorm(y, x engine.Tensor, w engine.Weight, eps float64) {
	in, d, gain := values(x), x.Cols(), w.(*weight).values
	out := whole(y)
	b.ranges(x.Rows(), 4*d, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			row := in[i*d : (i+1)*d]
			b.k.norm(out[i*d:(i+1)*d], row, gain, b.inverseRMS(row, eps))
		}
	})
}

// With r = 1/sqrt(mean(x^2)+eps): dx += r*dy*w - x * r^3 * mean(dy*w*x).
func (b *Backend) RMSNormBackward(dx, dy, x engine.Tensor, w engine.Weight, eps float64) {
	din, dout, in, d, gain := values(dx), values(dy), values(x), x.Cols(), w.(*weight).values
	b.ranges(x.Rows(), 8*d, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			row, grad := in[i*d:(i+1)*d], dout[i*d:(i+1)*d]
			r := b.inverseRMS(row, eps)
			c := b.k.dot3(grad, row, gain) * r * r * r / float32(d)
			b.k.back(din[i*d:(i+1)*d], grad, row, gain, r, c)
		}
	})
}

func (b *Backend) Split(q, k, v, qkv engine.Tensor) {
	x, n := values(qkv), qkv.Cols()
	parts, widths := [3][]float32{whole(q), whole(k), whole(v)}, [3]int{q.Cols(), k.Cols(), v.Cols()}
	b.ranges(qkv.Rows(), n, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			row := x[i*n : (i+1)*n]
			for p, w := range widths {
				copy(parts[p][i*w:(i+1)*w], row)
				row = row[w:]
			}
		}
	})
}

func (b *Backend) SplitBackward(dqkv, dq, dk, dv engine.Tensor) {
	x, n := whole(dqkv), dqkv.Cols()
	parts, widths := [3][]float32{values(dq), values(dk), values(dv)}, [3]int{dq.Cols(), dk.Cols(), dv.Cols()}
	b.ranges(dqkv.Rows(), n, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			row := x[i*n : (i+1)*n]
			for p, w := range widths {
				copy(row, parts[p][i*w:(i+1)*w])
				row = row[w:]
			}
		}
	})
}

func (b *Backend) RoPE(x engine.Tensor, table *engine.Rotary, start int, inverse bool) {
	y, n, d := values(x), x.Cols(), table.HeadDim
	half, sign := d/2, float32(1)
	if inverse { // the transposed map: a rotation's inverse, times the scaling's factor
		sign = -1
	}
	b.ranges(x.Rows(), 2*n, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			at := (start + i) * half
			cos, sin := table.Cos[at:at+half], table.Sin[at:at+half]
			for h := i * n; h < (i+1)*n; h += d {
				b.k.rope(y[h:h+half], y[h+half:h+d], cos, sin, sign)
			}
		}
	})
}

func (b *Backend) GatedMerge(out, full, stream engine.Tensor, gates []float64, headDim int) {
	f, s, n := values(full), values(stream), out.Cols()
	o, width := whole(out), n/len(gates)
	b.ranges(out.Rows(), 2*n, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			for k, gate := range gates {
				at := i*n + k*width
				b.k.merge(o[at:at+width], f[at:at+width], s[at:at+width], float32(gate))
			}
		}
	})
}

func (b *Backend) GatedMergeBackward(dstream, dout, full, stream engine.Tensor, gates []float64, headDim int) []float64 {
	g, f, s, n := values(dout), values(full), values(stream), dout.Cols()
	d, width, rows := whole(dstream), n/len(gates), dout.Rows()
	partial := make([]float32, rows*len(gates))
	b.ranges(rows, 3*n, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			for k, gate := range gates {
				at := i*n + k*width
				partial[i*len(gates)+k] = b.k.mergeBack(d[at:at+width], g[at:at+width], f[at:at+width], s[at:at+width], float32(1-gate))
			}
		}
	})
	dg := make([]float64, len(gates))
	for i, v := range partial {
		dg[i%len(gates)] += float64(v)
	}
	return dg
}

func (b *Backend) SwiGLU(y, gu engine.Tensor) {
	x, n := values(gu), y.Cols()
	out := whole(y)
	b.ranges(y.Rows(), 16*n, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			b.k.swiglu(out[i*n:(i+1)*n], x[2*i*n:(2*i+1)*n], x[(2*i+1)*n:(2*i+2)*n])
		}
	})
}

func (b *Backend) SwiGLUBackward(dgu, dy, gu engine.Tensor) {
	x, g, n := values(gu), values(dy), dy.Cols()
	out := whole(dgu)
	b.ranges(dy.Rows(), 16*n, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			gate, up := 2*i*n, (2*i+1)*n
			b.k.swigluBack(out[gate:gate+n], out[up:up+n], g[i*n:(i+1)*n], x[gate:gate+n], x[up:up+n])
		}
	})
}

func (b *Backend) SquaredError(da, a, c engine.Tensor, rows []int) float64 {
	x, y, d := values(a), values(c), a.Cols()
	g := whole(da)
	clear(g)
	n := float64(len(rows) * d)
	var sum float64
	for _, r := range rows {
		grad := g[r*d : (r+1)*d]
		for j, v := range x[r*d : (r+1)*d] {
			e := float64(v) - float64(y[r*d+j])
			sum += e * e
			grad[j] += float32(2 * e / n)
		}
	}
	return sum / n
}

func (b *Backend) Finite(t engine.Tensor) int {
	x, n := values(t), t.Cols()
	bad := make([]bool, t.Rows())
	b.ranges(t.Rows(), n, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			bad[i] = b.k.spoil(x[i*n:(i+1)*n]) != 0 // NaN differs from everything
		}
	})
	for i, is := range bad {
		if is {
			return i
		}
	}
	return -1
}
