package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/internal/ui"
)

// parse fills the flags of a verb "do" with two flags of its own, beside a verb "other", and returns what it sees.
func parse(t *testing.T, config string, env map[string]string, args ...string) (values string, err error) {
	t.Helper()
	a := &app{env: env, stdout: io.Discard, stderr: io.Discard, ui: ui.New(ui.Options{Out: io.Discard, Err: io.Discard})}
	root := &cobra.Command{Use: "kvprofile", PersistentPreRunE: a.configure, SilenceErrors: true, SilenceUsage: true}
	a.shared.add(root.PersistentFlags())
	var budget float64
	var lengths []int
	do := &cobra.Command{Use: "do", RunE: func(*cobra.Command, []string) error {
		values = strings.TrimSpace(fmt.Sprintf("%s %d %g %v", a.shared.out, a.shared.threads, budget, lengths))
		return nil
	}}
	do.Flags().Float64Var(&budget, "budget", 0.5, "")
	do.Flags().IntSliceVar(&lengths, "lengths", []int{1}, "")
	other := &cobra.Command{Use: "other", Run: func(*cobra.Command, []string) {}}
	other.Flags().Int("steps", 1, "")
	root.AddCommand(do, other)
	if config != "" {
		path := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(path, []byte(config), 0o644); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", path)
	}
	root.SetArgs(append([]string{"do"}, args...))
	err = root.Execute()
	return values, err
}

func TestPrecedence(t *testing.T) {
	const config = "out: file\nthreads: 3\nbudget: 0.3\nlengths: [4, 5]\n"
	env := map[string]string{"KVPROFILE_OUT": "env", "KVPROFILE_BUDGET": "0.4", "KVPROFILE_TEST_MODEL": "x"}
	for _, c := range []struct {
		name, config string
		env          map[string]string
		args         []string
		want         string
	}{
		{"default", "", nil, []string{"--threads", "1"}, "1 0.5 [1]"},
		{"file", config, nil, nil, "file 3 0.3 [4 5]"},
		{"environment over file", config, env, nil, "env 3 0.4 [4 5]"},
		{"flag over environment", config, env, []string{"--out", "flag", "--lengths", "7"}, "flag 3 0.4 [7]"},
		{"section over top level", "do:\n  out: section\nout: top\nthreads: 2\n", nil, nil, "section 2 0.5 [1]"},
		{"another verb's keys", "out: top\nthreads: 2\nsteps: 9\nother:\n  steps: 4\n  out: others\n", nil, nil, "top 2 0.5 [1]"},
		{"empty file", "# nothing\n", nil, []string{"--threads", "1"}, "1 0.5 [1]"},
	} {
		got, err := parse(t, c.config, c.env, c.args...)
		if err != nil || got != c.want {
			t.Errorf("%s: got %q, %v; want %q", c.name, got, err, c.want)
		}
	}
}

func TestConfigMistakesNameTheirLine(t *testing.T) {
	for config, want := range map[string]string{
		"out: a\nthread: 3\n":                `c.yaml:2: unknown key "thread"`,
		"do:\n  budget: 1\n  budgets: 1\n":   `c.yaml:3: unknown key "budgets"`,
		"do:\n  steps: 1\n":                  `c.yaml:2: unknown key "steps"`,
		"out: a\nout: b\n":                   `c.yaml:2: key "out" stands twice`,
		"out: a\n\nthreads: many\n":          `c.yaml:3: --threads: invalid value "many"`,
		"- out\n":                            `c.yaml:1: expected a mapping`,
		"out: {a: 1}\n":                      `c.yaml:1: out: expected a value or a list`,
		"threads:\n":                         `c.yaml:1: threads: no value`,
		"config: other.yaml\n":               `c.yaml:1: unknown key "config"`,
		"out: [\n":                           `c.yaml: yaml:`,
		"other:\n  nested:\n    deeper: 1\n": `c.yaml:2: unknown key "nested"`,
	} {
		if _, err := parse(t, config, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", config, err, want)
		}
	}
	if _, err := parse(t, "", map[string]string{"KVPROFILE_THREADS": "x"}); err == nil || !strings.Contains(err.Error(), `KVPROFILE_THREADS: --threads: invalid value "x"`) {
		t.Errorf("environment: %v", err)
	}
	if _, err := parse(t, "", nil, "--config", "/does/not/exist"); err == nil {
		t.Error("a missing file is no error")
	}
}

// No configuration file makes the command panic.
func FuzzConfig(f *testing.F) {
	for _, text := range []string{"threads: 3\n", "run:\n  budget: 0.5\n", "out: [a, b]\n", "? {a: b}\n: c\n", "&a [*a]\n", "<<: {out: a}\n", "out: !!binary aGk=\n", "run: &r {out: x}\nprofile: *r\n", "\x00", "- - -\n"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		root := (&app{}).root()
		for _, c := range root.Commands() {
			if c.Name() == "run" {
				_, _ = readConfig("c.yaml", []byte(text), c)
			}
		}
	})
}
