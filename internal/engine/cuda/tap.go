package cuda

import (
	"math"
	"slices"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// taps gathers the statistics of one attention operation. Sums per key are made on the GPU, in the order of the rows; what is told of
// a row is kept per row and added up here, in float64. The buffers hold all query heads; those under a mask have no statistics.
type taps struct {
	a   *attention
	tap *engine.Tap

	widths  []int   // Tap.Recent, ascending and without repetition
	answer  []int32 // by row: index in Tap.Answer, or -1; nil without answers
	sums    []sum
	exact   map[int][]float32
	samples int // rows that Keys counts
	tiles   int // of the map, and their width
	mapTile int

	// On the GPU.
	widthsAt, answerAt, sharesAt    pointer
	rowstats, top, columns, answers pointer
	mean, m2, cells, pooled         pointer
	holders, norms                  pointer
}

// sum is one list of column sums: rows from start on, or as many behind the key where byKey is set.
type sum struct {
	start int
	byKey bool
}

// sumsAtOnce is the number of column sums that one launch makes.
const sumsAtOnce = 4

func newTaps(a *attention, tap *engine.Tap, v pointer) (*taps, error) {
	t := &taps{a: a, tap: tap, exact: map[int][]float32{}}
	heads, n, prompt := a.spec.Heads, a.n, tap.Prompt
	t.widths = slices.Clone(tap.Recent)
	slices.Sort(t.widths)
	t.widths = slices.Compact(t.widths)
	t.sums = []sum{{}}
	for _, far := range tap.Far {
		t.sums = append(t.sums, sum{min(max(0, far), n), true})
	}
	for _, w := range tap.Windows {
		t.sums = append(t.sums, sum{start: max(0, prompt-w)})
	}
	for _, h := range tap.Exact {
		t.exact[h] = make([]float32, prompt*prompt)
	}
	if tap.KeysEvery > 0 {
		t.samples = prompt / tap.KeysEvery
	}
	t.tiles, t.mapTile = engine.MapGrid(prompt, tap.Map)

	var err error
	get := func(count int, zero bool) (p pointer) {
		if err != nil || count == 0 {
			return 0
		}
		if p, err = a.tmp.get(4 * count); err == nil && zero {
			err = a.b.dev.fill(p, 0, 4*count)
		}
		return p
	}
	ints := func(v []int32) (p pointer) {
		if err == nil && len(v) > 0 {
			p, err = a.tmp.ints(v)
		}
		return p
	}
	widths := make([]int32, len(t.widths))
	for i, w := range t.widths {
		widths[i] = int32(min(w, n))
	}
	t.widthsAt = ints(widths)
	if len(tap.Answer) > 0 {
		t.answer = slices.Repeat([]int32{-1}, n)
		for x, i := range tap.Answer {
			t.answer[i] = int32(x)
		}
		t.answerAt = ints(t.answer)
		t.top, t.answers = get(heads*len(tap.Answer), true), get(heads*n, true)
	}
	t.rowstats = get(heads*n*(1+len(t.widths)), false)
	t.columns = get(len(t.sums)*heads*n, true)
	if tap.VarianceWindow > 0 {
		t.mean, t.m2 = get(heads*n, true), get(heads*n, true)
	}
	if t.tiles > 0 {
		t.pooled = get(heads*t.tiles*t.tiles, true)
		// A tile of scores covers so many rows of the map, at most.
		t.cells = get(heads*((tileRows-1)/t.mapTile+2)*n, false)
	}
	if t.samples > 0 && len(tap.Masses) > 0 {
		t.holders = get(heads*t.samples*len(tap.Masses), false)
		if err == nil {
			t.sharesAt, err = a.tmp.floats(narrow(tap.Masses))
		}
	}
	t.norms = get(prompt*a.spec.KVHeads, false)
	if err == nil && prompt > 0 {
		err = a.b.dev.launch("kv_norms", grid{x: prompt, y: a.spec.KVHeads}, 32, t.norms, v, a.spec.KVHeads, a.spec.HeadDim)
	}
	return t, err
}

// tile takes the softmax of a tile and its statistics.
func (t *taps) tile(h heads, x *tile) error {
	a, tap, dev := t.a, t.tap, t.a.b.dev
	i0, first, count, n := x.row, x.spans[0].lo, h.count*a.group, a.n
	head0 := h.first * a.group
	end := min(x.row+x.rows, tap.Prompt) // of the rows that count
	var rounded pointer
	if a.kind == bf16 {
		rounded = a.probs.at
	}
	if err := dev.launch("kv_softmax_tap", grid{x: count * x.rows}, threadsFor(x.width), a.scores, rounded, t.rowstats, t.top, t.widthsAt, t.answerAt,
		len(t.widths), len(tap.Answer), x.ld, x.width, x.rows, i0, first, a.spec.Window, tap.Prompt, head0, n); err != nil {
		return err
	}
	const threads = 128
	blocks := grid{x: (x.width + threads - 1) / threads, y: count}
	for at := 0; at < len(t.sums) && i0 < end; at += sumsAtOnce {
		some := t.sums[at:min(at+sumsAtOnce, len(t.sums))]
		var start, byKey [sumsAtOnce]int
		for i, s := range some {
			start[i] = s.start
			if s.byKey {
				byKey[i] = 1
			}
		}
		mapWidth, mapRows := 0, 0
		if at == 0 && t.tiles > 0 {
			mapWidth, mapRows = t.mapTile, (end-1)/t.mapTile-i0/t.mapTile+1
		}
		if err := dev.launch("kv_columns", blocks, threads, t.columns+4*uint64(at*a.spec.Heads*n), t.cells, a.scores, len(some),
			start[0], start[1], start[2], start[3], byKey[0], byKey[1], byKey[2], byKey[3],
			x.ld, x.width, x.rows, i0, first, tap.Prompt, head0, n, a.spec.Heads, mapWidth, mapRows); err != nil {
			return err
		}
		if mapWidth > 0 {
			if err := dev.launch("kv_map", grid{t.tiles, mapRows, count}, threadsFor(t.mapTile), t.pooled, t.cells, first, x.width, mapRows, i0/t.mapTile,
				t.tiles, t.mapTile, head0); err != nil {
				return err
			}
		}
	}
	if rows := t.answerRows(x); len(rows) > 0 {
		list, err := a.tmp.ints(rows)
		if err != nil {
			return err
		}
		if err := dev.launch("kv_columns_of", blocks, threads, t.answers, a.scores, list, len(rows), x.ld, x.width, x.rows, first, head0, n); err != nil {
			return err
		}
	}
	if from := max(0, tap.Prompt-tap.VarianceWindow); tap.VarianceWindow > 0 && from < x.row+x.rows && i0 < end {
		lo := max(from, i0)
		if err := dev.launch("kv_moments", grid{x: (n + threads - 1) / threads, y: count}, threads, t.mean, t.m2, a.scores, lo-i0, end-i0, lo-from,
			x.ld, x.width, x.rows, first, head0, n); err != nil {
			return err
		}
	}
	if t.holders != 0 {
		every := tap.KeysEvery
		if lo, hi := i0/every, end/every; lo < hi {
			if err := dev.launch("kv_holders", grid{x: hi - lo, y: count}, threadsFor(x.width), t.holders, a.scores, t.sharesAt, len(tap.Masses),
				lo*every+every-1-i0, every, x.ld, x.width, x.rows, lo, t.samples, head0); err != nil {
				return err
			}
		}
	}
	for head, to := range t.exact {
		if i0 >= end || head < head0 || head >= head0+count {
			continue
		}
		p := make([]float32, (end-i0)*x.ld)
		if err := a.b.getFloats(a.scores+4*uint64((head-head0)*x.rows*x.ld), p); err != nil {
			return err
		}
		for i := i0; i < end; i++ {
			copy(to[i*tap.Prompt+first:(i+1)*tap.Prompt], p[(i-i0)*x.ld:][:x.width])
		}
	}
	return nil
}

// answerRows are the rows of a tile that write answers, counted from its first.
func (t *taps) answerRows(x *tile) (rows []int32) {
	if t.answer == nil {
		return nil
	}
	for r, a := range t.answer[x.row : x.row+x.rows] {
		if a >= 0 {
			rows = append(rows, int32(r))
		}
	}
	return rows
}

// finish reads everything and fills the tap.
func (t *taps) finish() error {
	a, tap := t.a, t.tap
	heads, n, prompt := a.spec.Heads, a.n, float64(max(1, tap.Prompt))
	var err error
	floats := func(p pointer, count int) []float32 {
		v := make([]float32, count)
		if err == nil && p != 0 {
			err = a.b.getFloats(p, v)
		}
		return v
	}
	ints := func(p pointer, count int) []int32 {
		v := make([]int32, count)
		if err == nil && p != 0 {
			err = a.b.getInts(p, v)
		}
		return v
	}
	told := 1 + len(t.widths)
	rowstats, columns := floats(t.rowstats, heads*n*told), floats(t.columns, len(t.sums)*heads*n)
	answers, top := floats(t.answers, heads*n), ints(t.top, heads*len(tap.Answer))
	m2, pooled := floats(t.m2, heads*n), floats(t.pooled, heads*t.tiles*t.tiles)
	counts := ints(t.holders, heads*t.samples*len(tap.Masses))
	norms := floats(t.norms, tap.Prompt*a.spec.KVHeads)
	if err != nil {
		return err
	}
	tap.Heads, tap.KV = make([]engine.HeadStats, heads), make([]engine.KVStats, a.spec.KVHeads)
	for h := range tap.Heads {
		if !a.spec.Mask(h / a.group).Full() {
			continue
		}
		st := &tap.Heads[h]
		list := func(x int) []float32 { return slices.Clone(columns[(x*heads+h)*n : (x*heads+h+1)*n]) }
		st.Total = list(0)
		for x := range tap.Far {
			st.Far = append(st.Far, list(1+x))
		}
		for x := range tap.Windows {
			st.Window = append(st.Window, list(1+len(tap.Far)+x))
		}
		if len(tap.Answer) > 0 {
			st.Answer, st.Top = slices.Clone(answers[h*n:(h+1)*n]), slices.Clone(top[h*len(tap.Answer):(h+1)*len(tap.Answer)])
		}
		recent := make([]float64, len(t.widths))
		for i := range tap.Prompt {
			row := rowstats[(h*n+i)*told:][:told]
			st.Entropy += float64(row[0]) / prompt
			for x := range recent {
				recent[x] += float64(row[1+x]) / prompt
			}
		}
		for _, w := range tap.Recent {
			x, _ := slices.BinarySearch(t.widths, w)
			st.Recent = append(st.Recent, recent[x])
		}
		if tap.VarianceWindow > 0 {
			for _, v := range m2[h*n : (h+1)*n] {
				st.Variance += float64(v)
			}
			st.Variance /= math.Min(float64(tap.VarianceWindow), prompt)
		}
		if tap.KeysEvery > 0 {
			st.Keys = make([]float64, len(tap.Masses))
			for i, c := range counts[h*t.samples*len(tap.Masses) : (h+1)*t.samples*len(tap.Masses)] {
				st.Keys[i%len(tap.Masses)] += float64(c) / float64(t.samples)
			}
		}
		if t.tiles > 0 {
			st.Map, st.MapSize, st.MapTile = slices.Clone(pooled[h*t.tiles*t.tiles:(h+1)*t.tiles*t.tiles]), t.tiles, t.mapTile
			for c := range st.Map {
				row := c / t.tiles
				st.Map[c] /= float32(min((row+1)*t.mapTile, tap.Prompt) - row*t.mapTile)
			}
		}
		st.Exact = t.exact[h] // nil unless asked for
	}
	for i, v := range norms {
		kv := &tap.KV[i%a.spec.KVHeads]
		kv.ValueNorm += float64(v) / prompt
		kv.ValueNormMax = max(kv.ValueNormMax, float64(v))
	}
	return nil
}
