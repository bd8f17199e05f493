//go:build linux

package cuda

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// pagedCase is a problem of paged attention: some rows with caches of different lengths, in pages in any order.
type pagedCase struct {
	heads, kvHeads, d, block, rows int
	rotate, scattered              bool
}

// build makes pages with random content and lanes into them. Page ids are shuffled by shuffle only.
func (c pagedCase) build(b engine.Backend, shuffle uint64) (pages *engine.Pages, lanes [][]engine.Lane) {
	r := seeded(uint64(c.d + c.rows))
	type cache struct{ slots int }
	total := 0
	var caches []cache
	for range c.rows * c.kvHeads {
		n := 1 + r.IntN(300)
		caches = append(caches, cache{n})
		total += (n + c.block - 1) / c.block
	}
	ids := make([]int, total)
	for i := range ids {
		ids[i] = i
	}
	if c.scattered {
		rand.New(rand.NewPCG(shuffle, 1)).Shuffle(total, func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	}
	keys, vals := make([]float64, total*c.block*c.d), make([]float64, total*c.block*c.d)
	next := 0
	for row := range c.rows {
		var of []engine.Lane
		for kv := range c.kvHeads {
			n := caches[row*c.kvHeads+kv].slots
			l := engine.Lane{Query: r.IntN(900), Key: r.IntN(900) - 1, Write: n - 1}
			for range (n + c.block - 1) / c.block {
				l.Table = append(l.Table, int32(ids[next]))
				next++
			}
			// What a slot holds depends on the slot, not on its page.
			for s := range n {
				at := l.Row(s, c.block) * c.d
				copy(keys[at:], normal(r, c.d, 1.5))
				copy(vals[at:], normal(r, c.d, 1))
			}
			if n > 20 && r.IntN(2) == 0 {
				l.Spans = []engine.Span{{Lo: 0, Hi: 1 + r.IntN(9)}, {Lo: 10 + r.IntN(n-11), Hi: n}}
			} else {
				l.Spans = []engine.Span{{Lo: 0, Hi: n}}
			}
			if c.rotate && kv == 0 {
				for range n {
					l.Rotate = append(l.Rotate, int32(r.IntN(900)))
				}
			}
			for range c.heads / c.kvHeads {
				l.Probabilities = append(l.Probabilities, make([]float32, n))
			}
			of = append(of, l)
		}
		lanes = append(lanes, of)
	}
	pages = &engine.Pages{Keys: matrix{total * c.block, c.d, keys}.on(b), Values: matrix{total * c.block, c.d, vals}.on(b), Block: c.block}
	return pages, lanes
}

// attend returns the output, the pages after it, and the probabilities.
func (c pagedCase) attend(b engine.Backend, shuffle uint64) []engine.Tensor {
	pages, lanes := c.build(b, shuffle)
	r := seeded(99)
	q, k, v := random(r, c.rows, c.heads*c.d), random(r, c.rows, c.kvHeads*c.d), random(r, c.rows, c.kvHeads*c.d)
	out := b.New(c.rows, c.heads*c.d)
	b.PagedAttention(out, q.on(b), k.on(b), v.on(b), pages, lanes, rotaryTable(c.d, 1000), engine.AttentionSpec{Heads: c.heads, KVHeads: c.kvHeads, HeadDim: c.d})
	var all []float64
	for _, row := range lanes {
		for _, l := range row {
			for _, p := range l.Probabilities {
				for _, x := range p {
					all = append(all, float64(x))
				}
			}
		}
	}
	return []engine.Tensor{out, pages.Keys, pages.Values, matrix{1, len(all), all}.on(b)}
}

func pagedCases() []pagedCase {
	return []pagedCase{
		{heads: 1, kvHeads: 1, d: 64, block: 16, rows: 1},
		{heads: 9, kvHeads: 3, d: 64, block: 16, rows: 5, scattered: true},
		{heads: 4, kvHeads: 2, d: 64, block: 1, rows: 3, rotate: true, scattered: true},
		{heads: 4, kvHeads: 4, d: 128, block: 32, rows: 2, rotate: true},
		{heads: 6, kvHeads: 2, d: 10, block: 3, rows: 4, rotate: true, scattered: true},
		{heads: 2, kvHeads: 1, d: 80, block: 16, rows: 2, scattered: true},
		{heads: 40, kvHeads: 1, d: 32, block: 16, rows: 2},
	}
}

func TestPagedAttention(t *testing.T) {
	both(t, func(t *testing.T, b *Backend) {
		for _, c := range pagedCases() {
			compare(t, fmt.Sprintf("paged attention %+v", c), b, 3e-6, func(b engine.Backend) []engine.Tensor { return c.attend(b, 1) })
		}
	})
}

// Where pages lie must not change a bit.
func TestPagesChangeNothing(t *testing.T) {
	b := newBackend(t, "f32")
	for _, c := range pagedCases() {
		var first string
		for shuffle := range uint64(3) {
			r := c.attend(b, shuffle)
			got := fmt.Sprint(download(b, r[0]), download(b, r[3]))
			if first == "" {
				first = got
			}
			if got != first {
				t.Fatalf("%+v: result depends on pages", c)
			}
		}
	}
}

func TestStoreAndMovePages(t *testing.T) {
	rows := []int32{4, -1, 0, 29, 7, -1, 8, 30, 11}
	b := newBackend(t, "bf16")
	compare(t, "store and move pages", b, 0, func(b engine.Backend) []engine.Tensor {
		r := seeded(5)
		k, v := random(r, 31, 3*24), random(r, 31, 3*24)
		pages := &engine.Pages{Keys: b.New(20, 24), Values: b.New(20, 24), Block: 4}
		b.StorePages(pages, []int32{3, 0, 4}, rows, k.on(b), v.on(b), 1)
		b.MovePages(pages, []int{0, 1, 12, 13}, []int{1, 0, 2, 12})
		b.MovePages(pages, nil, nil)
		return []engine.Tensor{pages.Keys, pages.Values}
	})
}

// rotaryTable is a RoPE table of base 10,000.
func rotaryTable(d, positions int) *engine.Rotary {
	t := &engine.Rotary{HeadDim: d}
	for p := range positions {
		for j := range d / 2 {
			sin, cos := math.Sincos(float64(p) * math.Pow(1e4, -2*float64(j)/float64(d)))
			t.Cos, t.Sin = append(t.Cos, float32(cos)), append(t.Sin, float32(sin))
		}
	}
	return t
}
