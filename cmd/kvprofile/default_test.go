package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/internal/defaultmodel"
	"github.com/kvprofile/kvprofile/internal/eval"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/plan"
)

// run without arguments takes the embedded model through every stage: it retrieves, and its plan keeps at most half of
// the bytes and the retrieval. The heads that the gates call retrieval heads are those that retrieval needs.
func TestDefaultRun(t *testing.T) {
	if testing.Short() {
		t.Skip("runs every stage and 300 prompts")
	}
	dir := t.TempDir()
	out := filepath.Join(dir, "run")
	code, stdout, log := call(context.Background(), dir, "run", "-o", out, "--json")
	if code != exitDone {
		t.Fatalf("exit code %d: %s", code, log)
	}
	var said struct{ Report string }
	if err := json.Unmarshal([]byte(stdout), &said); err != nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	if page, err := os.ReadFile(said.Report); err != nil || !strings.Contains(string(page), "kvprofile-default") {
		t.Errorf("report %s of %d bytes: %v", said.Report, len(page), err)
	}
	written, err := os.ReadFile(filepath.Join(out, planFile))
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.Parse(written)
	if err != nil {
		t.Fatal(err)
	}
	usage := p.Usage(plan.Request{PromptTokens: 1024, Batch: 1})
	if 2*usage.Bytes > usage.FullBytes {
		t.Errorf("the plan keeps %d of %d bytes, more than half", usage.Bytes, usage.FullBytes)
	}
	tested, err := eval.Load(filepath.Join(out, eval.File))
	if err != nil {
		t.Fatal(err)
	}
	for task, least := range map[string]float64{datasets.TaskNeedleGrid: 0.98, datasets.TaskPasskeys: 0.9} {
		for _, s := range tested.Summarise(&tested.Runs[0], eval.ByTask) {
			if s.Task != task {
				continue
			}
			if s.N < 149 || float64(s.M) < least*float64(s.N) {
				t.Errorf("%s: the full cache gets %d of %d prompts right, fewer than %g of at least 149", task, s.M, s.N, least)
			}
			if float64(s.K) < 0.98*float64(s.M) {
				t.Errorf("%s: of %d right prompts the plan gets %d", task, s.M, s.K)
			}
		}
	}

	gates, err := distill.Load(filepath.Join(out, filepath.FromSlash(gatesDir)))
	if err != nil {
		t.Fatal(err)
	}
	var retrieval, others []int
	for l, row := range gates.Values {
		for k, g := range row {
			if h := l*len(row) + k; g > 0.5 {
				retrieval = append(retrieval, h)
			} else {
				others = append(others, h)
			}
		}
	}
	if len(retrieval) == 0 || len(retrieval) > len(others) {
		t.Fatalf("%d of %d KV heads are retrieval heads", len(retrieval), len(retrieval)+len(others))
	}
	args := []string{"eval", defaultmodel.Name, "--tasks", "needle-grid", "--texts", "0", "--samples", "50", "--json", "-o", filepath.Join(dir, "ablation.json")}
	write := func(name string, heads []int) {
		t.Helper()
		path := filepath.Join(dir, name+".json")
		if err := ablated(p, heads).Write(path); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--plan", path)
	}
	write("retrieval", retrieval)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 4 {
		r.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
		write(fmt.Sprint("others-", i), others[:len(retrieval)])
	}
	code, stdout, log = call(context.Background(), dir, args...)
	if code != exitDone {
		t.Fatalf("exit code %d: %s", code, log)
	}
	var result eval.Result
	if err := json.Unmarshal([]byte(stdout), &result); err != nil {
		t.Fatal(err)
	}
	for i := range result.Runs {
		s := result.Overall(&result.Runs[i])
		t.Logf("%s: %d of %d", result.Runs[i].Name, s.K, s.M)
		if i == 0 && s.K*10 > s.M {
			t.Errorf("without the %d retrieval heads %v, %d of %d prompts are still right", len(retrieval), retrieval, s.K, s.M)
		}
		if i > 0 && s.K*10 < 9*s.M {
			t.Errorf("without %d other heads (%s) only %d of %d prompts are right", len(retrieval), result.Runs[i].Name, s.K, s.M)
		}
	}
}

// ablated is a plan of the same model by which the given KV heads lose what is neither first nor recent, and the others nothing.
func ablated(p *plan.Plan, heads []int) *plan.Plan {
	q := *p
	q.Evidence, q.Warnings, q.TokenClasses = nil, nil, nil
	q.Policies = map[string]plan.Policy{
		"full": plan.Full{},
		"cut":  plan.Streaming{SinkTokens: 16, RecentTokens: 64, Evict: plan.EvictPrefillEnd, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal},
	}
	q.Layers = nil
	for range p.Model.NLayers {
		q.Layers = append(q.Layers, make([]string, p.Model.NKVHeads))
		for k := range p.Model.NKVHeads {
			q.Layers[len(q.Layers)-1][k] = "full"
		}
	}
	for _, h := range heads {
		q.Layers[h/p.Model.NKVHeads][h%p.Model.NKVHeads] = "cut"
	}
	q.Totals = nil
	for _, t := range p.Totals {
		q.Totals = append(q.Totals, q.ComputeTotals(t.PromptTokens, 0))
	}
	return &q
}

// The settings of the default model hold for it alone, and below what the user says.
func TestDefaultSettings(t *testing.T) {
	dir := t.TempDir()
	config := filepath.Join(dir, "c.yaml")
	if err := os.WriteFile(config, []byte("run:\n  recent: 128\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	manifest, err := json.Marshal(run.Manifest{Format: "kvprofile.run", Version: 1, Model: run.Model{Path: defaultmodel.Name}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, run.ManifestName), manifest, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args         []string
		sink, recent string
	}{
		{[]string{"run"}, "16", "64"},
		{[]string{"run", "default"}, "16", "64"},
		{[]string{"run", "./default"}, "64", "256"},
		{[]string{"run", testdata + "llama"}, "64", "256"},
		{[]string{"run", "--sink", "8"}, "8", "64"},
		{[]string{"run", "--config", config}, "16", "128"},
		{[]string{"run", "--config", config, "--recent", "32"}, "16", "32"},
		{[]string{"compile", dir}, "16", "64"},
		{[]string{"compile"}, "64", "256"},
	} {
		a := &app{stdout: io.Discard, stderr: io.Discard}
		root := a.root()
		verb, _, err := root.Find(c.args)
		if err != nil {
			t.Fatal(err)
		}
		verb.RunE = func(cmd *cobra.Command, _ []string) error {
			sink, recent := cmd.Flags().Lookup("sink").Value.String(), cmd.Flags().Lookup("recent").Value.String()
			if sink != c.sink || recent != c.recent {
				t.Errorf("%v: --sink %s --recent %s, want %s and %s", c.args, sink, recent, c.sink, c.recent)
			}
			return nil
		}
		root.SetArgs(c.args)
		if err := root.Execute(); err != nil {
			t.Errorf("%v: %v", c.args, err)
		}
	}
}
