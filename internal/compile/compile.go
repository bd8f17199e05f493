// Package compile merges gates, FastGen's policies and layer budgets into a cache plan: one policy per KV head, for a
// number of bytes or for a recovery.
//
// The recipe: KV heads that come first in the order of their scores (order.go) keep everything. The others get the
// cheapest of streaming and FastGen's policies that recovers the threshold T on the attention record, if that is not
// dearer than top-k with the budget of their layer or bytes are left for it; else top-k. How many come first, and the
// budgets, are searched until the kept bytes meet the request (search.go). Everything is deterministic: equal inputs give
// equal bytes.
package compile

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/fastgen"
	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/profile"
	"github.com/kvprofile/kvprofile/pyramid"
)

// Inputs are the artefacts of one model that a plan is made of.
type Inputs struct {
	Tool  plan.Tool
	Model plan.Model
	// Classes are the model's special and punctuation tokens; the plan gets those that its policies use.
	Classes plan.TokenClasses
	// ModelID is the gates' name for the model; gates of another name are refused, gates without one are not.
	ModelID string
	Record  Record
	Gates   *distill.Gates
	FastGen *fastgen.Result
	// Budgets hold what the layers need; the search divides many budgets by it.
	Budgets *pyramid.Artefact
	// Digests of the files, SHA-256 in hex, as evidence.
	GatesSHA256, PoliciesSHA256, BudgetsSHA256 string
	// Datasets that the record and the gates come from.
	Datasets []plan.DatasetRef
}

// Options of Compile. DefaultOptions has the values that the command uses.
type Options struct {
	// Budget is kept bytes / full bytes at Context, in (0,1]. Exactly one of Budget and Recovery is given.
	Budget float64
	// Recovery is the share of the attention that is to fall on what is kept: the mean over the KV heads, or with
	// LeastRecovery that of the worst.
	Recovery      float64
	LeastRecovery bool
	// Context is the length in tokens that the request is about; 0 means the longest recorded.
	Context int
	// Threshold is T: what streaming and FastGen have to recover; 0 means FastGen's own.
	Threshold float64
	// Sink and Recent are what streaming heads keep, in tokens.
	Sink, Recent int
	// Window, Pool, Kernel and TopKSinks are of the top-k policies.
	Window    int
	Pool      plan.PoolKind
	Kernel    int
	TopKSinks int
	// RatioBudgets writes top-k budgets as shares of the prompt in place of tokens.
	RatioBudgets bool
	BlockSize    int
	Dtype        plan.Dtype
	// Lengths in tokens that the plan states totals for, beside Context and the recorded ones.
	Lengths []int
	// Seed is of the bootstrap intervals of the rank correlations.
	Seed uint64
	// Order says which KV heads are kept in full first; "" is OrderGate. As many as have a gate of at least one half are
	// so before top-k budgets grow, whatever the order.
	Order Order `json:",omitempty"`
	// Evict says when streaming heads evict; "" is plan.EvictAlways, as DuoAttention does.
	Evict plan.Evict `json:",omitempty"`
}

// DefaultOptions asks for half of the bytes.
func DefaultOptions() Options {
	return Options{Budget: 0.5, Sink: 64, Recent: 256, Window: 32, Pool: plan.PoolMax, Kernel: 7, BlockSize: 16, Dtype: plan.BF16, Order: OrderRanks,
		Lengths: []int{4096, 32768, 131072}, Seed: 42}
}

// OptionError says which option is wrong, and why.
type OptionError struct{ Option, Reason string }

func (e *OptionError) Error() string { return fmt.Sprintf("compile: %s: %s", e.Option, e.Reason) }

// MismatchError says that an input belongs to another model or record.
type MismatchError struct{ Input, Reason string }

func (e *MismatchError) Error() string { return fmt.Sprintf("%s: %s", e.Input, e.Reason) }

// Result is a plan and how it came about.
type Result struct {
	Plan *plan.Plan
	// Heads are [layer][KV head].
	Heads [][]Head
	// Met says whether the request could be met; if not, the plan is the nearest.
	Met bool
	// Context is the length in tokens that Kept is about.
	Context int
	// Kept is kept bytes / full bytes at the context.
	Kept float64
	// Mean and Least are the recovery of all KV heads and of the worst.
	Mean, Least float64
	// Streaming is the recovery of the streaming policy for every KV head, whether it was chosen or not.
	Streaming [][]float64
}

// Head is what one KV head got.
type Head struct {
	Policy   string
	Gate     float64
	Recovery float64
}

// Check reports options that no inputs could do with: an *OptionError.
func (o Options) Check() error {
	fail := func(option, format string, args ...any) error {
		return &OptionError{option, fmt.Sprintf(format, args...)}
	}
	share := func(x float64) bool { return x > 0 && x <= 1 }
	switch {
	case (o.Budget != 0) == (o.Recovery != 0):
		return fail("request", "give a budget or a recovery, one of them")
	case o.Budget != 0 && !share(o.Budget):
		return fail("budget", "%g is not in (0, 1]", o.Budget)
	case o.Recovery != 0 && !share(o.Recovery):
		return fail("recovery", "%g is not in (0, 1]", o.Recovery)
	case o.Threshold != 0 && !share(o.Threshold):
		return fail("threshold", "%g is not in (0, 1]", o.Threshold)
	case o.Context < 0 || o.Context > 1<<27:
		return fail("context", "%d tokens", o.Context)
	case o.BlockSize < 1 || o.BlockSize > 4096:
		return fail("block size", "%d is not in 1..4096", o.BlockSize)
	case o.Dtype.Size() == 0:
		return fail("dtype", "%q is unknown", o.Dtype)
	case o.Kernel < 1 || o.Kernel%2 == 0:
		return fail("kernel", "%d is not odd", o.Kernel)
	case o.Pool != plan.PoolMax && o.Pool != plan.PoolAvg && o.Pool != plan.PoolNone:
		return fail("pool", "%q is not max, avg or none", o.Pool)
	case o.Pool == plan.PoolNone && o.Kernel != 1:
		return fail("kernel", "must be 1 without pooling")
	case o.TopKSinks < 0:
		return fail("top-k sinks", "%d is negative", o.TopKSinks)
	case o.Evict != "" && o.Evict != plan.EvictAlways && o.Evict != plan.EvictPrefillEnd:
		return fail("evict", "%q is unknown", o.Evict)
	}
	for _, n := range o.Lengths {
		if n < 1 || n > 1<<27 {
			return fail("lengths", "%d tokens", n)
		}
	}
	return nil
}

// Compile makes a plan. It has no evidence of tasks yet: that is measured with the plan.
//
// Errors: *OptionError, *MismatchError, those of the record.
func Compile(in Inputs, o Options) (*Result, error) {
	c, err := newCompiler(in, o)
	if err != nil {
		return nil, err
	}
	return c.compile()
}

// newCompiler checks the inputs and works out what does not depend on the request.
func newCompiler(in Inputs, o Options) (*compiler, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	digest, err := in.check()
	if err != nil {
		return nil, err
	}
	c := &compiler{in: in, o: o, meta: in.Record.Meta(), record: digest}
	return c, c.prepare()
}

// check reports inputs that do not belong together, and returns the record's digest.
func (in *Inputs) check() (string, error) {
	m := in.Record.Meta().Model
	want := in.Model
	for _, d := range []struct {
		what      string
		have, has string
	}{{"config", m.SHA256["config"], want.SHA256.Config}, {"weights", m.SHA256["weights"], want.SHA256.Weights}, {"tokenizer", m.SHA256["tokenizer"], want.SHA256.Tokenizer}} {
		if d.have != d.has {
			return "", &MismatchError{"record", fmt.Sprintf("belongs to another model (%s): the hash of its %s is another", m.Name, d.what)}
		}
	}
	if m.Layers != want.NLayers || m.Heads != want.NHeads || m.KVHeads != want.NKVHeads || m.HeadDim != want.HeadDim {
		return "", &MismatchError{"record", "is of another shape than the model"}
	}
	if len(in.Record.Samples()) == 0 {
		return "", &MismatchError{"record", "has no samples"}
	}
	if err := in.Gates.Check(); err != nil {
		return "", fmt.Errorf("gates: %w", err)
	}
	if len(in.Gates.Values) != m.Layers || len(in.Gates.Values[0]) != m.KVHeads {
		return "", &MismatchError{"gates", fmt.Sprintf("are %d x %d, the model has %d layers of %d KV heads", len(in.Gates.Values), len(in.Gates.Values[0]), m.Layers, m.KVHeads)}
	}
	if g := in.Gates.Meta.Model; g != "" && in.ModelID != "" && g != in.ModelID {
		return "", &MismatchError{"gates", "were trained on another model"}
	}
	digest, err := in.Record.Digest()
	if err != nil {
		return "", err
	}
	if in.FastGen.Record != digest {
		return "", &MismatchError{"fastgen", "policies come from another attention record"}
	}
	if in.Budgets.Record != digest {
		return "", &MismatchError{"pyramid", "budgets come from another attention record"}
	}
	return digest, nil
}

// compiler holds what is worked out once.
type compiler struct {
	in     Inputs
	o      Options
	meta   profile.Meta
	record string

	context   int
	recorded  []int // lengths in tokens, ascending, each once
	streaming [][]fastgen.StreamingHead
	topk      plan.TopK
	prior     prior
	family    *family
}

// lengthsOf are the lengths of a record's samples in tokens, ascending, each once.
func lengthsOf(rec Record) []int {
	var out []int
	for _, s := range rec.Samples() {
		out = append(out, len(s.Tokens))
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// prepare finds the options of every KV head.
func (c *compiler) prepare() error {
	c.recorded = lengthsOf(c.in.Record)
	c.context = c.o.Context
	if c.context == 0 {
		c.context = c.recorded[len(c.recorded)-1]
	}
	if c.o.Threshold == 0 {
		c.o.Threshold = c.in.FastGen.Options.Threshold
	}
	c.o.Order = c.o.Order.of(c.in.Gates)
	var err error
	if c.prior, err = priorOf(c.in.Gates, c.o.Order); err != nil {
		return err
	}
	c.streaming, err = fastgen.Streaming(c.in.Record, c.o.Sink, c.o.Recent, c.in.FastGen.Options)
	if err != nil {
		return err
	}
	c.topk = plan.TopK{ObservationWindow: c.o.Window, Pool: plan.Pool{Kind: c.o.Pool, Kernel: c.o.Kernel}, Aggregate: plan.AggregateMean,
		SinkTokens: c.o.TopKSinks, Evict: plan.EvictPrefillEnd, Decode: plan.DecodeStatic, Positions: plan.PositionsOriginal}
	blocks := (c.context + c.o.BlockSize - 1) / c.o.BlockSize
	curves, err := topKCurves(c.in.Record, c.topk, c.context, c.o.BlockSize, blocks)
	if err != nil {
		return err
	}
	var heads []head
	for l, layer := range curves {
		costs := c.costs(l)
		for k, curve := range layer {
			h := head{layer: l, kv: k, gate: c.in.Gates.Values[l][k], full: costs.full, curve: curve}
			h.low = c.low(l, k, costs)
			heads = append(heads, h)
		}
	}
	least := min((c.o.Window+c.o.TopKSinks+c.o.BlockSize)/c.o.BlockSize, blocks)
	table := make([][]int, blocks+1)
	for b := least; b <= blocks; b++ {
		if table[b], err = c.budgets(b); err != nil {
			return err
		}
	}
	q := c.in.Budgets.Request
	average := float64(q.Total) / float64(q.Layers) * float64(c.context) / float64(q.Length)
	c.family = newFamily(heads, c.prior, c.o.BlockSize, table, least, int(average)/c.o.BlockSize)
	return nil
}

// budgets divides an average budget in blocks among the layers.
func (c *compiler) budgets(average int) ([]int, error) {
	q := c.in.Budgets.Request
	q.Length, q.Block = c.context, c.o.BlockSize
	q.Total = average * c.o.BlockSize * c.in.Model.NLayers
	// A policy keeps its window, its sinks and one token more at least.
	q.Window = c.o.Window + c.o.TopKSinks + 1
	if q.Floor == 0 { // a resolved request says 0 where it means none
		q.Floor = pyramid.NoFloor
	}
	r, err := c.in.Budgets.Divide(q)
	if err != nil {
		return nil, err
	}
	blocks := make([]int, len(r.Budgets))
	for l, tokens := range r.Budgets {
		blocks[l] = tokens / c.o.BlockSize
	}
	return blocks, nil
}

func (c *compiler) streamingPolicy() plan.Streaming {
	evict := c.o.Evict
	if evict == "" {
		evict = plan.EvictAlways
	}
	return plan.Streaming{SinkTokens: c.o.Sink, RecentTokens: c.o.Recent, Evict: evict, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
}

// fastGenPolicy is a step of the lattice as a plan says it. What it keeps depends on the text, so it is bounded by
// what the record's prompts needed at most, in any head, and a fiftieth of the prompt more: bytes can be planned with it.
func fastGenPolicy(r *fastgen.Result, step int) plan.FastGen {
	p := r.Lattice[step]
	q := plan.FastGen{FrequentRatio: p.FrequentRatio, LocalRatio: p.LocalRatio, Evict: plan.EvictPrefillEnd, Decode: plan.DecodeStatic, Positions: plan.PositionsOriginal}
	if p.Special {
		q.Classes = append(q.Classes, plan.ClassSpecial)
	}
	if p.Punctuation {
		q.Classes = append(q.Classes, plan.ClassPunctuation)
	}
	most := 0.0
	for _, layer := range r.Layers {
		for _, h := range layer {
			most = max(most, h.KeptMax[step])
		}
	}
	if bound := math.Ceil(most*100+2) / 100; bound < 1 {
		q.MaxRatio, q.Overflow = bound, plan.DropLowest
	}
	return q
}

// costs are the tokens that a KV head of a layer keeps at the context, rounded to blocks.
type costs struct {
	full, streaming int
	fastgen         [fastgen.StepFull]int
}

func (c *compiler) costs(layer int) costs {
	var out costs
	out.full = c.tokens(layer, plan.Full{})
	out.streaming = c.tokens(layer, c.streamingPolicy())
	for step := range out.fastgen {
		out.fastgen[step] = c.tokens(layer, fastGenPolicy(c.in.FastGen, step))
	}
	return out
}

// tokens is what a policy keeps on a layer at the context, in whole blocks.
func (c *compiler) tokens(layer int, p plan.Policy) int {
	return c.cache().Kept(p, plan.At{PromptTokens: c.context, Window: c.in.Model.Window(layer)}).Blocks * c.o.BlockSize
}

func (c *compiler) cache() plan.Cache { return cacheOf(c.in.FastGen, c.o.Dtype, c.o.BlockSize) }

// cacheOf is what a plan assumes of the server's cache; the group rule is that of FastGen's policies, min without any.
func cacheOf(r *fastgen.Result, d plan.Dtype, block int) plan.Cache {
	rule := plan.GroupMin
	if r != nil && r.Options.Group == fastgen.Mean {
		rule = plan.GroupMean
	}
	return plan.Cache{Dtype: d, Granularity: plan.PerKVHead, BlockSize: block, GroupRule: rule, Prefill: plan.PrefillDense}
}

// low is the cheapest of streaming and FastGen's policies that recovers the threshold and saves anything.
func (c *compiler) low(l, k int, costs costs) *option {
	var best *option
	try := func(o option) {
		if o.recovery >= c.o.Threshold && o.tokens < costs.full && (best == nil || o.tokens < best.tokens) {
			best = &o
		}
	}
	// Streaming first: of equals it is the one that needs no scores at run time.
	try(option{kind: kindStreaming, tokens: costs.streaming, recovery: c.streaming[l][k].Recovery})
	for step, tokens := range costs.fastgen {
		try(option{kind: kindFastGen, step: step, tokens: tokens, recovery: c.in.FastGen.Layers[l][k].Recovery[step]})
	}
	return best
}

// compile searches and writes the plan.
func (c *compiler) compile() (*Result, error) {
	f := c.family
	full := 0
	for _, h := range f.heads {
		full += h.full
	}
	var s state
	r := &Result{Context: c.context}
	if c.o.Budget != 0 {
		s, r.Met = f.forBudget(int(math.Floor(c.o.Budget*float64(full) + 1e-6)))
	} else {
		s, r.Met = f.forRecovery(c.o.Recovery, c.o.LeastRecovery)
	}
	options := f.at(s)
	r.Mean, r.Least = recovery(options, false), recovery(options, true)
	r.Kept = float64(tokens(options)) / float64(full)

	policies := make([]plan.Policy, len(f.heads))
	for i, h := range f.heads {
		policies[i] = c.policy(&h, options[i])
	}
	p := assemble(&c.in, c.cache(), policies)
	r.Heads = make([][]Head, c.in.Model.NLayers)
	r.Streaming = make([][]float64, c.in.Model.NLayers)
	for i, h := range f.heads {
		r.Heads[h.layer] = append(r.Heads[h.layer], Head{Policy: p.Layers[h.layer][h.kv], Gate: h.gate, Recovery: options[i].recovery})
		r.Streaming[h.layer] = append(r.Streaming[h.layer], c.streaming[h.layer][h.kv].Recovery)
	}
	addTotals(p, totalsFor(c.o.Lengths, c.recorded, c.context))
	if kept := p.ComputeTotals(c.context, 0); kept.KeptBlocks*int64(c.o.BlockSize) != int64(tokens(options)) {
		return nil, fmt.Errorf("the plan keeps %d blocks at %d tokens, the search counted %d", kept.KeptBlocks, c.context, tokens(options)/c.o.BlockSize)
	}
	r.Plan = p
	if err := c.evidence(r, s); err != nil {
		return nil, err
	}
	if v := p.Validate(); len(v) > 0 {
		return nil, fmt.Errorf("the plan made is not valid: %s", v[0])
	}
	return r, nil
}

// totalsFor are the lengths in tokens that a plan states totals for: those asked for, the context and the recorded ones.
func totalsFor(asked, recorded []int, context int) []int {
	lengths := slices.Concat(asked, recorded, []int{context})
	slices.Sort(lengths)
	if lengths = slices.Compact(lengths); len(lengths) > 32 { // many lengths were recorded: the shortest and longest stand for them
		lengths = slices.Concat(asked, []int{recorded[0], recorded[len(recorded)-1], context})
	}
	return lengths
}

// policy is what an option says in a plan.
func (c *compiler) policy(h *head, o option) plan.Policy {
	switch {
	case o.kind == kindFull || o.tokens >= h.full:
		return plan.Full{}
	case o.kind == kindStreaming:
		return c.streamingPolicy()
	case o.kind == kindFastGen:
		return fastGenPolicy(c.in.FastGen, o.step)
	}
	p := c.topk
	if c.o.RatioBudgets {
		p.BudgetRatio = float64(o.tokens) / float64(c.context)
		for p.Budget(c.context) > o.tokens { // a rounding error must not cost a block
			p.BudgetRatio = math.Nextafter(p.BudgetRatio, 0)
		}
		return p
	}
	p.BudgetTokens = o.tokens
	return p
}
