package compile

import (
	"bytes"
	"errors"
	"flag"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/fastgen"
	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/profile"
	"github.com/kvprofile/kvprofile/pyramid"
	"github.com/kvprofile/kvprofile/schema"
)

var update = flag.Bool("update", false, "write the golden plans anew")

// synthetic makes inputs without a record: gates with ties, scores, FastGen policies and layer measurements.
func synthetic(r *rand.Rand, layers, kvHeads int, windows []int) Inputs {
	in := Inputs{Tool: plan.Tool{Name: "test", Version: "1"}, ModelID: "id",
		Model: plan.Model{Name: "synthetic", Architecture: "llama", NLayers: layers, NHeads: 2 * kvHeads, NKVHeads: kvHeads, HeadDim: 64, MaxPosition: 1 << 20,
			SlidingWindow: windows, RoPE: plan.RoPE{Theta: 1e4},
			SHA256: plan.Hashes{Config: strings.Repeat("1", 64), Weights: strings.Repeat("2", 64), Tokenizer: strings.Repeat("3", 64)}},
		Classes:     plan.TokenClasses{Special: []int{0, 1, 2}, Punctuation: []int{11, 13}},
		GatesSHA256: strings.Repeat("a", 64), PoliciesSHA256: strings.Repeat("c", 64), BudgetsSHA256: strings.Repeat("b", 64)}
	scores := func(levels int) [][]float64 {
		out := make([][]float64, layers)
		for l := range out {
			for range kvHeads {
				out[l] = append(out[l], float64(r.IntN(levels+1))/float64(levels))
			}
		}
		return out
	}
	in.Gates = &distill.Gates{Values: scores(6), Scores: []distill.Score{{Name: distill.ScoreDataLight, Values: scores(1 << 20)},
		{Name: distill.ScoreNeedleMass, Values: scores(1 << 20)}, {Name: distill.ScoreCopy, Values: scores(3)}}}
	o := fastgen.Options{Threshold: 0.95, FrequentRatio: 0.3, LocalRatio: 0.3, Group: fastgen.Min, Samples: fastgen.Mean}
	in.FastGen = &fastgen.Result{Options: o, Lattice: o.Lattice()}
	m := pyramid.Measurement{}
	for range layers {
		var heads []fastgen.Head
		for range kvHeads {
			h := fastgen.Head{}
			x := 0.0
			for _, kept := range []float64{0.01, 0.1, 0.4, 0.6} {
				x += (1 - x) * r.Float64()
				h.Recovery = append(h.Recovery, x)
				h.KeptMax = append(h.KeptMax, kept+0.05*r.Float64())
			}
			h.Recovery, h.KeptMax = append(h.Recovery, 1), append(h.KeptMax, 1)
			heads = append(heads, h)
		}
		in.FastGen.Layers = append(in.FastGen.Layers, heads)
		m.Keys = append(m.Keys, 10+100*r.Float64())
		m.Variation = append(m.Variation, r.Float64())
		m.Entropy = append(m.Entropy, r.Float64())
	}
	in.Budgets = &pyramid.Artefact{Model: profile.Model{Layers: layers, SlidingWindow: windows}, Measurement: m,
		Request: pyramid.Request{Mode: pyramid.Keys, Layers: layers, Length: 1024, Total: 128 * layers, Window: 8, Beta: 20, Block: 1, Floor: 0.25, Weights: m.Keys}}
	return in
}

// alone are the methods that need no record.
func alone() []string {
	return slices.DeleteFunc(Methods(), func(name string) bool { return name == MethodRecipe || name == MethodRecipeByGate })
}

// Whatever the model, context, block size and budget: the plan is valid, keeps no more than asked, no less than the
// method can, and more where more is asked for.
func TestMethodsKeepTheirBudget(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	budgets := []float64{0.01, 0.03, 0.0625, 0.125, 0.25, 0.3, 0.5, 0.77, 0.95, 1}
	for round := range 16 {
		layers, kvHeads := 1+r.IntN(8), 1+r.IntN(4)
		var windows []int
		if round%3 == 0 {
			for range layers {
				windows = append(windows, r.IntN(2)*(100+r.IntN(900)))
			}
		}
		in := synthetic(r, layers, kvHeads, windows)
		o := MethodOptions{Context: 64 + r.IntN(5000), BlockSize: []int{1, 8, 16, 32, 100, 256}[r.IntN(6)], Seed: uint64(round), Order: Orders()[r.IntN(5)]}
		for _, name := range alone() {
			last := 0.0
			for _, budget := range budgets {
				o.Budget = budget
				p, err := Method(name, in, o)
				if small := (*BudgetError)(nil); errors.As(err, &small) {
					if small.Least <= budget || last > 0 {
						t.Fatalf("%s at %g: %v", name, budget, err)
					}
					o.Budget = small.Least
					if p, err = Method(name, in, o); err != nil {
						t.Fatalf("%s at its least of %g: %v", name, small.Least, err)
					}
					if got := share(p, o.Context); math.Abs(got-small.Least) > 1e-9 {
						t.Fatalf("%s keeps %g at its least of %g", name, got, small.Least)
					}
					continue
				}
				if err != nil {
					t.Fatalf("%s at %g of %d tokens in blocks of %d: %v", name, budget, o.Context, o.BlockSize, err)
				}
				// Method has validated the plan; the schema is asked now and then, for it takes its time.
				if budget == 0.3 && round%4 == 0 {
					if v, err := schema.Check(marshal(t, p)); err != nil || len(v) > 0 {
						t.Fatalf("%s at %g: %v %v", name, budget, v, err)
					}
				}
				u := p.Usage(plan.Request{PromptTokens: o.Context})
				kept := share(p, o.Context)
				if kept > budget || kept < last {
					t.Fatalf("%s at %g keeps %g, before %g", name, budget, kept, last)
				}
				if said := p.Evidence.Recipe.Figures["kept_share"]; said != kept {
					t.Fatalf("%s: says %g, keeps %g", name, said, kept)
				}
				if name != MethodFastGen && budget < 1 && float64(u.Blocks+1)/float64(u.FullBytes/(u.Bytes/u.Blocks)) <= budget {
					t.Fatalf("%s at %g of %d tokens in blocks of %d (windows %v) keeps %d blocks: another would do", name, budget, o.Context, o.BlockSize, windows, u.Blocks)
				}
				if name == MethodFull && kept != 1 || budget == 1 && name != MethodFastGen && kept != 1 {
					t.Fatalf("%s at 1 keeps %g", name, kept)
				}
				last = kept
			}
		}
	}
}

// share is kept bytes / full bytes.
func share(p *plan.Plan, context int) float64 {
	u := p.Usage(plan.Request{PromptTokens: context})
	return float64(u.Bytes) / float64(u.FullBytes)
}

// No two methods make the same plan, and the same inputs make the same bytes.
func TestMethodsDiffer(t *testing.T) {
	in := synthetic(rand.New(rand.NewPCG(2, 2)), 6, 3, nil)
	for _, budget := range []float64{0.2, 0.5} {
		seen := map[string]string{}
		for _, name := range alone() {
			o := MethodOptions{Budget: budget, Context: 4096, Seed: 7}
			if name == MethodFull {
				o.Budget = 1
			}
			p, err := Method(name, in, o)
			if err != nil {
				t.Fatal(err)
			}
			if other := seen[p.Digest()]; other != "" {
				t.Errorf("%s and %s make the same plan at %g", name, other, budget)
			}
			seen[p.Digest()] = name
			if again, err := Method(name, in, o); err != nil || !bytes.Equal(marshal(t, again), marshal(t, p)) {
				t.Errorf("%s: another plan of the same inputs (%v)", name, err)
			}
		}
	}
	a, err := Method(MethodDuoRandom, in, MethodOptions{Budget: 0.5, Context: 4096, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	b, err := Method(MethodDuoRandom, in, MethodOptions{Budget: 0.5, Context: 4096, Seed: 2})
	if err != nil {
		t.Fatal(err)
	}
	if a.Digest() == b.Digest() {
		t.Error("another seed draws the same heads")
	}
}

// What the papers say of each method, read off the plans at 4,096 tokens.
func TestMethodsAreWhatTheirPapersSay(t *testing.T) {
	in := synthetic(rand.New(rand.NewPCG(3, 3)), 8, 2, nil)
	of := func(name string, budget float64) *plan.Plan {
		t.Helper()
		p, err := Method(name, in, MethodOptions{Budget: budget, Context: 4096})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	// each calls f for every head's policy.
	each := func(p *plan.Plan, f func(layer, kvHead int, q plan.Policy)) {
		for l, row := range p.Layers {
			for k, name := range row {
				f(l, k, p.Policies[name])
			}
		}
	}
	each(of(MethodWindow, 0.25), func(_, _ int, q plan.Policy) {
		if s := q.(plan.Streaming); s.SinkTokens != 0 || s.RecentTokens != 1024 || s.Evict != plan.EvictPrefillEnd || s.Positions != plan.PositionsOriginal {
			t.Errorf("window: %+v", s)
		}
	})
	each(of(MethodStreamingLLM, 0.25), func(_, _ int, q plan.Policy) {
		if s := q.(plan.Streaming); s.SinkTokens != 4 || s.RecentTokens != 1024-16 || s.Evict != plan.EvictPrefillEnd || s.Positions != plan.PositionsCacheSlot {
			t.Errorf("streaming-llm: %+v", s)
		}
	})
	each(of(MethodSnapKV, 0.25), func(_, _ int, q plan.Policy) {
		if s := q.(plan.TopK); s.BudgetTokens != 1024 || s.ObservationWindow != 32 || s.Pool != (plan.Pool{Kind: plan.PoolMax, Kernel: 7}) || s.SinkTokens != 0 || s.Decode != plan.DecodeStatic {
			t.Errorf("snapkv: %+v", s)
		}
	})
	each(of(MethodH2O, 0.25), func(_, _ int, q plan.Policy) {
		if h := q.(plan.H2O); h.HeavyTokens != 512 || h.RecentTokens != 512 || h.SinkTokens != 0 || h.Decode != plan.DecodeRolling || h.Evict != plan.EvictPrefillEnd {
			t.Errorf("h2o: %+v", h)
		}
	})
	// PyramidKV's formula: b = 512 - 8, smallest b/20, largest 2b - b/20, in equal steps; here in blocks of 16.
	b := 512.0 - 8
	each(of(MethodPyramidKV, 0.125), func(l, _ int, q plan.Policy) {
		k := q.(plan.TopK)
		lo, hi := b/20, 2*b-b/20
		if want := hi - float64(l)*(hi-lo)/7 + 8; k.ObservationWindow != 8 || math.Abs(float64(k.BudgetTokens)-want) > 16 {
			t.Errorf("pyramidkv: layer %d keeps %d, the formula says %g", l, k.BudgetTokens, want)
		}
	})
	// The layers' order is the measurement's.
	var tokens []int
	each(of(MethodMeasured, 0.25), func(l, k int, q plan.Policy) {
		if k == 0 {
			tokens = append(tokens, q.(plan.TopK).BudgetTokens)
		}
	})
	for i := range tokens {
		for j := range tokens {
			if keys := in.Budgets.Measurement.Keys; keys[i] > keys[j] && tokens[i] < tokens[j] {
				t.Errorf("measured: layer %d needs more than layer %d and gets %d, not %d", i, j, tokens[i], tokens[j])
			}
		}
	}
	// DuoAttention: no streaming head has a higher gate than a head in full, and the reverse.
	for _, name := range []string{MethodDuo, MethodDuoReversed} {
		p := of(name, 0.5)
		least, most := 1.0, 0.0 // gates: of the side that should be higher its least, of the other its most
		full := 0
		each(p, func(l, k int, q plan.Policy) {
			gate := in.Gates.Values[l][k]
			s, streams := q.(plan.Streaming)
			if streams && (s.SinkTokens != 64 || s.RecentTokens < 256 || s.Evict != plan.EvictAlways || s.Positions != plan.PositionsOriginal) {
				t.Errorf("%s: %+v", name, s)
			}
			if !streams {
				full++
			}
			if streams == (name == MethodDuo) {
				most = max(most, gate)
			} else {
				least = min(least, gate)
			}
		})
		// 320 of 4,096 tokens is .078: 7 of 16 heads in full keep .4805, 8 would keep .539.
		if most > least || full != 7 {
			t.Errorf("%s: %d heads in full; gates of %g and %g on the wrong sides", name, full, least, most)
		}
	}
	// FastGen: every head has the first policy that recovers the threshold, which is the highest that fits.
	p := of(MethodFastGen, 0.5)
	threshold := p.Evidence.Recipe.Figures["threshold"]
	next := math.Inf(1)
	each(p, func(l, k int, q plan.Policy) {
		h := in.FastGen.Layers[l][k]
		step := slices.IndexFunc(h.Recovery, func(x float64) bool { return x >= threshold })
		for _, x := range h.Recovery {
			if x > threshold {
				next = min(next, x)
			}
		}
		if want := []string{"special", "special-punctuation", "frequent", "frequent-local", "full"}[step]; p.Layers[l][k] != want {
			t.Errorf("fastgen: %s, want %s", p.Layers[l][k], want)
		}
	})
	// topk-by-gate: sums exactly, and in the order of the gates.
	sum := 0
	p = of(MethodTopKByGate, 0.3)
	each(p, func(l, k int, q plan.Policy) {
		mine := q.(plan.TopK).BudgetTokens
		sum += mine
		each(p, func(l2, k2 int, q2 plan.Policy) {
			if in.Gates.Values[l][k] > in.Gates.Values[l2][k2] && mine < q2.(plan.TopK).BudgetTokens {
				t.Errorf("topk-by-gate: gate %g gets %d, a lower one more", in.Gates.Values[l][k], mine)
			}
		})
	})
	// .3 of 16 heads of 256 blocks.
	if want := 1228 * 16; sum != want {
		t.Errorf("topk-by-gate: budgets add up to %d tokens, want %d", sum, want)
	}
}

func TestStreamingSize(t *testing.T) {
	for _, c := range []struct{ context, block, sink, recent int }{
		{131072, 16, 64, 256}, {4096, 16, 64, 256}, {3839, 16, 32, 128}, {2048, 16, 32, 128}, {1024, 16, 16, 64}, {512, 16, 16, 32}, {512, 1, 8, 32},
		{1, 1, 4, 16}, {4096, 100, 100, 300}, {4096, 256, 256, 256}} {
		if sink, recent := StreamingSize(c.context, c.block); sink != c.sink || recent != c.recent {
			t.Errorf("%d tokens in blocks of %d: %d + %d, want %d + %d", c.context, c.block, sink, recent, c.sink, c.recent)
		}
	}
}

func TestRecipeIsCompilesPlan(t *testing.T) {
	in := inputs(t, 1, nil)
	o := DefaultOptions()
	o.Budget, o.Lengths = 0.5, nil
	want := mustCompile(t, in, o).Plan
	got, err := Method(MethodRecipe, in, MethodOptions{Budget: 0.5, Seed: o.Seed})
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(marshal(t, got), marshal(t, want)) {
		t.Error("the recipe as a method gives another plan than Compile")
	}
	var small *BudgetError
	if _, err := Method(MethodRecipe, in, MethodOptions{Budget: 0.01}); !errors.As(err, &small) || !(small.Least > 0.01) {
		t.Errorf("error %v, want a BudgetError", err)
	}
	// With a record the context is the longest recorded.
	p, err := Method(MethodMeasured, in, MethodOptions{Budget: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	if p.Evidence.Recipe.ContextTokens != 640 || p.Evidence.Calibration.RecordSHA256 == "" || p.Evidence.Calibration.GatesSHA256 != "" {
		t.Errorf("%+v", p.Evidence)
	}
}

func TestMethodRefusesWhatItCannotUse(t *testing.T) {
	in := synthetic(rand.New(rand.NewPCG(4, 4)), 3, 2, nil)
	good := MethodOptions{Budget: 0.5, Context: 2048}
	for what, change := range map[string]func(*MethodOptions){
		"no budget":       func(o *MethodOptions) { o.Budget = 0 },
		"negative budget": func(o *MethodOptions) { o.Budget = -1 },
		"large budget":    func(o *MethodOptions) { o.Budget = 1.01 },
		"NaN":             func(o *MethodOptions) { o.Budget = math.NaN() },
		"no context":      func(o *MethodOptions) { o.Context = 0 },
		"context":         func(o *MethodOptions) { o.Context = 1 << 40 },
		"block":           func(o *MethodOptions) { o.BlockSize = -1 },
		"dtype":           func(o *MethodOptions) { o.Dtype = "f64" },
		"order":           func(o *MethodOptions) { o.Order = "alphabet" },
		"window":          func(o *MethodOptions) { o.Window = -1 },
		"sink":            func(o *MethodOptions) { o.Sink = 4 },
		"evict":           func(o *MethodOptions) { o.Evict = "never" },
		"kernel":          func(o *MethodOptions) { o.Kernel = 2 },
		"length":          func(o *MethodOptions) { o.Lengths = []int{-4} },
	} {
		o := good
		change(&o)
		var option *OptionError
		if _, err := Method(MethodDuo, in, o); !errors.As(err, &option) {
			t.Errorf("%s: %v, want an OptionError", what, err)
		}
	}
	var option *OptionError
	if _, err := Method("telepathy", in, good); !errors.As(err, &option) {
		t.Errorf("unknown method: %v", err)
	}
	for what, x := range map[string]struct {
		method string
		change func(*Inputs)
	}{
		"no gates":       {MethodDuo, func(in *Inputs) { in.Gates = nil }},
		"no policies":    {MethodFastGen, func(in *Inputs) { in.FastGen = nil }},
		"no budgets":     {MethodMeasured, func(in *Inputs) { in.Budgets = nil }},
		"no record":      {MethodRecipe, func(*Inputs) {}},
		"no classes":     {MethodFastGen, func(in *Inputs) { in.Classes = plan.TokenClasses{} }},
		"shape of gates": {MethodTopKByGate, func(in *Inputs) { in.Gates = &distill.Gates{Values: [][]float64{{1}}} }},
		"no layers":      {MethodWindow, func(in *Inputs) { in.Model.NLayers = 0 }},
	} {
		other := in
		x.change(&other)
		var mismatch *MismatchError
		if _, err := Method(x.method, other, good); !errors.As(err, &mismatch) {
			t.Errorf("%s: %v, want a MismatchError", what, err)
		}
	}
	// An order whose score is missing.
	other := in
	other.Gates = &distill.Gates{Values: in.Gates.Values}
	o := good
	o.Order = OrderCopy
	if _, err := Method(MethodDuo, other, o); !errors.As(err, &option) {
		t.Errorf("order without a score: %v", err)
	}
	// Gates that are all the same tell nothing apart: an even division.
	other.Gates = &distill.Gates{Values: [][]float64{{0, 0}, {0, 0}, {0, 0}}}
	p, err := Method(MethodTopKByGate, other, good)
	if err != nil || len(p.Policies) != 1 {
		t.Errorf("%v %v", p, err)
	}
}

// The plans of a small model, as they were when last reviewed.
func TestGoldenMethods(t *testing.T) {
	in := synthetic(rand.New(rand.NewPCG(5, 5)), 4, 2, []int{0, 512, 0, 512})
	for _, name := range alone() {
		budget := 0.3
		if name == MethodFull {
			budget = 1
		}
		p, err := Method(name, in, MethodOptions{Budget: budget, Context: 2048, Lengths: []int{1024}, Seed: 5})
		if err != nil {
			t.Fatal(err)
		}
		path, got := filepath.Join("testdata", name+".json"), marshal(t, p)
		if *update {
			if err := os.WriteFile(path, got, 0o666); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s has changed; if it should, go test -update and read the difference:\n%s", name, got)
		}
	}
}

// Among equal gates the data-light score decides, then the order of layers and KV heads.
func TestEqualGatesAreOrderedByTheDataLightScore(t *testing.T) {
	g := &distill.Gates{Values: [][]float64{{0, 1}, {0, 0}}, Scores: []distill.Score{{Name: distill.ScoreDataLight, Values: [][]float64{{0.2, 0.1}, {0.7, 0.2}}}}}
	p, err := priorOf(g, "")
	if err != nil {
		t.Fatal(err)
	}
	rank := p.rank()
	if want := []int{1, 2, 0, 3}; !slices.Equal(rank, want) {
		t.Errorf("order %v, want %v", rank, want)
	}
	if got := p.tied(rank, 3); !slices.Equal(got, []int{0, 3}) {
		t.Errorf("tied %v, want the first and the last head", got)
	}
	if got := p.tied(rank, 2); got != nil {
		t.Errorf("tied %v where scores decide", got)
	}
	for order, want := range map[Order][]int{OrderDataLight: {2, 0, 3, 1}, OrderRanks: {2, 1, 0, 3}} {
		p, err := priorOf(g, order)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.rank(); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", order, got, want)
		}
	}
}

func TestCompileFollowsTheOrder(t *testing.T) {
	in := inputs(t, 1, nil)
	in.Gates = &distill.Gates{Values: [][]float64{{0.9, 0.2}, {0.6, 0.1}}, Scores: []distill.Score{{Name: distill.ScoreNeedleMass, Values: [][]float64{{0.1, 0.2}, {0.3, 0.4}}}}}
	o := DefaultOptions()
	o.Order, o.Budget = OrderNeedleMass, 0.5
	r := mustCompile(t, in, o)
	if r.Plan.Layers[1][1] != "full" || r.Plan.Layers[0][0] == "full" {
		t.Errorf("needle mass orders otherwise: %v", r.Plan.Layers)
	}
	e := r.Plan.Evidence.Recipe
	if e.GateThreshold != nil || e.Figures["order_threshold"] == 0 || e.Name != "needle-mass-fastgen-pyramid" {
		t.Errorf("%+v", e)
	}
	o.Order = OrderCopy
	var option *OptionError
	if _, err := Compile(in, o); !errors.As(err, &option) {
		t.Errorf("an order without its score: %v", err)
	}
}

// Budgets by recovery are the best: no single block moved from one head to another recovers more, in the sum along the
// hulls, or of the worst head.
func TestBudgetsByRecoveryAreTheBest(t *testing.T) {
	r := rand.New(rand.NewPCG(12, 19))
	for range 30 {
		in := synthetic(r, 3, 2, nil)
		b, err := newBuilder(&in, MethodOptions{Budget: 0.5, Context: 640, Window: 8})
		if err != nil {
			t.Fatal(err)
		}
		c := &compiler{family: &family{}}
		for h := range b.heads() {
			// Concave curves are their own hulls.
			curve, rate := make([]float64, 41), 0.5+0.49*r.Float64()
			for n := 1; n <= 40; n++ {
				curve[n] = 1 - math.Pow(rate, float64(n))
			}
			c.family.heads = append(c.family.heads, head{layer: h / 2, kv: h % 2, full: 640, curve: curve})
		}
		for _, budget := range []int{6, 40, 100, 239, 240} {
			for _, least := range []bool{false, true} {
				m, err := b.byRecovery(budget, c, least)
				if err != nil {
					t.Fatal(err)
				}
				if used := b.used(m.policies); used != budget {
					t.Fatalf("%d of %d blocks used", used, budget)
				}
				blocks := make([]int, b.heads())
				for h, q := range m.policies {
					blocks[h] = b.blocks(b.layer(h), q)
				}
				value := func() float64 {
					sum, low := 0.0, 1.0
					for h, n := range blocks {
						x := c.family.heads[h].curve[n]
						sum, low = sum+x, min(low, x)
					}
					if least {
						return low
					}
					return sum
				}
				best := value()
				for from := range blocks {
					for to := range blocks {
						if from == to || blocks[from] <= 1 || blocks[to] >= 40 {
							continue
						}
						blocks[from]--
						blocks[to]++
						if got := value(); got > best+1e-9 {
							t.Fatalf("budget %d, least %v: a block from head %d to %d gives %g, not %g", budget, least, from, to, got, best)
						}
						blocks[from]++
						blocks[to]--
					}
				}
			}
		}
		if m, err := b.byRecovery(5, c, true); err != nil || m.policies != nil || m.needed != 6 {
			t.Fatalf("%+v %v", m, err)
		}
	}
}
