package report

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/eval"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// Bootstrap intervals of losses: 95 %, by percentiles.
const (
	bootstrapDraws = 1000
	bootstrapSeed  = 1
)

// lossInterval is the 95 % percentile bootstrap interval over prompts of the mean loss of a run, paired with the full
// cache.
func lossInterval(r *eval.Result, x *eval.Run) (low, high float64) {
	loss := make([]float64, len(x.Outcomes))
	for i, o := range x.Outcomes {
		loss[i] = r.Full.Outcomes[i].LogProb - o.LogProb
	}
	g := rand.New(rand.NewPCG(bootstrapSeed, uint64(len(loss))))
	means := make([]float64, bootstrapDraws)
	for d := range means {
		for range loss {
			means[d] += loss[g.IntN(len(loss))]
		}
		means[d] /= float64(len(loss))
	}
	slices.Sort(means)
	return means[bootstrapDraws/40], means[bootstrapDraws-1-bootstrapDraws/40]
}

// isPlan says whether a run is of the folder's plan.
func (in *Inputs) isPlan(x *eval.Run) bool {
	return in.Plan != nil && x.PlanSHA256 != "" && x.PlanSHA256 == in.Plan.Digest()
}

// label names a run; the folder's plan is told apart.
func (in *Inputs) label(x *eval.Run) string {
	if in.isPlan(x) {
		return "this plan (" + clip(x.Label(), 30) + ")"
	}
	return clip(x.Label(), 40)
}

// onlyPlan says whether the runs of a name are of the folder's plan alone.
func (in *Inputs) onlyPlan(r *eval.Result, name string) bool {
	for i := range r.Runs {
		if x := &r.Runs[i]; x.Name == name && !in.isPlan(x) {
			return false
		}
	}
	return in.Plan != nil
}

// comparison collects what the diagrams of an evaluation show.
type comparison struct {
	retention, loss, kl []series
	table               table
}

// compare draws a line for each method over its budgets, and a point for each plan that was given.
func (in *Inputs) compare(r *eval.Result) comparison {
	c := comparison{table: table{Caption: "All prompts, by method and budget", Header: []string{"method", "kept", "right", "retention", "lower bound", "loss", "95 % interval"}}}
	full := r.Overall(&r.Full)
	texts := len(r.Full.Texts) > 0
	if texts {
		c.table.Header = append(c.table.Header, "perplexity", "KL")
	}
	row := func(name string, x *eval.Run) (s eval.Summary, low, high float64) {
		cells := []string{name, "-", "-", "-", "-", "-", "-"}
		low, high = math.NaN(), math.NaN()
		if full.N > 0 {
			s = r.Overall(x)
			low, high = lossInterval(r, x)
			cells = []string{name, percent(s.Kept), fmt.Sprintf("%d of %d", s.Right, s.N), "-", "-", fixed(s.Loss()), fixed(low) + " to " + fixed(high)}
			if s.Retention != nil {
				cells[3], cells[4] = percent(*s.Retention), percent(*s.Lower95)
			}
		}
		if t, ok := x.SummariseTexts(); ok {
			if full.N == 0 {
				cells[1] = percent(t.Kept)
			}
			cells = append(cells, fmt.Sprintf("%.4g", t.Perplexity), fixed(t.KL))
		}
		c.table.Rows = append(c.table.Rows, cells)
		return s, low, high
	}
	row("full cache", &r.Full)
	for i, name := range r.Methods() {
		retention := series{name: clip(name, 40), style: methodStyle(i), line: true, marks: true}
		if in.onlyPlan(r, name) {
			retention.name, retention.style, retention.star = "this plan", planStyle, true
		}
		loss, kl := retention, retention
		for _, budget := range r.Budgets() {
			x := r.Find(name, budget)
			if x == nil {
				continue
			}
			label := in.label(x)
			s, low, high := row(label, x)
			if s.N > 0 {
				hover := fmt.Sprintf("%s\nkeeps %s of the bytes\nright %d of %d, full cache %d\nloss %s nats per token, 95 %% interval %s to %s", label, percent(s.Kept), s.Right, s.N, s.M, fixed(s.Loss()), fixed(low), fixed(high))
				if s.Retention != nil {
					hover += fmt.Sprintf("\nretention %s, lower bound %s", percent(*s.Retention), percent(*s.Lower95))
					retention.points = append(retention.points, point{s.Kept, *s.Retention, *s.Lower95, *s.Retention, hover})
				}
				loss.points = append(loss.points, point{s.Kept, s.Loss(), low, high, hover})
			}
			if t, ok := x.SummariseTexts(); ok {
				kl.points = append(kl.points, at(t.Kept, t.KL, fmt.Sprintf("%s\nkeeps %s of the bytes\nKL %s nats per token\nperplexity %.4g, full cache %.4g", label, percent(t.Kept), fixed(t.KL), t.Perplexity, t.FullPerplexity)))
			}
		}
		for _, s := range []struct {
			to  *[]series
			add series
		}{{&c.retention, retention}, {&c.loss, loss}, {&c.kl, kl}} {
			if len(s.add.points) > 0 {
				*s.to = append(*s.to, s.add)
			}
		}
	}
	return c
}

// methodsFigures are retention, loss and KL against the kept bytes.
func methodsFigures(id string, c comparison) []Figure {
	var out []Figure
	build := func(name, title, unit string, all []series, y axis) {
		if len(all) == 0 {
			return
		}
		low := 1.0
		for _, s := range all {
			for _, p := range s.points {
				low = min(low, p.x)
			}
		}
		x := axis{title: "kept, % of the bytes", low: math.Pow(2, math.Floor(math.Log2(max(low, 1.0/1024))*2)/2), high: 1, transform: math.Log2, format: func(v float64) string { return fmt.Sprintf("%.3g", 100*v) }}
		if x.low > 0.5 {
			x.low = 0.5
		}
		for v := 1.0; v >= x.low*0.999; v /= 2 {
			x.ticks = append(x.ticks, v)
		}
		slices.Reverse(x.ticks)
		y.title = unit
		f := chart{id: id + "-" + name, title: title, label: fmt.Sprintf("%d methods.", len(all)), series: all, x: x, y: y}
		out = append(out, f.figure())
	}
	build("retention", "Retention against kept bytes", "retention, %", c.retention, axis{low: 0, high: 1, ticks: []float64{0, 0.2, 0.4, 0.6, 0.8, 1}, format: func(v float64) string { return fmt.Sprintf("%.0f", 100*v) }})
	build("loss", "Loss against kept bytes", "loss, nats per token (√ scale)", c.loss, lossAxis(c.loss))
	build("kl", "KL against kept bytes, running text", "KL, nats per token (√ scale)", c.kl, lossAxis(c.kl))
	return out
}

// lossAxis is a scale for losses, which differ by orders of magnitude: a square root's, with the sign of the loss.
func lossAxis(all []series) axis {
	low, high := 0.0, 0.01
	for _, s := range all {
		for _, p := range s.points {
			low, high = min(low, p.y), max(high, p.y)
			if !math.IsNaN(p.low) {
				low, high = min(low, p.low), max(high, p.high)
			}
		}
	}
	root := func(v float64) float64 { return math.Copysign(math.Sqrt(math.Abs(v)), v) }
	a := axis{low: low, high: high, transform: root, format: plain}
	for _, v := range []float64{0.01, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32} {
		if v <= high*1.02 {
			a.ticks = append(a.ticks, v)
		}
		if -v >= low*1.02 {
			a.ticks = append(a.ticks, -v)
		}
	}
	a.ticks = append(a.ticks, 0)
	slices.Sort(a.ticks)
	return a
}

// grid is a needle grid of one run, a figure for each task.
type grid struct {
	Label   string
	figures []Figure
}

// grids show by length and depth how many prompts are right, of the full cache and of every run: this plan's first.
func (in *Inputs) grids(id string, r *eval.Result) []grid {
	runs := []*eval.Run{&r.Full}
	for i := range r.Runs {
		if in.isPlan(&r.Runs[i]) {
			runs = append(runs, &r.Runs[i])
		}
	}
	for i := range r.Runs {
		if !in.isPlan(&r.Runs[i]) {
			runs = append(runs, &r.Runs[i])
		}
	}
	var out []grid
	for i, x := range runs {
		g := grid{Label: in.label(x)}
		if i == 0 {
			g.Label = "full cache"
		}
		title := g.Label
		if in.isPlan(x) {
			title = "this plan" // its name stands above
		}
		for j, task := range r.Full.Tasks() {
			f := gridFigure(task, title, r, x)
			f.ID = fmt.Sprintf("%s-grid-%d-%d-%s", id, i, j, slug(task))
			g.figures = append(g.figures, f)
		}
		out = append(out, g)
	}
	return out
}

// gridDepths is the largest number of depths that a grid has a row for; of more, each tenth has one.
const gridDepths = 11

// gridSum sums up the prompts of a cell.
type gridSum struct {
	n, right, fullRight  int
	logProb, fullLogProb float64
	bytes, fullBytes     int64
	shallowest, deepest  float64
	shortest, longest    int
}

func gridFigure(task, label string, r *eval.Result, x *eval.Run) Figure {
	var lengths []int
	var depths []float64
	for _, o := range x.Outcomes {
		if o.Task == task {
			lengths, depths = append(lengths, o.Length), append(depths, o.Depth)
		}
	}
	distinct := func(v []float64) []float64 { slices.Sort(v); return slices.Compact(v) }
	slices.Sort(lengths)
	lengths, depths = slices.Compact(lengths), distinct(depths)
	row := func(depth float64) float64 { return depth }
	if len(depths) > gridDepths {
		row = func(depth float64) float64 { return math.Min(math.Floor(depth*10), 9) / 10 }
		for i, d := range depths {
			depths[i] = row(d)
		}
		depths = distinct(depths)
	}
	sums := make([][]gridSum, len(depths))
	for i := range sums {
		sums[i] = make([]gridSum, len(lengths))
	}
	right, n := 0, 0
	for i, o := range x.Outcomes {
		if o.Task != task {
			continue
		}
		f := r.Full.Outcomes[i]
		s := &sums[slices.Index(depths, row(o.Depth))][slices.Index(lengths, o.Length)]
		if s.n == 0 {
			s.shallowest, s.deepest, s.shortest, s.longest = o.Depth, o.Depth, o.Prompt, o.Prompt
		}
		s.n++
		n++
		if o.Right {
			s.right++
			right++
		}
		if f.Right {
			s.fullRight++
		}
		s.logProb, s.fullLogProb = s.logProb+o.LogProb, s.fullLogProb+f.LogProb
		s.bytes, s.fullBytes = s.bytes+o.Bytes, s.fullBytes+o.FullBytes
		s.shallowest, s.deepest = min(s.shallowest, o.Depth), max(s.deepest, o.Depth)
		s.shortest, s.longest = min(s.shortest, o.Prompt), max(s.longest, o.Prompt)
	}
	h := heatMap{title: clip(task, 24) + ": " + label, label: fmt.Sprintf("%d of %d prompts are right.", right, n), rows: "depth, %", cols: "tokens of prompt",
		legend: scale(viridis, "0 %", "50 %", "100 % right"), cellHeight: min(max(240/float64(len(depths)), 12), 34), cellWidth: min(max(300/float64(len(lengths)), 14), 60)}
	for _, n := range lengths {
		h.colNames = append(h.colNames, ui.Tokens(n))
	}
	for i, d := range depths {
		h.rowNames = append(h.rowNames, plain(math.Round(1000*d)/10))
		var cells []heatCell
		for _, s := range sums[i] {
			if s.n == 0 {
				cells = append(cells, heatCell{})
				continue
			}
			k := float64(s.n)
			hover := fmt.Sprintf("%s, %s\nright %d of %d (full cache %d)\nlog-probability %s (full cache %s)\nkept %s of the bytes", span(float64(s.shortest), float64(s.longest), 1, " tokens"), "depth "+span(s.shallowest, s.deepest, 100, " %"),
				s.right, s.n, s.fullRight, fixed(s.logProb/k), fixed(s.fullLogProb/k), percent(float64(s.bytes)/float64(s.fullBytes)))
			cells = append(cells, filled(viridis, float64(s.right)/k, fmt.Sprintf("%.0f", 100*float64(s.right)/k), hover))
		}
		h.cells = append(h.cells, cells)
	}
	return h.figure()
}

// span shows the ends of a range in a unit, or one number where they are equal.
func span(low, high, factor float64, unit string) string {
	a, b := plain(math.Round(low*factor*10)/10), plain(math.Round(high*factor*10)/10)
	if a == b {
		return a + unit
	}
	return a + " to " + b + unit
}

// purpose says what the prompts of an evaluation were for.
func purpose(p datasets.Purpose) string {
	switch p {
	case datasets.Certification:
		return "The prompts are for certification: nothing was fitted or chosen with them."
	case datasets.Search:
		return "The prompts are those that plans are searched with: the figures of plans that were found by search flatter them."
	}
	return "The prompts are those that methods are calibrated with: the figures flatter them."
}
