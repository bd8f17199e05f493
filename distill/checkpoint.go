package distill

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// CheckpointFile is the name of the checkpoint in its directory.
const CheckpointFile = "checkpoint.json"

const checkpointFormat = "kvprofile.gates-checkpoint.1"

// checkpoint is everything that the next step depends on.
type checkpoint struct {
	Format  string       `json:"format"`
	Options string       `json:"options"` // Options.Hash
	Model   string       `json:"model"`   // fingerprint
	Shape   [2]int       `json:"shape"`   // layers, KV heads
	Dataset string       `json:"dataset"` // content hash
	Backend string       `json:"backend"` // another tier rounds otherwise
	Step    int          `json:"step"`    // steps done
	Gates   []float64    `json:"gates"`
	First   []float64    `json:"first_moment"`
	Second  []float64    `json:"second_moment"`
	Curve   []CurvePoint `json:"curve"`
}

// CheckpointError says that a checkpoint is not of this training, or is damaged. Remove it, or choose another folder.
type CheckpointError struct {
	Path string
	// What differs ("options", "model", "dataset", "backend"), or "content" for a damaged file.
	What string
	// Have stands in the file, Want is this training's.
	Have, Want string
	Err        error
}

func (e *CheckpointError) Error() string {
	if e.What == "content" {
		return fmt.Sprintf("checkpoint %s is damaged: %v; remove it to start anew", e.Path, e.Err)
	}
	return fmt.Sprintf("checkpoint %s belongs to another training: its %s is %s, here it is %s; remove it to start anew", e.Path, e.What, e.Have, e.Want)
}

func (e *CheckpointError) Unwrap() error { return e.Err }

// save writes the checkpoint to a temporary name and renames it when whole.
func (t *trainer) save() error {
	c := checkpoint{
		Format: checkpointFormat, Options: t.opt.Hash(), Model: t.opt.Model,
		Shape:   [2]int{t.model.Config.Layers, t.model.Config.KVHeads},
		Dataset: t.ds.Meta.ContentHash, Backend: t.model.Backend.Name(), Step: t.solver.steps, Gates: t.parameters(),
		First: t.solver.first, Second: t.solver.second, Curve: t.curve,
	}
	text, err := json.Marshal(c) // shortest text that reads back as the same bits
	if err != nil {
		return err
	}
	if err := os.MkdirAll(t.opt.Checkpoint, 0o755); err != nil {
		return err
	}
	if err := writeWhole(filepath.Join(t.opt.Checkpoint, CheckpointFile), text); err != nil {
		return err
	}
	t.saved = t.solver.steps
	return nil
}

// resume takes up the checkpoint, where there is one.
func (t *trainer) resume() error {
	path := filepath.Join(t.opt.Checkpoint, CheckpointFile)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	damaged := func(format string, args ...any) error {
		return &CheckpointError{Path: path, What: "content", Err: fmt.Errorf(format, args...)}
	}
	var c checkpoint
	if err := json.Unmarshal(text, &c); err != nil {
		return damaged("%w", err)
	}
	for _, p := range []struct{ what, have, want string }{
		{"format", c.Format, checkpointFormat},
		{"options", c.Options, t.opt.Hash()},
		{"model", c.Model, t.opt.Model},
		{"shape", fmt.Sprint(c.Shape), fmt.Sprint([2]int{t.model.Config.Layers, t.model.Config.KVHeads})},
		{"dataset", c.Dataset, t.ds.Meta.ContentHash},
		{"backend", c.Backend, t.model.Backend.Name()},
	} {
		if p.have != p.want {
			return &CheckpointError{Path: path, What: p.what, Have: p.have, Want: p.want}
		}
	}
	n := len(t.parameters())
	if c.Step < 0 || c.Step > t.opt.Steps || len(c.Curve) != c.Step {
		return damaged("%d steps with a curve of %d, of %d steps", c.Step, len(c.Curve), t.opt.Steps)
	}
	if len(c.Gates) != n || len(c.First) != n || len(c.Second) != n {
		return damaged("%d gates with %d and %d moments, want %d", len(c.Gates), len(c.First), len(c.Second), n)
	}
	for i, g := range c.Gates {
		if !(g >= 0 && g <= 1) || c.Second[i] < 0 {
			return damaged("gate %d is %g with a second moment of %g", i, g, c.Second[i])
		}
	}
	copy(t.parameters(), c.Gates)
	t.solver.steps, t.solver.first, t.solver.second = c.Step, c.First, c.Second
	t.curve, t.saved = c.Curve, c.Step
	return nil
}

// writeWhole writes a file under a temporary name beside it, and renames it when it is on the disk.
func writeWhole(path string, data []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if _, err = f.Write(data); err != nil {
		return err
	}
	if err = f.Sync(); err != nil {
		return err
	}
	if err = f.Chmod(0o644); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
