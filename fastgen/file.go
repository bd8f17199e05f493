package fastgen

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/kvprofile/kvprofile/internal/run"
)

// FormatError says that a file is no fastgen.json that this program reads.
type FormatError = run.FormatError

// Save writes fastgen.json; path is as it was or whole.
func (r *Result) Save(path string) error { return run.WriteJSON(path, r) }

// Load reads a fastgen.json. Unknown members, versions and policies are errors.
func Load(path string) (*Result, error) {
	return run.LoadJSON(path, "cannot be read as fastgen policies", decode)
}

func decode(from io.Reader) (*Result, error) {
	r := new(Result)
	if err := run.ReadJSON(from, formatName, formatVersion, r); err != nil {
		return nil, err
	}
	return r, r.check()
}

func (r *Result) check() error {
	if err := r.Options.check(); err != nil {
		return err
	}
	m := r.Model
	if !slices.Equal(r.Lattice, r.Options.Lattice()) {
		return errors.New("the lattice is not the one of the options")
	}
	if m.Layers < 1 || m.KVHeads < 1 || m.Heads < 1 || m.Heads%m.KVHeads != 0 || len(r.Layers) != m.Layers {
		return fmt.Errorf("%d layers for a model of %d layers, %d query heads and %d KV heads", len(r.Layers), m.Layers, m.Heads, m.KVHeads)
	}
	for l, layer := range r.Layers {
		if len(layer) != m.KVHeads {
			return fmt.Errorf("layer %d has %d KV heads, the model %d", l, len(layer), m.KVHeads)
		}
		for k, h := range layer {
			if err := r.checkHead(h); err != nil {
				return fmt.Errorf("layer %d, KV head %d: %w", l, k, err)
			}
		}
	}
	return nil
}

func (r *Result) checkHead(h Head) error {
	for _, list := range [][]float64{h.Recovery, h.Kept, h.KeptMax} {
		if len(list) != steps || !slices.IsSorted(list) || list[0] < 0 || list[steps-1] > 1+1e-9 {
			return fmt.Errorf("%v are not %d ascending shares", list, steps)
		}
	}
	want := r.Options.pick(h.Recovery)
	if want < 0 {
		want = StepFull
	}
	if h.Policy != want {
		return fmt.Errorf("policy %d, but the recoveries ask for %d", h.Policy, want)
	}
	for _, p := range []int{h.FirstHalf, h.SecondHalf, h.Answers} {
		if p < -1 || p > StepFull {
			return fmt.Errorf("policy %d", p)
		}
	}
	return nil
}
