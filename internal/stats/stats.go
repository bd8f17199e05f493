// Package stats holds the bound that retention is stated with.
package stats

import (
	"math"

	"gonum.org/v1/gonum/stat/distuv"
)

// Alpha is the level of all tests and bounds: one-sided, 5 %.
const Alpha = 0.05

// Lower95 is the one-sided 95 % Clopper-Pearson lower bound of a share of which k of m independent trials were seen; 0
// for k = 0. Without trials there is none: ok is false.
func Lower95(k, m int) (bound float64, ok bool) {
	if m <= 0 || k < 0 || k > m {
		return 0, false
	}
	switch k {
	case 0:
		return 0, true
	case m:
		return math.Pow(Alpha, 1/float64(m)), true
	}
	return distuv.Beta{Alpha: float64(k), Beta: float64(m - k + 1)}.Quantile(Alpha), true
}
