// Package examples tests the examples that are not in Go.
package examples

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/kvprofile/kvprofile/plan"
)

func python(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	return path
}

// The Python reader and package plan agree on what every head keeps.
func TestReadPlan(t *testing.T) {
	interpreter := python(t)
	files, err := filepath.Glob("../plan/testdata/valid/*.json")
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob("../out/reference/*/plan.json")
	if err != nil {
		t.Fatal(err)
	}
	if files = append(files, more...); len(files) < 2 {
		t.Fatalf("no plans: %v", files)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		p, err := plan.Parse(data)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{77, 3001} {
			var want strings.Builder
			for l, row := range p.Layers {
				fmt.Fprint(&want, l)
				for _, name := range row {
					k := p.Cache.Kept(p.Policies[name], plan.At{PromptTokens: n, Window: p.Model.Window(l)})
					fmt.Fprintf(&want, " %s:%d", name, k.Tokens)
				}
				want.WriteByte('\n')
			}
			got, err := exec.Command(interpreter, "read_plan.py", file, fmt.Sprint(n)).Output()
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if string(got) != want.String() {
				t.Errorf("%s, %d tokens: reader says\n%s\nplan says\n%s", file, n, got, want.String())
			}
		}
	}
}

// It is short, and refuses what it cannot read.
func TestReadPlanRefuses(t *testing.T) {
	text, err := os.ReadFile("read_plan.py")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), "\n"); n > 30 {
		t.Errorf("read_plan.py has %d lines", n)
	}
	interpreter := python(t)
	for name, text := range map[string]string{
		"version":   `{"format": "kvprofile.cache-plan", "version": 2}`,
		"format":    `{"format": "other", "version": 1}`,
		"kind":      `{"format": "kvprofile.cache-plan", "version": 1, "policies": {"x": {"kind": "new"}}}`,
		"no object": `[]`,
	} {
		path := filepath.Join(t.TempDir(), "plan.json")
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(interpreter, "read_plan.py", path).CombinedOutput(); err == nil {
			t.Errorf("%s: %s", name, out)
		}
	}
}

// The CI job is YAML, and its verbs and flags are the command's: the documentation of the command names them.
func TestCIJob(t *testing.T) {
	text, err := os.ReadFile("ci/validate-plans.yml")
	if err != nil {
		t.Fatal(err)
	}
	var job struct {
		Jobs map[string]struct {
			Steps []struct{ Run string }
		}
	}
	if err := yaml.Unmarshal(text, &job); err != nil {
		t.Fatal(err)
	}
	docs, err := os.ReadFile("../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	verbs := map[string]bool{}
	for _, step := range job.Jobs["validate"].Steps {
		words := strings.Fields(step.Run)
		for i, w := range words {
			if w == "kvprofile" && i+1 < len(words) {
				verbs[words[i+1]] = true
			}
			if strings.HasPrefix(w, "--") && w != "--schemafile" && !strings.Contains(string(docs), "`"+w+"`") {
				t.Errorf("the command has no %s", w)
			}
		}
	}
	for _, v := range []string{"check", "schema", "diff"} {
		if !verbs[v] {
			t.Errorf("the job does not run %s", v)
		}
	}
}
