package eval

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/kvprofile/kvprofile/internal/stats"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// Tables and pages.
const (
	// lineWidth is the width in columns that tables and sentences for the terminal keep to.
	lineWidth = 100
	// testSeed is that of the tests whose results are shown.
	testSeed = 1
	// ranksByRight is the number of prompts that the full cache must get right for methods to be ranked by retention; with
	// fewer they are by the log-probability of the gold answers.
	ranksByRight = 30
	// budgetSlack is how far above its budget, as a factor, a run may be before it is marked and kept out of the ranking:
	// whole blocks and whole heads do not meet every budget exactly.
	budgetSlack = 1.05
)

// Budgets returns the budgets of the runs, falling; plans that were given, at 0, come last.
func (r *Result) Budgets() []float64 {
	var out []float64
	for _, x := range r.Runs {
		if !slices.Contains(out, x.Budget) {
			out = append(out, x.Budget)
		}
	}
	slices.SortFunc(out, func(a, b float64) int { return cmp.Compare(b, a) })
	return out
}

// Methods returns the names of the runs in the order in which they first come.
func (r *Result) Methods() []string {
	var out []string
	for _, x := range r.Runs {
		if !slices.Contains(out, x.Name) {
			out = append(out, x.Name)
		}
	}
	return out
}

// Ranking says which method is best at a budget.
type Ranking struct {
	Budget float64
	// ByRight says that methods are ranked by retention; else it is by the gold answers' mean log-probability.
	ByRight bool
	// Best is nil if no run stays within the budget. Of equal ones it is the one with the higher log-probability, then
	// with fewer bytes, then the first.
	Best *Run
	// Close are the runs that are not significantly worse than the best, Behind those that are: right on fewer prompts, or
	// with less probable gold answers, by one-sided paired tests at 95 % that are corrected for their number (Holm). Over
	// are runs that keep more than their budget. All are in the result's order.
	Close, Behind, Over []*Run
}

// Rank ranks the runs at a budget.
func (r *Result) Rank(budget float64) (Ranking, error) {
	k := Ranking{Budget: budget}
	var within []*Run
	for i := range r.Runs {
		x := &r.Runs[i]
		switch {
		case x.Budget != budget:
		case r.over(x):
			k.Over = append(k.Over, x)
		default:
			within = append(within, x)
		}
	}
	if len(within) == 0 || len(r.Full.Outcomes) == 0 {
		return k, nil
	}
	sums := map[*Run]Summary{}
	for _, x := range within {
		sums[x] = r.Overall(x)
	}
	k.ByRight = sums[within[0]].M >= ranksByRight
	k.Best = slices.MinFunc(within, func(a, b *Run) int {
		x, y := sums[a], sums[b]
		right := 0
		if k.ByRight {
			right = cmp.Compare(y.K, x.K)
		}
		return cmp.Or(right, cmp.Compare(y.LogProb, x.LogProb), cmp.Compare(x.Bytes, y.Bytes))
	})
	var others []*Run
	var p []float64
	for _, x := range within {
		if x == k.Best {
			continue
		}
		c, err := Compare(x, k.Best, testSeed)
		if err != nil {
			return k, err
		}
		others, p = append(others, x), append(p, c.RightFewer, c.UnlikelierGold)
	}
	p = Holm(p)
	for i, x := range others {
		if min(p[2*i], p[2*i+1]) < stats.Alpha {
			k.Behind = append(k.Behind, x)
		} else {
			k.Close = append(k.Close, x)
		}
	}
	return k, nil
}

// over says that a run keeps more than was asked for.
func (r *Result) over(x *Run) bool {
	kept, ok := r.kept(x)
	return ok && x.Budget > 0 && kept > x.Budget*budgetSlack
}

// kept is the share of bytes that a run keeps, of the prompts, or else of the texts.
func (r *Result) kept(x *Run) (float64, bool) {
	if s := r.Overall(x); s.N > 0 {
		return s.Kept, true
	}
	s, ok := x.SummariseTexts()
	return s.Kept, ok
}

// PlanTable shows what one plan does, task by task, beside the full cache.
func (r *Result) PlanTable(w io.Writer, x *Run) error {
	p := &printer{w: w}
	tasks := r.Summarise(x, ByTask)
	if len(tasks) > 0 {
		t := ui.Table{Header: []string{"task", "prompts", "full", "plan", "retention", "at least", "log-prob", "loss", "rank", "kept"}}
		add := func(name string, s Summary) {
			t.Add(name, s.N, s.M, s.Right, shareOr(s.Retention), shareOr(s.Lower95), decimal(s.LogProb), decimal(s.Loss()), fmt.Sprintf("%.1f", s.Rank), share(s.Kept))
		}
		for _, s := range tasks {
			add(shorten(s.Task), s)
		}
		if len(tasks) > 1 {
			add("all", r.Overall(x))
		}
		p.table(t)
		r.grids(p, x)
		if err := r.planNotes(p, x); err != nil {
			return err
		}
	}
	if s, ok := x.SummariseTexts(); ok {
		if len(tasks) > 0 {
			p.printf("\n")
		}
		p.sentence("text: perplexity %s, with the full cache %s; KL(full || plan) %s nats a token; over %d tokens of %d texts, with %s %% of the bytes",
			perplexity(s.Perplexity), perplexity(s.FullPerplexity), decimal(s.KL), s.Tokens, s.Texts, share(s.Kept))
	}
	return p.err
}

// grids shows k of m by length and depth, for tasks that lie on a grid.
func (r *Result) grids(p *printer, x *Run) {
	cells := r.Summarise(x, ByCell)
	for _, task := range r.Full.Tasks() {
		var lengths []int
		var depths []float64
		at := map[string]Summary{}
		key := func(n int, d float64) string { return fmt.Sprint(n, " ", d) }
		for _, s := range cells {
			if s.Task != task {
				continue
			}
			if !slices.Contains(lengths, s.Length) {
				lengths = append(lengths, s.Length)
			}
			if !slices.Contains(depths, s.Depth) {
				depths = append(depths, s.Depth)
			}
			at[key(s.Length, s.Depth)] = s
		}
		// Depths that were drawn at random make no grid.
		if len(depths) < 2 || len(depths) > 11 {
			continue
		}
		slices.Sort(depths)
		t := ui.Table{Header: []string{shorten(task)}}
		for _, d := range depths {
			t.Header = append(t.Header, fmt.Sprintf("%.0f %%", 100*d))
		}
		for _, n := range lengths {
			row := []string{ui.Tokens(n)}
			for _, d := range depths {
				s, ok := at[key(n, d)]
				cell := "-"
				if ok {
					cell = fmt.Sprintf("%d/%d", s.K, s.M)
				}
				row = append(row, cell)
			}
			t.Rows = append(t.Rows, row)
		}
		p.printf("\n")
		p.table(t)
	}
}

func (r *Result) planNotes(p *printer, x *Run) error {
	s := r.Overall(x)
	p.printf("\n")
	p.sentence("full, plan: prompts that are right with the full cache, with the plan. retention: of those that the full cache gets right, the share that the plan gets right too, in %%;" +
		" at least: its one-sided 95 %% lower bound. log-prob: of the right answer with the plan, nats a token; loss: what the full cache has more. kept: %% of the full cache's bytes.")
	switch {
	case s.M == 0:
		p.sentence("the full cache gets none of %d prompts right: there is no retention to measure", s.N)
	case s.M < LeastTrials(0.95):
		p.sentence("the full cache gets %d prompts right; to show a retention of 95 %% takes %d, without a failure", s.M, LeastTrials(0.95))
	}
	c, err := Compare(x, &r.Full, testSeed)
	if err != nil {
		return err
	}
	change, by, pOfChange := "less", -c.Gain, c.UnlikelierGold
	if c.Gain > 0 {
		change, by, pOfChange = "more", c.Gain, c.LikelierGold
	}
	p.sentence("beside the full cache: %d prompts lost, %d gained (p %s for a loss); right answers %s probable by %s nats a token (p %s)",
		c.OnlyB, c.OnlyA, pValue(c.RightFewer), change, decimal(by), pValue(pOfChange))
	return nil
}

// ComparisonTable shows all methods at all budgets, and which are best.
func (r *Result) ComparisonTable(w io.Writer) error {
	p := &printer{w: w}
	budgets := r.Budgets()
	marked := false
	const perTable = 3
	if len(r.Full.Outcomes) > 0 {
		for part := range slices.Chunk(budgets, perTable) {
			t := ui.Table{Header: []string{"method"}}
			for _, b := range part {
				t.Header = append(t.Header, budgetName(b), "loss", "kept")
			}
			for _, name := range r.Methods() {
				row, over := r.overBudgets(name, part, "*")
				marked = marked || over
				t.Rows = append(t.Rows, append([]string{shorten(name)}, row...))
			}
			p.table(t)
			p.printf("\n")
		}
		full := r.Overall(&r.Full)
		p.sentence("at each budget: retention [95 %% lower bound] in %%, of the %d of %d prompts that the full cache gets right; loss of the right answers' log-probability, nats a token;"+
			" bytes kept, %% of the full cache's", full.M, full.N)
		if marked {
			p.sentence("* keeps more than the budget: not ranked")
		}
		p.printf("\n")
		for _, b := range budgets {
			if err := r.rankNote(p, b); err != nil {
				return err
			}
		}
	}
	r.textTable(p, budgets)
	return p.err
}

// overBudgets has three cells for each budget of a method: retention, loss and kept bytes, these with a mark where they
// are over the budget; marked says whether any are.
func (r *Result) overBudgets(name string, budgets []float64, mark string) (row []string, marked bool) {
	for _, b := range budgets {
		x := r.Find(name, b)
		if x == nil {
			row = append(row, "-", "-", "-")
			continue
		}
		s := r.Overall(x)
		kept := share(s.Kept)
		if r.over(x) {
			kept, marked = kept+mark, true
		}
		row = append(row, bounded(s), decimal(s.Loss()), kept)
	}
	return row, marked
}

func (r *Result) rankNote(p *printer, budget float64) error {
	k, err := r.Rank(budget)
	if err != nil {
		return err
	}
	if k.Best == nil {
		p.sentence("%s: no method stays within the budget", budgetName(budget))
		return nil
	}
	measure := "highest log-probability of the right answers"
	if k.ByRight {
		measure = "highest retention"
	}
	text := fmt.Sprintf("%s: best is %s (%s)", budgetName(budget), k.Best.Name, measure)
	switch {
	case len(k.Close) > 0:
		text += "; not significantly worse: " + names(k.Close)
	case len(k.Behind) > 0:
		text += "; all others are significantly worse"
	}
	p.sentence("%s", text)
	return nil
}

// textTable shows perplexity and KL of all methods at all budgets.
func (r *Result) textTable(p *printer, budgets []float64) {
	full, ok := r.Full.SummariseTexts()
	if !ok {
		return
	}
	if len(r.Full.Outcomes) > 0 {
		p.printf("\n")
	}
	for part := range slices.Chunk(budgets, 4) {
		t := ui.Table{Header: []string{"text"}}
		for _, b := range part {
			t.Header = append(t.Header, budgetName(b), "KL")
		}
		for _, name := range r.Methods() {
			row := []string{shorten(name)}
			for _, b := range part {
				cells := []string{"-", "-"}
				if x := r.Find(name, b); x != nil {
					s, _ := x.SummariseTexts()
					cells = []string{perplexity(s.Perplexity), decimal(s.KL)}
				}
				row = append(row, cells...)
			}
			t.Rows = append(t.Rows, row)
		}
		p.table(t)
		p.printf("\n")
	}
	p.sentence("at each budget: perplexity over %d tokens (%s with the full cache), and KL(full || plan), nats a token", full.Tokens, perplexity(full.FullPerplexity))
}

// printer remembers the first error.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) printf(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}

func (p *printer) table(t ui.Table) {
	if p.err == nil {
		p.err = t.Render(p.w)
	}
}

// sentence prints text in lines of at most lineWidth columns; further lines are indented.
func (p *printer) sentence(format string, args ...any) {
	line, sep := "", ""
	for _, word := range strings.Fields(fmt.Sprintf(format, args...)) {
		if line != "" && len([]rune(line))+1+len([]rune(word)) > lineWidth {
			p.printf("%s\n", line)
			line, sep = " ", " "
		}
		line += sep + word
		sep = " "
	}
	p.printf("%s\n", line)
}

// budgetName heads the columns of a budget.
func budgetName(b float64) string {
	if b == 0 {
		return "given plans"
	}
	return "at " + percent(b)
}

// share shows a share in percent with one decimal, cut off rather than rounded: only what is whole reads 100.0.
func share(v float64) string {
	return fmt.Sprintf("%.1f", math.Floor(1000*v+1e-9)/10)
}

func shareOr(v *float64) string {
	if v == nil {
		return "-"
	}
	return share(*v)
}

// bounded shows a retention with its bound.
func bounded(s Summary) string {
	if s.Retention == nil {
		return "-"
	}
	return fmt.Sprintf("%s [%s]", share(*s.Retention), share(*s.Lower95))
}

// decimal shows a number of nats with three digits after the point up to 10, fewer above, and without a sign for 0.
func decimal(v float64) string {
	digits := 3
	switch a := math.Abs(v); {
	case a >= 100:
		digits = 1
	case a >= 10:
		digits = 2
	}
	text := fmt.Sprintf("%.*f", digits, v)
	if strings.Trim(text, "-0.") == "" {
		return strings.TrimPrefix(text, "-")
	}
	return text
}

// perplexity shows three or more significant digits.
func perplexity(v float64) string {
	switch {
	case v >= 1e5:
		return fmt.Sprintf("%.2g", v)
	case v >= 1000:
		return fmt.Sprintf("%.0f", v)
	case v >= 100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// pValue shows a p-value with its sign.
func pValue(p float64) string {
	switch {
	case p < 0.001:
		return "< 0.001"
	case p < 0.1:
		return fmt.Sprintf("= %.3f", p)
	}
	return fmt.Sprintf("= %.2f", p)
}

func names(runs []*Run) string {
	var out []string
	for _, x := range runs {
		out = append(out, x.Name)
	}
	return strings.Join(out, ", ")
}
