package plan

import (
	"cmp"
	"fmt"
	"math"
	"regexp"
	"slices"
	"sort"
)

// The functions below say which tokens of a prompt of n tokens a policy keeps once all of it has been processed, as
// rising positions, from what is known of the attention. They are pure: [HeadCache] calls them, and so may a server
// that has a cache of its own. Attention is a share in [0,1] per query; rows that are missing or too short count as 0,
// and a NaN as less than any number. Of two tokens with equal scores the one with the lower position is kept.

// Select returns the first SinkTokens and the last RecentTokens of n positions.
func (q Streaming) Select(n int) []int {
	sinks := max(min(q.SinkTokens, n), 0)
	recent := max(min(q.RecentTokens, n-sinks), 0)
	kept := make([]int, 0, sinks+recent)
	for i := range sinks {
		kept = append(kept, i)
	}
	for i := max(n-recent, sinks); i < n; i++ {
		kept = append(kept, i)
	}
	return kept
}

// Select returns what is kept of a prompt of n tokens: all of it where the budget has room, else the first SinkTokens,
// the last ObservationWindow, and of the others those with the highest votes (SnapKV, Li et al. 2024, section 4).
//
// votes has a row for each query head of the group: by position, from 0 up to the observation window at least, the
// attention received from the queries of the window, summed over them. Votes are first aggregated over the group and
// then pooled along the positions before the window; avg divides by the whole kernel, so that what lies outside counts
// as 0, and max passes over it. The order matters for the mean with a max pooling alone: all other pairs commute, but
// for rounding. With [AggregateUnion] each query head pools its own votes, and the heads take turns in the order of the
// group: each adds the best token in its own votes that is not kept yet, until the budget is full.
func (q TopK) Select(n int, votes [][]float32) []int { return q.selectFrom(0, n, votes) }

// selectFrom selects among the positions from low on; those before are gone.
func (q TopK) selectFrom(low, n int, votes [][]float32) []int {
	budget := q.Budget(n)
	if n-low <= budget {
		return span(low, n)
	}
	prefix := n - min(max(q.ObservationWindow, 0), n)
	first := max(min(q.SinkTokens, prefix), low)
	kept := span(low, first)
	count := max(budget-len(kept)-(n-max(prefix, low)), 0)
	if q.Aggregate == AggregateUnion {
		kept = append(kept, q.union(first, prefix, count, votes)...)
	} else {
		scores := q.Pool.Smooth(q.aggregate(prefix, votes))
		for _, i := range highest(scores[min(first, prefix):], count) {
			kept = append(kept, first+i)
		}
	}
	return append(kept, span(max(prefix, low), n)...)
}

// aggregate makes one row of votes of those of a group.
func (q TopK) aggregate(n int, votes [][]float32) []float64 {
	scores := make([]float64, n)
	for h, row := range votes {
		for i := range scores {
			v := valueAt(row, i)
			switch {
			case q.Aggregate != AggregateMax:
				scores[i] += v
			case h == 0 || cmp.Less(scores[i], v):
				scores[i] = v
			}
		}
	}
	if q.Aggregate != AggregateMax && len(votes) > 0 {
		for i := range scores {
			scores[i] /= float64(len(votes))
		}
	}
	return scores
}

// union has the query heads take turns.
func (q TopK) union(first, end, count int, votes [][]float32) []int {
	if count = min(count, end-first); count <= 0 {
		return nil
	}
	if len(votes) == 0 {
		votes = make([][]float32, 1)
	}
	// The best of a head that can be asked for: its turns, and what the others took before it.
	ranked := make([][]int, len(votes))
	for h, row := range votes {
		own := make([]float64, end)
		for i := range own {
			own[i] = valueAt(row, i)
		}
		own = q.Pool.Smooth(own)[first:]
		best := highest(own, count)
		slices.SortStableFunc(best, func(a, b int) int { return cmp.Compare(own[b], own[a]) })
		ranked[h] = best
	}
	kept := make([]int, 0, count)
	taken := make([]bool, end-first)
	for h := 0; len(kept) < count; h = (h + 1) % len(ranked) {
		best := ranked[h]
		for taken[best[0]] {
			best = best[1:]
		}
		taken[best[0]] = true
		kept = append(kept, first+best[0])
		ranked[h] = best[1:]
	}
	slices.Sort(kept)
	return kept
}

// Smooth pools along the positions with stride 1; what lies outside counts as 0 for avg and not at all for max. Without
// pooling it returns x itself.
func (p Pool) Smooth(x []float64) []float64 {
	if p.Kernel <= 1 || p.Kind != PoolMax && p.Kind != PoolAvg {
		return x
	}
	half := p.Kernel / 2
	out := make([]float64, len(x))
	if p.Kind == PoolAvg {
		for i := range x {
			var sum float64
			for _, v := range x[max(i-half, 0):min(i+half+1, len(x))] {
				sum += v
			}
			out[i] = sum / float64(p.Kernel)
		}
		return out
	}
	// The candidates for the highest so far, falling, so that each position is looked at twice whatever the kernel is.
	falling := make([]int, 0, len(x))
	next := 0
	for i := range x {
		for ; next < len(x) && next <= i+half; next++ {
			for len(falling) > 0 && !cmp.Less(x[next], x[falling[len(falling)-1]]) {
				falling = falling[:len(falling)-1]
			}
			falling = append(falling, next)
		}
		for falling[0] < i-half {
			falling = falling[1:]
		}
		out[i] = x[falling[0]]
	}
	return out
}

// Select returns what is kept of n tokens: those of the policy's classes, of all others the ceil(FrequentRatio * n)
// that received most attention, and the last ceil(LocalRatio * n) (Ge et al. 2023, section 3). received has a row for
// each query head of the group: by position the attention received from all queries so far; it is summed over the
// group. classes has the class of every position, "" for none; those that are missing have none.
//
// Where the policy's bound is exceeded, drop_oldest and drop_lowest drop from what is kept; refuse drops nothing, so the
// answer is longer than [FastGen.Bound], and the request is to be refused.
func (q FastGen) Select(n int, received [][]float32, classes []Class) []int {
	return q.selectFrom(0, n, sumOver(received, n), classes)
}

func (q FastGen) selectFrom(low, n int, scores []float64, classes []Class) []int {
	keep := make([]bool, max(n-low, 0))
	others := make([]float64, 0, len(keep))
	where := make([]int, 0, len(keep))
	for i := range keep {
		if p := low + i; p < len(classes) && classes[p] != "" && slices.Contains(q.Classes, classes[p]) {
			keep[i] = true
		} else {
			others, where = append(others, scores[p]), append(where, i)
		}
	}
	for _, i := range highest(others, ceilOf(q.FrequentRatio, n)) {
		keep[where[i]] = true
	}
	for i := max(n-ceilOf(q.LocalRatio, n)-low, 0); i < len(keep); i++ {
		keep[i] = true
	}
	kept := make([]int, 0, len(keep))
	for i, k := range keep {
		if k {
			kept = append(kept, low+i)
		}
	}
	bound := q.Bound(n)
	if len(kept) <= bound {
		return kept
	}
	switch q.Overflow {
	case DropOldest:
		kept = kept[len(kept)-bound:]
	case DropLowest:
		own := make([]float64, len(kept))
		for i, p := range kept {
			own[i] = scores[p]
		}
		best := highest(own, bound)
		for i, j := range best {
			kept[i] = kept[j]
		}
		kept = kept[:len(best)]
	}
	return kept
}

// Select returns the first SinkTokens, the last RecentTokens, and of the others the HeavyTokens that received most
// attention (Zhang et al. 2023). received has a row for each query head of the group: by position the attention
// received from all queries of the prompt; it is summed over the group.
//
// That is what is kept when a prompt has been attended to in full (prefill_end). While tokens come one by one, scores of
// evicted tokens are forgotten, and what is kept depends on the order: see [HeadCache.Append].
func (q H2O) Select(n int, received [][]float32) []int {
	return q.selectFrom(0, n, sumOver(received, n))
}

func (q H2O) selectFrom(low, n int, scores []float64) []int {
	if n-low <= q.SinkTokens+q.HeavyTokens+q.RecentTokens {
		return span(low, n)
	}
	first, last := max(q.SinkTokens, low), max(n-q.RecentTokens, low)
	last = max(first, last)
	kept := span(low, first)
	for _, i := range highest(scores[first:last], q.HeavyTokens) {
		kept = append(kept, first+i)
	}
	return append(kept, span(last, n)...)
}

// span lists the positions from low up to high, high not included.
func span(low, high int) []int {
	all := make([]int, max(high-low, 0))
	for i := range all {
		all[i] = low + i
	}
	return all
}

func valueAt(row []float32, i int) float64 {
	if i < len(row) {
		return float64(row[i])
	}
	return 0
}

// sumOver sums the rows of a group.
func sumOver(rows [][]float32, n int) []float64 {
	sums := make([]float64, max(n, 0))
	for _, row := range rows {
		for i, v := range row[:min(len(row), len(sums))] {
			sums[i] += float64(v)
		}
	}
	return sums
}

// highest returns the indices of the count highest scores in rising order; the lower index wins ties.
func highest(scores []float64, count int) []int {
	if count <= 0 {
		return nil
	}
	if count >= len(scores) {
		return span(0, len(scores))
	}
	least, ties := threshold(scores, count)
	kept := make([]int, 0, count)
	for i, x := range scores {
		switch key := rankOf(x); {
		case key > least:
			kept = append(kept, i)
		case key == least && ties > 0:
			kept = append(kept, i)
			ties--
		}
	}
	return kept
}

// rankOf maps a score to a number that compares as scores do: NaN below all, -0 as 0.
func rankOf(x float64) uint64 {
	if x != x {
		return 0
	}
	bits := math.Float64bits(x + 0) // -0 + 0 is 0
	if bits>>63 != 0 {
		return ^bits
	}
	return bits | 1<<63
}

// threshold finds the rank of the count-th highest score, and how many scores of that rank are among the count highest.
// It narrows the rank down byte by byte, so the time is linear in the number of scores whatever they are. 1 <= count <=
// len(scores).
func threshold(scores []float64, count int) (least uint64, ties int) {
	var known uint64 // bits of least that are found
	for shift := 56; shift >= 0; shift -= 8 {
		var number [256]int
		for _, x := range scores {
			if key := rankOf(x); key&known == least {
				number[byte(key>>shift)]++
			}
		}
		digit := 255
		for ; number[digit] < count; digit-- {
			count -= number[digit]
		}
		least |= uint64(digit) << shift
		known |= 0xff << shift
	}
	return least, count
}

// Pinned returns the positions of a prompt that the plan's pins keep in every head, rising. text is the text of the
// prompt, and starts[i] the offset in bytes at which token i begins in it, not falling; a token reaches to where the
// next one begins that begins elsewhere, so that tokens which share a character are kept or dropped together. A token
// that overlaps a match is kept, and so are the TokensAfter tokens behind the last one that does. Beyond MaxTokens a pin
// drops its lowest positions, or the error is an [OverflowError].
func (p *Plan) Pinned(text string, starts []int) ([]int, error) {
	for i, s := range starts {
		if s < 0 || s > len(text) || i > 0 && s < starts[i-1] {
			return nil, fmt.Errorf("token %d begins at byte %d of a text of %d bytes: %w", i, s, len(text), ErrArgument)
		}
	}
	if len(p.Pins) == 0 {
		return nil, nil
	}
	keep := make([]bool, len(starts))
	for i, pin := range p.Pins {
		re, err := regexp.Compile(pin.Pattern)
		if err != nil {
			return nil, fmt.Errorf("pin %d: %w: %w", i, ErrInvalid, err)
		}
		var kept []int
		for _, m := range re.FindAllStringIndex(text, -1) {
			// The tokens from the one that reaches beyond the begin of the match to the last that begins before its end.
			end := sort.SearchInts(starts, m[1])
			begin := sort.SearchInts(starts, m[0]+1)
			if m[0] < m[1] && begin > 0 {
				begin = sort.SearchInts(starts, starts[begin-1])
			}
			begin = min(begin, end)
			for t := max(begin, next(kept)); t < min(end+min(max(pin.TokensAfter, 0), len(starts)), len(starts)); t++ {
				kept = append(kept, t)
			}
		}
		if most := max(pin.MaxTokens, 0); len(kept) > most {
			if pin.Overflow == Refuse {
				return nil, &OverflowError{Where: fmt.Sprintf("pin %d", i), Tokens: len(kept), Bound: most}
			}
			kept = kept[len(kept)-most:]
		}
		for _, t := range kept {
			keep[t] = true
		}
	}
	var all []int
	for t, k := range keep {
		if k {
			all = append(all, t)
		}
	}
	return all, nil
}

// next is the first position behind a rising list.
func next(positions []int) int {
	if len(positions) == 0 {
		return 0
	}
	return positions[len(positions)-1] + 1
}
