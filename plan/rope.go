package plan

import "math"

// frequencies returns the headDim/2 angular frequencies in radians per token and the factor on cosine and sine: linear
// and yarn as in YaRN (Peng et al. 2023, section 3), llama3 as in the Llama 3.1 reference.
func (r *RoPE) frequencies(headDim int) (freq []float64, factor float64) {
	freq = make([]float64, headDim/2)
	for j := range freq {
		freq[j] = math.Pow(r.Theta, -float64(2*j)/float64(headDim))
	}
	s := r.Scaling
	switch {
	case s == nil:
	case s.Divisors != nil:
		for j := range min(len(freq), len(s.Divisors)) {
			freq[j] /= s.Divisors[j]
		}
	case s.Kind == ScalingLinear:
		for j := range freq {
			freq[j] /= s.Factor
		}
	case s.Kind == ScalingLlama3:
		low, high := float64(s.OriginalMaxPosition)/s.LowFreqFactor, float64(s.OriginalMaxPosition)/s.HighFreqFactor
		for j, f := range freq {
			switch wavelength := 2 * math.Pi / f; {
			case wavelength > low:
				freq[j] = f / s.Factor
			case wavelength >= high:
				smooth := (float64(s.OriginalMaxPosition)/wavelength - s.LowFreqFactor) / (s.HighFreqFactor - s.LowFreqFactor)
				freq[j] = (1-smooth)*f/s.Factor + smooth*f
			}
		}
	case s.Kind == ScalingYaRN:
		fast, slow := orDefault(s.BetaFast, 32), orDefault(s.BetaSlow, 1)
		// The dimension whose wavelength fits so many turns into the original context.
		dim := func(turns float64) float64 {
			return float64(headDim) * math.Log(float64(s.OriginalMaxPosition)/(turns*2*math.Pi)) / (2 * math.Log(r.Theta))
		}
		low, high := math.Max(math.Floor(dim(fast)), 0), math.Min(math.Ceil(dim(slow)), float64(headDim-1))
		if low == high {
			high += 0.001
		}
		for j, f := range freq {
			ramp := math.Min(math.Max((float64(j)-low)/(high-low), 0), 1)
			freq[j] = f/s.Factor*ramp + f*(1-ramp)
		}
		return freq, orDefault(s.AttentionFactor, 0.1*math.Log(s.Factor)+1)
	}
	return freq, 1
}

func orDefault(x, otherwise float64) float64 {
	if x == 0 {
		return otherwise
	}
	return x
}

// ropeTolerance is the relative difference up to which two frequencies are the same: some formats keep them in float32.
const ropeTolerance = 1e-4

// sameRoPE reports whether two embeddings rotate alike, in whatever form their scaling is given.
func sameRoPE(a, b *RoPE, headDim int) bool {
	x, factorX := a.frequencies(headDim)
	y, factorY := b.frequencies(headDim)
	near := func(p, q float64) bool { return math.Abs(p-q) <= ropeTolerance*math.Abs(q) }
	if !near(factorX, factorY) {
		return false
	}
	for j := range x {
		if !near(x[j], y[j]) {
			return false
		}
	}
	return true
}
