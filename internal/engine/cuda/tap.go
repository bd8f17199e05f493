package cuda

import (
	"fmt"
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

	// Of the fused kernels: partial sums of the map, [head, map row, block of keys, 2], on the GPU.
	parts  pointer
	blocks int

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

// tile takes the softmax of a tile of consecutive rows and all statistics of it.
func (t *taps) tile(h heads, x *tile) error {
	for _, step := range []func() error{
		func() error { return t.softmax(h, x) },
		func() error { return t.columnSums(h, x, 0) },
		func() error { return t.someRows(h, x) },
		func() error {
			every := t.tap.KeysEvery
			if every == 0 {
				return nil
			}
			lo, hi := x.row/every, min(x.row+x.rows, t.tap.Prompt)/every
			return t.holdersOf(h, x, lo, hi-lo, lo*every+every-1-x.row, every)
		},
		func() error { return t.maps(h, x) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// softmax turns scores into probabilities and keeps what the rows tell.
func (t *taps) softmax(h heads, x *tile) error {
	a, tap, count := t.a, t.tap, h.count*t.a.group
	var rounded pointer
	if a.kind == bf16 {
		rounded = a.probs.at
	}
	return a.b.dev.launch("kv_softmax_tap", grid{x: count * x.rows}, threadsFor(x.width), a.scores, rounded, t.rowstats, t.top, t.widthsAt, t.answerAt,
		len(t.widths), len(tap.Answer), x.ld, x.width, x.rows, x.row, x.step, x.spans[0].lo, a.spec.Window, tap.Prompt, h.first*a.group, a.n)
}

const columnThreads = 128

// columnSums adds a tile to the column sums from the first-th on, and to the map with the very first.
func (t *taps) columnSums(h heads, x *tile, first int) error {
	a, tap, dev := t.a, t.tap, t.a.b.dev
	i0, lo, count, n, head0 := x.row, x.spans[0].lo, h.count*t.a.group, t.a.n, h.first*t.a.group
	end := min(x.row+x.rows, tap.Prompt) // of the rows that count
	for at := first; at < len(t.sums) && i0 < end; at += sumsAtOnce {
		some := t.sums[at:min(at+sumsAtOnce, len(t.sums))]
		if !slices.ContainsFunc(some, func(s sum) bool { return s.byKey || s.start < end }) {
			continue
		}
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
		if err := dev.launch("kv_columns", grid{x: (x.width + columnThreads - 1) / columnThreads, y: count}, columnThreads, t.columns+4*uint64(at*a.spec.Heads*n), t.cells,
			a.scores, len(some), start[0], start[1], start[2], start[3], byKey[0], byKey[1], byKey[2], byKey[3],
			x.ld, x.width, x.rows, i0, lo, tap.Prompt, head0, n, a.spec.Heads, mapWidth, mapRows); err != nil {
			return err
		}
		if mapWidth > 0 {
			if err := dev.launch("kv_map", grid{t.tiles, mapRows, count}, threadsFor(t.mapTile), t.pooled, t.cells, lo, x.width, mapRows, i0/t.mapTile,
				t.tiles, t.mapTile, head0); err != nil {
				return err
			}
		}
	}
	return nil
}

// someRows adds the tile's rows that write answers, and those that the variance is of.
func (t *taps) someRows(h heads, x *tile) error {
	a, tap, dev := t.a, t.tap, t.a.b.dev
	lo, count, n, head0 := x.spans[0].lo, h.count*t.a.group, t.a.n, h.first*t.a.group
	if rows := t.answerRows(x); len(rows) > 0 {
		list, err := a.tmp.ints(rows)
		if err != nil {
			return err
		}
		if err := dev.launch("kv_columns_of", grid{x: (x.width + columnThreads - 1) / columnThreads, y: count}, columnThreads, t.answers, a.scores, list, len(rows),
			x.ld, x.width, x.rows, lo, head0, n); err != nil {
			return err
		}
	}
	from, end := max(0, tap.Prompt-tap.VarianceWindow), min(x.row+x.rows, tap.Prompt)
	first := max(from, x.row)
	if tap.VarianceWindow == 0 || first >= end {
		return nil
	}
	return dev.launch("kv_moments", grid{x: (n + columnThreads - 1) / columnThreads, y: count}, columnThreads, t.mean, t.m2, a.scores, first-x.row, end-x.row, first-from,
		x.ld, x.width, x.rows, lo, head0, n)
}

// holdersOf counts keys of the samples [first, first+samples), which are rows row, row+every ... of the tile.
func (t *taps) holdersOf(h heads, x *tile, first, samples, row, every int) error {
	if t.holders == 0 || samples <= 0 {
		return nil
	}
	return t.a.b.dev.launch("kv_holders", grid{x: samples, y: h.count * t.a.group}, threadsFor(x.width), t.holders, t.a.scores, t.sharesAt, len(t.tap.Masses),
		row, every, x.ld, x.width, x.rows, first, t.samples, h.first*t.a.group)
}

// maps reads the tile's part of the whole maps that are wanted.
func (t *taps) maps(h heads, x *tile) error {
	a, prompt, head0 := t.a, t.tap.Prompt, h.first*t.a.group
	end := min(x.row+x.rows, prompt)
	for head, to := range t.exact {
		if x.row >= end || head < head0 || head >= head0+h.count*a.group {
			continue
		}
		p := make([]float32, (end-x.row)*x.ld)
		if err := a.b.getFloats(a.scores+4*uint64((head-head0)*x.rows*x.ld), p); err != nil {
			return err
		}
		for i := x.row; i < end; i++ {
			copy(to[i*prompt+x.spans[0].lo:(i+1)*prompt], p[(i-x.row)*x.ld:][:x.width])
		}
	}
	return nil
}

// fusible reports whether the fused kernels know all that is wanted, but for what single rows tell.
func (t *taps) fusible() bool {
	for kv := range t.a.spec.KVHeads {
		if !t.a.spec.Mask(kv).Full() {
			return false
		}
	}
	return len(t.exact) == 0 && len(t.widths) <= 4 && 1+len(t.tap.Far) <= sumsAtOnce && (t.tiles == 0 || t.mapTile >= flashRows)
}

// fused computes attention and statistics without scores in memory, but for the rows that windows, answers, variance and counts are of:
// those go through tiles.
func (t *taps) fused(to, qs pointer) error {
	a, tap, d, n := t.a, t.tap, t.a.spec.HeadDim, t.a.n
	spec, dev := a.spec, t.a.b.dev
	query, masks, err := a.flashOperands(qs)
	if err != nil {
		return err
	}
	lse, err := a.tmp.get(4 * spec.Heads * n)
	if err != nil {
		return err
	}
	blocks := grid{x: (n + flashRows - 1) / flashRows, y: spec.Heads}
	if err := dev.launchShared(fmt.Sprintf("kv_flash_tap_%d", d), blocks, 128, 5*flashRows*d*2, to, query, a.keys.at, a.vals.at, masks,
		n, spec.Heads, spec.KVHeads, spec.Window, scoreScale(d), lse, t.rowstats, t.widthsAt, len(t.widths), tap.Prompt); err != nil {
		return err
	}
	sums := t.sums[:1+len(tap.Far)]
	var list []int32
	for _, s := range sums {
		byKey := int32(0)
		if s.byKey {
			byKey = 1
		}
		list = append(list, int32(s.start), byKey)
	}
	listAt, err := a.tmp.ints(list)
	if err != nil {
		return err
	}
	mapWidth := 0
	if t.tiles > 0 {
		mapWidth, t.blocks = t.mapTile, blocks.x
		count := 4 * spec.Heads * t.tiles * blocks.x * 2
		if t.parts, err = a.tmp.get(count); err != nil {
			return err
		}
		if err := dev.fill(t.parts, 0, count); err != nil {
			return err
		}
	}
	if err := dev.launchShared(fmt.Sprintf("kv_flash_columns_%d", d), blocks, 128, 3*flashRows*d*2, t.columns, t.parts, query, a.keys.at, lse, listAt, len(sums),
		n, spec.Heads, spec.KVHeads, spec.Window, tap.Prompt, mapWidth, t.tiles, scoreScale(d)); err != nil {
		return err
	}

	h := heads{0, spec.KVHeads, engine.Mask{}}
	rows := a.b.rowsFor(spec, h, n, 4+2)
	if err := a.room(h, rows, (n+7)/8*8); err != nil {
		return err
	}
	scores := func(x *tile) error {
		if err := a.pack(a.query, qs, h, x); err != nil {
			return err
		}
		if err := a.against(a.scores, a.query, a.keys, h, x, scoreScale(d)); err != nil {
			return err
		}
		return t.softmax(h, x)
	}
	for _, s := range t.singleRows() {
		for row := s.lo; row < s.hi; row += rows {
			x := newTile(spec, h.mask, row, min(rows, s.hi-row))
			if err := scores(&x); err != nil {
				return err
			}
			if err := t.columnSums(h, &x, len(sums)); err != nil {
				return err
			}
			if err := t.someRows(h, &x); err != nil {
				return err
			}
		}
	}
	for first := 0; t.holders != 0 && first < t.samples; first += rows {
		every := tap.KeysEvery
		x := sparseTile(spec, h.mask, first*every+every-1, min(rows, t.samples-first), every)
		if err := scores(&x); err != nil {
			return err
		}
		if err := t.holdersOf(h, &x, first, x.rows, 0, 1); err != nil {
			return err
		}
	}
	return nil
}

// rowSpan is a range of rows.
type rowSpan struct{ lo, hi int }

// singleRows are the rows that windows, variance and answers are of.
func (t *taps) singleRows() (spans []rowSpan) {
	tap := t.tap
	tail := tap.VarianceWindow
	for _, w := range tap.Windows {
		tail = max(tail, w)
	}
	add := func(lo, hi int) {
		if n := len(spans); n > 0 && lo <= spans[n-1].hi {
			spans[n-1].hi = max(spans[n-1].hi, hi)
		} else if lo < hi {
			spans = append(spans, rowSpan{lo, hi})
		}
	}
	tailed := false
	for _, i := range tap.Answer { // ascending
		if lo := max(0, tap.Prompt-tail); !tailed && i >= lo {
			add(lo, tap.Prompt)
			tailed = true
		}
		add(i, i+1)
	}
	if !tailed {
		add(max(0, tap.Prompt-tail), tap.Prompt)
	}
	return spans
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
	parts := floats(t.parts, heads*t.tiles*t.blocks*2)
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
		for i, v := range parts[h*t.tiles*t.blocks*2 : (h+1)*t.tiles*t.blocks*2] {
			row, block := i/2/t.blocks, i/2%t.blocks
			if col := block*flashRows/t.mapTile + i%2; col < t.tiles {
				pooled[(h*t.tiles+row)*t.tiles+col] += v
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
