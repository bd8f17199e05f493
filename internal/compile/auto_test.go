package compile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/plan"
)

// world is a model whose answers hang on a few heads: a prompt is right when the heads that it needs keep enough.
type world struct {
	context int
	prompts int
	// needs[head] is the share of the context that a head needs, weight what its lack costs in nats.
	needs, weight []float64
	// of[prompt][head] scales the weight.
	of [][]float64
	// calls counts the plans of every call.
	calls []int
}

// newWorld plants heads that need everything in a model of many that need next to nothing.
func newWorld(r *rand.Rand, heads int, retrieval []int) *world {
	w := &world{context: 2048, prompts: 80}
	for h := range heads {
		need, weight := 0.02+0.03*r.Float64(), 0.02+0.05*r.Float64()
		if slices.Contains(retrieval, h) {
			need, weight = 1, 2+r.Float64()
		}
		w.needs, w.weight = append(w.needs, need), append(w.weight, weight)
	}
	for range w.prompts {
		var row []float64
		for range heads {
			row = append(row, 0.5+r.Float64())
		}
		w.of = append(w.of, row)
	}
	return w
}

func (w *world) score(p *plan.Plan) Score {
	s := Score{M: w.prompts}
	var share []float64
	for l, row := range p.Layers {
		for k := range row {
			u, err := p.HeadUsage(l, k, plan.Request{PromptTokens: w.context})
			if err != nil {
				panic(err)
			}
			share = append(share, float64(u.Bytes)/float64(u.FullBytes))
		}
	}
	for i := range w.prompts {
		loss := 0.0
		for h, x := range share {
			if lack := w.needs[h] - x; lack > 0 {
				loss += w.weight[h] * w.of[i][h] * lack / w.needs[h]
			}
		}
		s.FullLogProb = append(s.FullLogProb, -0.1)
		s.LogProb = append(s.LogProb, -0.1-loss)
		if loss < 0.7 {
			s.K++
		}
	}
	return s
}

func (w *world) measure(ctx context.Context, plans []*plan.Plan) ([]Score, error) {
	w.calls = append(w.calls, len(plans))
	var out []Score
	for _, p := range plans {
		if v := p.Validate(); len(v) > 0 {
			return nil, fmt.Errorf("invalid plan: %v", v)
		}
		out = append(out, w.score(p))
	}
	return out, ctx.Err()
}

// needed is the share of bytes that is enough for every head.
func (w *world) needed() float64 {
	blocks, full := 0, w.context/16
	for _, x := range w.needs {
		blocks += max(int(math.Ceil(x*float64(full))), 3)
	}
	return float64(blocks) / float64(full*len(w.needs))
}

// gates says what trained gates could say of a world: most of the heads that matter, wrongly some others.
func gatesOf(r *rand.Rand, layers, kvHeads int, open []int) *distill.Gates {
	g := &distill.Gates{}
	other := distill.Score{Name: distill.ScoreDataLight}
	for l := range layers {
		var row, row2 []float64
		for k := range kvHeads {
			x := 0.3 * r.Float64()
			if slices.Contains(open, l*kvHeads+k) {
				x = 0.6 + 0.4*r.Float64()
			}
			row, row2 = append(row, x), append(row2, r.Float64())
		}
		g.Values, other.Values = append(g.Values, row), append(other.Values, row2)
	}
	g.Scores = []distill.Score{other}
	return g
}

func TestAutoFindsThePlantedHeads(t *testing.T) {
	for seed := range uint64(2) {
		r := rand.New(rand.NewPCG(seed, 11))
		layers, kvHeads := 12, 4
		retrieval := r.Perm(layers * kvHeads)[:6]
		w := newWorld(r, layers*kvHeads, retrieval)
		in := synthetic(r, layers, kvHeads, nil)
		// Four of the six are known to the gates, and six others are taken for what they are not.
		in.Gates = gatesOf(r, layers, kvHeads, append(r.Perm(layers * kvHeads)[:6], retrieval[:4]...))
		o := AutoOptions{MethodOptions: MethodOptions{Context: w.context}, Retention: 0.95}
		got, err := Auto(context.Background(), in, o, w.measure)
		if err != nil {
			t.Fatal(err)
		}
		check(t, got, w, o)
		if got.Lower < 0.95 || got.Point {
			t.Errorf("seed %d: %d of %d, bound %g", seed, got.Score.K, got.Score.M, got.Lower)
		}
		// The smallest budget at which a method alone does it, in steps of a hundredth.
		smallest, name := 1.0, ""
		for _, method := range alone() {
			for budget := 0.05; budget < smallest; budget += 0.01 {
				p, err := Method(method, in, MethodOptions{Context: w.context, Budget: budget})
				if err != nil {
					continue
				}
				if x := w.score(p); lower95(x.K, x.M) >= o.Retention {
					smallest, name = budget, method
				}
			}
		}
		t.Logf("seed %d: kept %.4f in %d calls of %d plans (%s); needed %.4f; best single method %.4f (%s)", seed, got.Kept, got.Calls, len(got.Tried), got.Name, w.needed(), smallest, name)
		if got.Kept > 1.25*w.needed() {
			t.Errorf("seed %d: keeps %g, %g is enough", seed, got.Kept, w.needed())
		}
		if got.Kept >= smallest {
			t.Errorf("seed %d: keeps %g, %s alone %g", seed, got.Kept, name, smallest)
		}
		again, err := Auto(context.Background(), in, o, w.measure)
		if err != nil || !bytes.Equal(marshal(t, again.Plan), marshal(t, got.Plan)) || !reflect.DeepEqual(again.Tried, got.Tried) {
			t.Errorf("seed %d: a second search finds another plan (%v)", seed, err)
		}
	}
}

// check holds of every result.
func check(t *testing.T, r *AutoResult, w *world, o AutoOptions) {
	t.Helper()
	if v := r.Plan.Validate(); len(v) > 0 {
		t.Error(v)
	}
	if got := share(r.Plan, w.context); got != r.Kept {
		t.Errorf("the plan keeps %g, the result says %g", got, r.Kept)
	}
	if got := w.score(r.Plan); got.K != r.Score.K || got.Loss() != r.Score.Loss() {
		t.Errorf("the plan has %d right and loses %g, the result says %d and %g", got.K, got.Loss(), r.Score.K, r.Score.Loss())
	}
	calls, plans := len(w.calls), 0
	for _, n := range w.calls {
		plans += n
	}
	w.calls = nil
	if calls != r.Calls || plans != len(r.Tried) {
		t.Errorf("%d calls of %d plans, the result says %d of %d", calls, plans, r.Calls, len(r.Tried))
	}
	for _, x := range r.Tried {
		if x.Kept > x.Budget && !x.Probe {
			t.Errorf("%s keeps %g of %g", x.Name, x.Kept, x.Budget)
		}
		if x.Lower != lower95(x.K, x.M) {
			t.Errorf("%s: bound %g", x.Name, x.Lower)
		}
	}
	if e := r.Plan.Evidence; !strings.HasPrefix(e.Recipe.Name, "auto: ") || e.Recipe.Figures["plans_tried"] != float64(plans) {
		t.Errorf("%+v", e.Recipe)
	}
}

// With a budget the search finds a plan that is no worse than any method at the same bytes, and keeps no more.
func TestAutoAtABudget(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 12))
	layers, kvHeads := 8, 3
	retrieval := []int{3, 11, 17, 20}
	w := newWorld(r, layers*kvHeads, retrieval)
	in := synthetic(r, layers, kvHeads, nil)
	in.Gates = gatesOf(r, layers, kvHeads, []int{3, 11, 5})
	for _, budget := range []float64{0.1, 0.2, 0.3} {
		o := AutoOptions{MethodOptions: MethodOptions{Context: w.context, Budget: budget}}
		got, err := Auto(context.Background(), in, o, w.measure)
		if err != nil {
			t.Fatal(err)
		}
		check(t, got, w, o)
		if got.Kept > budget {
			t.Errorf("keeps %g of %g", got.Kept, budget)
		}
		t.Logf("budget %g: loss %.4f, %d of %d right, %s", budget, got.Score.Loss(), got.Score.K, got.Score.M, got.Name)
		for _, name := range alone() {
			if name == MethodFull {
				continue
			}
			p, err := Method(name, in, MethodOptions{Context: w.context, Budget: budget})
			if err != nil {
				t.Fatal(err)
			}
			if x := w.score(p); x.K > got.Score.K || x.Loss() < got.Score.Loss()-1e-9 {
				t.Errorf("budget %g: %s has %d right and loses %g, the search's plan %d and %g", budget, name, x.K, x.Loss(), got.Score.K, got.Score.Loss())
			}
		}
	}
}

// Where nothing less is enough the full cache is the answer.
func TestAutoFallsBackToTheFullCache(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 13))
	in := synthetic(r, 4, 2, nil)
	w := newWorld(r, 8, []int{0, 1, 2, 3, 4, 5, 6, 7})
	for h := range w.weight {
		w.weight[h] = 1e4
	}
	o := AutoOptions{MethodOptions: MethodOptions{Context: w.context}, Retention: 0.9, Ladder: []float64{0.5, 0.25}}
	got, err := Auto(context.Background(), in, o, w.measure)
	if err != nil {
		t.Fatal(err)
	}
	check(t, got, w, o)
	if got.Kept != 1 || len(got.Plan.Policies) != 1 {
		t.Errorf("keeps %g", got.Kept)
	}
}

// Ten prompts cannot bound .95: the share itself has to reach it, and the plan says so.
func TestAutoSaysWhereThereAreTooFewPrompts(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 14))
	in := synthetic(r, 4, 2, nil)
	w := newWorld(r, 8, []int{2})
	w.prompts, w.of = 10, w.of[:10]
	o := AutoOptions{MethodOptions: MethodOptions{Context: w.context}, Retention: 0.95}
	got, err := Auto(context.Background(), in, o, w.measure)
	if err != nil {
		t.Fatal(err)
	}
	check(t, got, w, o)
	if !got.Point || got.Score.K != 10 || !strings.Contains(strings.Join(got.Plan.Warnings, " "), "10 prompts are too few") {
		t.Errorf("%+v %q", got.Score, got.Plan.Warnings)
	}
}

func TestAutoStops(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 15))
	in := synthetic(r, 6, 2, nil)
	w := newWorld(r, 12, []int{2, 7})
	o := AutoOptions{MethodOptions: MethodOptions{Context: w.context}, Retention: 0.9}

	// When it is told to.
	ctx, cancel := context.WithCancel(context.Background())
	calls := 0
	got, err := Auto(ctx, in, o, func(ctx context.Context, plans []*plan.Plan) ([]Score, error) {
		if calls++; calls == 2 {
			cancel()
		}
		return w.measure(context.Background(), plans)
	})
	if !errors.Is(err, context.Canceled) || calls != 2 || got == nil || len(got.Tried) == 0 || got.Plan != nil {
		t.Errorf("error %v after %d calls", err, calls)
	}
	// When a measurement fails.
	broken := errors.New("broken")
	if _, err := Auto(context.Background(), in, o, func(context.Context, []*plan.Plan) ([]Score, error) { return nil, broken }); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	// When its calls are used up: with the best so far.
	w.calls = nil
	o.Calls = 3
	if got, err = Auto(context.Background(), in, o, w.measure); err != nil {
		t.Fatal(err)
	}
	check(t, got, w, o)
	if !got.Cut || got.Calls != 3 || got.Kept == 1 || !strings.Contains(strings.Join(got.Plan.Warnings, " "), "cut off after 3") {
		t.Errorf("%+v", got)
	}
	// Calls hold no more plans than allowed.
	o.Calls, o.Plans = 0, 10
	if _, err := Auto(context.Background(), in, o, w.measure); err != nil || slices.Max(w.calls) > 10 {
		t.Errorf("%v %v", err, w.calls)
	}
}

func TestAutoRefuses(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 16))
	in := synthetic(r, 4, 2, nil)
	w := newWorld(r, 8, []int{2})
	good := AutoOptions{MethodOptions: MethodOptions{Context: w.context}, Retention: 0.9}
	for what, change := range map[string]func(*AutoOptions){
		"nothing":   func(o *AutoOptions) { o.Retention = 0 },
		"both":      func(o *AutoOptions) { o.Budget = 0.5 },
		"retention": func(o *AutoOptions) { o.Retention = 1 },
		"NaN":       func(o *AutoOptions) { o.Retention = math.NaN() },
		"ladder":    func(o *AutoOptions) { o.Ladder = []float64{0.1, 0.2} },
		"no ladder": func(o *AutoOptions) { o.Ladder = []float64{} },
		"calls":     func(o *AutoOptions) { o.Calls = -1 },
		"tolerance": func(o *AutoOptions) { o.Tolerance = 2 },
		"block":     func(o *AutoOptions) { o.BlockSize = -3 },
	} {
		o := good
		change(&o)
		var option *OptionError
		if _, err := Auto(context.Background(), in, o, w.measure); !errors.As(err, &option) {
			t.Errorf("%s: %v, want an OptionError", what, err)
		}
	}
	for what, score := range map[string]Score{
		"nothing right": {M: 0, LogProb: []float64{-1}, FullLogProb: []float64{-1}},
	} {
		var search *SearchError
		if _, err := Auto(context.Background(), in, good, func(_ context.Context, plans []*plan.Plan) ([]Score, error) {
			return slices.Repeat([]Score{score}, len(plans)), nil
		}); !errors.As(err, &search) {
			t.Errorf("%s: %v, want a SearchError", what, err)
		}
	}
	for what, scores := range map[string][]Score{
		"too few":         {{M: 1}},
		"more than all":   slices.Repeat([]Score{{M: 1, K: 2, LogProb: []float64{-1}, FullLogProb: []float64{-1}}}, 100),
		"no log-probs":    slices.Repeat([]Score{{M: 1, K: 1}}, 100),
		"other log-probs": slices.Repeat([]Score{{M: 1, K: 1, LogProb: []float64{-1}}}, 100),
	} {
		if _, err := Auto(context.Background(), in, good, func(_ context.Context, plans []*plan.Plan) ([]Score, error) {
			return scores[:min(len(scores), len(plans))], nil
		}); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	// A log-probability that is none costs the plan its place, no more.
	nan := func(ctx context.Context, plans []*plan.Plan) ([]Score, error) {
		scores, err := w.measure(ctx, plans)
		scores[0].LogProb[0] = math.NaN()
		return scores, err
	}
	if _, err := Auto(context.Background(), in, good, nan); err != nil {
		t.Error(err)
	}
	// Without gates, policies and budgets there are still methods.
	bare := Inputs{Tool: in.Tool, Model: in.Model}
	if got, err := Auto(context.Background(), bare, good, w.measure); err != nil || got.Lower < 0.9 {
		t.Errorf("%+v %v", got, err)
	}
}

// The bound is the retention at which k or more of m are right in one case of twenty; with no failure .05^(1/m).
func TestLower95(t *testing.T) {
	for m := 1; m <= 120; m += 7 {
		for k := 1; k <= m; k++ {
			p := lower95(k, m)
			tail, term := 0.0, 0.0
			for i := m; i >= k; i-- {
				a, _ := math.Lgamma(float64(m + 1))
				b, _ := math.Lgamma(float64(i + 1))
				c, _ := math.Lgamma(float64(m - i + 1))
				term = math.Exp(a - b - c + float64(i)*math.Log(p) + float64(m-i)*math.Log1p(-p))
				tail += term
			}
			if math.Abs(tail-0.05) > 1e-9 {
				t.Errorf("%d of %d: at the bound of %g the chance is %g, want .05", k, m, p, tail)
			}
		}
	}
	if lower95(0, 10) != 0 || lower95(0, 0) != 0 || lower95(59, 59) < 0.95 || lower95(58, 58) >= 0.95 {
		t.Error("59 prompts are the fewest that bound .95")
	}
}

func TestAutoWithARecord(t *testing.T) {
	in := inputs(t, 1, nil)
	w := newWorld(rand.New(rand.NewPCG(10, 17)), 4, []int{1})
	w.context = 640
	o := AutoOptions{Retention: 0.9}
	got, err := Auto(context.Background(), in, o, w.measure)
	if err != nil {
		t.Fatal(err)
	}
	check(t, got, w, o)
	names := map[string]bool{}
	for _, x := range got.Tried {
		names[x.Name] = true
	}
	for _, want := range []string{"recipe-by-gate", "topk by recovery", "topk by least recovery", "duo", "snapkv"} {
		if !names[want] {
			t.Errorf("%s was not tried", want)
		}
	}
}

func TestAddEvidence(t *testing.T) {
	in := synthetic(rand.New(rand.NewPCG(11, 18)), 3, 2, nil)
	p, err := Method(MethodSnapKV, in, MethodOptions{Budget: 0.5, Context: 2048})
	if err != nil {
		t.Fatal(err)
	}
	retention, lower := 0.95, 0.8
	e := plan.Evaluation{Task: "needle", N: 25, M: 20, K: 19, Retention: &retention, Lower95: &lower}
	var mismatch *MismatchError
	if err := AddEvidence(p, []plan.Evaluation{e}, nil, strings.Repeat("0", 64)); !errors.As(err, &mismatch) || len(p.Evidence.Evaluations) > 0 {
		t.Errorf("results of another plan: %v", err)
	}
	before := marshal(t, p)
	bad := e
	bad.K = 21
	if err := AddEvidence(p, []plan.Evaluation{bad}, nil, p.Digest()); err == nil || !bytes.Equal(marshal(t, p), before) {
		t.Errorf("%v", err)
	}
	d := plan.Divergence{Text: "wiki", Tokens: 100, FullPerplexity: 10, PlanPerplexity: 11, KL: 0.1}
	if err := AddEvidence(p, []plan.Evaluation{e}, []plan.Divergence{d}, p.Digest()); err != nil {
		t.Fatal(err)
	}
	other := e
	other.Task = "multi-key"
	e.N = 30
	if err := AddEvidence(p, []plan.Evaluation{other, e}, nil, p.Digest()); err != nil {
		t.Fatal(err)
	}
	if got := p.Evidence; len(got.Evaluations) != 2 || got.Evaluations[1].N != 30 || len(got.Divergences) != 1 || got.Recipe == nil || got.PlanSHA256 != p.Digest() {
		t.Errorf("%+v", got)
	}
	p.Evidence = nil
	if err := AddEvidence(p, nil, []plan.Divergence{d}, p.Digest()); err != nil || len(p.Validate()) > 0 {
		t.Errorf("%v %v", err, p.Validate())
	}
}

// Whatever the model, the blocks and the request: plans are valid and keep no more than was asked.
func TestAutoOnOddModels(t *testing.T) {
	r := rand.New(rand.NewPCG(12, 20))
	found := 0
	for round := range 12 {
		layers, kvHeads := 1+r.IntN(5), 1+r.IntN(3)
		var windows []int
		for range layers {
			windows = append(windows, r.IntN(2)*(40+r.IntN(600)))
		}
		if round%2 == 0 {
			windows = nil
		}
		in := synthetic(r, layers, kvHeads, windows)
		w := newWorld(r, layers*kvHeads, []int{r.IntN(layers * kvHeads)})
		w.context = 200 + r.IntN(3000)
		o := AutoOptions{MethodOptions: MethodOptions{Context: w.context, BlockSize: []int{1, 16, 24, 128}[round%4]}, Calls: 8, Plans: 1 + r.IntN(60)}
		if o.Retention = 0.9; round%3 == 0 {
			o.Retention, o.Budget = 0, 0.5
		}
		got, err := Auto(context.Background(), in, o, w.measure)
		if small := (*SearchError)(nil); errors.As(err, &small) {
			w.calls = nil
			continue
		}
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		check(t, got, w, o)
		if o.Budget > 0 && got.Kept > o.Budget {
			t.Errorf("round %d: keeps %g of %g", round, got.Kept, o.Budget)
		}
		found++
	}
	if found < 9 {
		t.Errorf("%d of 12 searches found a plan", found)
	}
}
