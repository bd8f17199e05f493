package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/schema"
)

// The plans in out/reference are valid and written as this version writes plans; SmolLM2's belongs to the test model.
func TestReferencePlans(t *testing.T) {
	files, err := filepath.Glob("../../out/reference/*/plan.json")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Fatal("no plan in out/reference")
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		violations, err := schema.Check(data)
		if err != nil || len(violations) > 0 {
			t.Errorf("%s: %v %v", file, violations, err)
			continue
		}
		p, err := plan.Parse(data)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := p.Marshal(); err != nil || !bytes.Equal(again, data) {
			t.Errorf("%s is not as this version writes it: %v", file, err)
		}
	}
	model := os.Getenv("KVPROFILE_TEST_MODEL")
	if model == "" {
		t.Skip("set KVPROFILE_TEST_MODEL to the path that scripts/smollm2.sh prints to compare the plan with its model")
	}
	reference := "../../out/reference/smollm2-135m-instruct/plan.json"
	if code, _, log := call(context.Background(), ".", "check", reference, "--model", model); code != exitDone {
		t.Errorf("check of %s: exit code %d: %s", reference, code, log)
	}
}
