package compile

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvprofile/kvprofile/distill"
)

// Order names the score that says which KV heads come first when some are to keep everything.
type Order string

// The orders.
const (
	// OrderGate goes by DuoAttention's gates; among equal gates (many are exactly 0) by the data-light score where the
	// gates come with it.
	OrderGate Order = "gate"
	// OrderDataLight goes by the score that needs no training (see distill.DataLight).
	OrderDataLight Order = "data-light"
	// OrderNeedleMass goes by the attention from answers to needles.
	OrderNeedleMass Order = "needle-mass"
	// OrderCopy goes by how often a head looks at the token that is to be copied (Retrieval Head, Wu et al. 2024).
	OrderCopy Order = "copy"
	// OrderRanks goes by the mean of a head's ranks in all scores that the gates come with, the gates among them. It is
	// OrderGate where they come alone.
	OrderRanks Order = "ranks"
)

// Orders lists all orders.
func Orders() []Order {
	return []Order{OrderGate, OrderDataLight, OrderNeedleMass, OrderCopy, OrderRanks}
}

// score is the name of the order's score in the gates.
func (o Order) score() string {
	switch o {
	case OrderDataLight:
		return distill.ScoreDataLight
	case OrderNeedleMass:
		return distill.ScoreNeedleMass
	case OrderCopy:
		return distill.ScoreCopy
	}
	return distill.ScoreGate
}

// prior holds a score of all KV heads, by layer and in it by KV head; larger means that the head needs more.
type prior struct {
	value []float64
	// second decides among heads of equal value; nil where nothing does.
	second []float64
}

// of is the order that gates allow.
func (o Order) of(g *distill.Gates) Order {
	if o == OrderRanks && g.Score(distill.ScoreDataLight) == nil && g.Score(distill.ScoreNeedleMass) == nil && g.Score(distill.ScoreCopy) == nil {
		return OrderGate
	}
	return o
}

// priorOf returns the scores of an order. "" is OrderGate. An order whose score the gates do not come with is an
// *OptionError.
func priorOf(g *distill.Gates, o Order) (prior, error) {
	switch o.of(g) {
	case "", OrderGate:
		p := prior{value: slices.Concat(g.Values...)}
		if s := g.Score(distill.ScoreDataLight); s != nil {
			p.second = slices.Concat(s...)
		}
		return p, nil
	case OrderRanks:
		sum := make([]float64, len(slices.Concat(g.Values...)))
		for _, name := range []string{distill.ScoreGate, distill.ScoreDataLight, distill.ScoreNeedleMass, distill.ScoreCopy} {
			if s := g.Score(name); s != nil {
				for i, r := range distill.MeanRanks(slices.Concat(s...)) {
					sum[i] += r
				}
			}
		}
		return prior{value: sum}, nil
	case OrderDataLight, OrderNeedleMass, OrderCopy:
		s := g.Score(o.score())
		if s == nil {
			return prior{}, &OptionError{"order", fmt.Sprintf("the gates come without the score %s; gates that were trained here have it", o.score())}
		}
		return prior{value: slices.Concat(s...)}, nil
	}
	return prior{}, &OptionError{"order", fmt.Sprintf("%q is none of %q", o, Orders())}
}

// compare orders heads a and b: negative when a comes first. Equal heads are ordered by layer, then KV head.
func (p prior) compare(a, b int) int {
	c := cmp.Compare(p.value[b], p.value[a])
	if c == 0 && p.second != nil {
		c = cmp.Compare(p.second[b], p.second[a])
	}
	return cmp.Or(c, cmp.Compare(a, b))
}

// equal reports whether the scores do not tell heads a and b apart.
func (p prior) equal(a, b int) bool {
	return p.value[a] == p.value[b] && (p.second == nil || p.second[a] == p.second[b])
}

// rank lists the heads, the one that needs most first.
func (p prior) rank() []int {
	rank := make([]int, len(p.value))
	for i := range rank {
		rank[i] = i
	}
	slices.SortFunc(rank, p.compare)
	return rank
}

// tied lists, in order of layer and KV head, the heads that are equal to the last of the first n of a ranking, where
// some of them are not among these; none otherwise.
func (p prior) tied(rank []int, n int) []int {
	if n <= 0 || n >= len(rank) || !p.equal(rank[n-1], rank[n]) {
		return nil
	}
	var out []int
	for _, i := range rank {
		if p.equal(i, rank[n]) {
			out = append(out, i)
		}
	}
	return out
}
