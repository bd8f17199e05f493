// Package deptest keeps the direction in which the packages of this module may depend on one another.
package deptest

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/kvprofile/kvprofile"

// A rule forbids packages to depend on others, directly or not, and says why.
type rule struct {
	from []string // packages of this module; "x/..." means x and what is below it
	// on are forbidden: import paths, "x/..." for all below.
	on []string
	// only, when not nil, lists all that is allowed beside the standard library.
	only []string
	why  string
}

var rules = []rule{
	{from: []string{"plan"}, only: []string{module + "/plan"},
		why: "a server imports plan: it must bring nothing else along"},
	{from: []string{"schema"}, on: []string{module + "/internal/...", module + "/datasets", module + "/profile", module + "/distill", module + "/fastgen", module + "/pyramid"},
		why: "a CI job that validates plans needs no part of the pipeline"},
	{from: []string{"distill"}, on: []string{module + "/fastgen", module + "/pyramid", module + "/internal/compile"},
		why: "the methods know nothing of one another: they meet in internal/compile"},
	{from: []string{"fastgen"}, on: []string{module + "/distill", module + "/pyramid", module + "/internal/compile"},
		why: "the methods know nothing of one another: they meet in internal/compile"},
	{from: []string{"pyramid"}, on: []string{module + "/distill", module + "/fastgen", module + "/internal/compile"},
		why: "the methods know nothing of one another: they meet in internal/compile"},
	{from: []string{"datasets", "profile", "distill", "fastgen", "pyramid", "internal/compile", "internal/eval", "internal/engine"},
		on:  []string{module + "/internal/engine/cpu/...", module + "/internal/engine/cuda/..."},
		why: "algorithms see the engine's contract; the command chooses the backend"},
	{from: []string{"cmd/kvprofile", "internal/engine/cuda"}, on: []string{module + "/internal/engine/cuda/fakecuda", module + "/internal/engine/cuda/ptxsim"},
		why: "the simulated GPU is for tests"},
	{from: []string{"internal/engine/cuda", "internal/engine/cpu"}, on: []string{module + "/internal/engine/ref", module + "/internal/engine/enginetest"},
		why: "oracles are for tests"},
	{from: []string{"fastgen", "pyramid", "internal/compile"}, on: []string{module + "/internal/model", module + "/internal/hub"},
		why: "they work on the record alone: a record made elsewhere must do"},
	{from: []string{"internal/eval"}, on: []string{module + "/distill", module + "/fastgen", module + "/pyramid", module + "/profile", module + "/internal/compile"},
		why: "an evaluation is given plans: how they were made must not matter to it"},
	{from: []string{"internal/report"}, on: []string{module + "/internal/engine/cpu/...", module + "/internal/engine/cuda/...", module + "/internal/model", module + "/internal/hub"},
		why: "a report reads artefacts: it needs no model"},
	{from: []string{"internal/export"}, on: []string{module + "/distill", module + "/fastgen", module + "/pyramid", module + "/profile", module + "/internal/engine/..."},
		why: "what a plan says in other formats follows from the plan alone"},
	{from: []string{"internal/hub", "internal/tokenizer", "internal/safetensors", "internal/gguf", "internal/dtype", "internal/chat"},
		on:  []string{module + "/internal/engine/..."},
		why: "file readers do not know what is computed with the files"},
	{from: []string{"internal/safetensors", "internal/gguf", "internal/dtype", "internal/tokenizer", "internal/chat"},
		on:  []string{module + "/internal/hub"},
		why: "file readers are given files, not names to look up"},
	{from: []string{"plan", "schema", "datasets", "profile", "distill", "fastgen", "pyramid", "internal/..."},
		on:  []string{"github.com/spf13/cobra", "github.com/spf13/pflag"},
		why: "flags belong to cmd"},
	{from: []string{"plan", "schema", "datasets", "profile", "distill", "fastgen", "pyramid",
		"internal/compile", "internal/run", "internal/engine/...", "internal/model", "internal/hub", "internal/tokenizer"},
		on:  []string{module + "/internal/ui", "github.com/vbauerster/mpb/v8", "github.com/jedib0t/go-pretty/v6/..."},
		why: "libraries report progress to a function; the terminal belongs to internal/ui"},
	{from: []string{"internal/ui", "internal/run"}, on: []string{module + "/plan", module + "/schema", module + "/datasets", module + "/profile", module + "/distill", module + "/fastgen", module + "/pyramid",
		module + "/internal/model", module + "/internal/engine/...", module + "/internal/compile"},
		why: "they serve every verb, and so know no stage"},
	{from: []string{"plan", "schema", "datasets", "profile", "fastgen", "pyramid", "internal/engine/...", "internal/model", "internal/run", "internal/ui"},
		on:  []string{"gorgonia.org/gorgonia"},
		why: "gates alone are trained: nothing else needs the graph"},
}

// imports maps every package of the module to all that it depends on; standard packages are left out.
func imports(t *testing.T) map[string][]string {
	t.Helper()
	list := func(args ...string) []string {
		t.Helper()
		cmd := exec.Command("go", append([]string{"list"}, args...)...)
		cmd.Dir = "../.."
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go list %v: %v\n%s", args, err, stderr.Bytes())
		}
		var lines []string
		for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); {
			lines = append(lines, s.Text())
		}
		return lines
	}
	standard := map[string]bool{}
	for _, p := range list("-deps", "-f", "{{if .Standard}}{{.ImportPath}}{{end}}", "./...") {
		standard[p] = true
	}
	deps := map[string][]string{}
	for _, line := range list("-f", "{{.ImportPath}}\t{{join .Deps \" \"}}", "./...") {
		path, all, _ := strings.Cut(line, "\t")
		deps[path] = []string{}
		for _, d := range strings.Fields(all) {
			if !standard[d] {
				deps[path] = append(deps[path], d)
			}
		}
	}
	return deps
}

// match says whether an import path is meant by a pattern.
func match(pattern, path string) bool {
	if below, ok := strings.CutSuffix(pattern, "/..."); ok {
		return path == below || strings.HasPrefix(path, below+"/")
	}
	return path == pattern
}

func matchAny(patterns []string, path string) bool {
	for _, p := range patterns {
		if match(p, path) {
			return true
		}
	}
	return false
}

func TestDirectionOfDependencies(t *testing.T) {
	deps := imports(t)
	for _, r := range rules {
		for _, from := range r.from {
			used := false
			for path, all := range deps {
				if !match(module+"/"+from, path) {
					continue
				}
				used = true
				for _, d := range all {
					if r.only != nil && !matchAny(r.only, d) || matchAny(r.on, d) {
						t.Errorf("%s must not depend on %s: %s", strings.TrimPrefix(path, module+"/"), d, r.why)
					}
				}
			}
			if !used {
				t.Errorf("a rule is about %s, which is no package of this module", from)
			}
		}
	}
}

// The rules must be able to fail.
func TestMatch(t *testing.T) {
	for _, c := range []struct {
		pattern, path string
		want          bool
	}{
		{"a/b", "a/b", true}, {"a/b", "a/b/c", false}, {"a/b/...", "a/b", true}, {"a/b/...", "a/b/c", true}, {"a/b/...", "a/bc", false},
	} {
		if got := match(c.pattern, c.path); got != c.want {
			t.Errorf("match(%q, %q) = %v", c.pattern, c.path, got)
		}
	}
}

// os.Exit stands in main alone, and nothing draws from the global random generator or keeps work in init.
func TestForbiddenCalls(t *testing.T) {
	cmd := exec.Command("git", "grep", "-nE", `os\.Exit\(|^func init\(\)`, "--", "*.go", ":!*_test.go",
		":!scripts", ":!*/asmgen/*", ":!*/gen/*") // programs of their own, run by go generate
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		if _, statErr := os.Stat("../../.git"); statErr != nil {
			t.Skip("not a git checkout")
		}
		t.Fatal(err)
	}
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		if !strings.HasPrefix(line, "cmd/kvprofile/main.go:") || strings.Contains(line, "func init") {
			t.Errorf("%s: only cmd/kvprofile/main.go may end the program, and nothing has an init", line)
		}
	}
}
