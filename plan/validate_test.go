package plan

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// Plans that a program builds: faults that no file in testdata has.
func TestValidate(t *testing.T) {
	half, two := 0.5, 2.0
	for pointer, change := range map[string]func(*Plan){
		"/format":                      func(p *Plan) { p.Format = "" },
		"/version":                     func(p *Plan) { p.Version = 2 },
		"/tool/name":                   func(p *Plan) { p.Tool.Name = "" },
		"/model/n_layers":              func(p *Plan) { p.Model.NLayers = maxLayers + 1 },
		"/model/rope/theta":            func(p *Plan) { p.Model.RoPE.Theta = math.NaN() },
		"/model/sliding_window":        func(p *Plan) { p.Model.SlidingWindow = []int{1} },
		"/model/sliding_window/2":      func(p *Plan) { p.Model.SlidingWindow = []int{0, 0, -1, 0} },
		"/model/rope/scaling/divisors": func(p *Plan) { p.Model.RoPE.Scaling = &RoPEScaling{Kind: ScalingLlama3, Divisors: []float64{1}} },
		"/model/rope/scaling/divisors/3": func(p *Plan) {
			p.Model.RoPE.Scaling = &RoPEScaling{Kind: ScalingLlama3, Divisors: append([]float64{1, 1, 1, 0}, slices.Repeat([]float64{1}, 28)...)}
		},
		"/model/rope/scaling/beta_fast": func(p *Plan) { p.Model.RoPE.Scaling = &RoPEScaling{Kind: ScalingLinear, Factor: 2, BetaFast: 32} },
		"/model/rope/scaling/beta_slow": func(p *Plan) {
			p.Model.RoPE.Scaling = &RoPEScaling{Kind: ScalingYaRN, Factor: 2, OriginalMaxPosition: 4096, BetaSlow: -1}
		},
		"/model/sha256/tokenizer":             func(p *Plan) { p.Model.SHA256.Tokenizer = "" },
		"/policies":                           func(p *Plan) { p.Policies, p.Layers, p.TokenClasses = nil, slices.Repeat([][]string{{}}, 4), nil },
		"/policies/full":                      func(p *Plan) { p.Policies["full"] = nil },
		"/policies/" + "a~1b":                 func(p *Plan) { p.Policies["a/b"], p.Layers[0][0] = Full{}, "a/b" },
		"/layers/3":                           func(p *Plan) { p.Layers[3] = nil },
		"/token_classes/special":              func(p *Plan) { p.Policies["fastgen"] = Full{} },
		"/token_classes/special/0":            func(p *Plan) { p.TokenClasses.Special[0] = -1 },
		"/pins/0/max_tokens":                  func(p *Plan) { p.Pins[0].MaxTokens = 0 },
		"/totals":                             func(p *Plan) { p.Totals = nil },
		"/totals/1":                           func(p *Plan) { p.Totals[0], p.Totals[1] = p.Totals[1], p.Totals[0] },
		"/totals/0":                           func(p *Plan) { p.Totals[0].GeneratedTokens = maxTokens },
		"/totals/0/worst_case":                func(p *Plan) { p.Totals[0].WorstCase = false },
		"/evidence/plan_sha256":               func(p *Plan) { p.Evidence.PlanSHA256 = "" },
		"/evidence/recipe/budget":             func(p *Plan) { p.Evidence.Recipe.Budget = 1.5 },
		"/evidence/recipe/tied_heads/0/layer": func(p *Plan) { p.Evidence.Recipe.TiedHeads = []HeadRef{{4, 0}} },
		"/evidence/calibration/datasets/0/min_tokens": func(p *Plan) { p.Evidence.Calibration.Datasets[0].MinTokens = 4096 },
		"/evidence/agreement/0/low":                   func(p *Plan) { p.Evidence.Agreement[0].Low = &two },
		"/evidence/evaluations/0/k":                   func(p *Plan) { p.Evidence.Evaluations[0].K = 21 },
		"/evidence/evaluations/0/lower95":             func(p *Plan) { p.Evidence.Evaluations[0].Lower95 = &two },
		"/evidence/evaluations/0": func(p *Plan) {
			p.Evidence.Evaluations[0] = Evaluation{Task: "t", N: 5, Retention: &half}
		},
		"/evidence/divergences/0/kl": func(p *Plan) {
			p.Evidence.Divergences = []Divergence{{Text: "t", Tokens: 1, FullPerplexity: 2, PlanPerplexity: 2, KL: math.Inf(1)}}
		},
		"/evidence/divergences/0/plan_perplexity": func(p *Plan) {
			p.Evidence.Divergences = []Divergence{{Text: "t", Tokens: 1, FullPerplexity: 2}}
		},
	} {
		p := sample()
		change(p)
		if !slices.ContainsFunc(p.Validate(), func(v Violation) bool { return v.Pointer == pointer }) {
			t.Errorf("%s: not found in %v", pointer, p.Validate())
		}
	}
}

// An empty plan is wrong in many places, and in none of them a reason to fail.
func TestZeroPlan(t *testing.T) {
	p := &Plan{}
	if vs := p.Validate(); len(vs) < 15 {
		t.Errorf("only %v", vs)
	}
	p.Usage(Request{PromptTokens: 100})
	p.Advice()
	if _, err := p.Keep(0, 0, 1); err == nil {
		t.Error("an empty plan keeps something")
	}
	if p = sample(); p.Matches(Want{}) == nil {
		t.Error("a plan belongs to no model")
	}
	p.Model.RoPE.Theta = math.Inf(1)
	if _, err := p.Marshal(); err == nil || p.Digest() != "" {
		t.Error("infinity was written")
	}
}

func TestPlanInsideADocument(t *testing.T) {
	data, err := json.Marshal(map[string]*Plan{"plan": sample()})
	if err != nil {
		t.Fatal(err)
	}
	var back map[string]*Plan
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back["plan"], sample()) {
		t.Errorf("read back %+v", back["plan"])
	}
	if err := json.Unmarshal([]byte(strings.Replace(string(data), `"kind":"full"`, `"kind":"none"`, 1)), &back); err == nil {
		t.Error("an unknown kind was read")
	}
}

func TestHeadsByPolicy(t *testing.T) {
	if got, want := fmt.Sprint(sample().HeadsByPolicy()), "map[fastgen:1 full:4 h2o:1 stream:4 topk:2]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestViolationsAreOrderedByNumber(t *testing.T) {
	vs := []Violation{{"/layers/10", "b"}, {"/layers/9", "a"}, {"/layers", "c"}, {"/layers/10", "b"}, {"/layers/10/1", "a"}, {"", "root"}}
	if got := fmt.Sprint(SortViolations(vs)); got != "[/: root /layers: c /layers/9: a /layers/10: b /layers/10/1: a]" {
		t.Error(got)
	}
}
