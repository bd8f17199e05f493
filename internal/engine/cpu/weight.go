package cpu

import (
	"fmt"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
)

// weight is a matrix [rows, cols], stacked from parts that stay as they are stored; their data must live until Unload.
// Matrix products read it as panels of kernels.cols columns: forward[p][x][j] = W[p*cols+j, x] for x * transpose(W),
// and backward[p][x][j] = W[x, p*cols+j] for dy * W; columns beyond the edge are zero. Each is made at its first use and
// kept while the memory for them lasts. forward16 and backward16 are the same for a matrix unit (split.go).
type weight struct {
	parts                 []engine.Matrix
	rows, cols            int
	values                []float32 // of a vector (one row)
	forward, backward     []float32
	forward16, backward16 []uint16
}

// parts16 is the number of bfloat16 parts that hold the weight exactly.
func (w *weight) parts16() int {
	for _, p := range w.parts {
		if p.DType != dtype.BF16 {
			return 3
		}
	}
	return 1
}

func (w *weight) Rows() int { return w.rows }
func (w *weight) Cols() int { return w.cols }

// decodeRow writes row r in float32 to dst.
func (w *weight) decodeRow(dst []float32, r int) {
	for i := range w.parts {
		if p := &w.parts[i]; r < p.Rows {
			p.DecodeRow(dst, r)
			return
		}
		r -= w.parts[i].Rows
	}
	panic(fmt.Sprintf("row beyond the %d of tensor %s", w.rows, w.parts[0].Name))
}

// Load keeps the parts as they are: their data, a mapped file as a rule, must stay until Unload. Nothing is converted
// before it is used.
func (b *Backend) Load(parts ...engine.Matrix) (engine.Weight, error) {
	w := &weight{parts: parts, cols: parts[0].Cols}
	for _, p := range parts {
		if err := p.Check(); err != nil {
			return nil, err
		}
		if p.Cols != w.cols {
			return nil, fmt.Errorf("tensor %s has %d columns, %s has %d", p.Name, p.Cols, parts[0].Name, w.cols)
		}
		w.rows += p.Rows
	}
	if w.rows == 1 {
		w.values = make([]float32, w.cols)
		w.decodeRow(w.values, 0)
	}
	return w, nil
}

func (b *Backend) Unload(x engine.Weight) {
	w := x.(*weight)
	b.packed -= 4*int64(len(w.forward)+len(w.backward)) + 2*int64(len(w.forward16)+len(w.backward16))
	for _, f := range [][]float32{w.forward, w.backward, floatsOf(w.forward16), floatsOf(w.backward16)} {
		b.arena.put(f)
	}
	*w = weight{}
}

// reserve returns memory for n packed floats, or nil when it would exceed the limit.
func (b *Backend) reserve(n int) []float32 {
	if b.packed+4*int64(n) > b.limit {
		return nil
	}
	b.packed += 4 * int64(n)
	return b.arena.get(n)
}

// panels is how many panels n columns fill.
func (b *Backend) panels(n int) int { return (n + b.k.cols - 1) / b.k.cols }

// packForward writes forward panels [lo, hi) of w to dst, one after the other.
func (b *Backend) packForward(ws *workspace, dst []float32, w *weight, lo, hi int) {
	nc, k := b.k.cols, w.cols
	rows := ws.buffer(bufDecode, nc*k)
	for p := lo; p < hi; p++ {
		n := min(nc, w.rows-p*nc)
		for j := range n {
			w.decodeRow(rows[j*k:(j+1)*k], p*nc+j)
		}
		transpose(dst[(p-lo)*nc*k:(p-lo+1)*nc*k], rows, n, k, k, nc)
	}
}

// transpose writes dst[x*ldd+j] = src[j*lds+x] for j < rows, x < cols, and zeros for j in [rows, ldd).
func transpose(dst, src []float32, rows, cols, lds, ldd int) {
	for j := 0; j < ldd; j += 4 {
		if j+4 > rows {
			for jj := j; jj < min(j+4, ldd); jj++ {
				for x := range cols {
					if jj < rows {
						dst[x*ldd+jj] = src[jj*lds+x]
					} else {
						dst[x*ldd+jj] = 0
					}
				}
			}
			continue
		}
		// Four rows at once: the writes of a line then come together.
		s0, s1, s2, s3 := src[j*lds:j*lds+cols], src[(j+1)*lds:(j+1)*lds+cols], src[(j+2)*lds:(j+2)*lds+cols], src[(j+3)*lds:(j+3)*lds+cols]
		for x, v := range s0 {
			d := dst[x*ldd+j : x*ldd+j+4 : x*ldd+j+4]
			d[0], d[1], d[2], d[3] = v, s1[x], s2[x], s3[x]
		}
	}
}

// packBackward writes rows [lo, hi) of w as backward panels of hi-lo rows.
func (b *Backend) packBackward(dst []float32, w *weight, lo, hi int) {
	nc, n := b.k.cols, hi-lo
	const block = 16
	b.parallel((n+block-1)/block, func(ws *workspace, t int) {
		row := ws.buffer(bufDecode, b.panels(w.cols)*nc)
		clear(row[w.cols:])
		for x := t * block; x < min((t+1)*block, n); x++ {
			w.decodeRow(row, lo+x)
			for p := range b.panels(w.cols) {
				copy(dst[(p*n+x)*nc:(p*n+x+1)*nc], row[p*nc:])
			}
		}
	})
}
