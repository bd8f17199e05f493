package compile

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/pyramid"
)

// squeeze improves single heads of the best plan and tries fewer bytes with them, until that does not help.
func (s *search) squeeze(ctx context.Context) error {
	for range s.o.Rounds {
		before := s.best()
		if _, err := s.polish(ctx, before, true); err != nil {
			return err
		}
		if s.best().blocks < before.blocks {
			continue
		}
		// Stuck: a plan of a little fewer bytes may clear R once its heads are improved.
		var below []*point
		for _, p := range s.points {
			if p.blocks < before.blocks && float64(p.blocks) >= 0.93*float64(before.blocks) {
				below = append(below, p)
			}
		}
		if len(below) == 0 {
			return nil
		}
		if _, err := s.polish(ctx, ranked(below)[0], true); err != nil {
			return err
		}
		if s.best().blocks == before.blocks {
			return nil
		}
	}
	return nil
}

// smaller appends a plan scaled down: with less for the heads that can have less, and with fewer others too.
func (s *search) smaller(points []*point, p *point, factors ...float64) ([]*point, error) {
	for _, factor := range factors {
		target := min(int(factor*float64(p.blocks)), p.blocks-1)
		s.targets[target] = true
		for _, how := range []struct {
			name string
			less func([]plan.Policy, int) ([]plan.Policy, error)
		}{{"less of the rest", s.fit}, {"less of all", s.scale}} {
			policies, err := how.less(p.policies, target)
			if err != nil {
				return nil, err
			}
			if points, err = s.fitted(points, p.name+"; "+how.name, policies, target); err != nil {
				return nil, err
			}
		}
	}
	return points, nil
}

// shorten keeps a name that grew by many steps readable: its first step and its last.
func shorten(name string) string {
	const most = 100
	if len(name) <= most {
		return name
	}
	return name[:most/2] + "..." + name[len(name)-most/2:]
}

// scalable says how many blocks a policy has that can have more or fewer; false for full heads and FastGen's.
func (s *search) scalable(head int, q plan.Policy) (blocks int, ok bool) {
	switch q.(type) {
	case plan.Streaming, plan.TopK, plan.H2O:
		return s.blocks(s.layer(head), q), true
	}
	return 0, false
}

// sized is a policy with another number of blocks.
func (s *search) sized(head, blocks int, q plan.Policy) plan.Policy {
	switch q := q.(type) {
	case plan.Streaming:
		return s.streaming(s.layer(head), blocks, q)
	case plan.TopK:
		return s.topk(s.layer(head), blocks, q)
	case plan.H2O:
		return s.layout.h2o(s.layer(head), blocks, q)
	}
	return q
}

// least is the number of blocks that every scalable policy can have.
func (s *search) least() int {
	return max(s.leastTopK(s.topkBase(32)), ceilDiv(s.cheapBase().SinkTokens, s.cache.BlockSize)+1)
}

// cheapBase is the smallest streaming policy: 4 sinks, rounded up to a block, and recent tokens.
func (s *search) cheapBase() plan.Streaming {
	q := s.streamingBase()
	q.SinkTokens = ceilDiv(4, s.cache.BlockSize) * s.cache.BlockSize
	return q
}

// cheap is what a head gets that is worth nothing.
func (s *search) cheap(head int) plan.Policy {
	return s.streaming(s.layer(head), min(s.least(), s.most(head)), s.cheapBase())
}

// middle is what a head in full gets when it gives up its place: top-k with as much as the others have on average.
func (s *search) middle(head int, policies []plan.Policy) plan.Policy {
	sum, n := 0, 0
	for h, q := range policies {
		if blocks, ok := s.scalable(h, q); ok {
			sum += blocks
			n++
		}
	}
	blocks := s.least()
	if n > 0 {
		blocks = max(blocks, sum/n)
	}
	return s.topk(s.layer(head), blocks, s.topkBase(32))
}

// fit gives the scalable heads what the others leave of a target, in the proportions that they have. Where that is too
// little, heads that are not scalable give way, those of least worth first. nil where even that is not enough.
func (s *search) fit(policies []plan.Policy, target int) ([]plan.Policy, error) {
	out := slices.Clone(policies)
	least := s.least()
	var fixed []int // by rising worth
	rest, needed := target, 0
	for i := range s.worth {
		h := s.worth[len(s.worth)-1-i]
		if _, ok := s.scalable(h, out[h]); ok {
			needed += min(least, s.most(h))
			continue
		}
		fixed = append(fixed, h)
		rest -= s.blocks(s.layer(h), out[h])
	}
	for needed > rest {
		if len(fixed) == 0 {
			return nil, nil
		}
		h := fixed[0]
		fixed = fixed[1:]
		rest += s.blocks(s.layer(h), out[h])
		needed += min(least, s.most(h))
		out[h] = s.topk(s.layer(h), least, s.topkBase(32))
	}
	var heads []int
	var shares []float64
	some := false
	for h, q := range out {
		if blocks, ok := s.scalable(h, q); ok {
			heads = append(heads, h)
			shares = append(shares, float64(max(blocks-least, 0)))
			some = some || blocks > least
		}
	}
	if !some {
		shares = slices.Repeat([]float64{1}, len(heads))
	}
	blocks, _, err := s.divide(rest, heads, least, pyramid.Request{Mode: pyramid.Keys, Weights: shares, Floor: pyramid.NoFloor})
	if err != nil {
		return nil, err
	}
	for i, n := range blocks {
		out[heads[i]] = s.sized(heads[i], n, out[heads[i]])
	}
	return out, nil
}

// scale is fit with as much less for the heads that are not scalable: those of least worth become top-k.
func (s *search) scale(policies []plan.Policy, target int) ([]plan.Policy, error) {
	out := slices.Clone(policies)
	fixed := 0
	for h, q := range out {
		if _, ok := s.scalable(h, q); !ok {
			fixed += s.blocks(s.layer(h), q)
		}
	}
	may := int(float64(fixed) * float64(target) / float64(max(s.used(policies), 1)))
	for i := range s.worth {
		h := s.worth[len(s.worth)-1-i]
		if _, ok := s.scalable(h, out[h]); ok || fixed <= may {
			continue
		}
		fixed -= s.blocks(s.layer(h), out[h])
		out[h] = s.middle(h, policies)
		if n, ok := s.scalable(h, out[h]); !ok {
			fixed += n
		}
	}
	return s.fit(out, target)
}

// polish moves bytes between the heads of a plan: to those that lose least log-probability by having everything, from
// those that lose least by having next to nothing. It measures that for every head, then plans made by it, with less also
// of fewer bytes. It returns the best of those of as many bytes, or p itself.
func (s *search) polish(ctx context.Context, p *point, less bool) (*point, error) {
	var part, whole, much []int // in part, in full, in part but more than the least
	for _, h := range s.worth {
		switch n := s.blocks(s.layer(h), p.policies[h]); {
		case n >= s.most(h):
			whole = append(whole, h)
		default:
			part = append(part, h)
			if n > s.least() {
				much = append(much, h)
			}
		}
	}
	probes := []*probe{
		{what: "in full: heads", heads: part, change: func(int) plan.Policy { return plan.Full{} }},
		{what: "no longer in full: heads", heads: whole, change: func(h int) plan.Policy { return s.middle(h, p.policies) }},
		{what: "little: heads", heads: much, change: s.cheap},
	}
	if err := s.probe(ctx, p, probes...); err != nil {
		return p, err
	}
	gains, costs, little := probes[0].found, probes[1].found, probes[2].found
	s.learn(gains, costs)
	slices.SortStableFunc(gains, func(a, b valued) int { return cmp.Compare(b.worth, a.worth) })
	for _, list := range [][]valued{costs, little} {
		slices.SortStableFunc(list, func(a, b valued) int { return cmp.Compare(a.worth, b.worth) })
	}
	points, err := s.moves(p, gains, costs, little)
	if err != nil {
		return p, err
	}
	if less {
		for _, q := range slices.Clone(points) {
			if points, err = s.smaller(points, q, 0.92); err != nil {
				return p, err
			}
		}
		if points, err = s.smaller(points, p, 1-s.o.Tolerance, 0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.25); err != nil {
			return p, err
		}
	}
	if points, err = s.score(ctx, points); err != nil {
		return p, err
	}
	best := p
	for _, q := range points {
		if q.target == p.target && q.score.K >= best.score.K && q.loss < best.loss {
			best = q
		}
	}
	return best, nil
}

// probe is a change that is measured for every head alone.
type probe struct {
	what   string
	heads  []int
	change func(head int) plan.Policy
	found  []valued
}

// valued are heads with what they are worth: the loss in log-probability for each block that they would get or give.
type valued struct {
	heads []int
	worth float64
}

// probe measures a plan with heads changed alone, all probes together; heads are changed several at a time where there are
// more than a call has plans. Heads that a change does nothing to are left out.
func (s *search) probe(ctx context.Context, p *point, probes ...*probe) error {
	all := 0
	for _, x := range probes {
		all += len(x.heads)
	}
	size := max(1, ceilDiv(all, s.o.Plans))
	var points []*point
	var of []*probe
	var heads [][]int
	for _, x := range probes {
		for unit := range slices.Chunk(x.heads, size) {
			policies := slices.Clone(p.policies)
			for _, h := range unit {
				policies[h] = x.change(h)
			}
			if s.used(policies) == p.blocks {
				continue
			}
			name := fmt.Sprintf("%s of layer %d, KV head %d", x.what, s.layer(unit[0]), unit[0]%s.model.NKVHeads)
			q, err := s.point(name, p.blocks, policies, true)
			if err != nil {
				return err
			}
			points, of, heads = append(points, q), append(of, x), append(heads, unit)
		}
	}
	if _, err := s.score(ctx, points); err != nil {
		return err
	}
	for i, q := range points {
		of[i].found = append(of[i].found, valued{heads[i], (p.loss - q.loss) / float64(q.blocks-p.blocks)})
	}
	return nil
}

// learn orders the heads by what was measured; those that were not measured count as worth nothing, and heads of equal
// worth stay in the order that they had.
func (s *search) learn(measured ...[]valued) {
	worth := make([]float64, s.heads())
	for _, list := range measured {
		for _, v := range list {
			for _, h := range v.heads {
				worth[h] = v.worth
			}
		}
	}
	slices.SortStableFunc(s.worth, func(a, b int) int { return cmp.Compare(worth[b], worth[a]) })
}

// moves makes plans of p's bytes by what was measured: with so many heads more in full (gains, the most worth first), in
// part in the place of heads in full (costs, the least worth first), and with next to nothing for so many heads (little,
// the least worth first).
func (s *search) moves(p *point, gains, costs, little []valued) ([]*point, error) {
	counts := []int{0, 1, 2, 4, 8, 16, 32}
	var out []*point
	for _, up := range counts {
		if up > len(gains) || up > 0 && gains[up-1].worth <= 0 {
			break
		}
		for _, down := range counts {
			if up+down == 0 || down > len(little) {
				continue
			}
			// Many at once are tried with few others only where the numbers are alike.
			if up > 0 && down > 0 && (down > 8*up || up > 4*down) {
				continue
			}
			policies := slices.Clone(p.policies)
			for _, v := range little[:down] {
				for _, h := range v.heads {
					policies[h] = s.cheap(h)
				}
			}
			for _, v := range gains[:up] {
				for _, h := range v.heads {
					policies[h] = plan.Full{}
				}
			}
			name := fmt.Sprintf("%s; %d up, %d down", p.name, up, down)
			var err error
			if out, err = s.fitted(out, name, policies, p.target); err != nil {
				return nil, err
			}
			swapped := 0
			for _, v := range costs {
				if up == 0 || s.used(policies) <= p.target || v.worth >= gains[up-1].worth {
					break
				}
				for _, h := range v.heads {
					policies[h] = s.middle(h, p.policies)
				}
				swapped++
			}
			if swapped > 0 {
				if out, err = s.fitted(out, fmt.Sprintf("%s, %d out", name, swapped), policies, p.target); err != nil {
					return nil, err
				}
			}
		}
	}
	return out, nil
}

// fitted appends a plan that uses a target; none for no policies, or where they cannot keep as little.
func (s *search) fitted(points []*point, name string, policies []plan.Policy, target int) ([]*point, error) {
	if policies == nil {
		return points, nil
	}
	policies, err := s.fit(policies, target)
	if err != nil || policies == nil {
		return points, err
	}
	q, err := s.point(shorten(name), target, policies, false)
	if err != nil {
		return nil, err
	}
	return append(points, q), nil
}
