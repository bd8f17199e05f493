package distill

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
)

// MeaningOptions say how the meaning of gates is tested.
type MeaningOptions struct {
	Sparsity     float64 // share of the KV heads that stream
	Sink, Recent int     // tokens that these keep
	Seed         uint64  // of the random choice and of the bootstrap
}

// Arm is one way to choose the heads that keep the whole cache.
type Arm struct {
	Name string `json:"name"`
	Full int    `json:"full_heads"`
	// LogProbability is the mean natural logarithm of the probability of a gold answer token, over all samples.
	LogProbability float64 `json:"log_probability"`
	// Samples holds the same for each sample.
	Samples []float64 `json:"samples"`
}

// Meaning is what reversing gates costs. The arms kept, reversed and random have the same number of streaming KV heads,
// and so the same bytes at every length.
type Meaning struct {
	Sparsity float64 `json:"sparsity"`
	Sink     int     `json:"sink"`
	Recent   int     `json:"recent"`
	// Full is the unmodified model; Kept lets the heads with the lowest gates stream, Reversed those with the highest,
	// Random as many drawn from Seed; Streaming all.
	Full      Arm `json:"full"`
	Kept      Arm `json:"kept"`
	Reversed  Arm `json:"reversed"`
	Random    Arm `json:"random"`
	Streaming Arm `json:"streaming"`
	// Advantage is Kept - Reversed in mean log-probability per sample; Low and High bound the 95 % percentile interval of
	// a bootstrap over samples.
	Advantage float64 `json:"advantage"`
	Low       float64 `json:"low"`
	High      float64 `json:"high"`
}

// Holds reports whether the gates mean something: reversing them loses more than keeping them, and not by chance.
func (m *Meaning) Holds() bool { return m.Low > 0 }

// MeasureMeaning runs the samples, which the gates must not have been trained on, under the five choices of heads.
func MeasureMeaning(ctx context.Context, m *engine.Model, samples []datasets.Sample, gates [][]float64, opt MeaningOptions) (*Meaning, error) {
	if len(samples) == 0 {
		return nil, fmt.Errorf("no samples to test the gates on")
	}
	if opt.Sink < 0 || opt.Recent <= 0 {
		return nil, fmt.Errorf("streaming mask of sink %d and recent %d tokens: sink must not be negative, recent must be positive", opt.Sink, opt.Recent)
	}
	kept, err := Sparsest(gates, opt.Sparsity)
	if err != nil {
		return nil, err
	}
	negated, noise := make([][]float64, len(gates)), make([][]float64, len(gates))
	rng := rand.New(rand.NewPCG(opt.Seed, 1))
	for l, vs := range gates {
		for _, v := range vs {
			negated[l] = append(negated[l], -v)
			noise[l] = append(noise[l], rng.Float64())
		}
	}
	heads := m.Config.Layers * m.Config.KVHeads
	out := &Meaning{Sparsity: opt.Sparsity, Sink: opt.Sink, Recent: opt.Recent}
	for _, a := range []struct {
		arm   *Arm
		name  string
		heads Selection
	}{
		{&out.Full, "full", top(gates, heads)},
		{&out.Kept, "kept", kept},
		{&out.Reversed, "reversed", top(negated, kept.Count)},
		{&out.Random, "random", top(noise, kept.Count)},
		{&out.Streaming, "streaming", top(gates, 0)},
	} {
		*a.arm = Arm{Name: a.name, Full: a.heads.Count}
		masks := a.heads.Masks(engine.Mask{Sink: opt.Sink, Recent: opt.Recent})
		for i := range samples {
			v, err := AnswerLogProbability(ctx, m, &samples[i], masks)
			if err != nil {
				return nil, fmt.Errorf("%s, sample %d: %w", a.name, samples[i].ID, err)
			}
			a.arm.Samples = append(a.arm.Samples, v)
			a.arm.LogProbability += v / float64(len(samples))
		}
	}
	out.Advantage = out.Kept.LogProbability - out.Reversed.LogProbability
	draws := make([]float64, bootstraps)
	for i := range draws {
		for range samples {
			j := rng.IntN(len(samples))
			draws[i] += (out.Kept.Samples[j] - out.Reversed.Samples[j]) / float64(len(samples))
		}
	}
	out.Low, out.High = interval(draws)
	return out, nil
}

// Masks gives the streaming mask to every head that is not full.
func (s Selection) Masks(stream engine.Mask) [][]engine.Mask {
	out := make([][]engine.Mask, len(s.Full))
	for l, full := range s.Full {
		out[l] = make([]engine.Mask, len(full))
		for k, f := range full {
			if !f {
				out[l][k] = stream
			}
		}
	}
	return out
}

// AnswerLogProbability is the mean natural logarithm of the probability that the model gives to the tokens of the gold
// answers, each after the true text before it, when the KV heads see what masks ([layer][KV head]) let them.
func AnswerLogProbability(ctx context.Context, m *engine.Model, s *datasets.Sample, masks [][]engine.Mask) (float64, error) {
	rows := s.AnswerRows()
	if len(rows) == 0 {
		return 0, fmt.Errorf("sample %d has no answer", s.ID)
	}
	seq := &engine.Sequence{Tokens: s.Tokens, Masks: masks, LogitRows: rows}
	if err := m.Forward(ctx, seq); err != nil {
		return 0, err
	}
	var sum float64
	for i, r := range rows {
		sum += logProbability(seq.Logits[i], int(s.Tokens[r+1]))
	}
	return sum / float64(len(rows)), nil
}

// logProbability is the log-softmax of one entry.
func logProbability(logits []float64, at int) float64 {
	top := math.Inf(-1)
	for _, v := range logits {
		top = math.Max(top, v)
	}
	var sum float64
	for _, v := range logits {
		sum += math.Exp(v - top)
	}
	return logits[at] - top - math.Log(sum)
}
