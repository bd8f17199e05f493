package distill

import (
	"context"
	"math"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// The log-probability of the answers agrees with a softmax over all logits, and arms have the heads that they should.
func TestMeaningOfArms(t *testing.T) {
	f := loadFixture(t, "llama")
	m, ds := f.model(t, ref.New[float64]()), f.dataset()
	got, err := MeasureMeaning(context.Background(), m, ds.Samples, f.Gates, MeaningOptions{Sparsity: 0.5, Sink: f.Sink, Recent: f.Recent, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []struct {
		arm  Arm
		full int
	}{{got.Full, 6}, {got.Kept, 3}, {got.Reversed, 3}, {got.Random, 3}, {got.Streaming, 0}} {
		if a.arm.Full != a.full || len(a.arm.Samples) != 3 {
			t.Errorf("%s has %d full heads and %d samples, want %d and 3", a.arm.Name, a.arm.Full, len(a.arm.Samples), a.full)
		}
	}
	if math.Abs(got.Advantage-(got.Kept.LogProbability-got.Reversed.LogProbability)) > 1e-12 || !(got.Low <= got.Advantage && got.Advantage <= got.High) {
		t.Errorf("advantage %g in [%g, %g]", got.Advantage, got.Low, got.High)
	}
	s := &ds.Samples[0]
	all := make([]int, len(s.Tokens))
	for i := range all {
		all[i] = i
	}
	seq := &engine.Sequence{Tokens: s.Tokens, LogitRows: all}
	if err := m.Forward(context.Background(), seq); err != nil {
		t.Fatal(err)
	}
	var want float64
	n := len(s.Tokens)
	for p := n - 4; p < n; p++ { // the answer is the last four tokens
		var z float64
		for _, v := range seq.Logits[p-1] {
			z += math.Exp(v)
		}
		want += (seq.Logits[p-1][s.Tokens[p]] - math.Log(z)) / 4
	}
	if math.Abs(got.Full.Samples[0]-want) > 1e-12 {
		t.Errorf("log-probability %g, want %g", got.Full.Samples[0], want)
	}
	// A mask that hides nothing costs nothing.
	wide, err := MeasureMeaning(context.Background(), m, ds.Samples, f.Gates, MeaningOptions{Sparsity: 0.5, Recent: 1000})
	if err != nil {
		t.Fatal(err)
	}
	if math.Abs(wide.Advantage) > 1e-12 || wide.Holds() {
		t.Errorf("with everything kept the gates seem to matter: %+v", wide)
	}
	for _, bad := range []MeaningOptions{{Sparsity: 2, Recent: 1}, {Sparsity: 0.5}, {Sparsity: 0.5, Sink: -1, Recent: 1}} {
		if _, err := MeasureMeaning(context.Background(), m, ds.Samples, f.Gates, bad); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
}
