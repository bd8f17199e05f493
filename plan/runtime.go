package plan

import (
	"fmt"
	"math"
)

// Interval is a range of positions, From included, To not.
type Interval struct {
	From, To int
}

// Len is the number of positions in it.
func (i Interval) Len() int { return i.To - i.From }

// PolicyOf is the policy of a KV head. The error is for a head that the plan does not have.
func (p *Plan) PolicyOf(layer, kvHead int) (Policy, error) {
	if layer < 0 || layer >= len(p.Layers) || kvHead < 0 || kvHead >= len(p.Layers[layer]) {
		return nil, fmt.Errorf("cache plan of %d layers and %d KV heads has no layer %d, KV head %d", p.Model.NLayers, p.Model.NKVHeads, layer, kvHead)
	}
	name := p.Layers[layer][kvHead]
	q, ok := p.Policies[name]
	if !ok || q == nil {
		return nil, fmt.Errorf("layer %d, KV head %d: unknown policy %q", layer, kvHead, name)
	}
	return q, nil
}

// static returns the two regions of a static policy: the first sinks positions and the last recent ones, with recent 0
// when there is no end to what is kept.
func (p *Plan) static(layer, kvHead int) (sinks, recent int, err error) {
	q, err := p.PolicyOf(layer, kvHead)
	if err != nil {
		return 0, 0, err
	}
	window := p.Model.Window(layer)
	switch q := q.(type) {
	case Full:
		return 0, window, nil
	case Streaming:
		if window > 0 && q.SinkTokens+q.RecentTokens >= window {
			return 0, window, nil
		}
		return q.SinkTokens, q.RecentTokens, nil
	}
	return 0, 0, fmt.Errorf("layer %d, KV head %d: what a %s policy keeps: %w", layer, kvHead, q.Kind(), ErrContent)
}

// Keep returns the positions that a KV head's cache holds once n tokens are in it, in rising order, without pins. The
// answer does not depend on which of them were generated. Policies that look at the content are an [ErrContent].
//
// On a layer with a sliding window no head holds more than the window: a streaming policy as large as that keeps the
// window's last tokens, and a smaller one keeps its sinks, which the model's own mask hides once they are out of reach.
func (p *Plan) Keep(layer, kvHead, n int) ([]Interval, error) {
	sinks, recent, err := p.static(layer, kvHead)
	switch {
	case err != nil:
		return nil, err
	case n <= 0:
		return nil, nil
	case recent == 0, n <= sinks+recent:
		return []Interval{{0, n}}, nil
	case sinks == 0:
		return []Interval{{n - recent, n}}, nil
	}
	return []Interval{{0, sinks}, {n - recent, n}}, nil
}

// Slot returns where in a KV head's cache a position is stored. Slots count tokens from the start of the head's first
// block; block number and offset are slot / block_size and slot % block_size. Sinks have blocks of their own, and the
// recent tokens a ring of whole blocks behind them, in which position i overwrites position i - recent_tokens. The slots
// of the positions that [Plan.Keep] returns are all different. Policies that look at the content are an [ErrContent].
func (p *Plan) Slot(layer, kvHead, position int) (int, error) {
	sinks, recent, err := p.static(layer, kvHead)
	switch {
	case err != nil:
		return 0, err
	case position < 0:
		return 0, fmt.Errorf("position %d is negative", position)
	case position < sinks || recent == 0:
		return position, nil
	}
	return p.Cache.roundUp(sinks) + (position-sinks)%recent, nil
}

// RotaryPosition returns the position that a kept key is rotated to once n tokens are in the cache: its own, or its
// rank among the kept ones, as the policy says. The query of the last of the n tokens is rotated like its key.
func (p *Plan) RotaryPosition(layer, kvHead, n, position int) (int, error) {
	kept, err := p.Keep(layer, kvHead, n)
	if err != nil {
		return 0, err
	}
	rank := 0
	for _, in := range kept {
		if position >= in.From && position < in.To {
			if q, ok := p.Policies[p.Layers[layer][kvHead]].(Streaming); ok && q.Positions == PositionsCacheSlot {
				return rank + position - in.From, nil
			}
			return position, nil
		}
		rank += in.Len()
	}
	return 0, fmt.Errorf("layer %d, KV head %d: position %d is not kept after %d tokens", layer, kvHead, position, n)
}

// At says where and when a policy is looked at.
type At struct {
	PromptTokens    int
	GeneratedTokens int
	Window          int // of the layer's own sliding window, 0 for full attention
	Pinned          int // most tokens that the pins keep of a prompt
}

// Kept is what one KV head's cache holds.
type Kept struct {
	Tokens    int
	Blocks    int  // each region of the cache rounded up to whole blocks
	WorstCase bool // what is kept depends on the content: the numbers are upper bounds
}

// Kept returns what a policy keeps. It needs no plan, so that policies can be compared before there is one.
func (c Cache) Kept(q Policy, at At) Kept {
	return c.kept(q, at, 0)
}

// kept counts with room for so many tokens more than the policy keeps, as a chunk in flight needs.
func (c Cache) kept(q Policy, at At, room int) Kept {
	prompt, n := at.PromptTokens, at.PromptTokens+at.GeneratedTokens
	limit := n
	if at.Window > 0 {
		limit = min(n, at.Window+room)
	}
	// first and second are the two regions that are paged apart; most policies need one.
	first, second := limit, 0
	worst := false
	switch q := q.(type) {
	case Streaming:
		if at.Window == 0 || q.SinkTokens+q.RecentTokens < at.Window {
			first = min(n, q.SinkTokens)
			second = min(n-first, q.RecentTokens+room)
		}
	case TopK:
		budget := q.Budget(prompt)
		if q.Decode == DecodeStatic {
			first = min(limit, min(prompt, budget)+at.GeneratedTokens)
		} else if at.Window == 0 || budget < at.Window {
			total := min(n, budget)
			first = min(total, budget-q.ObservationWindow)
			second = total - first
		}
	case FastGen:
		worst = true
		if q.Decode == DecodeStatic {
			first = min(limit, q.Bound(prompt)+at.GeneratedTokens)
		} else {
			first = min(limit, q.Bound(n))
		}
	case H2O:
		first = min(limit, q.SinkTokens+q.HeavyTokens+q.RecentTokens+room)
	}
	k := Kept{Tokens: first + second, Blocks: c.blocks(first) + c.blocks(second), WorstCase: worst}
	if _, full := q.(Full); !full && at.Pinned > 0 {
		pinned := min(at.Pinned, prompt, max(limit-k.Tokens, 0))
		k.Tokens += pinned
		k.Blocks += c.blocks(pinned)
		k.WorstCase = true
	}
	return k
}

// Budget is the number of tokens that the policy keeps of a prompt that has more.
func (q TopK) Budget(prompt int) int {
	if q.BudgetRatio == 0 {
		return q.BudgetTokens
	}
	return max(ceilOf(q.BudgetRatio, prompt), q.SinkTokens+q.ObservationWindow+1)
}

// Bound is the most that the policy keeps of n tokens.
func (q FastGen) Bound(n int) int {
	most := n
	if q.MaxTokens > 0 {
		most = min(most, q.MaxTokens)
	}
	if q.MaxRatio > 0 {
		most = min(most, ceilOf(q.MaxRatio, n))
	}
	return most
}

// ceilOf is the number of tokens that a share of n is: the product in double precision, rounded up.
func ceilOf(share float64, n int) int {
	return min(int(math.Ceil(share*float64(n))), n)
}

// blocks is the number of blocks that so many tokens need.
func (c Cache) blocks(tokens int) int {
	if c.BlockSize <= 1 {
		return tokens
	}
	return (tokens + c.BlockSize - 1) / c.BlockSize
}

// roundUp rounds tokens up to whole blocks.
func (c Cache) roundUp(tokens int) int {
	return c.blocks(tokens) * max(c.BlockSize, 1)
}

// Request says for which use of the cache bytes are asked.
type Request struct {
	PromptTokens    int
	GeneratedTokens int
	Batch           int   // sequences of that length; 0 means 1
	Dtype           Dtype // of the cache; "" means the plan's
}

// Usage is what a cache holds once prompt and generated tokens are in it.
type Usage struct {
	Tokens           int64 // sum over sequences, layers and KV heads
	Blocks           int64 // of a KV head each, or of a layer each where the granularity is layer
	Bytes            int64 // of those blocks
	PeakPrefillBytes int64 // the most that the cache holds at any time in the prefill of all sequences at once
	FullBytes        int64 // of a cache that keeps everything that the model itself can attend to
	WorstCase        bool  // what is kept depends on the content: the figures are upper bounds
}

// blockBytes is the size of a block of one KV head.
func (p *Plan) blockBytes(d Dtype) int64 {
	if d == "" {
		d = p.Cache.Dtype
	}
	return int64(max(p.Cache.BlockSize, 1)) * 2 * int64(p.Model.HeadDim) * int64(d.Size())
}

// pinned is the most that the pins keep of a prompt.
func (p *Plan) pinned() int {
	n := 0
	for _, pin := range p.Pins {
		n = min(n+pin.MaxTokens, maxTokens)
	}
	return n
}

// policyOr is the policy of a name; everything is kept where there is none.
func (p *Plan) policyOr(name string) Policy {
	if q := p.Policies[name]; q != nil {
		return q
	}
	return Full{}
}

// HeadUsage is what the cache of one KV head holds. PeakPrefillBytes is the most that this head holds at any time.
// Where the granularity is layer, Blocks and bytes are the head's share of the layer's blocks.
func (p *Plan) HeadUsage(layer, kvHead int, r Request) (Usage, error) {
	q, err := p.PolicyOf(layer, kvHead)
	if err != nil {
		return Usage{}, err
	}
	at := At{r.PromptTokens, r.GeneratedTokens, p.Model.Window(layer), p.pinned()}
	k := p.Cache.Kept(q, at)
	batch, size := int64(max(r.Batch, 1)), p.blockBytes(r.Dtype)
	return Usage{
		Tokens: batch * int64(k.Tokens), Blocks: batch * int64(k.Blocks), Bytes: batch * int64(k.Blocks) * size,
		PeakPrefillBytes: batch * int64(p.Cache.inFlight(q, at)) * size,
		FullBytes:        batch * int64(p.Cache.Kept(Full{}, at).Blocks) * size,
		WorstCase:        k.WorstCase,
	}, nil
}

// inFlight is the number of blocks that a KV head needs while its layer processes the prompt.
func (c Cache) inFlight(q Policy, at At) int {
	at.GeneratedTokens = 0
	room := 0
	if c.Prefill == PrefillChunked {
		room = c.ChunkTokens
	}
	evict := EvictPrefillEnd
	switch q := q.(type) {
	case Streaming:
		evict = q.Evict
	case H2O:
		evict = q.Evict
	}
	// With room for a chunk two regions can be one, and so need fewer blocks than what is left in the end.
	own := max(c.kept(q, at, room).Blocks, c.kept(q, at, 0).Blocks)
	if evict == EvictAlways {
		return own
	}
	return max(own, c.kept(Full{}, at, room).Blocks)
}

// Usage is what the caches of all layers and KV heads hold together. The plan must be valid; a head without a known
// policy counts as one that keeps everything.
func (p *Plan) Usage(r Request) Usage {
	// Policies recur: each is counted once for each window.
	type key struct {
		name   string
		window int
	}
	type counts struct {
		kept                Kept
		prefilled, inFlight int // blocks when the prompt is done and while it is processed
		full                int
	}
	known := map[key]counts{}
	pinned := p.pinned()
	var blocks, full, peak, before, chunked int64
	var u Usage
	for l, row := range p.Layers {
		window := p.Model.Window(l)
		var layer, layerInFlight int64
		for _, name := range row {
			k := key{name, window}
			c, ok := known[k]
			if !ok {
				q := p.policyOr(name)
				at := At{r.PromptTokens, r.GeneratedTokens, window, pinned}
				c = counts{kept: p.Cache.Kept(q, at), full: p.Cache.Kept(Full{}, at).Blocks, inFlight: p.Cache.inFlight(q, at)}
				at.GeneratedTokens = 0
				c.prefilled = p.Cache.Kept(q, at).Blocks
				known[k] = c
			}
			u.Tokens += int64(c.kept.Tokens)
			u.WorstCase = u.WorstCase || c.kept.WorstCase
			blocks += int64(c.kept.Blocks)
			full += int64(c.full)
			layer += int64(c.prefilled)
			layerInFlight += int64(c.inFlight)
		}
		// Dense prefill finishes a layer, and evicts from it, before the next one starts.
		peak = max(peak, before+layerInFlight)
		before += layer
		chunked += layerInFlight
	}
	if p.Cache.Prefill == PrefillChunked {
		peak = chunked
	}
	batch, size := int64(max(r.Batch, 1)), p.blockBytes(r.Dtype)
	u.Tokens *= batch
	u.Bytes, u.FullBytes, u.PeakPrefillBytes = batch*blocks*size, batch*full*size, batch*peak*size
	u.Blocks = batch * blocks
	if p.Cache.Granularity == PerLayer && p.Model.NKVHeads > 0 {
		u.Blocks /= int64(p.Model.NKVHeads)
	}
	return u
}

// ComputeTotals returns the totals of one sequence for lengths in tokens. The plan must be valid but for its totals.
func (p *Plan) ComputeTotals(promptTokens, generatedTokens int) Totals {
	u := p.Usage(Request{PromptTokens: promptTokens, GeneratedTokens: generatedTokens})
	return Totals{PromptTokens: promptTokens, GeneratedTokens: generatedTokens, KeptTokens: u.Tokens, KeptBlocks: u.Blocks, KeptBytes: u.Bytes,
		PeakPrefillBytes: u.PeakPrefillBytes, FullBytes: u.FullBytes, WorstCase: u.WorstCase}
}
