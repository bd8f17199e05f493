package cpu

import (
	"fmt"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// Buffers of a workspace.
const (
	bufDecode     = iota // rows of weights
	bufPanel             // panels of weights that are not kept
	bufA                 // a block of the left matrix
	bufTile              // an edge tile of the result
	bufQ                 // attention: queries of a strip
	bufScores            // attention: a strip of scores
	bufOut               // attention: output of a strip
	bufColumns           // attention: column sums of a strip
	bufGrad              // attention backward: gradient of a strip's output
	bufGradScores        // attention backward: gradient of a strip's scores
	bufRows              // attention: values per row of a strip
	bufPlain             // attention backward: queries of a strip, not scaled
	buffers              // their number
)

// Blocks of the matrix product: the right panel's block should stay in the first-level cache, the left block in the
// second.
const (
	blockK = 576
	blockM = 140
)

// MatMul: dst[S,N] (+)= x[S,M] * transpose(w[N,M]).
func (b *Backend) MatMul(dst, x engine.Tensor, wt engine.Weight, accumulate bool) {
	w := wt.(*weight)
	m, n, k := x.Rows(), w.rows, w.cols
	if x.Cols() != k || dst.Cols() != n || dst.Rows() != m {
		panic(fmt.Sprintf("product of %d x %d and transposed %d x %d into %d x %d", m, x.Cols(), n, k, dst.Rows(), dst.Cols()))
	}
	a := values(x)
	c := target(dst, accumulate)
	if b.useSplit(m, w) {
		b.forwardSplit(m, a, w, c, accumulate)
		return
	}
	panels := b.panels(n)
	if w.forward == nil {
		if w.forward = b.reserve(panels * b.k.cols * k); w.forward != nil {
			const group = 4
			b.parallel((panels+group-1)/group, func(ws *workspace, t int) {
				lo, hi := t*group, min((t+1)*group, panels)
				b.packForward(ws, w.forward[lo*b.k.cols*k:], w, lo, hi)
			})
		}
	}
	if w.forward != nil {
		b.gemm(m, n, k, a, k, w.forward, c, n, accumulate)
		return
	}
	// Groups of panels, each converted by the worker that needs it.
	const group = 4
	b.parallel((panels+group-1)/group, func(ws *workspace, t int) {
		lo, hi := t*group, min((t+1)*group, panels)
		p := ws.buffer(bufPanel, (hi-lo)*b.k.cols*k)
		b.packForward(ws, p, w, lo, hi)
		j := lo * b.k.cols
		for i := 0; i < m; i += blockM {
			b.tile(ws, min(blockM, m-i), min(hi*b.k.cols, n)-j, k, a[i*k:], k, p, c[i*n+j:], n, accumulate)
		}
	})
}

// MatMulBackward: dx[S,M] (+)= dy[S,N] * w[N,M].
func (b *Backend) MatMulBackward(dx, dy engine.Tensor, wt engine.Weight, accumulate bool) {
	w := wt.(*weight)
	m, n, k := dy.Rows(), w.cols, w.rows
	if dy.Cols() != k || dx.Cols() != n || dx.Rows() != m {
		panic(fmt.Sprintf("product of %d x %d and %d x %d into %d x %d", m, dy.Cols(), k, n, dx.Rows(), dx.Cols()))
	}
	a := values(dy)
	c := target(dx, accumulate)
	if b.useSplit(m, w) {
		b.backwardSplit(m, a, w, c, accumulate)
		return
	}
	width := b.panels(n) * b.k.cols
	if w.backward == nil {
		if w.backward = b.reserve(width * k); w.backward != nil {
			b.packBackward(w.backward, w, 0, k)
		}
	}
	if w.backward != nil {
		b.gemm(m, n, k, a, k, w.backward, c, n, accumulate)
		return
	}
	// Blocks of rows of w, one after the other, each converted by all workers.
	mem := b.memory.get(blockK * width)
	defer b.memory.put(mem)
	for lo := 0; lo < k; lo += blockK {
		hi := min(lo+blockK, k)
		b.packBackward(mem.floats, w, lo, hi)
		b.gemm(m, n, hi-lo, a[lo:], k, mem.floats, c, n, accumulate || lo > 0)
	}
}

// useSplit reports whether a product of m rows goes to the matrix unit.
func (b *Backend) useSplit(m int, w *weight) bool {
	return b.split != nil && (m >= splitRows || w.parts16() == 1)
}

// target returns a result's memory: what is there counts only when it is added to.
func target(t engine.Tensor, accumulate bool) []float32 {
	if accumulate {
		return values(t)
	}
	return whole(t)
}

// gemm: C[m x n] (+)= A[m x k] * panels, in tiles that the workers share.
func (b *Backend) gemm(m, n, k int, a []float32, lda int, panels []float32, c []float32, ldc int, acc bool) {
	blocks := (m + blockM - 1) / blockM
	// Enough tiles that all workers end at about the same time; how many changes no result.
	parts := min(max(1, 8*b.threads/blocks), b.panels(n))
	b.parallel(blocks*parts, func(ws *workspace, t int) {
		i, part := t/parts*blockM, t%parts
		lo, hi := part*b.panels(n)/parts*b.k.cols, (part+1)*b.panels(n)/parts*b.k.cols
		b.tile(ws, min(blockM, m-i), min(hi, n)-lo, k, a[i*lda:], lda, panels[lo*k:], c[i*ldc+lo:], ldc, acc)
	})
}

// tile: C[m x n] (+)= A[m x k] * panels on one worker.
func (b *Backend) tile(ws *workspace, m, n, k int, a []float32, lda int, panels []float32, c []float32, ldc int, acc bool) {
	nc := b.k.cols
	for x := 0; x < k; x += blockK {
		kc := min(blockK, k-x)
		left, ldl := a[x:], lda
		// A block that is used often is copied, with rows apart by a stride that spreads over the cache's sets.
		if m >= b.k.block && n >= 8*nc {
			ldl = kc + 16
			left = ws.buffer(bufA, m*ldl)
			for i := range m {
				copy(left[i*ldl:i*ldl+kc], a[i*lda+x:])
			}
		}
		for j := 0; j < n; j += nc {
			p := panels[j*k+x*nc:]
			wide := n-j >= nc
			for i := 0; i < m; i += b.k.block {
				rows := min(b.k.block, m-i)
				if wide {
					b.k.gemm(rows, kc, left[i*ldl:], ldl, p, nc, c[i*ldc+j:], ldc, acc || x > 0)
					continue
				}
				edge := ws.buffer(bufTile, b.k.block*nc)
				b.k.gemm(rows, kc, left[i*ldl:], ldl, p, nc, edge, nc, false)
				for r := range rows {
					d := c[(i+r)*ldc+j : (i+r)*ldc+n]
					if acc || x > 0 {
						addGo(d, edge[r*nc:r*nc+len(d)])
					} else {
						copy(d, edge[r*nc:])
					}
				}
			}
		}
	}
}
