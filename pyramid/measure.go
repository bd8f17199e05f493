package pyramid

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/kvprofile/kvprofile/profile"
)

// Record is what is read of an attention record; *profile.Record is one.
type Record interface {
	Meta() profile.Meta
	Samples() []profile.Sample
	Heads(sample int) ([]profile.HeadStats, error)
	Columns(sample, layer int) ([]profile.Columns, error)
	Digest() (string, error)
}

// MeasureOptions of Measure. Zero fields take the defaults that are given here.
type MeasureOptions struct {
	// Mass is the share of attention of Keys, one of the record's: .9.
	Mass float64 `json:"mass"`
	// Tau1 and Tau2 are the temperatures of CAKE's entropy and variance: 1 and 1.
	Tau1 float64 `json:"tau1"`
	Tau2 float64 `json:"tau2"`
	// Window is the observation window of Entropy in rows, one of the record's: 32.
	Window int `json:"window"`
}

func (o MeasureOptions) resolve() (MeasureOptions, error) {
	if o.Mass == 0 {
		o.Mass = 0.9
	}
	if o.Tau1 == 0 {
		o.Tau1 = 1
	}
	if o.Tau2 == 0 {
		o.Tau2 = 1
	}
	if o.Window == 0 {
		o.Window = 32
	}
	if !(o.Tau1 > 0) || !(o.Tau2 > 0) {
		return o, &RequestError{"tau", fmt.Sprintf("%g and %g must be positive", o.Tau1, o.Tau2)}
	}
	return o, nil
}

// Measurement says what each layer needs, means over the samples; the three lists are weights for the three measured
// modes.
type Measurement struct {
	// Keys: smallest number of keys that hold the mass, mean over query heads and rows, in tokens.
	Keys []float64 `json:"keys"`
	// Variation: entropy^(1/tau1) * variance^(1/tau2), each summed over query heads.
	Variation []float64 `json:"variation"`
	// Entropy of the scores of all KV heads and prompt tokens of the layer, over the logarithm of their number; in
	// [0,1]. A score is the window's attention, mean over the group, times the largest norm of a value.
	Entropy []float64 `json:"entropy"`
}

// Weights returns what a mode divides by; nil for modes that measure nothing.
func (m *Measurement) Weights(mode Mode) []float64 {
	switch mode {
	case Keys:
		return m.Keys
	case Variation:
		return m.Variation
	case Entropy:
		return m.Entropy
	}
	return nil
}

// Measure reads what the layers need from a record.
func Measure(ctx context.Context, rec Record, o MeasureOptions) (*Measurement, error) {
	o, err := o.resolve()
	if err != nil {
		return nil, err
	}
	meta, samples := rec.Meta(), rec.Samples()
	mass := slices.Index(meta.Grid.Masses, o.Mass)
	if mass < 0 {
		return nil, &RequestError{"mass", fmt.Sprintf("%g is not in the record, which has %v", o.Mass, meta.Grid.Masses)}
	}
	window := slices.Index(meta.Grid.Windows, o.Window)
	if window < 0 {
		return nil, &RequestError{"window", fmt.Sprintf("%d rows are not in the record, which has %v", o.Window, meta.Grid.Windows)}
	}
	m := meta.Model
	out := &Measurement{Keys: make([]float64, m.Layers), Variation: make([]float64, m.Layers), Entropy: make([]float64, m.Layers)}
	n := float64(len(samples))
	for i := range samples {
		heads, err := rec.Heads(i)
		if err != nil {
			return nil, err
		}
		for l := range m.Layers {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			layer := heads[l*m.Heads : (l+1)*m.Heads]
			var keys, entropy, variance float64
			for _, h := range layer {
				keys += h.Keys[mass]
				entropy += h.Entropy
				variance += h.Variance
			}
			out.Keys[l] += keys / float64(m.Heads) / n
			out.Variation[l] += math.Pow(max(entropy, 0), 1/o.Tau1) * math.Pow(max(variance, 0), 1/o.Tau2) / n
			columns, err := rec.Columns(i, l)
			if err != nil {
				return nil, err
			}
			out.Entropy[l] += scoreEntropy(m, layer, columns, window) / n
		}
	}
	return out, nil
}

// scoreEntropy is the normalised entropy of a layer's scores on one sample.
func scoreEntropy(m profile.Model, heads []profile.HeadStats, columns []profile.Columns, window int) float64 {
	length := len(columns[0].Total)
	scores := make([]float64, 0, m.KVHeads*length)
	var sum float64
	for kv := range m.KVHeads {
		first := kv * m.Group()
		for j := range length {
			var s float64
			for h := first; h < first+m.Group(); h++ {
				s += float64(columns[h].Window[window][j])
			}
			s *= heads[first].ValueNormMax / float64(m.Group())
			scores = append(scores, s)
			sum += s
		}
	}
	if !(sum > 0) || len(scores) == 1 {
		return 0
	}
	var entropy float64
	for _, s := range scores {
		if p := s / sum; p > 0 {
			entropy -= p * math.Log(p)
		}
	}
	return entropy / math.Log(float64(len(scores)))
}
