package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// call runs the command in this process, with the configuration tiny.yaml in dir if there is one.
func call(ctx context.Context, dir string, args ...string) (code int, stdout, stderr string) {
	var out, log bytes.Buffer
	var env []string
	if config := filepath.Join(dir, "tiny.yaml"); exists(config) {
		env = append(env, "KVPROFILE_CONFIG="+config)
	}
	code = Main(ctx, args, strings.NewReader(""), &out, &log, env)
	return code, out.String(), log.String()
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func tinyDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	// More steps than in the scenarios, so that an interrupt meets the training too.
	if err := os.WriteFile(filepath.Join(dir, "tiny.yaml"), []byte(tiny+"  repeats: 2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// A run that is interrupted again and again ends with the plan of an unbroken one.
func TestInterruptedRunEndsWithTheSameBytes(t *testing.T) {
	dir := tinyDir(t)
	run := func(ctx context.Context, out string) (int, string) {
		code, _, log := call(ctx, dir, "run", testdata+"llama", "-o", filepath.Join(dir, out), "--steps", "60", "--learning-rate", "0.2")
		return code, log
	}
	begin := time.Now()
	if code, log := run(context.Background(), "whole"); code != exitDone {
		t.Fatalf("exit code %d: %s", code, log)
	}
	took := time.Since(begin)
	r := rand.New(rand.NewPCG(7, 8))
	interrupted := 0
	for round := range 3 {
		out := filepath.Join("broken", string(rune('a'+round)))
		for attempt := 0; ; attempt++ {
			ctx, cancel := context.WithCancel(context.Background())
			// Later attempts get longer, so that the loop ends on a loaded machine, too.
			limit := time.Duration(r.Float64() * float64(took) * (0.6 + 0.1*float64(attempt)))
			timer := time.AfterFunc(limit, cancel)
			code, log := run(ctx, out)
			timer.Stop()
			cancel()
			if code == exitDone {
				break
			}
			interrupted++
			if code != exitInterrupted || !strings.Contains(log, "hint: run the same command again to resume") {
				t.Fatalf("exit code %d: %s", code, log)
			}
		}
		for _, name := range []string{planFile, fastgenFile, pyramidFile, "gates/gates.parquet", modelFile} {
			a, err1 := os.ReadFile(filepath.Join(dir, "whole", name))
			b, err2 := os.ReadFile(filepath.Join(dir, out, name))
			if err1 != nil || err2 != nil || !bytes.Equal(a, b) {
				t.Errorf("round %d: %s differs from that of an unbroken run (%v, %v)", round, name, err1, err2)
			}
		}
		if _, err := os.Stat(filepath.Join(dir, out, checkpointDir)); err == nil {
			t.Errorf("round %d: the checkpoint is still there", round)
		}
	}
	if interrupted == 0 {
		t.Error("no run was interrupted: nothing was tested")
	}
	t.Logf("%d interrupts in 3 runs", interrupted)
}

// A weight that is no number stops the run, and the message says where.
func TestNaNWeightsAreAModelError(t *testing.T) {
	dir := tinyDir(t)
	m := filepath.Join(dir, "m")
	if err := otherModel(testdata+"llama", m); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(m, "model.safetensors")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for at := len(b) - 64; at < len(b); at += 4 {
		binary.LittleEndian.PutUint32(b[at:], math.Float32bits(float32(math.NaN())))
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	code, out, log := call(context.Background(), dir, "run", m, "-o", filepath.Join(dir, "out"))
	if code != exitModel || out != "" || !strings.Contains(log, "is not finite at token") {
		t.Errorf("exit code %d, %q: %s", code, out, log)
	}
}

// Whatever is wrong with the arguments, the answer is one line of error and a code that is documented.
func TestArgumentsNeverPanic(t *testing.T) {
	verbs := []string{"", "run --dry-run", "inspect", "datasets build", "datasets show", "datasets", "profile", "distill", "fastgen", "pyramid", "compile", "check", "schema x", "version x", "nosuch"}
	flags := [][]string{nil, {"--budget", "2"}, {"--threads", "99999"}, {"--device", "cuda:1"}, {"--config", "/nonexistent"}, {"--seed", "-1"},
		{"--lengths", "0"}, {"--dataset", "/dev/null"}, {"--recipe", "x"}, {"/dev/null"}, {"a", "b", "c"}, {"--json", "/nonexistent/x"}}
	dir := tinyDir(t)
	t.Chdir(dir)
	known := map[int]bool{exitDone: true, exitFailed: true, exitFindings: true, exitModel: true}
	for _, v := range verbs {
		for _, f := range flags {
			args := append(strings.Fields(v), f...)
			code, _, log := call(context.Background(), dir, args...)
			if !known[code] || code != exitDone && !strings.Contains(log, "error") {
				t.Errorf("%q: exit code %d: %s", args, code, log)
			}
			if code != exitDone && strings.Count(strings.TrimSpace(log), "\n") > 1 {
				t.Errorf("%q: more than an error and a hint: %s", args, log)
			}
		}
	}
}
