// Package report shows a run folder as one HTML file: what the plan keeps and why, what it costs in quality, and where
// it comes from. The file needs nothing else: no network, no fonts, no other files. What a folder does not have is left
// out with a sentence. The same artefacts give the same bytes.
//
// Figures are drawn here, as SVG; the page's script adds hovering, keyboard, and the attention maps, and works on what
// is in the page alone. A content security policy in the page forbids all else.
package report

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/plan"
)

//go:embed assets/page.html
var pageHTML string

//go:embed assets/page.css
var pageCSS string

//go:embed assets/page.js
var pageJS string

// Report is all that the page shows.
type Report struct {
	Model    string
	Facts    []fact
	Warnings []string
	Sections []*section
	maps     *attention
}

// fact is a number of the head of the page.
type fact struct{ Value, Name string }

// section is a part of the page.
type section struct {
	ID, Title string
	Texts     []string // what is seen
	Missing   []string // what is left out, and why
	Figures   []Figure
	Choices   []grid // one is shown at a time
	Maps      bool   // the attention maps are here
	Tables    []table
}

// say adds a paragraph; lines do not break before a percent sign.
func (s *section) say(format string, args ...any) {
	s.Texts = append(s.Texts, strings.ReplaceAll(fmt.Sprintf(format, args...), " %", "\u00a0%"))
}

func (s *section) lack(format string, args ...any) {
	s.Missing = append(s.Missing, fmt.Sprintf(format, args...))
}

// New draws everything that the inputs allow.
func New(in *Inputs) (*Report, error) {
	r := &Report{Model: in.modelName(), Facts: in.facts()}
	if in.Plan != nil {
		r.Warnings = in.Plan.Warnings
	}
	builders := []func(r *Report, s *section) error{in.policies, in.gates, in.budgets, in.attention, in.recovery}
	for _, b := range builders {
		if err := r.add(b); err != nil {
			return nil, err
		}
	}
	for i := range in.Evals {
		if err := r.add(func(_ *Report, s *section) error { in.evaluation(s, i); return nil }); err != nil {
			return nil, err
		}
	}
	if len(in.Evals) == 0 {
		if err := r.add(in.noEvaluation); err != nil {
			return nil, err
		}
	}
	for _, b := range []func(r *Report, s *section) error{in.bytes, in.agreement, in.provenance} {
		if err := r.add(b); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func (r *Report) add(build func(r *Report, s *section) error) error {
	s := new(section)
	if err := build(r, s); err != nil {
		return err
	}
	r.Sections = append(r.Sections, s)
	return nil
}

func (in *Inputs) modelName() string {
	switch {
	case in.Plan != nil:
		return in.Plan.Model.Name
	case in.Manifest != nil:
		return in.Manifest.Model.Name
	case in.FastGen != nil:
		return in.FastGen.Model.Name
	case in.Pyramid != nil:
		return in.Pyramid.Model.Name
	case in.Record != nil:
		return in.Record.Meta().Model.Name
	case len(in.Evals) > 0:
		return in.Evals[0].Result.Model.Name
	}
	return "unnamed model"
}

// facts are the figures that are asked for first.
func (in *Inputs) facts() []fact {
	var out []fact
	if p := in.Plan; p != nil {
		n := in.context()
		u := p.Usage(plan.Request{PromptTokens: n})
		most := ""
		if u.WorstCase {
			most = "at most "
		}
		out = append(out, fact{most + percent(float64(u.Bytes)/float64(max(u.FullBytes, 1))), fmt.Sprintf("of the KV bytes kept at %s tokens", ui.Tokens(n))},
			fact{ui.Bytes(u.Bytes), "in place of " + ui.Bytes(u.FullBytes)})
		count := map[plan.Kind]int{}
		for l, row := range p.Layers {
			for k := range row {
				if q, err := p.PolicyOf(l, k); err == nil {
					count[q.Kind()]++
				}
			}
		}
		out = append(out, fact{fmt.Sprintf("%d of %d", count[plan.Full{}.Kind()], p.Model.NLayers*p.Model.NKVHeads), "KV heads keep everything"})
	}
	for _, e := range in.Evals {
		for i := range e.Result.Runs {
			x := &e.Result.Runs[i]
			if s := e.Result.Overall(x); in.isPlan(x) && s.Retention != nil {
				out = append(out, fact{percent(*s.Retention), fmt.Sprintf("retention on %d prompts (lower bound %s), with %s of their bytes kept", s.M, percent(*s.Lower95), percent(s.Kept))})
			}
		}
	}
	return out
}

func (in *Inputs) policies(_ *Report, s *section) error {
	s.ID, s.Title = "policies", "What the plan keeps"
	if in.Plan == nil {
		s.lack("There is no plan.json: policies, kept bytes and warnings are left out.")
		return nil
	}
	s.say("A policy for each layer and KV head. Hover over a cell, or move to it with the arrow keys, for its numbers; a click shows its attention.")
	var err error
	s.Figures, err = in.policiesFigures()
	if err != nil {
		return err
	}
	layers, err := in.keptByLayer()
	if err != nil {
		return err
	}
	s.Figures = append(s.Figures, layers)
	p := in.Plan
	t := table{Caption: "Bytes at the plan's lengths, one sequence, blocks of " + fmt.Sprint(p.Cache.BlockSize) + " tokens, " + string(p.Cache.Dtype), Header: []string{"prompt + generated", "kept", "full", "share", "peak in prefill"}}
	for _, x := range p.Totals {
		most := ""
		if x.WorstCase {
			most = "≤ "
		}
		t.Rows = append(t.Rows, []string{fmt.Sprintf("%s + %d", ui.Tokens(x.PromptTokens), x.GeneratedTokens), most + ui.Bytes(x.KeptBytes), ui.Bytes(x.FullBytes),
			most + percent(float64(x.KeptBytes)/float64(max(x.FullBytes, 1))), most + ui.Bytes(x.PeakPrefillBytes)})
	}
	s.Tables = append(s.Tables, t)
	return nil
}

func (in *Inputs) gates(_ *Report, s *section) error {
	s.ID, s.Title = "gates-section", "Gates"
	if in.Gates == nil {
		s.lack("There are no gates: neither a folder gates nor trained.")
		return nil
	}
	s.say("A gate near 1 says that the KV head needs the whole cache, one near 0 that the first and the last tokens will do (DuoAttention, Xiao et al. 2024).")
	s.Figures = in.gatesFigures()
	if len(in.Gates.Scores) > 0 {
		s.say("Beside them are scores that need no training; each has a scale of its own.")
	}
	if f, ok := in.curveFigure(); ok {
		s.Figures = append(s.Figures, f)
	} else {
		s.lack("There is no training curve: the gates were imported.")
	}
	return nil
}

func (in *Inputs) budgets(_ *Report, s *section) error {
	s.ID, s.Title = "budgets", "Layer budgets"
	a := in.Pyramid
	if a == nil {
		s.lack("There is no pyramid.json: what the layers need was not measured.")
		return nil
	}
	s.say("How many tokens the layers get of a top-k budget, beside the arithmetic pyramid of the same total (PyramidKV, Cai et al. 2024), and what they need.")
	for _, w := range a.Warnings {
		s.say("The budgets of pyramid.json: %s.", strings.TrimSuffix(w.Message, "."))
	}
	var err error
	s.Figures, err = in.budgetsFigures()
	return err
}

func (in *Inputs) attention(r *Report, s *section) error {
	s.ID, s.Title = "attention", "Attention maps"
	if in.Record == nil {
		s.lack("%s", cmp.Or(in.RecordMissing, "There is no record of the attention."))
		return nil
	}
	m, err := in.attentionMaps()
	if err != nil {
		return err
	}
	if m == nil {
		s.lack("The record has no attention maps (or too many heads for a page).")
		return nil
	}
	r.maps, s.Maps = m, true
	s.say("Where the queries of a prompt look, pooled to at most %d × %d cells: a row is a query, a column a key; the mean over a cell's rows of the attention on its keys. Numbers are rounded to steps of 5 %%.", m.Samples[0].Size, m.Samples[0].Size)
	return nil
}

func (in *Inputs) recovery(_ *Report, s *section) error {
	s.ID, s.Title = "recovery", "Recovery"
	if in.FastGen == nil {
		s.lack("There is no fastgen.json: the recovery of FastGen's policies is left out.")
	}
	if in.Record == nil {
		s.lack("The recovery of streaming policies is left out: it needs the record.")
	}
	var err error
	if s.Figures, err = in.recoveryFigures(); err != nil {
		return err
	}
	if len(s.Figures) > 0 {
		s.say("The share of a KV head's attention that falls on what a policy keeps, mean over the rows of the prompts. It is a figure for choosing plans, not for vouching for them.")
	}
	return nil
}

// gridCells bounds the cells of all needle grids in the page.
const gridCells = 6000

func (in *Inputs) evaluation(s *section, i int) {
	e := in.Evals[i]
	r := e.Result
	s.ID, s.Title = "evaluation", "Evaluation"
	if i > 0 {
		s.ID = fmt.Sprintf("evaluation-%d", i+1)
	}
	switch r.Question {
	case "after":
		s.Title += ": the question comes after eviction"
	case "in-prompt":
		s.Title += ": the question is in the prompt"
	}
	if len(in.Evals) > 1 {
		s.Title += " (" + clip(e.Name, 40) + ")"
	}
	full := r.Overall(&r.Full)
	if full.N > 0 {
		s.say("Of %d prompts the full cache gets %d right. Retention is the share of those that a method gets right too; whiskers reach down to its one-sided 95 %% lower bound (Clopper-Pearson). "+
			"Loss is what the right answer's log-probability loses against the full cache; whiskers are 95 %% bootstrap intervals over the prompts.", full.N, full.M)
	}
	s.say("%s", purpose(r.Purpose))
	c := in.compare(r)
	s.Figures = methodsFigures(s.ID, c)
	s.Tables = append(s.Tables, c.table)
	if full.N > 0 && full.M == 0 {
		s.lack("Retention is left out: the full cache gets no prompt right.")
	}
	if len(r.Full.Outcomes) == 0 {
		s.lack("There are no prompts with answers in it: retention and the needle grid are left out.")
		return
	}
	all := in.grids(s.ID, r)
	cells := 0
	for j, g := range all {
		for _, f := range g.figures {
			cells += strings.Count(f.body, `class="m"`)
		}
		if cells > gridCells && j > 1 {
			s.lack("The needle grids of %d of %d runs are left out to keep the page small: %s and after.", len(all)-j, len(all), all[j].Label)
			all = all[:j]
			break
		}
	}
	s.Choices = all
}

func (in *Inputs) noEvaluation(_ *Report, s *section) error {
	s.ID, s.Title = "evaluation", "Evaluation"
	s.lack("There is no eval.json: what the plan costs in quality was not measured here, and the needle grid is left out.")
	if in.Plan == nil || in.Plan.Evidence == nil {
		return nil
	}
	if all := in.Plan.Evidence.Evaluations; len(all) > 0 {
		s.say("The plan itself says what was measured:")
		t := table{Caption: "Evidence in the plan", Header: []string{"task", "prompts", "full right", "also right", "retention", "lower bound"}}
		for _, x := range all {
			row := []string{x.Task, fmt.Sprint(x.N), fmt.Sprint(x.M), fmt.Sprint(x.K), "-", "-"}
			if x.Retention != nil && x.Lower95 != nil {
				row[4], row[5] = percent(*x.Retention), percent(*x.Lower95)
			}
			t.Rows = append(t.Rows, row)
		}
		s.Tables = append(s.Tables, t)
	}
	return nil
}

func (in *Inputs) bytes(_ *Report, s *section) error {
	s.ID, s.Title = "bytes", "Memory"
	if in.Plan == nil {
		s.lack("There is no plan.json: bytes against the length of the context are left out.")
		return nil
	}
	s.say("The KV cache alone, in whole blocks of %d tokens and %s; the model's weights and activations come on top. Dotted lines are the memories of common GPUs, of 10⁹ bytes a GB.", in.Plan.Cache.BlockSize, in.Plan.Cache.Dtype)
	s.Figures = in.bytesFigures()
	s.Tables = append(s.Tables, in.sequencesTable())
	return nil
}

func (in *Inputs) agreement(_ *Report, s *section) error {
	s.ID, s.Title = "agreement-section", "Do the scores agree?"
	all := in.agreements()
	if len(all) == 0 {
		s.lack("Neither plan nor gates have rank correlations of scores.")
		return nil
	}
	s.say("Rank correlations over the KV heads of the scores that say which heads need the whole cache. Where they disagree, a plan that follows one of them is to be tested with more care.")
	s.Figures = []Figure{agreementFigure(all)}
	t := table{Caption: "Rank correlations", Header: []string{"scores", "Spearman", "95 % interval", "KV heads"}}
	for _, x := range all {
		row := []string{scoreName(x.a) + " and " + scoreName(x.b), "-", "-", fmt.Sprint(x.n)}
		if x.defined {
			row[1] = fixed(x.rho)
		}
		if x.band {
			row[2] = fixed(x.low) + " to " + fixed(x.high)
		}
		t.Rows = append(t.Rows, row)
	}
	s.Tables = append(s.Tables, t)
	return nil
}

func (in *Inputs) provenance(_ *Report, s *section) error {
	s.ID, s.Title = "provenance", "Where this comes from"
	facts := table{Caption: "Run", Header: []string{"", ""}, Texts: true}
	add := func(name, value string) {
		if value != "" {
			facts.Rows = append(facts.Rows, []string{name, value})
		}
	}
	if p := in.Plan; p != nil {
		m := p.Model
		add("model", fmt.Sprintf("%s, %s: %d layers, %d query heads and %d KV heads of %d, context %s", m.Name, m.Architecture, m.NLayers, m.NHeads, m.NKVHeads, m.HeadDim, ui.Tokens(m.MaxPosition)))
		add("plan", p.Digest()+", by "+strings.TrimSpace(p.Tool.Name+" "+p.Tool.Version))
	}
	if m := in.Manifest; m != nil {
		add("program", strings.TrimSpace(m.Tool.Name+" "+m.Tool.Version+" "+m.Tool.Commit))
		add("command", strings.Join(m.Arguments, " "))
		add("seed", fmt.Sprint(m.Seed))
		add("device", fmt.Sprintf("%s %s %s, %d threads", m.Device, m.Tier, m.Precision, m.Threads))
		add("begun", m.Started.UTC().Format(time.RFC3339))
		if !m.Finished.IsZero() {
			add("ended", m.Finished.UTC().Format(time.RFC3339))
		}
		for _, name := range []string{"config", "weights", "tokenizer"} {
			add("hash of the "+name, m.Model.SHA256[name])
		}
	} else {
		s.lack("There is no run.json: command, seed, device and times are not known.")
	}
	if len(facts.Rows) > 0 {
		s.Tables = append(s.Tables, facts)
	}
	data := table{Caption: "Datasets", Header: []string{"use", "task", "samples", "tokens", "seed", "hash"}, Texts: true}
	dataset := func(use string, d plan.DatasetRef) {
		data.Rows = append(data.Rows, []string{use, d.Task, fmt.Sprint(d.Samples), fmt.Sprintf("%d to %d", d.MinTokens, d.MaxTokens), fmt.Sprint(d.Seed), d.SHA256})
	}
	if in.Plan != nil && in.Plan.Evidence != nil && in.Plan.Evidence.Calibration != nil {
		for _, d := range in.Plan.Evidence.Calibration.Datasets {
			dataset(cmp.Or(d.Use, "calibration"), d)
		}
	}
	for _, e := range in.Evals {
		for _, d := range e.Result.Datasets {
			dataset(e.Name, d)
		}
	}
	if len(data.Rows) > 0 {
		s.Tables = append(s.Tables, data)
	}
	if m := in.Manifest; m != nil && len(m.Stages) > 0 {
		stages := table{Caption: "Stages", Header: []string{"stage", "seconds", "output", "bytes", "hash"}, Texts: true}
		for _, x := range m.Stages {
			seconds := fmt.Sprintf("%.1f", x.Seconds)
			if !x.Done {
				seconds = "not done"
			}
			for i, o := range append([]run.Output{}, x.Outputs...) {
				row := []string{x.Name, seconds, o.Path, fmt.Sprint(o.Bytes), o.SHA256}
				if i > 0 {
					row[0], row[1] = "", ""
				}
				stages.Rows = append(stages.Rows, row)
			}
			if len(x.Outputs) == 0 {
				stages.Rows = append(stages.Rows, []string{x.Name, seconds, "", "", ""})
			}
		}
		s.Tables = append(s.Tables, stages)
	}
	return nil
}

// Missing says what the page leaves out, and why.
func (r *Report) Missing() []string {
	out := []string{}
	for _, s := range r.Sections {
		out = append(out, s.Missing...)
	}
	return out
}

// Figures returns all figures, with different names.
func (r *Report) Figures() []*Figure {
	var out []*Figure
	for _, s := range r.Sections {
		for i := range s.Figures {
			out = append(out, &s.Figures[i])
		}
		for _, g := range s.Choices {
			for i := range g.figures {
				out = append(out, &g.figures[i])
			}
		}
	}
	return out
}

// WriteFigures writes each figure as an SVG and as a PNG file to a folder, each whole or not at all, and returns the paths.
func (r *Report) WriteFigures(dir string) ([]string, error) {
	var paths []string
	for _, f := range r.Figures() {
		for _, file := range []struct {
			ending string
			write  func(w io.Writer) error
		}{{".svg", f.WriteSVG}, {".png", f.WritePNG}} {
			path := filepath.Join(dir, f.ID+file.ending)
			if err := run.WriteAtomic(path, file.write); err != nil {
				return paths, err
			}
			paths = append(paths, path)
		}
	}
	return paths, nil
}

// hashSource is a source of a content security policy: what has this hash may run.
func hashSource(text string) string {
	h := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(h[:]) + "'"
}

// WriteHTML writes the page.
func (r *Report) WriteHTML(w io.Writer) error {
	t, err := template.New("page").Funcs(template.FuncMap{
		"svg": func(f Figure) template.HTML { return template.HTML(f.inline()) },
		"figures": func(g grid) []Figure {
			return g.figures
		},
	}).Parse(pageHTML)
	if err != nil {
		return err
	}
	css := rootCSS() + figureCSS + pageCSS
	page := struct {
		*Report
		Policy  string
		CSS     template.CSS
		JS      template.JS
		HasMaps bool
		Maps    template.JS
	}{Report: r, CSS: template.CSS(css), JS: template.JS(pageJS), HasMaps: r.maps != nil,
		Policy: "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src " + hashSource(css) + "; script-src " + hashSource(pageJS)}
	if r.maps != nil {
		data, err := json.Marshal(r.maps) // escapes <, > and &
		if err != nil {
			return err
		}
		page.Maps = template.JS(data)
	}
	var b bytes.Buffer
	if err := t.Execute(&b, page); err != nil {
		return err
	}
	_, err = w.Write(b.Bytes())
	return err
}
