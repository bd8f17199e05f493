package cpu

import (
	"github.com/kvprofile/kvprofile/internal/engine"
)

func (b *Backend) StorePages(pages *engine.Pages, table []int32, rows []int32, k, v engine.Tensor, kvHead int) {
	keys, vals, ks, vs := values(pages.Keys), values(pages.Values), values(k), values(v)
	d, width, lane := pages.Keys.Cols(), k.Cols(), engine.Lane{Table: table}
	b.ranges(len(rows), 2*d, func(lo, hi int) {
		for slot := lo; slot < hi; slot++ {
			if row := int(rows[slot]); row >= 0 {
				at, from := lane.Row(slot, pages.Block)*d, row*width+kvHead*d
				copy(keys[at:at+d], ks[from:from+d])
				copy(vals[at:at+d], vs[from:from+d])
			}
		}
	})
}

func (b *Backend) MovePages(pages *engine.Pages, from, to []int) {
	d := pages.Keys.Cols()
	for _, x := range [][]float32{values(pages.Keys), values(pages.Values)} {
		read := make([]float32, len(from)*d)
		for i, f := range from {
			copy(read[i*d:], x[f*d:(f+1)*d])
		}
		for i, t := range to {
			copy(x[t*d:(t+1)*d], read[i*d:(i+1)*d])
		}
	}
}

// segment is the number of slots that paged attention takes at once: their keys stay in the second level cache for all
// query heads of a group. Sums are made per segment, so that results depend on the slots but not on where pages lie.
const segment = 256

func (b *Backend) PagedAttention(out, q, k, v engine.Tensor, pages *engine.Pages, lanes [][]engine.Lane, table *engine.Rotary, spec engine.AttentionSpec) {
	o, qs, ks, vs := whole(out), values(q), values(k), values(v)
	keys, vals := values(pages.Keys), values(pages.Values)
	d, group := spec.HeadDim, spec.Heads/spec.KVHeads
	tasks := len(lanes) * spec.KVHeads
	b.ranges(tasks, 4*d, func(lo, hi int) {
		for t := lo; t < hi; t++ {
			lane := &lanes[t/spec.KVHeads][t%spec.KVHeads]
			at := lane.Row(lane.Write, pages.Block) * d
			copy(vals[at:at+d], vs[t*d:(t+1)*d])
			b.rotated(keys[at:at+d], ks[t*d:(t+1)*d], table, lane.Key)
		}
	})
	b.parallel(tasks, func(ws *workspace, t int) {
		lane := &lanes[t/spec.KVHeads][t%spec.KVHeads]
		b.pagedHead(ws, o[t*group*d:(t+1)*group*d], qs[t*group*d:(t+1)*group*d], keys, vals, pages.Block, lane, table, d)
	})
}

// rotated writes x, rotated to a position, to dst; a negative position leaves it as it is.
func (b *Backend) rotated(dst, x []float32, table *engine.Rotary, position int) {
	copy(dst, x)
	if position >= 0 {
		half := table.HeadDim / 2
		at := position * half
		b.k.rope(dst[:half], dst[half:], table.Cos[at:at+half], table.Sin[at:at+half], 1)
	}
}

// pagedHead is attention of one row's queries of one group, [group*d] in q and out.
func (b *Backend) pagedHead(ws *workspace, out, q, keys, vals []float32, block int, lane *engine.Lane, table *engine.Rotary, d int) {
	group, nc := len(q)/d, b.k.cols
	width := 0
	for _, s := range lane.Spans {
		width += s.Hi - s.Lo
	}
	ld := (width+b.k.lanes-1)/b.k.lanes*b.k.lanes + 16 // rows then start in different sets of the cache
	query, e, z := ws.buffer(bufQ, group*d), ws.buffer(bufScores, group*ld), ws.buffer(bufRows, group)
	for g := range group {
		b.rotated(query[g*d:(g+1)*d], q[g*d:(g+1)*d], table, lane.Query)
		b.k.scale(query[g*d:(g+1)*d], query[g*d:(g+1)*d], scoreScale(d))
	}
	b.segments(ws, lane, keys, bufGrad, block, d, func(at, n int, x []float32, slot int) {
		if lane.Rotate != nil {
			turned := ws.buffer(bufPlain, segment*d)
			for i := range n {
				b.rotated(turned[i*d:(i+1)*d], x[i*d:(i+1)*d], table, int(lane.Rotate[slot+i]))
			}
			x = turned
		}
		for g := range group {
			b.dotRows(n, query[g*d:(g+1)*d], x, d, e[g*ld+at:g*ld+at+n])
		}
	})
	for g := range group {
		row := e[g*ld : g*ld+width]
		sum, _ := b.k.expRow(row, b.k.rowMax(row))
		z[g] = float32(1 / float64(sum))
	}
	panels := b.panels(d) * nc
	acc := ws.buffer(bufOut, group*panels)
	clear(acc)
	b.segments(ws, lane, vals, bufGrad, block, d, func(at, n int, x []float32, _ int) {
		for p := 0; p < d; p += nc {
			if d-p >= nc {
				b.k.gemm(group, n, e[at:], ld, x[p:], d, acc[p:], panels, true)
				continue
			}
			for g := range group {
				for i := range n {
					w := e[g*ld+at+i]
					for c, u := range x[i*d+p : (i+1)*d] {
						acc[g*panels+p+c] += w * u
					}
				}
			}
		}
	})
	for g := range group {
		b.k.scale(out[g*d:(g+1)*d], acc[g*panels:g*panels+d], z[g])
	}
	if lane.Probabilities == nil {
		return
	}
	for g, p := range lane.Probabilities {
		at := 0
		for _, s := range lane.Spans {
			b.k.scale(p[s.Lo:s.Hi], e[g*ld+at:g*ld+at+s.Hi-s.Lo], z[g])
			at += s.Hi - s.Lo
		}
	}
}

// dotRows is the kernel where head dimensions are whole vectors.
func (b *Backend) dotRows(n int, q, k []float32, ldk int, out []float32) {
	if len(q)%b.k.lanes == 0 {
		b.k.dotRows(n, q, k, ldk, out)
		return
	}
	dotRowsGo(n, q, k, ldk, out)
}

// segments calls f for every segment of the slots that a lane sees: where it starts among them, its length, its rows of x,
// in place where its pages lie side by side, and its first slot.
func (b *Backend) segments(ws *workspace, lane *engine.Lane, x []float32, buffer, block, d int, f func(at, n int, rows []float32, slot int)) {
	at := 0
	for _, s := range lane.Spans {
		for lo := s.Lo; lo < s.Hi; lo += segment {
			hi := min(lo+segment, s.Hi)
			first := lane.Row(lo, block)
			rows := x[first*d:]
			if !sideBySide(lane.Table, lo/block, (hi-1)/block) {
				rows = ws.buffer(buffer, segment*d)
				for slot := lo; slot < hi; {
					end := min((slot/block+1)*block, hi)
					from := lane.Row(slot, block) * d
					copy(rows[(slot-lo)*d:(end-lo)*d], x[from:from+(end-slot)*d])
					slot = end
				}
			}
			f(at, hi-lo, rows, lo)
			at += hi - lo
		}
	}
}

// sideBySide reports whether the pages lo to hi of a table follow one another.
func sideBySide(table []int32, lo, hi int) bool {
	for p := lo; p < hi; p++ {
		if table[p+1] != table[p]+1 {
			return false
		}
	}
	return true
}
