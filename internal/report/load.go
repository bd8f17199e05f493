package report

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/fastgen"
	"github.com/kvprofile/kvprofile/internal/eval"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/profile"
	"github.com/kvprofile/kvprofile/pyramid"
)

// Names of the artefacts in a run folder; gates are those with the scores that they are compared with, or else those as
// they were trained.
const (
	planFile    = "plan.json"
	gatesDir    = "gates"
	trainedDir  = "trained"
	fastgenFile = "fastgen.json"
	pyramidFile = "pyramid.json"
	recordDir   = "record"
)

// Inputs are the artefacts of one model; those that a folder does not have are nil.
type Inputs struct {
	Manifest *run.Manifest
	Plan     *plan.Plan
	Gates    *distill.Gates
	FastGen  *fastgen.Result
	Pyramid  *pyramid.Artefact
	Record   *profile.Record
	Evals    []Evaluation
	// RecordMissing says why there is no record, where its folder is there.
	RecordMissing string
}

// Evaluation is a result of eval with the name of its file.
type Evaluation struct {
	Name   string
	Result *eval.Result
}

// ModelError says that an artefact is of another model than those before it.
type ModelError struct {
	Path, Other string
	What        string // what differs
}

func (e *ModelError) Error() string {
	return fmt.Sprintf("%s belongs to another model than %s: %s differs", e.Path, e.Other, e.What)
}

// EmptyError says that a folder has nothing to report.
type EmptyError struct{ Dir string }

func (e *EmptyError) Error() string {
	return fmt.Sprintf("%s holds nothing to report: neither plan.json nor gates, record, fastgen.json, pyramid.json or eval.json", e.Dir)
}

// identity is what artefacts say of their model; values that one does not say are left empty.
type identity struct {
	path                   string
	layers, heads, kvHeads int
	sha256                 map[string]string
}

// Open reads what a run folder has. evals are further evaluations; eval.json in the folder comes first.
//
// Errors name the file: *EmptyError, *ModelError, those of the loaders.
func Open(dir string, evals ...string) (*Inputs, error) {
	if info, err := os.Stat(dir); err != nil {
		return nil, err
	} else if !info.IsDir() {
		return nil, fmt.Errorf("%s is no folder: give the run folder", dir)
	}
	in := new(Inputs)
	var known []identity
	path := func(name string) string { return filepath.Join(dir, name) }
	// Each load returns what the artefact says of its model.
	loads := []func() (identity, error){
		func() (identity, error) {
			m, err := run.Read(dir)
			if err != nil {
				return identity{}, named(path(run.ManifestName), err)
			}
			in.Manifest = m
			return identity{path: path(run.ManifestName), sha256: m.Model.SHA256}, nil
		},
		func() (identity, error) {
			data, err := os.ReadFile(path(planFile))
			if err != nil {
				return identity{}, err
			}
			p, err := plan.Parse(data)
			if err != nil {
				return identity{}, fmt.Errorf("%s: %w", path(planFile), err)
			}
			in.Plan = p
			return ofPlan(path(planFile), &p.Model), nil
		},
		func() (identity, error) {
			for _, name := range []string{gatesDir, trainedDir} {
				g, err := distill.Load(path(name))
				if errors.Is(err, fs.ErrNotExist) {
					continue
				}
				if err != nil {
					return identity{}, named(path(name), err)
				}
				in.Gates = g
				id := identity{path: path(name), layers: len(g.Values)}
				if len(g.Values) > 0 {
					id.kvHeads = len(g.Values[0])
				}
				return id, nil
			}
			return identity{}, fs.ErrNotExist
		},
		func() (identity, error) {
			f, err := fastgen.Load(path(fastgenFile))
			if err != nil {
				return identity{}, named(path(fastgenFile), err)
			}
			in.FastGen = f
			return ofRecord(path(fastgenFile), &f.Model), nil
		},
		func() (identity, error) {
			a, err := pyramid.Load(path(pyramidFile))
			if err != nil {
				return identity{}, named(path(pyramidFile), err)
			}
			in.Pyramid = a
			return ofRecord(path(pyramidFile), &a.Model), nil
		},
		func() (identity, error) {
			r, err := profile.Open(path(recordDir))
			var incomplete *profile.IncompleteError
			if errors.As(err, &incomplete) {
				in.RecordMissing = "The record is not complete: the run that makes it has not ended."
				return identity{}, fs.ErrNotExist
			}
			if err != nil {
				return identity{}, named(path(recordDir), err)
			}
			in.Record = r
			m := r.Meta().Model
			return ofRecord(path(recordDir), &m), nil
		},
	}
	files := append([]string{path(eval.File)}, evals...)
	for i, file := range files {
		loads = append(loads, func() (identity, error) {
			r, err := eval.Load(file)
			if i > 0 && errors.Is(err, fs.ErrNotExist) {
				return identity{}, fmt.Errorf("no evaluation: %s is not there", file) // one that was asked for
			}
			if err != nil {
				return identity{}, named(file, err)
			}
			in.Evals = append(in.Evals, Evaluation{Name: filepath.Base(file), Result: r})
			return ofPlan(file, &r.Model), nil
		})
	}
	for _, load := range loads {
		id, err := load()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, other := range known {
			if what := id.differs(other); what != "" {
				return nil, &ModelError{Path: id.path, Other: other.path, What: what}
			}
		}
		known = append(known, id)
	}
	if len(known) == 0 || len(known) == 1 && in.Manifest != nil {
		return nil, &EmptyError{Dir: dir}
	}
	return in, nil
}

// named makes an error of a loader say the file, if it does not.
func named(path string, err error) error {
	if err == nil || errors.Is(err, fs.ErrNotExist) || strings.Contains(err.Error(), path) {
		return err
	}
	return fmt.Errorf("%s: %w", path, err)
}

func ofPlan(path string, m *plan.Model) identity {
	return identity{path: path, layers: m.NLayers, heads: m.NHeads, kvHeads: m.NKVHeads,
		sha256: map[string]string{"config": m.SHA256.Config, "weights": m.SHA256.Weights, "tokenizer": m.SHA256.Tokenizer}}
}

func ofRecord(path string, m *profile.Model) identity {
	return identity{path: path, layers: m.Layers, heads: m.Heads, kvHeads: m.KVHeads, sha256: m.SHA256}
}

// differs names the first thing in which two identities contradict one another, "" for none.
func (a identity) differs(b identity) string {
	for _, v := range []struct {
		what string
		a, b int
	}{{"the number of layers", a.layers, b.layers}, {"the number of query heads", a.heads, b.heads}, {"the number of KV heads", a.kvHeads, b.kvHeads}} {
		if v.a != 0 && v.b != 0 && v.a != v.b {
			return v.what
		}
	}
	for _, name := range []string{"config", "weights", "tokenizer"} {
		if a.sha256[name] != "" && b.sha256[name] != "" && a.sha256[name] != b.sha256[name] {
			return "the hash of its " + name
		}
	}
	return ""
}
