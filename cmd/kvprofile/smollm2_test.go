package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/plan"
)

// SmolLM2 goes through all stages, with few steps at a high rate in place of the quick recipe's, to keep this short.
func TestRunOnSmolLM2(t *testing.T) {
	path := os.Getenv("KVPROFILE_TEST_MODEL")
	if path == "" {
		t.Skip("set KVPROFILE_TEST_MODEL to the path of SmolLM2-135M-Instruct.Q4_1.gguf; scripts/smollm2.sh prints it")
	}
	dir := t.TempDir()
	out := filepath.Join(dir, "out")
	code, stdout, log := call(context.Background(), dir, "run", path, "--quick", "--steps", "8", "--learning-rate", "0.4", "--json", "-o", out)
	if code != exitDone {
		t.Fatalf("exit code %d: %s", code, log)
	}
	var summary struct {
		Plan struct {
			Kept    float64        `json:"kept_share"`
			Context int            `json:"context_tokens"`
			Heads   map[string]int `json:"kv_heads"`
		} `json:"plan"`
	}
	if err := json.Unmarshal([]byte(stdout), &summary); err != nil {
		t.Fatal(err)
	}
	if s := summary.Plan; s.Kept > 0.5 || s.Kept < 0.48 || s.Context != 1024 || len(s.Heads) < 2 {
		t.Errorf("plan %+v", s)
	}
	g, err := distill.Load(filepath.Join(out, gatesDir))
	if err != nil {
		t.Fatal(err)
	}
	if s := distill.Threshold(g.Values, 0.5); len(g.Scores) != 3 {
		t.Errorf("%d scores beside the gates, want 3 (%+v)", len(g.Scores), s)
	}
	m, err := model.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	// As a server loads it.
	p, err := plan.Load(filepath.Join(out, planFile), plan.Want{Model: planModel(m, m.Fingerprint())})
	if err != nil {
		t.Fatal(err)
	}
	u := p.Usage(plan.Request{PromptTokens: 1024})
	if share := float64(u.Bytes) / float64(u.FullBytes); share > 0.5 || share < 0.48 {
		t.Errorf("keeps %g of the bytes, asked for .5", share)
	}
}
