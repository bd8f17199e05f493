package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/plan"
)

// Names of what the stages leave in a run folder.
const (
	modelFile     = "model.json"
	trainFile     = "datasets/train.parquet"
	needlesFile   = "datasets/needles.parquet"
	recordDir     = "record"
	trainedDir    = "trained" // gates as trained
	gatesDir      = "gates"   // with the scores that they are compared with
	checkpointDir = "checkpoint"
	fastgenFile   = "fastgen.json"
	pyramidFile   = "pyramid.json"
	planFile      = "plan.json"
)

const (
	cardFormat  = "kvprofile.model"
	cardVersion = 1
)

// card is model.json: what plans say of the model, so that they can be compiled without it.
type card struct {
	Format  string            `json:"format"`
	Version int               `json:"version"`
	Model   plan.Model        `json:"model"`
	Classes plan.TokenClasses `json:"token_classes"`
}

func cardOf(m *model.Model, p model.Fingerprint) card {
	c := card{Format: cardFormat, Version: cardVersion, Model: planModel(m, p)}
	if t := m.Tokenizer; t != nil {
		for id := range t.VocabSize() {
			switch {
			case t.IsSpecial(int32(id)):
				c.Classes.Special = append(c.Classes.Special, id)
			case t.IsPunctuation(int32(id)):
				c.Classes.Punctuation = append(c.Classes.Punctuation, id)
			}
		}
	}
	return c
}

// planModel describes a model as plans do.
func planModel(m *model.Model, p model.Fingerprint) plan.Model {
	c := m.Config
	out := plan.Model{Name: m.Name, Architecture: c.Architecture, NLayers: c.Layers, NHeads: c.Heads, NKVHeads: c.KVHeads, HeadDim: c.HeadDim,
		MaxPosition: c.MaxPosition, RoPE: plan.RoPE{Theta: c.RoPE.Theta, Scaling: planScaling(c.RoPE.Scaling)},
		SHA256: plan.Hashes{Config: p.Config, Weights: p.Weights, Tokenizer: p.Tokenizer}}
	for _, w := range c.SlidingWindow {
		if w > 0 {
			out.SlidingWindow = c.SlidingWindow
		}
	}
	return out
}

func planScaling(s *engine.RoPEScaling) *plan.RoPEScaling {
	if s == nil {
		return nil
	}
	if s.Divisors != nil {
		return &plan.RoPEScaling{Kind: plan.ScalingKind(s.Kind), Divisors: s.Divisors}
	}
	return &plan.RoPEScaling{Kind: plan.ScalingKind(s.Kind), Factor: s.Factor, LowFreqFactor: s.LowFreqFactor, HighFreqFactor: s.HighFreqFactor,
		OriginalMaxPosition: s.OriginalMaxPosition, BetaFast: s.BetaFast, BetaSlow: s.BetaSlow, AttentionFactor: s.AttentionFactor}
}

func readCard(path string) (*card, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	c := new(card)
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(c); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if c.Format != cardFormat || c.Version != cardVersion {
		return nil, fmt.Errorf("%s: format %q version %d, this program reads %q version %d", path, c.Format, c.Version, cardFormat, cardVersion)
	}
	return c, nil
}

// recordAt returns the record that a user means by its own folder or by a run folder, and where results made of it go.
func recordAt(path string) (record, beside string) {
	if _, err := os.Stat(filepath.Join(path, recordDir)); err == nil {
		return filepath.Join(path, recordDir), path
	}
	return path, filepath.Dir(filepath.Clean(path))
}

// output claims a file for a verb that needs no model: it locks the run folder that it lies in, if it is one, and
// refuses what is there already unless --force is given. release gives the lock back.
func (a *app) output(fallback string) (path string, release func(), err error) {
	return a.claim(fallback, a.shared.force)
}

// claim is output that may replace what is there, or not.
func (a *app) claim(fallback string, replace bool) (path string, release func(), err error) {
	if path, err = a.target(fallback, replace); err != nil {
		return "", nil, err
	}
	release = func() {}
	if _, err := os.Stat(filepath.Join(filepath.Dir(path), run.ManifestName)); err == nil {
		lock, err := run.Lock(filepath.Dir(path))
		if err != nil {
			return "", nil, err
		}
		release = func() { lock.Close() }
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", nil, err
	}
	return path, release, nil
}
