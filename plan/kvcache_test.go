package plan

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sort"
	"testing"
)

// refHead is a naive model of one KV head: a list of tokens, gone through anew at every step.
type refHead struct {
	policy Policy
	window int
	pins   []int
	class  func(p int) Class
	tokens []refToken
	n      int
	prompt int // -1 while it is not known
}

type refToken struct {
	position int
	inside   bool // the policy keeps it
	fixed    bool // and, of a rolling topk policy, for good
	score    float64
}

// large reports whether the policy is as large as the window.
func (h *refHead) large(prompt int) bool {
	if h.window == 0 {
		return false
	}
	switch q := h.policy.(type) {
	case Streaming:
		return q.SinkTokens+q.RecentTokens >= h.window
	case TopK:
		return refBudget(q, prompt) >= h.window
	case H2O:
		return q.SinkTokens+q.HeavyTokens+q.RecentTokens >= h.window
	}
	return false
}

func (h *refHead) evictsAlways() bool {
	switch q := h.policy.(type) {
	case Streaming:
		return q.Evict == EvictAlways
	case H2O:
		return q.Evict == EvictAlways
	case Full:
		return true
	}
	return false
}

// inside lists the positions that the policy keeps, score is that of a position held.
func (h *refHead) inside() []int {
	all := []int{}
	for _, t := range h.tokens {
		if t.inside {
			all = append(all, t.position)
		}
	}
	return all
}

func (h *refHead) score(p int) float64 {
	for _, t := range h.tokens {
		if t.position == p {
			return t.score
		}
	}
	panic("not held")
}

// settle keeps what is named and what pins keep, within the window.
func (h *refHead) settle(keep []int, whole bool) {
	var left []refToken
	for _, t := range h.tokens {
		t.inside = slices.Contains(keep, t.position)
		if t.inside || !whole && slices.Contains(h.pins, t.position) {
			left = append(left, t)
		}
	}
	h.tokens = left
	h.fit()
}

func (h *refHead) fit() {
	if h.window > 0 && len(h.tokens) > h.window {
		h.tokens = h.tokens[len(h.tokens)-h.window:]
	}
}

// end applies the policy when the prompt has ended.
func (h *refHead) end(window [][]float32, total [][]float32) (refused bool) {
	h.prompt = h.n
	if h.evictsAlways() && len(h.tokens) < h.n {
		return false
	}
	for i := range h.tokens {
		t := &h.tokens[i]
		for _, row := range total {
			if len(row) > 0 {
				t.score += float64(row[t.position])
			}
		}
	}
	low := h.tokens[0].position
	held := refSpan(low, h.n)
	if h.large(h.n) {
		h.settle(refSpan(max(low, h.n-h.window), h.n), true)
		return false
	}
	switch q := h.policy.(type) {
	case Full:
		h.fit()
	case Streaming:
		h.settle(slices.DeleteFunc(held, func(p int) bool { return p >= q.SinkTokens && p < h.n-q.RecentTokens }), false)
	case TopK:
		h.settle(refTopK(q, h.n, low, window), false)
		left := refBudget(q, h.n) - q.ObservationWindow
		kept := h.inside()
		for i := range h.tokens {
			t := &h.tokens[i]
			t.fixed = t.inside && slices.Index(kept, t.position) < left
		}
	case FastGen:
		keep, no := refFastGen(q, h.n, held, h.score, h.class, -1)
		if no {
			return true
		}
		h.settle(keep, false)
	case H2O:
		h.settle(refH2O(q, h.n, held, h.score), false)
	}
	return false
}

// add brings the next token.
func (h *refHead) add() (refused bool) {
	n := h.n + 1
	t := refToken{position: h.n, inside: true}
	rolls := h.prompt >= 0 || h.evictsAlways()
	leaves := func(p int) bool { return false }
	if rolls && !h.large(max(h.prompt, 0)) {
		switch q := h.policy.(type) {
		case Streaming:
			leaves = func(p int) bool { return p >= q.SinkTokens && p < n-q.RecentTokens }
		case TopK:
			if q.Decode == DecodeRolling {
				if budget := refBudget(q, h.prompt); h.n < budget-q.ObservationWindow {
					t.fixed = true
				} else {
					var ring []int
					for _, old := range h.tokens {
						if old.inside && !old.fixed {
							ring = append(ring, old.position)
						}
					}
					if len(ring) == q.ObservationWindow {
						leaves = func(p int) bool { return p == ring[0] }
					}
				}
			}
		case FastGen:
			if q.Decode == DecodeRolling {
				score := func(p int) float64 {
					if p == h.n {
						return 0
					}
					return h.score(p)
				}
				keep, no := refFastGen(q, n, append(h.inside(), h.n), score, h.class, h.n)
				if no {
					return true
				}
				leaves = func(p int) bool { return !slices.Contains(keep, p) }
			}
		case H2O:
			keep := refH2O(q, n, append(h.inside(), h.n), func(p int) float64 {
				if p == h.n {
					return 0
				}
				return h.score(p)
			})
			leaves = func(p int) bool { return !slices.Contains(keep, p) }
		}
	}
	var left []refToken
	for _, old := range h.tokens {
		if old.inside && leaves(old.position) {
			old.inside = false
		}
		if old.inside || slices.Contains(h.pins, old.position) {
			left = append(left, old)
		}
	}
	h.tokens = append(left, t)
	h.n = n
	h.fit()
	return false
}

func reindexed(q Policy) bool {
	switch q := q.(type) {
	case Streaming:
		return q.Positions == PositionsCacheSlot
	case TopK:
		return q.Positions == PositionsCacheSlot
	case FastGen:
		return q.Positions == PositionsCacheSlot
	case H2O:
		return q.Positions == PositionsCacheSlot
	}
	return false
}

// checkHead compares a head with the model of it, and looks at its books. slots has the slot of each position held at
// the last look: tokens do not move.
func checkHead(h *HeadCache, ref *refHead, block int, slots map[int]int) error {
	var want []int
	for _, t := range ref.tokens {
		want = append(want, t.position)
	}
	at := map[int]int{}
	free := 0
	for s, p := range h.Positions() {
		if p < 0 {
			free++
			continue
		}
		if _, twice := at[int(p)]; twice {
			return fmt.Errorf("position %d is held twice", p)
		}
		at[int(p)] = s
		if old, ok := slots[int(p)]; ok && old != s {
			return fmt.Errorf("position %d moved from slot %d to %d", p, old, s)
		}
		if b := s / block; b >= len(h.Blocks()) || h.Blocks()[b] < 0 {
			return fmt.Errorf("slot %d lies in a block that is not held: %v", s, h.Blocks())
		}
	}
	got := make([]int, 0, len(at))
	for p := range at {
		got = append(got, p)
	}
	sort.Ints(got)
	if !slices.Equal(got, want) {
		return fmt.Errorf("holds %v, want %v", got, want)
	}
	if h.Len() != len(want) || h.Tokens() != ref.n {
		return fmt.Errorf("holds %d of %d tokens, want %d of %d", h.Len(), h.Tokens(), len(want), ref.n)
	}
	covered, last := 0, -1
	for _, in := range h.Spans() {
		if in.From <= last || in.To <= in.From {
			return fmt.Errorf("spans %v", h.Spans())
		}
		last = in.To
		for s := in.From; s < in.To; s++ {
			if s >= len(h.Positions()) || h.Positions()[s] < 0 {
				return fmt.Errorf("spans %v have free slots: %v", h.Spans(), h.Positions())
			}
			covered++
		}
	}
	if covered != len(want) {
		return fmt.Errorf("spans %v cover %d of %d", h.Spans(), covered, len(want))
	}
	ranks, query := h.Rotary(), ref.n-1
	if reindexed(ref.policy) {
		query = len(want) - 1
		for rank, p := range want {
			if int(ranks[at[p]]) != rank {
				return fmt.Errorf("position %d is rotated to %d, want %d", p, ranks[at[p]], rank)
			}
		}
		for s, rank := range ranks {
			if rank >= 0 && (s >= len(h.Positions()) || h.Positions()[s] < 0) {
				return fmt.Errorf("free slot %d is rotated to %d", s, rank)
			}
		}
	} else if ranks != nil {
		return errors.New("ranks though positions are the text's")
	}
	if h.QueryPosition() != query {
		return fmt.Errorf("the query is rotated to %d, want %d", h.QueryPosition(), query)
	}
	clear(slots)
	for p, s := range at {
		slots[p] = s
	}
	return nil
}

// bySlot brings attention by position into the order of the slots.
func bySlot(h *HeadCache, attention [][]float32) [][]float32 {
	rows := make([][]float32, len(attention))
	for i := range rows {
		rows[i] = make([]float32, len(h.Positions()))
		for s, p := range h.Positions() {
			if p >= 0 {
				rows[i][s] = attention[i][p]
			}
		}
	}
	return rows
}

// world is a random plan with a cache of it and the models of its heads.
type world struct {
	r         *rand.Rand
	plan      *Plan
	pool      *BlockPool
	cache     *KVCache
	ref       [][]*refHead
	slots     [][]map[int]int
	prompt    int
	dense     bool
	scattered bool
	classes   []Class
}

func newWorld(r *rand.Rand) *world {
	w := &world{r: r, plan: sample(), pool: NewBlockPool(0), prompt: 1 + r.IntN(110), dense: r.IntN(2) == 0, scattered: r.IntN(4) == 0}
	p := w.plan
	p.Model.NLayers, p.Model.NKVHeads = 1+r.IntN(2), 1+r.IntN(3)
	p.Model.NHeads = p.Model.NKVHeads * []int{1, 2, 4}[r.IntN(3)]
	p.Model.SlidingWindow, p.Layers, p.Policies, p.Pins = nil, nil, map[string]Policy{}, nil
	p.Cache.BlockSize = 1 + r.IntN(20)
	p.Cache.Granularity = []Granularity{PerKVHead, PerLayer}[r.IntN(2)]
	p.Cache.Prefill, p.Cache.ChunkTokens = PrefillDense, 0
	if !w.dense {
		p.Cache.Prefill, p.Cache.ChunkTokens = PrefillChunked, 1
	}
	for l := range p.Model.NLayers {
		p.Model.SlidingWindow = append(p.Model.SlidingWindow, max(0, r.IntN(3)-1)*(1+r.IntN(100)))
		var row []string
		for k := range p.Model.NKVHeads {
			name := fmt.Sprint(l, ".", k)
			if p.Cache.Granularity == PerLayer {
				name = fmt.Sprint(l)
			}
			if p.Policies[name] == nil {
				p.Policies[name] = variedPolicy(r)
				if q, ok := p.Policies[name].(H2O); ok && w.dense {
					q.Evict = EvictPrefillEnd
					p.Policies[name] = q
				}
			}
			row = append(row, name)
		}
		p.Layers = append(p.Layers, row)
	}
	// Windows about as large as a policy are where layouts change.
	for l, w := range p.Model.SlidingWindow {
		if w > 0 && r.IntN(2) == 0 {
			size := p.Cache.Kept(p.Policies[p.Layers[l][0]], At{PromptTokens: 1 << 20}).Tokens
			p.Model.SlidingWindow[l] = max(1, min(size, 100)+r.IntN(3)-1)
		}
	}
	var pins []int
	if r.IntN(2) == 0 {
		p.Pins = []Pin{{Pattern: "x", MaxTokens: 1 + r.IntN(20), Overflow: DropOldest}}
		pins = r.Perm(w.prompt)[:r.IntN(min(p.Pins[0].MaxTokens, w.prompt)+1)]
		sort.Ints(pins)
	}
	w.classes = classesOf(r, w.prompt)
	class := func(p int) Class {
		if p < len(w.classes) {
			return w.classes[p]
		}
		return ""
	}
	var err error
	if w.cache, err = p.NewKVCache(CacheOptions{Pool: w.pool, Pinned: pins, Classes: w.classes, Scattered: w.scattered}); err != nil {
		panic(err)
	}
	for l, row := range p.Layers {
		w.ref, w.slots = append(w.ref, nil), append(w.slots, nil)
		for _, name := range row {
			ref := &refHead{policy: p.Policies[name], window: p.Model.Window(l), class: class, prompt: -1}
			if _, full := ref.policy.(Full); !full {
				ref.pins = pins
			}
			w.ref[l], w.slots[l] = append(w.ref[l], ref), append(w.slots[l], map[int]int{})
		}
	}
	return w
}

// each calls f for every head.
func (w *world) each(f func(h *HeadCache, ref *refHead, slots map[int]int) error) error {
	for l, row := range w.ref {
		for k, ref := range row {
			if err := f(w.cache.Head(l, k), ref, w.slots[l][k]); err != nil {
				return fmt.Errorf("%T%+v, window %d, prompt %d, dense %v, scattered %v, granularity %s, blocks of %d, pins %v, after %d tokens: %w", ref.policy, ref.policy,
					ref.window, w.prompt, w.dense, w.scattered, w.plan.Cache.Granularity, w.plan.Cache.BlockSize, ref.pins, ref.n, err)
			}
		}
	}
	return nil
}

var errRefused = errors.New("refused, as it should be")

// append brings one token to every head, with attention where the policy needs it.
func (w *world) append() error {
	return w.each(func(h *HeadCache, ref *refHead, slots map[int]int) error {
		before := slices.Clone(h.Positions())
		refused := ref.add()
		slot, err := h.Append()
		if refused {
			if !errors.Is(err, ErrOverflow) || !slices.Equal(before, h.Positions()) {
				return fmt.Errorf("should be refused, and nothing be changed: %v", err)
			}
			return errRefused
		}
		if err != nil {
			return err
		}
		if int(h.Positions()[slot]) != ref.n-1 {
			return fmt.Errorf("slot %d has position %d", slot, h.Positions()[slot])
		}
		attention := attentionOf(w.r, h.group, ref.n)
		for i := range ref.tokens {
			for _, row := range attention {
				ref.tokens[i].score += float64(row[ref.tokens[i].position])
			}
		}
		h.Observe(bySlot(h, attention))
		return checkHead(h, ref, w.plan.Cache.BlockSize, slots)
	})
}

// fill brings the prompt in.
func (w *world) fill() error {
	if w.dense {
		return w.each(func(h *HeadCache, ref *refHead, slots map[int]int) error {
			a := Attention{Window: attentionOf(w.r, h.group, w.prompt), Total: attentionOf(w.r, h.group, w.prompt)}
			ref.n = w.prompt
			for p := range w.prompt {
				ref.tokens = append(ref.tokens, refToken{position: p, inside: true})
			}
			refused := ref.end(a.Window, a.Total)
			err := h.Prefill(w.prompt, a)
			if refused {
				if !errors.Is(err, ErrOverflow) || h.Len() > 0 || len(h.Blocks()) > 0 && w.plan.Cache.Granularity == PerKVHead {
					return fmt.Errorf("should be refused, and nothing be changed: %v", err)
				}
				return errRefused
			}
			if err != nil {
				return err
			}
			return checkHead(h, ref, w.plan.Cache.BlockSize, slots)
		})
	}
	for range w.prompt {
		if err := w.append(); err != nil {
			return err
		}
	}
	return w.each(func(h *HeadCache, ref *refHead, slots map[int]int) error {
		a := Attention{Window: attentionOf(w.r, h.group, w.prompt)}
		if w.r.IntN(2) == 0 && !ref.evictsAlways() {
			a.Total = attentionOf(w.r, h.group, w.prompt)
			for i := range ref.tokens {
				ref.tokens[i].score = 0
			}
		}
		at := slices.Clone(h.Positions())
		refused := ref.end(a.Window, a.Total)
		moves, err := h.EndPrompt(a)
		if refused {
			if !errors.Is(err, ErrOverflow) || !slices.Equal(at, h.Positions()) {
				return fmt.Errorf("should be refused, and nothing be changed: %v", err)
			}
			return errRefused
		}
		if err != nil {
			return err
		}
		// The moves in any order give what Positions says.
		w.r.Shuffle(len(moves), func(i, j int) { moves[i], moves[j] = moves[j], moves[i] })
		for len(at) < len(h.Positions()) {
			at = append(at, -1)
		}
		for _, m := range moves {
			delete(slots, int(at[m.From]))
			at[m.To] = at[m.From]
		}
		for s, p := range h.Positions() {
			if p >= 0 && at[s] != p {
				return fmt.Errorf("after the moves %v slot %d has position %d, want %d", moves, s, at[s], p)
			}
		}
		if w.scattered && ref.window == 0 && len(moves) > 0 {
			return fmt.Errorf("moves %v of a scattered cache", moves)
		}
		return checkHead(h, ref, w.plan.Cache.BlockSize, slots)
	})
}

// compare looks at the numbers of the whole cache.
func (w *world) compare(generated int) error {
	p, u, t := w.plan, w.cache.Usage(), w.cache.Telemetry()
	want := p.Usage(Request{PromptTokens: w.prompt, GeneratedTokens: generated})
	exact, scattered := true, false
	var tokens, appended int64
	for l, row := range w.ref {
		for _, ref := range row {
			tokens += int64(len(ref.tokens))
			appended += int64(ref.n)
			kept := p.Cache.Kept(ref.policy, At{w.prompt, generated, ref.window, p.pinned()})
			passed := ref.window > 0 && w.prompt > ref.window && !w.dense && !ref.evictsAlways() // its sinks may be gone
			if len(ref.tokens) > kept.Tokens || !passed && !kept.WorstCase && len(ref.tokens) != kept.Tokens {
				return fmt.Errorf("layer %d, %T%+v, window %d, prompt %d + %d, pins %v: %d tokens, counted are %+v", l, ref.policy, ref.policy, ref.window, w.prompt, generated,
					ref.pins, len(ref.tokens), kept)
			}
			exact = exact && !passed
			scattered = scattered || w.scattered && !ref.evictsAlways()
		}
	}
	if u.Tokens != tokens || t.Appended != appended || t.Appended-t.Evicted != tokens {
		return fmt.Errorf("%d tokens are held, usage %+v, telemetry %+v", tokens, u, t)
	}
	if !scattered && (u.Tokens > want.Tokens || u.Blocks > want.Blocks || u.Bytes > want.Bytes) {
		return fmt.Errorf("%+v is more than %+v", u, want)
	}
	if exact && !scattered && !want.WorstCase && (u.Tokens != want.Tokens || u.Blocks != want.Blocks || u.Bytes != want.Bytes) {
		return fmt.Errorf("%+v, want %+v", u, want)
	}
	if u.FullBytes != want.FullBytes {
		return fmt.Errorf("a full cache is %d bytes, want %d", u.FullBytes, want.FullBytes)
	}
	// Every block of the tables is held once, and has something in it.
	ids := map[int32]bool{}
	for l, row := range w.ref {
		for k := range row {
			if k > 0 && p.Cache.Granularity == PerLayer {
				continue
			}
			for b, id := range w.cache.Head(l, k).Blocks() {
				if id < 0 {
					continue
				}
				filled := false
				for other := range row {
					if other != k && p.Cache.Granularity == PerKVHead {
						continue
					}
					positions := w.cache.Head(l, other).Positions()
					for s := b * p.Cache.BlockSize; s < min((b+1)*p.Cache.BlockSize, len(positions)); s++ {
						filled = filled || positions[s] >= 0
					}
				}
				if ids[id] || !filled {
					return fmt.Errorf("block %d of layer %d, KV head %d is held twice or for nothing", id, l, k)
				}
				ids[id] = true
			}
		}
	}
	if len(ids) != w.pool.InUse() || int64(len(ids)) != u.Blocks || u.Blocks != t.BlocksTaken-t.BlocksFreed {
		return fmt.Errorf("%d blocks in the tables, %d in the pool, usage %+v, telemetry %+v", len(ids), w.pool.InUse(), u, t)
	}
	return nil
}

// snapshot copies what the heads say.
func snapshot(c *KVCache) [][]int32 {
	var all [][]int32
	for l := range c.heads {
		for k := range c.heads[l] {
			h := c.Head(l, k)
			all = append(all, slices.Clone(h.Positions()), slices.Clone(h.Blocks()), slices.Clone(h.Rotary()))
			for _, in := range h.Spans() {
				all = append(all, []int32{int32(in.From), int32(in.To)})
			}
		}
	}
	return all
}

// What the cache holds is at every step what a naive model holds and what the plan counts, for random plans, windows,
// block sizes, pins and ways to bring the prompt in.
func TestKVCacheAgainstReference(t *testing.T) {
	rounds := 1500
	if testing.Short() {
		rounds = 500
	}
	refused, worst := 0, 0
	for round := range rounds {
		r := rand.New(rand.NewPCG(uint64(round), 20))
		w := newWorld(r)
		err := w.fill()
		if err == nil {
			err = w.compare(0)
		}
		if err == nil && !w.scattered {
			size := w.plan.blockBytes("")
			if w.plan.Cache.Granularity == PerLayer {
				size *= int64(w.plan.Model.NKVHeads)
			}
			if peak := int64(w.pool.Peak()) * size; peak > w.plan.Usage(Request{PromptTokens: w.prompt}).PeakPrefillBytes {
				err = fmt.Errorf("%d bytes in the prefill, counted are %+v", peak, w.plan.Usage(Request{PromptTokens: w.prompt}))
			}
		}
		// A clone goes on as the cache would have, and leaves it as it was.
		first, pool := w.cache, w.pool
		var before [][]int32
		if err == nil && r.IntN(3) == 0 {
			w.pool = pool.Clone()
			w.cache = first.Clone(w.pool)
			before = snapshot(first)
		}
		for g := 1; g <= 40 && err == nil; g++ {
			w.classes = append(w.classes, classesOf(r, 1)...)
			w.cache.AppendClasses(w.classes[len(w.classes)-1])
			if err = w.append(); err == nil {
				err = w.compare(g)
			}
		}
		if errors.Is(err, errRefused) {
			refused++
			continue
		}
		if err != nil {
			t.Fatalf("round %d: cache %+v, policies %+v, layers %v, windows %v, dense %v, scattered %v, prompt %d: %v", round, w.plan.Cache, w.plan.Policies, w.plan.Layers,
				w.plan.Model.SlidingWindow, w.dense, w.scattered, w.prompt, err)
		}
		if w.plan.Usage(Request{PromptTokens: w.prompt}).WorstCase {
			worst++
		}
		w.cache.Release()
		if before != nil && (!reflect.DeepEqual(snapshot(first), before) || int64(pool.InUse()) != first.Usage().Blocks) {
			t.Fatalf("round %d: a clone changed what it was made from", round)
		}
		if u := w.cache.Usage(); w.pool.InUse() != 0 || u.Blocks != 0 || u.Tokens != 0 || u.Bytes != 0 {
			t.Fatalf("round %d: after release %d blocks are in use, %+v", round, w.pool.InUse(), u)
		}
	}
	t.Logf("%d rounds refused, %d with a worst case", refused, worst)
	if refused < rounds/200 || worst < rounds/10 {
		t.Errorf("%d rounds refused, %d with a worst case: the test looks at too few", refused, worst)
	}
}
