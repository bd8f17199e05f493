// Package export writes cache plans in the formats that other tools read.
//
// No other format says all that a plan says. An export keeps at least what the plan keeps: where a format cannot say a
// policy, the head gets the smallest thing that the format can say and that holds everything that the policy would have
// held, which often is the whole cache. What is lost on the way is listed, with the bytes that it costs. The few cases in
// which a tool can end up with less than the plan are losses of the effect [Less], or have to be asked for.
package export

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvprofile/kvprofile/plan"
)

// Format is a format that plans can be exported to.
type Format string

// The formats.
const (
	Duo         Format = "duo"     // DuoAttention's full_attention_heads.tsv and config.json
	KVPress     Format = "kvpress" // kvpress: files for DuoAttentionPress, and ratios for PerLayerCompressionPress
	SnapKV      Format = "snapkv"  // JSON with lists per layer, for SnapKV's and PyramidKV's code
	HeadKV      Format = "headkv"  // scores and capacities per query head
	TensorRTLLM Format = "trt-llm" // kv_cache_config: max_attention_window and sink_token_length
	Layers      Format = "layers"  // kinds of layers, full or sliding window, for LServe, vLLM and transformers
	CSV         Format = "csv"     // one row per layer and KV head
)

// Formats lists the formats.
func Formats() []Format { return []Format{Duo, KVPress, SnapKV, HeadKV, TensorRTLLM, Layers, CSV} }

// ErrPins says that a plan has pins and the format has none.
var ErrPins = errors.New("the plan has pins, which the format cannot say")

// Options of Export.
type Options struct {
	// Length is the longest prompt in tokens that the export is for; 0 stands for the model's context. Formats with
	// absolute numbers only write it for "everything" and work ratios out for it. The ratios of kvpress are worked out
	// for prompts of this very length, and 0 stands for the length that the plan's budget is about.
	Length int
	// WithoutPins leaves the pins out, so that the pinned text is kept by chance only. Without it, a plan with pins is
	// refused by every format but CSV: the pinned tokens may stand anywhere, so that all heads would have to keep everything.
	WithoutPins bool
}

// Effect says what a loss does to the cache.
type Effect string

// The effects.
const (
	More  Effect = "more"  // the tool keeps more than the plan, or lets queries see more
	Less  Effect = "less"  // the tool can keep less than the plan
	Other Effect = "other" // as many tokens, but perhaps others, or other positions
	None  Effect = "none"  // nothing that is kept depends on it
)

// Loss is something that a plan says and a format does not.
type Loss struct {
	// Of names the part of the plan: the member of a policy, or of the plan.
	Of     string `json:"of"`
	Effect Effect `json:"effect"`
	Reason string `json:"reason"`
	// Policies and KVHeads say which heads are concerned; none where it is the whole plan.
	Policies []string `json:"policies,omitempty"`
	KVHeads  int      `json:"kv_heads,omitempty"`
	// Bytes that these heads hold more (or less) than under the plan, at Result.At. 0 where nothing says how many.
	Bytes int64 `json:"bytes,omitempty"`
}

// File is a file of an export.
type File struct {
	Name string `json:"name"`
	Data []byte `json:"-"`
}

// Bytes compares the sizes of the cache of one sequence under the plan and under the export, both counted in the plan's
// blocks and type.
type Bytes struct {
	PromptTokens    int   `json:"prompt_tokens"`
	GeneratedTokens int   `json:"generated_tokens"`
	Plan            int64 `json:"plan_bytes"`
	Export          int64 `json:"export_bytes"`
	Full            int64 `json:"full_bytes"`
}

// Result is an export.
type Result struct {
	Format Format `json:"format"`
	Files  []File `json:"files"`
	Losses []Loss `json:"losses"`
	// At are the lengths that the bytes of the losses are about.
	At plan.Request `json:"-"`
	// Totals compares the sizes at the lengths that the plan states.
	Totals []Bytes `json:"totals"`
	// As is what each KV head [layer][KV head] keeps under the export, in the words of plans. Policies of plans that come
	// nearest are used where there is none: for how many tokens are kept they are exact.
	As [][]plan.Policy `json:"-"`
}

// Export writes a plan in another format. The plan must be valid. Errors: [ErrPins], and formats and lengths that make no
// sense.
func Export(p *plan.Plan, to Format, o Options) (*Result, error) {
	if o.Length < 0 || o.Length > maxLength {
		return nil, fmt.Errorf("length %d lies outside 0 to %d tokens", o.Length, maxLength)
	}
	if len(p.Pins) > 0 && !o.WithoutPins && to != CSV {
		return nil, fmt.Errorf("export to %s: %w", to, ErrPins)
	}
	d := newDraft(p)
	if len(p.Pins) > 0 && to != CSV {
		d.unpin()
	}
	write, ok := map[Format]func(*draft, Options) ([]File, error){Duo: duo, KVPress: kvpress, SnapKV: snapkv, HeadKV: headkv,
		TensorRTLLM: tensorRTLLM, Layers: layerSpecs, CSV: csvTable}[to]
	if !ok {
		return nil, fmt.Errorf("unknown format %q, expected one of %s", to, Names())
	}
	files, err := write(d, o)
	if err != nil {
		return nil, fmt.Errorf("export to %s: %w", to, err)
	}
	return d.result(to, files), nil
}

// Names lists the formats for messages.
func Names() string {
	var names []string
	for _, f := range Formats() {
		names = append(names, string(f))
	}
	return strings.Join(names, ", ")
}

// maxLength is the largest number of tokens that a plan may have.
const maxLength = 1 << 27

// draft is an export at work.
type draft struct {
	p      *plan.Plan
	at     plan.Request
	as     [][]plan.Policy
	losses []*lossAt
}

// lossAt is a loss with the KV heads that it concerns.
type lossAt struct {
	Loss
	heads []headAt
}

type headAt struct{ layer, kvHead int }

func newDraft(p *plan.Plan) *draft {
	d := &draft{p: p, at: reference(p)}
	d.as = make([][]plan.Policy, len(p.Layers))
	for l, row := range p.Layers {
		d.as[l] = make([]plan.Policy, len(row))
		for k := range row {
			d.as[l][k] = d.policy(l, k)
		}
	}
	return d
}

// policy is what a head keeps. A streaming policy as large as the layer's own sliding window keeps the window, as full
// does: said as sinks and recent tokens, it would lose some of it.
func (d *draft) policy(l, k int) plan.Policy {
	q := d.p.Policies[d.p.Layers[l][k]]
	if s, ok := q.(plan.Streaming); ok && d.p.Model.Window(l) > 0 && s.SinkTokens+s.RecentTokens >= d.p.Model.Window(l) {
		return plan.Full{}
	}
	return q
}

// reference are the lengths that bytes of single losses are about: those of the plan's budget where it says so, else the
// longest stated ones that the model was made for.
func reference(p *plan.Plan) plan.Request {
	if e := p.Evidence; e != nil && e.Recipe != nil && e.Recipe.ContextTokens > 0 {
		return plan.Request{PromptTokens: e.Recipe.ContextTokens}
	}
	at := plan.Request{PromptTokens: p.Totals[0].PromptTokens, GeneratedTokens: p.Totals[0].GeneratedTokens}
	for _, t := range p.Totals {
		if t.PromptTokens+t.GeneratedTokens <= p.Model.MaxPosition {
			at = plan.Request{PromptTokens: t.PromptTokens, GeneratedTokens: t.GeneratedTokens}
		}
	}
	return at
}

// each calls f with every KV head and its policy.
func (d *draft) each(f func(l, k int, q plan.Policy)) {
	for l, row := range d.p.Layers {
		for k := range row {
			f(l, k, d.policy(l, k))
		}
	}
}

// replace says that a head gets another policy under the export, and why.
func (d *draft) replace(l, k int, q plan.Policy, loss Loss) {
	e := d.loseAt(l, k, loss)
	e.Bytes += d.bytes(l, q, 0) - d.bytes(l, d.as[l][k], 0)
	d.as[l][k] = q
}

// bytes is what one KV head of a layer holds of d.at.
func (d *draft) bytes(l int, q plan.Policy, pinned int) int64 {
	c := d.p.Cache
	k := c.Kept(q, plan.At{PromptTokens: d.at.PromptTokens, GeneratedTokens: d.at.GeneratedTokens, Window: d.p.Model.Window(l), Pinned: pinned})
	return int64(k.Blocks) * int64(c.BlockSize) * 2 * int64(d.p.Model.HeadDim) * int64(c.Dtype.Size())
}

// lose notes a loss of the whole plan.
func (d *draft) lose(loss Loss) { d.entry(loss) }

// loseAt notes a loss of a head.
func (d *draft) loseAt(l, k int, loss Loss) *lossAt {
	e := d.entry(loss)
	if at := (headAt{l, k}); !slices.Contains(e.heads, at) {
		e.heads = append(e.heads, at)
	}
	return e
}

// entry is the loss of that kind, a new one if need be.
func (d *draft) entry(loss Loss) *lossAt {
	for _, e := range d.losses {
		if e.Of == loss.Of && e.Effect == loss.Effect && e.Reason == loss.Reason {
			return e
		}
	}
	e := &lossAt{Loss: loss}
	d.losses = append(d.losses, e)
	return e
}

// exported is the plan that the export amounts to, for counting only: it has neither pins nor totals.
func (d *draft) exported() *plan.Plan {
	x := &plan.Plan{Model: d.p.Model, Cache: d.p.Cache, Policies: map[string]plan.Policy{}}
	for _, row := range d.as {
		var names []string
		for _, q := range row {
			name := fmt.Sprintf("%#v", q)
			x.Policies[name] = q
			names = append(names, name)
		}
		x.Layers = append(x.Layers, names)
	}
	return x
}

func (d *draft) result(to Format, files []File) *Result {
	r := &Result{Format: to, Files: files, Losses: []Loss{}, At: d.at, As: d.as}
	x := d.exported()
	for _, e := range d.losses {
		loss := e.Loss
		for _, h := range e.heads {
			if name := d.p.Layers[h.layer][h.kvHead]; !slices.Contains(loss.Policies, name) {
				loss.Policies = append(loss.Policies, name)
			}
			loss.KVHeads++
		}
		slices.Sort(loss.Policies)
		r.Losses = append(r.Losses, loss)
	}
	order := []Effect{Less, More, Other, None}
	slices.SortStableFunc(r.Losses, func(a, b Loss) int { return slices.Index(order, a.Effect) - slices.Index(order, b.Effect) })
	for _, t := range d.p.Totals {
		u := x.Usage(plan.Request{PromptTokens: t.PromptTokens, GeneratedTokens: t.GeneratedTokens})
		r.Totals = append(r.Totals, Bytes{t.PromptTokens, t.GeneratedTokens, t.KeptBytes, u.Bytes, t.FullBytes})
	}
	return r
}

// common notes what none of the tools' formats says. has lists what this one does.
func (d *draft) common(has ...string) {
	for _, x := range []Loss{
		{Of: "model", Reason: "does not say which model it belongs to: nothing refuses another one"},
		{Of: "cache", Reason: "does not say the type and the blocks of the cache that the plan's bytes are about"},
		{Of: "totals", Reason: "does not say what is kept at which length"},
		{Of: "evidence", Reason: "does not say what the plan rests on"},
	} {
		if x.Of == "evidence" && d.p.Evidence == nil || slices.Contains(has, x.Of) {
			continue
		}
		x.Effect = None
		d.lose(x)
	}
}

// unpin leaves the pins out.
func (d *draft) unpin() {
	pinned := 0
	for _, pin := range d.p.Pins {
		pinned = min(pinned+pin.MaxTokens, maxLength)
	}
	loss := Loss{Of: "pins", Effect: Less, Reason: "pinned text is kept only where the policies keep it by chance"}
	d.each(func(l, k int, q plan.Policy) {
		if q.Kind() != plan.KindFull {
			d.loseAt(l, k, loss).Bytes += d.bytes(l, q, 0) - d.bytes(l, q, pinned)
		}
	})
	d.entry(loss)
}

// slots notes heads whose keys are to be rotated to their place in the cache: all tools but kvprofile's own readers leave
// them at their positions in the text.
func (d *draft) slots(l, k int, positions plan.Positions) {
	if positions == plan.PositionsCacheSlot {
		d.loseAt(l, k, Loss{Of: "positions", Effect: Other, Reason: "keys stay at the positions that they had in the text"})
	}
}
