package cpu

import (
	"fmt"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// storage is the memory behind a tensor and its views. Memory that is used again keeps its old content until someone
// reads it: most operations write all of their result, and clearing it first would cost as much as computing it.
type storage struct {
	floats []float32
	stale  bool // to be read as zeros
}

// Tensor is a row-major matrix in host memory.
type Tensor struct {
	rows, cols int
	data       []float32
	mem        *storage
}

func (t *Tensor) Rows() int { return t.rows }
func (t *Tensor) Cols() int { return t.cols }

// values returns what a tensor holds, for reading and for changing in part.
func values(t engine.Tensor) []float32 {
	x := t.(*Tensor)
	if x.mem.stale {
		clear(x.mem.floats)
		x.mem.stale = false
	}
	return x.data
}

// whole returns a tensor's memory for a caller that writes all of it.
func whole(t engine.Tensor) []float32 {
	x := t.(*Tensor)
	if x.mem.stale && len(x.data) == len(x.mem.floats) {
		x.mem.stale = false
	}
	return values(t)
}

func (b *Backend) New(rows, cols int) engine.Tensor {
	m := b.memory.get(rows * cols)
	return &Tensor{rows, cols, m.floats, m}
}

func (b *Backend) Free(ts ...engine.Tensor) {
	for _, t := range ts {
		b.memory.put(t.(*Tensor).mem)
	}
}

func (b *Backend) Slice(t engine.Tensor, lo, hi int) engine.Tensor {
	x := t.(*Tensor)
	return &Tensor{hi - lo, x.cols, x.data[lo*x.cols : hi*x.cols], x.mem}
}

func (b *Backend) Reshape(t engine.Tensor, rows, cols int) engine.Tensor {
	x := t.(*Tensor)
	if rows*cols != x.rows*x.cols {
		panic(fmt.Sprintf("reshape %d x %d to %d x %d", x.rows, x.cols, rows, cols))
	}
	return &Tensor{rows, cols, x.data, x.mem}
}

// pool keeps freed memory for the next tensor of about the same size.
type pool struct {
	arena            *arena
	idle             [][]float32 // least recently freed first
	live, peak, kept int         // floats in tensors, the most there ever were, floats in idle
}

func (p *pool) get(n int) *storage {
	p.live += n
	p.peak = max(p.peak, p.live)
	best := -1
	for i, f := range p.idle {
		if cap(f) >= n && cap(f) <= 2*n && (best < 0 || cap(f) <= cap(p.idle[best])) {
			best = i
		}
	}
	if best < 0 {
		return &storage{floats: p.arena.get(n)}
	}
	f := p.idle[best]
	p.idle = append(p.idle[:best], p.idle[best+1:]...)
	p.kept -= cap(f)
	return &storage{floats: f[:n], stale: true}
}

// put takes memory back. What is kept never exceeds the most that was ever in use.
func (p *pool) put(m *storage) {
	if m.floats == nil {
		return
	}
	p.live -= len(m.floats)
	p.idle = append(p.idle, m.floats[:0])
	p.kept += cap(m.floats)
	m.floats, m.stale = nil, false
	for p.kept > p.peak {
		p.kept -= cap(p.idle[0])
		p.arena.put(p.idle[0])
		p.idle = append(p.idle[:0], p.idle[1:]...)
	}
}
