package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// The scenarios in testdata run the command in processes of its own.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		program: func() {
			ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			os.Exit(Main(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Environ()))
		},
	})
}

// tiny is the configuration of the scenarios: a run on the smallest model takes a fraction of a second with it.
const tiny = `run:
  lengths: 600
  count: 3
  passkeys: 1
  words: 2
  train-lengths: 700
  steps: 4
  learning-rate: 0.9
`

const testdata = "../../internal/model/testdata/"

func TestScenarios(t *testing.T) {
	abs := func(path string) string {
		t.Helper()
		p, err := filepath.Abs(path)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	model := abs(testdata + "llama")
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(e *testscript.Env) error {
			e.Setenv("MODEL", model)
			e.Setenv("OTHER", filepath.Join(e.WorkDir, "llama-other"))
			e.Setenv("NOTOKENIZER", abs(testdata+"qwen2"))
			e.Setenv("SCHEMA", abs("../../schema/cache-plan-v1.schema.json"))
			e.Setenv("KVPROFILE_CONFIG", filepath.Join(e.WorkDir, "tiny.yaml"))
			if err := os.WriteFile(filepath.Join(e.WorkDir, "tiny.yaml"), []byte(tiny), 0o644); err != nil {
				return err
			}
			return otherModel(model, filepath.Join(e.WorkDir, "llama-other"))
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"exitcode": exitCode,
			"waitfor":  waitFor,
			"edit":     edit,
		},
	})
}

// otherModel copies a model with one weight changed.
func otherModel(from, to string) error {
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		return err
	}
	path := filepath.Join(to, "model.safetensors")
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	b[len(b)-3] ^= 1 // in the mantissa of the last weight
	return os.WriteFile(path, b, 0o644)
}

// waitFor waits until files exist.
func waitFor(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: waitfor FILE...")
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		missing := 0
		for _, a := range args {
			if _, err := os.Stat(ts.MkAbs(a)); err != nil {
				missing++
			}
		}
		if missing == 0 {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("%v did not appear within a minute", args)
		}
	}
}

// edit copies a file with the first occurrence of a text replaced: edit FROM TO OLD NEW.
func edit(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 4 {
		ts.Fatalf("usage: edit FROM TO OLD NEW")
	}
	text := ts.ReadFile(args[0])
	if !strings.Contains(text, args[2]) {
		ts.Fatalf("%s has no %q", args[0], args[2])
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), []byte(strings.Replace(text, args[2], args[3], 1)), 0o644))
}

// exitCode runs the command and compares its exit code: exitcode 3 kvprofile check bad.json.
func exitCode(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exitcode CODE PROGRAM [ARGUMENT...]")
	}
	err := ts.Exec(args[1], args[2:]...)
	got := "0"
	if err != nil {
		exit, ok := err.(interface{ ExitCode() int })
		if !ok {
			ts.Fatalf("%v", err)
		}
		got = fmt.Sprint(exit.ExitCode())
	}
	if got != args[0] {
		ts.Fatalf("exit code %s, want %s", got, args[0])
	}
}
