package enginetest

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// PagedCase is a problem of paged attention: some rows with caches of different lengths, in pages in any order.
type PagedCase struct {
	Heads, KVHeads, HeadDim, Block, Rows int
	Longest                              int // most slots of a cache
	Rotate, Scattered                    bool
}

// PagedCases cover groups, block sizes and head dimensions that kernels may like or not.
func PagedCases(longest int) []PagedCase {
	return []PagedCase{
		{Heads: 1, KVHeads: 1, HeadDim: 64, Block: 16, Rows: 1, Longest: longest},
		{Heads: 9, KVHeads: 3, HeadDim: 64, Block: 16, Rows: 5, Longest: longest, Scattered: true},
		{Heads: 4, KVHeads: 2, HeadDim: 64, Block: 1, Rows: 3, Longest: longest, Rotate: true, Scattered: true},
		{Heads: 4, KVHeads: 4, HeadDim: 128, Block: 32, Rows: 2, Longest: longest, Rotate: true},
		{Heads: 6, KVHeads: 2, HeadDim: 10, Block: 3, Rows: 4, Longest: longest, Rotate: true, Scattered: true},
		{Heads: 2, KVHeads: 1, HeadDim: 80, Block: 16, Rows: 2, Longest: longest, Scattered: true},
		{Heads: 40, KVHeads: 1, HeadDim: 32, Block: 16, Rows: 2, Longest: longest},
	}
}

// Spec is the shape of the attention.
func (c PagedCase) Spec() engine.AttentionSpec {
	return engine.AttentionSpec{Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim}
}

// Build makes pages with random content and lanes into them. Page ids are shuffled by shuffle only.
func (c PagedCase) Build(b engine.Backend, shuffle uint64) (pages *engine.Pages, lanes [][]engine.Lane) {
	r := Seeded(uint64(c.HeadDim + c.Rows))
	total := 0
	var slots []int // per row and KV head
	for range c.Rows * c.KVHeads {
		n := 1 + r.IntN(c.Longest)
		slots = append(slots, n)
		total += (n + c.Block - 1) / c.Block
	}
	ids := make([]int, total)
	for i := range ids {
		ids[i] = i
	}
	if c.Scattered {
		rand.New(rand.NewPCG(shuffle, 1)).Shuffle(total, func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	}
	d := c.HeadDim
	keys, values := make([]float64, total*c.Block*d), make([]float64, total*c.Block*d)
	next := 0
	for row := range c.Rows {
		var of []engine.Lane
		for kv := range c.KVHeads {
			n := slots[row*c.KVHeads+kv]
			l := engine.Lane{Query: r.IntN(900), Key: r.IntN(900) - 1, Write: n - 1}
			for range (n + c.Block - 1) / c.Block {
				l.Table = append(l.Table, int32(ids[next]))
				next++
			}
			// What a slot holds depends on the slot, not on its page.
			for s := range n {
				at := l.Row(s, c.Block) * d
				copy(keys[at:], Normal(r, d, 1.5))
				copy(values[at:], Normal(r, d, 1))
			}
			if n > 20 && r.IntN(2) == 0 {
				l.Spans = []engine.Span{{Lo: 0, Hi: 1 + r.IntN(9)}, {Lo: 10 + r.IntN(n-11), Hi: n}}
			} else {
				l.Spans = []engine.Span{{Lo: 0, Hi: n}}
			}
			if c.Rotate && kv == 0 {
				for range n {
					l.Rotate = append(l.Rotate, int32(r.IntN(900)))
				}
			}
			for range c.Heads / c.KVHeads {
				l.Probabilities = append(l.Probabilities, make([]float32, n))
			}
			of = append(of, l)
		}
		lanes = append(lanes, of)
	}
	rows := total * c.Block
	pages = &engine.Pages{Keys: Matrix{rows, d, keys}.On(b), Values: Matrix{rows, d, values}.On(b), Block: c.Block}
	return pages, lanes
}

// Attend returns the output, the pages after it, and the probabilities.
func (c PagedCase) Attend(b engine.Backend, shuffle uint64) []engine.Tensor {
	pages, lanes := c.Build(b, shuffle)
	r := Seeded(99)
	width, kvWidth := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	q, k, v := Random(r, c.Rows, width), Random(r, c.Rows, kvWidth), Random(r, c.Rows, kvWidth)
	out := b.New(c.Rows, width)
	b.PagedAttention(out, q.On(b), k.On(b), v.On(b), pages, lanes, Rotary(c.HeadDim, 1000), c.Spec())
	var all []float64
	for _, row := range lanes {
		for _, l := range row {
			for _, p := range l.Probabilities {
				all = append(all, widen(p)...)
			}
		}
	}
	return []engine.Tensor{out, pages.Keys, pages.Values, Matrix{1, len(all), all}.On(b)}
}

// StoreAndMovePages returns the keys and values of pages after rows were stored there, some of them left out, and moved.
func StoreAndMovePages(b engine.Backend) []engine.Tensor {
	r := Seeded(5)
	k, v := Random(r, 31, 3*24), Random(r, 31, 3*24)
	pages := &engine.Pages{Keys: b.New(20, 24), Values: b.New(20, 24), Block: 4}
	b.StorePages(pages, []int32{3, 0, 4}, []int32{4, -1, 0, 29, 7, -1, 8, 30, 11}, k.On(b), v.On(b), 1)
	b.MovePages(pages, []int{0, 1, 12, 13}, []int{1, 0, 2, 12})
	b.MovePages(pages, nil, nil)
	return []engine.Tensor{pages.Keys, pages.Values}
}

// PagedPrompt is the keys and values of a prompt in pages.
type PagedPrompt struct {
	Pages  *engine.Pages
	Tables [][][]int32 // [layer][KV head]
	model  *engine.Model
	raw    func(layer int) bool
}

// Prefill runs a prompt and stores its keys and values in pages that have room for more tokens. Keys are stored before RoPE in the layers
// that raw names. No two pages of a table lie side by side, nor in order.
func Prefill(t testing.TB, m *engine.Model, prompt []int32, room, block int, raw func(layer int) bool) *PagedPrompt {
	t.Helper()
	cfg := m.Config
	per := (len(prompt) + room + block - 1) / block
	p := &PagedPrompt{m.NewPages(per*cfg.Layers*cfg.KVHeads, block), make([][][]int32, cfg.Layers), m, raw}
	rows := make([]int32, len(prompt))
	for i := range rows {
		rows[i] = int32(i)
	}
	store := func(l int, unrotated, k, v engine.Tensor, _ *engine.Tap) error {
		if raw(l) {
			k = unrotated
		}
		for h := range cfg.KVHeads {
			var table []int32
			for i := range per {
				table = append(table, int32(((per-1-i)*cfg.KVHeads+h)*cfg.Layers+l))
			}
			p.Tables[l] = append(p.Tables[l], table)
			m.Backend.StorePages(p.Pages, table, rows, k, v, h)
		}
		return nil
	}
	if err := m.Forward(context.Background(), &engine.Sequence{Tokens: prompt, RawKeys: true, Cached: store}); err != nil {
		t.Fatal(err)
	}
	return p
}

// Token is a token at a position that looks at everything that its layer's window lets it see.
func (p *PagedPrompt) Token(id int32, at int) engine.Token {
	token := engine.Token{ID: id, Logits: true}
	for l, heads := range p.Tables {
		lo := 0
		if w := p.model.Config.Window(l); w > 0 {
			lo = max(0, at-w+1)
		}
		var lanes []engine.Lane
		for _, table := range heads {
			lane := engine.Lane{Table: table, Spans: []engine.Span{{Lo: lo, Hi: at + 1}}, Write: at, Key: at, Query: at}
			if p.raw(l) {
				lane.Key = -1
				for s := range at + 1 {
					lane.Rotate = append(lane.Rotate, int32(s))
				}
			}
			lanes = append(lanes, lane)
		}
		token.Lanes = append(token.Lanes, lanes)
	}
	return token
}
