package export

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"github.com/kvprofile/kvprofile/plan"
)

// voting is how top-k heads choose their tokens, as SnapKV's code has it: an average pooling with one position is none.
type voting struct {
	window, kernel int
	max            bool
}

func votingOf(q plan.TopK) voting {
	return voting{q.ObservationWindow, q.Pool.Kernel, q.Pool.Kind != plan.PoolAvg}
}

func (v voting) pooling() string {
	if v.max {
		return "maxpool"
	}
	return "avgpool"
}

// compare orders votings for ties: the larger window, then the larger kernel, then the maximum.
func (v voting) compare(w voting) int {
	pool := func(x voting) int {
		if x.max {
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(w.window, v.window), cmp.Compare(w.kernel, v.kernel), cmp.Compare(pool(w), pool(v)))
}

// idle is the voting of a file without top-k heads; nothing depends on it.
var idle = voting{32, 7, true}

// mostCommon is the voting of most top-k heads that can be said.
func (d *draft) mostCommon() voting {
	counts := map[voting]int{}
	d.each(func(_, _ int, q plan.Policy) {
		if t, ok := q.(plan.TopK); ok && t.SinkTokens == 0 {
			counts[votingOf(t)]++
		}
	})
	best := idle
	for v, n := range counts {
		if c := cmp.Compare(n, counts[best]); c > 0 || c == 0 && v.compare(best) < 0 {
			best = v
		}
	}
	return best
}

// unsayable says why a head that keeps a prompt by SnapKV's rule alone has to keep everything; nil when it need not.
func unsayable(q plan.Policy, v voting, sayable func(voting) bool) *Loss {
	switch q := q.(type) {
	case plan.Full:
		return &Loss{}
	case plan.TopK:
		switch {
		case q.SinkTokens > 0:
			return &Loss{Of: "sink_tokens", Effect: More, Reason: "top-k has no sink tokens there, so heads with some keep everything"}
		case !sayable(votingOf(q)):
			return &Loss{Of: "topk", Effect: More,
				Reason: fmt.Sprintf("heads that do not vote as most do (window %d, %s of %d) keep everything", v.window, v.pooling(), v.kernel)}
		}
		return nil
	}
	return &Loss{Of: string(q.Kind()), Effect: More, Reason: "heads choose tokens by the last queries' attention alone, so these keep everything"}
}

// selection notes how the tools choose tokens otherwise than a top-k head does.
func (d *draft) selection(l, k int, q plan.TopK) {
	if group := d.p.Model.NHeads / d.p.Model.NKVHeads; group > 1 {
		d.loseAt(l, k, Loss{Of: "aggregate", Effect: Other,
			Reason: fmt.Sprintf("the tool's own code selects and stores tokens per query head, not per KV head: other tokens, and up to %d times the bytes counted here", group)})
	}
	d.slots(l, k, q.Positions)
}

// generated and shares are what a head with a budget of its own loses.
func generated() Loss {
	return Loss{Of: "decode", Effect: More, Reason: "generated tokens are all kept"}
}

func shares(length int) Loss {
	return Loss{Of: "budget_ratio", Effect: Less,
		Reason: fmt.Sprintf("shares of the prompt are written as tokens for %d tokens: longer prompts keep less than the plan, shorter ones more", length)}
}

// topk is a head under the tools' code: a budget of the prompt, and all that is generated.
func topk(budget int, v voting) plan.TopK {
	q := plan.TopK{BudgetTokens: budget, ObservationWindow: v.window, Pool: plan.Pool{Kind: plan.PoolAvg, Kernel: v.kernel}, Aggregate: plan.AggregateMean,
		Evict: plan.EvictPrefillEnd, Decode: plan.DecodeStatic, Positions: plan.PositionsOriginal}
	switch {
	case v.kernel == 1:
		q.Pool.Kind = plan.PoolNone
	case v.max:
		q.Pool.Kind = plan.PoolMax
	}
	return q
}

// snapkvConfig is what SnapKV's and PyramidKV's evaluation code reads (compress_args): a list has one entry per layer.
type snapkvConfig struct {
	Capacities []int  `json:"max_capacity_prompts"`
	Windows    []int  `json:"window_sizes"`
	Kernels    []int  `json:"kernel_sizes"`
	Pooling    string `json:"pooling"`
}

// snapkv writes capacities per layer. Windows and kernels may differ between layers, the kind of pooling may not.
func snapkv(d *draft, o Options) ([]File, error) {
	length := d.length(o)
	most := d.mostCommon()
	c := snapkvConfig{Pooling: most.pooling()}
	for l, row := range d.p.Layers {
		// A layer votes as its first top-k head does, if the kind of pooling can be said.
		v := most
		for k := range row {
			if q, ok := d.policy(l, k).(plan.TopK); ok {
				v = votingOf(q)
				break
			}
		}
		sayable := func(w voting) bool { return w == v && (w.kernel == 1 || w.max == most.max) }
		whole, capacity := false, 0
		why := make([]*Loss, len(row))
		for k := range row {
			q := d.policy(l, k)
			if why[k] = unsayable(q, v, sayable); why[k] != nil {
				whole = true
			} else {
				capacity = max(capacity, q.(plan.TopK).Budget(length))
			}
		}
		if whole {
			capacity = max(capacity, length)
		}
		c.Capacities, c.Windows, c.Kernels = append(c.Capacities, capacity), append(c.Windows, v.window), append(c.Kernels, v.kernel)
		for k := range row {
			d.head(l, k, d.policy(l, k), topk(capacity, v), whole, why[k], length, "all KV heads of a layer have one capacity, so the largest decides")
		}
	}
	d.beyond(length)
	d.common()
	return jsonFile("snapkv.json", c)
}

// head settles a head whose layer, or which itself, has a capacity under the export.
func (d *draft) head(l, k int, q plan.Policy, as plan.TopK, whole bool, why *Loss, length int, shared string) {
	if whole {
		switch {
		case q.Kind() == plan.KindFull:
		case why == nil:
			d.replace(l, k, plan.Full{}, Loss{Of: "layers", Effect: More, Reason: shared})
		default:
			d.replace(l, k, plan.Full{}, *why)
		}
		return
	}
	t := q.(plan.TopK) // nothing else can be said
	d.selection(l, k, t)
	if t.Decode == plan.DecodeRolling {
		d.loseAt(l, k, generated())
	}
	if t.BudgetRatio > 0 {
		d.loseAt(l, k, shares(length))
	}
	// What the bytes are counted for: the greatest of the changes.
	switch {
	case as.BudgetTokens != t.Budget(length):
		d.replace(l, k, as, Loss{Of: "layers", Effect: More, Reason: shared})
	case t.Decode == plan.DecodeRolling:
		d.replace(l, k, as, generated())
	case t.BudgetRatio > 0:
		d.replace(l, k, as, shares(length))
	}
}

// headkvConfig is what HeadKV's code has on its configuration, and the capacities that it works out with these scores: per
// layer and query head, without the observation window.
type headkvConfig struct {
	Window     int     `json:"window_size"`
	Kernel     int     `json:"kernel_size"`
	Pooling    string  `json:"pooling"`
	Base       int     `json:"base_capacity"`
	Beta       int     `json:"beta"`
	Temp       int     `json:"temp"`
	Capacities [][]int `json:"head_capacity"`
}

// headkv writes scores in HeadKV's form. Its code gives a query head round(score / sum of scores * pool + floor) tokens
// beside the window, where pool is (base_capacity - window) / beta per head and floor what beta leaves over. With beta 1
// there is no floor, and with a base that is the mean capacity, rounded up, the scores are the capacities themselves.
func headkv(d *draft, o Options) ([]File, error) {
	length := d.length(o)
	v := d.mostCommon()
	m := &d.p.Model
	if length <= v.window {
		return nil, fmt.Errorf("length %d must be greater than the observation window, %d tokens", length, v.window)
	}
	c := headkvConfig{Window: v.window, Kernel: v.kernel, Pooling: v.pooling(), Beta: 1, Temp: 1}
	sum := 0
	var scores bytes.Buffer
	scores.WriteByte('{')
	for l, row := range d.p.Layers {
		var capacities []int
		for k := range row {
			q := d.policy(l, k)
			why := unsayable(q, v, func(w voting) bool { return w == v })
			budget := length
			if why == nil {
				budget = q.(plan.TopK).Budget(length)
			}
			d.head(l, k, q, topk(budget, v), why != nil, why, length, "")
			for range m.NHeads / m.NKVHeads {
				if sum > 0 {
					scores.WriteString(", ")
				}
				fmt.Fprintf(&scores, `"%d-%d": [%d]`, l, len(capacities), budget-v.window)
				capacities = append(capacities, budget-v.window)
				sum += budget - v.window
			}
		}
		c.Capacities = append(c.Capacities, capacities)
	}
	scores.WriteString("}\n")
	heads := m.NLayers * m.NHeads
	c.Base = (sum+heads-1)/heads + v.window
	d.lose(Loss{Of: "topk", Effect: More, Reason: fmt.Sprintf("prompts of fewer than %d tokens are kept whole", c.Base)})
	d.beyond(length)
	d.common()
	config, err := jsonFile("headkv.json", c)
	return append([]File{{"head_scores.json", scores.Bytes()}}, config...), err
}

// kvpressConfig is kvpress.json: two ways to use a plan with kvpress, which exclude one another.
type kvpressConfig struct {
	// Of DuoAttentionPress, with the scores and sizes of the two other files.
	HeadRatio float64 `json:"head_compression_ratio"`
	// Of PerLayerCompressionPress around any ScorerPress: shares that are removed, for prompts of Length tokens.
	Ratios []float64    `json:"compression_ratios"`
	Length int          `json:"length"`
	Press  kvpressPress `json:"press"`
}

// kvpressPress is the ScorerPress that comes nearest to the plan's top-k heads.
type kvpressPress struct {
	Class  string `json:"class"`
	Window int    `json:"window_size"`
	Kernel int    `json:"kernel_size"`
}

// kvpress writes DuoAttention's files, whose scores DuoAttentionPress takes, and ratios per layer. DuoAttentionPress masks
// when the prompt has been read, and keeps what is generated. The losses are those of DuoAttentionPress but where they
// speak of compression_ratios.
func kvpress(d *draft, o Options) ([]File, error) {
	t := d.pattern(func(plan.Streaming) bool { return true })
	d.each(func(l, k int, q plan.Policy) {
		s, ok := q.(plan.Streaming)
		if !ok {
			return
		}
		// The tokens of the prompt's end stay: a static budget of as many tokens.
		as := topk(t.sink+t.recent, idle)
		d.replace(l, k, as, Loss{Of: "decode", Effect: More, Reason: "the last tokens of the prompt and all generated ones are kept"})
		if s.Evict == plan.EvictAlways {
			d.loseAt(l, k, Loss{Of: "evict", Effect: More, Reason: "the prompt is attended to in full"})
		}
	})
	if t.streaming > 0 {
		d.lose(Loss{Of: "cache", Effect: None, Reason: "DuoAttentionPress masks tokens and frees no memory: it shows what the plan does to answers, not to bytes"})
	}
	v := d.mostCommon()
	length := o.Length
	if length == 0 {
		length = d.at.PromptTokens
	}
	c := kvpressConfig{HeadRatio: t.sparsity(), Length: length, Press: kvpressPress{"SnapKVPress", v.window, v.kernel}}
	for l, row := range d.p.Layers {
		kept := 0
		for k := range row {
			q := d.policy(l, k)
			if q.Kind() == plan.KindFull {
				kept = length // also on a layer with a window of its own, which the press does not know
				break
			}
			kept = max(kept, d.p.Cache.Kept(q, plan.At{PromptTokens: length, Window: d.p.Model.Window(l)}).Tokens)
		}
		c.Ratios = append(c.Ratios, removedShare(kept, length))
	}
	if slices.ContainsFunc(c.Ratios, func(r float64) bool { return r > 0 }) {
		d.lose(Loss{Of: "compression_ratios", Effect: Less,
			Reason: fmt.Sprintf("the ratios keep at least the plan's tokens of prompts of %d tokens; of shorter ones they can keep fewer, of longer ones more", length)})
		d.lose(Loss{Of: "compression_ratios", Effect: Other,
			Reason: "with the ratios all KV heads of a layer keep as many tokens, and the press chooses which: no sinks, recent tokens or classes of tokens are sure to be kept"})
		if v.max && v.kernel > 1 {
			d.lose(Loss{Of: "compression_ratios", Effect: Other, Reason: "SnapKVPress pools votes by their average, the plan by their maximum"})
		}
	}
	d.common()
	files, err := t.files(d.p.Model.Name)
	if err != nil {
		return nil, err
	}
	config, err := jsonFile("kvpress.json", c)
	return append(files, config...), err
}

// removedShare is the compression ratio with which kvpress, which keeps int(n * (1 - ratio)) tokens, keeps at least so
// many of n.
func removedShare(kept, n int) float64 {
	if kept >= n {
		return 0
	}
	// A quarter of a token more, so that rounding never loses one.
	return 1 - (float64(kept)+0.25)/float64(n)
}
