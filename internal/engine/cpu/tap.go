package cpu

import (
	"math"
	"slices"
	"sort"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// headTap gathers the statistics of the rows of one chunk. Sums over rows are float32 within a strip, and are added to
// the chunk's sums strip by strip; chunks are added in float64, in order.
type headTap struct {
	chunk
	tap    *engine.Tap
	widths []int // Tap.Recent, ascending and without repetition
	answer map[int]int
	exact  []float32 // of the head, shared by its chunks

	total, inAnswer []float32
	far, window     [][]float32
	recent          []float64 // per widths: sum of the rows' masses
	entropy         float64
	keys            []float64
	sampled         int
	variance        *moments
	pooled          []float64 // map rows [firstTile, ...) of mapTiles cells
	firstTile       int
	tiles, tile     int
}

// moments are the count, mean and sum of squared deviations of p[i,j] over rows i, per key j.
type moments struct {
	n        int
	mean, m2 []float64
}

// add takes in one row p*z, whose first key is first; other keys count as 0. Keys beyond the row have had no mass before.
func (m *moments) add(k *kernels, p []float32, first int, z float32) {
	m.n++
	c := 1 / float64(m.n)
	for j, mean := range m.mean[:first] {
		m.mean[j] -= mean * c
		m.m2[j] += mean * m.mean[j]
	}
	k.moments(p, z, c, m.mean[first:], m.m2[first:])
}

// merge takes in other rows, of as many keys or fewer (Chan, Golub, LeVeque 1979).
func (m *moments) merge(o *moments) {
	n := float64(m.n + o.n)
	for j := range m.mean {
		var mean, m2 float64
		if j < len(o.mean) {
			mean, m2 = o.mean[j], o.m2[j]
		}
		d := mean - m.mean[j]
		m.mean[j] += d * float64(o.n) / n
		m.m2[j] += m2 + d*d*float64(m.n)*float64(o.n)/n
	}
	m.n += o.n
}

// newTaps makes one gatherer per chunk and the results' memory.
func (b *Backend) newTaps(tap *engine.Tap, spec *engine.AttentionSpec, keys int, chunks []chunk) []*headTap {
	tap.Heads, tap.KV = make([]engine.HeadStats, spec.Heads), make([]engine.KVStats, spec.KVHeads)
	for _, h := range tap.Exact {
		tap.Heads[h].Exact = make([]float32, tap.Prompt*tap.Prompt)
	}
	widths := slices.Clone(tap.Recent)
	slices.Sort(widths)
	widths = slices.Compact(widths)
	answer := map[int]int{}
	for a, i := range tap.Answer {
		answer[i] = a
	}
	for h := range tap.Heads {
		if len(tap.Answer) > 0 {
			tap.Heads[h].Top = make([]int32, len(tap.Answer))
		}
	}
	taps := make([]*headTap, len(chunks))
	for i, c := range chunks {
		t := &headTap{chunk: c, tap: tap, widths: widths, answer: answer, exact: tap.Heads[c.head].Exact, total: make([]float32, c.hi)}
		for range tap.Far {
			t.far = append(t.far, make([]float32, c.hi))
		}
		for _, w := range tap.Windows {
			var sums []float32
			if c.hi > tap.Prompt-w && c.lo < tap.Prompt {
				sums = make([]float32, c.hi)
			}
			t.window = append(t.window, sums)
		}
		if slices.ContainsFunc(tap.Answer, func(i int) bool { return c.lo <= i && i < c.hi }) {
			t.inAnswer = make([]float32, c.hi)
		}
		t.recent, t.keys = make([]float64, len(widths)), make([]float64, len(tap.Masses))
		if tap.VarianceWindow > 0 && c.hi > tap.Prompt-tap.VarianceWindow && c.lo < tap.Prompt {
			n := min(c.hi, tap.Prompt)
			t.variance = &moments{mean: make([]float64, n), m2: make([]float64, n)}
		}
		if t.tiles, t.tile = engine.MapGrid(tap.Prompt, tap.Map); t.tiles > 0 && c.lo < tap.Prompt {
			t.firstTile = c.lo / t.tile
			t.pooled = make([]float64, ((min(c.hi, tap.Prompt)-1)/t.tile+1-t.firstTile)*t.tiles)
		}
		taps[i] = t
	}
	return taps
}

// strip takes the softmax of a strip and its statistics. z[r] becomes 1 over the sum of row r. There is one segment:
// tapped heads have no masks.
func (t *headTap) strip(b *Backend, ws *workspace, spec *engine.AttentionSpec, s *strip, e, z []float32) {
	tap, first := t.tap, s.segments[0].lo
	cut, sums := make([]int, len(t.widths)), make([]float64, len(t.widths))
	for r := range s.rows {
		i := s.row + r
		row := e[r*s.ld : r*s.ld+s.width]
		if a, ok := t.answer[i]; ok {
			lo := visibleFrom(spec, i)
			seen := row[lo-first : i+1-first]
			tap.Heads[t.head].Top[a] = int32(lo + max(0, slices.Index(seen, b.k.rowMax(seen)))) // not found: NaN
		}
		if i >= tap.Prompt {
			sum, _ := b.softmax(spec, engine.Mask{}, s, e, r, nil, nil)
			z[r] = float32(1 / sum)
			continue
		}
		for x, w := range t.widths {
			cut[x] = i - w + 1
		}
		sum, st := b.softmax(spec, engine.Mask{}, s, e, r, cut, sums)
		z[r] = float32(1 / sum)
		for x, mass := range sums {
			t.recent[x] += mass / sum
		}
		t.entropy += math.Log(sum) - math.Ln2*st/sum
		if tap.KeysEvery > 0 && i%tap.KeysEvery == tap.KeysEvery-1 {
			t.sampled++
			b.holders(row, tap.Masses, t.keys)
		}
		if t.variance != nil && i >= tap.Prompt-tap.VarianceWindow {
			t.variance.add(b.k, row[:i+1-first], first, z[r])
		}
		if t.exact != nil {
			b.k.scale(t.exact[i*tap.Prompt+first:i*tap.Prompt+i+1], row[:i+1-first], z[r])
		}
	}
	t.columns(b, ws, s, e, z)
}

// visibleFrom is the first key that query i sees.
func visibleFrom(spec *engine.AttentionSpec, i int) int {
	_, recent := visible(spec, engine.Mask{}, i)
	return recent.lo
}

// columns adds the strip's column sums. z has room for the weights of a subset of rows behind those of all.
func (t *headTap) columns(b *Backend, ws *workspace, s *strip, e, z []float32) {
	tap, first := t.tap, s.segments[0].lo
	part := ws.buffer(bufColumns, s.width)
	some := z[len(z)/2:]
	// sum returns the column sums of the rows [lo, hi) that want lets through.
	sum := func(lo, hi int, want func(i int) bool) []float32 {
		any := false
		for r := range s.rows {
			i := s.row + r
			some[r] = 0
			if i >= lo && i < hi && (want == nil || want(i)) {
				some[r], any = z[r], true
			}
		}
		if !any {
			return nil
		}
		b.k.columns(s.rows, e, s.ld, some, part)
		return part
	}
	// add puts columns up to key hi to sums.
	add := func(sums, part []float32, hi int) {
		if n := min(hi, len(sums), first+len(part)) - first; part != nil && n > 0 {
			b.k.add(sums[first:first+n], part[:n])
		}
	}
	end := s.row + s.rows
	if all := sum(0, tap.Prompt, nil); all != nil {
		add(t.total, all, end)
		for x, far := range tap.Far {
			// Keys up to row-far are far from every row; then a triangle is left.
			common := s.row - far + 1
			add(t.far[x], all, common)
			for r := range s.rows {
				if i := s.row + r; i < tap.Prompt {
					for j := max(common, first); j <= i-far; j++ {
						t.far[x][j] += z[r] * e[r*s.ld+j-first]
					}
				}
			}
		}
	}
	for x, w := range tap.Windows {
		if lo := max(0, tap.Prompt-w); end > lo && s.row < tap.Prompt {
			add(t.window[x], sum(lo, tap.Prompt, nil), end)
		}
	}
	if t.inAnswer != nil {
		add(t.inAnswer, sum(0, end, func(i int) bool { _, ok := t.answer[i]; return ok }), end)
	}
	if t.pooled != nil {
		for a := s.row / t.tile; a*t.tile < min(end, tap.Prompt); a++ {
			cells := t.pooled[(a-t.firstTile)*t.tiles:][:t.tiles]
			for j, v := range sum(a*t.tile, min((a+1)*t.tile, tap.Prompt), nil) {
				if c := (first + j) / t.tile; c < t.tiles {
					cells[c] += float64(v)
				}
			}
		}
	}
}

// finishTaps adds up the chunks.
func (b *Backend) finishTaps(tap *engine.Tap, spec *engine.AttentionSpec, v []float32, taps []*headTap) {
	perHead := make([][]*headTap, spec.Heads)
	for _, t := range taps {
		perHead[t.head] = append(perHead[t.head], t)
	}
	keys := 0
	for _, t := range taps {
		keys = max(keys, t.hi)
	}
	b.parallel(spec.Heads, func(_ *workspace, h int) {
		if !spec.Mask(h / (spec.Heads / spec.KVHeads)).Full() {
			tap.Heads[h] = engine.HeadStats{}
			return
		}
		parts := perHead[h]
		sort.Slice(parts, func(i, j int) bool { return parts[i].lo < parts[j].lo })
		gather(&tap.Heads[h], tap, parts, keys)
	})
	norms := make([]float64, tap.Prompt*spec.KVHeads)
	d := spec.HeadDim
	b.ranges(len(norms), d, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			x := v[i*d : (i+1)*d]
			norms[i] = math.Sqrt(float64(b.k.dot(x, x)))
		}
	})
	for i, n := range norms {
		kv := &tap.KV[i%spec.KVHeads]
		kv.ValueNorm += n / float64(tap.Prompt)
		kv.ValueNormMax = max(kv.ValueNormMax, n)
	}
}

// gather adds the chunks of one head, in the order of their rows.
func gather(st *engine.HeadStats, tap *engine.Tap, parts []*headTap, keys int) {
	sums := func(of func(t *headTap) []float32) []float32 {
		total := make([]float64, keys)
		for _, t := range parts {
			for j, v := range of(t) {
				total[j] += float64(v)
			}
		}
		out := make([]float32, keys)
		for j, v := range total {
			out[j] = float32(v)
		}
		return out
	}
	n := float64(max(1, tap.Prompt))
	st.Total = sums(func(t *headTap) []float32 { return t.total })
	for x := range tap.Far {
		st.Far = append(st.Far, sums(func(t *headTap) []float32 { return t.far[x] }))
	}
	for x := range tap.Windows {
		st.Window = append(st.Window, sums(func(t *headTap) []float32 { return t.window[x] }))
	}
	if len(tap.Answer) > 0 {
		st.Answer = sums(func(t *headTap) []float32 { return t.inAnswer })
	}
	recent := make([]float64, len(parts[0].widths))
	counts, sampled := make([]float64, len(tap.Masses)), 0
	var spread *moments
	for _, t := range parts {
		st.Entropy += t.entropy / n
		for x, mass := range t.recent {
			recent[x] += mass / n
		}
		for x, c := range t.keys {
			counts[x] += c
		}
		sampled += t.sampled
		if t.variance != nil {
			if spread == nil {
				spread = &moments{mean: make([]float64, tap.Prompt), m2: make([]float64, tap.Prompt)}
			}
			spread.merge(t.variance)
		}
	}
	for _, w := range tap.Recent {
		x, _ := slices.BinarySearch(parts[0].widths, w)
		st.Recent = append(st.Recent, recent[x])
	}
	if tap.KeysEvery > 0 {
		for _, c := range counts {
			st.Keys = append(st.Keys, c/float64(max(1, sampled)))
		}
	}
	if spread != nil {
		for _, v := range spread.m2 {
			st.Variance += v / float64(spread.n)
		}
	}
	if tiles, width := engine.MapGrid(tap.Prompt, tap.Map); tiles > 0 {
		cells := make([]float64, tiles*tiles)
		for _, t := range parts {
			for c, v := range t.pooled {
				cells[t.firstTile*tiles+c] += v
			}
		}
		st.Map, st.MapSize, st.MapTile = make([]float32, tiles*tiles), tiles, width
		for c, v := range cells {
			a := c / tiles
			st.Map[c] = float32(v / float64(min((a+1)*width, tap.Prompt)-a*width))
		}
	}
}

// holders adds to counts[x] the smallest number of values of e that hold the share masses[x] of their sum. The values are
// in [0, 1], and e is whole vectors. Such floats are ordered as their bits are, so the smallest value that is needed is
// found by bisection: above(lo) holds the share, above(hi) does not.
func (b *Backend) holders(e []float32, masses []float64, counts []float64) {
	total, _ := b.k.above(e, 0)
	for x, share := range masses {
		want := float32(share * float64(total))
		// All values up to this one, were there as many as can be, would hold less than what may be left out.
		low := 0.99 * float32(1-share) * total / float32(len(e))
		lo, hi := math.Float32bits(low), math.Float32bits(1)
		_, atLo := b.k.above(e, low)
		held, n := float32(0), 0 // above hi
		for hi-lo > 1 && atLo-n > 1 {
			mid := lo + (hi-lo)/2
			if mass, count := b.k.above(e, math.Float32frombits(mid)); mass >= want {
				lo, atLo = mid, count
			} else {
				hi, held, n = mid, mass, count
			}
		}
		// All that are left have the value of hi's bits, or there is one.
		if hi-lo <= 1 {
			v := math.Float32frombits(hi)
			n += min(max(1, int(math.Ceil(float64((want-held)/v)))), atLo-n)
		} else {
			n = atLo
		}
		counts[x] += float64(n)
	}
}
