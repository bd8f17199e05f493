package schema

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// The example in docs/plan.md is a valid plan, the one that it says, and the page names every member of the format.
func TestDocumentation(t *testing.T) {
	page, err := os.ReadFile("../docs/plan.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(page), "```json\n")
	example, rest, closed := strings.Cut(rest, "```\n")
	if !ok || !closed || strings.Contains(rest, "```json") {
		t.Fatal("docs/plan.md has not exactly one block of JSON")
	}
	if vs, err := Check([]byte(example)); err != nil || len(vs) > 0 {
		t.Errorf("the example: %v %v", vs, err)
	}
	if want := string(read(t, "valid/every-kind.json")["every-kind.json"]); example != want {
		t.Error("the example is not plan/testdata/valid/every-kind.json")
	}
	var s struct {
		Defs map[string]struct {
			Properties map[string]json.RawMessage `json:"properties"`
		} `json:"$defs"`
	}
	if err := json.Unmarshal(v1, &s); err != nil {
		t.Fatal(err)
	}
	for name, def := range s.Defs {
		for member := range def.Properties {
			if !strings.Contains(rest, "`"+member+"`") && !strings.Contains(rest, "."+member+"`") {
				t.Errorf("docs/plan.md does not say what %s of %s is", member, name)
			}
		}
	}
}
