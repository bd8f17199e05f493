package cpu

import (
	"math"
	"unsafe"
)

// Matrix units multiply bfloat16 and add in float32. A float32 is split into three bfloat16 parts, each the rounded rest
// of those before: together they hold all of its bits. Activations are always split. Weights that are stored as bfloat16
// need no split and take three products; others are split too and take the six products that matter. The relative error
// is that of a float32 product or less (3e-7; six products of Henry, Tang, Heinecke 2019).

// splitKernels work on tiles: A in strips of 32 rows, [strip][step][part][2][16 rows][32], and B in panels of 32 columns,
// [panel][step][part][2][16 pairs][16 columns][2], where a step is 32 values of the inner dimension.
type splitKernels struct {
	// panel: C[32*strips x 32] (+)= A B over steps; B has one part or three.
	panel func(parts, steps, strips int, a, b []uint16, c []float32, ldc int, acc bool)
	// rows splits up to 16 rows of 32*steps values of src into one half of a strip, whose steps are 3*1024 values apart.
	rows func(steps, rows int, src []float32, lda int, dst []uint16)
}

const (
	step      = 32   // values of the inner dimension in a step
	tilePair  = 1024 // values of a part of a step: two tiles
	splitK    = 18   // steps in a block
	splitM    = 256  // rows in a block
	splitRows = 16   // below this number of rows weights that need a split are used in float32: half the memory to read
)

// bfloat rounds to nearest even and returns the rest too.
func bfloat(x float32) (half uint16, rest float32) {
	u := math.Float32bits(x)
	u = (u + 0x7fff + u>>16&1) &^ 0xffff
	return uint16(u >> 16), x - math.Float32frombits(u)
}

func fromBfloat(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// splitPanelGo and splitRowsGo are the twins of the kernels, in plain Go.
func splitPanelGo(parts, steps, strips int, a, b []uint16, c []float32, ldc int, acc bool) {
	// Part by part of A and B, the small products first.
	order := [][2]int{{2, 0}, {1, 0}, {0, 0}}
	if parts == 3 {
		order = [][2]int{{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 2}, {0, 0}}
	}
	for i := range 32 * strips {
		for j := range 32 {
			var sum float32
			if acc {
				sum = c[i*ldc+j]
			}
			for s := range steps {
				for _, o := range order {
					ra := a[((i/32*steps+s)*3+o[0])*tilePair+(i%32)*step:][:step]
					rb := b[(s*parts+o[1])*tilePair+j/16*512+j%16*2:]
					for x, v := range ra {
						sum += fromBfloat(v) * fromBfloat(rb[x/2*32+x%2])
					}
				}
			}
			c[i*ldc+j] = sum
		}
	}
}

func splitRowsGo(steps, rows int, src []float32, lda int, dst []uint16) {
	for r := range rows {
		for x, v := range src[r*lda : r*lda+steps*step] {
			for part := range 3 {
				dst[(x/step*3+part)*tilePair+r*step+x%step], v = bfloat(v)
			}
		}
	}
}

// steps is how many steps n values fill.
func steps(n int) int { return (n + step - 1) / step }

// halves is memory of float32 taken as 16-bit values.
func halves(f []float32) []uint16 {
	if len(f) == 0 {
		return nil
	}
	return unsafe.Slice((*uint16)(unsafe.Pointer(&f[0])), 2*len(f))
}

// floatsOf undoes halves.
func floatsOf(h []uint16) []float32 {
	if len(h) == 0 {
		return nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(&h[0])), len(h)/2)
}

// put writes one value of a panel of B: column j of 32, inner index x.
func put(panel []uint16, parts, j, x int, v float32) {
	at := x/step*parts*tilePair + j/16*512 + x%step/2*32 + j%16*2 + x%2
	for part := range parts {
		panel[at+part*tilePair], v = bfloat(v)
	}
}

// packForwardSplit writes forward panels [lo, hi) of w.
func (b *Backend) packForwardSplit(ws *workspace, dst []uint16, w *weight, lo, hi int) {
	parts, row := w.parts16(), ws.buffer(bufDecode, w.cols)
	size := steps(w.cols) * parts * tilePair
	clear(dst[:(hi-lo)*size])
	for r := lo * 32; r < min(hi*32, w.rows); r++ {
		w.decodeRow(row, r)
		panel := dst[(r/32-lo)*size:][:size]
		for x, v := range row {
			put(panel, parts, r%32, x, v)
		}
	}
}

// packBackwardSplit writes rows [lo, hi) of w as backward panels.
func (b *Backend) packBackwardSplit(dst []uint16, w *weight, lo, hi int) {
	parts := w.parts16()
	size := steps(hi-lo) * parts * tilePair
	clear(dst[:steps(w.cols)*size])
	b.parallel(steps(hi-lo), func(ws *workspace, t int) {
		row := ws.buffer(bufDecode, w.cols)
		for r := lo + t*step; r < min(lo+(t+1)*step, hi); r++ {
			w.decodeRow(row, r)
			for c, v := range row {
				put(dst[c/32*size:][:size], parts, c%32, r-lo, v)
			}
		}
	})
}

// forwardSplit is MatMul by bfloat16 parts.
func (b *Backend) forwardSplit(m int, a []float32, w *weight, c []float32, acc bool) {
	n, k, parts := w.rows, w.cols, w.parts16()
	panels, size := (n+31)/32, steps(k)*parts*tilePair
	const group = 4
	if w.forward16 == nil {
		if w.forward16 = halves(b.reserve(panels * size / 2)); w.forward16 != nil {
			b.parallel((panels+group-1)/group, func(ws *workspace, t int) {
				b.packForwardSplit(ws, w.forward16[t*group*size:], w, t*group, min((t+1)*group, panels))
			})
		}
	}
	if w.forward16 != nil {
		b.gemmSplit(m, n, k, parts, a, k, w.forward16, c, n, acc)
		return
	}
	b.parallel((panels+group-1)/group, func(ws *workspace, t int) {
		lo, hi := t*group, min((t+1)*group, panels)
		p := halves(ws.buffer(bufPanel, (hi-lo)*size/2))
		b.packForwardSplit(ws, p, w, lo, hi)
		for i := 0; i < m; i += splitM {
			b.tileSplit(ws, min(splitM, m-i), min(hi*32, n)-lo*32, k, parts, a[i*k:], k, p, c[i*n+lo*32:], n, acc)
		}
	})
}

// backwardSplit is MatMulBackward by bfloat16 parts.
func (b *Backend) backwardSplit(m int, a []float32, w *weight, c []float32, acc bool) {
	n, k, parts := w.cols, w.rows, w.parts16()
	panels := (n + 31) / 32
	if w.backward16 == nil {
		if w.backward16 = halves(b.reserve(panels * steps(k) * parts * tilePair / 2)); w.backward16 != nil {
			b.packBackwardSplit(w.backward16, w, 0, k)
		}
	}
	if w.backward16 != nil {
		b.gemmSplit(m, n, k, parts, a, k, w.backward16, c, n, acc)
		return
	}
	const rows = splitK * step
	mem := b.memory.get(panels * splitK * parts * tilePair / 2)
	defer b.memory.put(mem)
	for lo := 0; lo < k; lo += rows {
		hi := min(lo+rows, k)
		b.packBackwardSplit(halves(mem.floats), w, lo, hi)
		b.gemmSplit(m, n, hi-lo, parts, a[lo:], k, halves(mem.floats), c, n, acc || lo > 0)
	}
}

// gemmSplit: C[m x n] (+)= A[m x k] * panels, in tiles that the workers share.
func (b *Backend) gemmSplit(m, n, k, parts int, a []float32, lda int, panels []uint16, c []float32, ldc int, acc bool) {
	blocks, all := (m+splitM-1)/splitM, (n+31)/32
	cut := min(max(1, 8*b.threads/blocks), all)
	b.parallel(blocks*cut, func(ws *workspace, t int) {
		i, part := t/cut*splitM, t%cut
		lo, hi := part*all/cut, (part+1)*all/cut
		b.tileSplit(ws, min(splitM, m-i), min(hi*32, n)-lo*32, k, parts, a[i*lda:], lda, panels[lo*steps(k)*parts*tilePair:], c[i*ldc+lo*32:], ldc, acc)
	})
}

// tileSplit: C[m x n] (+)= A[m x k] * panels on one worker.
func (b *Backend) tileSplit(ws *workspace, m, n, k, parts int, a []float32, lda int, panels []uint16, c []float32, ldc int, acc bool) {
	all, strips := steps(k), (m+31)/32
	for s := 0; s < all; s += splitK {
		count := min(splitK, all-s)
		left, ldl := a[s*step:], lda
		if have := k - s*step; have < count*step { // the last step is short
			ldl = count * step
			left = ws.buffer(bufA, m*ldl)
			clear(left)
			for i := range m {
				copy(left[i*ldl:i*ldl+have], a[i*lda+s*step:])
			}
		}
		tiles := halves(ws.buffer(bufScores, strips*count*3*tilePair/2))
		if m%32 != 0 {
			clear(tiles[(strips-1)*count*3*tilePair:])
		}
		for i := 0; i < m; i += 16 {
			b.split.rows(count, min(16, m-i), left[i*ldl:], ldl, tiles[i/32*count*3*tilePair+i/16%2*512:])
		}
		more := acc || s > 0
		for j := 0; j < n; j += 32 {
			p := panels[(j/32*all+s)*parts*tilePair:]
			direct := m / 32
			if n-j < 32 {
				direct = 0
			}
			if direct > 0 {
				b.split.panel(parts, count, direct, tiles, p, c[j:], ldc, more)
			}
			if direct == strips {
				continue
			}
			edge := ws.buffer(bufTile, (strips-direct)*32*32)
			b.split.panel(parts, count, strips-direct, tiles[direct*count*3*tilePair:], p, edge, 32, false)
			for i := direct * 32; i < m; i++ {
				d := c[i*ldc+j : i*ldc+min(j+32, n)]
				e := edge[(i-direct*32)*32:][:len(d)]
				if more {
					addGo(d, e)
				} else {
					copy(d, e)
				}
			}
		}
	}
}

// selfTest compares the kernels with their twins.
func (k *splitKernels) selfTest() bool {
	const count, strips = 3, 2
	src := make([]float32, 16*count*step)
	seed := uint32(1)
	next := func() float32 {
		seed = seed*1664525 + 1013904223
		return float32(int32(seed)) / (1 << 31)
	}
	for i := range src {
		src[i] = next()
	}
	a, want := make([]uint16, strips*count*3*tilePair), make([]uint16, strips*count*3*tilePair)
	for half := range 2 * strips {
		at := half/2*count*3*tilePair + half%2*512
		k.rows(count, 16-half, src, count*step, a[at:])
		splitRowsGo(count, 16-half, src, count*step, want[at:])
	}
	for i := range a {
		if a[i] != want[i] {
			return false
		}
	}
	for _, parts := range []int{1, 3} {
		b := make([]uint16, count*parts*tilePair)
		for j := range 32 {
			for x := range count * step {
				put(b, parts, j, x, next())
			}
		}
		for _, acc := range []bool{false, true} {
			got, twin := make([]float32, 32*strips*40), make([]float32, 32*strips*40)
			for i := range got {
				got[i] = next()
				twin[i] = got[i]
			}
			k.panel(parts, count, strips, a, b, got, 40, acc)
			splitPanelGo(parts, count, strips, a, b, twin, 40, acc)
			for i := range got {
				if d := got[i] - twin[i]; !(d < 1e-5 && d > -1e-5) {
					return false
				}
			}
		}
	}
	return true
}
