package compile

import (
	"bytes"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/fastgen"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cpu"
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/profile"
	"github.com/kvprofile/kvprofile/pyramid"
	"github.com/kvprofile/kvprofile/schema"
)

// inputs records a small random model over needles and derives policies and budgets. windows are its sliding windows.
func inputs(t *testing.T, seed uint64, windows []int) Inputs {
	t.Helper()
	ctx := context.Background()
	m, err := model.Open("../model/testdata/llama")
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	m.Config.SlidingWindow = windows
	d, err := datasets.NeedleGrid(m.Tokenizer, nil, datasets.GridOptions{Lengths: []int{400, 640}, Depths: []float64{0.5}, Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	backend, err := cpu.New(cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer backend.Close()
	e, err := engine.New(m.Config, m, backend)
	if err != nil {
		t.Fatal(err)
	}
	print := m.Fingerprint()
	hashes := map[string]string{"config": print.Config, "weights": print.Weights, "tokenizer": print.Tokenizer}
	dir := filepath.Join(t.TempDir(), "record")
	if err := profile.Run(ctx, e, d, m.Tokenizer, profile.Options{Dir: dir, Tool: "test", ModelName: "llama", SHA256: hashes}, nil); err != nil {
		t.Fatal(err)
	}
	record, err := profile.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	c := m.Config
	in := Inputs{Tool: plan.Tool{Name: "test", Version: "1"}, Record: record, ModelID: "id",
		Model: plan.Model{Name: "llama", Architecture: "llama", NLayers: c.Layers, NHeads: c.Heads, NKVHeads: c.KVHeads, HeadDim: c.HeadDim,
			MaxPosition: c.MaxPosition, SlidingWindow: windows, RoPE: plan.RoPE{Theta: c.RoPE.Theta}, SHA256: plan.Hashes{Config: print.Config, Weights: print.Weights, Tokenizer: print.Tokenizer}},
		GatesSHA256: strings.Repeat("a", 64), PoliciesSHA256: strings.Repeat("c", 64), BudgetsSHA256: strings.Repeat("b", 64)}
	for id := range m.Tokenizer.VocabSize() {
		switch {
		case m.Tokenizer.IsSpecial(int32(id)):
			in.Classes.Special = append(in.Classes.Special, id)
		case m.Tokenizer.IsPunctuation(int32(id)):
			in.Classes.Punctuation = append(in.Classes.Punctuation, id)
		}
	}
	if in.FastGen, err = fastgen.Analyze(ctx, record, "test", fastgen.Options{}); err != nil {
		t.Fatal(err)
	}
	in.Budgets = budgets(t, record, pyramid.Arithmetic)
	in.Gates = &distill.Gates{Values: [][]float64{{0.9, 0.2}, {0.6, 0.1}}}
	return in
}

func budgets(t *testing.T, record *profile.Record, mode pyramid.Mode) *pyramid.Artefact {
	t.Helper()
	b, err := pyramid.Build(context.Background(), record, "test", pyramid.MeasureOptions{}, pyramid.Request{Mode: mode, Total: 2 * 128})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func mustCompile(t *testing.T, in Inputs, o Options) *Result {
	t.Helper()
	r, err := Compile(in, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func marshal(t *testing.T, p *plan.Plan) []byte {
	t.Helper()
	b, err := p.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestPlanMeetsItsBudgetExactly(t *testing.T) {
	for _, windows := range [][]int{nil, {0, 200}, {96, 96}} {
		in := inputs(t, 1, windows)
		last := 0.0
		for _, budget := range []float64{0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1} {
			o := DefaultOptions()
			o.Budget = budget
			r := mustCompile(t, in, o)
			if v, err := schema.Check(marshal(t, r.Plan)); err != nil || len(v) > 0 {
				t.Fatalf("windows %v, budget %g: %v %v", windows, budget, v, err)
			}
			if r.Context != 640 {
				t.Errorf("context %d, want the longest sample's 640", r.Context)
			}
			u := r.Plan.Usage(plan.Request{PromptTokens: r.Context})
			kept := float64(u.Bytes) / float64(u.FullBytes)
			if math.Abs(kept-r.Kept) > 1e-12 {
				t.Errorf("the plan keeps %g, the result says %g", kept, r.Kept)
			}
			if r.Met && kept > budget {
				t.Errorf("windows %v: keeps %g of at most %g", windows, kept, budget)
			}
			if !r.Met && !strings.Contains(strings.Join(r.Plan.Warnings, " "), "cannot be met") {
				t.Errorf("budget %g is not met and no warning says so: %q", budget, r.Plan.Warnings)
			}
			// Within one KV head: 4 of them, all alike unless windows differ.
			if windows == nil && r.Met && budget-kept > 0.25 {
				t.Errorf("keeps %g of %g: more than a head is left", kept, budget)
			}
			if kept < last {
				t.Errorf("windows %v: budget %g keeps %g, a smaller one %g", windows, budget, kept, last)
			}
			last = kept
			for l, row := range r.Plan.Layers {
				for k, name := range row {
					if h := r.Heads[l][k]; h.Policy != name || h.Gate != in.Gates.Values[l][k] || !(h.Recovery >= 0 && h.Recovery <= 1) {
						t.Errorf("layer %d, KV head %d: %+v, plan says %s", l, k, h, name)
					}
				}
			}
		}
		if last != 1 {
			t.Errorf("windows %v: a budget of 1 keeps %g", windows, last)
		}
	}
}

// On a layer with a sliding window the full policy already keeps no more than the window.
func TestSlidingWindowsCountAsTheModelHasThem(t *testing.T) {
	in := inputs(t, 1, []int{0, 200})
	o := DefaultOptions()
	o.Budget = 1
	full := mustCompile(t, in, o).Plan.Usage(plan.Request{PromptTokens: 640})
	if want := int64(2 * (640/16 + 208/16)); full.Blocks != want {
		t.Errorf("full cache of %d blocks, want %d", full.Blocks, want)
	}
}

func TestEachInputAloneCanChangeThePlan(t *testing.T) {
	in := inputs(t, 1, nil)
	o := DefaultOptions()
	base := mustCompile(t, in, o)
	if again := mustCompile(t, in, o); !bytes.Equal(marshal(t, again.Plan), marshal(t, base.Plan)) {
		t.Error("the same inputs give other bytes")
	}
	changed := func(name string, r *Result) {
		t.Helper()
		if r.Plan.Digest() == base.Plan.Digest() {
			t.Errorf("another %s gives the same plan", name)
		}
	}
	gates := in
	gates.Gates = &distill.Gates{Values: [][]float64{{0.1, 0.6}, {0.2, 0.9}}}
	changed("set of gates", mustCompile(t, gates, o))

	// Without open gates the budgets of layers decide.
	closed := in
	closed.Gates = &distill.Gates{Values: [][]float64{{0.4, 0.3}, {0.2, 0.1}}}
	o.Budget = 0.3
	base = mustCompile(t, closed, o)
	layers := closed
	layers.Budgets = budgets(t, in.Record.(*profile.Record), pyramid.Uniform)
	changed("division among layers", mustCompile(t, layers, o))

	// The same gates and the same schedule on another record: one whose heads recover the threshold by streaming.
	o.Threshold = 0.999
	strict := mustCompile(t, closed, o)
	other := closed
	other.Record = &streamingRecord{in.Record}
	base = strict
	changed("record", mustCompile(t, other, o))
}

// streamingRecord is a record whose heads look at nothing but recent tokens.
type streamingRecord struct{ Record }

func (r *streamingRecord) Heads(sample int) ([]profile.HeadStats, error) {
	heads, err := r.Record.Heads(sample)
	out := slices.Clone(heads)
	for i := range out {
		out[i].Recent = slices.Repeat([]float64{1}, len(out[i].Recent))
	}
	return out, err
}

func TestRecoveryRequest(t *testing.T) {
	in := inputs(t, 1, nil)
	last := 0.0
	for _, want := range []float64{0.5, 0.7, 0.9, 0.99, 1} {
		for _, least := range []bool{false, true} {
			o := DefaultOptions()
			o.Budget, o.Recovery, o.LeastRecovery = 0, want, least
			r := mustCompile(t, in, o)
			got := r.Mean
			if least {
				got = r.Least
			}
			if !r.Met || got < want {
				t.Errorf("recovery %g asked (worst head: %v), %g reached, met %v", want, least, got, r.Met)
			}
			if !least {
				if r.Kept < last {
					t.Errorf("recovery %g keeps %g, a smaller one %g", want, r.Kept, last)
				}
				last = r.Kept
			}
		}
	}
}

func TestRatioBudgetsKeepTheSameAtTheContext(t *testing.T) {
	in := inputs(t, 1, nil)
	in.Gates = &distill.Gates{Values: [][]float64{{0.4, 0.3}, {0.2, 0.1}}}
	for _, budget := range []float64{0.15, 0.3, 0.4} {
		o := DefaultOptions()
		o.Budget = budget
		tokens := mustCompile(t, in, o)
		o.RatioBudgets = true
		ratio := mustCompile(t, in, o)
		if a, b := tokens.Plan.ComputeTotals(640, 0), ratio.Plan.ComputeTotals(640, 0); a.KeptBytes != b.KeptBytes {
			t.Errorf("budget %g: %d bytes with tokens, %d with shares", budget, a.KeptBytes, b.KeptBytes)
		}
		if a, b := tokens.Plan.ComputeTotals(6400, 0), ratio.Plan.ComputeTotals(6400, 0); a.KeptBytes >= b.KeptBytes {
			t.Errorf("budget %g: shares do not grow with the prompt", budget)
		}
	}
}

func TestInputsOfAnotherModelAreRefused(t *testing.T) {
	in := inputs(t, 1, nil)
	for name, change := range map[string]func(*Inputs){
		"weights": func(in *Inputs) { in.Model.SHA256.Weights = strings.Repeat("0", 64) },
		"shape":   func(in *Inputs) { in.Model.NLayers++ },
		"gates":   func(in *Inputs) { in.Gates = &distill.Gates{Values: [][]float64{{1, 1}}} },
		"trained": func(in *Inputs) {
			in.Gates = &distill.Gates{Values: in.Gates.Values, Meta: distill.Meta{Model: "other"}}
		},
		"policies": func(in *Inputs) { f := *in.FastGen; f.Record = "other"; in.FastGen = &f },
		"budgets":  func(in *Inputs) { b := *in.Budgets; b.Record = "other"; in.Budgets = &b },
	} {
		other := in
		change(&other)
		var mismatch *MismatchError
		if _, err := Compile(other, DefaultOptions()); !errors.As(err, &mismatch) {
			t.Errorf("%s: error %v, want a MismatchError", name, err)
		}
	}
}

func TestWrongOptionsAreRefused(t *testing.T) {
	in := inputs(t, 1, nil)
	for name, change := range map[string]func(*Options){
		"both requests": func(o *Options) { o.Recovery = 0.9 },
		"no request":    func(o *Options) { o.Budget = 0 },
		"budget":        func(o *Options) { o.Budget = 1.5 },
		"NaN":           func(o *Options) { o.Budget = math.NaN() },
		"even kernel":   func(o *Options) { o.Kernel = 4 },
		"block":         func(o *Options) { o.BlockSize = 0 },
		"window":        func(o *Options) { o.Window = 33 },
		"dtype":         func(o *Options) { o.Dtype = "f64" },
		"length":        func(o *Options) { o.Lengths = []int{0} },
	} {
		o := DefaultOptions()
		change(&o)
		var option *OptionError
		if _, err := Compile(in, o); !errors.As(err, &option) {
			t.Errorf("%s: error %v, want an OptionError", name, err)
		}
	}
}

func TestTiesAndDistanceAreWarnedOf(t *testing.T) {
	in := inputs(t, 1, nil)
	in.Gates = &distill.Gates{Values: [][]float64{{1, 1}, {1, 1}}}
	o := DefaultOptions()
	o.Budget = 0.6
	r := mustCompile(t, in, o)
	text := strings.Join(r.Plan.Warnings, "\n")
	for _, want := range []string{"4 KV heads have the same gate of 1", "on one side of .5", "at most 640 tokens", "made for 4096 tokens"} {
		if !strings.Contains(text, want) {
			t.Errorf("no warning has %q:\n%s", want, text)
		}
	}
	if n := len(r.Plan.Evidence.Recipe.TiedHeads); n != 4 {
		t.Errorf("%d tied heads named, want 4", n)
	}
	if name := r.Plan.Layers[0][0]; name != "full" {
		t.Errorf("of tied heads the first is kept by %q, want full", name)
	}
}

// topKGains agrees with a direct reading of the definition.
func TestTopKGainsMatchBruteForce(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 50 {
		n, answers := 20+r.IntN(60), r.IntN(4)
		window := 1 + r.IntN(15)
		policy := plan.TopK{ObservationWindow: window, SinkTokens: r.IntN(4), Pool: plan.Pool{Kind: plan.PoolMax, Kernel: 1 + 2*r.IntN(4)}}
		s := profile.Sample{Prompt: n, Answers: slices.Repeat([]int{n - 1}, answers)}
		group := make([]profile.Columns, 1+r.IntN(3))
		random := func(n int) []float32 {
			out := make([]float32, n)
			for i := range out {
				out[i] = float32(r.IntN(8)) / 8 // ties are frequent
			}
			return out
		}
		for q := range group {
			group[q] = profile.Columns{Window: [][]float32{random(n)}}
			if answers > 0 {
				group[q].Answer = random(n + 3)
			}
		}
		gains := topKGains(group, &s, policy, 0)
		for tokens := window + policy.SinkTokens; tokens <= n; tokens++ {
			keep := make([]bool, n)
			for j := n - window; j < n; j++ {
				keep[j] = true
			}
			for j := range policy.SinkTokens {
				keep[j] = true
			}
			left := tokens
			for _, k := range keep {
				if k {
					left--
				}
			}
			for ; left > 0; left-- {
				best, bestVote := -1, 0.0
				for j := range n - window {
					if keep[j] {
						continue
					}
					vote := 0.0
					for i := max(0, j-policy.Pool.Kernel/2); i <= min(n-window-1, j+policy.Pool.Kernel/2); i++ {
						sum := 0.0
						for _, c := range group {
							sum += float64(c.Window[0][i])
						}
						vote = max(vote, sum)
					}
					if best < 0 || vote > bestVote {
						best, bestVote = j, vote
					}
				}
				keep[best] = true
			}
			want := 1.0
			for _, c := range group {
				mass, rest := c.Window[0], 0.0
				if answers > 0 {
					mass = c.Answer[:n]
					for _, v := range c.Answer[n:] {
						rest += float64(v)
					}
				}
				kept, all := rest, rest
				for j, v := range mass {
					all += float64(v)
					if keep[j] {
						kept += float64(v)
					}
				}
				if all > 0 {
					want = min(want, kept/all)
				}
			}
			if math.Abs(gains[tokens]-want) > 1e-9 {
				t.Fatalf("%d of %d tokens: %g, want %g", tokens, n, gains[tokens], want)
			}
		}
		if !slices.IsSorted(gains) {
			t.Fatal("more tokens recover less")
		}
	}
}

func TestPoolAverages(t *testing.T) {
	got := plan.Pool{Kind: plan.PoolAvg, Kernel: 3}.Smooth([]float64{3, 0, 6})
	if want := []float64{1, 3, 2}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
