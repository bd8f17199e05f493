package eval

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"gonum.org/v1/gonum/mathext"

	"github.com/kvprofile/kvprofile/internal/stats"
)

// LeastTrials is the smallest number of trials with which [stats.Lower95] reaches a share in (0,1) when none fails.
func LeastTrials(share float64) int {
	m := max(1, int(math.Log(stats.Alpha)/math.Log(share)))
	reached := func(m int) bool { b, _ := stats.Lower95(m, m); return b >= share }
	for m > 1 && reached(m-1) {
		m--
	}
	for !reached(m) {
		m++
	}
	return m
}

// McNemar tests paired right and wrong answers exactly: of the pairs on which A and B differ, onlyA are right with A
// alone and onlyB with B alone; without a difference both would be as likely. greater is the one-sided p-value for A
// being right more often, twoSided that for a difference of any sign.
func McNemar(onlyA, onlyB int) (greater, twoSided float64) {
	return binomialTail(onlyA, onlyA+onlyB), min(1, 2*binomialTail(max(onlyA, onlyB), onlyA+onlyB))
}

// binomialTail is the probability of k or more heads in n throws of a fair coin.
func binomialTail(k, n int) float64 {
	if k <= 0 {
		return 1
	}
	return mathext.RegIncBeta(float64(k), float64(n-k+1), 0.5)
}

// Permutation tests: up to exactPairs differences that are not 0, all signs are tried; beyond, drawnSigns random ones.
const (
	exactPairs = 14
	drawnSigns = 9999
)

// SignFlip is the paired permutation test of the mean of differences: without a difference between A and B, each could
// as well have the other sign. greater is the one-sided p-value for a mean above 0: the share of sign patterns, the
// observed one among them, with a sum at least as large as the observed; less is that for a mean below 0. All patterns
// are tried up to 14 differences that are not 0, else 9999 are drawn by PCG(seed, number of differences).
func SignFlip(differences []float64, seed uint64) (greater, less float64) {
	var d []float64
	var observed, size float64
	for _, v := range differences {
		if v != 0 {
			d = append(d, v)
			observed += v
			size += math.Abs(v)
		}
	}
	if math.IsNaN(size) || math.IsInf(size, 0) {
		return math.NaN(), math.NaN()
	}
	// Sums that are equal but for rounding count as equal.
	slack := 1e-12 * size
	var above, below, patterns int
	count := func(sum float64) {
		patterns++
		if sum >= observed-slack {
			above++
		}
		if sum <= observed+slack {
			below++
		}
	}
	if len(d) <= exactPairs {
		for signs := range uint(1) << len(d) {
			sum := 0.0
			for i, v := range d {
				if signs>>i&1 == 1 {
					v = -v
				}
				sum += v
			}
			count(sum)
		}
	} else {
		count(observed)
		r := rand.New(rand.NewPCG(seed, uint64(len(d))))
		for range drawnSigns {
			count(randomSigns(d, r))
		}
	}
	return float64(above) / float64(patterns), float64(below) / float64(patterns)
}

// randomSigns is the sum of d with a random sign each.
func randomSigns(d []float64, r *rand.Rand) float64 {
	sum := 0.0
	var bits uint64
	for i, v := range d {
		if i%64 == 0 {
			bits = r.Uint64()
		}
		// The lowest bit becomes the sign.
		sum += math.Float64frombits(math.Float64bits(v) ^ bits<<63)
		bits >>= 1
	}
	return sum
}

// Holm corrects the p-values of several tests by Holm's step-down rule: the probability that one or more true null
// hypotheses is rejected at a level is then at most that level. The corrected values stand in the order of p.
func Holm(p []float64) []float64 {
	order := make([]int, len(p))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(p[a], p[b]) })
	out := make([]float64, len(p))
	least := 0.0
	for rank, i := range order {
		least = max(least, min(1, p[i]*float64(len(p)-rank)))
		out[i] = least
	}
	return out
}

// Comparison is a paired comparison of two runs over the same prompts.
type Comparison struct {
	A, B string // labels
	N    int    // prompts
	// OnlyA and OnlyB count the prompts that one alone gets right. RightMore is the one-sided p-value for A being right on
	// more prompts, RightFewer that for fewer: McNemar's exact test.
	OnlyA, OnlyB          int
	RightMore, RightFewer float64
	// Gain is the mean over prompts of A's mean log-probability of the gold answer less B's, in nats per token.
	// LikelierGold is the one-sided p-value for it being above 0, UnlikelierGold that for below 0: [SignFlip].
	Gain                         float64
	LikelierGold, UnlikelierGold float64
}

// Compare compares two runs. It is an error if they are not over the same prompts in the same order.
func Compare(a, b *Run, seed uint64) (Comparison, error) {
	c := Comparison{A: a.Label(), B: b.Label(), N: len(a.Outcomes)}
	if err := a.samePrompts(b); err != nil {
		return c, fmt.Errorf("compare %s with %s: %w", c.A, c.B, err)
	}
	d := make([]float64, c.N)
	for i, x := range a.Outcomes {
		y := b.Outcomes[i]
		switch {
		case x.Right && !y.Right:
			c.OnlyA++
		case y.Right && !x.Right:
			c.OnlyB++
		}
		d[i] = x.LogProb - y.LogProb
		c.Gain += d[i] / float64(c.N)
	}
	c.RightMore, _ = McNemar(c.OnlyA, c.OnlyB)
	c.RightFewer, _ = McNemar(c.OnlyB, c.OnlyA)
	c.LikelierGold, c.UnlikelierGold = SignFlip(d, seed)
	return c, nil
}
