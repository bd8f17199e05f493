// Package pyramid divides a cache budget among layers: by PyramidKV's arithmetic schedule (Cai et al. 2024), by a
// geometric one, or by what an attention record says that layers need. Budgets add up to what was asked for exactly,
// for any number of layers, length and budget; what cannot be met as asked is said in warnings.
package pyramid

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Mode is a way to divide a budget.
type Mode string

// The modes.
const (
	// Uniform gives every layer the same: the control.
	Uniform Mode = "uniform"
	// Arithmetic is PyramidKV's schedule: budgets fall by equal steps from the first layer to the last.
	Arithmetic Mode = "arithmetic"
	// Geometric falls by equal factors, between ends with the ratio of the arithmetic schedule's.
	Geometric Mode = "geometric"
	// Keys follows the number of keys that hold a share of the attention (ZigZagKV, Zhong et al. 2024).
	Keys Mode = "measured-keys"
	// Variation follows entropy times variance of the attention (CAKE, Qin et al. 2025).
	Variation Mode = "measured-variation"
	// Entropy follows the entropy of the layer's scores (LAVa, Shen et al. 2025).
	Entropy Mode = "measured-entropy"
)

// Modes lists all modes.
func Modes() []Mode { return []Mode{Uniform, Arithmetic, Geometric, Keys, Variation, Entropy} }

// Measured reports whether a mode needs Request.Weights.
func (m Mode) Measured() bool { return m == Keys || m == Variation || m == Entropy }

// Request says what is to be divided. Tokens are those of one KV head per layer.
type Request struct {
	Mode   Mode `json:"mode"`
	Layers int  `json:"layers"`
	// Length is the number of tokens of the context that the budget is for: no layer can keep more.
	Length int `json:"length"`
	// Total is the sum of the layers' budgets in tokens.
	Total int `json:"total"`
	// Window is the observation window: every layer keeps at least so many tokens, and the schedules divide the rest.
	// 8 by default; NoWindow for none.
	Window int `json:"window"`
	// Beta is PyramidKV's ratio of the average budget to the smallest, both without the window. 20 by default.
	Beta float64 `json:"beta"`
	// Block makes budgets whole blocks of so many tokens. 1 by default.
	Block int `json:"block"`
	// Floor is the share of the average budget that the measured modes give to every layer. .25 by default; NoFloor
	// for none.
	Floor float64 `json:"floor"`
	// Weights say what the layers need, for the measured modes: only their ratios matter.
	Weights []float64 `json:"weights,omitempty"`
	// Limits bound single layers beside Length, in tokens: a sliding window. 0 means none.
	Limits []int `json:"limits,omitempty"`
}

// NoWindow and NoFloor as Request.Window and Request.Floor mean none, where 0 means the default.
const (
	NoWindow = -1
	NoFloor  = -1
)

// Code tells warnings apart.
type Code string

// The codes.
const (
	// Rounded: the total is no whole number of blocks; the rest is not given out.
	Rounded Code = "rounded"
	// AboveLength: the total is more than all layers can keep; every layer keeps all.
	AboveLength Code = "above-length"
	// BelowWindow: the total is less than the windows of all layers; it is divided evenly.
	BelowWindow Code = "below-window"
	// Flattened: the context is too short for the schedule's steepness (max < length - window, in PyramidKV's formula).
	Flattened Code = "flattened"
	// Clamped: some layers would get less than their window or more than they can keep; the others share the rest.
	Clamped Code = "clamped"
	// Even: all layers get the same, though the mode is not Uniform.
	Even Code = "even"
)

// Warning says where budgets are not what the mode alone would give.
type Warning struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
}

// Result holds the layers' budgets.
type Result struct {
	// Budgets in tokens, whole blocks each. A block may reach past the context's end: what a layer keeps is
	// min(budget, length, limit).
	Budgets  []int     `json:"budgets"`
	Warnings []Warning `json:"warnings,omitempty"`
}

// Total is the sum of the budgets.
func (r Result) Total() (sum int) {
	for _, b := range r.Budgets {
		sum += b
	}
	return sum
}

// RequestError says which part of a request makes no sense, and why.
type RequestError struct{ Field, Reason string }

func (e *RequestError) Error() string { return fmt.Sprintf("pyramid: %s: %s", e.Field, e.Reason) }

// largest bounds tokens and layers so that no sum overflows and floats hold them exactly.
const largest = 1 << 40

func (q Request) resolve() (Request, error) {
	if q.Window == 0 {
		q.Window = 8
	}
	q.Window = max(q.Window, 0)
	if q.Beta == 0 {
		q.Beta = 20
	}
	if q.Block == 0 {
		q.Block = 1
	}
	if q.Floor == 0 {
		q.Floor = 0.25
	}
	q.Floor = max(q.Floor, 0)
	switch {
	case !slices.Contains(Modes(), q.Mode):
		return q, &RequestError{"mode", fmt.Sprintf("%q is none of %q", q.Mode, Modes())}
	case q.Layers < 1 || q.Layers > 1<<20:
		return q, &RequestError{"layers", fmt.Sprintf("%d is not in 1..%d", q.Layers, 1<<20)}
	case q.Length < 1 || q.Length > largest:
		return q, &RequestError{"length", fmt.Sprintf("%d is not in 1..%d", q.Length, largest)}
	case q.Total < 0 || q.Total > largest:
		return q, &RequestError{"total", fmt.Sprintf("%d is not in 0..%d", q.Total, largest)}
	case q.Window > largest:
		return q, &RequestError{"window", fmt.Sprintf("%d is above %d", q.Window, largest)}
	case !(q.Beta >= 1) || math.IsInf(q.Beta, 0):
		return q, &RequestError{"beta", fmt.Sprintf("%g is not at least 1", q.Beta)}
	case q.Block < 1 || q.Block > largest:
		return q, &RequestError{"block", fmt.Sprintf("%d is not in 1..%d", q.Block, largest)}
	case !(q.Floor <= 1):
		return q, &RequestError{"floor", fmt.Sprintf("%g is not in [0, 1]", q.Floor)}
	case q.Limits != nil && len(q.Limits) != q.Layers:
		return q, &RequestError{"limits", fmt.Sprintf("%d for %d layers", len(q.Limits), q.Layers)}
	}
	for l, x := range q.Limits {
		if x < 0 || x > largest {
			return q, &RequestError{"limits", fmt.Sprintf("layer %d has %d", l, x)}
		}
	}
	if !q.Mode.Measured() {
		return q, nil
	}
	if len(q.Weights) != q.Layers {
		return q, &RequestError{"weights", fmt.Sprintf("%d for %d layers", len(q.Weights), q.Layers)}
	}
	var sum float64
	for l, w := range q.Weights {
		if !(w >= 0) || math.IsInf(w, 0) {
			return q, &RequestError{"weights", fmt.Sprintf("layer %d has %g", l, w)}
		}
		sum += w
	}
	if !(sum > 0) || math.IsInf(sum, 0) {
		return q, &RequestError{"weights", "add up to nothing"}
	}
	return q, nil
}

// ceilDiv returns ceil(a / b).
func ceilDiv(a, b int) int { return (a + b - 1) / b }

// Allocate divides a budget. Errors are *RequestError.
//
// The budgets add up to min(Total rounded down to blocks, what all layers can keep in whole blocks), exactly. With
// equal limits they never grow from layer to layer in the modes Arithmetic and Geometric, and follow the order of the
// weights in the measured ones.
func Allocate(q Request) (Result, error) {
	q, err := q.resolve()
	if err != nil {
		return Result{}, err
	}
	var r Result
	warn := func(c Code, format string, args ...any) {
		r.Warnings = append(r.Warnings, Warning{c, fmt.Sprintf(format, args...)})
	}

	// From here on all is counted in blocks.
	total := q.Total / q.Block
	if rest := q.Total % q.Block; rest > 0 {
		warn(Rounded, "%d of %d tokens are no whole block of %d and are not given out", rest, q.Total, q.Block)
	}
	least, most := make([]int, q.Layers), make([]int, q.Layers)
	var sumLeast, sumMost int
	for l := range most {
		keep := q.Length
		if q.Limits != nil && q.Limits[l] > 0 {
			keep = min(keep, q.Limits[l])
		}
		most[l] = ceilDiv(keep, q.Block)
		least[l] = min(ceilDiv(q.Window, q.Block), most[l])
		sumLeast, sumMost = sumLeast+least[l], sumMost+most[l]
	}
	var blocks []int
	switch {
	case total > sumMost:
		warn(AboveLength, "%d tokens are more than the %d that %d layers can keep: every layer keeps all", q.Total, sumMost*q.Block, q.Layers)
		blocks = most
	case total == sumMost:
		blocks = most
	case total < sumLeast:
		warn(BelowWindow, "%d tokens do not hold the observation window of %d in each of %d layers: they are divided evenly", q.Total, q.Window, q.Layers)
		blocks = round(even(q.Layers, total), make([]int, q.Layers), least, total)
	default:
		shares, flattened := q.shares(float64(total) * float64(q.Block) / float64(q.Layers))
		if flattened {
			warn(Flattened, "a context of %d tokens is too short for a smallest budget of 1/%g of the average: the schedule is flatter", q.Length, q.Beta)
		}
		for l := range shares {
			shares[l] /= float64(q.Block)
		}
		shares, clamped := fit(shares, least, most, total)
		if clamped > 0 {
			warn(Clamped, "%d of %d layers are held at their window or at all that they can keep; the others share the rest", clamped, q.Layers)
		}
		blocks = round(shares, least, most, total)
	}
	for _, b := range blocks {
		r.Budgets = append(r.Budgets, b*q.Block)
	}
	if q.Mode != Uniform && q.Layers > 1 && slices.Min(blocks) == slices.Max(blocks) {
		warn(Even, "all layers get the same budget of %d tokens, though the mode is %s", r.Budgets[0], q.Mode)
	}
	return r, nil
}

// even divides a total into equal parts.
func even(n int, total int) []float64 {
	return slices.Repeat([]float64{float64(total) / float64(n)}, n)
}

// shares returns the layers' budgets in tokens before bounds and rounding: they add up to layers * average.
// flattened says that the arithmetic schedule met the context's length.
func (q Request) shares(average float64) (shares []float64, flattened bool) {
	n := q.Layers
	window, length := float64(min(q.Window, q.Length)), float64(q.Length)
	// The formula inverts (more for later layers) where b > length - window.
	b := min(max(average-window, 0), length-window)
	shares = make([]float64, n)
	switch q.Mode {
	case Arithmetic, Geometric:
		if n == 1 {
			return []float64{b + window}, false
		}
		lo := b / q.Beta
		hi := 2*b - lo
		if q.Mode == Arithmetic {
			if hi >= length-window {
				flattened = hi > length-window
				hi = length - window
				lo = 2*b - hi
			}
			for l := range shares {
				shares[l] = hi - float64(l)*(hi-lo)/float64(n-1) + window
			}
			return shares, flattened
		}
		var sum float64
		for l := range shares {
			shares[l] = math.Pow(2*q.Beta-1, -float64(l)/float64(n-1)) // (hi/lo)^(-l/(n-1))
			sum += shares[l]
		}
		for l := range shares {
			shares[l] = shares[l]/sum*b*float64(n) + window
		}
	case Uniform:
		for l := range shares {
			shares[l] = average
		}
	default:
		floor := max(q.Floor*average, window)
		floor = min(floor, average)
		// Divided by the largest first: weights may be too large to add up otherwise.
		var sum float64
		top := slices.Max(q.Weights)
		for _, w := range q.Weights {
			sum += w / top
		}
		for l, w := range q.Weights {
			shares[l] = floor + w/top/sum*(average-floor)*float64(n)
		}
	}
	return shares, false
}

// fit moves shares into their bounds so that they add up to the total, which lies within the bounds' sums: those out
// of bounds are put onto them, the others scaled by one factor. It returns how many stand on a bound that they
// were outside of.
func fit(shares []float64, least, most []int, total int) (fitted []float64, clamped int) {
	at := func(scale float64) (out []float64, sum float64) {
		out = make([]float64, len(shares))
		for l, x := range shares {
			out[l] = min(max(x*scale, float64(least[l])), float64(most[l]))
			sum += out[l]
		}
		return out, sum
	}
	for l, x := range shares {
		if x < float64(least[l])-1e-9 || x > float64(most[l])+1e-9 {
			clamped++
		}
	}
	fitted, sum := at(1)
	if math.Abs(sum-float64(total)) <= 1e-9*float64(total) {
		return fitted, clamped
	}
	// The sum grows with the factor. Shares of zero stay at their least: they get a trifle, so that the rest can be
	// given out when all others are full.
	shares = slices.Clone(shares)
	trifle := max(slices.Max(shares), 1) * 1e-9
	for l := range shares {
		shares[l] = max(shares[l], trifle)
	}
	lo, hi := 0.0, 1.0
	for _, sum = at(hi); sum < float64(total); _, sum = at(hi) {
		hi *= 2
		// In blocks, most is at most 2^40, so that the factor that fills all layers is finite.
		if hi > 1e30 {
			break
		}
	}
	for range 200 {
		mid := lo + (hi-lo)/2
		if _, sum := at(mid); sum < float64(total) {
			lo = mid
		} else {
			hi = mid
		}
	}
	fitted, _ = at(hi)
	return fitted, clamped
}

// round makes shares whole so that they add up to the total exactly, by largest remainders; the lowest layer first
// where remainders are equal. It keeps the order of the shares: of two layers with the same whole part the one with
// the larger share has the larger remainder.
func round(shares []float64, least, most []int, total int) []int {
	n := len(shares)
	out := make([]int, n)
	rest := make([]float64, n)
	order := make([]int, n)
	left := total
	for l, x := range shares {
		// A share that is whole but for rounding errors is whole.
		if r := math.Round(x); math.Abs(x-r) < 1e-9*max(1, r) {
			x = r
		}
		out[l] = min(max(int(math.Floor(x)), least[l]), most[l])
		// In whole billionths: remainders that are equal but for rounding errors are equal.
		rest[l], order[l] = math.Round((x-float64(out[l]))*1e9), l
		left -= out[l]
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(rest[b], rest[a]), cmp.Compare(a, b))
	})
	// At most one round is needed but for rounding errors; total lies within the bounds' sums, so this ends.
	for left > 0 {
		for _, l := range order {
			if left > 0 && out[l] < most[l] {
				out[l]++
				left--
			}
		}
	}
	slices.Reverse(order)
	for left < 0 {
		for _, l := range order {
			if left < 0 && out[l] > least[l] {
				out[l]--
				left++
			}
		}
	}
	return out
}
