package plan

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// one is a plan of one layer and one KV head with the policy.
func one(q Policy, block, window int) *Plan {
	p := sample()
	p.Model.NLayers, p.Model.NHeads, p.Model.NKVHeads, p.Model.HeadDim = 1, 1, 1, 2
	p.Model.SlidingWindow = []int{window}
	p.Cache.BlockSize = block
	p.Policies, p.Layers, p.Pins = map[string]Policy{"it": q}, [][]string{{"it"}}, nil
	return p
}

func streaming(sinks, recent int) Streaming {
	return Streaming{SinkTokens: sinks, RecentTokens: recent, Evict: EvictAlways, Decode: DecodeRolling, Positions: PositionsOriginal}
}

func TestKeep(t *testing.T) {
	for _, c := range []struct {
		policy    Policy
		window, n int
		want      []Interval
	}{
		{Full{}, 0, 0, nil},
		{Full{}, 0, -1, nil},
		{Full{}, 0, 100, []Interval{{0, 100}}},
		{Full{}, 40, 40, []Interval{{0, 40}}},
		{Full{}, 40, 100, []Interval{{60, 100}}},
		{streaming(4, 8), 0, 3, []Interval{{0, 3}}},
		{streaming(4, 8), 0, 12, []Interval{{0, 12}}},
		{streaming(4, 8), 0, 13, []Interval{{0, 4}, {5, 13}}},
		{streaming(0, 8), 0, 13, []Interval{{5, 13}}},
		{streaming(4, 8), 13, 100, []Interval{{0, 4}, {92, 100}}},
		{streaming(4, 8), 12, 100, []Interval{{88, 100}}},
		{streaming(4, 8), 6, 100, []Interval{{94, 100}}},
	} {
		got, err := one(c.policy, 16, c.window).Keep(0, 0, c.n)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%+v, window %d, %d tokens: %v (%v), want %v", c.policy, c.window, c.n, got, err, c.want)
		}
	}
}

func TestQuestionsWithoutAnAnswer(t *testing.T) {
	p := sample()
	for _, h := range [][2]int{{1, 1}, {2, 0}, {2, 2}} {
		if _, err := p.Keep(h[0], h[1], 100); !errors.Is(err, ErrContent) {
			t.Errorf("Keep of layer %d, KV head %d: %v", h[0], h[1], err)
		}
		if _, err := p.Slot(h[0], h[1], 100); !errors.Is(err, ErrContent) {
			t.Errorf("Slot of layer %d, KV head %d: %v", h[0], h[1], err)
		}
	}
	for _, h := range [][2]int{{-1, 0}, {4, 0}, {0, -1}, {0, 3}} {
		if _, err := p.PolicyOf(h[0], h[1]); err == nil {
			t.Errorf("there is a layer %d, KV head %d", h[0], h[1])
		}
		if _, err := p.HeadUsage(h[0], h[1], Request{PromptTokens: 1}); err == nil {
			t.Errorf("there is a layer %d, KV head %d", h[0], h[1])
		}
	}
	if _, err := p.Slot(0, 0, -1); err == nil {
		t.Error("a negative position has a slot")
	}
	if _, err := p.RotaryPosition(0, 1, 1000, 500); err == nil {
		t.Error("an evicted position has a rotary position")
	}
}

// The kept positions of a static policy: their number is what is counted, their slots are all different, lie in the
// blocks that are counted, and do not move while more tokens come.
func TestStaticPolicies(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		var q Policy = Full{}
		if r.IntN(4) > 0 {
			q = streaming(r.IntN(40), 1+r.IntN(60))
		}
		window := r.IntN(2) * (1 + r.IntN(120))
		p := one(q, 1+r.IntN(20), window)
		where := map[int]int{} // position to slot
		before := Kept{}
		for n := 1; n < 200; n++ {
			name := fmt.Sprintf("%+v, block %d, window %d, %d tokens", q, p.Cache.BlockSize, window, n)
			kept := p.Cache.Kept(q, At{PromptTokens: n, Window: window})
			intervals, err := p.Keep(0, 0, n)
			if err != nil {
				t.Fatal(err)
			}
			slots := map[int]bool{}
			rank, last := 0, -1
			for _, in := range intervals {
				if in.From <= last || in.To <= in.From {
					t.Fatalf("%s: intervals %v", name, intervals)
				}
				last = in.To
				for i := in.From; i < in.To; i++ {
					s, err := p.Slot(0, 0, i)
					if err != nil || s < 0 || slots[s] {
						t.Fatalf("%s: position %d has slot %d, which is taken or none (%v)", name, i, s, err)
					}
					if old, ok := where[i]; ok && old != s {
						t.Fatalf("%s: position %d moved from slot %d to %d", name, i, old, s)
					}
					where[i], slots[s] = s, true
					if at, err := p.RotaryPosition(0, 0, n, i); err != nil || at != i {
						t.Fatalf("%s: position %d is rotated to %d (%v)", name, i, at, err)
					}
					rank++
				}
			}
			if rank != kept.Tokens || len(slots) != kept.Tokens {
				t.Fatalf("%s: %d positions, %d slots, %d counted", name, rank, len(slots), kept.Tokens)
			}
			blocks := map[int]bool{}
			for s := range slots {
				blocks[s/p.Cache.BlockSize] = true
			}
			if len(blocks) != kept.Blocks {
				t.Fatalf("%s: slots lie in %d blocks, %d counted", name, len(blocks), kept.Blocks)
			}
			if kept.Tokens < before.Tokens || kept.Blocks < before.Blocks || kept.WorstCase {
				t.Fatalf("%s: %+v after %+v", name, kept, before)
			}
			before = kept
		}
	}
}

func TestCacheSlotPositions(t *testing.T) {
	q := streaming(4, 8)
	q.Positions = PositionsCacheSlot
	p := one(q, 16, 0)
	for position, want := range map[int]int{0: 0, 3: 3, 92: 4, 99: 11} {
		if got, err := p.RotaryPosition(0, 0, 100, position); err != nil || got != want {
			t.Errorf("position %d is rotated to %d (%v), want %d", position, got, err, want)
		}
	}
}

// simulate runs a policy token by token on random attention, as the methods' papers describe it, and returns the number
// of tokens kept in the end.
func simulate(r *rand.Rand, q Policy, prompt, generated int) int {
	n := prompt + generated
	score := make([]float64, n)
	class := make([]bool, n)
	for i := range score {
		score[i] = r.Float64()
		class[i] = r.IntN(10) == 0
	}
	// best returns the positions of from with the highest scores, at most count.
	best := func(from []int, count int) []int {
		from = slices.Clone(from)
		slices.SortStableFunc(from, func(a, b int) int {
			if score[a] > score[b] {
				return -1
			} else if score[a] < score[b] {
				return 1
			}
			return a - b
		})
		return from[:min(max(count, 0), len(from))]
	}
	upTo := func(n int) []int {
		all := make([]int, n)
		for i := range all {
			all[i] = i
		}
		return all
	}
	switch q := q.(type) {
	case Full:
		return n
	case Streaming:
		var kept []int
		for i := range n {
			kept = append(kept, i)
			kept = slices.DeleteFunc(kept, func(k int) bool { return k >= q.SinkTokens && i-k >= q.RecentTokens })
		}
		return len(kept)
	case TopK:
		budget := q.BudgetTokens
		if q.BudgetRatio > 0 {
			budget = max(int(math.Ceil(q.BudgetRatio*float64(prompt))), q.SinkTokens+q.ObservationWindow+1)
		}
		kept := upTo(prompt)
		if prompt > budget {
			always := func(k int) bool { return k < q.SinkTokens || k >= prompt-q.ObservationWindow }
			var rest []int
			kept = nil
			for k := range prompt {
				if always(k) {
					kept = append(kept, k)
				} else {
					rest = append(rest, k)
				}
			}
			kept = append(kept, best(rest, budget-len(kept))...)
		}
		for i := prompt; i < n; i++ {
			kept = append(kept, i)
			if q.Decode == DecodeRolling && len(kept) > budget {
				// The oldest of the window's ring leaves: behind what was selected.
				kept = slices.Delete(kept, budget-q.ObservationWindow, budget-q.ObservationWindow+1)
			}
		}
		return len(kept)
	case FastGen:
		apply := func(n int) int {
			keep := map[int]bool{}
			var rest []int
			for k := range n {
				if class[k] {
					keep[k] = true
				} else {
					rest = append(rest, k)
				}
			}
			for _, k := range best(rest, int(math.Ceil(q.FrequentRatio*float64(n)))) {
				keep[k] = true
			}
			for k := range n {
				if float64(n-1-k) < q.LocalRatio*float64(n) {
					keep[k] = true
				}
			}
			size := len(keep)
			if q.MaxTokens > 0 {
				size = min(size, q.MaxTokens)
			}
			if q.MaxRatio > 0 {
				size = min(size, int(math.Ceil(q.MaxRatio*float64(n))))
			}
			return size
		}
		if q.Decode == DecodeStatic {
			return apply(prompt) + generated
		}
		return apply(n)
	case H2O:
		var kept []int
		for i := range n {
			kept = append(kept, i)
			if len(kept) <= q.SinkTokens+q.HeavyTokens+q.RecentTokens || q.Evict == EvictPrefillEnd && i < prompt-1 {
				continue
			}
			var old []int
			kept = slices.DeleteFunc(kept, func(k int) bool {
				if k < q.SinkTokens || i-k < q.RecentTokens {
					return false
				}
				old = append(old, k)
				return true
			})
			kept = append(kept, best(old, q.HeavyTokens)...)
		}
		return len(kept)
	}
	return -1
}

func randomPolicy(r *rand.Rand) Policy {
	evict := []Evict{EvictAlways, EvictPrefillEnd}[r.IntN(2)]
	decode := []Decode{DecodeStatic, DecodeRolling}[r.IntN(2)]
	switch r.IntN(5) {
	case 0:
		return Full{}
	case 1:
		q := streaming(r.IntN(20), 1+r.IntN(40))
		q.Evict = evict
		return q
	case 2:
		q := TopK{SinkTokens: r.IntN(5), ObservationWindow: 1 + r.IntN(10), Pool: Pool{PoolMax, 5}, Aggregate: AggregateMean, Evict: EvictPrefillEnd,
			Decode: decode, Positions: PositionsOriginal}
		if r.IntN(2) == 0 {
			q.BudgetTokens = q.SinkTokens + q.ObservationWindow + 1 + r.IntN(50)
		} else {
			q.BudgetRatio = float64(1+r.IntN(20)) / 20
		}
		return q
	case 3:
		q := FastGen{Classes: []Class{ClassSpecial}, FrequentRatio: float64(r.IntN(10)) / 10, LocalRatio: float64(r.IntN(10)) / 10, Evict: EvictPrefillEnd,
			Decode: decode, Positions: PositionsOriginal}
		if r.IntN(2) == 0 {
			q.MaxTokens, q.Overflow = 1+r.IntN(100), DropOldest
		}
		if r.IntN(2) == 0 {
			q.MaxRatio, q.Overflow = float64(1+r.IntN(10))/10, DropOldest
		}
		return q
	}
	return H2O{SinkTokens: r.IntN(5), HeavyTokens: 1 + r.IntN(20), RecentTokens: 1 + r.IntN(20), Evict: evict, Decode: DecodeRolling, Positions: PositionsOriginal}
}

func TestCountsAgreeWithSimulation(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	tight := 0
	for range 2000 {
		q := randomPolicy(r)
		at := At{PromptTokens: 1 + r.IntN(150), GeneratedTokens: r.IntN(60)}
		c := Cache{BlockSize: 1 + r.IntN(16)}
		k := c.Kept(q, at)
		n := simulate(r, q, at.PromptTokens, at.GeneratedTokens)
		if n > k.Tokens || n < k.Tokens && !k.WorstCase {
			t.Errorf("%T%+v at %+v: %d tokens in the simulation, %+v counted", q, q, at, n, k)
		}
		if k.WorstCase && n == k.Tokens {
			tight++
		}
		if k.Blocks*c.BlockSize < k.Tokens || k.Blocks > (k.Tokens+c.BlockSize-1)/c.BlockSize+1 {
			t.Errorf("%T%+v at %+v: %+v in blocks of %d", q, q, at, k, c.BlockSize)
		}
	}
	if tight < 50 {
		t.Errorf("a worst case was met %d times: the bound may be too loose", tight)
	}
}

// More tokens never need less, a window or pins never change that, and nothing is above the full cache by more than the
// rounding of its regions.
func TestCountsAreMonotone(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 1000 {
		q := randomPolicy(r)
		c := Cache{BlockSize: 1 + r.IntN(16)}
		at := At{PromptTokens: 1 + r.IntN(150), GeneratedTokens: r.IntN(60), Window: r.IntN(2) * (1 + r.IntN(100)), Pinned: r.IntN(2) * r.IntN(40)}
		k := c.Kept(q, at)
		limit := at.PromptTokens + at.GeneratedTokens
		if at.Window > 0 {
			limit = min(limit, at.Window)
		}
		if k.Tokens < 1 || k.Tokens > limit {
			t.Errorf("%T%+v at %+v: %+v", q, q, at, k)
		}
		for _, more := range []At{{at.PromptTokens + 1, at.GeneratedTokens, at.Window, at.Pinned}, {at.PromptTokens, at.GeneratedTokens + 1, at.Window, at.Pinned}} {
			if m := c.Kept(q, more); m.Tokens < k.Tokens {
				t.Errorf("%T%+v: %+v at %+v, %+v at %+v", q, q, k, at, m, more)
			}
		}
		more := at
		more.Pinned++
		if m := c.Kept(q, more); m.Tokens < k.Tokens || m.Tokens > k.Tokens+1 {
			t.Errorf("%T%+v: %+v at %+v, %+v with one more token pinned", q, q, k, at, m)
		}
	}
}

// The totals are the sums over the heads, and the peak of a dense prefill is found layer by layer.
func TestTotalsAreSums(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	for range 200 {
		p := sample()
		p.Model.NLayers, p.Model.NKVHeads = 1+r.IntN(6), 1+r.IntN(4)
		p.Model.SlidingWindow = nil
		p.Policies, p.Layers = map[string]Policy{}, nil
		p.Cache.Granularity = []Granularity{PerKVHead, PerLayer}[r.IntN(2)]
		p.Cache.Prefill, p.Cache.ChunkTokens = PrefillDense, 0
		if r.IntN(2) == 0 {
			p.Cache.Prefill, p.Cache.ChunkTokens = PrefillChunked, 1+r.IntN(100)
		}
		if r.IntN(2) == 0 {
			p.Pins = nil
		}
		for i := range 4 {
			p.Policies[fmt.Sprint(i)] = randomPolicy(r)
		}
		for range p.Model.NLayers {
			row := make([]string, p.Model.NKVHeads)
			for h := range row {
				row[h] = fmt.Sprint(r.IntN(4))
				if p.Cache.Granularity == PerLayer {
					row[h] = row[0]
				}
			}
			p.Layers = append(p.Layers, row)
			p.Model.SlidingWindow = append(p.Model.SlidingWindow, r.IntN(2)*(1+r.IntN(150)))
		}
		request := Request{PromptTokens: 1 + r.IntN(300), GeneratedTokens: r.IntN(50), Batch: r.IntN(3), Dtype: []Dtype{"", F32, Int8}[r.IntN(3)]}
		u := p.Usage(request)
		var want Usage
		var dense, chunked, done int64
		for l, row := range p.Layers {
			var layer, after int64
			for h := range row {
				x, err := p.HeadUsage(l, h, request)
				if err != nil {
					t.Fatal(err)
				}
				y, err := p.HeadUsage(l, h, Request{PromptTokens: request.PromptTokens, Batch: request.Batch, Dtype: request.Dtype})
				if err != nil {
					t.Fatal(err)
				}
				want.Tokens += x.Tokens
				want.Blocks += x.Blocks
				want.Bytes += x.Bytes
				want.FullBytes += x.FullBytes
				want.WorstCase = want.WorstCase || x.WorstCase
				layer += x.PeakPrefillBytes
				after += y.Bytes
				if y.PeakPrefillBytes < y.Bytes {
					t.Errorf("%+v: a head's peak %d is below what it holds in the end %d", p.Policies[row[h]], y.PeakPrefillBytes, y.Bytes)
				}
			}
			dense = max(dense, done+layer)
			done += after
			chunked += layer
		}
		if want.PeakPrefillBytes = dense; p.Cache.Prefill == PrefillChunked {
			want.PeakPrefillBytes = chunked
		}
		if p.Cache.Granularity == PerLayer {
			want.Blocks /= int64(p.Model.NKVHeads)
		}
		if u != want {
			t.Errorf("%+v: %+v, the heads give %+v", request, u, want)
		}
		if u.PeakPrefillBytes < done {
			t.Errorf("the peak %d is below what the prefill leaves %d", u.PeakPrefillBytes, done)
		}
		once := p.Usage(Request{PromptTokens: request.PromptTokens, GeneratedTokens: request.GeneratedTokens, Dtype: request.Dtype})
		if batch := int64(max(request.Batch, 1)); u.Bytes != batch*once.Bytes || u.Tokens != batch*once.Tokens {
			t.Errorf("a batch of %d has %d bytes, one sequence %d", batch, u.Bytes, once.Bytes)
		}
	}
}

// The share of a DuoAttention plan with half of the heads streaming, 64 + 256: .539 at 4k and .505 at 32k.
func TestPublishedShare(t *testing.T) {
	p := llama31()
	for l, row := range p.Layers {
		for h := range row {
			row[h] = []string{"full", "stream"}[(l+h)%2]
		}
	}
	for n, want := range map[int]float64{4096: .539, 32768: .505} {
		u := p.Usage(Request{PromptTokens: n})
		if got := float64(u.Bytes) / float64(u.FullBytes); math.Abs(got-want) > .0005 {
			t.Errorf("share at %d tokens is %.4f, want %.3f", n, got, want)
		}
		// 32 layers, keys and values, 8 KV heads of 128 elements of 2 bytes: 128 KiB a token.
		if want := int64(n) << 17; u.FullBytes != want {
			t.Errorf("full cache of %d tokens is %d bytes, want %d", n, u.FullBytes, want)
		}
	}
}

// The largest plan that is allowed does not overflow.
func TestLargestPlan(t *testing.T) {
	p := one(Full{}, maxBlockSize, 0)
	p.Cache.Dtype = F32
	p.Model.NLayers, p.Model.NHeads, p.Model.NKVHeads, p.Model.HeadDim = maxLayers, maxKVHeads, maxKVHeads, maxHeadDim
	p.Model.SlidingWindow, p.TokenClasses, p.Evidence = nil, nil, nil
	row := make([]string, maxKVHeads)
	for h := range row {
		row[h] = "it"
	}
	p.Layers = slices.Repeat([][]string{row}, maxLayers)
	p.Totals = []Totals{p.ComputeTotals(maxTokens, 0)}
	if vs := p.Validate(); len(vs) > 0 {
		t.Fatal(vs)
	}
	if want := int64(1) << 60; p.Totals[0].FullBytes != want {
		t.Errorf("%d bytes, want %d", p.Totals[0].FullBytes, want)
	}
}
