package plan

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

func mustCache(t testing.TB, p *Plan, o CacheOptions) *KVCache {
	t.Helper()
	c, err := p.NewKVCache(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func mustAppend(t testing.TB, h *HeadCache) int {
	t.Helper()
	slot, err := h.Append()
	if err != nil {
		t.Fatal(err)
	}
	return slot
}

// A static policy's head has what Plan.Keep, Slot and RotaryPosition say, at every length, whether the prompt came at once
// or token by token.
func TestHeadCacheAgreesWithPlan(t *testing.T) {
	r := rand.New(rand.NewPCG(21, 22))
	for range 400 {
		var q Policy = Full{}
		if r.IntN(4) > 0 {
			s := streaming(r.IntN(3)*r.IntN(20), 1+r.IntN(40))
			s.Positions = []Positions{PositionsOriginal, PositionsCacheSlot}[r.IntN(2)]
			q = s
		}
		p := one(q, 1+r.IntN(20), r.IntN(2)*(1+r.IntN(80)))
		h := mustCache(t, p, CacheOptions{}).Head(0, 0)
		prompt := r.IntN(2) * r.IntN(100)
		if prompt > 0 {
			if err := h.Prefill(prompt, Attention{}); err != nil {
				t.Fatal(err)
			}
		}
		for n := prompt; n < prompt+120; n++ {
			if n > prompt {
				slot := mustAppend(t, h)
				if want, err := p.Slot(0, 0, n-1); err != nil || slot != want {
					t.Fatalf("%+v, window %d, prompt %d: position %d has slot %d, want %d (%v)", q, p.Model.Window(0), prompt, n-1, slot, want, err)
				}
			}
			kept, err := p.Keep(0, 0, n)
			if err != nil {
				t.Fatal(err)
			}
			count := 0
			for _, in := range kept {
				for i := in.From; i < in.To; i++ {
					slot, err := p.Slot(0, 0, i)
					if err != nil || int(h.Positions()[slot]) != i {
						t.Fatalf("%+v, window %d, prompt %d, %d tokens: slot %d has position %d, want %d (%v)", q, p.Model.Window(0), prompt, n, slot, h.Positions()[slot], i, err)
					}
					at, err := p.RotaryPosition(0, 0, n, i)
					if err != nil {
						t.Fatal(err)
					}
					if ranks := h.Rotary(); ranks != nil && int(ranks[slot]) != at || ranks == nil && at != i {
						t.Fatalf("%+v: position %d of %d is rotated to %v, want %d", q, i, n, ranks, at)
					}
					if i == n-1 && h.QueryPosition() != at {
						t.Fatalf("%+v: the query of %d tokens is rotated to %d, want %d", q, n, h.QueryPosition(), at)
					}
					count++
				}
			}
			if h.Len() != count {
				t.Fatalf("%+v: %d of %d tokens, want %d", q, h.Len(), n, count)
			}
		}
	}
}

// contentPlan has one KV head, shared by two query heads.
func contentPlan(q Policy, block, window int) *Plan {
	p := one(q, block, window)
	p.Model.NHeads = 2
	return p
}

func rows(n int) [][]float32 { return [][]float32{make([]float32, n), make([]float32, n)} }

func TestKVCacheWrongUse(t *testing.T) {
	h2o := H2O{SinkTokens: 1, HeavyTokens: 2, RecentTokens: 2, Evict: EvictPrefillEnd, Decode: DecodeRolling, Positions: PositionsOriginal}
	always := h2o
	always.Evict = EvictAlways
	topk := TopK{BudgetTokens: 4, ObservationWindow: 2, Pool: Pool{PoolNone, 1}, Aggregate: AggregateMean, Evict: EvictPrefillEnd, Decode: DecodeStatic, Positions: PositionsOriginal}
	fastgen := FastGen{Classes: []Class{ClassSpecial}, FrequentRatio: .5, MaxTokens: 3, Overflow: Refuse, Evict: EvictPrefillEnd, Decode: DecodeRolling, Positions: PositionsOriginal}
	prefill := func(n int, a Attention) func(h *HeadCache) error {
		return func(h *HeadCache) error { return h.Prefill(n, a) }
	}
	end := func(a Attention) func(h *HeadCache) error {
		return func(h *HeadCache) error { _, err := h.EndPrompt(a); return err }
	}
	appendTo := func(h *HeadCache) error { _, err := h.Append(); return err }
	observe := func(rows [][]float32) func(h *HeadCache) error {
		return func(h *HeadCache) error { h.Observe(rows); return nil }
	}
	for name, c := range map[string]struct {
		policy Policy
		pinned []int
		calls  []func(h *HeadCache) error // the last one fails
		want   error
	}{
		"prefill of nothing":         {Full{}, nil, []func(h *HeadCache) error{prefill(0, Attention{})}, ErrArgument},
		"prefill of too much":        {Full{}, nil, []func(h *HeadCache) error{prefill(maxTokens+1, Attention{})}, ErrArgument},
		"prefill twice":              {Full{}, nil, []func(h *HeadCache) error{prefill(1, Attention{}), prefill(1, Attention{})}, ErrState},
		"prefill behind a token":     {Full{}, nil, []func(h *HeadCache) error{appendTo, prefill(1, Attention{})}, ErrState},
		"pinned behind the prompt":   {topk, []int{7}, []func(h *HeadCache) error{prefill(7, Attention{Window: rows(7)})}, ErrArgument},
		"pinned behind the end":      {topk, []int{2}, []func(h *HeadCache) error{appendTo, appendTo, end(Attention{})}, ErrArgument},
		"end of nothing":             {topk, nil, []func(h *HeadCache) error{end(Attention{})}, ErrState},
		"end twice":                  {topk, nil, []func(h *HeadCache) error{appendTo, end(Attention{}), end(Attention{})}, ErrState},
		"end after prefill":          {topk, nil, []func(h *HeadCache) error{prefill(1, Attention{}), end(Attention{})}, ErrState},
		"no votes":                   {topk, nil, []func(h *HeadCache) error{prefill(9, Attention{})}, ErrAttention},
		"votes of one query head":    {topk, nil, []func(h *HeadCache) error{prefill(9, Attention{Window: rows(9)[:1]})}, ErrAttention},
		"votes of too few positions": {topk, nil, []func(h *HeadCache) error{prefill(9, Attention{Window: rows(6)})}, ErrAttention},
		"votes in place of sums":     {h2o, nil, []func(h *HeadCache) error{prefill(9, Attention{Window: rows(9)})}, ErrAttention},
		"sums of too few positions":  {h2o, nil, []func(h *HeadCache) error{prefill(9, Attention{Total: rows(8)})}, ErrAttention},
		"h2o from the start":         {always, nil, []func(h *HeadCache) error{prefill(9, Attention{Total: rows(9)})}, ErrState},
		"not observed":               {h2o, nil, []func(h *HeadCache) error{prefill(5, Attention{Total: rows(5)}), appendTo, appendTo}, ErrAttention},
		"observed too little": {h2o, nil, []func(h *HeadCache) error{prefill(5, Attention{Total: rows(5)}), appendTo, observe(rows(4)),
			appendTo}, ErrAttention},
		"observed one query head": {h2o, nil, []func(h *HeadCache) error{prefill(5, Attention{Total: rows(5)}), appendTo, observe(rows(16)[:1]),
			appendTo}, ErrAttention},
		"nothing observed at the end": {h2o, nil, []func(h *HeadCache) error{appendTo, appendTo, end(Attention{})}, ErrAttention},
		"refused":                     {fastgen, nil, []func(h *HeadCache) error{prefill(9, Attention{Total: rows(9)})}, ErrOverflow},
		"refused later":               {fastgen, nil, []func(h *HeadCache) error{prefill(6, Attention{Total: rows(6)}), appendTo}, ErrOverflow},
		"released": {Full{}, nil, []func(h *HeadCache) error{prefill(6, Attention{}), func(h *HeadCache) error { h.cache.Release(); return nil },
			appendTo}, ErrState},
	} {
		p := contentPlan(c.policy, 4, 0)
		p.Pins = []Pin{{Pattern: "x", MaxTokens: 3, Overflow: DropOldest}}
		cache := mustCache(t, p, CacheOptions{Pinned: c.pinned})
		h := cache.Head(0, 0)
		for i, call := range c.calls {
			before, u := slices.Clone(h.Positions()), cache.Usage()
			err := call(h)
			switch {
			case i < len(c.calls)-1 && err != nil:
				t.Errorf("%s: call %d: %v", name, i, err)
			case i < len(c.calls)-1:
			case !errors.Is(err, c.want):
				t.Errorf("%s: %v, want %v", name, err, c.want)
			case !slices.Equal(before, h.Positions()) || u != cache.Usage():
				t.Errorf("%s: the failed call changed %v to %v, %+v to %+v", name, before, h.Positions(), u, cache.Usage())
			}
		}
	}
	p := contentPlan(Full{}, 4, 0)
	for name, o := range map[string]CacheOptions{"not rising": {Pinned: []int{3, 3}}, "negative": {Pinned: []int{-1}}, "without pins": {Pinned: []int{1}}} {
		if _, err := p.NewKVCache(o); !errors.Is(err, ErrArgument) {
			t.Errorf("pinned positions %s: %v", name, err)
		}
	}
	p.Layers[0][0] = "other"
	if _, err := p.NewKVCache(CacheOptions{}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a plan without the policy that it names: %v", err)
	}
	if _, err := (&Plan{}).NewKVCache(CacheOptions{}); !errors.Is(err, ErrInvalid) {
		t.Errorf("an empty plan: %v", err)
	}
}

// A head that there is not has nothing and does nothing.
func TestNoSuchHead(t *testing.T) {
	c := mustCache(t, one(Full{}, 4, 0), CacheOptions{})
	for _, at := range [][2]int{{-1, 0}, {1, 0}, {0, -1}, {0, 1}} {
		h := c.Head(at[0], at[1])
		if h != nil {
			t.Fatalf("there is a head %v", at)
		}
		_, err := h.Append()
		_, end := h.EndPrompt(Attention{})
		if prefill := h.Prefill(1, Attention{}); !errors.Is(err, ErrState) || !errors.Is(end, ErrState) || !errors.Is(prefill, ErrState) {
			t.Errorf("%v, %v, %v", err, end, prefill)
		}
		h.Observe(nil)
		if h.Len() != 0 || h.Tokens() != 0 || h.Positions() != nil || h.Spans() != nil || h.Blocks() != nil || h.Rotary() != nil || h.QueryPosition() != -1 {
			t.Error("it has something")
		}
	}
}

// When a pool has no blocks left nothing changes, and the call works once another sequence has gone.
func TestPoolRunsOut(t *testing.T) {
	q := TopK{BudgetTokens: 6, ObservationWindow: 2, Pool: Pool{PoolNone, 1}, Aggregate: AggregateMean, Evict: EvictPrefillEnd, Decode: DecodeRolling, Positions: PositionsOriginal}
	for _, scattered := range []bool{false, true} {
		pool := NewBlockPool(5)
		other := mustCache(t, one(Full{}, 4, 0), CacheOptions{Pool: pool})
		if err := other.Head(0, 0).Prefill(9, Attention{}); err != nil { // 3 of 5 blocks
			t.Fatal(err)
		}
		c := mustCache(t, contentPlan(q, 4, 0), CacheOptions{Pool: pool, Scattered: scattered})
		h := c.Head(0, 0)
		for range 8 {
			mustAppend(t, h)
		}
		before := slices.Clone(h.Positions())
		slot, err := h.Append()
		if !errors.Is(err, ErrNoBlocks) || slot != 0 || h.Tokens() != 8 || !slices.Equal(h.Positions(), before) || pool.InUse() != 5 {
			t.Fatalf("slot %d, %v, %d tokens, %d blocks", slot, err, h.Tokens(), pool.InUse())
		}
		other.Release()
		if slot := mustAppend(t, h); slot != 8 || pool.InUse() != 3 || pool.Peak() != 5 || pool.Size() != 5 {
			t.Fatalf("slot %d, %d blocks, peak %d of %d", slot, pool.InUse(), pool.Peak(), pool.Size())
		}
		if _, err := h.EndPrompt(Attention{Window: rows(9)}); err != nil {
			t.Fatal(err)
		}
		again := mustCache(t, contentPlan(q, 4, 0), CacheOptions{Pool: NewBlockPool(1), Scattered: scattered}).Head(0, 0)
		if err := again.Prefill(9, Attention{Window: rows(9)}); !errors.Is(err, ErrNoBlocks) || again.Len() != 0 || again.Tokens() != 0 || again.Blocks() != nil && len(again.Blocks()) > 0 {
			t.Fatalf("prefill: %v, %d tokens, blocks %v", err, again.Len(), again.Blocks())
		}
	}
	// Layout in two regions needs a block more than the prompt, which had one.
	pool := NewBlockPool(1)
	h := mustCache(t, one(Streaming{SinkTokens: 1, RecentTokens: 2, Evict: EvictPrefillEnd, Decode: DecodeRolling, Positions: PositionsOriginal}, 4, 0), CacheOptions{Pool: pool}).Head(0, 0)
	for range 4 {
		mustAppend(t, h)
	}
	if _, err := h.EndPrompt(Attention{}); !errors.Is(err, ErrNoBlocks) || h.Len() != 4 || pool.InUse() != 1 {
		t.Fatalf("%v, %d tokens, %d blocks", err, h.Len(), pool.InUse())
	}
}

// Many sequences share a pool: no block is with two of them.
func TestPoolOfManySequences(t *testing.T) {
	pool := NewBlockPool(0)
	p := one(streaming(4, 20), 8, 0)
	caches := make([]*KVCache, 16)
	var wg sync.WaitGroup
	for i := range caches {
		caches[i] = mustCache(t, p, CacheOptions{Pool: pool})
		wg.Go(func() {
			for range 3*i + 1 {
				if _, err := caches[i].Head(0, 0).Append(); err != nil {
					t.Error(err)
				}
			}
			if i%4 == 0 {
				caches[i].Release()
			}
		})
	}
	wg.Wait()
	seen := map[int32]bool{}
	for _, c := range caches {
		for _, id := range c.Head(0, 0).Blocks() {
			if seen[id] || id < 0 {
				t.Errorf("block %d is with two sequences or none", id)
			}
			seen[id] = true
		}
	}
	if len(seen) != pool.InUse() || pool.Peak() < pool.InUse() {
		t.Errorf("%d blocks in the tables, %d in use, at most %d", len(seen), pool.InUse(), pool.Peak())
	}
}

// A block of a layer stays until no KV head has anything in it.
func TestBlocksOfALayer(t *testing.T) {
	q := TopK{BudgetTokens: 3, ObservationWindow: 1, Pool: Pool{PoolNone, 1}, Aggregate: AggregateMean, Evict: EvictPrefillEnd, Decode: DecodeStatic, Positions: PositionsOriginal}
	p := one(q, 4, 0)
	p.Cache.Granularity = PerLayer
	p.Model.NHeads, p.Model.NKVHeads, p.Layers = 2, 2, [][]string{{"it", "it"}}
	c := mustCache(t, p, CacheOptions{Scattered: true})
	for k, best := range []int{1, 9} { // in the first and the third block
		votes := make([]float32, 16)
		votes[best], votes[best+1] = 1, 1
		if err := c.Head(0, k).Prefill(16, Attention{Window: [][]float32{votes}}); err != nil {
			t.Fatal(err)
		}
	}
	blocks := c.Head(0, 0).Blocks()
	if len(blocks) != 4 || blocks[0] < 0 || blocks[1] >= 0 || blocks[2] < 0 || blocks[3] < 0 {
		t.Fatalf("blocks %v, want all but the second", blocks)
	}
	if u := c.Usage(); u.Blocks != 3 || u.Bytes != 3*2*p.blockBytes("") || u.Tokens != 6 || u.FullBytes != 4*2*p.blockBytes("") {
		t.Errorf("usage %+v", u)
	}
	// New tokens go where there is room: 13 slots to the second's 1 and 2, then a block anew.
	var slots []int
	for range 11 {
		slots = append(slots, mustAppend(t, c.Head(0, 0)))
	}
	if want := []int{0, 3, 8, 9, 10, 11, 12, 13, 14, 4, 5}; !slices.Equal(slots, want) {
		t.Errorf("tokens go to %v, want %v", slots, want)
	}
	if slot := mustAppend(t, c.Head(0, 1)); slot != 0 {
		t.Errorf("the other head's token goes to %d, want 0", slot)
	}
}

// A rolling policy holds the same blocks for ever, and a step allocates nothing.
func TestAppendAllocatesNothing(t *testing.T) {
	for name, q := range map[string]Policy{
		"streaming": streaming(4, 60),
		"reindexed": Streaming{SinkTokens: 4, RecentTokens: 60, Evict: EvictAlways, Decode: DecodeRolling, Positions: PositionsCacheSlot},
		"window":    Full{},
		"topk": TopK{BudgetTokens: 64, ObservationWindow: 16, Pool: Pool{PoolNone, 1}, Aggregate: AggregateMean, Evict: EvictPrefillEnd, Decode: DecodeRolling,
			Positions: PositionsOriginal},
		"h2o": H2O{SinkTokens: 4, HeavyTokens: 30, RecentTokens: 30, Evict: EvictPrefillEnd, Decode: DecodeRolling, Positions: PositionsOriginal},
		"fastgen": FastGen{Classes: []Class{ClassSpecial}, FrequentRatio: .1, LocalRatio: .1, MaxTokens: 32, Overflow: DropLowest, Evict: EvictPrefillEnd, Decode: DecodeRolling,
			Positions: PositionsOriginal},
	} {
		window := 0
		if name == "window" {
			window = 64
		}
		c := mustCache(t, contentPlan(q, 16, window), CacheOptions{})
		h := c.Head(0, 0)
		if err := h.Prefill(1000, Attention{Window: rows(1000), Total: rows(1000)}); err != nil {
			t.Fatal(err)
		}
		attention := rows(1000)
		for range 200 {
			mustAppend(t, h)
			h.Observe(attention)
		}
		before, blocks := c.Telemetry(), slices.Clone(h.Blocks())
		got := testing.AllocsPerRun(300, func() {
			mustAppend(t, h)
			h.Observe(attention)
			if len(h.Spans()) == 0 || h.Rotary() != nil && len(h.Rotary()) == 0 {
				t.Error("nothing held")
			}
		})
		if got != 0 {
			t.Errorf("%s: %v allocations a step", name, got)
		}
		after := c.Telemetry()
		if !slices.Equal(blocks, h.Blocks()) || after.BlocksTaken != before.BlocksTaken || after.BlocksFreed != before.BlocksFreed {
			t.Errorf("%s: blocks %v, were %v", name, h.Blocks(), blocks)
		}
		if after.Busy <= before.Busy && (name == "h2o" || name == "fastgen") {
			t.Errorf("%s: no time was spent", name)
		}
	}
}

// The policies of one token are forgotten: a token that h2o evicted has no score when its slot is another's.
func TestScoresAreForgotten(t *testing.T) {
	h := mustCache(t, one(H2O{HeavyTokens: 1, RecentTokens: 1, Evict: EvictAlways, Decode: DecodeRolling, Positions: PositionsOriginal}, 4, 0), CacheOptions{}).Head(0, 0)
	give := func(byPosition map[int32]float32) {
		row := make([]float32, len(h.Positions()))
		for s, p := range h.Positions() {
			if p >= 0 {
				row[s] = byPosition[p]
			}
		}
		h.Observe([][]float32{row})
	}
	held := func() []int32 {
		var all []int32
		for _, p := range h.Positions() {
			if p >= 0 {
				all = append(all, p)
			}
		}
		slices.Sort(all)
		return all
	}
	mustAppend(t, h)
	give(map[int32]float32{0: 1})
	mustAppend(t, h)
	give(map[int32]float32{0: .25, 1: .75}) // 1.25 and .75
	mustAppend(t, h)                        // 1 leaves
	give(map[int32]float32{0: .125, 2: 3})
	mustAppend(t, h) // 0 with 1.375 leaves 2 with 3, in whose slot there were .75
	if got := held(); !slices.Equal(got, []int32{2, 3}) {
		t.Errorf("held are %v", got)
	}
	give(map[int32]float32{3: 3})
	mustAppend(t, h) // 3 with 3 ties with 2, the lower position
	if got := held(); !slices.Equal(got, []int32{2, 4}) {
		t.Errorf("held are %v", got)
	}
	give(map[int32]float32{4: 2.5})
	mustAppend(t, h)
	give(map[int32]float32{5: 2})
	mustAppend(t, h)
	if got := held(); !slices.Equal(got, []int32{2, 6}) {
		t.Errorf("held are %v", got)
	}
}

// Any calls in any order: no panic, failed calls change nothing, and the books agree.
func FuzzKVCache(f *testing.F) {
	f.Add(uint64(1), []byte{0, 60, 1, 1, 3, 1, 1, 2})
	f.Add(uint64(2), []byte{1, 1, 1, 1, 3, 1, 3, 1, 2, 1, 1, 1, 4, 1})
	f.Add(uint64(3), []byte{0, 200, 3, 1, 3, 1, 3, 1, 5, 1})
	f.Fuzz(func(t *testing.T, seed uint64, calls []byte) {
		r := rand.New(rand.NewPCG(seed, 23))
		w := newWorld(r)
		pool := NewBlockPool(r.IntN(40))
		var pins []int
		if len(w.plan.Pins) > 0 {
			pins = []int{0}
		}
		c, err := w.plan.NewKVCache(CacheOptions{Pool: pool, Pinned: pins, Classes: w.classes, Scattered: w.scattered})
		if err != nil {
			t.Fatal(err)
		}
		released := false
		for i := 0; i < len(calls) && i < 400; i++ {
			h := c.Head(r.IntN(w.plan.Model.NLayers), r.IntN(w.plan.Model.NKVHeads))
			n := r.IntN(150)
			var a Attention
			if r.IntN(4) > 0 {
				a = Attention{Window: attentionOf(r, 1+r.IntN(4), n), Total: attentionOf(r, h.group, 150)}
			}
			if r.IntN(4) > 0 {
				a.Window = attentionOf(r, h.group, 150)
			}
			before, used := slices.Clone(h.Positions()), c.Usage()
			var err error
			switch calls[i] % 6 {
			case 0:
				err = h.Prefill(n, a)
			case 1:
				var slot int
				if slot, err = h.Append(); err == nil && int(h.Positions()[slot]) != h.Tokens()-1 {
					t.Fatalf("slot %d: %v", slot, h.Positions())
				}
			case 2:
				_, err = h.EndPrompt(a)
			case 3:
				h.Observe(a.Window)
			case 4:
				c.AppendClasses(ClassSpecial)
			case 5:
				if calls[i] == 5 {
					c.Release()
					released = true
				}
			}
			if err != nil {
				if !slices.Equal(before, h.Positions()) || used != c.Usage() {
					t.Fatalf("%v, but %v became %v, %+v %+v", err, before, h.Positions(), used, c.Usage())
				}
				if !slices.ContainsFunc([]error{ErrState, ErrArgument, ErrAttention, ErrNoBlocks, ErrOverflow}, func(e error) bool { return errors.Is(err, e) }) {
					t.Fatal(err)
				}
			}
			u, telemetry := c.Usage(), c.Telemetry()
			if u.Blocks != int64(pool.InUse()) || !released && u.Tokens != telemetry.Appended-telemetry.Evicted || released && u != (CacheUsage{FullBytes: u.FullBytes}) {
				t.Fatalf("usage %+v, telemetry %+v, %d blocks in the pool", u, telemetry, pool.InUse())
			}
			covered := 0
			for _, in := range h.Spans() {
				covered += in.Len()
			}
			if covered != h.Len() {
				t.Fatalf("spans %v of %d tokens", h.Spans(), h.Len())
			}
			for s, p := range h.Positions() {
				if p >= 0 && h.Blocks()[s/w.plan.Cache.BlockSize] < 0 {
					t.Fatalf("slot %d lies in no block", s)
				}
			}
			if h.window > 0 && h.Len() > h.window {
				t.Fatalf("%d tokens in a window of %d", h.Len(), h.window)
			}
		}
	})
}

func BenchmarkAppend(b *testing.B) {
	for name, q := range map[string]Policy{
		"full":      Full{},
		"streaming": streaming(64, 256),
		"topk-static": TopK{BudgetTokens: 512, ObservationWindow: 32, Pool: Pool{PoolNone, 1}, Aggregate: AggregateMean, Evict: EvictPrefillEnd, Decode: DecodeStatic,
			Positions: PositionsOriginal},
		"topk-rolling": TopK{BudgetTokens: 512, ObservationWindow: 32, Pool: Pool{PoolNone, 1}, Aggregate: AggregateMean, Evict: EvictPrefillEnd, Decode: DecodeRolling,
			Positions: PositionsOriginal},
		"h2o": H2O{SinkTokens: 4, HeavyTokens: 254, RecentTokens: 254, Evict: EvictPrefillEnd, Decode: DecodeRolling, Positions: PositionsOriginal},
	} {
		b.Run(name, func(b *testing.B) {
			p := contentPlan(q, 16, 0)
			attention := rows(1 << 13)
			var h *HeadCache
			b.ReportAllocs()
			for i := range b.N {
				if i%(1<<20) == 0 { // what a static policy keeps would grow without end
					b.StopTimer()
					h = mustCache(b, p, CacheOptions{}).Head(0, 0)
					if err := h.Prefill(4096, Attention{Window: rows(4096), Total: rows(4096)}); err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
				}
				if _, err := h.Append(); err != nil {
					b.Fatal(err)
				}
				if q.Kind() == KindH2O {
					h.Observe(attention)
				}
			}
		})
	}
}

func BenchmarkPrefill(b *testing.B) {
	const n = 32768
	r := rand.New(rand.NewPCG(24, 25))
	a := Attention{Window: make([][]float32, 2), Total: make([][]float32, 2)}
	for h := range 2 {
		for range n {
			a.Window[h] = append(a.Window[h], float32(r.ExpFloat64()))
			a.Total[h] = append(a.Total[h], float32(r.ExpFloat64()))
		}
	}
	for _, q := range []Policy{Full{}, streaming(64, 256),
		TopK{BudgetRatio: .25, ObservationWindow: 32, Pool: Pool{PoolMax, 7}, Aggregate: AggregateMean, Evict: EvictPrefillEnd, Decode: DecodeStatic, Positions: PositionsOriginal},
		TopK{BudgetRatio: .25, ObservationWindow: 32, Pool: Pool{PoolAvg, 7}, Aggregate: AggregateUnion, Evict: EvictPrefillEnd, Decode: DecodeStatic, Positions: PositionsOriginal},
		FastGen{Classes: []Class{ClassSpecial}, FrequentRatio: .3, LocalRatio: .1, Evict: EvictPrefillEnd, Decode: DecodeStatic, Positions: PositionsOriginal},
		H2O{SinkTokens: 4, HeavyTokens: 4096, RecentTokens: 4096, Evict: EvictPrefillEnd, Decode: DecodeRolling, Positions: PositionsOriginal}} {
		name := fmt.Sprint(q.Kind())
		if k, ok := q.(TopK); ok {
			name += "-" + string(k.Aggregate)
		}
		b.Run(name, func(b *testing.B) {
			p := contentPlan(q, 16, 0)
			for b.Loop() {
				if err := mustCache(b, p, CacheOptions{}).Head(0, 0).Prefill(n, a); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
