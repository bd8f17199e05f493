// Package ref is the plain implementation of engine.Backend: loops that follow the formulas, in float32 or float64,
// on one goroutine. It is the oracle that faster backends are compared with, and slow.
package ref

import (
	"fmt"
	"math"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// Float is the type that the backend computes in.
type Float interface{ ~float32 | ~float64 }

// Backend implements engine.Backend.
type Backend[T Float] struct{}

// New returns a backend that computes in T.
func New[T Float]() *Backend[T] { return &Backend[T]{} }

var _ engine.Backend = (*Backend[float64])(nil)

// Tensor is a row-major matrix in host memory.
type Tensor[T Float] struct {
	rows, cols int
	Data       []T
}

func (t *Tensor[T]) Rows() int { return t.rows }
func (t *Tensor[T]) Cols() int { return t.cols }

func (t *Tensor[T]) row(i int) []T { return t.Data[i*t.cols : (i+1)*t.cols] }

// host returns the tensor behind the interface.
func host[T Float](t engine.Tensor) *Tensor[T] { return t.(*Tensor[T]) }

type weight[T Float] struct{ Tensor[T] }

func (b *Backend[T]) Name() string {
	var x T
	if _, ok := any(x).(float32); ok {
		return "ref f32"
	}
	return "ref f64"
}

func (b *Backend[T]) Close() error                { return nil }
func (b *Backend[T]) Free(...engine.Tensor)       {}
func (b *Backend[T]) Unload(engine.Weight)        {}
func (b *Backend[T]) Copy(dst, src engine.Tensor) { copy(host[T](dst).Data, host[T](src).Data) }
func (b *Backend[T]) New(rows, cols int) engine.Tensor {
	return &Tensor[T]{rows, cols, make([]T, rows*cols)}
}

func (b *Backend[T]) Slice(t engine.Tensor, lo, hi int) engine.Tensor {
	x := host[T](t)
	return &Tensor[T]{hi - lo, x.cols, x.Data[lo*x.cols : hi*x.cols]}
}

func (b *Backend[T]) Reshape(t engine.Tensor, rows, cols int) engine.Tensor {
	x := host[T](t)
	if rows*cols != x.rows*x.cols {
		panic(fmt.Sprintf("reshape %d x %d to %d x %d", x.rows, x.cols, rows, cols))
	}
	return &Tensor[T]{rows, cols, x.Data}
}

func (b *Backend[T]) Upload(dst engine.Tensor, src []float64) {
	for i, v := range src {
		host[T](dst).Data[i] = T(v)
	}
}

func (b *Backend[T]) Download(dst []float64, src engine.Tensor) {
	for i, v := range host[T](src).Data {
		dst[i] = float64(v)
	}
}

func (b *Backend[T]) Load(parts ...engine.Matrix) (engine.Weight, error) {
	w := &weight[T]{Tensor[T]{0, parts[0].Cols, nil}}
	row := make([]float32, w.cols)
	for _, p := range parts {
		if p.Cols != w.cols {
			return nil, fmt.Errorf("tensor %s has %d columns, %s has %d", p.Name, p.Cols, parts[0].Name, w.cols)
		}
		for r := range p.Rows {
			p.DecodeRow(row, r)
			for _, v := range row {
				w.Data = append(w.Data, T(v))
			}
		}
		w.rows += p.Rows
	}
	return w, nil
}

func values[T Float](w engine.Weight) *Tensor[T] { return &w.(*weight[T]).Tensor }

func (b *Backend[T]) Embed(dst engine.Tensor, w engine.Weight, ids []int32) {
	for i, id := range ids {
		copy(host[T](dst).row(i), values[T](w).row(int(id)))
	}
}

func dot[T Float](a, b []T) (s T) {
	for i := range a {
		s += a[i] * b[i]
	}
	return s
}

func (b *Backend[T]) MatMul(dst, x engine.Tensor, w engine.Weight, accumulate bool) {
	y, a, m := host[T](dst), host[T](x), values[T](w)
	for i := range a.rows {
		for j := range m.rows {
			s := dot(a.row(i), m.row(j))
			if accumulate {
				s += y.row(i)[j]
			}
			y.row(i)[j] = s
		}
	}
}

func (b *Backend[T]) MatMulBackward(dx, dy engine.Tensor, w engine.Weight, accumulate bool) {
	x, g, m := host[T](dx), host[T](dy), values[T](w)
	for i := range g.rows {
		row := x.row(i)
		if !accumulate {
			clear(row)
		}
		for j := range m.rows {
			axpy(row, g.row(i)[j], m.row(j))
		}
	}
}

// axpy: dst += a * x.
func axpy[T Float](dst []T, a T, x []T) {
	for i, v := range x {
		dst[i] += a * v
	}
}

func (b *Backend[T]) AddBias(x engine.Tensor, bias engine.Weight) {
	for i := range x.Rows() {
		axpy(host[T](x).row(i), 1, values[T](bias).Data)
	}
}

// inverseRMS is 1 / sqrt(mean(x^2) + eps).
func inverseRMS[T Float](x []T, eps float64) T {
	return T(1 / math.Sqrt(float64(dot(x, x))/float64(len(x))+eps))
}

func (b *Backend[T]) RMSNorm(y, x engine.Tensor, w engine.Weight, eps float64) {
	gain := values[T](w).Data
	for i := range x.Rows() {
		in, out := host[T](x).row(i), host[T](y).row(i)
		r := inverseRMS(in, eps)
		for j, v := range in {
			out[j] = v * r * gain[j]
		}
	}
}

// With r = 1/sqrt(mean(x^2)+eps) and g = dy*w: dx += r*g - x * r^3 * mean(g*x).
func (b *Backend[T]) RMSNormBackward(dx, dy, x engine.Tensor, w engine.Weight, eps float64) {
	gain := values[T](w).Data
	for i := range x.Rows() {
		in, dout, din := host[T](x).row(i), host[T](dy).row(i), host[T](dx).row(i)
		r := inverseRMS(in, eps)
		var s T
		for j, v := range in {
			s += dout[j] * gain[j] * v
		}
		c := s * r * r * r / T(len(in))
		for j, v := range in {
			din[j] += r*dout[j]*gain[j] - v*c
		}
	}
}

func (b *Backend[T]) Split(q, k, v, qkv engine.Tensor) {
	for i := range qkv.Rows() {
		row := host[T](qkv).row(i)
		for _, t := range []engine.Tensor{q, k, v} {
			n := copy(host[T](t).row(i), row)
			row = row[n:]
		}
	}
}

func (b *Backend[T]) SplitBackward(dqkv, dq, dk, dv engine.Tensor) {
	for i := range dqkv.Rows() {
		row := host[T](dqkv).row(i)
		for _, t := range []engine.Tensor{dq, dk, dv} {
			n := copy(row, host[T](t).row(i))
			row = row[n:]
		}
	}
}

func (b *Backend[T]) RoPE(x engine.Tensor, table *engine.Rotary, start int, inverse bool) {
	sign := T(1)
	if inverse { // the transposed map: a rotation's inverse, times the scaling's factor
		sign = -1
	}
	for i := range x.Rows() {
		row := host[T](x).row(i)
		for h := 0; h < len(row); h += table.HeadDim {
			rotate(row[h:h+table.HeadDim], table, start+i, sign)
		}
	}
}

// rotate turns one head's vector in place.
func rotate[T Float](x []T, table *engine.Rotary, position int, sign T) {
	half := table.HeadDim / 2
	for j := range half {
		c, s := T(table.Cos[position*half+j]), sign*T(table.Sin[position*half+j])
		u, v := x[j], x[j+half]
		x[j], x[j+half] = u*c-v*s, v*c+u*s
	}
}

func (b *Backend[T]) GatedMerge(out, full, stream engine.Tensor, gates []float64, headDim int) {
	o, f, s := host[T](out), host[T](full), host[T](stream)
	group := o.cols / headDim / len(gates)
	for i := range o.Data {
		g := T(gates[i%o.cols/headDim/group])
		o.Data[i] = g*f.Data[i] + (1-g)*s.Data[i]
	}
}

func (b *Backend[T]) GatedMergeBackward(dstream, dout, full, stream engine.Tensor, gates []float64, headDim int) []float64 {
	d, o, f, s := host[T](dstream), host[T](dout), host[T](full), host[T](stream)
	group := o.cols / headDim / len(gates)
	dg := make([]float64, len(gates))
	for i, v := range o.Data {
		k := i % o.cols / headDim / group
		dg[k] += float64(v) * float64(f.Data[i]-s.Data[i])
		d.Data[i] = (1 - T(gates[k])) * v
	}
	return dg
}

func sigmoid[T Float](x T) T { return T(1 / (1 + math.Exp(-float64(x)))) }

func (b *Backend[T]) SwiGLU(y, gu engine.Tensor) {
	for i := range y.Rows() {
		out := host[T](y).row(i)
		gate, up := host[T](gu).row(i)[:len(out)], host[T](gu).row(i)[len(out):]
		for j, g := range gate {
			out[j] = g * sigmoid(g) * up[j]
		}
	}
}

func (b *Backend[T]) SwiGLUBackward(dgu, dy, gu engine.Tensor) {
	for i := range dy.Rows() {
		d := host[T](dy).row(i)
		n := len(d)
		gate, up := host[T](gu).row(i)[:n], host[T](gu).row(i)[n:]
		dgate, dup := host[T](dgu).row(i)[:n], host[T](dgu).row(i)[n:]
		for j, g := range gate {
			s := sigmoid(g)
			dgate[j] = d[j] * up[j] * s * (1 + g*(1-s))
			dup[j] = d[j] * g * s
		}
	}
}

func (b *Backend[T]) SquaredError(da, a, c engine.Tensor, rows []int) float64 {
	d, x, y := host[T](da), host[T](a), host[T](c)
	clear(d.Data)
	n := float64(len(rows) * x.cols)
	var sum float64
	for _, r := range rows {
		for j, v := range x.row(r) {
			e := float64(v) - float64(y.row(r)[j])
			sum += e * e
			d.row(r)[j] += T(2 * e / n)
		}
	}
	return sum / n
}

func (b *Backend[T]) Finite(t engine.Tensor) int {
	x := host[T](t)
	for i, v := range x.Data {
		if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
			return i / x.cols
		}
	}
	return -1
}
