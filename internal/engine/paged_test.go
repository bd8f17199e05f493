package engine_test

import (
	"context"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// allOrNone keeps the keys of all layers before RoPE, or of none.
func allOrNone(raw bool) func(int) bool { return func(int) bool { return raw } }

// Decoding over pages must equal the forward pass over the whole text: token by token, some at once, with keys rotated
// as they are stored or as they are read.
func TestDecodeIsForward(t *testing.T) {
	for name, c := range enginetest.Variants() {
		t.Run(name, func(t *testing.T) {
			m := newModel(t, c)
			tokens := enginetest.Tokens(c, 23, 1)
			rows := []int{11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22}
			want := logits(t, m, &engine.Sequence{Tokens: tokens, LogitRows: rows})
			for _, raw := range []bool{false, true} {
				p := enginetest.Prefill(t, m, tokens[:11], 12, 4, allOrNone(raw))
				var got [][]float64
				for at := 11; at < len(tokens); {
					n := 1
					if at >= 15 {
						n = 4
					}
					var step []engine.Token
					for i := at; i < at+n; i++ {
						step = append(step, p.Token(tokens[i], i))
					}
					out, err := m.Decode(context.Background(), p.Pages, step)
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, out...)
					at += n
				}
				for i := range rows {
					if d := farthest(got[i], want[i]); d > 1e-11 {
						t.Fatalf("raw %v: logits at token %d differ by %g", raw, rows[i], d)
					}
				}
				m.FreePages(p.Pages)
			}
		})
	}
}

// A sequence's logits must not depend on the sequences that are decoded with it.
func TestDecodeTogetherIsAlone(t *testing.T) {
	m := newModel(t, enginetest.Tiny())
	a, b := enginetest.Tokens(m.Config, 9, 1), enginetest.Tokens(m.Config, 14, 2)
	pa := enginetest.Prefill(t, m, a, 3, 4, allOrNone(false))
	pb := enginetest.Prefill(t, m, b, 3, 4, allOrNone(false))
	alone := func(p *enginetest.PagedPrompt, id int32, at int) []float64 {
		out, err := m.Decode(context.Background(), p.Pages, []engine.Token{p.Token(id, at)})
		if err != nil {
			t.Fatal(err)
		}
		return out[0]
	}
	wa, wb := alone(pa, 5, 9), alone(pb, 6, 14)
	// Both caches in one set of pages.
	n := pa.Pages.Keys.Rows()
	both := m.NewPages((n+pb.Pages.Keys.Rows())/4, 4)
	for _, part := range []struct {
		at   int
		from *engine.Pages
	}{{0, pa.Pages}, {n, pb.Pages}} {
		m.Backend.Copy(m.Backend.Slice(both.Keys, part.at, part.at+part.from.Keys.Rows()), part.from.Keys)
		m.Backend.Copy(m.Backend.Slice(both.Values, part.at, part.at+part.from.Keys.Rows()), part.from.Values)
	}
	for _, heads := range pb.Tables {
		for _, table := range heads {
			for i := range table {
				table[i] += int32(n / 4)
			}
		}
	}
	got, err := m.Decode(context.Background(), both, []engine.Token{pa.Token(5, 9), pb.Token(6, 14)})
	if err != nil {
		t.Fatal(err)
	}
	if farthest(got[0], wa) != 0 || farthest(got[1], wb) != 0 {
		t.Fatal("logits depend on the other sequence")
	}
}

func TestDecodeRefuses(t *testing.T) {
	m := newModel(t, enginetest.Tiny())
	p := enginetest.Prefill(t, m, enginetest.Tokens(m.Config, 5, 1), 3, 4, allOrNone(false))
	good := func() engine.Token { return p.Token(1, 5) }
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
		if _, err := m.Decode(context.Background(), p.Pages, []engine.Token{k}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, c.want)
		}
	}
	if _, err := m.Decode(context.Background(), p.Pages, nil); err == nil {
		t.Error("no tokens were decoded")
	}
}
