package compile

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/plan"
)

// scoreStreamingLoss is what streaming would lose of a head's attention on the record.
const scoreStreamingLoss = "streaming_loss"

// littleAgreement is the rank correlation with the gates below which a plan carries a warning. Published gates agree
// with other scores at .46 to .56.
const littleAgreement = 0.3

// evidence says what the plan rests on, and warns.
func (c *compiler) evidence(r *Result, s state) error {
	p := r.Plan
	recipe := &plan.Recipe{Name: c.recipeName(), Budget: c.o.Budget, Recovery: c.o.Recovery, ContextTokens: c.context,
		Figures: map[string]float64{"kept_share": r.Kept, "mean_recovery": r.Mean, "least_recovery": r.Least, "threshold": c.o.Threshold,
			"frequent_ratio": c.in.FastGen.Options.FrequentRatio, "local_ratio": c.in.FastGen.Options.LocalRatio,
			"average_topk_tokens": float64(s.budget * c.o.BlockSize)}}
	f := c.family
	if s.retrieval > 0 {
		cut := c.prior.value[f.rank[s.retrieval-1]]
		if c.byGate() {
			recipe.GateThreshold = &cut
		} else {
			recipe.Figures["order_threshold"] = cut
		}
		recipe.TiedHeads = headRefs(c.prior.tied(f.rank, s.retrieval), p.Model.NKVHeads)
	}
	agreement, err := c.agreement(r)
	if err != nil {
		return err
	}
	p.Evidence = &plan.Evidence{Recipe: recipe, Agreement: agreement, Calibration: c.in.calibration(c.record)}
	if r.Met {
		recipe.Figures["request_met"] = 1
	} else {
		recipe.Figures["request_met"] = 0
	}
	p.Evidence.PlanSHA256 = p.Digest()
	c.warn(r)
	return nil
}

// byGate reports whether the gates order the heads.
func (c *compiler) byGate() bool { return c.o.Order == "" || c.o.Order == OrderGate }

// recipeName names the recipe by its order.
func (c *compiler) recipeName() string {
	if c.byGate() {
		return "gates-fastgen-pyramid"
	}
	return string(c.o.Order) + "-fastgen-pyramid"
}

// calibration names the data that plans come from; record is the record's digest.
func (in *Inputs) calibration(record string) *plan.Calibration {
	return &plan.Calibration{Datasets: in.Datasets, RecordSHA256: record, GatesSHA256: in.GatesSHA256, PoliciesSHA256: in.PoliciesSHA256, BudgetsSHA256: in.BudgetsSHA256}
}

// headRefs names heads that are numbered by layer and in it by KV head.
func headRefs(heads []int, kvHeads int) []plan.HeadRef {
	var out []plan.HeadRef
	for _, h := range heads {
		out = append(out, plan.HeadRef{Layer: h / kvHeads, KVHead: h % kvHeads})
	}
	return out
}

// agreement correlates the gates with all other scores of the heads.
func (c *compiler) agreement(r *Result) ([]plan.Agreement, error) {
	loss := distill.Score{Name: scoreStreamingLoss}
	for _, layer := range r.Streaming {
		row := make([]float64, len(layer))
		for k, v := range layer {
			row[k] = 1 - v
		}
		loss.Values = append(loss.Values, row)
	}
	scores := append([]distill.Score{{Name: distill.ScoreGate, Values: c.in.Gates.Values}}, c.in.Gates.Scores...)
	correlations, err := distill.Correlate(append(scores, loss), c.o.Seed)
	if err != nil {
		return nil, err
	}
	var out []plan.Agreement
	for _, x := range correlations {
		a := plan.Agreement{A: x.A, B: x.B, KVHeads: x.N}
		if x.Undefined == "" {
			a.Spearman, a.Low, a.High = &x.Rho, &x.Low, &x.High
		}
		out = append(out, a)
	}
	return out, nil
}

// warn appends what may make the plan worse than it looks, in full sentences.
func (c *compiler) warn(r *Result) {
	p := r.Plan
	add := func(format string, args ...any) { p.Warnings = append(p.Warnings, fmt.Sprintf(format, args...)) }
	if !r.Met {
		if c.o.Budget != 0 {
			add("The budget of %.4g cannot be met at %d tokens; the nearest plan keeps %.4g.", c.o.Budget, c.context, r.Kept)
		} else {
			add("A recovery of %.4g cannot be reached; the nearest plan reaches %.4g.", c.o.Recovery, r.Mean)
		}
	}
	recipe := p.Evidence.Recipe
	if n := len(recipe.TiedHeads); n > 0 {
		score, cut := "gate", recipe.Figures["order_threshold"]
		if recipe.GateThreshold != nil {
			cut = *recipe.GateThreshold
		} else {
			score = "score"
		}
		add("%d KV heads have the same %s of %.4g, and only some of them are kept in full: the order of layers and heads decided, not the scores.", n, score, cut)
	}
	low, high := math.Inf(1), math.Inf(-1)
	for _, layer := range c.in.Gates.Values {
		for _, g := range layer {
			low, high = min(low, g), max(high, g)
		}
	}
	if low > 0.5 || high < 0.5 {
		add("All gates lie between %.3g and %.3g, on one side of .5: the training was too short to part the heads.", low, high)
	}
	for _, a := range p.Evidence.Agreement {
		if a.A == distill.ScoreGate && a.Spearman != nil && *a.Spearman < littleAgreement {
			add("The gates agree little with the score %s (Spearman %.2f): do not trust them alone.", a.B, *a.Spearman)
		}
	}
	longest := c.recorded[len(c.recorded)-1]
	var beyond, past []int
	for _, t := range p.Totals {
		if t.PromptTokens > longest {
			beyond = append(beyond, t.PromptTokens)
		}
		if t.PromptTokens > p.Model.MaxPosition {
			past = append(past, t.PromptTokens)
		}
	}
	if len(beyond) > 0 {
		add("The scores come from at most %d tokens; what the plan keeps of longer texts (totals for %s) has not been measured.", longest, list(beyond))
	}
	if len(past) > 0 {
		add("The model was made for %d tokens; the totals for %s are beyond that.", p.Model.MaxPosition, list(past))
	}
	if len(c.recorded) > 1 && c.context < c.recorded[0] {
		add("The context of %d tokens is shorter than anything recorded (%d to %d tokens).", c.context, c.recorded[0], longest)
	}
}

// list writes lengths for a sentence.
func list(lengths []int) string {
	lengths = slices.Clone(lengths)
	text := ""
	for i, n := range lengths {
		switch {
		case i > 0 && i == len(lengths)-1:
			text += " and "
		case i > 0:
			text += ", "
		}
		text += fmt.Sprint(n)
	}
	return text
}
