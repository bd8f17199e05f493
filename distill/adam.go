package distill

import (
	"fmt"
	"math"

	G "gorgonia.org/gorgonia"
)

// adam is Adam (Kingma and Ba 2015) with bias correction and no weight decay, as a gorgonia.Solver whose state can be
// saved; that of gorgonia.AdamSolver cannot. It computes in the same order as that solver, to the same bits.
type adam struct {
	rate          float64 // of the next step
	steps         int     // taken so far
	first, second []float64
}

const (
	adamBeta1   = 0.9
	adamBeta2   = 0.999
	adamEpsilon = 1e-8
)

// newAdam makes the solver of n parameters that stand in one tensor.
func newAdam(n int) *adam { return &adam{first: make([]float64, n), second: make([]float64, n)} }

// Step moves the one parameter tensor against its gradient and zeroes the gradient, which gorgonia would otherwise
// add to.
func (a *adam) Step(model []G.ValueGrad) error {
	if len(model) != 1 {
		return fmt.Errorf("solver has one parameter tensor, given %d", len(model))
	}
	gradient, err := model[0].Grad()
	if err != nil {
		return err
	}
	g, err := values(gradient)
	if err != nil {
		return err
	}
	w, err := values(model[0].Value())
	if err != nil {
		return err
	}
	if len(w) != len(a.first) || len(g) != len(w) {
		return fmt.Errorf("solver of %d parameters given %d with %d gradients", len(a.first), len(w), len(g))
	}
	a.steps++
	c1 := 1 / (1 - math.Pow(adamBeta1, float64(a.steps)))
	c2 := 1 / (1 - math.Pow(adamBeta2, float64(a.steps)))
	b1, b2 := adamBeta1, adamBeta2
	for i, d := range g {
		// The conversions keep products from being fused with sums, so that all machines agree.
		a.first[i] = float64(d*(1-b1)) + float64(a.first[i]*b1)
		a.second[i] = float64(float64(d*d)*(1-b2)) + float64(a.second[i]*b2)
		update := float64(float64(a.first[i]*c1)*-a.rate) / (math.Sqrt(float64(a.second[i]*c2)) + adamEpsilon)
		w[i] += update
		g[i] = 0
	}
	return nil
}
