package distill

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Correlation is Spearman's rank correlation of two scores over all KV heads, ties ranked at their mean.
type Correlation struct {
	A   string  `json:"a"`
	B   string  `json:"b"`
	N   int     `json:"n"`   // KV heads
	Rho float64 `json:"rho"` // in [-1,1]
	// Low and High bound the 95 % percentile interval of a bootstrap over KV heads. Heads of one model are not
	// independent draws: the interval says how much the figure hangs on single heads, no more.
	Low  float64 `json:"low"`
	High float64 `json:"high"`
	// Undefined says why there is no correlation; the figures are then 0.
	Undefined string `json:"undefined,omitempty"`
}

const bootstraps = 2000

// Correlate returns the rank correlations of all pairs of the scores, in order. seed is of the bootstrap.
func Correlate(scores []Score, seed uint64) ([]Correlation, error) {
	flat := make([][]float64, len(scores))
	for i, s := range scores {
		if err := sameShape(s.Values, scores[0].Values); err != nil {
			return nil, fmt.Errorf("score %s: %w", s.Name, err)
		}
		flat[i] = slices.Concat(s.Values...)
	}
	var out []Correlation
	for i := range scores {
		for j := i + 1; j < len(scores); j++ {
			c := Correlation{A: scores[i].Name, B: scores[j].Name, N: len(flat[i])}
			c.Rho, c.Low, c.High, c.Undefined = bootstrapped(flat[i], flat[j], rand.New(rand.NewPCG(seed, uint64(i*len(scores)+j))))
			out = append(out, c)
		}
	}
	return out, nil
}

// Agree fills Agreement with the rank correlations of the gates and all scores.
func (g *Gates) Agree(seed uint64) error {
	var err error
	g.Agreement, err = Correlate(append([]Score{{Name: ScoreGate, Values: g.Values}}, g.Scores...), seed)
	return err
}

func bootstrapped(a, b []float64, rng *rand.Rand) (rho, low, high float64, undefined string) {
	rho, ok := spearman(a, b)
	if !ok {
		return 0, 0, 0, "one of the scores is the same for all KV heads"
	}
	var draws []float64
	x, y := make([]float64, len(a)), make([]float64, len(a))
	for range bootstraps {
		for i := range x {
			j := rng.IntN(len(a))
			x[i], y[i] = a[j], b[j]
		}
		if r, ok := spearman(x, y); ok { // a draw of equal values has no correlation
			draws = append(draws, r)
		}
	}
	low, high = interval(draws)
	return rho, low, high, ""
}

// interval is the 95 % percentile interval of draws, which are sorted in place; none give 0, 0.
func interval(draws []float64) (low, high float64) {
	if len(draws) == 0 {
		return 0, 0
	}
	slices.Sort(draws)
	at := func(q float64) float64 { return draws[int(math.Round(q*float64(len(draws)-1)))] }
	return at(0.025), at(0.975)
}

// spearman is Pearson's correlation of the ranks; false when a side has no spread.
func spearman(a, b []float64) (float64, bool) {
	x, y := MeanRanks(a), MeanRanks(b)
	mean := float64(len(a)+1) / 2
	var sxy, sxx, syy float64
	for i := range x {
		dx, dy := x[i]-mean, y[i]-mean
		sxy += dx * dy
		sxx += dx * dx
		syy += dy * dy
	}
	if sxx == 0 || syy == 0 {
		return 0, false
	}
	return min(max(sxy/math.Sqrt(sxx*syy), -1), 1), true
}

// MeanRanks are 1 for the smallest; equal values share the mean of their ranks.
func MeanRanks(v []float64) []float64 {
	at := make([]int, len(v))
	for i := range at {
		at[i] = i
	}
	slices.SortFunc(at, func(i, j int) int {
		switch {
		case v[i] < v[j]:
			return -1
		case v[i] > v[j]:
			return 1
		}
		return i - j
	})
	out := make([]float64, len(v))
	for lo := 0; lo < len(at); {
		hi := lo + 1
		for hi < len(at) && v[at[hi]] == v[at[lo]] {
			hi++
		}
		for _, i := range at[lo:hi] {
			out[i] = float64(lo+1+hi) / 2
		}
		lo = hi
	}
	return out
}
