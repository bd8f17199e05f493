package cuda

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// putFloats fills dst with the first values of v, little-endian as the GPU is.
func putFloats(dst []byte, v []float32) {
	for i := 0; i+4 <= len(dst); i += 4 {
		binary.LittleEndian.PutUint32(dst[i:], math.Float32bits(v[i/4]))
	}
}

func putInts(dst []byte, v []int32) {
	for i := 0; i+4 <= len(dst); i += 4 {
		binary.LittleEndian.PutUint32(dst[i:], uint32(v[i/4]))
	}
}

func (b *Backend) getFloats(p pointer, dst []float32) error {
	return b.dev.download(p, 4*len(dst), 4, func(src []byte, lo int) {
		for i := 0; i < len(src); i += 4 {
			dst[(lo+i)/4] = math.Float32frombits(binary.LittleEndian.Uint32(src[i:]))
		}
	})
}

func (b *Backend) getInts(p pointer, dst []int32) error {
	return b.dev.download(p, 4*len(dst), 4, func(src []byte, lo int) {
		for i := 0; i < len(src); i += 4 {
			dst[(lo+i)/4] = int32(binary.LittleEndian.Uint32(src[i:]))
		}
	})
}

// threadsFor is the size of blocks that work on n columns: whole warps.
func threadsFor(n int) int { return min(256, max(32, (n+31)/32*32)) }

// sameSize panics unless tensors have as many values.
func sameSize(a engine.Tensor, others ...engine.Tensor) {
	for _, o := range others {
		if a.Rows()*a.Cols() != o.Rows()*o.Cols() {
			panic(fmt.Sprintf("tensors of %d x %d and %d x %d", a.Rows(), a.Cols(), o.Rows(), o.Cols()))
		}
	}
}

// flat launches a kernel over n values, whose number is its last argument.
func (b *Backend) flat(name string, n int, args ...any) error {
	const threads = 256
	blocks := min((n+threads-1)/threads, 16*b.info.Processors)
	return b.dev.launch(name, grid{x: blocks}, threads, append(args, uint64(n))...)
}

func (b *Backend) Copy(dst, src engine.Tensor) {
	sameSize(dst, src)
	b.must(func() error {
		from := b.read(src)
		return b.dev.copyOver(b.write(dst), from, 4*src.Rows()*src.Cols())
	})
}

func (b *Backend) Upload(dst engine.Tensor, src []float64) {
	b.must(func() error {
		return b.dev.upload(b.write(dst), 4*dst.Rows()*dst.Cols(), 4, func(buf []byte, lo int) {
			for i := 0; i < len(buf); i += 4 {
				binary.LittleEndian.PutUint32(buf[i:], math.Float32bits(float32(src[(lo+i)/4])))
			}
		})
	})
}

func (b *Backend) Download(dst []float64, src engine.Tensor) {
	b.must(func() error {
		return b.dev.download(b.read(src), 4*src.Rows()*src.Cols(), 4, func(buf []byte, lo int) {
			for i := 0; i < len(buf); i += 4 {
				dst[(lo+i)/4] = float64(math.Float32frombits(binary.LittleEndian.Uint32(buf[i:])))
			}
		})
	})
}

// toBF16 rounds to the nearest, ties to even.
func toBF16(f float32) uint16 {
	u := math.Float32bits(f)
	if f != f {
		return 0x7fff
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}

func (b *Backend) Embed(dst engine.Tensor, w engine.Weight, ids []int32) {
	m := b.acquire(w)
	b.op(func(tmp *temporaries) error {
		list, err := tmp.ints(ids)
		if err != nil {
			return err
		}
		name := "kv_embed_f32"
		if m.kind == bf16 {
			name = "kv_embed_bf16"
		}
		return b.dev.launch(name, grid{x: len(ids)}, threadsFor(m.cols), b.write(dst), m.at, list, m.cols)
	})
}

// rounded returns a tensor's values as bfloat16.
func (b *Backend) rounded(tmp *temporaries, at pointer, n int) (pointer, error) {
	p, err := tmp.get(2 * n)
	if err != nil {
		return 0, err
	}
	return p, b.flat("kv_to_bf16", n, p, at)
}

// left is the left operand of a product with a weight, in the weight's precision.
func (b *Backend) left(tmp *temporaries, x engine.Tensor, kind number) (o operand, err error) {
	o = operand{at: b.read(x), kind: kind, ld: x.Cols()}
	if kind == bf16 {
		o.at, err = b.rounded(tmp, o.at, x.Rows()*x.Cols())
	}
	return o, err
}

// result is the address of a product's result.
func (b *Backend) result(t engine.Tensor, accumulate bool) operand {
	o := operand{kind: f32, ld: t.Cols()}
	if accumulate {
		o.at = b.read(t)
	} else {
		o.at = b.write(t)
	}
	return o
}

func (b *Backend) MatMul(dst, x engine.Tensor, w engine.Weight, accumulate bool) {
	m := b.acquire(w)
	if x.Cols() != m.cols || dst.Cols() != m.rows || dst.Rows() != x.Rows() {
		panic(fmt.Sprintf("product of %d x %d and %d x %d transposed to %d x %d", x.Rows(), x.Cols(), m.rows, m.cols, dst.Rows(), dst.Cols()))
	}
	b.op(func(tmp *temporaries) error {
		a, err := b.left(tmp, x, m.kind)
		if err != nil {
			return err
		}
		return b.dev.multiply(product{m: x.Rows(), n: m.rows, k: m.cols, a: a, b: operand{at: m.at, kind: m.kind, ld: m.cols}, tb: true,
			c: b.result(dst, accumulate), alpha: 1, accumulate: accumulate})
	})
}

func (b *Backend) MatMulBackward(dx, dy engine.Tensor, w engine.Weight, accumulate bool) {
	m := b.acquire(w)
	if dy.Cols() != m.rows || dx.Cols() != m.cols || dx.Rows() != dy.Rows() {
		panic(fmt.Sprintf("product of %d x %d and %d x %d to %d x %d", dy.Rows(), dy.Cols(), m.rows, m.cols, dx.Rows(), dx.Cols()))
	}
	b.op(func(tmp *temporaries) error {
		a, err := b.left(tmp, dy, m.kind)
		if err != nil {
			return err
		}
		return b.dev.multiply(product{m: dy.Rows(), n: m.cols, k: m.rows, a: a, b: operand{at: m.at, kind: m.kind, ld: m.cols},
			c: b.result(dx, accumulate), alpha: 1, accumulate: accumulate})
	})
}

// vector is a weight of one row.
func vector(w engine.Weight, n int) pointer {
	v := w.(*weight)
	if v.rows != 1 || v.cols != n {
		panic(fmt.Sprintf("vector of %d x %d, want 1 x %d", v.rows, v.cols, n))
	}
	return v.at
}

func (b *Backend) AddBias(x engine.Tensor, bias engine.Weight) {
	n := x.Cols()
	b.must(func() error {
		return b.dev.launch("kv_add_bias", grid{x: x.Rows()}, threadsFor(n), b.read(x), vector(bias, n), n)
	})
}

func (b *Backend) RMSNorm(y, x engine.Tensor, w engine.Weight, eps float64) {
	n := x.Cols()
	sameSize(y, x)
	b.must(func() error {
		in := b.read(x) // before write: y may be x
		return b.dev.launch("kv_rmsnorm", grid{x: x.Rows()}, threadsFor(n), b.write(y), in, vector(w, n), n, float32(eps))
	})
}

func (b *Backend) RMSNormBackward(dx, dy, x engine.Tensor, w engine.Weight, eps float64) {
	n := x.Cols()
	sameSize(dx, dy, x)
	b.must(func() error {
		return b.dev.launch("kv_rmsnorm_back", grid{x: x.Rows()}, threadsFor(n), b.read(dx), b.read(dy), b.read(x), vector(w, n), n, float32(eps))
	})
}

func (b *Backend) Split(q, k, v, qkv engine.Tensor) {
	b.must(func() error {
		in := b.read(qkv)
		return b.dev.launch("kv_split", grid{x: qkv.Rows()}, threadsFor(q.Cols()), b.write(q), b.write(k), b.write(v), in, q.Cols(), k.Cols(), v.Cols())
	})
}

func (b *Backend) SplitBackward(dqkv, dq, dk, dv engine.Tensor) {
	b.must(func() error {
		return b.dev.launch("kv_join", grid{x: dqkv.Rows()}, threadsFor(dq.Cols()), b.write(dqkv), b.read(dq), b.read(dk), b.read(dv), dq.Cols(), dk.Cols(), dv.Cols())
	})
}

// rotary is a RoPE table in the GPU's memory.
type rotary struct{ cos, sin pointer }

// tableOf returns the table on the GPU, which is uploaded at its first use. A newer table replaces the one before: a model has one,
// and makes a longer one when it needs it.
func (b *Backend) tableOf(t *engine.Rotary) (*rotary, error) {
	if r := b.rotary[t]; r != nil {
		return r, nil
	}
	for old, r := range b.rotary {
		delete(b.rotary, old)
		for _, p := range []pointer{r.cos, r.sin} {
			if err := b.dev.memory.put(p); err != nil {
				return nil, err
			}
		}
	}
	keep := &temporaries{b: b}
	cos, err := keep.floats(t.Cos)
	if err != nil {
		return nil, err
	}
	sin, err := keep.floats(t.Sin)
	if err != nil {
		return nil, err
	}
	b.rotary[t] = &rotary{cos, sin}
	return b.rotary[t], nil
}

func (b *Backend) RoPE(x engine.Tensor, table *engine.Rotary, start int, inverse bool) {
	half := table.HeadDim / 2
	if x.Cols()%table.HeadDim != 0 || (start+x.Rows())*half > len(table.Cos) {
		panic(fmt.Sprintf("rotation of %d rows of %d from %d with a table of %d values", x.Rows(), x.Cols(), start, len(table.Cos)))
	}
	sign := float32(1)
	if inverse { // the transposed map: a rotation's inverse, times the scaling's factor
		sign = -1
	}
	b.must(func() error {
		t, err := b.tableOf(table)
		if err != nil {
			return err
		}
		from := 4 * uint64(start*half)
		return b.dev.launch("kv_rope", grid{x: x.Rows()}, threadsFor(x.Cols()/2), b.read(x), t.cos+from, t.sin+from, x.Cols()/table.HeadDim, half, sign)
	})
}

// narrow are gates as the kernels take them.
func narrow(v []float64) []float32 {
	out := make([]float32, len(v))
	for i, x := range v {
		out[i] = float32(x)
	}
	return out
}

func (b *Backend) GatedMerge(out, full, stream engine.Tensor, gates []float64, headDim int) {
	n := out.Cols()
	sameSize(out, full, stream)
	b.op(func(tmp *temporaries) error {
		g, err := tmp.floats(narrow(gates))
		if err != nil {
			return err
		}
		return b.dev.launch("kv_merge", grid{x: out.Rows()}, threadsFor(n), b.write(out), b.read(full), b.read(stream), g, n, n/len(gates))
	})
}

func (b *Backend) GatedMergeBackward(dstream, dout, full, stream engine.Tensor, gates []float64, headDim int) []float64 {
	n, rows := dout.Cols(), dout.Rows()
	sameSize(dstream, dout, full, stream)
	partial := make([]float32, rows*len(gates))
	b.op(func(tmp *temporaries) error {
		g, err := tmp.floats(narrow(gates))
		if err != nil {
			return err
		}
		sums, err := tmp.get(4 * len(partial))
		if err != nil {
			return err
		}
		width := n / len(gates)
		if err := b.dev.launch("kv_merge_back", grid{x: rows, y: len(gates)}, threadsFor(width),
			b.write(dstream), b.read(dout), b.read(full), b.read(stream), g, sums, n, width); err != nil {
			return err
		}
		return b.getFloats(sums, partial)
	})
	dg := make([]float64, len(gates))
	for i, v := range partial {
		dg[i%len(gates)] += float64(v)
	}
	return dg
}

func (b *Backend) SwiGLU(y, gu engine.Tensor) {
	n := y.Cols()
	b.must(func() error {
		return b.dev.launch("kv_swiglu", grid{x: y.Rows()}, threadsFor(n), b.write(y), b.read(gu), n)
	})
}

func (b *Backend) SwiGLUBackward(dgu, dy, gu engine.Tensor) {
	n := dy.Cols()
	b.must(func() error {
		return b.dev.launch("kv_swiglu_back", grid{x: dy.Rows()}, threadsFor(n), b.write(dgu), b.read(dy), b.read(gu), n)
	})
}

func (b *Backend) SquaredError(da, a, c engine.Tensor, rows []int) float64 {
	sameSize(da, a, c)
	n := float64(len(rows) * a.Cols())
	times := map[int]int{} // a row may be listed more than once
	var list []int32
	for _, r := range rows {
		if times[r]++; times[r] == 1 {
			list = append(list, int32(r))
		}
	}
	scale := make([]float32, len(list))
	for i, r := range list {
		scale[i] = float32(2 * float64(times[int(r)]) / n)
	}
	partial := make([]float32, len(list))
	b.op(func(tmp *temporaries) error {
		grad := b.write(da)
		if err := b.dev.fill(grad, 0, 4*da.Rows()*da.Cols()); err != nil {
			return err
		}
		if len(list) == 0 {
			return nil
		}
		lp, err := tmp.ints(list)
		if err != nil {
			return err
		}
		sp, err := tmp.floats(scale)
		if err != nil {
			return err
		}
		sums, err := tmp.get(4 * len(partial))
		if err != nil {
			return err
		}
		if err := b.dev.launch("kv_squared_error", grid{x: len(list)}, threadsFor(a.Cols()), grad, sums, b.read(a), b.read(c), lp, sp, a.Cols()); err != nil {
			return err
		}
		return b.getFloats(sums, partial)
	})
	var sum float64
	for i, v := range partial {
		sum += float64(v) * float64(times[int(list[i])])
	}
	return sum / n
}

func (b *Backend) Finite(t engine.Tensor) int {
	first := []int32{math.MaxInt32}
	b.op(func(tmp *temporaries) error {
		p, err := tmp.ints(first)
		if err != nil {
			return err
		}
		if err := b.dev.launch("kv_finite", grid{x: t.Rows()}, threadsFor(t.Cols()), p, b.read(t), t.Cols()); err != nil {
			return err
		}
		return b.getInts(p, first)
	})
	if first[0] == math.MaxInt32 {
		return -1
	}
	return int(first[0])
}
