package compile

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/kvprofile/kvprofile/fastgen"
	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/pyramid"
)

// Names of the methods that Method knows.
const (
	MethodFull         = "full"
	MethodWindow       = "window"
	MethodStreamingLLM = "streaming-llm"
	MethodDuo          = "duo"
	MethodDuoRandom    = "duo-random"
	MethodDuoReversed  = "duo-reversed"
	MethodFastGen      = "fastgen"
	MethodSnapKV       = "snapkv"
	MethodPyramidKV    = "pyramidkv"
	MethodMeasured     = "measured"
	MethodH2O          = "h2o"
	MethodTopKByGate   = "topk-by-gate"
	MethodRecipe       = "recipe"
	MethodRecipeByGate = "recipe-by-gate"
)

// MethodInfo describes a method in a line; docs/methods.md says more.
type MethodInfo struct {
	Name string
	// Short says what is kept.
	Short string
	// Paper that the method is from.
	Paper string
	// Control says that the method is there to lose: what it lacks is what the others are about.
	Control bool
	// make returns the heads' policies for at most budget blocks.
	make func(b *builder, budget int) (*made, error)
}

// methods has all methods in the order in which they are shown.
func methods() []MethodInfo {
	return []MethodInfo{
		{Name: MethodFull, Short: "everything", Paper: "-", make: (*builder).full},
		{Name: MethodWindow, Short: "the last tokens, no sinks", Paper: "StreamingLLM's control, Xiao et al. 2023, arXiv 2309.17453", Control: true, make: (*builder).window},
		{Name: MethodStreamingLLM, Short: "4 sinks and the last tokens, numbered by cache slot", Paper: "Xiao et al. 2023, arXiv 2309.17453", make: (*builder).streamingLLM},
		{Name: MethodDuo, Short: "heads with the highest gates in full, the others sinks and recent tokens", Paper: "DuoAttention, Xiao et al. 2024, arXiv 2410.10819", make: (*builder).duo},
		{Name: MethodDuoRandom, Short: "as duo, the heads drawn at random", Paper: "DuoAttention's control", Control: true, make: (*builder).duoRandom},
		{Name: MethodDuoReversed, Short: "as duo, heads with the lowest gates in full", Paper: "DuoAttention's control", Control: true, make: (*builder).duoReversed},
		{Name: MethodFastGen, Short: "per head the cheapest of FastGen's policies that recovers a threshold", Paper: "Ge et al. 2023, arXiv 2310.01801", make: (*builder).fastGen},
		{Name: MethodSnapKV, Short: "tokens that the last 32 queries look at, as many in every head", Paper: "Li et al. 2024, arXiv 2404.14469", make: (*builder).snapKV},
		{Name: MethodPyramidKV, Short: "tokens that the last 8 queries look at, fewer in every further layer", Paper: "Cai et al. 2024, arXiv 2406.02069", make: (*builder).pyramidKV},
		{Name: MethodMeasured, Short: "as snapkv, layers getting what the record says that they need", Paper: "ZigZagKV, Zhong et al. 2024, arXiv 2412.09036", make: (*builder).measured},
		{Name: MethodH2O, Short: "half tokens with most attention so far, half the last ones", Paper: "Zhang et al. 2023, arXiv 2306.14048", make: (*builder).h2o},
		{Name: MethodTopKByGate, Short: "as snapkv, heads getting in proportion to their gates", Paper: "HeadKV's division by head scores, Fu et al. 2024, arXiv 2410.19258", make: (*builder).topkByGate},
		{Name: MethodRecipeByGate, Short: "as recipe, heads in the order of their gates alone", Paper: "-"},
		{Name: MethodRecipe, Short: "scores of the heads, FastGen's policies and layer budgets merged: compile's default", Paper: "-"},
	}
}

// Methods returns the names of all methods, in the order in which they are shown.
func Methods() []string {
	var out []string
	for _, m := range methods() {
		out = append(out, m.Name)
	}
	return out
}

// Describe returns what is known of a method.
func Describe(name string) (MethodInfo, bool) {
	for _, m := range methods() {
		if m.Name == name {
			return m, true
		}
	}
	return MethodInfo{}, false
}

// MethodOptions of Method. Zero fields take the defaults that are given here.
type MethodOptions struct {
	// Budget is kept bytes / full bytes at Context, in (0,1].
	Budget float64
	// Context is the length in tokens that the budget is about; 0 means the longest recorded.
	Context int
	// BlockSize in tokens: 16.
	BlockSize int
	// Dtype of the cache: bf16.
	Dtype plan.Dtype
	// Lengths in tokens that the plan states totals for beside Context.
	Lengths []int
	// Order of duo and topk-by-gate: OrderGate; of recipe: OrderRanks.
	Order Order
	// Sink and Recent are what streaming heads of duo keep at least, in tokens: by StreamingSize where both are 0. For
	// recipe they are 64 and 256, and Recent is a width that was recorded.
	Sink, Recent int
	// Window is the observation window of top-k policies in tokens: 8 for pyramidkv, 32 for all others.
	Window int
	// Pool and Kernel smooth the votes of top-k policies: max over 7.
	Pool   plan.PoolKind
	Kernel int
	// TopKSinks are first tokens that top-k policies keep in any case: none.
	TopKSinks int
	// Evict says when streaming heads of duo and recipe evict: always.
	Evict plan.Evict
	// Seed of duo-random, and of recipe's bootstrap intervals.
	Seed uint64
}

// BudgetError says that a method cannot keep as little as was asked for.
type BudgetError struct {
	Method string
	// Budget asked for and the least that the method can keep, kept bytes / full bytes at the context.
	Budget, Least float64
	Context       int
}

func (e *BudgetError) Error() string {
	return fmt.Sprintf("method %s cannot keep as little as %.4g of the bytes at %d tokens: the least is %.4g", e.Method, e.Budget, e.Context, e.Least)
}

// StreamingSize is what a streaming head of DuoAttention keeps at a context: its 64 sinks and 256 recent tokens, halved
// together until they are at most a twelfth of the context, but no less than 4 and 16; each rounded up to whole blocks.
// At 4,096 tokens and more that is 64 + 256, from 2,048 on 32 + 128, from 1,024 on 16 + 64 with blocks of 16.
func StreamingSize(context, block int) (sink, recent int) {
	sink, recent = 64, 256
	for sink > 4 && 12*(sink+recent) > context {
		sink, recent = sink/2, recent/2
	}
	block = max(block, 1)
	return ceilDiv(sink, block) * block, ceilDiv(recent, block) * block
}

// Method makes the plan of one method: the one that keeps most bytes of those that keep no more than the budget. What it
// keeps stands in the plan's totals and as figure kept_share of its recipe.
//
// All methods but full, fastgen and recipe use the budget to the last whole block. fastgen has nothing between two
// thresholds, and stays below by what a head's next policy costs; recipe by less than a block for every KV head or one
// head in full.
//
// Errors: *OptionError, *BudgetError where the method cannot keep as little, *MismatchError for inputs that do not
// belong together or miss what the method needs: full, window, streaming-llm, snapkv, pyramidkv and h2o need the model
// alone (and a Context when there is no record), duo, its controls and topk-by-gate the gates, fastgen its policies,
// measured the layer budgets, recipe everything.
func Method(name string, in Inputs, o MethodOptions) (*plan.Plan, error) {
	m, ok := Describe(name)
	if !ok {
		return nil, &OptionError{"method", fmt.Sprintf("%q is none of %q", name, Methods())}
	}
	b, err := newBuilder(&in, o)
	if err != nil {
		return nil, err
	}
	if m.make == nil {
		switch {
		case name == MethodRecipeByGate:
			b.o.Order = OrderGate
		case b.o.Order == "":
			b.o.Order = OrderRanks
		}
		return b.recipe(name)
	}
	made, err := m.make(b, b.target(o.Budget))
	if err != nil {
		return nil, err
	}
	if made.policies == nil {
		return nil, &BudgetError{Method: name, Budget: o.Budget, Least: float64(made.needed) / float64(b.total), Context: b.context}
	}
	p, err := b.plan(name, made)
	if err != nil {
		return nil, err
	}
	if m.Control {
		p.Warnings = append(p.Warnings, fmt.Sprintf("Method %s is a control for comparisons, not meant to serve.", name))
	}
	return p, nil
}

// made is what a method makes of a budget: a policy per head, or none and the blocks that it needs at least.
type made struct {
	policies []plan.Policy
	needed   int
	// gate is the lowest score of a head that is kept in full, tied the heads among which only the order of layers and
	// KV heads decided.
	gate *float64
	tied []int
	// figures for the plan's recipe.
	figures map[string]float64
	// uses says which inputs the policies come from.
	uses uses
}

// uses says which inputs were used beside the model.
type uses struct{ gates, policies, budgets bool }

// builder makes plans of methods.
type builder struct {
	*layout
	in       *Inputs
	o        MethodOptions
	record   string // digest, "" without a record
	recorded []int  // lengths in tokens
}

func newBuilder(in *Inputs, o MethodOptions) (*builder, error) {
	b := &builder{in: in}
	fail := func(option, format string, args ...any) (*builder, error) {
		return nil, &OptionError{option, fmt.Sprintf(format, args...)}
	}
	if o.BlockSize == 0 {
		o.BlockSize = 16
	}
	if o.Dtype == "" {
		o.Dtype = plan.BF16
	}
	if o.Pool == "" {
		o.Pool = plan.PoolMax
	}
	if o.Kernel == 0 {
		o.Kernel = 7
		if o.Pool == plan.PoolNone {
			o.Kernel = 1
		}
	}
	if o.Evict == "" {
		o.Evict = plan.EvictAlways
	}
	switch {
	case in.Model.NLayers < 1 || in.Model.NKVHeads < 1 || in.Model.NLayers > 1024 || in.Model.NKVHeads > 512:
		return nil, &MismatchError{"model", fmt.Sprintf("has %d layers of %d KV heads", in.Model.NLayers, in.Model.NKVHeads)}
	case o.Window < 0 || o.Window > 1<<20 || o.TopKSinks > 1<<20:
		return fail("observation window", "%d tokens and %d sinks", o.Window, o.TopKSinks)
	case o.Sink < 0 || o.Recent < 0 || (o.Sink > 0 && o.Recent == 0) || o.Sink > 1<<20 || o.Recent > 1<<20:
		return fail("streaming", "%d sinks and %d recent tokens", o.Sink, o.Recent)
	}
	if in.Record != nil {
		if len(in.Record.Samples()) == 0 {
			return nil, &MismatchError{"record", "has no samples"}
		}
		b.recorded = lengthsOf(in.Record)
		if o.Context == 0 {
			o.Context = b.recorded[len(b.recorded)-1]
		}
	}
	if o.Context == 0 {
		return fail("context", "is needed where there is no record")
	}
	// The options that compile has too are checked as there.
	c := Options{Budget: o.Budget, Context: o.Context, BlockSize: o.BlockSize, Dtype: o.Dtype, Kernel: o.Kernel, Pool: o.Pool, TopKSinks: o.TopKSinks, Lengths: o.Lengths, Evict: o.Evict}
	if o.Budget == 0 {
		return fail("budget", "is missing")
	}
	if err := c.Check(); err != nil {
		return nil, err
	}
	var err error
	if b.record, err = in.belong(); err != nil {
		return nil, err
	}
	b.o = o
	b.layout = newLayout(in.Model, cacheOf(in.FastGen, o.Dtype, o.BlockSize), o.Context)
	return b, nil
}

// belong reports inputs that do not belong together, of those that there are, and returns the record's digest.
func (in *Inputs) belong() (string, error) {
	if in.Record != nil && in.Gates != nil && in.FastGen != nil && in.Budgets != nil {
		return in.check()
	}
	m := in.Model
	if in.Gates != nil {
		if err := in.Gates.Check(); err != nil {
			return "", fmt.Errorf("gates: %w", err)
		}
		if len(in.Gates.Values) != m.NLayers || len(in.Gates.Values[0]) != m.NKVHeads {
			return "", &MismatchError{"gates", "are of another shape than the model"}
		}
	}
	if f := in.FastGen; f != nil && (len(f.Layers) != m.NLayers || len(f.Layers[0]) != m.NKVHeads) {
		return "", &MismatchError{"fastgen", "policies are of another shape than the model"}
	}
	if in.Budgets != nil && in.Budgets.Model.Layers != m.NLayers {
		return "", &MismatchError{"pyramid", "budgets are of another shape than the model"}
	}
	if in.Record == nil {
		return "", nil
	}
	return in.Record.Digest()
}

// plan makes a valid plan of what a method made.
func (b *builder) plan(name string, m *made) (*plan.Plan, error) {
	p := assemble(b.in, b.cache, m.policies)
	if err := b.classesKnown(p); err != nil {
		return nil, err
	}
	recorded := b.recorded
	if len(recorded) == 0 {
		recorded = []int{b.context}
	}
	addTotals(p, totalsFor(b.o.Lengths, recorded, b.context))
	kept := b.used(m.policies)
	recipe := &plan.Recipe{Name: name, Budget: b.o.Budget, ContextTokens: b.context, GateThreshold: m.gate, TiedHeads: headRefs(m.tied, b.model.NKVHeads),
		Figures: map[string]float64{"kept_share": float64(kept) / float64(b.total), "request_met": 1}}
	for k, v := range m.figures {
		recipe.Figures[k] = v
	}
	p.Evidence = &plan.Evidence{PlanSHA256: p.Digest(), Recipe: recipe, Calibration: b.calibration(m.uses)}
	if v := p.Validate(); len(v) > 0 {
		return nil, fmt.Errorf("the plan made is not valid: %s", v[0])
	}
	if target := b.target(b.o.Budget); kept > target {
		return nil, fmt.Errorf("the plan keeps %d blocks at %d tokens, asked were %d at most", kept, b.context, target)
	}
	return p, nil
}

// calibration names the data that a method used, nil for none.
func (b *builder) calibration(u uses) *plan.Calibration {
	if u == (uses{}) {
		return nil
	}
	c := b.in.calibration(b.record)
	if !u.gates {
		c.GatesSHA256 = ""
	}
	if !u.policies {
		c.PoliciesSHA256 = ""
	}
	if !u.budgets {
		c.BudgetsSHA256 = ""
	}
	return c
}

// classesKnown reports policies that go by classes of tokens which the model is not known to have.
func (b *builder) classesKnown(p *plan.Plan) error {
	for _, q := range p.Policies {
		f, ok := q.(plan.FastGen)
		if !ok {
			continue
		}
		for _, class := range f.Classes {
			if t := p.TokenClasses; t == nil || class == plan.ClassSpecial && len(t.Special) == 0 || class == plan.ClassPunctuation && len(t.Punctuation) == 0 {
				return &MismatchError{"model", fmt.Sprintf("has no tokens of class %s, which FastGen's policies keep", class)}
			}
		}
	}
	return nil
}

// full keeps everything.
func (b *builder) full(budget int) (*made, error) {
	if budget < b.total {
		return &made{needed: b.total}, nil
	}
	return &made{policies: slices.Repeat([]plan.Policy{plan.Full{}}, b.heads())}, nil
}

// evenly gives all heads as much, the first ones a block more where that is left.
func (b *builder) evenly(budget, least int, policy func(layer, blocks int) plan.Policy) (*made, error) {
	blocks, needed, err := b.share(budget, b.all(), least, pyramid.Uniform, nil)
	if err != nil || blocks == nil {
		return &made{needed: needed}, err
	}
	return &made{policies: b.each(blocks, policy)}, nil
}

// each makes the policies of heads that get so many blocks.
func (x *layout) each(blocks []int, policy func(layer, blocks int) plan.Policy) []plan.Policy {
	out := make([]plan.Policy, len(blocks))
	for h, n := range blocks {
		out[h] = policy(x.layer(h), n)
	}
	return out
}

// window keeps the last tokens.
func (b *builder) window(budget int) (*made, error) {
	base := plan.Streaming{Evict: plan.EvictPrefillEnd, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
	return b.evenly(budget, 1, func(layer, blocks int) plan.Policy { return b.streaming(layer, blocks, base) })
}

// streamingLLM keeps 4 sinks and the last tokens.
func (b *builder) streamingLLM(budget int) (*made, error) {
	base := plan.Streaming{SinkTokens: 4, Evict: plan.EvictPrefillEnd, Decode: plan.DecodeRolling, Positions: plan.PositionsCacheSlot}
	return b.evenly(budget, ceilDiv(4, b.cache.BlockSize)+1, func(layer, blocks int) plan.Policy { return b.streaming(layer, blocks, base) })
}

// needGates reports inputs without gates.
func (b *builder) needGates() error {
	if b.in.Gates == nil {
		return &MismatchError{"gates", "are missing, and the method goes by them"}
	}
	return nil
}

func (b *builder) duo(budget int) (*made, error) {
	if err := b.needGates(); err != nil {
		return nil, err
	}
	p, err := priorOf(b.in.Gates, b.o.Order)
	if err != nil {
		return nil, err
	}
	return b.gated(b.split(budget, p))
}

// gated notes that gates were used.
func (b *builder) gated(m *made, err error) (*made, error) {
	if m != nil {
		m.uses.gates = true
	}
	return m, err
}

func (b *builder) duoRandom(budget int) (*made, error) {
	p := prior{}
	random := rand.New(rand.NewPCG(b.o.Seed, 0))
	for range b.heads() {
		p.value = append(p.value, random.Float64())
	}
	m, err := b.split(budget, p)
	if m != nil {
		m.gate, m.tied = nil, nil
	}
	return m, err
}

// duoReversed keeps in full those that duo keeps last.
func (b *builder) duoReversed(budget int) (*made, error) {
	if err := b.needGates(); err != nil {
		return nil, err
	}
	p, err := priorOf(b.in.Gates, b.o.Order)
	if err != nil {
		return nil, err
	}
	var back prior
	back.value = make([]float64, b.heads())
	for i, h := range p.rank() {
		back.value[h] = float64(i)
	}
	m, err := b.gated(b.split(budget, back))
	if m != nil {
		m.gate, m.tied = nil, nil
	}
	return m, err
}

// streamingBase is what streaming heads of DuoAttention keep at least.
func (b *builder) streamingBase() plan.Streaming {
	q := plan.Streaming{SinkTokens: b.o.Sink, RecentTokens: b.o.Recent, Evict: b.o.Evict, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
	if q.SinkTokens == 0 && q.RecentTokens == 0 {
		q.SinkTokens, q.RecentTokens = StreamingSize(b.context, b.cache.BlockSize)
	}
	return q
}

// split keeps the first heads of a prior in full and has the others stream. What is left, less than one more head in
// full costs, widens the streaming heads' recent part.
func (b *builder) split(budget int, p prior) (*made, error) {
	base := b.streamingBase()
	least := ceilDiv(base.SinkTokens, b.cache.BlockSize) + ceilDiv(base.RecentTokens, b.cache.BlockSize)
	m := &made{policies: slices.Repeat([]plan.Policy{plan.Full{}}, b.heads()), figures: map[string]float64{"sink_tokens": float64(base.SinkTokens)}}
	for h := range m.policies {
		m.needed += min(least, b.most(h))
	}
	if m.needed > budget {
		return &made{needed: m.needed}, nil
	}
	rank, full, used := p.rank(), 0, m.needed
	for full < len(rank) && used+b.most(rank[full])-min(least, b.most(rank[full])) <= budget {
		used += b.most(rank[full]) - min(least, b.most(rank[full]))
		full++
	}
	rest := slices.Clone(rank[full:])
	slices.Sort(rest)
	for _, h := range rank[:full] {
		budget -= b.most(h)
	}
	blocks, _, err := b.share(budget, rest, least, pyramid.Uniform, nil)
	if err != nil {
		return nil, err
	}
	for i, n := range blocks {
		m.policies[rest[i]] = b.streaming(b.layer(rest[i]), n, base)
	}
	m.figures["full_heads"] = float64(full)
	if full > 0 {
		gate := p.value[rank[full-1]]
		m.gate, m.tied = &gate, p.tied(rank, full)
	}
	return m, nil
}

// fastGen gives every head the first policy of the lattice that recovers a threshold: the highest threshold that the
// budget allows.
func (b *builder) fastGen(budget int) (*made, error) {
	f := b.in.FastGen
	if f == nil {
		return nil, &MismatchError{"fastgen", "policies are missing, and the method goes by them"}
	}
	lattice := make([]plan.Policy, fastgen.StepFull+1)
	lattice[fastgen.StepFull] = plan.Full{}
	for step := range fastgen.StepFull {
		lattice[step] = fastGenPolicy(f, step)
	}
	thresholds := []float64{0}
	for _, layer := range f.Layers {
		for _, h := range layer {
			thresholds = append(thresholds, h.Recovery...)
		}
	}
	slices.Sort(thresholds)
	thresholds = slices.Compact(thresholds)
	at := func(threshold float64) []plan.Policy {
		out := make([]plan.Policy, 0, b.heads())
		for _, layer := range f.Layers {
			for _, h := range layer {
				step := slices.IndexFunc(h.Recovery[:fastgen.StepFull], func(x float64) bool { return x >= threshold })
				if step < 0 {
					step = fastgen.StepFull
				}
				out = append(out, lattice[step])
			}
		}
		return out
	}
	// The cost grows with the threshold: the first that is too dear ends it.
	low, high := 0, len(thresholds)
	for low < high {
		mid := (low + high) / 2
		if b.used(at(thresholds[mid])) <= budget {
			low = mid + 1
		} else {
			high = mid
		}
	}
	if low == 0 {
		return &made{needed: b.used(at(0))}, nil
	}
	return &made{policies: at(thresholds[low-1]), figures: map[string]float64{"threshold": thresholds[low-1]}, uses: uses{policies: true}}, nil
}

// topkBase is a top-k policy without its budget.
func (b *builder) topkBase(window int) plan.TopK {
	if b.o.Window > 0 {
		window = b.o.Window
	}
	return plan.TopK{ObservationWindow: window, Pool: plan.Pool{Kind: b.o.Pool, Kernel: b.o.Kernel}, Aggregate: plan.AggregateMean,
		SinkTokens: b.o.TopKSinks, Evict: plan.EvictPrefillEnd, Decode: plan.DecodeStatic, Positions: plan.PositionsOriginal}
}

func (b *builder) snapKV(budget int) (*made, error) {
	base := b.topkBase(32)
	return b.evenly(budget, b.leastTopK(base), func(layer, blocks int) plan.Policy { return b.topk(layer, blocks, base) })
}

func (b *builder) pyramidKV(budget int) (*made, error) {
	base := b.topkBase(8)
	return b.layered(budget, base, func(q pyramid.Request) (pyramid.Result, error) {
		q.Mode = pyramid.Arithmetic
		return pyramid.Allocate(q)
	})
}

// measured follows the measured mode of the layer budgets, the number of keys where they have another mode.
func (b *builder) measured(budget int) (*made, error) {
	if b.in.Budgets == nil {
		return nil, &MismatchError{"pyramid", "budgets are missing, and the method goes by them"}
	}
	mode := b.in.Budgets.Request.Mode
	if !mode.Measured() {
		mode = pyramid.Keys
	}
	m, err := b.layered(budget, b.topkBase(32), func(q pyramid.Request) (pyramid.Result, error) {
		q.Mode = mode
		return b.in.Budgets.Divide(q)
	})
	if m != nil {
		m.uses.budgets = true
	}
	return m, err
}

// layered divides a budget among layers.
func (b *builder) layered(budget int, base plan.TopK, schedule func(q pyramid.Request) (pyramid.Result, error)) (*made, error) {
	least := b.leastTopK(base)
	blocks, needed, err := b.byLayer(budget, least, func(q pyramid.Request) (pyramid.Result, error) {
		q.Window = base.ObservationWindow + base.SinkTokens
		if ceilDiv(q.Window, q.Block) < least { // a policy keeps a token beside its window
			q.Window++
		}
		return schedule(q)
	})
	if err != nil || blocks == nil {
		return &made{needed: needed}, err
	}
	return &made{policies: b.each(blocks, func(layer, n int) plan.Policy { return b.topk(layer, n, base) })}, nil
}

func (b *builder) h2o(budget int) (*made, error) {
	base := plan.H2O{Evict: plan.EvictPrefillEnd, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
	return b.evenly(budget, ceilDiv(2, b.cache.BlockSize), func(layer, blocks int) plan.Policy { return b.layout.h2o(layer, blocks, base) })
}

// topkByGate divides three quarters of the budget by the heads' scores and a quarter evenly.
func (b *builder) topkByGate(budget int) (*made, error) {
	if err := b.needGates(); err != nil {
		return nil, err
	}
	p, err := priorOf(b.in.Gates, b.o.Order)
	if err != nil {
		return nil, err
	}
	return b.byScore(budget, p)
}

// weights are a prior's scores as weights to divide by: shifted so that none is negative, and all one where no head has
// more than another.
func weights(p prior) []float64 {
	least := min(slices.Min(p.value), 0)
	out, sum := make([]float64, len(p.value)), 0.0
	for i, v := range p.value {
		out[i] = v - least
		sum += out[i]
	}
	if !(sum > 0) || math.IsInf(sum, 0) {
		return slices.Repeat([]float64{1}, len(out))
	}
	return out
}

// recipe is Compile's plan.
func (b *builder) recipe(name string) (*plan.Plan, error) {
	for _, x := range []struct {
		input   string
		missing bool
	}{{"record", b.in.Record == nil}, {"gates", b.in.Gates == nil}, {"fastgen", b.in.FastGen == nil}, {"pyramid", b.in.Budgets == nil}} {
		if x.missing {
			return nil, &MismatchError{x.input, "is missing, and the method goes by it"}
		}
	}
	r, err := Compile(*b.in, b.compileOptions())
	if err != nil {
		return nil, err
	}
	if !r.Met {
		return nil, &BudgetError{Method: name, Budget: b.o.Budget, Least: r.Kept, Context: b.context}
	}
	return r.Plan, nil
}

// compileOptions are those of Compile that ask for the same.
func (b *builder) compileOptions() Options {
	o := DefaultOptions()
	o.Budget, o.Context, o.BlockSize, o.Dtype, o.Lengths, o.Order, o.Evict, o.Seed = b.o.Budget, b.context, b.o.BlockSize, b.o.Dtype, b.o.Lengths, b.o.Order, b.o.Evict, b.o.Seed
	o.Pool, o.Kernel, o.TopKSinks = b.o.Pool, b.o.Kernel, b.o.TopKSinks
	if b.o.Recent > 0 {
		o.Sink, o.Recent = b.o.Sink, b.o.Recent
	}
	if b.o.Window > 0 {
		o.Window = b.o.Window
	}
	return o
}
