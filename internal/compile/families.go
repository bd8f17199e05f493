package compile

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/pyramid"
)

// candidate is a family of plans, one for each budget, that the search chooses from.
type candidate struct {
	name string
	// single says that the family is a published method.
	single bool
	make   func(budget int) (*made, error)
}

// candidates lists the families that the inputs allow, published methods first. Streaming heads evict as the builder's
// options say.
func (b *builder) candidates() ([]*candidate, error) {
	var out []*candidate
	add := func(single bool, make func(int) (*made, error), name string, args ...any) {
		out = append(out, &candidate{fmt.Sprintf(name, args...), single, make})
	}
	for _, m := range methods() {
		usable := b.in.Gates != nil
		switch m.Name {
		case MethodStreamingLLM, MethodSnapKV, MethodPyramidKV, MethodH2O:
			usable = true
		case MethodFastGen:
			usable = b.in.FastGen != nil && len(b.in.Classes.Special) > 0 && len(b.in.Classes.Punctuation) > 0
		case MethodMeasured:
			usable = b.in.Budgets != nil
		}
		if m.Name != MethodFull && !m.Control && m.make != nil && usable {
			add(true, func(budget int) (*made, error) { return m.make(b, budget) }, "%s", m.Name)
		}
	}
	var c *compiler
	if b.in.Record != nil && b.in.Gates != nil && b.in.FastGen != nil && b.in.Budgets != nil {
		o := b.compileOptions()
		o.Budget = 1
		var err error
		if c, err = newCompiler(*b.in, o); err != nil {
			return nil, err
		}
		add(false, func(budget int) (*made, error) { return b.byRecovery(budget, c, false) }, "topk by recovery")
		add(false, func(budget int) (*made, error) { return b.byRecovery(budget, c, true) }, "topk by least recovery")
	}
	if b.in.Gates == nil {
		return out, nil
	}
	for _, order := range Orders() {
		p, err := priorOf(b.in.Gates, order)
		if err != nil {
			continue // the gates come without that score
		}
		if c != nil {
			f := newFamily(c.family.heads, p, c.family.block, c.family.layers, c.family.least, c.family.base)
			name := MethodRecipe + " by " + string(order)
			switch order {
			case OrderGate:
				name = MethodRecipeByGate
			case OrderRanks:
				name = MethodRecipe
			}
			add(order == OrderGate || order == OrderRanks, func(budget int) (*made, error) { return c.within(f, budget), nil }, "%s", name)
		}
		if order != OrderGate {
			add(false, func(budget int) (*made, error) { return b.byScore(budget, p) }, "topk by %s", order)
		}
		for _, f := range b.orderedBy(string(order), p) {
			if order != OrderGate || f.name != MethodDuo+" by gate" { // that is duo
				out = append(out, f)
			}
		}
	}
	return out, nil
}

// orderedBy lists the families that part heads by an order: its first heads in full, its last ones streaming.
func (b *builder) orderedBy(order string, p prior) []*candidate {
	var out []*candidate
	add := func(make func(int) (*made, error), name string, args ...any) {
		out = append(out, &candidate{fmt.Sprintf(name, args...), false, make})
	}
	add(func(budget int) (*made, error) { return b.split(budget, p) }, "%s by %s", MethodDuo, order)
	for _, share := range []float64{0.25, 0.5, 0.75} {
		for _, mode := range []pyramid.Mode{pyramid.Uniform, pyramid.Keys} {
			if mode.Measured() && b.in.Budgets == nil {
				continue
			}
			add(func(budget int) (*made, error) { return b.mixed(budget, mixture{prior: p, full: share, mode: mode}) },
				"%s, %g in full, topk %s", order, share, mode)
		}
		add(func(budget int) (*made, error) {
			return b.mixed(budget, mixture{prior: p, streaming: share, mode: pyramid.Uniform})
		},
			"%s, %g streaming, topk", order, share)
	}
	add(func(budget int) (*made, error) {
		return b.mixed(budget, mixture{prior: p, full: 0.5, streaming: 0.5, mode: pyramid.Uniform})
	},
		"%s, 0.5 in full, 0.5 streaming, topk", order)
	return out
}

// within returns the recipe's policies for at most budget blocks.
func (c *compiler) within(f *family, budget int) *made {
	s, met := f.forBudget(budget * c.o.BlockSize)
	options := f.at(s)
	if !met {
		return &made{needed: tokens(options) / c.o.BlockSize}
	}
	m := &made{uses: uses{true, true, true}}
	for i := range f.heads {
		m.policies = append(m.policies, c.policy(&f.heads[i], options[i]))
	}
	return m
}

// byScore gives heads top-k budgets in proportion to their scores.
func (b *builder) byScore(budget int, p prior) (*made, error) {
	base := b.topkBase(32)
	blocks, needed, err := b.share(budget, b.all(), b.leastTopK(base), pyramid.Keys, weights(p))
	if err != nil || blocks == nil {
		return &made{needed: needed}, err
	}
	return &made{policies: b.each(blocks, func(layer, n int) plan.Policy { return b.topk(layer, n, base) }), uses: uses{gates: true}}, nil
}

// byRecovery gives heads the top-k budgets that recover most of their attention on the record: in the sum, or the least
// of all heads.
func (b *builder) byRecovery(budget int, c *compiler, least bool) (*made, error) {
	base := b.topkBase(32)
	floor := b.leastTopK(base)
	blocks := make([]int, b.heads())
	m := &made{}
	for h := range blocks {
		blocks[h] = min(floor, b.most(h))
		m.needed += blocks[h]
	}
	left := budget - m.needed
	if left < 0 {
		return m, nil
	}
	if least {
		b.levelUp(blocks, left, c)
	} else {
		b.climb(blocks, left, c)
	}
	m.policies = b.each(blocks, func(layer, n int) plan.Policy { return b.topk(layer, n, base) })
	m.uses.budgets = true
	return m, nil
}

// levelUp gives blocks one by one to the head that recovers least, the lowest one on a tie.
func (b *builder) levelUp(blocks []int, left int, c *compiler) {
	curve := func(h int) float64 { return c.family.heads[h].curve[blocks[h]] }
	for ; left > 0; left-- {
		worst := -1
		for h := range blocks {
			if blocks[h] < b.most(h) && (worst < 0 || curve(h) < curve(worst)) {
				worst = h
			}
		}
		if worst < 0 {
			return
		}
		blocks[worst]++
	}
}

// climb gives blocks where the recovery grows most for each: along the concave hulls of the heads' curves, which is the
// best sum of all there is where no hull is cut.
func (b *builder) climb(blocks []int, left int, c *compiler) {
	type step struct {
		head, blocks int
		slope        float64
	}
	var steps []step
	for h := range blocks {
		curve := c.family.heads[h].curve
		slope := func(from, to int) float64 { return (curve[to] - curve[from]) / float64(to-from) }
		hull := []int{blocks[h]}
		for to := blocks[h] + 1; to <= b.most(h); to++ {
			// A corner goes when the way past it climbs no less.
			for n := len(hull); n > 1 && slope(hull[n-1], to) >= slope(hull[n-2], hull[n-1]); n = len(hull) {
				hull = hull[:n-1]
			}
			hull = append(hull, to)
		}
		for i := range hull[1:] {
			steps = append(steps, step{h, hull[i+1] - hull[i], slope(hull[i], hull[i+1])})
		}
	}
	slices.SortStableFunc(steps, func(x, y step) int { return cmp.Compare(y.slope, x.slope) })
	for _, s := range steps {
		n := min(s.blocks, left)
		blocks[s.head] += n
		left -= n
	}
}

// mixture says how heads are parted: the first ones of a prior in full, for a share of the blocks that are left when all
// others have the least; of the others a share streaming, the last ones; the rest top-k.
type mixture struct {
	prior           prior
	full, streaming float64
	mode            pyramid.Mode
}

func (b *builder) mixed(budget int, x mixture) (*made, error) {
	topk, stream := b.topkBase(32), b.streamingBase()
	least := b.leastTopK(topk)
	streaming := ceilDiv(stream.SinkTokens, b.cache.BlockSize) + ceilDiv(stream.RecentTokens, b.cache.BlockSize)
	rank := x.prior.rank()
	m := &made{policies: make([]plan.Policy, len(rank)), uses: uses{gates: true, budgets: x.mode.Measured()}}
	last := int(x.streaming * float64(len(rank)))
	middle, tail := rank[:len(rank)-last], rank[len(rank)-last:]
	for _, h := range tail {
		n := min(streaming, b.most(h))
		m.policies[h] = b.streaming(b.layer(h), n, stream)
		m.needed += n
	}
	for _, h := range middle {
		m.needed += min(least, b.most(h))
	}
	if m.needed > budget {
		return &made{needed: m.needed}, nil
	}
	first, spend := 0, int(x.full*float64(budget-m.needed))
	for first < len(middle) {
		n := b.most(middle[first]) - min(least, b.most(middle[first]))
		if n > spend {
			break
		}
		spend -= n
		first++
	}
	left := budget
	for _, h := range middle[:first] {
		m.policies[h] = plan.Full{}
		left -= b.most(h)
	}
	for _, h := range tail {
		left -= b.blocks(b.layer(h), m.policies[h])
	}
	rest := slices.Clone(middle[first:])
	slices.Sort(rest)
	var weights []float64
	if x.mode.Measured() {
		for _, h := range rest {
			weights = append(weights, b.in.Budgets.Measurement.Keys[b.layer(h)])
		}
	}
	blocks, _, err := b.share(left, rest, least, x.mode, weights)
	if err != nil {
		return nil, err
	}
	for i, n := range blocks {
		m.policies[rest[i]] = b.topk(b.layer(rest[i]), n, topk)
	}
	return m, nil
}
