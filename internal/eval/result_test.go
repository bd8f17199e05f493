package eval

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/plan"
)

// synthetic is an evaluation of four invented methods at three budgets: their prompts, texts and bytes follow simple
// laws with noise from a fixed seed.
func synthetic() *Result {
	r := rand.New(rand.NewPCG(11, 12))
	hash := func(c string) string { return strings.Repeat(c, 64) }
	out := &Result{Format: Format, Version: Version, Tool: plan.Tool{Name: "kvprofile", Version: "1.2.3"},
		Model:  plan.Model{Name: "Tiny 1M <b>", Architecture: "llama", NLayers: 2, NHeads: 4, NKVHeads: 2, HeadDim: 8, MaxPosition: 4096},
		Device: "cpu", Purpose: datasets.Certification,
		Datasets: []plan.DatasetRef{
			{Use: "eval", Task: "needle-grid", Samples: 60, MinTokens: 1000, MaxTokens: 2040, Seed: 7, SHA256: hash("a")},
			{Use: "eval", Task: "multi-key", Samples: 20, MinTokens: 2030, MaxTokens: 2048, Seed: 8, SHA256: hash("b")},
			{Use: "eval", Task: "text", Samples: 3, MinTokens: 2048, MaxTokens: 2048, Seed: 9, SHA256: hash("c")}},
		Full: Run{Name: NameFull, PlanSHA256: hash("f")}}
	add := func(task string, sample, length int, depth float64) {
		full := int64(length) * 64
		o := Outcome{Sample: sample, Task: task, Length: length, Prompt: length - r.IntN(20), Depth: depth, Text: "word", LogProb: -0.1 - 0.2*r.Float64(), Rank: 1 + 0.25*float64(r.IntN(4)),
			Bytes: full, FullBytes: full}
		if r.Float64() < 0.9 {
			o.Right, o.Share, o.Exact = true, 1, r.IntN(2) == 0
		}
		out.Full.Outcomes = append(out.Full.Outcomes, o)
	}
	for i := range 60 {
		add("needle-grid", i, []int{1024, 2048}[i%2], []float64{0, 0.5, 1}[i/2%3])
	}
	for i := range 20 {
		add("multi-key", i, 2048, 0.5)
	}
	for i := range 3 {
		nll := 500 + 20*r.Float64()
		out.Full.Texts = append(out.Full.Texts, TextOutcome{Sample: i, Prompt: 1792, Tokens: 256, NLL: nll, FullNLL: nll, Bytes: 2048 * 64, FullBytes: 2048 * 64})
	}
	for m, method := range []struct {
		name string
		loss float64 // share of the right answers lost at half of the bytes
	}{{"steady", 0.01}, {"snapkv", 0.03}, {"streaming-llm", 0.3}, {"window", 0.6}} {
		for b, budget := range []float64{0.5, 0.25, 0.125} {
			x := Run{Name: method.name, Budget: budget, PlanSHA256: hash(string("0123456789abcdef"[3*m+b]))}
			loss := min(1, method.loss*float64(int(1)<<b))
			for _, o := range out.Full.Outcomes {
				o.Bytes = int64(float64(o.FullBytes) * budget)
				o.LogProb -= loss * (0.5 + r.Float64())
				o.Rank += 10 * loss
				if r.Float64() < loss {
					o.Right, o.Exact, o.Share = false, false, 0
					if o.Task == "multi-key" {
						o.Share = 0.5
					}
				}
				x.Outcomes = append(x.Outcomes, o)
			}
			for _, t := range out.Full.Texts {
				t.Bytes = int64(float64(t.FullBytes) * budget)
				t.KL = 30 * loss * (1 + r.Float64())
				t.NLL += t.KL * 0.9
				x.Texts = append(x.Texts, t)
			}
			out.Runs = append(out.Runs, x)
		}
	}
	return out
}

func TestResultFile(t *testing.T) {
	r := synthetic()
	r.Seconds = 12
	path := filepath.Join(t.TempDir(), "new", File)
	if err := r.Write(path); err != nil {
		t.Fatal(err)
	}
	first, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	r.Seconds = 0
	if !reflect.DeepEqual(got, r) {
		t.Error("read otherwise than written")
	}
	if err := got.Write(path); err != nil {
		t.Fatal(err)
	}
	if second, err := os.ReadFile(path); err != nil || !bytes.Equal(first, second) {
		t.Errorf("written a second time it differs (%v)", err)
	}
	// Numbers that JSON does not have are refused before anything is written.
	got.Runs[0].Outcomes[0].LogProb = math.NaN()
	if err := got.Write(path); err == nil || !strings.Contains(err.Error(), "runs[0] (steady): outcomes[0]: logprob is NaN") {
		t.Errorf("%v", err)
	}
	if second, err := os.ReadFile(path); err != nil || !bytes.Equal(first, second) {
		t.Errorf("a refused evaluation changed the file (%v)", err)
	}
	if _, err := Load(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
	// A text that is no UTF-8 is written all the same.
	r.Full.Outcomes[0].Text = "a\xffb"
	if err := r.Write(path); err != nil {
		t.Fatal(err)
	}
	if got, err = Load(path); err != nil || got.Full.Outcomes[0].Text != "a\ufffdb" {
		t.Errorf("%v", err)
	}
}

func TestResultRefused(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	for _, c := range []struct {
		want string
		harm func(r *Result)
	}{
		{`format "x" version 1`, func(r *Result) { r.Format = "x" }},
		{"version 2", func(r *Result) { r.Version = 2 }},
		{"model.name", func(r *Result) { r.Model.Name = "" }},
		{`purpose is ""`, func(r *Result) { r.Purpose = "" }},
		{"datasets[1]: a second dataset", func(r *Result) { r.Datasets[1].Task = "needle-grid" }},
		{"datasets[0]: no task", func(r *Result) { r.Datasets[0].Task = "" }},
		{"datasets[2]: sha256", func(r *Result) { r.Datasets[2].SHA256 = "A" }},
		{`full: is named "all"`, func(r *Result) { r.Full.Name = "all" }},
		{"full: is named", func(r *Result) { r.Full.Budget = 1 }},
		{"full: neither outcomes nor texts", func(r *Result) { r.Full, r.Runs = Run{Name: NameFull}, nil }},
		{"full: plan_sha256", func(r *Result) { r.Full.PlanSHA256 = "0" }},
		{"full: outcomes[2]: sample 0 of needle-grid at 1024 tokens a second time", func(r *Result) { r.Full.Outcomes[2].Sample = 0 }},
		{"full: outcomes[2]: 1 bytes, full_bytes says", func(r *Result) { r.Full.Outcomes[2].Bytes = 1 }},
		{"full: texts[1]: text 0 of 1792 and 256 tokens a second time", func(r *Result) { r.Full.Texts[1].Sample = 0 }},
		{"full: texts[1]: differs from the full cache", func(r *Result) { r.Full.Texts[1].KL = 1 }},
		{"runs[1] (steady): a second run", func(r *Result) { r.Runs[1].Budget = 0.5 }},
		{"runs[2] (): no name", func(r *Result) { r.Runs[2].Name = "" }},
		{"runs[2] (steady): budget is 1.5", func(r *Result) { r.Runs[2].Budget = 1.5 }},
		{"budget is NaN", func(r *Result) { r.Runs[2].Budget = nan }},
		{"outcomes[0]: task is \"\"", func(r *Result) { r.Runs[2].Outcomes[0].Task = "" }},
		{"outcomes[0]: task is \"text\"", func(r *Result) { r.Runs[2].Outcomes[0].Task = "text" }},
		{"outcomes[0]: sample -1", func(r *Result) { r.Runs[2].Outcomes[0].Sample = -1 }},
		{"outcomes[0]: sample 0, length 0", func(r *Result) { r.Runs[2].Outcomes[0].Length = 0 }},
		{"outcomes[5]: depth is NaN", func(r *Result) { r.Runs[2].Outcomes[5].Depth = nan }},
		{"outcomes[5]: share is 2", func(r *Result) { r.Runs[2].Outcomes[5].Share = 2 }},
		{"outcomes[5]: right is", func(r *Result) { r.Runs[2].Outcomes[5].Right = !r.Runs[2].Outcomes[5].Right }},
		{"outcomes[5]: logprob is -Inf", func(r *Result) { r.Runs[2].Outcomes[5].LogProb = -inf }},
		{"outcomes[5]: logprob is 0.1", func(r *Result) { r.Runs[2].Outcomes[5].LogProb = 0.1 }},
		{"outcomes[5]: rank is 0", func(r *Result) { r.Runs[2].Outcomes[5].Rank = 0 }},
		{"outcomes[5]: rank is +Inf", func(r *Result) { r.Runs[2].Outcomes[5].Rank = inf }},
		{"outcomes[5]: -1 bytes", func(r *Result) { r.Runs[2].Outcomes[5].Bytes = -1 }},
		{"texts[0]: sample 0, prompt 1792, tokens 0", func(r *Result) { r.Runs[2].Texts[0].Tokens = 0 }},
		{"texts[0]: nll is +Inf", func(r *Result) { r.Runs[2].Texts[0].NLL = inf }},
		{"texts[0]: kl is -1", func(r *Result) { r.Runs[2].Texts[0].KL = -1 }},
		{"texts[0]: 1 bytes of 0", func(r *Result) { r.Runs[2].Texts[0].Bytes, r.Runs[2].Texts[0].FullBytes = 1, 0 }},
		{"79 outcomes, full has 80", func(r *Result) { r.Runs[2].Outcomes = r.Runs[2].Outcomes[1:] }},
		{"2 texts, full has 3", func(r *Result) { r.Runs[2].Texts = r.Runs[2].Texts[1:] }},
		{"outcomes[1]: another prompt", func(r *Result) { r.Runs[2].Outcomes[1].Depth = 0.75 }},
		{"outcomes[0]: another prompt", func(r *Result) { o := r.Runs[2].Outcomes; o[0], o[1] = o[1], o[0] }},
		{"texts[1]: another text", func(r *Result) { r.Runs[2].Texts[1].FullNLL++ }},
	} {
		r := synthetic()
		c.harm(r)
		if err := r.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("want %q, got %v", c.want, err)
		}
	}
	if err := synthetic().Validate(); err != nil {
		t.Error(err)
	}
}

func TestReadStrictly(t *testing.T) {
	good, err := json.Marshal(synthetic())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Read(bytes.NewReader(good)); err != nil {
		t.Fatal(err)
	}
	for want, text := range map[string]string{
		"unknown field":  strings.Replace(string(good), `"purpose"`, `"purposes":1,"purpose"`, 1),
		"after top":      string(good) + "{}",
		"unexpected end": string(good[:len(good)/2]),
		"version 9":      strings.Replace(string(good), `"version":1`, `"version":9`, 1),
		"neither":        `{"format":"kvprofile.evaluation","version":1,"model":{"name":"x"},"purpose":"search","full":{"name":"full"}}`,
		"cannot unmarsh": strings.Replace(string(good), `"sample":0`, `"sample":0.5`, 1),
	} {
		if _, err := Read(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
	path := filepath.Join(t.TempDir(), File)
	if err := os.WriteFile(path, []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	var format *run.FormatError
	if _, err := Load(path); !errors.As(err, &format) || format.Path != path {
		t.Errorf("%v", err)
	}
}

func TestJoin(t *testing.T) {
	base := synthetic
	r, o := base(), base()
	o.Runs = []Run{o.Runs[0]}
	o.Runs[0].Name = "another"
	n := len(r.Runs)
	if !r.Join(o) || len(r.Runs) != n+1 || r.Runs[n].Name != "another" {
		t.Fatalf("%d runs after joining one to %d", len(r.Runs), n)
	}
	if err := r.Validate(); err != nil {
		t.Fatal(err)
	}
	o.Runs[0].PlanSHA256 = strings.Repeat("a", 64)
	if !r.Join(o) || len(r.Runs) != n+1 || r.Runs[n].PlanSHA256 != o.Runs[0].PlanSHA256 {
		t.Error("a run of the same name and budget did not take the old one's place")
	}
	for name, change := range map[string]func(o *Result){
		"question": func(o *Result) { o.Question = "never" },
		"purpose":  func(o *Result) { o.Purpose = "search" },
		"device":   func(o *Result) { o.Device = "cpu go f32" },
		"model":    func(o *Result) { o.Model.Name = "other" },
		"prompts":  func(o *Result) { o.Full.Outcomes[0].LogProb -= 1e-9 },
		"datasets": func(o *Result) { o.Datasets = nil },
	} {
		x, o := base(), base()
		change(o)
		if x.Join(o) || len(x.Runs) != n {
			t.Errorf("another %s was joined", name)
		}
	}
}
