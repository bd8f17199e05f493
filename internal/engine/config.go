package engine

import (
	"fmt"
	"math"
)

// Config is what the mathematics of a decoder-only transformer depends on. Two files of the same model, a Hugging
// Face folder and a GGUF, give equal Configs.
type Config struct {
	Architecture string // "llama", "mistral", "qwen2" or "qwen3"
	Layers       int
	Heads        int // query heads
	KVHeads      int
	HeadDim      int
	Hidden       int // width of the residual stream
	Intermediate int // width of the gated MLP
	Vocab        int // rows of the embedding
	MaxPosition  int // context length in tokens that the model was made for
	NormEps      float64
	RoPE         RoPE
	// SlidingWindow holds one window per layer in tokens, 0 for full attention: query i sees key j when i-j < window.
	// nil means that every layer attends to everything.
	SlidingWindow  []int
	TiedEmbeddings bool // the output matrix is the embedding
	QKVBias        bool // q, k and v projections have a bias (Qwen2)
	QKNorm         bool // RMSNorm over each query and key head before RoPE (Qwen3)
}

// Group is the number of query heads that share one KV head.
func (c Config) Group() int { return c.Heads / c.KVHeads }

// QueryWidth is the width of all query heads together, Heads * HeadDim.
func (c Config) QueryWidth() int { return c.Heads * c.HeadDim }

// KVWidth is the width of all KV heads together, KVHeads * HeadDim.
func (c Config) KVWidth() int { return c.KVHeads * c.HeadDim }

// Window is the layer's sliding window in tokens, 0 when the layer attends to everything.
func (c Config) Window(layer int) int {
	if layer < len(c.SlidingWindow) {
		return c.SlidingWindow[layer]
	}
	return 0
}

// RoPE is the rotary position embedding (Su et al. 2021) in the half-split form of Hugging Face: element j rotates
// with element j + HeadDim/2 by position * frequency j.
type RoPE struct {
	Theta   float64
	Scaling *RoPEScaling // nil: plain
}

// RoPEScaling stretches the frequencies. The unused fields of a kind are zero.
type RoPEScaling struct {
	Kind                string  // "linear", "llama3" or "yarn"
	Factor              float64 // all kinds
	LowFreqFactor       float64 // llama3
	HighFreqFactor      float64 // llama3
	OriginalMaxPosition int     // llama3, yarn
	BetaFast            float64 // yarn, 32 by default
	BetaSlow            float64 // yarn, 1 by default
	AttentionFactor     float64 // yarn: scales cos and sin; 0 means 0.1 ln(Factor) + 1
	// Divisors, when not nil, divide the plain frequencies (HeadDim/2 values, as GGUF's rope_freqs.weight stores
	// llama3 scaling); the other fields are then not known and not used.
	Divisors []float64
}

// Frequencies returns the HeadDim/2 angular frequencies in radians per token, and the factor on cos and sin.
// Sources: linear and yarn as in YaRN (Peng et al. 2023, section 3), llama3 as in the Llama 3.1 reference.
func (c Config) Frequencies() (freq []float64, factor float64, err error) {
	half := c.HeadDim / 2
	freq = make([]float64, half)
	for j := range freq {
		freq[j] = math.Pow(c.RoPE.Theta, -float64(2*j)/float64(c.HeadDim))
	}
	s := c.RoPE.Scaling
	if s == nil {
		return freq, 1, nil
	}
	if s.Divisors != nil {
		if len(s.Divisors) != half {
			return nil, 0, fmt.Errorf("rope scaling has %d divisors, want %d", len(s.Divisors), half)
		}
		for j := range freq {
			freq[j] /= s.Divisors[j]
		}
		return freq, 1, nil
	}
	switch s.Kind {
	case "linear":
		for j := range freq {
			freq[j] /= s.Factor
		}
		return freq, 1, nil
	case "llama3":
		low := float64(s.OriginalMaxPosition) / s.LowFreqFactor
		high := float64(s.OriginalMaxPosition) / s.HighFreqFactor
		for j, f := range freq {
			switch wavelength := 2 * math.Pi / f; {
			case wavelength > low:
				freq[j] = f / s.Factor
			case wavelength >= high:
				smooth := (float64(s.OriginalMaxPosition)/wavelength - s.LowFreqFactor) / (s.HighFreqFactor - s.LowFreqFactor)
				freq[j] = (1-smooth)*f/s.Factor + smooth*f
			}
		}
		return freq, 1, nil
	case "yarn":
		fast, slow := s.BetaFast, s.BetaSlow
		if fast == 0 {
			fast = 32
		}
		if slow == 0 {
			slow = 1
		}
		// The dimension whose wavelength fits `turns` times into the original context.
		dim := func(turns float64) float64 {
			return float64(c.HeadDim) * math.Log(float64(s.OriginalMaxPosition)/(turns*2*math.Pi)) / (2 * math.Log(c.RoPE.Theta))
		}
		lo, hi := math.Max(math.Floor(dim(fast)), 0), math.Min(math.Ceil(dim(slow)), float64(c.HeadDim-1))
		if lo == hi {
			hi += 0.001
		}
		for j, f := range freq {
			ramp := math.Min(math.Max((float64(j)-lo)/(hi-lo), 0), 1)
			freq[j] = f/s.Factor*ramp + f*(1-ramp)
		}
		factor = s.AttentionFactor
		if factor == 0 {
			factor = 1
			if s.Factor > 1 {
				factor = 0.1*math.Log(s.Factor) + 1
			}
		}
		return freq, factor, nil
	}
	return nil, 0, fmt.Errorf("unknown rope scaling %q", s.Kind)
}

// Validate reports a configuration that no backend could run.
func (c Config) Validate() error {
	for _, f := range []struct {
		name  string
		value int
	}{{"layers", c.Layers}, {"query heads", c.Heads}, {"KV heads", c.KVHeads}, {"head dimension", c.HeadDim},
		{"hidden width", c.Hidden}, {"intermediate width", c.Intermediate}, {"vocabulary", c.Vocab}} {
		if f.value <= 0 {
			return fmt.Errorf("model has %d %s", f.value, f.name)
		}
	}
	switch {
	case c.Heads%c.KVHeads != 0:
		return fmt.Errorf("%d query heads do not divide among %d KV heads", c.Heads, c.KVHeads)
	case c.HeadDim%2 != 0:
		return fmt.Errorf("head dimension %d is odd", c.HeadDim)
	case !(c.NormEps > 0) || !(c.RoPE.Theta > 0):
		return fmt.Errorf("norm epsilon %g and rope theta %g must be positive", c.NormEps, c.RoPE.Theta)
	case c.SlidingWindow != nil && len(c.SlidingWindow) != c.Layers:
		return fmt.Errorf("%d sliding windows for %d layers", len(c.SlidingWindow), c.Layers)
	}
	_, _, err := c.Frequencies()
	return err
}
