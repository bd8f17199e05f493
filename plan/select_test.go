package plan

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"sort"
	"strings"
	"testing"
)

// The references here are written from the definitions in docs/plan.md, as plainly as possible, and share nothing with
// the package but its types.

// refTop returns the count positions of from with the highest scores; sort.SliceStable keeps the lower position first.
func refTop(from []int, score func(p int) float64, count int) map[int]bool {
	sorted := slices.Sorted(slices.Values(from))
	sort.SliceStable(sorted, func(i, j int) bool { return score(sorted[i]) > score(sorted[j]) })
	top := map[int]bool{}
	for i, p := range sorted {
		if i < count {
			top[p] = true
		}
	}
	return top
}

func refSorted(set map[int]bool) []int {
	all := []int{}
	for p, in := range set {
		if in {
			all = append(all, p)
		}
	}
	sort.Ints(all)
	return all
}

func refBudget(q TopK, n int) int {
	if q.BudgetTokens > 0 {
		return q.BudgetTokens
	}
	return max(int(math.Ceil(q.BudgetRatio*float64(n))), q.SinkTokens+q.ObservationWindow+1)
}

// refPool pools as torch.nn.functional.{avg,max}_pool1d do with stride 1 and padding kernel/2.
func refPool(x []float64, p Pool) []float64 {
	out := make([]float64, len(x))
	for i := range x {
		sum, high := 0.0, math.Inf(-1)
		for d := -(p.Kernel / 2); d <= p.Kernel/2; d++ {
			if i+d >= 0 && i+d < len(x) {
				sum += x[i+d]
				high = math.Max(high, x[i+d])
			}
		}
		switch p.Kind {
		case PoolNone:
			out[i] = x[i]
		case PoolAvg:
			out[i] = sum / float64(p.Kernel)
		case PoolMax:
			out[i] = high
		}
	}
	return out
}

func refTopK(q TopK, n, low int, votes [][]float32) []int {
	keep := map[int]bool{}
	budget := refBudget(q, n)
	if n-low <= budget {
		for p := low; p < n; p++ {
			keep[p] = true
		}
		return refSorted(keep)
	}
	var rest []int
	for p := low; p < n; p++ {
		if p < q.SinkTokens || p >= n-q.ObservationWindow {
			keep[p] = true
		} else {
			rest = append(rest, p)
		}
	}
	left := budget - len(keep)
	prefix := n - q.ObservationWindow
	if q.Aggregate == AggregateUnion {
		for turn := 0; left > 0 && len(rest) > 0; turn++ {
			row := make([]float64, prefix)
			for p := range row {
				row[p] = float64(votes[turn%len(votes)][p])
			}
			pooled := refPool(row, q.Pool)
			for p := range refTop(rest, func(p int) float64 { return pooled[p] }, 1) {
				keep[p] = true
				rest = slices.DeleteFunc(rest, func(x int) bool { return x == p })
			}
			left--
		}
		return refSorted(keep)
	}
	one := make([]float64, prefix)
	for p := range one {
		sum, high := 0.0, math.Inf(-1)
		for _, row := range votes {
			sum += float64(row[p])
			high = math.Max(high, float64(row[p]))
		}
		if one[p] = sum / float64(len(votes)); q.Aggregate == AggregateMax {
			one[p] = high
		}
	}
	pooled := refPool(one, q.Pool)
	for p := range refTop(rest, func(p int) float64 { return pooled[p] }, left) {
		keep[p] = true
	}
	return refSorted(keep)
}

// refFastGen applies the policy to the tokens held when n came; newest is kept in any case, -1 for none such.
func refFastGen(q FastGen, n int, held []int, score func(p int) float64, class func(p int) Class, newest int) (kept []int, refused bool) {
	keep := map[int]bool{}
	var rest []int
	for _, p := range held {
		if slices.Contains(q.Classes, class(p)) {
			keep[p] = true
		} else {
			rest = append(rest, p)
		}
	}
	for p := range refTop(rest, score, int(math.Ceil(q.FrequentRatio*float64(n)))) {
		keep[p] = true
	}
	for _, p := range held {
		if p >= n-int(math.Ceil(q.LocalRatio*float64(n))) || p == newest {
			keep[p] = true
		}
	}
	bound := n
	if q.MaxTokens > 0 {
		bound = min(bound, q.MaxTokens)
	}
	if q.MaxRatio > 0 {
		bound = min(bound, int(math.Ceil(q.MaxRatio*float64(n))))
	}
	kept = refSorted(keep)
	if len(kept) <= bound {
		return kept, false
	}
	switch q.Overflow {
	case Refuse:
		return nil, true
	case DropOldest:
		return kept[len(kept)-bound:], false
	}
	infinite := func(p int) float64 {
		if p == newest {
			return math.Inf(1)
		}
		return score(p)
	}
	return refSorted(refTop(kept, infinite, bound)), false
}

// refH2O applies the policy to the tokens held when n came.
func refH2O(q H2O, n int, held []int, score func(p int) float64) []int {
	keep := map[int]bool{}
	var rest []int
	for _, p := range held {
		if p < q.SinkTokens || p >= n-q.RecentTokens {
			keep[p] = true
		} else {
			rest = append(rest, p)
		}
	}
	for p := range refTop(rest, score, q.HeavyTokens) {
		keep[p] = true
	}
	return refSorted(keep)
}

func refSpan(low, n int) []int {
	all := []int{}
	for p := low; p < n; p++ {
		all = append(all, p)
	}
	return all
}

// attentionOf makes random attention in eighths, so that sums are exact and ties are frequent.
func attentionOf(r *rand.Rand, group, n int) [][]float32 {
	levels := 1 + r.IntN(40)
	rows := make([][]float32, group)
	for h := range rows {
		rows[h] = make([]float32, n)
		for i := range rows[h] {
			rows[h][i] = float32(r.IntN(levels)) / 8
		}
	}
	return rows
}

func classesOf(r *rand.Rand, n int) []Class {
	classes := make([]Class, n)
	share := r.IntN(12)
	for i := range classes {
		if r.IntN(20) < share {
			classes[i] = []Class{ClassSpecial, ClassPunctuation}[r.IntN(2)]
		}
	}
	return classes
}

// variedPolicy is a random policy with everything that may vary in it.
func variedPolicy(r *rand.Rand) Policy {
	positions := []Positions{PositionsOriginal, PositionsCacheSlot}[r.IntN(2)]
	switch q := randomPolicy(r).(type) {
	case Streaming:
		if r.IntN(4) == 0 {
			q.SinkTokens = 0
		}
		q.Positions = positions
		return q
	case TopK:
		q.Pool = Pool{[]PoolKind{PoolMax, PoolAvg}[r.IntN(2)], 1 + 2*r.IntN(6)}
		if r.IntN(4) == 0 {
			q.Pool = Pool{PoolNone, 1}
		}
		q.Aggregate = []Aggregate{AggregateMean, AggregateMax, AggregateUnion}[r.IntN(3)]
		q.Positions = positions
		return q
	case FastGen:
		if r.IntN(2) == 0 {
			q.Classes = []Class{ClassSpecial, ClassPunctuation}
		}
		if q.Overflow != "" {
			q.Overflow = []Overflow{DropOldest, DropLowest, DropLowest, Refuse}[r.IntN(4)]
		}
		q.Positions = positions
		return q
	case H2O:
		q.Positions = positions
		return q
	default:
		return q
	}
}

func TestSelect(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	refused := 0
	for range 20000 {
		q := variedPolicy(r)
		n := r.IntN(120)
		group := []int{1, 2, 4}[r.IntN(3)]
		attention := attentionOf(r, group, n)
		classes := classesOf(r, r.IntN(n+1))
		class := func(p int) Class {
			if p < len(classes) {
				return classes[p]
			}
			return ""
		}
		score := func(p int) float64 {
			sum := 0.0
			for _, row := range attention {
				sum += float64(row[p])
			}
			return sum
		}
		var got, want []int
		switch q := q.(type) {
		case Streaming:
			got = q.Select(n)
			for p := range n {
				if p < q.SinkTokens || p >= n-q.RecentTokens {
					want = append(want, p)
				}
			}
		case TopK:
			votes := attention
			if r.IntN(2) == 0 { // the window's own positions may be missing
				votes = nil
				for _, row := range attention {
					votes = append(votes, row[:max(n-q.ObservationWindow, 0)])
				}
			}
			got, want = q.Select(n, votes), refTopK(q, n, 0, attention)
			if len(got) != min(n, q.Budget(n)) {
				t.Errorf("%+v keeps %d of %d", q, len(got), n)
			}
		case FastGen:
			got = q.Select(n, attention, classes)
			var no bool
			if want, no = refFastGen(q, n, refSpan(0, n), score, class, -1); no {
				refused++
				if len(got) <= q.Bound(n) {
					t.Errorf("%+v keeps %d of %d, which should exceed its bound %d", q, len(got), n, q.Bound(n))
				}
				continue
			}
		case H2O:
			got, want = q.Select(n, attention), refH2O(q, n, refSpan(0, n), score)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%T%+v of %d tokens, group of %d:\n%v, want\n%v", q, q, n, group, got, want)
		}
	}
	if refused < 50 {
		t.Errorf("%d prompts were refused: the test looks at too few", refused)
	}
}

// An example small enough to be done by hand: with a group of two, max pooling after the mean and before it differ.
func TestTopKByHand(t *testing.T) {
	q := TopK{BudgetTokens: 4, ObservationWindow: 1, SinkTokens: 1, Pool: Pool{PoolMax, 3}, Aggregate: AggregateMean}
	votes := [][]float32{
		{9, 0, 4, 0, 0, 0, 0, 7, 0, 0},
		{0, 0, 0, 4, 0, 0, 0, 0, 0, 0},
	}
	// Mean: 4.5 0 2 2 0 0 0 3.5 0 | pooled: 4.5 4.5 2 2 2 0 3.5 3.5 3.5; position 0 is a sink, 9 the window.
	if got, want := q.Select(10, votes), []int{0, 1, 6, 9}; !slices.Equal(got, want) {
		t.Errorf("mean keeps %v, want %v", got, want)
	}
	// Pooled before, the mean would be 4.5 6.5 4 4 2 ...: positions 1 and 2.
	q.Aggregate = AggregateUnion
	// The first head pools to 9 9 4 4 0 0 7 7 7 and takes 1; the second to 0 0 4 4 4 0 0 0 0 and takes 2.
	if got, want := q.Select(10, votes), []int{0, 1, 2, 9}; !slices.Equal(got, want) {
		t.Errorf("union keeps %v, want %v", got, want)
	}
	q.Aggregate, q.Pool = AggregateMax, Pool{PoolAvg, 3}
	// Max: 9 0 4 4 0 0 0 7 0; the mean of three: 3 4.33 2.67 2.67 1.33 0 2.33 2.33 2.33.
	if got, want := q.Select(10, votes), []int{0, 1, 2, 9}; !slices.Equal(got, want) {
		t.Errorf("max keeps %v, want %v", got, want)
	}
}

// For all pairs but mean with max the order of aggregation and pooling does not matter.
func TestAggregationAndPoolingCommute(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	for range 500 {
		q := TopK{BudgetTokens: 20, ObservationWindow: 4, Pool: Pool{PoolAvg, 1 + 2*r.IntN(4)}, Aggregate: AggregateMean}
		n, group := 30+r.IntN(60), 4
		votes := attentionOf(r, group, n)
		perHead := make([][]float32, group)
		if r.IntN(2) == 0 {
			q.Aggregate, q.Pool.Kind = AggregateMax, PoolMax
		} else {
			q.Pool.Kernel = 1 + 2*r.IntN(2)
		}
		for h, row := range votes {
			x := make([]float64, n-q.ObservationWindow)
			for i := range x {
				x[i] = float64(row[i])
				if q.Pool.Kind == PoolAvg {
					x[i] *= float64(q.Pool.Kernel) // exact means
					votes[h][i] *= float32(q.Pool.Kernel)
				}
			}
			for _, v := range refPool(x, q.Pool) {
				perHead[h] = append(perHead[h], float32(v))
			}
		}
		unpooled := q
		unpooled.Pool = Pool{PoolNone, 1}
		if a, b := q.Select(n, votes), unpooled.Select(n, perHead); !slices.Equal(a, b) {
			t.Fatalf("%+v: %v, pooled before %v", q, a, b)
		}
	}
}

func TestSelectOfBadInput(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	q := TopK{BudgetTokens: 3, ObservationWindow: 1, Pool: Pool{PoolMax, 3}, Aggregate: AggregateMean}
	for _, votes := range [][][]float32{nil, {}, {nil}, {{1}}, {{nan, nan, nan, nan, nan, nan}}, {{inf, -inf, nan, 0}, nil}} {
		for _, a := range []Aggregate{AggregateMean, AggregateMax, AggregateUnion, ""} {
			for _, k := range []PoolKind{PoolMax, PoolAvg, PoolNone, ""} {
				q.Aggregate, q.Pool.Kind = a, k
				for n := -1; n < 9; n++ {
					if got := q.Select(n, votes); len(got) != min(max(n, 0), 3) || !slices.IsSorted(got) {
						t.Errorf("%+v of %v: %v", q, votes, got)
					}
				}
			}
		}
	}
	// What is no number loses against every number.
	q = TopK{BudgetTokens: 3, ObservationWindow: 1, Pool: Pool{PoolNone, 1}, Aggregate: AggregateMean}
	if got := q.Select(6, [][]float32{{nan, -1, nan, nan, -2}}); !slices.Equal(got, []int{1, 4, 5}) {
		t.Errorf("beside NaN are kept %v", got)
	}
	h := H2O{SinkTokens: 1, HeavyTokens: 1, RecentTokens: 1}
	f := FastGen{FrequentRatio: .5, LocalRatio: .2}
	for n := -1; n < 9; n++ {
		for _, got := range [][]int{h.Select(n, nil), h.Select(n, [][]float32{{1}}), f.Select(n, nil, nil), f.Select(n, [][]float32{{nan}}, classesOf(rand.New(rand.NewPCG(1, 1)), 20)),
			(Streaming{SinkTokens: 2, RecentTokens: 3}).Select(n)} {
			if len(got) > max(n, 0) || !slices.IsSorted(got) {
				t.Errorf("of %d are kept %v", n, got)
			}
		}
	}
}

// refHighest sorts.
func TestHighest(t *testing.T) {
	r := rand.New(rand.NewPCG(15, 16))
	special := []float64{0, math.Copysign(0, -1), 1, -1, math.Inf(1), math.Inf(-1), math.MaxFloat64, 5e-324, -5e-324, 1 + 1e-16}
	for range 3000 {
		x := make([]float64, r.IntN(60))
		for i := range x {
			switch r.IntN(3) {
			case 0:
				x[i] = special[r.IntN(len(special))]
			case 1:
				x[i] = r.NormFloat64()
			default:
				x[i] = float64(r.IntN(3))
			}
		}
		count := r.IntN(len(x) + 2)
		want := refSorted(refTop(refSpan(0, len(x)), func(p int) float64 { return x[p] }, count))
		if got := highest(x, count); !slices.Equal(got, want) {
			t.Fatalf("highest %d of %v: %v, want %v", count, x, got, want)
		}
	}
}

// refPinned goes through tokens and matches one by one.
func refPinned(pins []Pin, text string, starts []int) (kept []int, refused bool) {
	all := map[int]bool{}
	for _, pin := range pins {
		own := map[int]bool{}
		for _, m := range regexp.MustCompile(pin.Pattern).FindAllStringIndex(text, -1) {
			last := -1
			for i, s := range starts {
				end := len(text)
				for _, other := range starts[i:] {
					if other > s {
						end = other
						break
					}
				}
				if s < m[1] && end > m[0] && m[0] < m[1] {
					own[i], last = true, i
				}
			}
			for i := last + 1; last >= 0 && i <= last+pin.TokensAfter && i < len(starts); i++ {
				own[i] = true
			}
		}
		list := refSorted(own)
		if len(list) > pin.MaxTokens {
			if pin.Overflow == Refuse {
				return nil, true
			}
			list = list[len(list)-pin.MaxTokens:]
		}
		for _, p := range list {
			all[p] = true
		}
	}
	return refSorted(all), false
}

func TestPinned(t *testing.T) {
	r := rand.New(rand.NewPCG(17, 18))
	patterns := []string{"ab", "a+", "(?i)KEY=[a-z]+", "é", "b$", "^x", "c.{3}d", "[^a]b"}
	refused, some := 0, 0
	for range 5000 {
		var text strings.Builder
		for range r.IntN(40) {
			text.WriteString([]string{"a", "b", "c", "d", "x", "é", "key=", " "}[r.IntN(8)])
		}
		var starts []int
		for at := 0; at < text.Len(); at += r.IntN(4) {
			starts = append(starts, at)
		}
		p := &Plan{}
		for range 1 + r.IntN(2) {
			p.Pins = append(p.Pins, Pin{Pattern: patterns[r.IntN(len(patterns))], TokensAfter: r.IntN(4), MaxTokens: 1 + r.IntN(12),
				Overflow: []Overflow{DropOldest, DropOldest, Refuse}[r.IntN(3)]})
		}
		got, err := p.Pinned(text.String(), starts)
		want, no := refPinned(p.Pins, text.String(), starts)
		if no {
			refused++
			var overflow *OverflowError
			if !errors.Is(err, ErrOverflow) || !errors.As(err, &overflow) || overflow.Tokens <= overflow.Bound {
				t.Fatalf("%+v in %q: %v", p.Pins, text.String(), err)
			}
			continue
		}
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("%+v in %q, tokens at %v: %v (%v), want %v", p.Pins, text.String(), starts, got, err, want)
		}
		if len(got) > 0 {
			some++
		}
	}
	if refused < 50 || some < 1000 {
		t.Errorf("%d refused, %d with pinned tokens: the test looks at too few", refused, some)
	}
}

func TestPinnedOfBadInput(t *testing.T) {
	p := &Plan{Pins: []Pin{{Pattern: `\b`, TokensAfter: 1 << 40, MaxTokens: 100, Overflow: DropOldest}}}
	if got, err := p.Pinned("ab cd", []int{0, 1, 3, 3, 5}); err != nil || !slices.Equal(got, []int{0, 1, 2, 3, 4}) {
		t.Errorf("an empty match keeps %v (%v), want the tokens behind it", got, err)
	}
	for _, starts := range [][]int{{-1}, {6}, {0, 3, 2}} {
		if _, err := p.Pinned("ab cd", starts); !errors.Is(err, ErrArgument) {
			t.Errorf("tokens at %v: %v", starts, err)
		}
	}
	p.Pins[0].Pattern = "("
	if _, err := p.Pinned("", nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("a pattern that is none: %v", err)
	}
	p.Pins[0].Pattern = "x"
	for _, c := range []struct {
		text   string
		starts []int
	}{{"", nil}, {"x", nil}, {"", []int{0, 0}}} {
		if got, err := p.Pinned(c.text, c.starts); err != nil || len(got) > 0 {
			t.Errorf("%q, tokens at %v: %v, %v", c.text, c.starts, got, err)
		}
	}
}

func FuzzPinned(f *testing.F) {
	f.Add("my api_key=abc def", []byte{2, 1, 4, 4, 3}, "api_key=[a-z]+", 2, 5)
	f.Fuzz(func(t *testing.T, text string, lengths []byte, pattern string, after, most int) {
		if _, err := regexp.Compile(pattern); err != nil || len(pattern) > 200 || len(text) > 2000 {
			return
		}
		var starts []int
		at := 0
		for _, l := range lengths {
			if at > len(text) {
				break
			}
			starts = append(starts, at)
			at += int(l)
		}
		p := &Plan{Pins: []Pin{{Pattern: pattern, TokensAfter: after, MaxTokens: most, Overflow: DropOldest}}}
		got, err := p.Pinned(text, starts)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) > max(most, 0) || !slices.IsSorted(got) || len(got) > 0 && got[len(got)-1] >= len(starts) {
			t.Fatal(fmt.Sprint("keeps ", got, " of ", len(starts)))
		}
	})
}
