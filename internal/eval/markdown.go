package eval

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/stats"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// pageMark is the first line of every page that WriteMarkdown makes. It replaces no other files.
const pageMark = "<!-- made by kvprofile eval: only what stands between comment:begin and comment:end is kept -->"

// WriteMarkdown writes a page about results for people, and beside it a figure for each that the page shows. The same
// results give the same bytes. Where path is such a page already, its comments, the text between a line
//
//	<!-- comment:begin NAME -->
//
// and the same with "end", are kept: in their place, or at the end if there is no place of that name any more. A file
// that is no such page is a *run.FormatError, and so are comments that do not pair; it is then left as it is.
func WriteMarkdown(path string, results ...*Result) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if len(bytes.TrimSpace(old)) > 0 && !strings.HasPrefix(string(old), pageMark) {
		return &run.FormatError{Path: path, Reason: "no page of results, so it is not replaced; name another file"}
	}
	kept, err := parseComments(string(old))
	if err != nil {
		return &run.FormatError{Path: path, Reason: "comments", Err: err}
	}
	base := strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
	page, figures, err := markdown(base, results, kept)
	if err != nil {
		return err
	}
	for _, f := range figures {
		if err := run.WriteAtomic(filepath.Join(filepath.Dir(path), f.name), f.write); err != nil {
			return err
		}
	}
	return run.WriteAtomic(path, func(w io.Writer) error {
		_, err := io.WriteString(w, page)
		return err
	})
}

// figureFile is a figure beside a page.
type figureFile struct {
	name string
	svg  string
}

func (f figureFile) write(w io.Writer) error {
	_, err := io.WriteString(w, f.svg)
	return err
}

// comments are the texts that people added to a page.
type comments struct {
	names []string // in the order of the page
	texts map[string]string
	used  map[string]bool
}

var commentMark = regexp.MustCompile(`^<!-- comment:(begin|end) (\S+) -->\s*$`)

// parseComments reads the comments of a page.
func parseComments(page string) (*comments, error) {
	c := &comments{texts: map[string]string{}, used: map[string]bool{}}
	open, number := "", 0
	var text strings.Builder
	for line := range strings.Lines(page) {
		number++
		m := commentMark.FindStringSubmatch(line)
		switch {
		case m == nil:
			if open != "" {
				text.WriteString(line)
			}
		case m[1] == "begin" && open != "":
			return nil, fmt.Errorf("line %d: comment %s begins within comment %s", number, m[2], open)
		case m[1] == "begin":
			if _, ok := c.texts[m[2]]; ok {
				return nil, fmt.Errorf("line %d: a second comment %s", number, m[2])
			}
			open = m[2]
			text.Reset()
		case m[2] != open:
			return nil, fmt.Errorf("line %d: comment %s ends, but has not begun", number, m[2])
		default:
			c.names, c.texts[open] = append(c.names, open), text.String()
			open = ""
		}
	}
	if open != "" {
		return nil, fmt.Errorf("comment %s does not end", open)
	}
	return c, nil
}

// block writes the place of a comment with what stands in it.
func (c *comments) block(name string) string {
	c.used[name] = true
	return fmt.Sprintf("<!-- comment:begin %s -->\n%s<!-- comment:end %s -->\n\n", name, c.texts[name], name)
}

// rest writes the comments that have no place.
func (c *comments) rest() string {
	out := ""
	for _, name := range slices.Clone(c.names) {
		if !c.used[name] && strings.TrimSpace(c.texts[name]) != "" {
			out += c.block(name)
		}
	}
	if out != "" {
		out = "## Further comments\n\n" + out
	}
	return out
}

// page collects a page.
type page struct {
	strings.Builder
	comments *comments
}

func (p *page) printf(format string, args ...any) { fmt.Fprintf(&p.Builder, format, args...) }

// comment makes a place for a comment.
func (p *page) comment(name string) { p.WriteString(p.comments.block(name)) }

// table writes a table, the first left columns aligned left, the others right. Cells are Markdown.
func (p *page) table(header []string, left int, rows [][]string) {
	line := func(cells []string) { p.printf("| %s |\n", strings.Join(cells, " | ")) }
	line(header)
	rule := make([]string, len(header))
	for i := range rule {
		if rule[i] = "---:"; i < left {
			rule[i] = "---"
		}
	}
	line(rule)
	for _, r := range rows {
		line(r)
	}
	p.printf("\n")
}

// markdown makes the page and its figures, whose names begin with base.
func markdown(base string, results []*Result, kept *comments) (string, []figureFile, error) {
	p := &page{comments: kept}
	p.printf("%s\n\n# Results\n\n", pageMark)
	p.printf(`What is left of a model when its KV cache is made smaller: every method runs on the same prompts and texts, in a cache that
really shrinks, beside the full cache.

- **kept**: bytes of the cache in whole blocks, in %% of the full cache's.
- **retention**: of the prompts that the full cache gets right, the share that the method gets right too; in brackets its one-sided
  95 %% lower bound (Clopper-Pearson). A prompt is right if all answers that it asks for occur in what is generated.
- **loss**: what the right answer's log-probability loses against the full cache, in nats per token. It tells methods apart where
  a small model gets little right.
- **KL**: Kullback-Leibler divergence of the predictions from the full cache's, in nats per token.
- Methods are compared prompt by prompt: right answers by McNemar's exact test, log-probabilities by a permutation test of signs,
  both corrected for the number of tests at a budget (Holm), at 5 %%. What is not listed as different may still be: few prompts
  show large differences only.

`)
	p.comment("introduction")
	var figures []figureFile
	slugs := map[string]int{}
	for _, r := range results {
		slug := slugOf(r.Model.Name)
		title := escape(r.Model.Name)
		switch r.Question {
		case "after":
			slug += "-after"
			title += ": the question comes after eviction"
		case "in-prompt":
			title += ": the question is in the prompt"
		}
		if slugs[slug]++; slugs[slug] > 1 {
			slug += fmt.Sprintf("-%d", slugs[slug])
		}
		p.printf("## %s\n\n", title)
		f, err := r.section(p, base, slug)
		if err != nil {
			return "", nil, err
		}
		figures = append(figures, f...)
	}
	p.WriteString(kept.rest())
	return strings.TrimRight(p.String(), "\n") + "\n", figures, nil
}

// section writes all about one result.
func (r *Result) section(p *page, base, slug string) ([]figureFile, error) {
	m := r.Model
	p.printf("%s, %d layers, %d query heads and %d KV heads of %d; on %s, by %s %s.", escape(m.Architecture), m.NLayers, m.NHeads, m.NKVHeads, m.HeadDim,
		escape(cmp.Or(r.Device, "an unnamed device")), escape(cmp.Or(r.Tool.Name, "kvprofile")), escape(cmp.Or(r.Tool.Version, "of unknown version")))
	switch r.Purpose {
	case datasets.Certification:
		p.printf(" The prompts are for certification: nothing was fitted or chosen with them.\n\n")
	case datasets.Search:
		p.printf(" The prompts are those that plans are searched with, so that the figures of plans that were found by search flatter them.\n\n")
	default:
		p.printf(" The prompts are those that methods are calibrated with, so that the figures flatter them.\n\n")
	}
	r.dataTable(p)
	var figures []figureFile
	if f := (figureFile{name: base + "-" + slug + ".svg", svg: r.figure()}); f.svg != "" {
		p.printf("![Retention and loss against kept bytes, a line for each method](%s)\n\n", f.name)
		figures = append(figures, f)
	}
	budgets := r.Budgets()
	if len(r.Full.Outcomes) > 0 && len(r.Runs) > 0 {
		r.bytesTable(p, budgets)
		p.comment(slug + "-bytes")
		for _, b := range budgets {
			if err := r.budgetSection(p, b); err != nil {
				return nil, err
			}
			p.comment(slug + "-" + budgetSlug(b))
		}
	}
	if _, ok := r.Full.SummariseTexts(); ok && len(r.Runs) > 0 {
		r.perplexityTable(p, budgets)
		p.comment(slug + "-text")
	}
	if len(r.Full.Outcomes) > 0 && len(r.Runs) > 1 {
		if err := r.findings(p, budgets); err != nil {
			return nil, err
		}
		p.comment(slug + "-findings")
	}
	return figures, nil
}

// dataTable says what was run, and what the full cache does with it.
func (r *Result) dataTable(p *page) {
	var rows [][]string
	seed := func(task string) string {
		if d := r.Dataset(task); d != nil {
			return fmt.Sprint(d.Seed)
		}
		return "-"
	}
	lengths := func(low, high int) string {
		if low == high {
			return fmt.Sprint(low)
		}
		return fmt.Sprintf("%d to %d", low, high)
	}
	for _, s := range r.Summarise(&r.Full, ByTask) {
		rows = append(rows, []string{escape(s.Task), fmt.Sprint(s.N), lengths(s.MinTokens, s.MaxTokens), seed(s.Task), fmt.Sprint(s.M), decimal(s.LogProb)})
	}
	if s, ok := r.Full.SummariseTexts(); ok {
		low, high := 0, 0
		for i, t := range r.Full.Texts {
			n := t.Prompt + t.Tokens
			if low = min(low, n); i == 0 {
				low = n
			}
			high = max(high, n)
		}
		rows = append(rows, []string{"text", fmt.Sprint(s.Texts), lengths(low, high), seed(datasets.TaskText), "-", "perplexity " + perplexity(s.FullPerplexity)})
	}
	p.table([]string{"task", "prompts", "tokens", "seed", "full cache right", "full cache log-probability"}, 1, rows)
}

// bytesTable shows all methods at all budgets over all tasks.
func (r *Result) bytesTable(p *page, budgets []float64) {
	full := r.Overall(&r.Full)
	p.printf("### All tasks against kept bytes\n\nOf %d prompts the full cache gets %d right. ", full.N, full.M)
	if full.M < LeastTrials(0.95) {
		p.printf("To show a retention of 95 %% without a failure takes %d. ", LeastTrials(0.95))
	}
	p.printf("Per budget: retention [lower bound] in %%, loss, kept.\n\n")
	header := []string{"method"}
	for _, b := range budgets {
		header = append(header, budgetName(b), "loss", "kept")
	}
	var rows [][]string
	marked := false
	for _, name := range r.Methods() {
		row, over := r.overBudgets(name, budgets, `\*`)
		marked = marked || over
		rows = append(rows, append([]string{escape(name)}, row...))
	}
	p.table(header, 1, rows)
	if marked {
		p.printf("\\* keeps more than the budget, and is not ranked.\n\n")
	}
}

// budgetSection shows all methods at one budget, task by task, and by length if there are several.
func (r *Result) budgetSection(p *page, budget float64) error {
	if budget == 0 {
		p.printf("### Given plans\n\n")
	} else {
		p.printf("### %s of the bytes\n\n", percent(budget))
	}
	p.printf("Prompts that are right, in %%, and in parentheses the loss.\n\n")
	r.methodsBy(p, budget, ByTask)
	var lengths []int
	for _, o := range r.Full.Outcomes {
		if !slices.Contains(lengths, o.Length) {
			lengths = append(lengths, o.Length)
		}
	}
	if len(lengths) > 1 {
		p.printf("The same by length in tokens:\n\n")
		r.methodsBy(p, budget, ByLength)
	}
	k, err := r.Rank(budget)
	if err != nil {
		return err
	}
	switch {
	case k.Best == nil:
		p.printf("No method stays within the budget.\n\n")
		return nil
	case k.ByRight:
		p.printf("Best: **%s**, by retention.", escape(k.Best.Name))
	default:
		p.printf("Best: **%s**, by log-probability: the full cache gets fewer than %d prompts right.", escape(k.Best.Name), ranksByRight)
	}
	if len(k.Close) > 0 {
		p.printf(" Not significantly worse: %s.", escapedNames(k.Close))
	}
	if len(k.Behind) > 0 {
		p.printf(" Significantly worse: %s.", escapedNames(k.Behind))
	}
	p.printf("\n\n")
	return nil
}

// methodsBy writes a table of the methods at a budget by tasks, or by lengths over all tasks.
func (r *Result) methodsBy(p *page, budget float64, by Grouping) {
	groups := func(x *Run) []Summary {
		if by == ByTask {
			return append(r.Summarise(x, ByTask), r.Overall(x))
		}
		return r.byLength(x)
	}
	header, row := []string{"method"}, []string{"full cache"}
	for _, s := range groups(&r.Full) {
		name := cmp.Or(escape(s.Task), "all")
		if by == ByLength {
			name = ui.Tokens(s.Length)
		}
		header = append(header, name)
		row = append(row, share(s.FullAccuracy))
	}
	rows := [][]string{row}
	for i := range r.Runs {
		x := &r.Runs[i]
		if x.Budget != budget {
			continue
		}
		row := []string{escape(x.Name)}
		if r.over(x) {
			row[0] += `\*`
		}
		for _, s := range groups(x) {
			row = append(row, fmt.Sprintf("%s (%s)", share(s.Accuracy), decimal(s.Loss())))
		}
		rows = append(rows, row)
	}
	p.table(header, 1, rows)
}

// byLength sums up a run by length over all tasks, lengths rising.
func (r *Result) byLength(x *Run) []Summary {
	at := map[int][]int{}
	var lengths []int
	for i, o := range r.Full.Outcomes {
		if at[o.Length] == nil {
			lengths = append(lengths, o.Length)
		}
		at[o.Length] = append(at[o.Length], i)
	}
	slices.Sort(lengths)
	var out []Summary
	for _, n := range lengths {
		s := r.summary(x, at[n])
		s.Length, s.Depth = n, -1
		out = append(out, s)
	}
	return out
}

// perplexityTable shows all methods at all budgets on running text.
func (r *Result) perplexityTable(p *page, budgets []float64) {
	full, _ := r.Full.SummariseTexts()
	p.printf("### Running text\n\nPerplexity over %d tokens, %s with the full cache, and KL.\n\n", full.Tokens, perplexity(full.FullPerplexity))
	header := []string{"method"}
	for _, b := range budgets {
		header = append(header, budgetName(b), "KL")
	}
	var rows [][]string
	for _, name := range r.Methods() {
		row := []string{escape(name)}
		for _, b := range budgets {
			cells := []string{"-", "-"}
			if x := r.Find(name, b); x != nil {
				s, _ := x.SummariseTexts()
				cells = []string{perplexity(s.Perplexity), decimal(s.KL)}
			}
			row = append(row, cells...)
		}
		rows = append(rows, row)
	}
	p.table(header, 1, rows)
}

// A finding is what a method does significantly better than another at the same budget.
type finding struct {
	winner, loser string
	right         bool // right on more prompts; else more probable answers
	by            float64
}

// findingsAt compares all pairs of methods at a budget that stay within it, by two-sided tests corrected for their
// number.
func (r *Result) findingsAt(budget float64) ([]finding, error) {
	var runs []*Run
	for i := range r.Runs {
		if x := &r.Runs[i]; x.Budget == budget && !r.over(x) {
			runs = append(runs, x)
		}
	}
	var tested []finding
	var p []float64
	for i, a := range runs {
		for _, b := range runs[i+1:] {
			c, err := Compare(a, b, testSeed)
			if err != nil {
				return nil, err
			}
			right := finding{winner: a.Name, loser: b.Name, right: true, by: float64(c.OnlyA - c.OnlyB)}
			if right.by < 0 {
				right.winner, right.loser, right.by = right.loser, right.winner, -right.by
			}
			gain := finding{winner: a.Name, loser: b.Name, by: c.Gain}
			if gain.by < 0 {
				gain.winner, gain.loser, gain.by = gain.loser, gain.winner, -gain.by
			}
			tested = append(tested, right, gain)
			p = append(p, min(1, 2*min(c.RightMore, c.RightFewer)), min(1, 2*min(c.LikelierGold, c.UnlikelierGold)))
		}
	}
	var out []finding
	for i, v := range Holm(p) {
		if v < stats.Alpha {
			out = append(out, tested[i])
		}
	}
	return out, nil
}

// findings says which method beats which at each budget.
func (r *Result) findings(p *page, budgets []float64) error {
	p.printf("### Which method beats which\n\nIn parentheses by how many prompts, or by how many nats per token.\n\n")
	for _, b := range budgets {
		all, err := r.findingsAt(b)
		if err != nil {
			return err
		}
		title := budgetName(b)
		p.printf("%s:\n\n", strings.ToUpper(title[:1])+title[1:])
		var rows [][]string
		for _, name := range r.Methods() {
			var right, gain []string
			for _, f := range all {
				switch {
				case f.winner != name:
				case f.right:
					right = append(right, fmt.Sprintf("%s (%.0f)", escape(f.loser), f.by))
				default:
					gain = append(gain, fmt.Sprintf("%s (%s)", escape(f.loser), decimal(f.by)))
				}
			}
			if len(right)+len(gain) > 0 {
				rows = append(rows, []string{escape(name), cmp.Or(strings.Join(right, ", "), "-"), cmp.Or(strings.Join(gain, ", "), "-")})
			}
		}
		if len(rows) == 0 {
			p.printf("no method beats another significantly.\n\n")
			continue
		}
		p.table([]string{"method", "is right on more prompts than", "finds the right answers more probable than"}, 3, rows)
	}
	return nil
}

// budgetSlug names a budget in the names of comments.
func budgetSlug(b float64) string {
	if b == 0 {
		return "given"
	}
	return strings.TrimSuffix(percent(b), " %")
}

// slugOf makes a name fit for files: lower-case letters, digits, dots and single dashes.
func slugOf(name string) string {
	s := strings.Trim(notSlug.ReplaceAllString(strings.ToLower(name), "-"), "-.")
	return cmp.Or(s, "model")
}

var notSlug = regexp.MustCompile(`[^a-z0-9.]+`)

// escape makes text of others plain in Markdown, on one line.
func escape(s string) string {
	return special.Replace(strings.Join(strings.Fields(strings.ToValidUTF8(s, "\ufffd")), " "))
}

var special = strings.NewReplacer(`\`, `\\`, "`", "\\`", "*", `\*`, "_", `\_`, "[", `\[`, "]", `\]`, "<", "&lt;", ">", "&gt;", "&", "&amp;", "|", `\|`, "#", `\#`)

func escapedNames(runs []*Run) string {
	var out []string
	for _, x := range runs {
		out = append(out, escape(x.Name))
	}
	return strings.Join(out, ", ")
}
