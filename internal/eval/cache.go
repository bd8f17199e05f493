package eval

import (
	"fmt"
	"slices"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/plan"
)

// caches are the caches of all contenders for one sample, in the same pages.
type caches struct {
	model *engine.Model
	pages *engine.Pages
	// Blocks of one KV head are a page each. Those of a layer have one for each KV head, behind all of these.
	pools     map[plan.Granularity]*plan.BlockPool
	sample    *datasets.Sample
	prompt    int
	sequences []*sequence
	watch     func(q *sequence, t *engine.Token) // called after every step, when not nil
}

// prefill reads a prompt, once for each way in which contenders see it, and keeps of it what their plans say. There is
// room for so many tokens more.
func (e *evaluator) prefill(s *datasets.Sample, prompt []int32, more int) (*caches, error) {
	c := &caches{model: e.model, sample: s, prompt: len(prompt)}
	blocks := map[plan.Granularity]int{}
	for _, x := range e.entries {
		blocks[x.Plan.Cache.Granularity] += x.blocks(len(prompt), more, e.o.Scattered)
	}
	c.pools = map[plan.Granularity]*plan.BlockPool{}
	for g, n := range blocks {
		c.pools[g] = plan.NewBlockPool(n)
	}
	ofLayers := blocks[plan.PerKVHead]
	c.pages = e.model.NewPages(ofLayers+blocks[plan.PerLayer]*e.model.Config.KVHeads, e.entries[0].Plan.Cache.BlockSize)
	for _, x := range e.entries {
		q := &sequence{entry: x, at: len(prompt), scattered: e.o.Scattered}
		if x.Plan.Cache.Granularity == plan.PerLayer {
			q.firstPage = int32(ofLayers)
		}
		o := plan.CacheOptions{Pool: c.pools[x.Plan.Cache.Granularity], Scattered: e.o.Scattered}
		if len(x.classes) > 0 {
			o.Classes = make([]plan.Class, len(prompt))
			for i, id := range prompt {
				o.Classes[i] = x.classes[id]
			}
		}
		var err error
		if len(x.Plan.Pins) > 0 {
			if o.Pinned, err = e.pinned(x.Plan, prompt); err != nil {
				c.free()
				return nil, fmt.Errorf("%s, %s sample %d: %w", x.Name, s.Task, s.ID, err)
			}
		}
		if q.cache, err = x.Plan.NewKVCache(o); err != nil {
			c.free()
			return nil, fmt.Errorf("%s: %w", x.Name, err)
		}
		c.sequences = append(c.sequences, q)
	}
	if err := e.stepThrough(c, prompt); err != nil {
		c.free()
		return nil, err
	}
	var read []string
	for _, x := range e.entries {
		if x.stepwise || slices.Contains(read, x.key) {
			continue
		}
		read = append(read, x.key)
		var group []*sequence
		for _, q := range c.sequences {
			if q.key == x.key && !q.stepwise {
				group = append(group, q)
			}
		}
		if err := e.read(c, prompt, group); err != nil {
			c.free()
			return nil, err
		}
	}
	for _, q := range c.sequences {
		if err := q.check(s, len(prompt), 0); err != nil {
			c.free()
			return nil, err
		}
	}
	return c, nil
}

// blocks is the number of blocks that a plan predicts at its fullest. A dense prefill has a layer's keys and values
// beside the cache, and puts there what is kept; a prompt that comes token by token is in all layers at once. Scattered
// tokens may need as many blocks as if nothing had left, and a second region one more.
func (x *entry) blocks(prompt, more int, scattered bool) int {
	r := plan.Request{PromptTokens: prompt, GeneratedTokens: more}
	u := x.Plan.Usage(r)
	blocks := u.Blocks
	if x.stepwise {
		p := *x.Plan
		p.Cache.Prefill, p.Cache.ChunkTokens = plan.PrefillChunked, 1
		blocks = max(blocks, p.Usage(r).PeakPrefillBytes/(u.Bytes/u.Blocks))
	}
	if scattered {
		blocks = max(blocks, FullPlan(x.Plan).Usage(r).Blocks+int64(x.Plan.Model.NLayers*x.Plan.Model.NKVHeads))
	}
	return int(blocks)
}

// pinned finds what a plan's pins keep of a prompt.
func (e *evaluator) pinned(p *plan.Plan, prompt []int32) ([]int, error) {
	text, starts := "", make([]int, len(prompt))
	for i := range prompt {
		starts[i] = len(text)
		text += e.tok.Decode(prompt[i : i+1])
	}
	return p.Pinned(text, starts)
}

// read runs the prompt through the model for contenders that see it the same way.
func (e *evaluator) read(c *caches, prompt []int32, group []*sequence) error {
	n := len(prompt)
	var windows []int
	raw := false
	for _, q := range group {
		for _, w := range q.windows {
			if !slices.Contains(windows, w) {
				windows = append(windows, w)
			}
		}
		raw = raw || q.raw
	}
	slices.Sort(windows)
	s := &engine.Sequence{Tokens: prompt, Masks: group[0].masks, RawKeys: raw, LogitRows: []int{n - 1},
		Tap: func(int) *engine.Tap { return &engine.Tap{Prompt: n, Windows: windows} },
		Cached: func(l int, raw, keys, values engine.Tensor, tap *engine.Tap) error {
			for _, q := range group {
				for k := range q.Plan.Layers[l] {
					if err := q.take(c, l, k, n, windows, raw, keys, values, tap); err != nil {
						return fmt.Errorf("%s, layer %d, KV head %d: %w", q.Name, l, k, err)
					}
				}
			}
			return nil
		}}
	if err := e.model.Forward(e.ctx, s); err != nil {
		return err
	}
	for _, q := range group {
		q.logits = s.Logits[0]
	}
	return nil
}

// take decides what a head keeps of the prompt and copies that to its pages.
func (q *sequence) take(c *caches, l, k, n int, windows []int, raw, keys, values engine.Tensor, tap *engine.Tap) error {
	h := q.cache.Head(l, k)
	group := c.model.Config.Heads / c.model.Config.KVHeads
	var a plan.Attention
	policy, err := q.Plan.PolicyOf(l, k)
	if err != nil {
		return err
	}
	for _, st := range tap.Heads[k*group : (k+1)*group] {
		if st.Total == nil { // a masked head has no statistics, and needs none
			break
		}
		a.Total = append(a.Total, st.Total[:n])
		if t, ok := policy.(plan.TopK); ok {
			a.Window = append(a.Window, st.Window[slices.Index(windows, t.ObservationWindow)][:n])
		}
	}
	if err := h.Prefill(n, a); err != nil {
		return err
	}
	if h.Rotary() != nil {
		keys = raw
	}
	c.model.Backend.StorePages(c.pages, q.table(h, k), h.Positions(), keys, values, k)
	return nil
}

// table lists the pages of a head.
func (q *sequence) table(h *plan.HeadCache, kvHead int) []int32 {
	blocks := h.Blocks()
	if q.Plan.Cache.Granularity != plan.PerLayer {
		return blocks
	}
	heads := int32(q.Plan.Model.NKVHeads)
	pages := make([]int32, len(blocks))
	for i, b := range blocks {
		pages[i] = q.firstPage + b*heads + int32(kvHead)
		if b < 0 {
			pages[i] = -1
		}
	}
	return pages
}

// stepThrough gives the prompt token by token to those that need it so, and ends it.
func (e *evaluator) stepThrough(c *caches, prompt []int32) error {
	active := make([]bool, len(c.sequences))
	votes := map[*sequence][][]plan.Attention{}
	for i, q := range c.sequences {
		if active[i] = q.stepwise; active[i] {
			q.at = 0
			votes[q] = nil
		}
	}
	if len(votes) == 0 {
		return nil
	}
	n := len(prompt)
	c.watch = func(q *sequence, t *engine.Token) { votes[q] = q.vote(votes[q], t, n) }
	for _, id := range prompt {
		if err := c.step(e, same(id, len(active)), active); err != nil {
			return err
		}
	}
	c.watch = nil
	for i, q := range c.sequences {
		if !active[i] {
			continue
		}
		for l, row := range q.Plan.Layers {
			for k := range row {
				h := q.cache.Head(l, k)
				var a plan.Attention
				if v := votes[q]; v != nil {
					a = v[l][k]
				}
				// The table as it is while tokens move: blocks are given back last.
				table := slices.Clone(q.table(h, k))
				moves, err := h.EndPrompt(a)
				if err != nil {
					return fmt.Errorf("%s, layer %d, KV head %d: %w", q.Name, l, k, err)
				}
				now := q.table(h, k)
				var from, to []int
				for _, m := range moves {
					old, new := engine.Lane{Table: table}, engine.Lane{Table: now}
					from, to = append(from, old.Row(m.From, c.pages.Block)), append(to, new.Row(m.To, c.pages.Block))
				}
				c.model.Backend.MovePages(c.pages, from, to)
			}
		}
	}
	return nil
}

// vote adds up what the last queries of a prompt of n tokens look at.
func (q *sequence) vote(votes [][]plan.Attention, t *engine.Token, n int) [][]plan.Attention {
	if votes == nil {
		votes = make([][]plan.Attention, len(t.Lanes))
	}
	for l, lanes := range t.Lanes {
		if votes[l] == nil {
			votes[l] = make([]plan.Attention, len(lanes))
		}
		for k := range lanes {
			policy, err := q.Plan.PolicyOf(l, k)
			top, ok := policy.(plan.TopK)
			if err != nil || !ok || q.at <= n-top.ObservationWindow {
				continue
			}
			a, positions := &votes[l][k], q.cache.Head(l, k).Positions()
			for g, p := range lanes[k].Probabilities {
				if len(a.Window) <= g {
					a.Window = append(a.Window, make([]float32, n))
				}
				for _, s := range lanes[k].Spans {
					for slot := s.Lo; slot < s.Hi; slot++ {
						a.Window[g][positions[slot]] += p[slot]
					}
				}
			}
		}
	}
	return votes
}

// held is the size of the blocks that the cache holds, in the plan's type.
func (q *sequence) held() int64 { return q.cache.Usage().Bytes }

// check compares what a cache holds with what its plan predicts.
func (q *sequence) check(s *datasets.Sample, prompt, generated int) error {
	if q.scattered {
		return nil // how many blocks are held depends on where the kept tokens lie
	}
	u := q.Plan.Usage(plan.Request{PromptTokens: prompt, GeneratedTokens: generated})
	// What a layer's sliding window passed in a prompt that came token by token is gone, sinks too.
	less := u.WorstCase || q.stepwise && len(q.Plan.Model.SlidingWindow) > 0
	if held := q.held(); held > u.Bytes || held < u.Bytes && !less {
		return &BytesError{Contender: q.Name, Task: s.Task, Sample: s.ID, Held: held, Predicted: u.Bytes}
	}
	return nil
}

// fork copies the caches, so that they can be decoded from twice.
func (c *caches) fork() *caches {
	f := *c
	b := c.model.Backend
	f.pages = &engine.Pages{Keys: b.New(c.pages.Keys.Rows(), c.pages.Keys.Cols()), Values: b.New(c.pages.Values.Rows(), c.pages.Values.Cols()), Block: c.pages.Block}
	b.Copy(f.pages.Keys, c.pages.Keys)
	b.Copy(f.pages.Values, c.pages.Values)
	f.pools = map[plan.Granularity]*plan.BlockPool{}
	for g, p := range c.pools {
		f.pools[g] = p.Clone()
	}
	f.sequences = nil
	for _, q := range c.sequences {
		x := *q
		x.cache = q.cache.Clone(f.pools[q.Plan.Cache.Granularity])
		f.sequences = append(f.sequences, &x)
	}
	return &f
}

func (c *caches) free() { c.model.FreePages(c.pages) }

// step gives each active sequence its next token; nil means that all are active.
func (c *caches) step(e *evaluator, ids []int32, active []bool) error {
	var tokens []engine.Token
	var of []*sequence
	for i, q := range c.sequences {
		if active != nil && !active[i] {
			continue
		}
		t, err := q.append(c, ids[i])
		if err != nil {
			return fmt.Errorf("%s, %s sample %d, token %d: %w", q.Name, c.sample.Task, c.sample.ID, q.at, err)
		}
		tokens, of = append(tokens, t), append(of, q)
	}
	logits, err := e.model.Decode(e.ctx, c.pages, tokens)
	if err != nil {
		return err
	}
	for i, q := range of {
		q.logits = logits[i]
		q.at++
		for l, lanes := range tokens[i].Lanes {
			for k := range lanes {
				if p := lanes[k].Probabilities; p != nil {
					q.cache.Head(l, k).Observe(p)
				}
			}
		}
		if c.watch != nil {
			c.watch(q, &tokens[i])
			continue // what is in flight in the prompt is no more than the pool has room for
		}
		if err := q.check(c.sample, c.prompt, q.at-c.prompt); err != nil {
			return err
		}
	}
	return nil
}

// visible are the occupied slots of a head; those of tokens up to a position are out of the reach of the layer's own
// sliding window.
func visible(h *plan.HeadCache, upTo int) []engine.Span {
	var out []engine.Span
	positions := h.Positions()
	for _, in := range h.Spans() {
		for s := in.From; s < in.To; s++ {
			switch last := len(out) - 1; {
			case int(positions[s]) <= upTo:
			case last >= 0 && out[last].Hi == s:
				out[last].Hi++
			default:
				out = append(out, engine.Span{Lo: s, Hi: s + 1})
			}
		}
	}
	return out
}

// append makes room for the next token in every head, which evicts what has to leave.
func (q *sequence) append(c *caches, id int32) (engine.Token, error) {
	t := engine.Token{ID: id, Logits: true, Lanes: make([][]engine.Lane, len(q.Plan.Layers))}
	if q.at >= c.prompt && len(q.classes) > 0 {
		q.cache.AppendClasses(q.classes[id])
	}
	group := c.model.Config.Heads / c.model.Config.KVHeads
	for l, row := range q.Plan.Layers {
		t.Lanes[l] = make([]engine.Lane, len(row))
		for k := range row {
			h := q.cache.Head(l, k)
			slot, err := h.Append()
			if err != nil {
				return t, fmt.Errorf("layer %d, KV head %d: %w", l, k, err)
			}
			lane := engine.Lane{Table: q.table(h, k), Write: slot, Key: q.at, Query: h.QueryPosition(), Rotate: h.Rotary()}
			if lane.Rotate != nil {
				lane.Key = -1
			}
			if w := q.Plan.Model.Window(l); w > 0 {
				lane.Spans = visible(h, q.at-w)
			} else {
				for _, s := range h.Spans() {
					lane.Spans = append(lane.Spans, engine.Span{Lo: s.From, Hi: s.To})
				}
			}
			if q.observe[l][k] || q.at < c.prompt && q.selects[l][k] {
				for range group {
					lane.Probabilities = append(lane.Probabilities, make([]float32, len(h.Positions())))
				}
			}
			t.Lanes[l][k] = lane
		}
	}
	return t, nil
}
