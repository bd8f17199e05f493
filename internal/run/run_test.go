package run

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func manifest() Manifest {
	return Manifest{Tool: Tool{Name: "kvprofile", Version: "1"}, Arguments: []string{"run", "m"},
		Model:  Model{Name: "m", SHA256: map[string]string{"config": "c", "weights": "w", "tokenizer": "t"}},
		Device: "cpu", Tier: "go", Precision: "f32"}
}

func open(t *testing.T, dir string, m Manifest, o Options) *Folder {
	t.Helper()
	f, err := Open(dir, m, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func writeStage(f *Folder, path, text string) func(context.Context, State) error {
	return func(context.Context, State) error {
		return WriteAtomic(f.Path(path), func(w io.Writer) error { _, err := io.WriteString(w, text); return err })
	}
}

func TestManifestIsThereBeforeAnyStage(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	at := time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC)
	open(t, dir, manifest(), Options{Now: func() time.Time { return at }})
	m, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if m.Model.SHA256["weights"] != "w" || !m.Started.Equal(at) || m.Stages != nil || m.Tier != "go" {
		t.Errorf("manifest %+v", m)
	}
}

func TestStageIsSkippedOnlyWhenAllIsAsRecorded(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	stage := Stage{Name: "one", Settings: map[string]int{"x": 1}, Inputs: map[string]string{"in": "d"}, Outputs: []string{"o/one"}}
	try := func(m Manifest, s Stage, prepare func()) State {
		t.Helper()
		if prepare != nil {
			prepare()
		}
		f, err := Open(dir, m, Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		state, err := f.Do(ctx, s, writeStage(f, "o/one", "text"))
		if err != nil {
			t.Fatal(err)
		}
		return state
	}
	other := func(change func(*Stage)) Stage { s := stage; change(&s); return s }
	upgraded := manifest()
	upgraded.Tool.Version = "2"
	retiered := manifest()
	retiered.Tier = "avx2"
	for _, c := range []struct {
		name    string
		m       Manifest
		s       Stage
		prepare func()
		want    State
	}{
		{"first", manifest(), stage, nil, Fresh},
		{"again", manifest(), stage, nil, Current},
		{"settings", manifest(), other(func(s *Stage) { s.Settings = map[string]int{"x": 2} }), nil, Fresh},
		{"back", manifest(), stage, nil, Fresh},
		{"input", manifest(), other(func(s *Stage) { s.Inputs = map[string]string{"in": "e"} }), nil, Fresh},
		{"version", upgraded, stage, nil, Fresh},
		{"tier", retiered, stage, nil, Fresh},
		{"back", manifest(), stage, nil, Fresh},
		{"changed output", manifest(), stage, func() { os.WriteFile(filepath.Join(dir, "o/one"), []byte("texT"), 0o644) }, Fresh},
		{"missing output", manifest(), stage, func() { os.Remove(filepath.Join(dir, "o/one")) }, Fresh},
		{"again", manifest(), stage, nil, Current},
	} {
		if got := try(c.m, c.s, c.prepare); got != c.want {
			t.Errorf("%s: state %v, want %v", c.name, got, c.want)
		}
	}
}

// An output that is amended leaves its stage up to date, also for the next process; one that is changed otherwise does not.
func TestAmendedOutputIsCurrent(t *testing.T) {
	dir := t.TempDir()
	stage := Stage{Name: "one", Outputs: []string{"o/one"}}
	write := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(text), 0o644) }
	}
	f := open(t, dir, manifest(), Options{})
	if err := f.Amend("one", "o/one", write("early")); err == nil {
		t.Error("a stage that has not run is amended")
	}
	if _, err := f.Do(context.Background(), stage, writeStage(f, "o/one", "text")); err != nil {
		t.Fatal(err)
	}
	if err := f.Amend("one", "o/two", write("x")); err == nil || exists(filepath.Join(dir, "o", "two")) {
		t.Errorf("an output that the stage has not: %v", err)
	}
	failed := errors.New("failed")
	if err := f.Amend("one", "o/one", func(string) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("%v, want %v", err, failed)
	}
	if err := f.Amend("one", "o/one", write("text and more")); err != nil {
		t.Fatal(err)
	}
	f.Close()
	again := open(t, dir, manifest(), Options{})
	if state, err := again.State(stage); err != nil || state != Current {
		t.Errorf("amended: state %v, %v", state, err)
	}
	if err := write("changed")(filepath.Join(dir, "o", "one")); err != nil {
		t.Fatal(err)
	}
	if state, err := again.State(stage); err != nil || state == Current {
		t.Errorf("changed: state %v, %v", state, err)
	}
}

func TestAmendInRecordsOnlyWhatTheStageLeft(t *testing.T) {
	stage := Stage{Name: "one", Outputs: []string{"one"}}
	write := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(text), 0o644) }
	}
	empty := t.TempDir()
	if err := AmendIn(empty, "one", "one", write("text")); err != nil || !exists(filepath.Join(empty, "one")) || exists(filepath.Join(empty, ManifestName)) {
		t.Errorf("no run folder: %v", err)
	}
	for _, c := range []struct {
		name, found string
		want        State
	}{{"as it was left", "text", Current}, {"changed by hand", "other text", Fresh}} {
		dir := t.TempDir()
		f := open(t, dir, manifest(), Options{})
		if _, err := f.Do(context.Background(), stage, writeStage(f, "one", "text")); err != nil {
			t.Fatal(err)
		}
		f.Close()
		if err := write(c.found)(filepath.Join(dir, "one")); err != nil {
			t.Fatal(err)
		}
		if err := AmendIn(dir, "one", "one", write("more")); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(filepath.Join(dir, "one")); err != nil || string(b) != "more" {
			t.Errorf("%s: %q, %v", c.name, b, err)
		}
		if state, err := open(t, dir, manifest(), Options{}).State(stage); err != nil || state != c.want {
			t.Errorf("%s: state %v, %v, want %v", c.name, state, err, c.want)
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestInterruptedStageGoesOnButOnlyWithTheSameInputs(t *testing.T) {
	dir := t.TempDir()
	stage := Stage{Name: "parts", Inputs: map[string]string{"in": "d"}, Outputs: []string{"parts"}}
	ctx, cancel := context.WithCancel(context.Background())
	f := open(t, dir, manifest(), Options{})
	_, err := f.Do(ctx, stage, func(ctx context.Context, s State) error {
		if err := writeStage(f, "parts/0", "zero")(ctx, s); err != nil {
			return err
		}
		cancel()
		return ctx.Err()
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v, want context.Canceled", err)
	}
	if _, err := f.Do(ctx, Stage{Name: "next"}, nil); !errors.Is(err, context.Canceled) {
		t.Fatalf("a stage began after the end of the context: %v", err)
	}
	f.Close()

	f = open(t, dir, manifest(), Options{})
	state, err := f.Do(context.Background(), stage, func(ctx context.Context, s State) error {
		if _, err := os.Stat(f.Path("parts/0")); err != nil {
			t.Errorf("the part of the interrupted run is gone: %v", err)
		}
		return writeStage(f, "parts/1", "one")(ctx, s)
	})
	if err != nil || state != Partial || !f.Resumed {
		t.Fatalf("state %v, error %v, resumed %v", state, err, f.Resumed)
	}
	if f.Digest("parts") == "" {
		t.Error("no digest of a finished stage")
	}

	stage.Inputs = map[string]string{"in": "e"}
	state, err = f.Do(context.Background(), stage, func(ctx context.Context, s State) error {
		if _, err := os.Stat(f.Path("parts/0")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("a part of other inputs is still there: %v", err)
		}
		return writeStage(f, "parts/1", "one")(ctx, s)
	})
	if err != nil || state != Fresh {
		t.Fatalf("state %v, error %v", state, err)
	}
	stage.Inputs, stage.Costly = map[string]string{"in": "f"}, true
	var stale *StaleError
	if _, err = f.Do(context.Background(), stage, nil); !errors.As(err, &stale) {
		t.Fatalf("costly work of other inputs: error %v, want a StaleError", err)
	}
	if _, err := os.Stat(f.Path("parts/1")); err != nil {
		t.Errorf("costly work was removed: %v", err)
	}
}

func TestOtherModelIsRefused(t *testing.T) {
	dir := t.TempDir()
	open(t, dir, manifest(), Options{}).Close()
	m := manifest()
	m.Model.SHA256 = map[string]string{"config": "c", "weights": "w2", "tokenizer": "t"}
	var other *OtherModelError
	if _, err := Open(dir, m, Options{}); !errors.As(err, &other) || other.What != "weights" {
		t.Fatalf("error %v, want OtherModelError of the weights", err)
	}
	if old, err := Read(dir); err != nil || old.Model.SHA256["weights"] != "w" {
		t.Errorf("the refused folder was changed: %+v, %v", old, err)
	}
	if f := open(t, dir, m, Options{Force: true}); f.Resumed {
		t.Error("forced run calls itself resumed")
	}
}

func TestReferenceIsRefused(t *testing.T) {
	dir := t.TempDir()
	ref := filepath.Join(dir, "out", "reference")
	if err := os.MkdirAll(ref, 0o777); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(ref, link); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{ref, filepath.Join(ref, "m"), link, filepath.Join(link, "m")} {
		var r *ReferenceError
		if _, err := Open(d, manifest(), Options{Force: true}); !errors.As(err, &r) {
			t.Errorf("%s: error %v, want ReferenceError", d, err)
		}
		if _, err := os.Stat(filepath.Join(d, ManifestName)); err == nil {
			t.Errorf("%s: a manifest was written", d)
		}
	}
	open(t, filepath.Join(dir, "out", "references"), manifest(), Options{})
}

func TestBrokenManifestIsAnErrorThatNamesIt(t *testing.T) {
	for _, text := range []string{"", "{", `{"format":"kvprofile.run","version":2}`, `{"format":"kvprofile.run","version":1,"more":1}`} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, ManifestName), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir, manifest(), Options{}); err == nil || !strings.Contains(err.Error(), ManifestName) {
			t.Errorf("%q: error %v", text, err)
		}
	}
}

func TestDigestSeesNamesAndBytesButNotTemporaryFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	digest := func() string {
		t.Helper()
		d, _, err := DigestPath(dir)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	write("a/x", "1")
	write("b", "2")
	first := digest()
	write(".b"+tempMark+"7", "half")
	if digest() != first {
		t.Error("a temporary file counts")
	}
	write("b", "3")
	second := digest()
	write("b", "2")
	if second == first || digest() != first {
		t.Error("digest does not follow the bytes")
	}
	if err := os.Rename(filepath.Join(dir, "b"), filepath.Join(dir, "c")); err != nil {
		t.Fatal(err)
	}
	if digest() == first {
		t.Error("digest does not follow the names")
	}
}

func TestWriteAtomicLeavesNothingBehindOnError(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := os.WriteFile(path, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	cause := errors.New("full")
	err := WriteAtomic(path, func(w io.Writer) error { io.WriteString(w, "ne"); return cause })
	if !errors.Is(err, cause) {
		t.Errorf("error %v does not wrap its cause", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(path); string(b) != "old" || len(entries) != 1 {
		t.Errorf("file %q, %d entries", b, len(entries))
	}
}

// The lock is held between processes: a child of this test tries the folder.
func TestLockRefusesAnotherProcess(t *testing.T) {
	if dir := os.Getenv("RUN_LOCK_TEST_DIR"); dir != "" {
		var locked *LockedError
		if _, err := Open(dir, manifest(), Options{}); errors.As(err, &locked) {
			os.Stdout.WriteString("locked by " + locked.Host + ": " + err.Error() + "\n")
		}
		return
	}
	dir := t.TempDir()
	f := open(t, dir, manifest(), Options{})
	child := func() []byte {
		t.Helper()
		cmd := exec.Command(os.Args[0], "-test.run=^TestLockRefusesAnotherProcess$")
		cmd.Env = append(os.Environ(), "RUN_LOCK_TEST_DIR="+dir)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return out
	}
	out := child()
	if !bytes.Contains(out, []byte("locked by")) || !bytes.Contains(out, []byte("process ")) {
		t.Errorf("second process: %s", out)
	}
	f.Close()
	if out := child(); bytes.Contains(out, []byte("locked by")) {
		t.Errorf("lock outlives its holder: %s", out)
	}
}
