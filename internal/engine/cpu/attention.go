package cpu

import (
	"fmt"
	"math"
	"sort"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// span is a range of keys [lo, hi).
type span struct{ lo, hi int }

// visible returns the keys that the query at position i sees, as at most two spans; the first may be empty.
func visible(spec *engine.AttentionSpec, m engine.Mask, i int) (sink, recent span) {
	lo := 0
	if spec.Window > 0 {
		lo = max(0, i-spec.Window+1)
	}
	if m.Full() || i-m.Recent+1 <= max(lo, m.Sink) {
		return span{lo, lo}, span{lo, i + 1}
	}
	return span{lo, max(lo, m.Sink)}, span{i - m.Recent + 1, i + 1}
}

// strip is the scores of some consecutive query rows against the keys that any of them sees: one or two segments of
// whole panels, side by side in a buffer of rows ld apart.
type strip struct {
	row, rows int // first query row and their number
	segments  []span
	at        [2]int // where a segment starts in the buffer
	width, ld int
}

// newStrip plans the strip of query rows [row, row+rows).
func (b *Backend) newStrip(spec *engine.AttentionSpec, m engine.Mask, row, rows int, segments []span) strip {
	nc := b.k.cols
	firstSink, firstRecent := visible(spec, m, spec.Start+row)
	lastSink, lastRecent := visible(spec, m, spec.Start+row+rows-1)
	// A row whose sink and recent keys touch has one span, which starts in the sink; the union covers both cases.
	sink := span{min(firstSink.lo, lastSink.lo), max(firstSink.hi, lastSink.hi)}
	recent := span{min(firstRecent.lo, lastRecent.lo), max(firstRecent.hi, lastRecent.hi)}
	down, up := func(x int) int { return x / nc * nc }, func(x int) int { return (x + nc - 1) / nc * nc }
	s := strip{row: row, rows: rows, segments: segments[:0]}
	if sink.lo < sink.hi && up(sink.hi) < down(recent.lo) {
		s.segments = append(s.segments, span{down(sink.lo), up(sink.hi)})
	} else if sink.lo < sink.hi {
		recent.lo = min(recent.lo, sink.lo)
	}
	s.segments = append(s.segments, span{down(recent.lo), up(recent.hi)})
	for i, g := range s.segments {
		s.at[i] = s.width
		s.width += g.hi - g.lo
	}
	s.ld = s.width + 16 // rows then start in different sets of the cache
	return s
}

// place moves a span of keys to its columns in the strip's buffer.
func (s *strip) place(k span) span {
	for i, g := range s.segments {
		if k.lo >= g.lo && k.hi <= g.hi {
			return span{s.at[i] + k.lo - g.lo, s.at[i] + k.hi - g.lo}
		}
	}
	return span{} // empty
}

// operands are packed keys or values of every KV head.
type operands struct {
	heads []*storage
	keys  int // number of keys
}

func (b *Backend) free(o operands) {
	for _, m := range o.heads {
		b.memory.put(m)
	}
}

// packColumns makes panels of keys for products with transpose(x): [key/cols][d][cols], zero beyond the last key.
func (b *Backend) packColumns(x []float32, keys, kvHeads, d int) operands {
	nc, o := b.k.cols, operands{keys: keys}
	panels := b.panels(keys)
	for range kvHeads {
		o.heads = append(o.heads, b.memory.get(panels*nc*d))
	}
	const group = 8
	groups := (panels + group - 1) / group
	b.parallel(groups*kvHeads, func(_ *workspace, t int) {
		h := t / groups
		for p := t % groups * group; p < min((t%groups+1)*group, panels); p++ {
			n := min(nc, keys-p*nc)
			transpose(o.heads[h].floats[p*nc*d:(p+1)*nc*d], x[p*nc*kvHeads*d+h*d:], n, d, kvHeads*d, nc)
		}
	})
	return o
}

// packRows makes panels of head dimensions for products with x: [d/cols][key][cols], zero beyond the last dimension.
func (b *Backend) packRows(x []float32, keys, kvHeads, d int) operands {
	nc, o := b.k.cols, operands{keys: keys}
	for range kvHeads {
		o.heads = append(o.heads, b.memory.get(b.panels(d)*keys*nc))
	}
	const group = 256
	groups := (keys + group - 1) / group
	b.parallel(groups*kvHeads, func(_ *workspace, t int) {
		h := t / groups
		for p := range b.panels(d) {
			n := min(nc, d-p*nc)
			for j := t % groups * group; j < min((t%groups+1)*group, keys); j++ {
				dst := o.heads[h].floats[(p*keys+j)*nc : (p*keys+j+1)*nc]
				copy(dst, x[j*kvHeads*d+h*d+p*nc:][:n])
				clear(dst[n:])
			}
		}
	})
	return o
}

// scores: e[rows x strip] = q[rows x d] * transpose(keys).
func (b *Backend) scores(s *strip, q []float32, ldq, d int, keys []float32, e []float32) {
	nc := b.k.cols
	for i, g := range s.segments {
		for p := g.lo; p < g.hi; p += nc {
			b.k.gemm(s.rows, d, q, ldq, keys[p*d:], nc, e[s.at[i]+p-g.lo:], s.ld, false)
		}
	}
}

// apply: out[rows x panels of d] = e[rows x strip] * rows.
func (b *Backend) apply(s *strip, e, rows []float32, keys, d int, out []float32, ldo int) {
	nc := b.k.cols
	for p := range b.panels(d) {
		for i, g := range s.segments {
			b.k.gemm(s.rows, min(g.hi, keys)-g.lo, e[s.at[i]:], s.ld, rows[(p*keys+g.lo)*nc:], nc, out[p*nc:], ldo, i > 0)
		}
	}
}

// copyRows copies rows of one head out of x, times c, to a buffer with rows ld apart.
func (b *Backend) copyRows(dst []float32, ld int, x []float32, width, row, rows, head, d int, c float32) {
	for r := range rows {
		at := (row+r)*width + head*d
		b.k.scale(dst[r*ld:r*ld+d], x[at:at+d], c)
	}
}

// softmax turns row r of a strip's scores, in units of log2, into numerators 2^(score-max), zero where the query does not
// see, and returns their sum and that of numerator * log2(numerator). cut, when not nil, lists key positions, descending,
// at which the sum so far is put to sums: the sum over keys >= cut[x].
func (b *Backend) softmax(spec *engine.AttentionSpec, m engine.Mask, s *strip, e []float32, r int, cut []int, sums []float64) (z, zt float64) {
	row := e[r*s.ld : r*s.ld+s.width]
	sinkKeys, recentKeys := visible(spec, m, spec.Start+s.row+r)
	recent := s.place(recentKeys)
	sink := span{recent.lo, recent.lo}
	if sinkKeys.lo < sinkKeys.hi {
		sink = s.place(sinkKeys)
	}
	top := b.k.rowMax(row[recent.lo:recent.hi])
	if sink.lo < sink.hi {
		top = max(top, b.k.rowMax(row[sink.lo:sink.hi]))
	}
	sum := func(lo, hi int) {
		if lo < hi {
			x, y := b.k.expRow(row[lo:hi], top)
			z += float64(x)
			zt += float64(y)
		}
	}
	end := recent.hi
	for x, c := range cut {
		lo := max(recent.lo, c-recentKeys.lo+recent.lo)
		sum(lo, end)
		end = min(end, lo)
		sums[x] = z
	}
	sum(recent.lo, end)
	sum(sink.lo, sink.hi)
	clear(row[:sink.lo])
	clear(row[sink.hi:recent.lo])
	clear(row[recent.hi:])
	return z, zt
}

// few is the number of query rows below which attention reads keys and values where they are.
const few = 8

func (b *Backend) Attention(out, q, k, v engine.Tensor, spec engine.AttentionSpec, tap *engine.Tap) {
	n, keys, d := q.Rows(), k.Rows(), spec.HeadDim
	if keys != spec.Start+n || v.Rows() != keys || q.Cols() != spec.Heads*d || k.Cols() != spec.KVHeads*d || spec.Heads%spec.KVHeads != 0 {
		panic(fmt.Sprintf("attention of %d queries at %d, %d keys, widths %d and %d, %d and %d heads of %d", n, spec.Start, keys, q.Cols(), k.Cols(),
			spec.Heads, spec.KVHeads, d))
	}
	if tap != nil && spec.Start != 0 {
		panic("attention statistics are of whole prompts")
	}
	qs, ks, vs := values(q), values(k), values(v)
	o := whole(out)
	if n < few && tap == nil && d%b.k.lanes == 0 {
		b.attendFew(o, qs, ks, vs, n, keys, &spec)
		return
	}
	kp, vp := b.packColumns(ks, keys, spec.KVHeads, d), b.packRows(vs, keys, spec.KVHeads, d)
	defer b.free(kp)
	defer b.free(vp)
	// Enough chunks for many workers; each has its own column sums, so not too many either.
	chunks := b.chunks(&spec, n, max(32, spec.Heads*min(8, n/1024)))
	var taps []*headTap
	if tap != nil {
		taps = b.newTaps(tap, &spec, keys, chunks)
	}
	ldq, ldo := d+16, b.panels(d)*b.k.cols
	b.parallel(len(chunks), func(ws *workspace, t int) {
		c := &chunks[t]
		h := c.head
		kv := h / (spec.Heads / spec.KVHeads)
		mask := spec.Mask(kv)
		var ht *headTap
		if tap != nil && mask.Full() {
			ht = taps[t]
		}
		var segments [2]span
		qb, ob := ws.buffer(bufQ, b.k.strip*ldq), ws.buffer(bufOut, b.k.strip*ldo)
		for row := c.lo; row < c.hi; row += b.k.strip {
			s := b.newStrip(&spec, mask, row, min(b.k.strip, c.hi-row), segments[:])
			e := ws.buffer(bufScores, b.k.strip*s.ld)
			b.copyRows(qb, ldq, qs, spec.Heads*d, row, s.rows, h, d, scoreScale(d))
			b.scores(&s, qb, ldq, d, kp.heads[kv].floats, e)
			z := ws.buffer(bufRows, 2*b.k.strip)
			if ht != nil {
				ht.strip(b, ws, &spec, &s, e, z)
			} else {
				for r := range s.rows {
					sum, _ := b.softmax(&spec, mask, &s, e, r, nil, nil)
					z[r] = float32(1 / sum)
				}
			}
			b.apply(&s, e, vp.heads[kv].floats, keys, d, ob, ldo)
			for r := range s.rows {
				at := (row+r)*spec.Heads*d + h*d
				b.k.scale(o[at:at+d], ob[r*ldo:r*ldo+d], z[r])
			}
		}
	})
	if tap != nil {
		b.finishTaps(tap, &spec, vs, taps)
	}
}

// scoreScale is log2(e) / sqrt(d): scores are kept in units of log2.
func scoreScale(d int) float32 { return float32(math.Log2E / math.Sqrt(float64(d))) }

// chunk is a part of the rows of one query head.
type chunk struct{ head, lo, hi int }

// chunks divides the rows of every head into parts of about the same work, at least atLeast in all where there are
// enough rows. They depend on the shape only: sums over rows are made per chunk first.
func (b *Backend) chunks(spec *engine.AttentionSpec, n, atLeast int) []chunk {
	parts := (atLeast + spec.Heads - 1) / spec.Heads
	var all []chunk
	for h := range spec.Heads {
		mask := spec.Mask(h / (spec.Heads / spec.KVHeads))
		cost := make([]int, 0, n/b.k.strip+1)
		total := 0
		for row := 0; row < n; row += b.k.strip {
			sink, recent := visible(spec, mask, spec.Start+row)
			total += sink.hi - sink.lo + recent.hi - recent.lo + 64
			cost = append(cost, total)
		}
		lo := 0
		for p := 1; p <= parts; p++ {
			hi := min(n, (sort.SearchInts(cost, total*p/parts)+1)*b.k.strip)
			if hi > lo {
				all = append(all, chunk{h, lo, hi})
				lo = hi
			}
		}
	}
	// The long ones last would leave workers idle at the end.
	sort.SliceStable(all, func(i, j int) bool { return all[i].hi-all[i].lo > all[j].hi-all[j].lo })
	return all
}

// attendFew is attention of a few query rows, without packing: a row at a time, keys by dot products.
func (b *Backend) attendFew(o, qs, ks, vs []float32, n, keys int, spec *engine.AttentionSpec) {
	d, nc := spec.HeadDim, b.k.cols
	width, kvWidth := spec.Heads*d, spec.KVHeads*d
	one := func(ws *workspace, t int) {
		h, r := t/n, t%n
		kv := h / (spec.Heads / spec.KVHeads)
		sink, recent := visible(spec, spec.Mask(kv), spec.Start+r)
		at := r*width + h*d
		q, e, out := ws.buffer(bufQ, d), ws.buffer(bufScores, keys), ws.buffer(bufOut, nc)
		b.k.scale(q, qs[at:at+d], scoreScale(d))
		spans := []span{recent}
		if sink.lo < sink.hi {
			spans = append(spans, sink)
		}
		top := float32(math.Inf(-1))
		for _, s := range spans {
			b.k.dotRows(s.hi-s.lo, q, ks[s.lo*kvWidth+kv*d:], kvWidth, e[s.lo:s.hi])
			top = max(top, b.k.rowMax(e[s.lo:s.hi]))
		}
		var z float64
		for _, s := range spans {
			x, _ := b.k.expRow(e[s.lo:s.hi], top)
			z += float64(x)
		}
		for x := 0; x < d; x += nc {
			w := min(nc, d-x)
			for i, s := range spans {
				if w == nc {
					b.k.gemm(1, s.hi-s.lo, e[s.lo:], keys, vs[s.lo*kvWidth+kv*d+x:], kvWidth, out, nc, i > 0)
					continue
				}
				if i == 0 {
					clear(out)
				}
				for j := s.lo; j < s.hi; j++ {
					for y, u := range vs[j*kvWidth+kv*d+x:][:w] {
						out[y] += e[j] * u
					}
				}
			}
			b.k.scale(o[at+x:at+x+w], out[:w], float32(1/z))
		}
	}
	if keys*d*spec.Heads*n < 1<<15 {
		for t := range n * spec.Heads {
			one(b.work[0], t)
		}
		return
	}
	b.parallel(n*spec.Heads, one)
}
