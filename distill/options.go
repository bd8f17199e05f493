package distill

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"github.com/kvprofile/kvprofile/datasets"
)

// Options say how gates are trained. The fields up to Batch decide the result and are part of Hash; the others decide
// memory, time and files only.
type Options struct {
	Recipe         string  `json:"recipe"`          // name of the preset that the rest started from
	Steps          int     `json:"steps"`           // optimiser steps
	LearningRate   float64 `json:"learning_rate"`   // peak of the schedule
	Regularisation float64 `json:"regularisation"`  // weight of mean |gate| in the loss
	InitialGate    float64 `json:"initial_gate"`    // 1 in the paper
	Sink           int     `json:"sink"`            // tokens of the streaming mask while training
	Recent         int     `json:"recent"`          // tokens of the streaming mask while training
	Seed           uint64  `json:"seed"`            // of the order of the samples
	Batch          int     `json:"batch,omitempty"` // samples of a step; 0 stands for 1
	// Model and Tool are written to the artefacts: the model's fingerprint, and who made them.
	Model string `json:"model"`
	Tool  string `json:"-"`

	// AllowLowRate accepts a schedule whose learning rates sum to less than MinRateSum.
	AllowLowRate bool `json:"-"`
	// StashLimit bounds the activations kept between forward and backward, in bytes on each device: above it they are computed again.
	StashLimit int64 `json:"-"`
	// TeacherLimit bounds the teacher results kept for samples that come again, in bytes on each device.
	TeacherLimit int64 `json:"-"`
	// Checkpoint is the directory of the checkpoint; "" means none. CheckpointEvery is the number of steps between two.
	Checkpoint      string `json:"-"`
	CheckpointEvery int    `json:"-"`
}

// BatchSize is the number of samples of a step.
func (o Options) BatchSize() int { return max(o.Batch, 1) }

// MinRateSum is what the learning rates of all steps must sum to: Adam moves a gate by at most about the rate per
// step, so a gate that nothing holds needs a sum of 1 to fall from 1 to 0, and as much again to come back.
const MinRateSum = 2

// Recipe is a preset: options and the data that they were made for. The data's Seed and Haystack are the caller's.
type Recipe struct {
	Options Options
	Data    datasets.PasskeyOptions
}

// Recipes are the names that RecipeNamed knows.
func Recipes() []string { return []string{"cpu", "quick", "paper"} }

// RecipeNamed returns a preset.
func RecipeNamed(name string) (Recipe, error) {
	base := Options{Recipe: name, LearningRate: 0.02, Regularisation: 0.05, InitialGate: 1, Sink: 128, Recent: 256, Seed: 42,
		StashLimit: 1 << 30, TeacherLimit: 512 << 20, CheckpointEvery: 25}
	switch name {
	case "paper":
		base.Steps = 2000
		return Recipe{Options: base, Data: datasets.RecipePaper()}, nil
	case "cpu":
		base.Steps = 125
		return Recipe{Options: base, Data: datasets.RecipeCPU()}, nil
	case "quick":
		base.Steps, base.LearningRate, base.CheckpointEvery = 25, 0.1, 5
		data := datasets.RecipeCPU()
		data.Count, data.MaxLength, data.Steps = 25, data.MinLength, 1
		return Recipe{Options: base, Data: data}, nil
	}
	return Recipe{}, fmt.Errorf("unknown recipe %q; known are %v", name, Recipes())
}

// Rate is the learning rate of step s (from 0): a linear rise over the first fifth, a plateau and a linear fall over
// the last fifth, never below a tenth of the peak (the authors' schedule).
func (o Options) Rate(s int) float64 {
	n, at := float64(o.Steps), float64(s)
	fifth := n / 5
	return o.LearningRate * min(1, max((at+1)/fifth, 0.1), max((n-at)/fifth, 0.1))
}

// RateSum is the sum of the learning rates of all steps.
func (o Options) RateSum() float64 {
	var sum float64
	for s := range o.Steps {
		sum += o.Rate(s)
	}
	return sum
}

// ErrLowRate is wrapped by the error on learning rates that are too small, all together, to move the gates.
var ErrLowRate = errors.New("the learning rates are too small for the gates to move")

// Validate reports options that cannot be used.
func (o Options) Validate() error {
	switch {
	case o.Steps <= 0:
		return fmt.Errorf("steps must be positive, not %d", o.Steps)
	case o.Batch < 0:
		return fmt.Errorf("samples of a step must be positive, not %d", o.Batch)
	case !(o.LearningRate > 0) || math.IsInf(o.LearningRate, 0):
		return fmt.Errorf("learning rate must be positive, not %g", o.LearningRate)
	case !(o.Regularisation >= 0) || math.IsInf(o.Regularisation, 0):
		return fmt.Errorf("regularisation must not be negative, but is %g", o.Regularisation)
	case !(o.InitialGate >= 0 && o.InitialGate <= 1):
		return fmt.Errorf("initial gate must lie in [0,1], not %g", o.InitialGate)
	case o.Sink < 0 || o.Recent <= 0:
		return fmt.Errorf("streaming mask of sink %d and recent %d tokens: sink must not be negative, recent must be positive", o.Sink, o.Recent)
	case o.StashLimit < 0 || o.TeacherLimit < 0:
		return fmt.Errorf("memory limits must not be negative")
	case o.Checkpoint != "" && o.CheckpointEvery <= 0:
		return fmt.Errorf("steps between checkpoints must be positive, not %d", o.CheckpointEvery)
	}
	if sum := o.RateSum(); sum < MinRateSum && !o.AllowLowRate {
		return fmt.Errorf("%w: %d steps at a peak of %g sum to %.3g, want at least %d; raise the steps or the learning rate",
			ErrLowRate, o.Steps, o.LearningRate, sum, MinRateSum)
	}
	return nil
}

// Hash identifies the options that decide the result.
func (o Options) Hash() string {
	text, err := json.Marshal(o)
	if err != nil {
		return "invalid: " + err.Error() // only NaN or infinity, which Validate refuses
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}
