package compile

import (
	"math"
	"slices"
)

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
	relieved  int // so many heads with the lowest gates lose their low option to top-k, where that is cheaper
	budget    int // average top-k budget in blocks
	extra     int // so many first layers have their budget of the next average already
	retrieval int // so many heads with the highest gates are kept in full
}

// family is everything that the search chooses from. It does not depend on what is asked for, which is why more bytes
// asked for never give fewer bytes kept.
type family struct {
	heads []head
	block int
	// rank lists the heads by falling gate; ties by layer, then KV head.
	rank []int
	// layers[b] are the layers' budgets in blocks when the average is b blocks. Entry 0 is unused.
	layers [][]int
	// least, start and base are averages in blocks: the smallest, the one under which relief begins, and the pyramid's own.
	least, start, base int
}

// newFamily orders the heads and fixes the corners of the chain. layers[b] must be given for b from least to the
// blocks of a full cache; base is the pyramid's average.
func newFamily(heads []head, block int, layers [][]int, least, base int) *family {
	f := &family{heads: heads, block: block, layers: layers, least: least, base: min(max(base, least), len(layers)-1)}
	f.start = max(least, f.base/4)
	f.rank = make([]int, len(heads))
	for i := range f.rank {
		f.rank[i] = i
	}
	slices.SortStableFunc(f.rank, func(a, b int) int {
		x, y := &heads[a], &heads[b]
		switch {
		case x.gate != y.gate:
			if x.gate > y.gate {
				return -1
			}
			return 1
		case x.layer != y.layer:
			return x.layer - y.layer
		}
		return x.kv - y.kv
	})
	return f
}

// topK is the option of a head at an average budget.
func (f *family) topK(h *head, budget, extra int) option {
	if h.layer < extra {
		budget++
	}
	blocks := f.layers[budget][h.layer]
	tokens := min(blocks*f.block, h.full)
	return option{kind: kindTopK, tokens: tokens, recovery: h.curve[min(blocks, len(h.curve)-1)]}
}

// at returns what every head gets in a state.
func (f *family) at(s state) []option {
	out := make([]option, len(f.heads))
	relieved := 0
	for i := len(f.rank) - 1; i >= 0; i-- { // lowest gate first
		h := &f.heads[f.rank[i]]
		o := &out[f.rank[i]]
		switch {
		case i < s.retrieval:
			*o = option{kind: kindFull, tokens: h.full, recovery: 1}
		case h.low == nil:
			*o = f.topK(h, s.budget, s.extra)
		case relieved < s.relieved && f.topK(h, f.start, 0).tokens < h.low.tokens:
			relieved++
			*o = f.topK(h, s.budget, s.extra)
		default:
			*o = *h.low
		}
	}
	return out
}

// reliefs is the number of heads that relief can change.
func (f *family) reliefs() int {
	n := 0
	for i := range f.heads {
		if h := &f.heads[i]; h.low != nil && f.topK(h, f.start, 0).tokens < h.low.tokens {
			n++
		}
	}
	return n
}

// chain lists the stages from cheap to dear. A stage is used for a request when its cheapest state fits.
func (f *family) chain() [][]state {
	all := f.reliefs()
	var squeeze, relief, grow, retrieve []state
	for b := f.least; b < f.start; b++ {
		squeeze = append(squeeze, state{relieved: all, budget: b})
	}
	for r := all; r > 0; r-- {
		relief = append(relief, state{relieved: r, budget: f.start})
	}
	for b := f.start; b < f.base; b++ {
		grow = append(grow, state{budget: b})
	}
	for m := 0; m <= len(f.heads); m++ {
		retrieve = append(retrieve, state{budget: f.base, retrieval: m})
	}
	return [][]state{squeeze, relief, grow, retrieve}
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
			// The last of equals: it keeps more heads in full, or relieves fewer.
			if n := tokens(f.at(s)); n <= target && n >= most {
				best, most, met = s, n, true
			}
		}
		if !met {
			continue
		}
		if i == len(stages)-1 {
			best = f.fill(best, target)
		}
		return f.refine(best, target), true
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

// fill spends what is left, less than one more full head needs, on larger top-k budgets.
func (f *family) fill(s state, target int) state {
	best, most := s, tokens(f.at(s))
	for b := f.base + 1; b < len(f.layers); b++ {
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
