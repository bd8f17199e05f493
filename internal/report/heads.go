package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/pyramid"
)

// numbers names rows or columns by their index.
func numbers(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprint(i)
	}
	return out
}

// where marks the cell of a KV head, so that a click shows its attention.
func where(layer, kvHead int) string {
	return fmt.Sprintf(`data-layer="%d" data-kv="%d"`, layer, kvHead)
}

// fixed shows a number with three digits after the point.
func fixed(v float64) string { return fmt.Sprintf("%.3f", v) }

// percent shows a share in percent with one digit after the point.
func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }

// gatesFigures are the map of the gates, and of the scores that they come with.
func (in *Inputs) gatesFigures() []Figure {
	g := in.Gates
	scores := append([]distill.Score{{Name: distill.ScoreGate, Values: g.Values}}, g.Scores...)
	var out []Figure
	for _, s := range scores {
		low, high := 0.0, 1.0
		if s.Name != distill.ScoreGate {
			low, high = s.Values[0][0], s.Values[0][0]
			for _, row := range s.Values {
				low, high = min(low, slices.Min(row)), max(high, slices.Max(row))
			}
		}
		h := heatMap{id: "score-" + slug(s.Name), title: scoreTitle(s.Name), rows: "layer", cols: "KV head", rowNames: numbers(len(s.Values)), colNames: numbers(len(s.Values[0])),
			label:  fmt.Sprintf("A value for each layer and KV head, from %s to %s.", fixed(low), fixed(high)),
			legend: scale(viridis, fixed(low), fixed((low+high)/2), fixed(high))}
		if s.Name == distill.ScoreGate {
			h.id, h.legend = "gates", scale(viridis, "0 streams", "0.5", "1 needs all")
		}
		for l, row := range s.Values {
			var cells []heatCell
			for k, v := range row {
				var hover strings.Builder
				fmt.Fprintf(&hover, "layer %d, KV head %d\n%s %s", l, k, scoreName(s.Name), fixed(v))
				if s.Name == distill.ScoreGate {
					for _, other := range g.Scores {
						fmt.Fprintf(&hover, "\n%s %s", scoreName(other.Name), fixed(other.Values[l][k]))
					}
					if in.Plan != nil {
						fmt.Fprintf(&hover, "\nplan: %s", clip(in.Plan.Layers[l][k], 40))
					}
				}
				share := 0.0
				if high > low {
					share = (v - low) / (high - low)
				}
				c := filled(viridis, share, "", hover.String())
				c.extra = where(l, k)
				cells = append(cells, c)
			}
			h.cells = append(h.cells, cells)
		}
		out = append(out, h.figure())
	}
	return out
}

func scoreName(name string) string { return strings.ReplaceAll(clip(name, 40), "_", " ") }

func scoreTitle(name string) string {
	switch name {
	case distill.ScoreGate:
		return "Gates"
	case distill.ScoreDataLight:
		return "Data-light score"
	case distill.ScoreNeedleMass:
		return "Answers' attention to needles"
	case distill.ScoreCopy:
		return "Copy score"
	}
	return scoreName(name)
}

// curveFigure shows the training of the gates.
func (in *Inputs) curveFigure() (Figure, bool) {
	curve := in.Gates.Curve
	if len(curve) < 2 {
		return Figure{}, false
	}
	heads := float64(len(in.Gates.Values) * len(in.Gates.Values[0]))
	// No more points than pixels.
	every := max(1, len(curve)/120)
	mean := series{name: "mean gate", style: 0, line: true}
	open := series{name: "share of gates ≥ 0.5", style: 1, line: true}
	for i, p := range curve {
		if i%every != 0 && i != len(curve)-1 {
			continue
		}
		hover := fmt.Sprintf("step %d: mean gate %s, %d of %.0f gates ≥ 0.5\nloss %.3g, regularisation %.3g", p.Step, fixed(p.Mean), p.Open, heads, p.Loss, p.Regularisation)
		mean.points = append(mean.points, at(float64(p.Step), p.Mean, hover))
		open.points = append(open.points, at(float64(p.Step), float64(p.Open)/heads, hover))
	}
	last := curve[len(curve)-1]
	c := chart{id: "gates-training", title: "Training of the gates", label: fmt.Sprintf("After %d steps the mean gate is %s and %d of %.0f are at least 0.5.", last.Step+1, fixed(last.Mean), last.Open, heads),
		x:      axis{title: "step", low: 0, high: float64(max(last.Step, 1)), ticks: niceTicks(0, float64(max(last.Step, 1)), 5), format: plain},
		y:      axis{title: "gate", low: 0, high: 1, ticks: []float64{0, 0.25, 0.5, 0.75, 1}, format: plain},
		series: []series{mean, open}}
	c.x.high = c.x.ticks[len(c.x.ticks)-1]
	return c.figure(), true
}

// plain shows a number without trailing zeros.
func plain(v float64) string { return fmt.Sprintf("%.4g", v) }

// kindStyle is the colour, the letter and the name of a kind of policy.
type kindStyle struct {
	kind         plan.Kind
	fill, letter string
	name         string
}

// kinds are in Okabe and Ito's colours; letters tell them apart without colour.
func kinds() []kindStyle {
	return []kindStyle{
		{plan.Full{}.Kind(), "#0072b2", "F", "full"},
		{plan.Streaming{}.Kind(), "#e69f00", "S", "streaming"},
		{plan.TopK{}.Kind(), "#56b4e9", "K", "top-k"},
		{plan.FastGen{}.Kind(), "#009e73", "G", "FastGen"},
		{plan.H2O{}.Kind(), "#cc79a7", "H", "H2O"},
	}
}

func styleOf(k plan.Kind) kindStyle {
	i := slices.IndexFunc(kinds(), func(s kindStyle) bool { return s.kind == k })
	if i < 0 {
		return kindStyle{kind: k, fill: "#999999", letter: "?", name: string(k)}
	}
	return kinds()[i]
}

// context is the length in tokens that the plan's budget is about, or else that of its first total.
func (in *Inputs) context() int {
	p := in.Plan
	if e := p.Evidence; e != nil && e.Recipe != nil && e.Recipe.ContextTokens > 0 {
		return e.Recipe.ContextTokens
	}
	return p.Totals[0].PromptTokens
}

// describe says what a policy keeps.
func describe(q plan.Policy) string {
	switch q := q.(type) {
	case plan.Full:
		return "keeps everything"
	case plan.Streaming:
		return fmt.Sprintf("keeps the first %d and the last %d tokens", q.SinkTokens, q.RecentTokens)
	case plan.TopK:
		if q.BudgetTokens > 0 {
			return fmt.Sprintf("keeps %d tokens that the last %d queries attend to", q.BudgetTokens, q.ObservationWindow)
		}
		return fmt.Sprintf("keeps %s of the prompt that the last %d queries attend to", percent(q.BudgetRatio), q.ObservationWindow)
	}
	return "is of kind " + string(q.Kind())
}

// policiesFigures are the map of the policies' kinds and that of what is kept.
func (in *Inputs) policiesFigures() ([]Figure, error) {
	p, n := in.Plan, in.context()
	var used []kindStyle
	count := map[plan.Kind]int{}
	kind := heatMap{id: "policies", title: "Policies", rows: "layer", cols: "KV head", rowNames: numbers(p.Model.NLayers), colNames: numbers(p.Model.NKVHeads)}
	kept := kind
	kept.id, kept.title = "kept-bytes", fmt.Sprintf("Kept bytes at %s tokens", ui.Tokens(n))
	kept.legend = scale(viridis, "0 %", "50 %", "100 %")
	for l, row := range p.Layers {
		var a, b []heatCell
		for k, name := range row {
			q, err := p.PolicyOf(l, k)
			if err != nil {
				return nil, err
			}
			u, err := p.HeadUsage(l, k, plan.Request{PromptTokens: n})
			if err != nil {
				return nil, err
			}
			s := styleOf(q.Kind())
			count[s.kind]++
			most := ""
			if u.WorstCase {
				most = "at most "
			}
			share := float64(u.Bytes) / float64(max(u.FullBytes, 1))
			hover := fmt.Sprintf("layer %d, KV head %d: %s\n%s\nat %s tokens: %s%d tokens, %s of %s (%s)", l, k, clip(name, 40), describe(q), ui.Tokens(n), most, u.Tokens, ui.Bytes(u.Bytes), ui.Bytes(u.FullBytes), percent(share))
			if in.Gates != nil {
				hover += fmt.Sprintf("\ngate %s", fixed(in.Gates.Values[l][k]))
			}
			c := rgbOf(s.fill)
			a = append(a, heatCell{fill: s.fill, mark: s.letter, ink: c.ink(), hover: hover, extra: where(l, k)})
			x := filled(viridis, share, "", hover)
			x.extra = where(l, k)
			b = append(b, x)
		}
		kind.cells, kept.cells = append(kind.cells, a), append(kept.cells, b)
	}
	var says []string
	for _, s := range kinds() {
		if count[s.kind] > 0 {
			used = append(used, s)
			says = append(says, fmt.Sprintf("%d KV heads %s", count[s.kind], s.name))
		}
	}
	kind.label = strings.Join(says, ", ") + "."
	total := p.Usage(plan.Request{PromptTokens: n})
	kept.label = fmt.Sprintf("All heads together keep %s of %s.", ui.Bytes(total.Bytes), ui.Bytes(total.FullBytes))
	kind.legend = func(d *drawing, x, y, width float64) float64 {
		begin, left := y, x
		for _, s := range used {
			text := fmt.Sprintf("%s %s (%d)", s.letter, s.name, count[s.kind])
			need := 14 + charWidth*float64(len(text)) + 8
			if x > left && x+need > left+width+8 {
				x, y = left, y+15
			}
			d.rect(x, y, 10, 10, fmt.Sprintf(`fill="%s"`, s.fill), "")
			d.text(x+13, y+9, "start", text)
			x += need
		}
		return y - begin + 18
	}
	return []Figure{kind.figure(), kept.figure()}, nil
}

// rgbOf reads "#rrggbb".
func rgbOf(s string) (c rgb) {
	for i := range c {
		var b int
		fmt.Sscanf(s[1+2*i:3+2*i], "%02x", &b)
		c[i] = float64(b)
	}
	return c
}

// budgetsFigures are the layers' budgets beside the arithmetic pyramid of the same total, and what they follow from.
func (in *Inputs) budgetsFigures() ([]Figure, error) {
	a := in.Pyramid
	budgets, err := in.budgetsOf(a)
	if err != nil {
		return nil, err
	}
	need := series{name: "keys", style: 2, bars: true}
	for l, v := range a.Measurement.Keys {
		need.points = append(need.points, at(float64(l), v, fmt.Sprintf("layer %d\n%.1f keys hold %s of the attention\nvariation %.3g, entropy %.3g", l, v, percent(a.Options.Mass), a.Measurement.Variation[l], a.Measurement.Entropy[l])))
	}
	c := layerChart("layer-needs", fmt.Sprintf("Keys that hold %s of the attention", percent(a.Options.Mass)), "keys, mean of heads and rows", need)
	c.label = fmt.Sprintf("From %.0f to %.0f keys.", slices.Min(a.Measurement.Keys), slices.Max(a.Measurement.Keys))
	return []Figure{budgets, c.figure()}, nil
}

func (in *Inputs) budgetsOf(a *pyramid.Artefact) (Figure, error) {
	q := a.Request
	q.Mode, q.Weights, q.Total = pyramid.Arithmetic, nil, a.Total()
	arithmetic, err := pyramid.Allocate(q)
	if err != nil {
		return Figure{}, err
	}
	bars := series{name: string(a.Request.Mode), style: 4, bars: true}
	line := series{name: "arithmetic, same total", style: 1, line: true, marks: len(a.Budgets) <= 48}
	for l, b := range a.Budgets {
		hover := fmt.Sprintf("layer %d\n%s %d tokens\narithmetic %d tokens", l, a.Request.Mode, b, arithmetic.Budgets[l])
		hover += fmt.Sprintf("\n%.0f keys hold %s of the attention", a.Measurement.Keys[l], percent(a.Options.Mass))
		bars.points = append(bars.points, at(float64(l), float64(b), hover))
		line.points = append(line.points, at(float64(l), float64(arithmetic.Budgets[l]), hover))
	}
	c := layerChart("layer-budgets", fmt.Sprintf("Layer budgets for %s tokens", ui.Tokens(a.Request.Length)), "tokens of a KV head", bars, line)
	c.label = fmt.Sprintf("Budgets of %d layers by %s, from %d to %d tokens, beside PyramidKV's arithmetic schedule.", len(a.Budgets), a.Request.Mode, slices.Min(a.Budgets), slices.Max(a.Budgets))
	return c.figure(), nil
}

// keptByLayer shows the plan's mean tokens of a KV head by layer, and the arithmetic pyramid of the same total.
func (in *Inputs) keptByLayer() (Figure, error) {
	p, n := in.Plan, in.context()
	kept := make([]float64, p.Model.NLayers)
	total := 0.0
	for l := range kept {
		for k := range p.Model.NKVHeads {
			u, err := p.HeadUsage(l, k, plan.Request{PromptTokens: n})
			if err != nil {
				return Figure{}, err
			}
			kept[l] += float64(u.Tokens) / float64(p.Model.NKVHeads)
		}
		total += kept[l]
	}
	q := pyramid.Request{Mode: pyramid.Arithmetic, Layers: len(kept), Length: n, Total: int(total)}
	if in.Pyramid != nil {
		q.Window, q.Beta = in.Pyramid.Request.Window, in.Pyramid.Request.Beta
	}
	for l := range kept {
		q.Limits = append(q.Limits, p.Model.Window(l))
	}
	bars := series{name: "plan, mean of the KV heads", style: 4, bars: true}
	line := series{name: "arithmetic, same total", style: 1, line: true, marks: len(kept) <= 48}
	arithmetic, err := pyramid.Allocate(q)
	for l, v := range kept {
		hover := fmt.Sprintf("layer %d\nplan %.0f tokens of a KV head on average", l, v)
		if err == nil {
			hover += fmt.Sprintf("\narithmetic %d tokens", arithmetic.Budgets[l])
			line.points = append(line.points, at(float64(l), float64(arithmetic.Budgets[l]), hover))
		}
		bars.points = append(bars.points, at(float64(l), v, hover))
	}
	all := []series{bars}
	if err == nil { // no schedule divides a total below a token a layer
		all = append(all, line)
	}
	c := layerChart("plan-by-layer", fmt.Sprintf("Kept by layer at %s tokens", ui.Tokens(n)), "tokens of a KV head", all...)
	c.label = fmt.Sprintf("Mean tokens that a KV head keeps, by layer: from %.0f to %.0f.", slices.Min(kept), slices.Max(kept))
	return c.figure(), nil
}

// layerChart is a diagram over layers.
func layerChart(id, title, unit string, all ...series) chart {
	high, layers := 1.0, 1
	for _, s := range all {
		layers = max(layers, len(s.points))
		for _, p := range s.points {
			high = max(high, p.y)
		}
	}
	ticks := niceTicks(0, high, 5)
	return chart{id: id, title: title, series: all, barWidth: 0.8,
		x: axis{title: "layer", low: -0.6, high: float64(layers) - 0.4, ticks: whole(niceTicks(0, float64(layers-1), 8), layers-1), format: plain},
		y: axis{title: unit, low: 0, high: ticks[len(ticks)-1], ticks: ticks, format: plain}}
}

// whole keeps the whole numbers up to the last.
func whole(ticks []float64, last int) []float64 {
	return slices.DeleteFunc(ticks, func(v float64) bool { return v != float64(int(v)) || v > float64(last) })
}

// agreement is the rank correlation of two scores.
type agreement struct {
	a, b           string
	n              int
	rho, low, high float64
	defined, band  bool
	why            string
}

// agreements are the plan's, which has all scores, or else those that stand with the gates.
func (in *Inputs) agreements() []agreement {
	var out []agreement
	if in.Plan != nil && in.Plan.Evidence != nil {
		for _, x := range in.Plan.Evidence.Agreement {
			v := agreement{a: x.A, b: x.B, n: x.KVHeads, why: "one of them is the same everywhere"}
			if x.Spearman != nil {
				v.rho, v.defined = *x.Spearman, true
			}
			if x.Low != nil && x.High != nil {
				v.low, v.high, v.band = *x.Low, *x.High, true
			}
			out = append(out, v)
		}
	}
	if len(out) == 0 && in.Gates != nil {
		for _, x := range in.Gates.Agreement {
			out = append(out, agreement{a: x.A, b: x.B, n: x.N, rho: x.Rho, low: x.Low, high: x.High, defined: x.Undefined == "", band: x.Undefined == "", why: x.Undefined})
		}
	}
	return out
}

// agreementFigure is the matrix of the rank correlations.
func agreementFigure(all []agreement) Figure {
	var names []string
	for _, x := range all {
		for _, n := range []string{x.a, x.b} {
			if !slices.Contains(names, n) {
				names = append(names, n)
			}
		}
	}
	h := heatMap{id: "agreement", title: "Rank correlation of the scores", cellHeight: 30, cellWidth: 42,
		label: fmt.Sprintf("%d pairs of scores.", len(all)), legend: scale(diverging, "-1", "0", "1")}
	cells := make([][]heatCell, len(names))
	for i, n := range names {
		h.rowNames, h.colNames = append(h.rowNames, fmt.Sprintf("%s %d", scoreName(clip(n, 16)), i+1)), append(h.colNames, fmt.Sprint(i+1))
		cells[i] = make([]heatCell, len(names))
	}
	for _, x := range all {
		i, j := slices.Index(names, x.a), slices.Index(names, x.b)
		hover := fmt.Sprintf("%s and %s, %d KV heads\n", scoreName(x.a), scoreName(x.b), x.n)
		cell := heatCell{fill: "#bbbbbb", mark: "-", ink: "on-light", hover: hover + "no correlation: " + cmp.Or(x.why, "undefined")}
		if x.defined {
			hover += fmt.Sprintf("Spearman %s", fixed(x.rho))
			if x.band {
				hover += fmt.Sprintf(", 95 %% interval %s to %s", fixed(x.low), fixed(x.high))
			}
			cell = filled(diverging, (x.rho+1)/2, fmt.Sprintf("%.2f", x.rho), hover)
		}
		cells[i][j], cells[j][i] = cell, cell
	}
	h.cells = cells
	return h.figure()
}

// slug makes a name fit for files: lower-case letters, digits and single dashes.
func slug(s string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(s) {
		switch {
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9':
			b.WriteRune(r)
		case b.Len() > 0 && !strings.HasSuffix(b.String(), "-"):
			b.WriteByte('-')
		}
	}
	return cmp.Or(strings.Trim(clip(b.String(), 48), "-…"), "x")
}
