package plan

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// KVCache keeps the books of one sequence's cache as a plan says: which token lies in which slot of which block, for
// every layer and KV head. It holds no keys and values; the server moves those where its heads say.
//
// For each KV head the server calls [HeadCache.Prefill] when the layer has processed the whole prompt, or
// [HeadCache.Append] for each of its tokens and [HeadCache.EndPrompt] after them; and then Append for each token that is
// generated. Where a policy goes by attention while tokens are generated (h2o, rolling fastgen), it calls
// [HeadCache.Observe] after each Append. What the cache holds then is what [Plan.Usage] counts, and no more than that
// where Usage is a worst case.
//
// Calls that come in the wrong order or with values out of range are errors ([ErrState], [ErrArgument],
// [ErrAttention]), and a pool that has no blocks left is an [ErrNoBlocks]; the cache is then as it was. A KVCache and its
// heads are not safe for concurrent use; different KVCaches are, even with one pool.
type KVCache struct {
	plan      *Plan
	options   CacheOptions
	classes   []Class
	heads     [][]HeadCache
	tokens    int64 // held, over all heads
	telemetry Telemetry
	released  bool
}

// CacheOptions are what a cache needs to know of its sequence.
type CacheOptions struct {
	// Pool that blocks are taken from: of one KV head each, or of all KV heads of a layer where the plan's granularity is
	// layer. nil is for a pool of the cache's own without a bound.
	Pool *BlockPool
	// Pinned are the positions of the prompt that the plan's pins keep, rising, as [Plan.Pinned] returns them.
	Pinned []int
	// Classes has the class of each token of the prompt, "" for none; policies of kind fastgen go by it.
	Classes []Class
	// Scattered leaves the tokens that are kept at the end of a prompt where they are: no keys and values are moved, but
	// blocks are given back only when nothing in them is kept, so that more are held than [Plan.Usage] says. It has no
	// effect on policies that evict always, and where a prompt is longer than the layer's own sliding window.
	Scattered bool
}

// Attention is what the policies know of the attention of a prompt: a row for each query head of a KV head's group, in
// it for each position of the prompt the attention that the token received, after the softmax over all keys, summed over
// queries. Policies of kind topk need Window, fastgen and h2o Total.
type Attention struct {
	Window [][]float32 // from the queries of the policy's observation window; positions in the window may be left out
	Total  [][]float32 // from all queries
}

// Move says that a token's key and value go from one slot of a head to another.
type Move struct {
	From, To int
}

// CacheUsage is what a cache holds now.
type CacheUsage struct {
	Tokens    int64 // sum over layers and KV heads
	Blocks    int64 // of a KV head each, or of a layer each where the granularity is layer
	Bytes     int64 // of those blocks, in the plan's dtype
	FullBytes int64 // of a cache that keeps everything that the model itself can attend to
}

// Telemetry counts what happened to a cache since it was made. Appended less Evicted is the number of tokens held until
// the cache is released, BlocksTaken less BlocksFreed the number of blocks.
type Telemetry struct {
	Appended    int64 // tokens that came, by Prefill too
	Evicted     int64 // tokens that left
	BlocksTaken int64
	BlocksFreed int64
	Moves       int64         // tokens that EndPrompt moved
	Busy        time.Duration // spent deciding; without Append where the policy does not go by attention
}

// NewKVCache returns an empty cache for one sequence. The plan must not change while it is in use. The error is for a
// plan whose layers, policies or block size are invalid, or for options that do not fit it.
func (p *Plan) NewKVCache(o CacheOptions) (*KVCache, error) {
	check := &checker{plan: p}
	check.model()
	check.cache()
	check.policies()
	check.layers()
	if len(check.found) > 0 {
		return nil, &InvalidError{SortViolations(check.found)}
	}
	for i, at := range o.Pinned {
		if at < 0 || at >= maxTokens || i > 0 && at <= o.Pinned[i-1] {
			return nil, fmt.Errorf("pinned position %d: positions must rise and lie in a prompt: %w", at, ErrArgument)
		}
	}
	if most := p.pinned(); len(o.Pinned) > most {
		return nil, fmt.Errorf("%d positions are pinned, the plan's pins keep at most %d: %w", len(o.Pinned), most, ErrArgument)
	}
	if o.Pool == nil {
		o.Pool = NewBlockPool(0)
	}
	o.Pinned = slices.Clone(o.Pinned)
	c := &KVCache{plan: p, options: o, classes: slices.Clone(o.Classes), heads: make([][]HeadCache, len(p.Layers))}
	group := p.Model.NHeads / p.Model.NKVHeads
	for l, row := range p.Layers {
		c.heads[l] = make([]HeadCache, len(row))
		var table *blockTable
		for k, name := range row {
			if table == nil || p.Cache.Granularity != PerLayer {
				table = &blockTable{size: p.Cache.BlockSize}
			}
			h := &c.heads[l][k]
			*h = HeadCache{cache: c, layer: l, kvHead: k, policy: p.Policies[name], group: group, window: p.Model.Window(l), table: table,
				head: -1, tail: -1, oldest: -1}
			table.heads = append(table.heads, h)
			h.begin()
		}
	}
	return c, nil
}

// AppendClasses says the classes of the tokens behind those whose classes are known: of the prompt first, then of each
// generated token before it is appended. Only a rolling fastgen policy asks for those of generated tokens.
func (c *KVCache) AppendClasses(classes ...Class) { c.classes = append(c.classes, classes...) }

// Head returns the cache of a KV head, nil for one that the plan does not have. Calls to a nil HeadCache are an
// [ErrState] or return nothing.
func (c *KVCache) Head(layer, kvHead int) *HeadCache {
	if layer < 0 || layer >= len(c.heads) || kvHead < 0 || kvHead >= len(c.heads[layer]) {
		return nil
	}
	return &c.heads[layer][kvHead]
}

// Usage is what the cache holds now.
func (c *KVCache) Usage() CacheUsage {
	p := c.plan
	u := CacheUsage{Tokens: c.tokens, Blocks: c.telemetry.BlocksTaken - c.telemetry.BlocksFreed}
	u.Bytes = u.Blocks * p.blockBytes("")
	if p.Cache.Granularity == PerLayer {
		u.Bytes *= int64(p.Model.NKVHeads)
	}
	for l := range c.heads {
		for k := range c.heads[l] {
			h := &c.heads[l][k]
			u.FullBytes += int64(p.Cache.Kept(Full{}, At{PromptTokens: h.n, Window: h.window}).Blocks) * p.blockBytes("")
		}
	}
	return u
}

// Telemetry returns the counts so far.
func (c *KVCache) Telemetry() Telemetry { return c.telemetry }

// Release gives all blocks back to the pool. The cache is empty then, and every further call to its heads is an
// [ErrState].
func (c *KVCache) Release() {
	for l := range c.heads {
		for k := range c.heads[l] {
			h := &c.heads[l][k]
			for b, id := range h.table.ids {
				if id >= 0 {
					c.options.Pool.give(id)
					c.telemetry.BlocksFreed++
					h.table.ids[b] = -1
				}
			}
			h.clear()
		}
	}
	c.tokens, c.released = 0, true
}

// blockTable says which blocks a head holds, or all KV heads of a layer together.
type blockTable struct {
	size  int     // slots of a block
	ids   []int32 // by block of the slots, -1 where none is held
	refs  []int32 // heads with tokens in it
	holes int     // blocks of ids that are not held
	heads []*HeadCache
}

// What a head knows of the token in a slot.
const (
	pinned  uint8 = 1 << iota // a pin keeps it
	outside                   // the policy no longer does
	fixed                     // a ring policy keeps it for good
)

// What a head does when a token comes.
type mode uint8

const (
	growing mode = iota // the policy evicts nothing; the layer's window may
	ringing             // the oldest token that is not fixed leaves
	heavy               // h2o
	lattice             // rolling fastgen
)

// HeadCache is the cache of one KV head. Slots count tokens from the start of the head's first block. Slices that its
// methods return are valid until the next call that changes the cache, and are not to be written to.
type HeadCache struct {
	cache         *KVCache
	layer, kvHead int
	policy        Policy
	group         int // query heads
	window        int // of the layer, 0 for none
	table         *blockTable

	n         int  // tokens that came
	done      bool // the prompt has ended
	mode      mode
	sinks     int // tokens that a ring policy fixes
	recent    int // of its ring
	region    int // slots of the first region, padded to whole blocks; 0 for one region
	stale     bool
	nextPin   int // index of the first pinned position that is not in the cache yet
	positions []int32
	prev      []int32 // the held tokens in order of their positions
	next      []int32
	flags     []uint8
	score     []float64 // attention received, for policies that go by it
	used      []int32   // tokens in each block
	head      int32
	tail      int32
	oldest    int32 // first that is kept by a ring policy and not fixed
	count     int   // tokens held
	kept      int   // by the policy
	rolling   int   // by the policy, and not fixed
	hint      int   // no slot below it is free in a block that is held

	spans       []Interval
	spansDirty  bool
	ranks       []int32
	ranksDirty  bool
	leaving     []int32
	stuck       []int32
	scratch     []float64
	scratchSlot []int32
}

// at names the head in errors.
func (h *HeadCache) at() string { return fmt.Sprintf("layer %d, KV head %d", h.layer, h.kvHead) }

// evict says when tokens of the prompt leave.
func evictOf(q Policy) Evict {
	switch q := q.(type) {
	case Streaming:
		return q.Evict
	case H2O:
		return q.Evict
	case TopK, FastGen:
		return EvictPrefillEnd
	}
	return EvictAlways
}

// begin sets what holds while the prompt comes token by token.
func (h *HeadCache) begin() {
	h.mode, h.sinks, h.recent, h.region = growing, 0, 0, 0
	if evictOf(h.policy) == EvictAlways {
		h.setMode(0)
		h.region = h.sinks
	}
}

// whole reports whether the policy is as large as the layer's sliding window, and so keeps that.
func (h *HeadCache) whole(prompt int) bool {
	size := 0
	switch q := h.policy.(type) {
	case Full:
		return true
	case Streaming:
		size = q.SinkTokens + q.RecentTokens
	case TopK:
		size = q.Budget(prompt)
	case H2O:
		size = q.SinkTokens + q.HeavyTokens + q.RecentTokens
	case FastGen:
		return false
	}
	return h.window > 0 && size >= h.window
}

// setMode says what the policy does from now on.
func (h *HeadCache) setMode(prompt int) {
	h.mode, h.sinks, h.recent = growing, 0, 0
	if h.whole(prompt) {
		return
	}
	switch q := h.policy.(type) {
	case Streaming:
		h.mode, h.sinks, h.recent = ringing, q.SinkTokens, q.RecentTokens
	case TopK:
		if q.Decode == DecodeRolling {
			h.mode, h.sinks, h.recent = ringing, q.Budget(prompt)-q.ObservationWindow, q.ObservationWindow
		}
	case FastGen:
		if q.Decode == DecodeRolling {
			h.mode = lattice
		}
	case H2O:
		h.mode = heavy
	}
}

// scoring reports whether attention is to be observed.
func (h *HeadCache) scoring() bool {
	if h.done || evictOf(h.policy) == EvictAlways {
		return h.mode == heavy || h.mode == lattice
	}
	switch h.policy.(type) {
	case FastGen, H2O:
		return true
	}
	return false
}

func (h *HeadCache) usable() error {
	switch {
	case h == nil:
		return fmt.Errorf("the plan has no such layer and KV head: %w", ErrState)
	case h.cache.released:
		return fmt.Errorf("%s: the cache was released: %w", h.at(), ErrState)
	}
	return nil
}

// Prefill says that the layer has processed the whole prompt of n tokens. It decides what is kept of it and takes blocks
// for that; [HeadCache.Positions] then says which keys and values are to be written to which slots. The attention may be
// left empty where the policy does not go by it.
//
// An h2o policy that evicts always cannot be applied to a prompt that it does not keep whole: its tokens must come by
// Append.
func (h *HeadCache) Prefill(n int, a Attention) error {
	if err := h.usable(); err != nil {
		return err
	}
	start := time.Now()
	defer func() { h.cache.telemetry.Busy += time.Since(start) }()
	switch pins := h.cache.options.Pinned; {
	case h.n > 0:
		return fmt.Errorf("%s: prefill of a cache that has tokens: %w", h.at(), ErrState)
	case n < 1 || n > maxTokens:
		return fmt.Errorf("%s: prompt of %d tokens, must have between 1 and %d: %w", h.at(), n, maxTokens, ErrArgument)
	case len(pins) > 0 && pins[len(pins)-1] >= n:
		return fmt.Errorf("position %d is pinned in a prompt of %d tokens: %w", pins[len(pins)-1], n, ErrArgument)
	}
	if q, ok := h.policy.(H2O); ok && q.Evict == EvictAlways && !h.whole(n) && n > q.SinkTokens+q.HeavyTokens+q.RecentTokens {
		return fmt.Errorf("%s: an h2o policy that evicts always needs the prompt token by token: %w", h.at(), ErrState)
	}
	scores, err := h.scores(n, a)
	if err != nil {
		return err
	}
	kept, err := h.choose(0, n, a, scores)
	if err != nil {
		return err
	}
	held := h.withPins(kept, 0, n)
	scattered := h.cache.options.Scattered && evictOf(h.policy) == EvictPrefillEnd && (h.window == 0 || n <= h.window)
	slots := h.layout(held, kept, n, scattered)
	blocks := make([]int, 0, len(slots)/h.table.size+2)
	if scattered {
		blocks = span(0, h.cache.plan.Cache.blocks(n))
	} else {
		for _, s := range slots {
			if b := s / h.table.size; !slices.Contains(blocks[max(len(blocks)-2, 0):], b) {
				blocks = append(blocks, b)
			}
		}
		slices.Sort(blocks)
		blocks = slices.Compact(blocks)
	}
	if err := h.hold(blocks); err != nil {
		h.begin()
		return err
	}
	h.n, h.done = n, true
	scoring := h.scoring()
	if len(slots) > 0 {
		h.grow(slices.Max(slots))
	}
	for i, s := range slots {
		h.occupy(s, held[i])
		if scoring {
			h.score[s] = scores[held[i]]
		}
	}
	h.dropUnused(blocks)
	h.classify(kept)
	h.cache.telemetry.Appended += int64(n)
	h.cache.telemetry.Evicted += int64(n - h.count)
	h.spansDirty, h.ranksDirty = true, true
	return nil
}

// layout returns the slots of what a dense prefill leaves, and sets the regions. kept is what the policy keeps.
func (h *HeadCache) layout(held, kept []int, n int, scattered bool) []int {
	h.setMode(n)
	if h.region = h.sinks; scattered {
		h.region = 0
		return slices.Clone(held)
	}
	slots := make([]int, len(held))
	second := h.cache.plan.Cache.roundUp(h.region)
	_, streaming := h.policy.(Streaming)
	extra := 0 // pinned tokens that a streaming policy does not keep lie behind its ring
	for i, position := range held {
		switch {
		case h.mode == growing && h.window > 0 && h.whole(n):
			slots[i] = position % h.window
		case h.mode == ringing && streaming && position >= h.sinks:
			slots[i] = second + (position-h.sinks)%h.recent
			if _, inside := slices.BinarySearch(kept, position); !inside {
				slots[i] = second + h.recent + extra
				extra++
			}
		case h.mode == ringing && streaming:
			slots[i] = position
		case i >= h.region:
			slots[i] = second + i - h.region
		default:
			slots[i] = i
		}
	}
	return slots
}

// scores sums the attention of all queries over the group, where the policy goes by it.
func (h *HeadCache) scores(n int, a Attention) ([]float64, error) {
	needed := false
	switch q := h.policy.(type) {
	case FastGen:
		needed = q.FrequentRatio > 0 && q.FrequentRatio < 1 || q.Overflow == DropLowest || q.Decode == DecodeRolling
	case H2O:
		needed = !h.whole(n)
	default:
		return nil, nil
	}
	if a.Total == nil && h.score != nil && !h.stale {
		// The prompt came token by token, and its attention was observed.
		scores := make([]float64, n)
		for s, p := range h.positions {
			if p >= 0 {
				scores[p] = h.score[s]
			}
		}
		return scores, nil
	}
	if needed || a.Total != nil {
		if err := h.shape("total", a.Total, n); err != nil {
			return nil, err
		}
	}
	return sumOver(a.Total, n), nil
}

// shape checks that there is a row of n numbers at least for each query head of the group.
func (h *HeadCache) shape(what string, rows [][]float32, n int) error {
	if len(rows) != h.group {
		return fmt.Errorf("%s: %s attention of %d query heads, the group has %d: %w", h.at(), what, len(rows), h.group, ErrAttention)
	}
	for i, row := range rows {
		if len(row) < n {
			return fmt.Errorf("%s: %s attention of query head %d has %d positions, %d are needed: %w", h.at(), what, i, len(row), n, ErrAttention)
		}
	}
	return nil
}

// choose returns what the policy keeps of the positions from low to n when the prompt has ended.
func (h *HeadCache) choose(low, n int, a Attention, scores []float64) ([]int, error) {
	if h.whole(n) {
		if h.window > 0 {
			low = max(low, n-h.window)
		}
		return span(low, n), nil
	}
	switch q := h.policy.(type) {
	case Streaming:
		return slices.DeleteFunc(q.Select(n), func(p int) bool { return p < low }), nil
	case TopK:
		if n-low > q.Budget(n) {
			if err := h.shape("window", a.Window, n-q.ObservationWindow); err != nil {
				return nil, err
			}
		}
		return q.selectFrom(low, n, a.Window), nil
	case FastGen:
		kept := q.selectFrom(low, n, scores, h.cache.classes)
		if bound := q.Bound(n); len(kept) > bound {
			return nil, &OverflowError{Where: h.at(), Tokens: len(kept), Bound: bound}
		}
		return kept, nil
	case H2O:
		return q.selectFrom(low, n, scores), nil
	}
	return nil, fmt.Errorf("%s: %w", h.at(), ErrKind)
}

// withPins adds the pinned positions from low on to what the policy keeps. Of more than the layer's window the lowest
// leave: no later query can see them.
func (h *HeadCache) withPins(kept []int, low, n int) []int {
	held := kept
	if pins := h.cache.options.Pinned; len(pins) > 0 && !h.whole(n) {
		held = make([]int, 0, len(kept)+len(pins))
		for i, j := 0, 0; i < len(kept) || j < len(pins); {
			switch {
			case j == len(pins) || i < len(kept) && kept[i] < pins[j]:
				held = append(held, kept[i])
				i++
			case i < len(kept) && kept[i] == pins[j]:
				j++
			default:
				if pins[j] >= low {
					held = append(held, pins[j])
				}
				j++
			}
		}
	}
	if h.window > 0 && len(held) > h.window {
		held = held[len(held)-h.window:]
	}
	return held
}

// classify sets what the policy and the pins think of each token that is held. kept is what the policy keeps.
func (h *HeadCache) classify(kept []int) {
	h.kept, h.rolling, h.oldest = 0, 0, -1
	_, streaming := h.policy.(Streaming)
	pins := h.cache.options.Pinned
	i, j := 0, 0
	for s := h.head; s >= 0; s = h.next[s] {
		p := int(h.positions[s])
		for i < len(kept) && kept[i] < p {
			i++
		}
		for j < len(pins) && pins[j] < p {
			j++
		}
		h.flags[s] = 0
		if j < len(pins) && pins[j] == p {
			h.flags[s] |= pinned
		}
		if i == len(kept) || kept[i] != p {
			h.flags[s] |= outside
			continue
		}
		if h.mode == ringing && (streaming && p < h.sinks || !streaming && h.kept < h.sinks) {
			h.flags[s] |= fixed
		} else {
			h.rolling++
			if h.oldest < 0 {
				h.oldest = s
			}
		}
		h.kept++
	}
	h.nextPin = len(h.cache.options.Pinned)
}

// Append makes room for the next token, of the prompt or generated: tokens that have to leave do so first. It returns
// the slot that the token's key and value are to be written to. Time and memory are constant per token but for policies
// that go by attention, which look at all tokens held.
//
// A rolling fastgen policy always keeps the newest token until the next one comes: its own query attends to it.
func (h *HeadCache) Append() (slot int, err error) {
	if err := h.usable(); err != nil {
		return 0, err
	}
	if h.mode != heavy && h.mode != lattice {
		return h.append() // takes less time than reading the clock
	}
	start := time.Now()
	slot, err = h.append()
	h.cache.telemetry.Busy += time.Since(start)
	return slot, err
}

func (h *HeadCache) append() (int, error) {
	if h.n >= maxTokens {
		return 0, fmt.Errorf("%s: %d tokens are in the cache, it takes no more: %w", h.at(), h.n, ErrArgument)
	}
	// First decide, then find a slot, which may fail, and only then change anything.
	h.leaving = h.leaving[:0]
	switch h.mode {
	case ringing:
		if h.n >= h.sinks && h.rolling >= h.recent {
			h.leaving = append(h.leaving, h.oldest)
		}
	case heavy:
		if err := h.leaveHeavy(h.policy.(H2O)); err != nil {
			return 0, err
		}
	case lattice:
		if err := h.leaveLattice(h.policy.(FastGen)); err != nil {
			return 0, err
		}
	}
	// What a pin keeps stays, outside the policy.
	h.stuck = h.stuck[:0]
	free := h.leaving[:0]
	for _, s := range h.leaving {
		if h.flags[s]&pinned != 0 {
			h.stuck = append(h.stuck, s)
		} else {
			free = append(free, s)
		}
	}
	h.leaving = free
	if h.window > 0 {
		for s := h.head; s >= 0 && h.count-len(h.leaving) >= h.window; s = h.next[s] {
			if !slices.Contains(h.leaving, s) {
				h.leaving = append(h.leaving, s)
			}
		}
	}
	slot := -1
	if len(h.leaving) > 0 {
		slot = int(h.leaving[0])
	} else {
		var err error
		if slot, err = h.freeSlot(); err != nil {
			return 0, err
		}
	}
	for _, s := range h.stuck {
		h.leave(s)
		h.flags[s] |= outside
	}
	for i, s := range h.leaving {
		h.leave(s)
		h.unlink(s)
		if i > 0 {
			h.vacate(int(s))
		}
	}
	if len(h.leaving) > 0 {
		h.link(slot, h.n)
		h.ranksDirty = true
	} else {
		h.occupy(slot, h.n)
		if !h.ranksDirty {
			h.extendRanks(slot)
		}
	}
	h.join(int32(slot))
	h.n++
	h.stale = true
	h.cache.telemetry.Appended++
	h.cache.telemetry.Evicted += int64(len(h.leaving))
	return slot, nil
}

// join makes the newest token one that the policy keeps.
func (h *HeadCache) join(s int32) {
	h.flags[s] = 0
	if pins := h.cache.options.Pinned; h.nextPin < len(pins) && pins[h.nextPin] == h.n {
		h.nextPin++
		h.flags[s] |= pinned
	}
	h.kept++
	if h.mode == ringing && h.n < h.sinks {
		h.flags[s] |= fixed
		return
	}
	h.rolling++
	if h.oldest < 0 {
		h.oldest = s
	}
}

// leave takes a token out of the policy's books.
func (h *HeadCache) leave(s int32) {
	if h.flags[s]&outside != 0 {
		return
	}
	h.kept--
	if h.flags[s]&fixed != 0 {
		return
	}
	h.rolling--
	if h.oldest == s {
		for h.oldest = h.next[s]; h.oldest >= 0 && h.flags[h.oldest]&(outside|fixed) != 0; {
			h.oldest = h.next[h.oldest]
		}
	}
}

// leaveHeavy adds the token that an h2o policy evicts before the next one comes: of those that are neither sinks nor
// recent the one with the lowest score, where there are more than the heavy ones.
func (h *HeadCache) leaveHeavy(q H2O) error {
	if h.kept < q.HeavyTokens+q.RecentTokens {
		return nil
	}
	victim, others := int32(-1), 0
	for s := h.head; s >= 0 && int(h.positions[s]) <= h.n-q.RecentTokens; s = h.next[s] {
		if h.flags[s]&outside != 0 || int(h.positions[s]) < q.SinkTokens {
			continue
		}
		others++
		if victim < 0 || cmp.Compare(h.score[s], h.score[victim]) <= 0 {
			victim = s
		}
	}
	if others <= q.HeavyTokens {
		return nil
	}
	if h.stale {
		return h.unobserved()
	}
	h.leaving = append(h.leaving, victim)
	return nil
}

func (h *HeadCache) unobserved() error {
	return fmt.Errorf("%s: the attention of the newest query was not observed, or not by every slot: %w", h.at(), ErrAttention)
}

// leaveLattice adds the tokens that a rolling fastgen policy evicts before the next one comes.
func (h *HeadCache) leaveLattice(q FastGen) error {
	n := h.n + 1
	class := func(p int) bool {
		return p < len(h.cache.classes) && h.cache.classes[p] != "" && slices.Contains(q.Classes, h.cache.classes[p])
	}
	local := n - max(ceilOf(q.LocalRatio, n), 1)
	// The tokens of no class: more than the frequent ones have to compete.
	h.scratch, h.scratchSlot = h.scratch[:0], h.scratchSlot[:0]
	staying := 1
	for s := h.head; s >= 0; s = h.next[s] {
		if h.flags[s]&outside != 0 {
			continue
		}
		staying++
		if !class(int(h.positions[s])) {
			h.scratch, h.scratchSlot = append(h.scratch, h.score[s]), append(h.scratchSlot, s)
		}
	}
	// Nothing has attended to the new token, so it takes no other's place among them.
	if frequent := ceilOf(q.FrequentRatio, n); len(h.scratch) > frequent {
		if h.stale {
			return h.unobserved()
		}
		least, ties := ^uint64(0), 0
		if frequent > 0 {
			least, ties = threshold(h.scratch, frequent)
		}
		for i, s := range h.scratchSlot {
			key := rankOf(h.scratch[i])
			if key == least && ties > 0 {
				ties--
			} else if key <= least && int(h.positions[s]) < local {
				h.leaving = append(h.leaving, s)
				staying--
			}
		}
	}
	bound := q.Bound(n)
	if staying <= bound {
		return nil
	}
	if q.Overflow == Refuse {
		return &OverflowError{Where: h.at(), Tokens: staying, Bound: bound}
	}
	if q.Overflow == DropLowest && h.stale {
		return h.unobserved()
	}
	// leaving is in order of the positions so far.
	h.scratch, h.scratchSlot = h.scratch[:0], h.scratchSlot[:0]
	gone := h.leaving
	for s := h.head; s >= 0; s = h.next[s] {
		if len(gone) > 0 && gone[0] == s {
			gone = gone[1:]
		} else if h.flags[s]&outside == 0 {
			h.scratch, h.scratchSlot = append(h.scratch, h.score[s]), append(h.scratchSlot, s)
		}
	}
	if q.Overflow == DropOldest {
		h.leaving = append(h.leaving, h.scratchSlot[:staying-bound]...)
		return nil
	}
	least, ties := ^uint64(0), 0
	if bound > 1 {
		least, ties = threshold(h.scratch, bound-1)
	}
	for i, s := range h.scratchSlot {
		key := rankOf(h.scratch[i])
		if key == least && ties > 0 {
			ties--
		} else if key <= least {
			h.leaving = append(h.leaving, s)
		}
	}
	return nil
}

// Observe adds the attention of the newest query: a row for each query head of the group, in it by slot the attention
// after the softmax over what the head holds. It is needed after every Append where the policy goes by attention while
// tokens come, and does nothing for others. Attention of the wrong number of query heads or of too few slots is passed
// over; the next Append that has to decide by it is then an [ErrAttention].
func (h *HeadCache) Observe(attention [][]float32) {
	if h.usable() != nil || !h.scoring() || len(attention) != h.group || h.count == 0 {
		return
	}
	start := time.Now()
	defer func() { h.cache.telemetry.Busy += time.Since(start) }()
	spans := h.Spans()
	top := spans[len(spans)-1].To
	for _, row := range attention {
		if len(row) < top {
			return
		}
	}
	for _, in := range spans {
		for s := in.From; s < in.To; s++ {
			sum := 0.0
			for _, row := range attention {
				sum += float64(row[s])
			}
			h.score[s] += sum
		}
	}
	h.stale = false
}

// EndPrompt says that the last token of a prompt that came by Append has been processed. What the policy does not keep
// of it leaves, and unless the cache is scattered the rest closes up into as few blocks as [Plan.Usage] says: the moves
// are to be made, in any order and with the block table of before for where they come from, before anything else is
// written to blocks of the pool: some of them are free again. Where the policy goes by the attention of all queries and
// that was observed after each token, Total may be left empty.
//
// On a layer with a sliding window, tokens that it passed are gone by then, the policy's sinks too.
func (h *HeadCache) EndPrompt(a Attention) ([]Move, error) {
	if err := h.usable(); err != nil {
		return nil, err
	}
	start := time.Now()
	defer func() { h.cache.telemetry.Busy += time.Since(start) }()
	pins := h.cache.options.Pinned
	switch {
	case h.done:
		return nil, fmt.Errorf("%s: the prompt has ended already: %w", h.at(), ErrState)
	case h.n == 0:
		return nil, fmt.Errorf("%s: there is no prompt to end: %w", h.at(), ErrState)
	case h.nextPin < len(pins):
		return nil, fmt.Errorf("position %d is pinned in a prompt of %d tokens: %w", pins[len(pins)-1], h.n, ErrArgument)
	case evictOf(h.policy) == EvictAlways:
		h.done = true
		return nil, nil
	}
	low := int(h.positions[h.head])
	scores, err := h.scores(h.n, a)
	if err != nil {
		return nil, err
	}
	kept, err := h.choose(low, h.n, a, scores)
	if err != nil {
		return nil, err
	}
	held := h.withPins(kept, low, h.n)
	h.setMode(h.n)
	h.region = 0
	var targets []int
	if !h.cache.options.Scattered || h.window > 0 && h.n > h.window {
		targets = h.compact(held)
		blocks := make([]int, 0, len(targets)/h.table.size+2)
		for _, s := range targets {
			if b := s / h.table.size; len(blocks) == 0 || blocks[len(blocks)-1] != b {
				blocks = append(blocks, b)
			}
		}
		if err := h.hold(blocks); err != nil {
			h.begin()
			return nil, err
		}
	}
	h.done = true
	h.leaving = h.leaving[:0]
	for s, i := h.head, 0; s >= 0; s = h.next[s] {
		if i < len(held) && held[i] == int(h.positions[s]) {
			i++
		} else {
			h.leaving = append(h.leaving, s)
		}
	}
	for _, s := range h.leaving {
		h.unlink(s)
	}
	h.cache.telemetry.Evicted += int64(len(h.leaving))
	// Blocks are given back last: some of those that lost their tokens take in others.
	moves := h.closeUp(targets)
	for _, s := range h.leaving {
		h.vacate(int(s))
	}
	for _, m := range moves {
		h.vacate(m.From)
	}
	if h.scoring() {
		for s := h.head; s >= 0; s = h.next[s] {
			h.score[s] = scores[h.positions[s]]
		}
	} else {
		h.score = nil
	}
	h.stale = false
	h.classify(kept)
	h.table.trim()
	h.spansDirty, h.ranksDirty = true, true
	h.cache.telemetry.Moves += int64(len(moves))
	return moves, nil
}

// compact returns the slots that held tokens fill without gaps, and sets the region.
func (h *HeadCache) compact(held []int) []int {
	h.region = h.sinks
	first := 0
	_, streaming := h.policy.(Streaming)
	for first < len(held) && first < h.sinks && (!streaming || held[first] < h.sinks) {
		first++
	}
	second := h.cache.plan.Cache.roundUp(h.region)
	return append(span(0, first), span(second, second+len(held)-first)...)
}

// closeUp moves tokens that lie outside the target slots into those that are free. Slots do not follow the order of the
// positions, so a token that lies well stays.
func (h *HeadCache) closeUp(targets []int) []Move {
	if len(targets) == 0 {
		return nil
	}
	h.grow(targets[len(targets)-1])
	var moves []Move
	next := 0
	for s := h.head; s >= 0; s = h.next[s] {
		if _, ok := slices.BinarySearch(targets, int(s)); ok {
			continue
		}
		for h.positions[targets[next]] >= 0 {
			next++
		}
		to := int32(targets[next])
		h.positions[to], h.prev[to], h.next[to], h.flags[to] = h.positions[s], h.prev[s], h.next[s], h.flags[s]
		h.positions[s] = -1
		if before := h.prev[to]; before >= 0 {
			h.next[before] = to
		} else {
			h.head = to
		}
		if behind := h.next[to]; behind >= 0 {
			h.prev[behind] = to
		} else {
			h.tail = to
		}
		h.use(int(to))
		moves = append(moves, Move{int(s), int(to)})
	}
	return moves
}

// grow makes the books long enough for a slot.
func (h *HeadCache) grow(slot int) {
	more := (slot/h.table.size+1)*h.table.size - len(h.positions)
	if more <= 0 {
		return
	}
	h.positions = longer(h.positions, more)
	for i := len(h.positions) - more; i < len(h.positions); i++ {
		h.positions[i] = -1
	}
	h.prev, h.next, h.flags = longer(h.prev, more), longer(h.next, more), longer(h.flags, more)
	if h.scoring() {
		h.score = longer(h.score, more)
	}
	h.used = longer(h.used, more/h.table.size)
	clear(h.used[len(h.used)-more/h.table.size:])
}

// longer extends a slice; what is in the new part is not defined.
func longer[T any](s []T, n int) []T {
	s = slices.Grow(s, n)
	return s[:len(s)+n]
}

// use counts a token in a slot's block.
func (h *HeadCache) use(slot int) {
	b := slot / h.table.size
	if h.used[b]++; h.used[b] == 1 {
		h.table.refs[b]++
	}
}

// occupy puts a token into a free slot of a block that is held.
func (h *HeadCache) occupy(slot, position int) {
	h.grow(slot)
	h.use(slot)
	h.link(slot, position)
	if last := len(h.spans) - 1; !h.spansDirty && last >= 0 && h.spans[last].To == slot {
		h.spans[last].To++
	} else {
		h.spansDirty = true
	}
}

// link puts a token behind all others in the order of the positions.
func (h *HeadCache) link(slot, position int) {
	s := int32(slot)
	h.positions[s], h.prev[s], h.next[s] = int32(position), h.tail, -1
	if h.tail >= 0 {
		h.next[h.tail] = s
	} else {
		h.head = s
	}
	h.tail = s
	if slot < len(h.score) {
		h.score[slot] = 0
	}
	h.count++
	h.cache.tokens++
}

// unlink takes a token out; the links of its own slot stay readable.
func (h *HeadCache) unlink(s int32) {
	before, behind := h.prev[s], h.next[s]
	if before >= 0 {
		h.next[before] = behind
	} else {
		h.head = behind
	}
	if behind >= 0 {
		h.prev[behind] = before
	} else {
		h.tail = before
	}
	h.positions[s] = -1
	h.count--
	h.cache.tokens--
}

// vacate gives a slot back, and its block where nothing is left in it.
func (h *HeadCache) vacate(slot int) {
	t, b := h.table, slot/h.table.size
	h.spansDirty = true
	if h.used[b]--; h.used[b] == 0 {
		if t.refs[b]--; t.refs[b] == 0 {
			h.give(b)
			return
		}
	}
	h.hint = min(h.hint, slot)
}

// give returns a block to the pool.
func (h *HeadCache) give(b int) {
	t := h.table
	h.cache.options.Pool.give(t.ids[b])
	h.cache.telemetry.BlocksFreed++
	t.ids[b] = -1
	t.holes++
}

// hold takes those of the blocks that are not held yet, all or none.
func (h *HeadCache) hold(blocks []int) error {
	t := h.table
	missing := 0
	for _, b := range blocks {
		for len(t.ids) <= b {
			t.ids, t.refs = append(t.ids, -1), append(t.refs, 0)
			t.holes++
		}
		if t.ids[b] < 0 {
			missing++
		}
	}
	if missing == 0 {
		return nil
	}
	ids, err := h.cache.options.Pool.take(nil, missing)
	if err != nil {
		t.trim()
		return fmt.Errorf("%s: %w", h.at(), err)
	}
	h.cache.telemetry.BlocksTaken += int64(missing)
	t.holes -= missing
	for _, b := range blocks {
		if t.ids[b] < 0 {
			t.ids[b], ids = ids[0], ids[1:]
			for _, other := range t.heads {
				other.hint = min(other.hint, b*t.size)
			}
		}
	}
	return nil
}

// dropUnused gives those of the blocks back that nothing was put into.
func (h *HeadCache) dropUnused(blocks []int) {
	for _, b := range blocks {
		if h.table.refs[b] == 0 {
			h.give(b)
		}
	}
	h.table.trim()
}

// trim forgets blocks at the end that are not held.
func (t *blockTable) trim() {
	n := len(t.ids)
	for n > 0 && t.ids[n-1] < 0 {
		n--
	}
	t.holes -= len(t.ids) - n
	t.ids, t.refs = t.ids[:n], t.refs[:n]
	for _, h := range t.heads {
		if slots := n * t.size; len(h.positions) > slots {
			h.positions, h.prev, h.next, h.flags, h.used = h.positions[:slots], h.prev[:slots], h.next[:slots], h.flags[:slots], h.used[:n]
			h.score = h.score[:min(slots, len(h.score))]
			h.ranksDirty = true
		}
	}
}

// freeSlot returns the lowest free slot in a block that is held, else the first one of a new block.
func (h *HeadCache) freeSlot() (int, error) {
	t := h.table
	for h.hint < len(t.ids)*t.size {
		b := h.hint / t.size
		end := b*t.size + h.room(b)
		if t.ids[b] >= 0 && h.hint < end && (b >= len(h.used) || int(h.used[b]) < h.room(b)) {
			for s := h.hint; s < end; s++ {
				if s >= len(h.positions) || h.positions[s] < 0 {
					h.hint = s
					return s, nil
				}
			}
		}
		h.hint = (b + 1) * t.size
	}
	b := len(t.ids)
	if t.holes > 0 {
		b = slices.Index(t.ids, -1)
	}
	if err := h.hold([]int{b}); err != nil {
		return 0, err
	}
	return b * t.size, nil
}

// room is the number of slots of a block that are used: behind the first region the rest of its last block is not.
func (h *HeadCache) room(b int) int {
	if rest := h.region % h.table.size; rest > 0 && b == h.region/h.table.size {
		return rest
	}
	return h.table.size
}

// clear forgets everything.
func (h *HeadCache) clear() {
	h.positions, h.prev, h.next, h.flags, h.score, h.used = nil, nil, nil, nil, nil, nil
	h.spans, h.ranks, h.table.ids, h.table.refs = nil, nil, nil, nil
	h.head, h.tail, h.oldest, h.count, h.kept, h.rolling = -1, -1, -1, 0, 0, 0
}

// Len is the number of tokens that the head holds.
func (h *HeadCache) Len() int {
	if h == nil {
		return 0
	}
	return h.count
}

// Tokens is the number of tokens that came.
func (h *HeadCache) Tokens() int {
	if h == nil {
		return 0
	}
	return h.n
}

// Positions returns by slot the position in the text of the token that lies there, -1 for a free slot. Slots beyond its
// end are free.
func (h *HeadCache) Positions() []int32 {
	if h == nil {
		return nil
	}
	return h.positions
}

// Spans returns the slots that hold tokens, as rising ranges that do not touch.
func (h *HeadCache) Spans() []Interval {
	if h == nil {
		return nil
	}
	if h.spansDirty {
		h.spans, h.spansDirty = h.spans[:0], false
		for s := 0; s < len(h.positions); s++ {
			if h.positions[s] < 0 {
				continue
			}
			from := s
			for s < len(h.positions) && h.positions[s] >= 0 {
				s++
			}
			h.spans = append(h.spans, Interval{from, s})
		}
	}
	return h.spans
}

// Blocks returns the block table: slot s lies in block Blocks()[s / block_size] of the pool, at offset s mod block_size.
// Blocks that were given back are -1. Where the plan's granularity is layer, the KV heads of a layer have one table.
func (h *HeadCache) Blocks() []int32 {
	if h == nil {
		return nil
	}
	return h.table.ids
}

// Rotary returns by slot the position that the stored key is to be rotated to when it is read: its rank among the tokens
// held, in order of their positions, and -1 for a free slot. It is nil where keys are stored rotated to their own
// positions.
func (h *HeadCache) Rotary() []int32 {
	if h == nil || positionsOf(h.policy) != PositionsCacheSlot {
		return nil
	}
	if h.ranksDirty {
		h.ranks = h.ranks[:0]
		for range h.positions {
			h.ranks = append(h.ranks, -1)
		}
		rank := int32(0)
		for s := h.head; s >= 0; s = h.next[s] {
			h.ranks[s] = rank
			rank++
		}
		h.ranksDirty = false
	}
	return h.ranks
}

// extendRanks gives the newest token its rank; those of the others did not change.
func (h *HeadCache) extendRanks(slot int) {
	if positionsOf(h.policy) != PositionsCacheSlot {
		return
	}
	for len(h.ranks) < len(h.positions) {
		h.ranks = append(h.ranks, -1)
	}
	h.ranks[slot] = int32(h.count - 1)
}

// QueryPosition is the position that the query of the newest token is rotated to, as its key is; -1 for none.
func (h *HeadCache) QueryPosition() int {
	switch {
	case h == nil:
		return -1
	case positionsOf(h.policy) == PositionsCacheSlot:
		return h.count - 1
	}
	return h.n - 1
}

func positionsOf(q Policy) Positions {
	switch q := q.(type) {
	case Streaming:
		return q.Positions
	case FastGen:
		return q.Positions
	case TopK:
		return q.Positions
	case H2O:
		return q.Positions
	}
	return PositionsOriginal
}
