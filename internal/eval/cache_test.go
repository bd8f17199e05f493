package eval

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
	"github.com/kvprofile/kvprofile/plan"
)

type noTokenizer struct{}

func (noTokenizer) Decode(ids []int32) string { return fmt.Sprint(ids) }

// cachePlan has one policy everywhere.
func cachePlan(t *testing.T, c *engine.Config, q plan.Policy, change func(p *plan.Plan)) *plan.Plan {
	t.Helper()
	hash := strings.Repeat("0", 64)
	p := &plan.Plan{Format: plan.Format, Version: plan.Version, Tool: plan.Tool{Name: "test", Version: "0"},
		Model: plan.Model{Name: "tiny", Architecture: c.Architecture, NLayers: c.Layers, NHeads: c.Heads, NKVHeads: c.KVHeads, HeadDim: c.HeadDim,
			MaxPosition: c.MaxPosition, RoPE: plan.RoPE{Theta: c.RoPE.Theta}, SHA256: plan.Hashes{Config: hash, Weights: hash, Tokenizer: hash}},
		Cache:    plan.Cache{Dtype: plan.F16, Granularity: plan.PerKVHead, BlockSize: 4, GroupRule: plan.GroupMin, Prefill: plan.PrefillDense},
		Ties:     plan.Ties{Heads: plan.LowerLayerThenKVHead, Tokens: plan.LowerPosition},
		Policies: map[string]plan.Policy{"one": q}}
	for range c.Layers {
		p.Layers = append(p.Layers, slices.Repeat([]string{"one"}, c.KVHeads))
	}
	if change != nil {
		change(p)
	}
	p.Totals = []plan.Totals{p.ComputeTotals(10, 10)}
	if v := p.Validate(); len(v) > 0 {
		t.Fatal(v)
	}
	return p
}

// cachePolicies are plans of all kinds that keep less than all of 30 tokens.
func cachePolicies(t *testing.T, c *engine.Config) (plans []*plan.Plan) {
	perLayer := func(p *plan.Plan) { p.Cache.Granularity = plan.PerLayer }
	chunked := func(p *plan.Plan) { p.Cache.Prefill, p.Cache.ChunkTokens = plan.PrefillChunked, 8 }
	special := func(p *plan.Plan) { p.TokenClasses = &plan.TokenClasses{Special: []int{1, 2, 3}} }
	streaming := plan.Streaming{SinkTokens: 2, RecentTokens: 7, Evict: plan.EvictAlways, Decode: plan.DecodeRolling, Positions: plan.PositionsCacheSlot}
	topk := plan.TopK{BudgetTokens: 13, ObservationWindow: 4, Pool: plan.Pool{Kind: plan.PoolAvg, Kernel: 3}, Aggregate: plan.AggregateMean,
		Evict: plan.EvictPrefillEnd, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
	h2o := plan.H2O{SinkTokens: 1, HeavyTokens: 5, RecentTokens: 4, Evict: plan.EvictAlways, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
	fastgen := plan.FastGen{Classes: []plan.Class{plan.ClassSpecial}, FrequentRatio: .2, LocalRatio: .2, Evict: plan.EvictPrefillEnd,
		Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
	for _, q := range []plan.Policy{streaming, topk, h2o, fastgen} {
		for _, change := range []func(p *plan.Plan){nil, perLayer, chunked} {
			plans = append(plans, cachePlan(t, c, q, func(p *plan.Plan) {
				if q.Kind() == plan.KindFastGen {
					special(p)
				}
				if change != nil {
					change(p)
				}
			}))
		}
	}
	return plans
}

func cacheEvaluator(t *testing.T, m *engine.Model, plans ...*plan.Plan) *evaluator {
	t.Helper()
	e := &evaluator{ctx: context.Background(), model: m, tok: noTokenizer{}}
	for i, p := range plans {
		x, err := newEntry(&m.Config, Contender{Name: fmt.Sprint("plan ", i), Plan: p})
		if err != nil {
			t.Fatal(err)
		}
		e.entries = append(e.entries, x)
	}
	return e
}

func tinyModel(t *testing.T) *engine.Model {
	t.Helper()
	c := enginetest.Tiny()
	m, err := engine.New(c, enginetest.Weights{Config: c, Seed: 2}, ref.New[float64]())
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Decoding from a copy changes nothing of the original: its later logits, blocks and tokens are those of one that was
// never copied.
func TestForkDoesNotDisturb(t *testing.T) {
	m := tinyModel(t)
	e := cacheEvaluator(t, m, cachePolicies(t, &m.Config)...)
	tokens := enginetest.Tokens(m.Config, 50, 1)
	prompt, gold, other := tokens[:30], tokens[30:40], tokens[40:]
	run := func(forks bool) (trace []string) {
		c, err := e.prefill(&datasets.Sample{}, prompt, 10)
		if err != nil {
			t.Fatal(err)
		}
		defer c.free()
		for i, id := range gold {
			if forks && i%4 == 0 {
				f := c.fork()
				for _, x := range other[:len(gold)-i] {
					if err := f.step(e, same(x, len(e.entries)), nil); err != nil {
						t.Fatal(err)
					}
				}
				f.free()
			}
			if err := c.step(e, same(id, len(e.entries)), nil); err != nil {
				t.Fatal(err)
			}
			for _, q := range c.sequences {
				tel := q.cache.Telemetry()
				tel.Busy = 0
				trace = append(trace, fmt.Sprint(i, q.Name, q.logits, q.cache.Usage(), tel, q.cache.Head(1, 1).Positions(), q.cache.Head(1, 1).Blocks()))
			}
		}
		return trace
	}
	plain, forked := run(false), run(true)
	for i := range plain {
		if plain[i] != forked[i] {
			t.Fatalf("after copies\n%s\nwithout\n%s", forked[i], plain[i])
		}
	}
}

// The pages are as many as the plans say, in all kinds of blocks, and what is held is never more than that.
func TestBlocksAreThosePredicted(t *testing.T) {
	m := tinyModel(t)
	plans := cachePolicies(t, &m.Config)
	const prompt, more = 30, 12
	tokens := enginetest.Tokens(m.Config, prompt+more, 4)
	for i := range plans {
		e := cacheEvaluator(t, m, plans[i:]...)
		c, err := e.prefill(&datasets.Sample{}, tokens[:prompt], more)
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range tokens[prompt:] {
			if err := c.step(e, same(id, len(e.entries)), nil); err != nil {
				t.Fatal(err)
			}
		}
		pages := 0
		for g, pool := range c.pools {
			if pool.Peak() > pool.Size() || pool.Size() == 0 {
				t.Errorf("plans from %d, blocks of a %s: %d of %d", i, g, pool.Peak(), pool.Size())
			}
			per := 1
			if g == plan.PerLayer {
				per = m.Config.KVHeads
			}
			pages += per * pool.Size()
			held := int64(0)
			for _, q := range c.sequences {
				if q.Plan.Cache.Granularity == g {
					held += q.cache.Usage().Blocks
				}
			}
			if held != int64(pool.InUse()) {
				t.Errorf("plans from %d, blocks of a %s: %d in use, the caches hold %d", i, g, pool.InUse(), held)
			}
		}
		if got := c.pages.Keys.Rows(); got != pages*4 {
			t.Errorf("plans from %d: %d rows for %d pages", i, got, pages)
		}
		// No page is two heads'.
		owner := map[int32]string{}
		for _, q := range c.sequences {
			for l, row := range q.Plan.Layers {
				for k := range row {
					for b, page := range q.table(q.cache.Head(l, k), k) {
						me := fmt.Sprint(q.Name, l, k, b)
						if page >= 0 && (owner[page] != "" || int(page) >= pages) {
							t.Errorf("plans from %d: page %d of %d is %s and %s", i, page, pages, owner[page], me)
						}
						if page >= 0 {
							owner[page] = me
						}
					}
				}
			}
		}
		c.free()
	}
}

// A cache that holds other bytes than its plan says is an error that says whose and where, whether it holds more or less.
func TestBytesError(t *testing.T) {
	m := tinyModel(t)
	streaming := func(recent int) *plan.Plan {
		return cachePlan(t, &m.Config, plan.Streaming{RecentTokens: recent, Evict: plan.EvictPrefillEnd, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}, nil)
	}
	tokens := enginetest.Tokens(m.Config, 30, 4)
	for _, said := range []int{4, 12} {
		e := cacheEvaluator(t, m, FullPlan(streaming(8)), streaming(8))
		c, err := e.prefill(&datasets.Sample{Task: "needles", ID: 7}, tokens, 5)
		if err != nil {
			t.Fatal(err)
		}
		tampered := *c.sequences[1].entry
		tampered.Plan = streaming(said)
		c.sequences[1].entry = &tampered
		err = c.step(e, same(3, 2), nil)
		var bytes *BytesError
		block := int64(4 * 2 * m.Config.HeadDim * 2 * m.Config.Layers * m.Config.KVHeads)
		if !errors.As(err, &bytes) || *bytes != (BytesError{"plan 1", "needles", 7, 2 * block, int64(said/4) * block}) {
			t.Errorf("%v", err)
		}
		for _, part := range []string{"plan 1", "needles sample 7", fmt.Sprint(2 * block), fmt.Sprint(int64(said/4) * block)} {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%v does not say %q", err, part)
			}
		}
		c.free()
	}
}
