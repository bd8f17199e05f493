package engine

import (
	"context"
	"fmt"
)

// Pages holds the keys and values of caches whose heads keep different numbers of tokens. A page is Block rows of both
// tensors and belongs to one KV head of one layer of one sequence: page p is rows [p*Block, (p+1)*Block).
type Pages struct {
	Keys, Values Tensor // [pages*Block, HeadDim]
	Block        int
}

// Span is a range of slots, [Lo, Hi).
type Span struct{ Lo, Hi int }

// Lane is what one query row has of one KV head's cache.
type Lane struct {
	// Table lists the pages: slot s is row Table[s/Block]*Block + s%Block.
	Table []int32
	// Spans are the slots that the row sees, ascending, without overlap, its own included.
	Spans []Span
	// Write is the slot that takes in the row's key and value.
	Write int
	// Key is the position that the row's key is rotated to as it is stored; -1 stores it as it is.
	Key int
	// Query is the position that the row's queries are rotated to.
	Query int
	// Rotate holds by slot the position that a stored key is rotated to when it is read; nil reads keys as they are.
	Rotate []int32
	// Probabilities, when not nil, has a slice per query head of the group, which is filled by slot for those in Spans.
	Probabilities [][]float32
}

// Row is the index in the pages of a slot.
func (l *Lane) Row(slot, block int) int { return int(l.Table[slot/block])*block + slot%block }

// Token is one token of one sequence in a decoding step.
type Token struct {
	ID int32
	// Lanes are [layer][KV head].
	Lanes [][]Lane
	// Logits says that the token's logits are wanted.
	Logits bool
}

// NewPages makes room for so many pages of block tokens.
func (m *Model) NewPages(pages, block int) *Pages {
	return &Pages{Keys: m.Backend.New(pages*block, m.Config.HeadDim), Values: m.Backend.New(pages*block, m.Config.HeadDim), Block: block}
}

// FreePages gives the memory back.
func (m *Model) FreePages(p *Pages) { m.Backend.Free(p.Keys, p.Values) }

// Decode runs one token each of any number of sequences, or some tokens of one in rising order, through the model: their
// keys and values are written to the pages, and each sees what its lanes say. Weights are read once for all of them.
// It returns Vocab logits for every token that asks for them, in order.
func (m *Model) Decode(ctx context.Context, pages *Pages, tokens []Token) (_ [][]float64, err error) {
	defer Catch(&err)
	b, cfg := m.Backend, m.Config
	if err := m.checkTokens(pages, tokens); err != nil {
		return nil, err
	}
	n := len(tokens)
	ids := make([]int32, n)
	s := &Sequence{}
	last := -1
	for i, t := range tokens {
		ids[i] = t.ID
		if t.Logits {
			s.LogitRows = append(s.LogitRows, i)
		}
		for _, lanes := range t.Lanes {
			for _, l := range lanes {
				last = max(last, l.Key, l.Query)
				for _, p := range l.Rotate {
					last = max(last, int(p))
				}
			}
		}
	}
	table := m.rotaryTo(last + 1)
	x := b.New(n, cfg.Hidden)
	defer b.Free(x)
	b.Embed(x, m.embed, ids)
	lanes := make([][]Lane, n)
	for l := range m.layers {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		for i, t := range tokens {
			lanes[i] = t.Lanes[l]
		}
		w := &m.layers[l]
		q, k, v := b.New(n, cfg.QueryWidth()), b.New(n, cfg.KVWidth()), b.New(n, cfg.KVWidth())
		m.project(w, x, q, k, v)
		a := b.New(n, cfg.QueryWidth())
		b.PagedAttention(a, q, k, v, pages, lanes, table, AttentionSpec{Heads: cfg.Heads, KVHeads: cfg.KVHeads, HeadDim: cfg.HeadDim})
		b.MatMul(x, a, w.output, true)
		b.Free(q, k, v, a)
		gu := b.New(n, 2*cfg.Intermediate)
		m.mlp(w, x, gu)
		b.Free(gu)
		if row := b.Finite(x); row >= 0 {
			return nil, &NonFiniteError{Layer: l, Row: row}
		}
	}
	if err := m.finish(s, 0, x); err != nil {
		return nil, err
	}
	return s.Logits, nil
}

// checkTokens refuses what would read or write outside the pages.
func (m *Model) checkTokens(pages *Pages, tokens []Token) error {
	if len(tokens) == 0 {
		return fmt.Errorf("no tokens")
	}
	group := m.Config.Heads / m.Config.KVHeads
	total := pages.Keys.Rows() / pages.Block
	for i, t := range tokens {
		if t.ID < 0 || int(t.ID) >= m.Config.Vocab {
			return fmt.Errorf("token %d is %d, outside the vocabulary of %d", i, t.ID, m.Config.Vocab)
		}
		if len(t.Lanes) != len(m.layers) {
			return fmt.Errorf("token %d: lanes for %d layers, the model has %d", i, len(t.Lanes), len(m.layers))
		}
		for l, lanes := range t.Lanes {
			if len(lanes) != m.Config.KVHeads {
				return fmt.Errorf("token %d, layer %d: %d lanes for %d KV heads", i, l, len(lanes), m.Config.KVHeads)
			}
			for k := range lanes {
				if err := lanes[k].check(total, pages.Block, group); err != nil {
					return fmt.Errorf("token %d, layer %d, KV head %d: %w", i, l, k, err)
				}
			}
		}
	}
	return nil
}

func (l *Lane) check(pages, block, group int) error {
	slots, seen, own := len(l.Table)*block, 0, false
	for _, s := range l.Spans {
		if s.Lo < seen || s.Hi <= s.Lo || s.Hi > slots {
			return fmt.Errorf("span [%d, %d) after slot %d of %d", s.Lo, s.Hi, seen, slots)
		}
		for p := s.Lo / block; p <= (s.Hi-1)/block; p++ {
			if l.Table[p] < 0 || int(l.Table[p]) >= pages {
				return fmt.Errorf("slot %d is in page %d of %d", p*block, l.Table[p], pages)
			}
		}
		own = own || l.Write >= s.Lo && l.Write < s.Hi
		seen = s.Hi
	}
	switch {
	case !own:
		return fmt.Errorf("does not see slot %d, which it writes", l.Write)
	case l.Query < 0 || l.Key < -1:
		return fmt.Errorf("positions %d and %d", l.Query, l.Key)
	case l.Rotate != nil && len(l.Rotate) < seen:
		return fmt.Errorf("%d positions for %d slots", len(l.Rotate), seen)
	case l.Probabilities != nil && len(l.Probabilities) != group:
		return fmt.Errorf("%d rows of probabilities for %d query heads", len(l.Probabilities), group)
	}
	for _, p := range l.Probabilities {
		if len(p) < seen {
			return fmt.Errorf("%d probabilities for %d slots", len(p), seen)
		}
	}
	return nil
}
