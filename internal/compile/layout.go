package compile

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"

	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/pyramid"
)

// layout is a cache of one sequence at one length: what its KV heads can hold. Lists over heads go by layer and in it
// by KV head.
type layout struct {
	model   plan.Model
	cache   plan.Cache
	context int   // prompt tokens
	full    []int // by layer: blocks of a KV head that keeps everything
	total   int   // blocks of all KV heads that keep everything
}

func newLayout(m plan.Model, c plan.Cache, context int) *layout {
	x := &layout{model: m, cache: c, context: context}
	for l := range m.NLayers {
		x.full = append(x.full, x.blocks(l, plan.Full{}))
		x.total += x.full[l] * m.NKVHeads
	}
	return x
}

// heads is the number of KV heads of all layers.
func (x *layout) heads() int { return x.model.NLayers * x.model.NKVHeads }

// layer is the layer of a head.
func (x *layout) layer(head int) int { return head / x.model.NKVHeads }

// most is the number of blocks of a head that keeps everything.
func (x *layout) most(head int) int { return x.full[x.layer(head)] }

// blocks is what a policy keeps on a layer at the context.
func (x *layout) blocks(layer int, q plan.Policy) int {
	return x.cache.Kept(q, plan.At{PromptTokens: x.context, Window: x.model.Window(layer)}).Blocks
}

// used is what all heads keep at the context, in blocks.
func (x *layout) used(policies []plan.Policy) int {
	sum := 0
	for i, q := range policies {
		sum += x.blocks(x.layer(i), q)
	}
	return sum
}

// target is the number of blocks that a share of the full cache's bytes is, rounded down.
func (x *layout) target(budget float64) int {
	return int(math.Floor(budget*float64(x.total) + 1e-6))
}

// share divides blocks among heads: least is what each gets at least, most what it can hold. Everything is given out,
// but for what nobody can hold. No blocks and those that are needed are returned where the budget has not the least for
// all.
func (x *layout) share(budget int, heads []int, least int, mode pyramid.Mode, weights []float64) (blocks []int, needed int, err error) {
	return x.divide(budget, heads, least, pyramid.Request{Mode: mode, Weights: weights})
}

// divide is share by a request of which mode, weights and floor are given.
func (x *layout) divide(budget int, heads []int, least int, q pyramid.Request) (blocks []int, needed int, err error) {
	block := x.cache.BlockSize
	limits := make([]int, len(heads))
	for i, h := range heads {
		needed += min(least, x.most(h))
		limits[i] = x.model.Window(x.layer(h))
	}
	if len(heads) == 0 || needed > budget {
		return nil, needed, nil
	}
	q.Layers, q.Length, q.Total, q.Window, q.Block, q.Limits = len(heads), x.context, budget*block, least*block, block, limits
	r, err := pyramid.Allocate(q)
	if err != nil {
		return nil, 0, err
	}
	for _, tokens := range r.Budgets {
		blocks = append(blocks, tokens/block)
	}
	return blocks, needed, nil
}

// byLayer divides blocks among layers, and gives the KV heads of a layer the same; the blocks that are then left, fewer
// than a layer has KV heads, go to the first heads that can hold one more. schedule divides tokens of one KV head per
// layer.
func (x *layout) byLayer(budget, least int, schedule func(q pyramid.Request) (pyramid.Result, error)) (blocks []int, needed int, err error) {
	for h := range x.heads() {
		needed += min(least, x.most(h))
	}
	if needed > budget {
		return nil, needed, nil
	}
	block, kvHeads := x.cache.BlockSize, x.model.NKVHeads
	r, err := schedule(pyramid.Request{Layers: x.model.NLayers, Length: x.context, Total: budget / kvHeads * block, Block: block, Limits: x.model.SlidingWindow})
	if err != nil {
		return nil, 0, err
	}
	left := budget
	for h := range x.heads() {
		blocks = append(blocks, r.Budgets[x.layer(h)]/block)
		left -= blocks[h]
	}
	for h := range blocks {
		if left > 0 && blocks[h] < x.most(h) {
			blocks[h]++
			left--
		}
	}
	return blocks, needed, nil
}

// all lists all heads.
func (x *layout) all() []int {
	out := make([]int, x.heads())
	for i := range out {
		out[i] = i
	}
	return out
}

// streaming is a streaming policy of so many blocks; everything where the layer holds no more.
func (x *layout) streaming(layer, blocks int, base plan.Streaming) plan.Policy {
	if blocks >= x.full[layer] {
		return plan.Full{}
	}
	base.RecentTokens = (blocks - ceilDiv(base.SinkTokens, x.cache.BlockSize)) * x.cache.BlockSize
	return base
}

// topk is a top-k policy of so many blocks; everything where the layer holds no more.
func (x *layout) topk(layer, blocks int, base plan.TopK) plan.Policy {
	if blocks >= x.full[layer] {
		return plan.Full{}
	}
	base.BudgetTokens = blocks * x.cache.BlockSize
	return base
}

// leastTopK is the smallest budget in blocks that a top-k policy can have: window, sinks and one token more.
func (x *layout) leastTopK(q plan.TopK) int {
	return ceilDiv(q.ObservationWindow+q.SinkTokens+1, x.cache.BlockSize)
}

// h2o is a policy of so many blocks, half of it for heavy tokens; everything where the layer holds no more.
func (x *layout) h2o(layer, blocks int, base plan.H2O) plan.Policy {
	if blocks >= x.full[layer] {
		return plan.Full{}
	}
	tokens := blocks*x.cache.BlockSize - base.SinkTokens
	base.RecentTokens = tokens / 2
	base.HeavyTokens = tokens - base.RecentTokens
	return base
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

// assemble makes a plan without totals and evidence of the heads' policies, named by what they are.
func assemble(in *Inputs, cache plan.Cache, policies []plan.Policy) *plan.Plan {
	p := &plan.Plan{Format: plan.Format, Version: plan.Version, Tool: in.Tool, Model: in.Model, Cache: cache,
		Ties:     plan.Ties{Heads: plan.LowerLayerThenKVHead, Tokens: plan.LowerPosition},
		Policies: map[string]plan.Policy{}, Layers: make([][]string, in.Model.NLayers)}
	streams := map[plan.Policy]bool{}
	for _, q := range policies {
		if s, ok := q.(plan.Streaming); ok {
			streams[s] = true
		}
	}
	for i, q := range policies {
		name := policyName(q, len(streams) > 1)
		// Policies of one name differ in what the name does not say: the later ones are numbered.
		for n := 2; p.Policies[name] != nil && !reflect.DeepEqual(p.Policies[name], q); n++ {
			name = policyName(q, len(streams) > 1) + "-" + strconv.Itoa(n)
		}
		p.Policies[name] = q
		l := i / in.Model.NKVHeads
		p.Layers[l] = append(p.Layers[l], name)
	}
	var t plan.TokenClasses
	for _, q := range p.Policies {
		f, ok := q.(plan.FastGen)
		if !ok {
			continue
		}
		if slices.Contains(f.Classes, plan.ClassSpecial) {
			t.Special = in.Classes.Special
		}
		if slices.Contains(f.Classes, plan.ClassPunctuation) {
			t.Punctuation = in.Classes.Punctuation
		}
	}
	if t.Special != nil || t.Punctuation != nil {
		p.TokenClasses = &t
	}
	return p
}

// policyName names a policy; sized puts the size of a streaming policy into its name.
func policyName(q plan.Policy, sized bool) string {
	switch q := q.(type) {
	case plan.Streaming:
		if sized {
			return fmt.Sprintf("stream-%d-%d", q.SinkTokens, q.RecentTokens)
		}
		return "stream"
	case plan.TopK:
		if q.BudgetRatio > 0 {
			return "topk-" + strconv.FormatFloat(q.BudgetRatio, 'f', 5, 64)
		}
		return "topk-" + strconv.Itoa(q.BudgetTokens)
	case plan.H2O:
		return "h2o-" + strconv.Itoa(q.SinkTokens+q.HeavyTokens+q.RecentTokens)
	case plan.FastGen:
		switch {
		case q.LocalRatio > 0:
			return "frequent-local"
		case q.FrequentRatio > 0:
			return "frequent"
		case len(q.Classes) > 1:
			return "special-punctuation"
		}
		return "special"
	}
	return "full"
}

// addTotals states the totals for lengths in tokens, which are sorted and made distinct.
func addTotals(p *plan.Plan, lengths []int) {
	lengths = slices.Clone(lengths)
	slices.Sort(lengths)
	for _, n := range slices.Compact(lengths) {
		p.Totals = append(p.Totals, p.ComputeTotals(n, 0))
	}
}
