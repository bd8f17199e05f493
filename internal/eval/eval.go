// Package eval runs a model with cache plans applied: caches that really shrink, all plans over the same prompts, beside
// the full cache.
//
// A prompt is read once for all plans that see it the same way. At the end of every layer each plan picks what it keeps,
// and only that is copied to its pages. Then all plans decode together, a token a step, so that the weights are read once
// for all of them; every step appends to and evicts from each plan's cache. What is kept is asked of package plan, as a
// server would; nothing is masked in a full cache.
package eval

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/devices"
	"github.com/kvprofile/kvprofile/plan"
)

// Question says when a prompt's question is read.
type Question string

const (
	// QuestionInPrompt reads it with the prompt: what is kept is chosen with the question known.
	QuestionInPrompt Question = "in-prompt"
	// QuestionAfter reads the context, evicts, and then reads the question token by token: as when a context is cached
	// and asked about later, or in the next turn of a conversation.
	QuestionAfter Question = "after"
)

// Contender is a plan that is evaluated.
type Contender struct {
	Name   string
	Budget float64 // asked for, kept bytes / full bytes; 0 for a plan that was given
	Plan   *plan.Plan
}

// Tokenizer is what eval needs of a model's tokenizer.
type Tokenizer interface {
	Decode(ids []int32) string
}

// Options of Evaluate.
type Options struct {
	Question Question // "" means in the prompt
	// GoldOnly only reads the gold answer: an answer is right where the model would have written that, token by token.
	GoldOnly bool
	// Extra is the number of tokens that may be generated beyond the gold answer's length.
	Extra int
	// Stop are the tokens that end an answer.
	Stop []int32
	// TextTokens is the number of tokens predicted of a text; at most half of it.
	TextTokens int
	// Scattered leaves kept tokens in their blocks: no compaction at the end of the prompt.
	Scattered bool
	// Progress is called when a sample is done.
	Progress func(done, samples int)
}

// DefaultOptions are those of the command.
func DefaultOptions() Options { return Options{Question: QuestionInPrompt, Extra: 24, TextTokens: 256} }

// BytesError says that a cache held other bytes than its plan predicts: a defect of the plan's runtime or of this one.
type BytesError struct {
	Contender       string
	Task            string
	Sample          int
	Held, Predicted int64
}

func (e *BytesError) Error() string {
	return fmt.Sprintf("%s, %s sample %d: the cache holds %d bytes, the plan predicts %d", e.Contender, e.Task, e.Sample, e.Held, e.Predicted)
}

// FullPlan is the plan that keeps everything, for the same model and cache as another plan.
func FullPlan(p *plan.Plan) *plan.Plan {
	f := &plan.Plan{Format: p.Format, Version: p.Version, Tool: p.Tool, Model: p.Model, Cache: p.Cache, Ties: p.Ties,
		Policies: map[string]plan.Policy{"full": plan.Full{}}}
	f.Cache.Prefill, f.Cache.ChunkTokens = plan.PrefillDense, 0
	for range p.Model.NLayers {
		row := make([]string, p.Model.NKVHeads)
		for k := range row {
			row[k] = "full"
		}
		f.Layers = append(f.Layers, row)
	}
	for _, t := range p.Totals {
		f.Totals = append(f.Totals, f.ComputeTotals(t.PromptTokens, t.GeneratedTokens))
	}
	return f
}

// Evaluate runs contenders on the datasets, one per task. Full is the run of the full cache; Runs has one per contender,
// in order. The contenders' plans must be of one model and have one block size.
//
// Errors: *BytesError, *engine.NonFiniteError, those of ctx.
func Evaluate(ctx context.Context, m *engine.Model, tok Tokenizer, sets []*datasets.Dataset, contenders []Contender, o Options) (*Result, error) {
	return EvaluateOn(ctx, devices.Of(m), tok, sets, contenders, o)
}

// EvaluateOn is Evaluate with the samples spread over devices; the result is the same on any number. tok must bear calls from
// several goroutines; o.Progress is called from one at a time.
func EvaluateOn(ctx context.Context, set *devices.Set, tok Tokenizer, sets []*datasets.Dataset, contenders []Contender, o Options) (*Result, error) {
	m := set.First()
	if len(contenders) == 0 {
		return nil, fmt.Errorf("no plans to evaluate")
	}
	if o.Extra < 0 {
		return nil, fmt.Errorf("%d tokens beyond the answer's length: must be at least 0", o.Extra)
	}
	first := contenders[0].Plan
	both := append([]Contender{{Name: NameFull, Plan: FullPlan(first)}}, contenders...)
	e := &evaluator{tok: tok, o: o}
	for _, c := range append(both[1:len(both):len(both)], both[0]) { // the full cache last: it is never the one to blame
		if c.Plan.Cache.BlockSize != first.Cache.BlockSize {
			return nil, fmt.Errorf("%s has blocks of %d tokens, %s of %d: evaluate them one by one", c.Name, c.Plan.Cache.BlockSize, contenders[0].Name, first.Cache.BlockSize)
		}
		x, err := newEntry(&m.Config, c)
		if err != nil {
			return nil, err
		}
		e.entries = append(e.entries, x)
	}
	e.entries = slices.Concat(e.entries[len(contenders):], e.entries[:len(contenders)])
	samples := 0
	for _, d := range sets {
		samples += len(d.Samples)
	}
	runs := make([]Run, len(both))
	for i, c := range both {
		runs[i] = Run{Name: c.Name, Budget: c.Budget, PlanSHA256: c.Plan.Digest(), Outcomes: []Outcome{}, Texts: []TextOutcome{}}
	}
	r := &Result{Format: Format, Version: Version, Tool: first.Tool, Model: first.Model, Device: m.Backend.Name(), Question: string(o.Question)}
	all := make([]*datasets.Sample, 0, samples)
	for _, d := range sets {
		for i := range d.Samples {
			all = append(all, &d.Samples[i])
		}
		r.Purpose = d.Meta.Purpose
	}
	type outcomes struct {
		texts   []TextOutcome // one per contender, or none
		answers []Outcome
	}
	err := devices.Map(ctx, set, len(all), func(ctx context.Context, m *engine.Model, i int) (out outcomes, err error) {
		own := *e // entries are only read
		own.ctx, own.model = ctx, m
		if len(all[i].Find(datasets.SpanQuestion)) == 0 {
			out.texts, err = own.text(all[i])
		} else {
			out.answers, err = own.quiz(all[i])
		}
		return out, err
	}, func(i int, out outcomes) error {
		for c, t := range out.texts {
			runs[c].Texts = append(runs[c].Texts, t)
		}
		for c, a := range out.answers {
			runs[c].Outcomes = append(runs[c].Outcomes, a)
		}
		if o.Progress != nil {
			o.Progress(i+1, samples)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	r.Datasets = References(sets)
	r.Full, r.Runs = runs[0], runs[1:]
	return r, nil
}

// References name datasets as evidence does.
func References(sets []*datasets.Dataset) []plan.DatasetRef {
	var out []plan.DatasetRef
	for _, d := range sets {
		ref := plan.DatasetRef{Use: "eval", Task: d.Meta.Task, Samples: len(d.Samples), Seed: d.Meta.Seed, SHA256: d.Meta.ContentHash}
		for i := range d.Samples {
			n := len(d.Samples[i].Tokens)
			if i == 0 || n < ref.MinTokens {
				ref.MinTokens = n
			}
			ref.MaxTokens = max(ref.MaxTokens, n)
		}
		out = append(out, ref)
	}
	return out
}

// Append adds the outcomes of other prompts of the same methods. A method whose plans differ between the two has no
// single plan any more.
func (r *Result) Append(o *Result) error {
	if len(r.Runs) != len(o.Runs) {
		return fmt.Errorf("%d and %d plans do not go together", len(r.Runs), len(o.Runs))
	}
	join := func(x, y *Run) error {
		if x.Name != y.Name || x.Budget != y.Budget {
			return fmt.Errorf("%s and %s do not go together", x.Label(), y.Label())
		}
		if x.PlanSHA256 != y.PlanSHA256 {
			x.PlanSHA256 = ""
		}
		x.Outcomes, x.Texts = append(x.Outcomes, y.Outcomes...), append(x.Texts, y.Texts...)
		return nil
	}
	if err := join(&r.Full, &o.Full); err != nil {
		return err
	}
	for i := range r.Runs {
		if err := join(&r.Runs[i], &o.Runs[i]); err != nil {
			return err
		}
	}
	return nil
}

// evaluator runs samples, one at a time.
type evaluator struct {
	ctx     context.Context
	model   *engine.Model
	tok     Tokenizer
	o       Options
	entries []*entry // the full cache first
}

// entry is a contender with what is worked out once.
type entry struct {
	Contender
	masks   [][]engine.Mask // of the prefill; nil sees everything
	key     string          // of the masks: contenders with equal keys share a prefill
	windows []int           // observation windows that its policies vote with
	raw     bool            // keys are cached before RoPE somewhere
	classes map[int32]plan.Class
	observe [][]bool // [layer][KV head]: the policy looks at the attention of every step
	selects [][]bool // [layer][KV head]: it does at that of the prompt
	// stepwise entries get their prompt token by token: the plan's prefill is chunked, or h2o evicts all along.
	stepwise bool
}

// newEntry refuses plans that are not for the model.
func newEntry(m *engine.Config, c Contender) (*entry, error) {
	p := &c.Plan.Model
	fits := p.NLayers == m.Layers && p.NHeads == m.Heads && p.NKVHeads == m.KVHeads && p.HeadDim == m.HeadDim && len(c.Plan.Layers) == m.Layers
	for l, row := range c.Plan.Layers {
		fits = fits && len(row) == m.KVHeads && p.Window(l) == m.Window(l)
	}
	if !fits {
		return nil, fmt.Errorf("%s is a plan for a model of another shape", c.Name)
	}
	e := &entry{Contender: c, classes: map[int32]plan.Class{}}
	if t := c.Plan.TokenClasses; t != nil {
		for _, id := range t.Punctuation {
			e.classes[int32(id)] = plan.ClassPunctuation
		}
		for _, id := range t.Special {
			e.classes[int32(id)] = plan.ClassSpecial
		}
	}
	masked := false
	for l, row := range c.Plan.Layers {
		masks, observe, selects := make([]engine.Mask, len(row)), make([]bool, len(row)), make([]bool, len(row))
		for k := range row {
			q, err := c.Plan.PolicyOf(l, k)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.Name, err)
			}
			switch q := q.(type) {
			case plan.Streaming:
				e.raw = e.raw || q.Positions == plan.PositionsCacheSlot
				// A policy as large as the layer's own window keeps that, and so hides nothing.
				window := c.Plan.Model.Window(l)
				if q.Evict == plan.EvictAlways && (window == 0 || q.SinkTokens+q.RecentTokens < window) {
					masks[k], masked = engine.Mask{Sink: q.SinkTokens, Recent: q.RecentTokens}, true
				}
			case plan.TopK:
				e.raw = e.raw || q.Positions == plan.PositionsCacheSlot
				if !slices.Contains(e.windows, q.ObservationWindow) {
					e.windows = append(e.windows, q.ObservationWindow)
				}
				selects[k] = true
			case plan.FastGen:
				e.raw = e.raw || q.Positions == plan.PositionsCacheSlot
				observe[k], selects[k] = q.Decode == plan.DecodeRolling, true
			case plan.H2O:
				e.raw = e.raw || q.Positions == plan.PositionsCacheSlot
				observe[k], selects[k] = true, true
				e.stepwise = e.stepwise || q.Evict == plan.EvictAlways
			}
		}
		e.masks = append(e.masks, masks)
		e.observe, e.selects = append(e.observe, observe), append(e.selects, selects)
	}
	if !masked {
		e.masks = nil
	}
	e.key = fmt.Sprint(e.masks)
	e.stepwise = e.stepwise || c.Plan.Cache.Prefill == plan.PrefillChunked
	return e, nil
}

// sequence is one contender's cache of the current sample.
type sequence struct {
	*entry
	cache     *plan.KVCache
	firstPage int32 // of the pool
	at        int   // tokens in the cache
	scattered bool  // more blocks may be held than the plan predicts
	logits    []float64
}

// quiz runs a sample with a question, and returns one outcome per entry.
func (e *evaluator) quiz(s *datasets.Sample) ([]Outcome, error) {
	prompt, gold, expected := s.Quiz()
	if len(gold) == 0 {
		return nil, fmt.Errorf("%s sample %d has a question without an answer", s.Task, s.ID)
	}
	later := 0
	if e.o.Question == QuestionAfter {
		later = len(prompt) - s.QuestionStart()
	}
	if later == len(prompt) {
		return nil, fmt.Errorf("%s sample %d has no context before its question", s.Task, s.ID)
	}
	longest := later + len(gold) + e.o.Extra
	if e.o.GoldOnly {
		longest = later + len(gold) - 1
	}
	state, err := e.prefill(s, prompt[:len(prompt)-later], longest)
	if err != nil {
		return nil, err
	}
	defer state.free()
	out := make([]Outcome, len(state.sequences))
	for i, q := range state.sequences {
		out[i] = Outcome{Sample: s.ID, Task: s.Task, Length: s.TargetTokens, Prompt: len(prompt), Depth: depth(s), FullBytes: state.sequences[0].held(), Bytes: q.held()}
	}
	for _, id := range prompt[len(prompt)-later:] {
		if err := state.step(e, same(id, len(out)), nil); err != nil {
			return nil, err
		}
	}
	answers, err := e.answer(state, gold, out)
	if err != nil {
		return nil, err
	}
	for c := range out {
		if e.o.GoldOnly {
			if answers[c].strayed {
				continue
			}
			answers[c].text = gold
		}
		out[c].Text = e.tok.Decode(answers[c].text)
		scored := Score(out[c].Text, e.tok.Decode(gold), expected)
		out[c].Right, out[c].Exact, out[c].Share = scored.Right, scored.Exact, scored.Share
	}
	return out, nil
}

// answer is what one contender writes.
type answer struct {
	text    []int32
	strayed bool // at some token the model would not have written the gold answer's
	stopped bool
}

// write takes in the next token of the text, or ends it.
func (a *answer) write(id int32, o *Options, most int) {
	a.stopped = slices.Contains(o.Stop, id) || len(a.text) == most
	if !a.stopped {
		a.text = append(a.text, id)
	}
}

// answer measures the gold answer's tokens in out and has every contender write its own answer, greedily.
func (e *evaluator) answer(state *caches, gold []int32, out []Outcome) ([]answer, error) {
	answers, most := make([]answer, len(out)), len(gold)+e.o.Extra
	reading := state
	if !e.o.GoldOnly {
		reading = state.fork()
	}
	// choose asks for every contender's next token; what is not wanted does not step.
	run := func(c *caches, choose func(i, contender int) (id int32, wanted bool)) error {
		for i := 0; ; i++ {
			ids, active, any := make([]int32, len(out)), make([]bool, len(out)), false
			for k := range out {
				ids[k], active[k] = choose(i, k)
				any = any || active[k]
			}
			if !any {
				return nil
			}
			if err := c.step(e, ids, active); err != nil {
				return err
			}
		}
	}
	// All read the gold answer. Those that would have written it go on by themselves.
	err := run(reading, func(i, k int) (int32, bool) {
		a, logits := &answers[k], reading.sequences[k].logits
		best := int32(Argmax(logits))
		if i < len(gold) {
			p, rank := LogProbRank(logits, gold[i])
			out[k].LogProb += p
			out[k].Rank += float64(rank)
			a.strayed = a.strayed || best != gold[i]
			best = gold[i]
		}
		if a.strayed || e.o.GoldOnly {
			return best, i < len(gold)-1
		}
		if !a.stopped {
			a.write(best, &e.o, most)
		}
		return best, !a.stopped || i < len(gold)-1 // a gold answer may go on behind a token that stops
	})
	if reading != state {
		reading.free()
	}
	if err != nil {
		return nil, err
	}
	for k := range out {
		out[k].LogProb /= float64(len(gold))
		out[k].Rank /= float64(len(gold))
	}
	if e.o.GoldOnly {
		return answers, nil
	}
	// The others write from the start.
	return answers, run(state, func(i, k int) (int32, bool) {
		a := &answers[k]
		if !a.strayed || a.stopped && i > 0 {
			return 0, false
		}
		if i == 0 {
			a.text, a.stopped = nil, false
		}
		best := int32(Argmax(state.sequences[k].logits))
		a.write(best, &e.o, most)
		return best, !a.stopped
	})
}

// depth is where a sample's first needle was asked to stand.
func depth(s *datasets.Sample) float64 {
	if len(s.AskedDepths) == 0 {
		return 0
	}
	return s.AskedDepths[0]
}

// same is a token for every sequence.
func same(id int32, n int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = id
	}
	return out
}

// text runs a sample without a question: the first part is read as a prompt, the rest predicted token by token.
func (e *evaluator) text(s *datasets.Sample) ([]TextOutcome, error) {
	n := min(e.o.TextTokens, len(s.Tokens)/2)
	if n < 1 {
		return nil, fmt.Errorf("text %d has %d tokens: nothing to predict", s.ID, len(s.Tokens))
	}
	prompt := s.Tokens[:len(s.Tokens)-n]
	state, err := e.prefill(s, prompt, n-1)
	if err != nil {
		return nil, err
	}
	defer state.free()
	out := make([]TextOutcome, len(state.sequences))
	for i, q := range state.sequences {
		out[i] = TextOutcome{Sample: s.ID, Prompt: len(prompt), Tokens: n, Bytes: q.held(), FullBytes: state.sequences[0].held()}
	}
	for i, id := range s.Tokens[len(prompt):] {
		full := state.sequences[0].logits
		p, _ := LogProbRank(full, id)
		for c, q := range state.sequences {
			out[c].FullNLL -= p
			if c == 0 {
				out[c].NLL -= p
				continue
			}
			own, _ := LogProbRank(q.logits, id)
			out[c].NLL -= own
			out[c].KL += math.Max(0, KL(full, q.logits))
		}
		if i < n-1 {
			if err := state.step(e, same(id, len(out)), nil); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}
