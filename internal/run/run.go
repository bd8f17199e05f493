// Package run keeps run folders: run.json first, then the artefacts of the stages, each written under a temporary
// name and renamed when whole. A stage whose inputs, settings and outputs are as recorded is skipped; one that was
// interrupted with the same inputs and settings goes on from what it left; anything else begins anew. So a rerun
// takes up where a stopped run was and ends with the same bytes as an unbroken one.
package run

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// ManifestName is the file that describes a run folder.
const ManifestName = "run.json"

const (
	manifestFormat  = "kvprofile.run"
	manifestVersion = 1
)

// Manifest is run.json. Times stand here and nowhere else, so that the artefacts of equal runs are equal.
type Manifest struct {
	Format  string `json:"format"`
	Version int    `json:"version"`
	Tool    Tool   `json:"tool"`
	// Arguments is the command line of the last start.
	Arguments []string `json:"arguments"`
	Model     Model    `json:"model"`
	Seed      uint64   `json:"seed"`
	Device    string   `json:"device"`
	// Tier and Precision name the kernels: bytes are promised within one of them, so a resumed run keeps both.
	Tier      string    `json:"tier"`
	Precision string    `json:"precision"`
	Threads   int       `json:"threads"`
	Started   time.Time `json:"started"`
	Finished  time.Time `json:"finished,omitzero"`
	Stages    []Record  `json:"stages"`
}

// Tool is the program that made the folder.
type Tool struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
}

// Model says whose artefacts these are. Digests by name: "config", "weights", "tokenizer".
type Model struct {
	Name   string            `json:"name"`
	Path   string            `json:"path"`
	SHA256 map[string]string `json:"sha256"`
}

// Record is what run.json says of one stage.
type Record struct {
	Name string `json:"name"`
	// Key is the digest of the tool's version, the stage's settings and its inputs' digests.
	Key     string            `json:"key"`
	Inputs  map[string]string `json:"inputs,omitempty"`
	Done    bool              `json:"done"`
	Outputs []Output          `json:"outputs,omitempty"`
	Started time.Time         `json:"started"`
	Seconds float64           `json:"seconds,omitempty"`
}

// Output is one artefact: a file or a folder, relative to the run folder, in slashes.
type Output struct {
	Path   string `json:"path"`
	SHA256 string `json:"sha256"`
	Bytes  int64  `json:"bytes"`
}

// Read reads a run folder's manifest. The error is fs.ErrNotExist where there is none.
func Read(dir string) (*Manifest, error) {
	path := filepath.Join(dir, ManifestName)
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	m := new(Manifest)
	if err := d.Decode(m); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if m.Format != manifestFormat || m.Version != manifestVersion {
		return nil, fmt.Errorf("%s: format %q version %d, this program reads %q version %d", path, m.Format, m.Version, manifestFormat, manifestVersion)
	}
	return m, nil
}

// OtherModelError says that a run folder holds another model's artefacts.
type OtherModelError struct {
	Dir  string
	Name string // the model of the folder
	What string // which digest differs: "config", "weights" or "tokenizer"
}

func (e *OtherModelError) Error() string {
	return fmt.Sprintf("%s belongs to another model (%s): the hash of its %s is another", e.Dir, e.Name, e.What)
}

// ReferenceError says that a folder holds plans that were reviewed, and is not to be written by runs.
type ReferenceError struct{ Dir string }

func (e *ReferenceError) Error() string {
	return fmt.Sprintf("%s lies in out/reference, which holds reviewed plans: a run does not write there", e.Dir)
}

// Folder is a run folder that this process has locked.
type Folder struct {
	Dir string
	// Resumed says that the folder had a manifest of the same model.
	Resumed bool

	manifest Manifest
	lock     *os.File
	now      func() time.Time
}

// Options of Open.
type Options struct {
	Force bool             // discard what stands recorded, also of another model
	Now   func() time.Time // nil: time.Now
}

// Open makes the folder if need be, locks it, and writes its manifest. A manifest that is there must be of the same
// model; its stage records are kept, so that Stage can skip and resume.
//
// Errors: *LockedError, *OtherModelError, *ReferenceError, or of the file system.
func Open(dir string, m Manifest, o Options) (*Folder, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if err := CheckReference(dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, err
	}
	// Again, now that links in the path can be followed to their ends.
	if err := CheckReference(dir); err != nil {
		return nil, err
	}
	lock, err := lockDir(dir, o.Now())
	if err != nil {
		return nil, err
	}
	f := &Folder{Dir: dir, lock: lock, now: o.Now}
	if err := f.begin(m, o.Force); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func (f *Folder) begin(m Manifest, force bool) error {
	m.Format, m.Version = manifestFormat, manifestVersion
	m.Started, m.Finished, m.Stages = f.now().UTC(), time.Time{}, nil
	old, err := Read(f.Dir)
	switch {
	case force || errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	default:
		if what, same := sameModel(old.Model, m.Model); !same {
			return &OtherModelError{Dir: f.Dir, Name: old.Model.Name, What: what}
		}
		m.Stages = old.Stages
		f.Resumed = true
	}
	f.manifest = m
	return f.save()
}

func sameModel(a, b Model) (what string, same bool) {
	for _, what := range []string{"config", "weights", "tokenizer"} {
		if a.SHA256[what] != b.SHA256[what] {
			return what, false
		}
	}
	return "", true
}

// CheckReference returns a *ReferenceError for a folder in out/reference, with links followed as far as they exist.
func CheckReference(dir string) error {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	if real, err := filepath.EvalSymlinks(abs); err == nil {
		abs = real
	}
	parts := strings.Split(filepath.ToSlash(abs), "/")
	for i := 1; i < len(parts); i++ {
		if parts[i-1] == "out" && parts[i] == "reference" {
			return &ReferenceError{Dir: dir}
		}
	}
	return nil
}

func (f *Folder) save() error {
	return WriteJSON(filepath.Join(f.Dir, ManifestName), f.manifest)
}

// Manifest returns what run.json says now.
func (f *Folder) Manifest() Manifest {
	m := f.manifest
	m.Stages = append([]Record(nil), m.Stages...)
	return m
}

// Path joins names to the folder's.
func (f *Folder) Path(names ...string) string {
	return filepath.Join(append([]string{f.Dir}, names...)...)
}

// Has says whether the folder has a record of a stage, finished or not.
func (f *Folder) Has(stage string) bool { return f.record(stage) != nil }

// Digest returns the digest of a finished stage's output, "" if there is none.
func (f *Folder) Digest(output string) string {
	for _, r := range f.manifest.Stages {
		for _, o := range r.Outputs {
			if r.Done && o.Path == output {
				return o.SHA256
			}
		}
	}
	return ""
}

// Stage is a step of a run.
type Stage struct {
	Name string
	// Settings decide what the stage computes; they must encode as JSON. The number of threads is none of them.
	Settings any
	// Inputs are digests by name.
	Inputs map[string]string
	// Outputs are files and folders relative to the run folder, in slashes.
	Outputs []string
	// Scratch are files and folders that an interrupted stage goes on from, beside what is in its outputs. They are
	// removed when the stage is done.
	Scratch []string `json:"-"`
	// Costly work of other settings or inputs is not thrown away unasked: Do returns a *StaleError instead.
	Costly bool `json:"-"`
}

// StaleError says that a folder holds a costly stage's work of other settings, inputs or version of the tool.
type StaleError struct{ Dir, Stage string }

func (e *StaleError) Error() string {
	return fmt.Sprintf("%s holds a %s stage of other settings, inputs or version", e.Dir, e.Stage)
}

// State says what Do will do with a stage.
type State int

const (
	Fresh   State = iota // begins anew
	Partial              // goes on from what an interrupted run left
	Current              // is skipped: outputs are there, whole and of these inputs and settings
)

// State compares a stage with its record and, if it was finished, its outputs with their digests.
func (f *Folder) State(s Stage) (State, error) {
	key, err := f.key(s)
	if err != nil {
		return Fresh, err
	}
	r := f.record(s.Name)
	if r == nil || r.Key != key {
		return Fresh, nil
	}
	if !r.Done {
		return Partial, nil
	}
	if len(r.Outputs) != len(s.Outputs) {
		return Fresh, nil
	}
	for i, o := range r.Outputs {
		digest, _, err := DigestPath(f.Path(filepath.FromSlash(o.Path)))
		if o.Path != s.Outputs[i] || err != nil && !errors.Is(err, fs.ErrNotExist) {
			return Fresh, err
		}
		if digest != o.SHA256 {
			return Fresh, nil
		}
	}
	return Current, nil
}

// Do runs a stage unless it is Current. Before a Fresh stage its outputs are removed, so that nothing of other inputs
// is mixed in. work must leave all outputs whole, or return an error; after a context's end it may leave whole parts
// for the next run to go on from.
func (f *Folder) Do(ctx context.Context, s Stage, work func(context.Context, State) error) (State, error) {
	state, err := f.State(s)
	if err != nil || state == Current {
		return state, err
	}
	if err := ctx.Err(); err != nil {
		return state, err
	}
	key, err := f.key(s)
	if err != nil {
		return state, err
	}
	if state == Fresh {
		if r := f.record(s.Name); s.Costly && r != nil && r.Key != key {
			return state, &StaleError{Dir: f.Dir, Stage: s.Name}
		}
		if err := f.remove(s.Outputs); err != nil {
			return state, err
		}
		if err := f.remove(s.Scratch); err != nil {
			return state, err
		}
	}
	start := f.now()
	r := Record{Name: s.Name, Key: key, Inputs: s.Inputs, Started: start.UTC()}
	if err := f.put(r); err != nil {
		return state, err
	}
	if err := work(ctx, state); err != nil {
		return state, fmt.Errorf("%s: %w", s.Name, err)
	}
	for _, o := range s.Outputs {
		digest, size, err := DigestPath(f.Path(filepath.FromSlash(o)))
		if err != nil {
			return state, fmt.Errorf("%s: %w", s.Name, err)
		}
		r.Outputs = append(r.Outputs, Output{Path: o, SHA256: digest, Bytes: size})
	}
	r.Done, r.Seconds = true, f.now().Sub(start).Seconds()
	if err := f.put(r); err != nil {
		return state, err
	}
	return state, f.remove(s.Scratch)
}

// Amend writes an output of a finished stage anew, with what a later stage found out about it; write gets its path. The
// stage stays up to date. Interrupted in between, it is not, and will be done again.
func (f *Folder) Amend(stage, output string, write func(path string) error) error {
	r := f.record(stage)
	if r == nil || !r.Done {
		return fmt.Errorf("%s: stage %s has not ended", f.Dir, stage)
	}
	at := slices.IndexFunc(r.Outputs, func(o Output) bool { return o.Path == output })
	if at < 0 {
		return fmt.Errorf("%s: stage %s has no output %s", f.Dir, stage, output)
	}
	path := f.Path(filepath.FromSlash(output))
	if err := write(path); err != nil {
		return err
	}
	digest, size, err := DigestPath(path)
	if err != nil {
		return err
	}
	r.Outputs[at] = Output{Path: output, SHA256: digest, Bytes: size}
	return f.save()
}

// AmendIn is [Folder.Amend] for a folder that is locked but not open. Where dir is no run folder, or the output is not as
// the stage left it, the output is written and nothing is recorded.
func AmendIn(dir, stage, output string, write func(path string) error) error {
	f := &Folder{Dir: dir}
	path := f.Path(filepath.FromSlash(output))
	m, err := Read(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return write(path)
	}
	if err != nil {
		return err
	}
	f.manifest = *m
	if r := f.record(stage); r != nil && r.Done {
		digest, _, err := DigestPath(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if slices.ContainsFunc(r.Outputs, func(o Output) bool { return o.Path == output && o.SHA256 == digest }) {
			return f.Amend(stage, output, write)
		}
	}
	return write(path)
}

func (f *Folder) remove(paths []string) error {
	for _, p := range paths {
		if err := os.RemoveAll(f.Path(filepath.FromSlash(p))); err != nil {
			return err
		}
	}
	return nil
}

func (f *Folder) record(name string) *Record {
	for i := range f.manifest.Stages {
		if f.manifest.Stages[i].Name == name {
			return &f.manifest.Stages[i]
		}
	}
	return nil
}

func (f *Folder) put(r Record) error {
	if old := f.record(r.Name); old != nil {
		*old = r
	} else {
		f.manifest.Stages = append(f.manifest.Stages, r)
	}
	return f.save()
}

// key digests what a stage's outputs depend on. JSON sorts the keys of maps.
func (f *Folder) key(s Stage) (string, error) {
	b, err := json.Marshal(struct {
		Tool      Tool
		Model     map[string]string
		Precision [3]string
		Stage     Stage
	}{f.manifest.Tool, f.manifest.Model.SHA256, [3]string{f.manifest.Device, f.manifest.Tier, f.manifest.Precision}, s})
	if err != nil {
		return "", fmt.Errorf("%s: settings: %w", s.Name, err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// Finish writes the time of the end.
func (f *Folder) Finish() error {
	f.manifest.Finished = f.now().UTC()
	return f.save()
}

// Close gives the lock back.
func (f *Folder) Close() error { return f.lock.Close() }
