package engine_test

import (
	"context"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// prefill runs a prompt and stores all keys and values in pages, [layer][KV head] tables of consecutive pages. With raw
// the keys are stored before RoPE.
func prefill(t *testing.T, m *engine.Model, prompt []int32, room, block int, raw bool) (*engine.Pages, [][][]int32) {
	t.Helper()
	per := (len(prompt) + room + block - 1) / block
	pages := m.NewPages(per*m.Config.Layers*m.Config.KVHeads, block)
	tables := make([][][]int32, m.Config.Layers)
	next := int32(0)
	rows := make([]int32, len(prompt))
	for i := range rows {
		rows[i] = int32(i)
	}
	s := &engine.Sequence{Tokens: prompt, RawKeys: raw, Cached: func(l int, unrotated, k, v engine.Tensor, _ *engine.Tap) error {
		if raw {
			k = unrotated
		}
		for h := range m.Config.KVHeads {
			var table []int32
			for range per {
				table = append(table, next)
				next++
			}
			tables[l] = append(tables[l], table)
			m.Backend.StorePages(pages, table, rows, k, v, h)
		}
		return nil
	}}
	if err := m.Forward(context.Background(), s); err != nil {
		t.Fatal(err)
	}
	return pages, tables
}

// token looks at everything that its layer's window lets it see.
func token(m *engine.Model, id int32, at int, tables [][][]int32, raw bool) engine.Token {
	k := engine.Token{ID: id, Logits: true}
	for l, heads := range tables {
		lo := 0
		if w := m.Config.Window(l); w > 0 {
			lo = max(0, at-w+1)
		}
		var lanes []engine.Lane
		for _, table := range heads {
			lane := engine.Lane{Table: table, Spans: []engine.Span{{Lo: lo, Hi: at + 1}}, Write: at, Key: at, Query: at}
			if raw {
				lane.Key = -1
				for p := range at + 1 {
					lane.Rotate = append(lane.Rotate, int32(p))
				}
			}
			lanes = append(lanes, lane)
		}
		k.Lanes = append(k.Lanes, lanes)
	}
	return k
}

// Decoding over pages must equal the forward pass over the whole text: token by token, some at once, with keys rotated
// as they are stored or as they are read.
func TestDecodeIsForward(t *testing.T) {
	for name, c := range variants() {
		t.Run(name, func(t *testing.T) {
			m := newModel(t, c)
			tokens := enginetest.Tokens(c, 23, 1)
			rows := []int{11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22}
			want := logits(t, m, &engine.Sequence{Tokens: tokens, LogitRows: rows})
			for _, raw := range []bool{false, true} {
				pages, tables := prefill(t, m, tokens[:11], 12, 4, raw)
				var got [][]float64
				for at := 11; at < len(tokens); {
					n := 1
					if at >= 15 {
						n = 4
					}
					var step []engine.Token
					for i := at; i < at+n; i++ {
						step = append(step, token(m, tokens[i], i, tables, raw))
					}
					out, err := m.Decode(context.Background(), pages, step)
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, out...)
					at += n
				}
				for i := range rows {
					if d := distance(got[i], want[i]); d > 1e-11 {
						t.Fatalf("raw %v: logits at token %d differ by %g", raw, rows[i], d)
					}
				}
				m.FreePages(pages)
			}
		})
	}
}

// A sequence's logits must not depend on the sequences that are decoded with it.
func TestDecodeTogetherIsAlone(t *testing.T) {
	m := newModel(t, enginetest.Tiny())
	a, b := enginetest.Tokens(m.Config, 9, 1), enginetest.Tokens(m.Config, 14, 2)
	pages, ta := prefill(t, m, a, 3, 4, false)
	more, tb := prefill(t, m, b, 3, 4, false)
	alone := func(p *engine.Pages, k engine.Token) []float64 {
		out, err := m.Decode(context.Background(), p, []engine.Token{k})
		if err != nil {
			t.Fatal(err)
		}
		return out[0]
	}
	wa, wb := alone(pages, token(m, 5, 9, ta, false)), alone(more, token(m, 6, 14, tb, false))
	// Both caches in one set of pages.
	n := pages.Keys.Rows()
	both := m.NewPages((n+more.Keys.Rows())/4, 4)
	for _, part := range []struct {
		at   int
		from *engine.Pages
	}{{0, pages}, {n, more}} {
		m.Backend.Copy(m.Backend.Slice(both.Keys, part.at, part.at+part.from.Keys.Rows()), part.from.Keys)
		m.Backend.Copy(m.Backend.Slice(both.Values, part.at, part.at+part.from.Keys.Rows()), part.from.Values)
	}
	for _, heads := range tb {
		for _, table := range heads {
			for i := range table {
				table[i] += int32(n / 4)
			}
		}
	}
	got, err := m.Decode(context.Background(), both, []engine.Token{token(m, 5, 9, ta, false), token(m, 6, 14, tb, false)})
	if err != nil {
		t.Fatal(err)
	}
	if distance(got[0], wa) != 0 || distance(got[1], wb) != 0 {
		t.Fatal("logits depend on the other sequence")
	}
}

func TestDecodeRefuses(t *testing.T) {
	m := newModel(t, enginetest.Tiny())
	pages, tables := prefill(t, m, enginetest.Tokens(m.Config, 5, 1), 3, 4, false)
	good := func() engine.Token { return token(m, 1, 5, tables, false) }
	for name, c := range map[string]struct {
		spoil func(k *engine.Token)
		want  string
	}{
		"vocabulary":    {func(k *engine.Token) { k.ID = 50 }, "outside the vocabulary"},
		"layers":        {func(k *engine.Token) { k.Lanes = k.Lanes[:2] }, "lanes for 2 layers"},
		"heads":         {func(k *engine.Token) { k.Lanes[1] = k.Lanes[1][:1] }, "layer 1: 1 lanes"},
		"beyond table":  {func(k *engine.Token) { k.Lanes[0][0].Spans[0].Hi = 9 }, "of 8"},
		"page":          {func(k *engine.Token) { k.Lanes[2][1].Table = []int32{99, 3} }, "page 99"},
		"freed page":    {func(k *engine.Token) { k.Lanes[2][1].Table = []int32{-1, 3} }, "page -1"},
		"blind":         {func(k *engine.Token) { k.Lanes[0][0].Write = 6 }, "does not see slot 6"},
		"order":         {func(k *engine.Token) { k.Lanes[0][0].Spans = []engine.Span{{Lo: 3, Hi: 6}, {Lo: 0, Hi: 2}} }, "after slot 6"},
		"positions":     {func(k *engine.Token) { k.Lanes[0][0].Query = -1 }, "positions"},
		"rotation":      {func(k *engine.Token) { k.Lanes[0][0].Rotate = []int32{1} }, "1 positions for 6 slots"},
		"probabilities": {func(k *engine.Token) { k.Lanes[0][0].Probabilities = make([][]float32, 2) }, "0 probabilities"},
	} {
		k := good()
		c.spoil(&k)
		if _, err := m.Decode(context.Background(), pages, []engine.Token{k}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, c.want)
		}
	}
	if _, err := m.Decode(context.Background(), pages, nil); err == nil {
		t.Error("no tokens were decoded")
	}
}
