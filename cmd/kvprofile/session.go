package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/kvprofile/kvprofile/internal/engine/cuda"
	"github.com/kvprofile/kvprofile/internal/engine/devices"
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// session is work on one model in one locked run folder.
type session struct {
	app      *app
	model    *model.Model
	print    model.Fingerprint
	folder   *run.Folder
	backends backends
	loaded   *devices.Set // nil until a stage needs the weights
	worked   bool         // a stage was not up to date
}

// session locks the run folder of a model and chooses the backend: that which the folder was begun with.
func (a *app) session(dir string, m *model.Model) (*session, error) {
	kind, tier, precision := "", "", ""
	if !a.shared.force {
		switch old, err := run.Read(dir); {
		case err == nil:
			kind, tier, precision = old.Device, old.Tier, old.Precision
		case !errors.Is(err, fs.ErrNotExist):
			return nil, ui.Hint(err, "choose another folder with --out, or begin anew with --force")
		}
	}
	opened, err := a.newBackends(m.Inspect().Parameters, kind, tier, precision)
	if err != nil && kind != "" {
		return nil, ui.Hint(fmt.Errorf("%s: begun on another device: %w", dir, err), "choose another folder with --out, or begin anew with --force")
	}
	if err != nil {
		return nil, err
	}
	s := &session{app: a, model: m, print: m.Fingerprint(), backends: opened}
	device, tier, precision := tierOf(opened[0])
	s.folder, err = run.Open(dir, run.Manifest{
		Tool: tool(), Arguments: a.args, Seed: a.shared.seed, Threads: a.shared.threads, Device: device, Tier: tier, Precision: precision,
		Model: run.Model{Name: m.Name, Path: m.Path, SHA256: digests(s.print)},
	}, run.Options{Force: a.shared.force})
	if err != nil {
		return nil, errors.Join(err, opened.Close())
	}
	if err := run.WriteJSON(s.folder.Path(modelFile), cardOf(m, s.print)); err != nil {
		s.Close()
		return nil, err
	}
	if s.folder.Resumed {
		a.ui.Detail("%s: taking up an earlier run", dir)
	}
	return s, nil
}

// digests lists a fingerprint by name, as plans, records and run.json do.
func digests(p model.Fingerprint) map[string]string {
	return map[string]string{"config": p.Config, "weights": p.Weights, "tokenizer": p.Tokenizer}
}

// engine gives the weights to the devices, once.
func (s *session) engine() (*devices.Set, error) {
	if s.loaded != nil {
		return s.loaded, nil
	}
	set, err := s.app.load(s.model, s.backends)
	if err != nil {
		return nil, err
	}
	s.loaded = set
	return set, nil
}

// loadOn opens at most so many of the devices that were chosen and gives them a model's weights; release frees both.
func (a *app) loadOn(most int, m *model.Model) (set *devices.Set, release func(), err error) {
	opened, err := a.openBackends(most, m.Inspect().Parameters, "", "", "")
	if err != nil {
		return nil, nil, err
	}
	if set, err = a.load(m, opened); err != nil {
		return nil, nil, errors.Join(err, opened.Close())
	}
	return set, func() { set.Close(); opened.Close() }, nil
}

// load gives a model's weights to devices.
func (a *app) load(m *model.Model, on backends) (*devices.Set, error) {
	set, err := devices.New(m.Config, m, on...)
	if err != nil {
		return nil, &modelError{fmt.Errorf("model %s: %w", m.Path, err)}
	}
	for _, b := range on {
		if g, ok := b.(*cuda.Backend); ok && g.Streamed() > 0 {
			a.ui.Note("%s of the weights do not fit %s: they are copied to it whenever they are needed", ui.Bytes(g.Streamed()), g.Label())
		}
	}
	return set, nil
}

// unload gives back the weights' memory.
func (s *session) unload() {
	if s.loaded != nil {
		s.loaded.Close()
		s.loaded = nil
	}
}

// Close gives back the weights' memory and the lock.
func (s *session) Close() {
	s.unload()
	s.backends.Close()
	s.folder.Close()
}

// do runs a stage, and says why it is skipped or goes on.
func (s *session) do(ctx context.Context, stage run.Stage, work func(context.Context) error) error {
	known := s.folder.Has(stage.Name)
	state, err := s.folder.Do(ctx, stage, func(ctx context.Context, state run.State) error {
		s.worked = true
		switch {
		case state == run.Partial:
			s.app.ui.Note("%s: goes on from an earlier run", stage.Name)
		case known:
			s.app.ui.Note("%s: settings, inputs or outputs have changed", stage.Name)
		}
		return work(ctx)
	})
	if err == nil && state == run.Current {
		s.app.ui.Note("%s: up to date", stage.Name)
	}
	return err
}

// folderOf is the run folder of a model.
func (a *app) folderOf(m *model.Model) string {
	if a.shared.out != "" {
		return a.shared.out
	}
	return filepath.Join("out", slug(m.Name))
}

// input is a file or folder that a stage reads.
type input struct{ name, path string }

// inputs digests what a stage reads; what an earlier stage of this folder made has its digest already.
func (s *session) inputs(in []input) (map[string]string, error) {
	out := map[string]string{}
	for _, i := range in {
		if rel, err := filepath.Rel(s.folder.Dir, i.path); err == nil {
			if d := s.folder.Digest(filepath.ToSlash(rel)); d != "" {
				out[i.name] = d
				continue
			}
		}
		d, _, err := run.DigestPath(i.path)
		if err != nil {
			return nil, err
		}
		out[i.name] = d
	}
	return out, nil
}
