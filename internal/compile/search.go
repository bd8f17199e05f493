package compile

import "math"

// kind is what a KV head gets.
type kind int

const (
	kindFull kind = iota
	kindStreaming
	kindFastGen
	kindTopK
)

// option is a way to treat one KV head, with its cost and worth on the record.
type option struct {
	kind     kind
	step     int     // place in FastGen's lattice
	tokens   int     // kept at the context, rounded to blocks
	recovery float64 // attention mass on what is kept: mean over samples of the group's worst query head
}

// head is one KV head in the search.
type head struct {
	layer, kv int
	gate      float64
	full      int     // tokens of the full policy at the context, rounded to blocks
	low       *option // cheapest of streaming and FastGen that recovers the threshold, nil if none does
	// curve is the recovery of top-k by blocks kept: curve[b] with b whole blocks, curve[0] = 0.
	curve []float64
}

// state names one plan of the family that is searched. The family is a chain of stages, each dearer than the one
// before; within a stage one number grows.
type state struct {
	restored  int // so many heads get their low option back though it is dearer than top-k; first in the order first
	budget    int // average top-k budget in blocks
	extra     int // so many first layers have their budget of the next average already
	retrieval int // so many first heads of the order are kept in full
}

// family is everything that the search chooses from. It does not depend on what is asked for, which is why more bytes
// asked for never give fewer bytes kept.
type family struct {
	heads []head
	block int
	// rank lists the heads by their prior, the one that needs most first.
	rank []int
	// layers[b] are the layers' budgets in blocks when the average is b blocks.
	layers [][]int
	// least, start and base are averages in blocks: the smallest, the one with which heads are first kept in full, and
	// the pyramid's own.
	least, start, base int
	// open is the number of heads with a gate of at least one half.
	open int
}

// newFamily orders the heads by a prior and fixes the corners of the chain. layers[b] must be given for b from least to
// the blocks of a full cache; base is the pyramid's average.
func newFamily(heads []head, p prior, block int, layers [][]int, least, base int) *family {
	f := &family{heads: heads, block: block, rank: p.rank(), layers: layers, least: least, base: min(max(base, least), len(layers)-1)}
	f.start = max(least, f.base/4)
	for _, h := range heads {
		if h.gate >= 0.5 {
			f.open++
		}
	}
	return f
}

// topK is the option of a head at an average budget.
func (f *family) topK(h *head, budget, extra int) option {
	if h.layer < extra && budget+1 < len(f.layers) {
		budget++
	}
	blocks := f.layers[budget][h.layer]
	tokens := min(blocks*f.block, h.full)
	return option{kind: kindTopK, tokens: tokens, recovery: h.curve[min(blocks, len(h.curve)-1)]}
}

// at returns what every head gets in a state: everything to the first ones of the order; to the others their low
// option where it is not dearer than top-k or has been restored, else top-k.
func (f *family) at(s state) []option {
	out := make([]option, len(f.heads))
	restored := 0
	for i, r := range f.rank {
		h := &f.heads[r]
		if i < s.retrieval {
			out[r] = option{kind: kindFull, tokens: h.full, recovery: 1}
			continue
		}
		out[r] = f.topK(h, s.budget, s.extra)
		if h.low == nil {
			continue
		}
		if h.low.tokens <= out[r].tokens {
			out[r] = *h.low
		} else if restored < s.restored {
			restored++
			out[r] = *h.low
		}
	}
	return out
}

// chain lists the stages from cheap to dear. A stage is used for a request when its cheapest state fits.
//
// First all heads share little; then as many as have gates of at least one half are kept in full, one by one. Small
// budgets fare better with few heads in full than with more for all: measured, see docs/results.md. Then top-k budgets
// grow to the pyramid's own, then heads get what recovers the threshold where that is dearer, then the rest is kept in
// full in the order.
func (f *family) chain() [][]state {
	var squeeze, open, grow, restore, rest []state
	for b := f.least; b < f.start; b++ {
		squeeze = append(squeeze, state{budget: b})
	}
	for m := range f.open {
		open = append(open, state{budget: f.start, retrieval: m})
	}
	for b := f.start; b < f.base; b++ {
		grow = append(grow, state{budget: b, retrieval: f.open})
	}
	low := 0
	for _, r := range f.rank[f.open:] {
		if h := &f.heads[r]; h.low != nil && h.low.tokens > f.topK(h, f.base, 0).tokens {
			low++
		}
	}
	for r := range low {
		restore = append(restore, state{budget: f.base, retrieval: f.open, restored: r})
	}
	for m := f.open; m <= len(f.heads); m++ {
		rest = append(rest, state{budget: f.base, retrieval: m, restored: len(f.heads)})
	}
	return [][]state{squeeze, open, grow, restore, rest}
}

// tokens is the sum of what is kept at the context.
func tokens(options []option) int {
	sum := 0
	for _, o := range options {
		sum += o.tokens
	}
	return sum
}

// recovery is the mean or the least over the heads.
func recovery(options []option, least bool) float64 {
	sum, low := 0.0, math.Inf(1)
	for _, o := range options {
		sum += o.recovery
		low = min(low, o.recovery)
	}
	if least {
		return low
	}
	return sum / float64(len(options))
}

// forBudget returns the state that uses most of a number of tokens; met is false when even the cheapest needs more,
// which is then returned.
func (f *family) forBudget(target int) (best state, met bool) {
	stages := f.chain()
	for i := len(stages) - 1; i >= 0; i-- {
		most := -1
		for _, s := range stages[i] {
			// The last of equals: it keeps more heads in full, or restores more.
			if n := tokens(f.at(s)); n <= target && n >= most {
				best, most, met = s, n, true
			}
		}
		if !met {
			continue
		}
		return f.refine(f.fill(best, target), target), true
	}
	least := math.MaxInt
	for _, stage := range stages {
		for _, s := range stage {
			if n := tokens(f.at(s)); n < least {
				best, least = s, n
			}
		}
	}
	return best, false
}

// fill spends what is left, less than the next state of the chain needs, on larger top-k budgets.
func (f *family) fill(s state, target int) state {
	best, most := s, tokens(f.at(s))
	for b := s.budget + 1; b < len(f.layers); b++ {
		s.budget = b
		if n := tokens(f.at(s)); n <= target && n >= most {
			best, most = s, n
		}
	}
	return best
}

// refine spends what is left on the next average budget of some layers.
func (f *family) refine(s state, target int) state {
	best, most := s, tokens(f.at(s))
	if s.budget+1 >= len(f.layers) {
		return s
	}
	for extra := 1; extra < len(f.layers[s.budget]); extra++ {
		s.extra = extra
		if n := tokens(f.at(s)); n <= target && n > most {
			best, most = s, n
		}
	}
	return best
}

// forRecovery returns the cheapest state whose recovery is at least target; met is false when none is, and the best
// recovering state is returned.
func (f *family) forRecovery(target float64, least bool) (best state, met bool) {
	cheapest, most := math.MaxInt, math.Inf(-1)
	var fallback state
	for _, stage := range f.chain() {
		for _, s := range stage {
			options := f.at(s)
			r, n := recovery(options, least), tokens(options)
			if r >= target && n < cheapest {
				best, cheapest, met = s, n, true
			}
			if r > most {
				fallback, most = s, r
			}
		}
	}
	if !met {
		return fallback, false
	}
	return best, true
}
