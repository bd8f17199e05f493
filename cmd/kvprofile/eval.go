package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/compile"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/devices"
	"github.com/kvprofile/kvprofile/internal/eval"
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/plan"
)

// evalFlags choose what a plan is tested with.
type evalFlags struct {
	plans     []string
	compare   bool
	run       string
	budgets   []float64
	methods   []string
	evict     string
	sink      int
	recent    int
	tasks     []string
	lengths   string
	samples   int
	texts     int
	files     []string
	haystack  haystackFlags
	purpose   string
	question  string
	extra     int
	scattered bool
	retention float64
	results   string
	speed     int
	batch     int
	quick     bool
	show      []string
	changed   func(string) bool
}

func (a *app) evalCommand() *cobra.Command {
	var f evalFlags
	c := &cobra.Command{
		Use:   "eval MODEL (--plan FILE | --compare)",
		Short: "Run a model with plans applied: retrieval, perplexity, speed",
		Long: `eval reads prompts, keeps of each layer's keys and values what a plan says, and decodes
from that: a cache that really shrinks. The full cache runs beside it on the same prompts.
It says how many of the prompts that the full cache gets right the plan gets right too
(retention), with its 95 % lower bound, how likely the right answers become, and what
happens to perplexity.

With --compare every known method runs at equal bytes, from the scores of a run folder.`,
		Example: `  kvprofile eval model.gguf --plan out/model/plan.json
  kvprofile eval model.gguf --plan out/model/plan.json --tasks needle-grid --samples 60 --min-retention 0.95
  kvprofile eval model.gguf --compare --run out/model --budgets 0.5,0.25,0.12 --results results.md
  kvprofile eval model.gguf --plan out/model/plan.json --speed 4096
  kvprofile eval --show out/model/eval.json --results results.md`,
		Args: between(0, 1, "at most one model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			f.changed = cmd.Flags().Changed
			switch {
			case len(f.show) > 0:
				return a.evalShow(args, &f)
			case len(args) == 0:
				return ui.Hint(usagef("eval needs a model"), "usage: %s", cmd.UseLine())
			}
			if err := f.check(); err != nil {
				return err
			}
			return a.eval(cmd.Context(), args[0], &f)
		},
	}
	d := eval.DefaultOptions()
	fl := c.Flags()
	fl.SortFlags = false
	fl.StringSliceVar(&f.plans, "plan", nil, "plans to test")
	fl.BoolVar(&f.compare, "compare", false, "test every method at the same bytes")
	fl.StringVar(&f.run, "run", "", "with --compare: run folder whose scores the methods use (default out/<model>)")
	fl.Float64SliceVar(&f.budgets, "budgets", []float64{0.5, 0.25, 0.12}, "with --compare: kept bytes / full bytes at the prompt's length")
	fl.StringSliceVar(&f.methods, "methods", nil, "with --compare: which (default all)")
	fl.StringVar(&f.evict, "evict", string(plan.EvictPrefillEnd), "with --compare: when streaming heads evict: prefill_end, so that all plans share one reading of a prompt, or always")
	fl.IntVar(&f.sink, "sink", 0, "with --compare: first tokens that streaming heads of duo and recipe keep (default by the length, and 64)")
	fl.IntVar(&f.recent, "recent", 0, "with --compare: last tokens that they keep (default by the length, and 256); recipe's is a width that was recorded")
	fl.StringSliceVar(&f.tasks, "tasks", evalTasks(), "tasks of the prompts")
	fl.StringVar(&f.lengths, "lengths", "1024", "lengths of the prompts in tokens: a list, or first:last:count")
	fl.IntVar(&f.samples, "samples", 20, "prompts of each task and length")
	fl.IntVar(&f.texts, "texts", 4, "texts of each length for perplexity")
	fl.StringSliceVar(&f.files, "dataset", nil, "datasets to use in place of tasks")
	f.haystack.add(fl)
	fl.StringVar(&f.purpose, "purpose", string(datasets.Certification), "calibration, search or certification: they share no words")
	fl.StringVar(&f.question, "question", string(d.Question), "in-prompt: known when tokens are evicted; after: it comes later")
	fl.IntVar(&f.extra, "extra", d.Extra, "tokens that may be generated beyond the right answer's length")
	fl.BoolVar(&f.scattered, "scattered", false, "leave kept tokens where they are: a block is freed when all in it is gone")
	fl.Float64Var(&f.retention, "min-retention", 0, "end with exit code 3 unless the lower bound of retention over all prompts is at least this")
	fl.StringVar(&f.results, "results", "", "write the results as Markdown, too; comments in the file are kept")
	fl.IntVar(&f.speed, "speed", 0, "in place of tasks: time decoding after a prompt of so many tokens")
	fl.IntVar(&f.batch, "batch", 8, "with --speed: sequences that are decoded together")
	fl.StringSliceVar(&f.show, "show", nil, "in place of all that: show evaluations that were made; those of the same prompts are joined; --results puts them on one page")
	fl.BoolVar(&f.quick, "quick", false, "few prompts: a first look")
	return c
}

func (f *evalFlags) check() error {
	switch {
	case !f.compare && len(f.plans) == 0:
		return usagef("eval needs --plan, or --compare")
	case f.speed > 0 && (f.compare || len(f.plans) != 1):
		return usagef("--speed is of one --plan")
	case f.speed < 0 || f.batch < 1:
		return usagef("--speed and --batch must be positive")
	case f.samples < 0 || f.texts < 0 || f.extra < 0:
		return usagef("--samples, --texts and --extra must not be negative")
	case f.retention < 0 || f.retention > 1:
		return usagef("--min-retention must lie in (0, 1], not %g", f.retention)
	case f.retention > 0 && (f.compare || len(f.plans) != 1):
		return usagef("--min-retention is of one --plan")
	case f.question != string(eval.QuestionInPrompt) && f.question != string(eval.QuestionAfter):
		return usagef("--question must be %s or %s, not %q", eval.QuestionInPrompt, eval.QuestionAfter, f.question)
	case !slices.Contains([]datasets.Purpose{datasets.Calibration, datasets.Search, datasets.Certification}, datasets.Purpose(f.purpose)):
		return usagef("unknown purpose %q, expected calibration, search or certification", f.purpose)
	}
	if e := plan.Evict(f.evict); e != plan.EvictPrefillEnd && e != plan.EvictAlways {
		return usagef("--evict must be %s or %s, not %q", plan.EvictPrefillEnd, plan.EvictAlways, f.evict)
	}
	for _, b := range f.budgets {
		if !(b > 0 && b <= 1) {
			return usagef("--budgets: %g is not in (0, 1]", b)
		}
	}
	for _, name := range f.methods {
		if _, ok := compile.Describe(name); !ok {
			return usagef("unknown method %q, expected one of %s", name, strings.Join(compile.Methods(), ", "))
		}
	}
	if f.quick {
		for _, d := range []struct {
			flag string
			to   *int
			n    int
		}{{"samples", &f.samples, 4}, {"texts", &f.texts, 1}} {
			if !f.changed(d.flag) {
				*d.to = d.n
			}
		}
	}
	return nil
}

func (a *app) eval(ctx context.Context, name string, f *evalFlags) error {
	m, err := a.openWithTokenizer(name)
	if err != nil {
		return err
	}
	defer m.Close()
	plans, err := a.evalPlans(m, f.plans)
	if err != nil {
		return err
	}
	if f.speed > 0 {
		return a.evalSpeed(ctx, m, plans[0].Plan, f)
	}
	sets, err := a.evalSets(m, f)
	if err != nil {
		return err
	}
	var inputs *compile.Inputs
	if f.compare {
		if f.run == "" {
			f.run = filepath.Join("out", slug(m.Name))
		}
		if inputs, err = a.readInputs(inFolder(f.run)); err != nil {
			return ui.Hint(err, "--run names the run folder of this model; %s run makes one", program)
		}
		if inputs.Model.SHA256 != planModel(m, m.Fingerprint()).SHA256 {
			return &otherModelError{fmt.Errorf("%s holds the scores of another model than %s", f.run, m.Name)}
		}
	}
	path, release, err := a.output(filepath.Join("out", slug(m.Name), eval.File))
	if err != nil {
		return err
	}
	defer release()
	if a.shared.dryRun {
		var lengths []int
		for _, d := range sets {
			lengths = append(lengths, lengthsOf(d)...)
		}
		return a.dryRun(m, []cost{evalCost(m.Config, lengths, len(plans)+len(f.budgets)*len(compile.Methods()))})
	}
	// Plans that are made for a budget are made for a length.
	var methods map[int][]eval.Contender
	if f.compare {
		if methods, err = a.methodPlans(*inputs, targetLengths(sets), f); err != nil {
			return err
		}
	}
	set, release, err := a.loadOn(math.MaxInt, m)
	if err != nil {
		return err
	}
	defer release()
	o := eval.DefaultOptions()
	o.Question, o.Extra, o.Scattered = eval.Question(f.question), f.extra, f.scattered
	begin := time.Now()
	result, err := a.measure(ctx, m, set, sets, plans, methods, o)
	if err != nil {
		return err
	}
	result.Seconds = time.Since(begin).Seconds()
	if err := result.Write(path); err != nil {
		return err
	}
	if f.results != "" {
		if err := eval.WriteMarkdown(f.results, result); err != nil {
			return err
		}
	}
	return a.showEval(path, result, f)
}

// measure runs the model on datasets with plans applied: plans on all of them, methods on the samples of their length.
func (a *app) measure(ctx context.Context, m *model.Model, set *devices.Set, sets []*datasets.Dataset, plans []eval.Contender, methods map[int][]eval.Contender, o eval.Options) (*eval.Result, error) {
	o.Stop = m.EOS
	task := a.ui.Begin("eval", 0)
	var result *eval.Result
	done, all := 0, 0
	for _, s := range sets {
		all += len(s.Samples)
	}
	for _, n := range targetLengths(sets) {
		contenders := slices.Concat(plans, methods[n])
		before := done
		o.Progress = func(d, _ int) {
			done = before + d
			task.Set(done, all, fmt.Sprintf("%d of %d prompts, %d plans", done, all, len(contenders)))
		}
		r, err := eval.EvaluateOn(ctx, set, m.Tokenizer, ofLength(sets, n), contenders, o)
		if err == nil && result != nil {
			err = result.Append(r)
		} else if err == nil {
			result = r
		}
		if err != nil {
			task.End(err)
			return nil, err
		}
	}
	task.End(nil)
	result.Tool, result.Model, result.Datasets = planTool(), planModel(m, m.Fingerprint()), eval.References(sets)
	return result, nil
}

// evalPlans reads plans and checks that they are of the model. NAME=FILE gives one a name; else it is that of its file.
func (a *app) evalPlans(m *model.Model, names []string) ([]eval.Contender, error) {
	var out []eval.Contender
	for _, name := range names {
		label, path, ok := strings.Cut(name, "=")
		if !ok {
			path = name
			label = strings.TrimSuffix(filepath.Base(path), ".json")
		}
		p, err := plan.Load(path, plan.Want{Model: planModel(m, m.Fingerprint())})
		if err != nil {
			return nil, err
		}
		c := eval.Contender{Name: label, Plan: p}
		if e := p.Evidence; ok && e != nil && e.Recipe != nil {
			c.Budget = e.Recipe.Budget
		}
		out = append(out, c)
	}
	return out, nil
}

// methodPlans makes the plans of all methods at all budgets for prompts of each length, in the same order for all. A
// method that cannot keep as little at some length is left out of all.
func (a *app) methodPlans(in compile.Inputs, lengths []int, f *evalFlags) (map[int][]eval.Contender, error) {
	names := f.methods
	if len(names) == 0 {
		names = compile.Methods()
	}
	out := map[int][]eval.Contender{}
	for _, budget := range f.budgets {
	methods:
		for _, name := range names {
			if name == compile.MethodFull {
				continue
			}
			var made []eval.Contender
			for _, n := range lengths {
				p, err := compile.Method(name, in, compile.MethodOptions{Budget: budget, Context: n, Sink: f.sink, Recent: f.recent, Evict: plan.Evict(f.evict), Seed: a.shared.seed})
				if miss := new(compile.BudgetError); errors.As(err, &miss) {
					a.ui.Note("%v: left out", err)
					continue methods
				}
				if err != nil {
					return nil, err
				}
				made = append(made, eval.Contender{Name: name, Budget: budget, Plan: p})
			}
			for i, n := range lengths {
				out[n] = append(out[n], made[i])
			}
		}
	}
	return out, nil
}

// evalSets reads or makes the datasets.
func (a *app) evalSets(m *model.Model, f *evalFlags) ([]*datasets.Dataset, error) {
	if len(f.files) > 0 {
		var out []*datasets.Dataset
		for _, path := range f.files {
			d, err := datasets.Load(path)
			if err != nil {
				return nil, err
			}
			if err := fits(d, path, m); err != nil {
				return nil, err
			}
			for _, other := range out {
				if other.Meta.Task == d.Meta.Task {
					return nil, usagef("%s: a second dataset of task %s", path, d.Meta.Task)
				}
			}
			if d.Meta.Purpose != datasets.Purpose(f.purpose) {
				return nil, ui.Hint(fmt.Errorf("%s is for %s, not for %s", path, d.Meta.Purpose, f.purpose), "say so with --purpose %s", d.Meta.Purpose)
			}
			out = append(out, d)
		}
		return out, nil
	}
	lengths, err := parseLengths(f.lengths)
	if err != nil {
		return nil, err
	}
	haystack, err := f.haystack.haystack()
	if err != nil {
		return nil, err
	}
	return taskSets(m, taskOptions{tasks: f.tasks, lengths: lengths, samples: f.samples, texts: f.texts, seed: a.shared.seed,
		purpose: datasets.Purpose(f.purpose), haystack: haystack, plain: f.haystack.plain})
}

// targetLengths are the lengths that samples were asked for, rising.
func targetLengths(sets []*datasets.Dataset) []int {
	var out []int
	for _, d := range sets {
		for i := range d.Samples {
			out = append(out, d.Samples[i].TargetTokens)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// ofLength are the parts of datasets that have one length.
func ofLength(sets []*datasets.Dataset, n int) []*datasets.Dataset {
	var out []*datasets.Dataset
	for _, d := range sets {
		part := &datasets.Dataset{Meta: d.Meta}
		for _, s := range d.Samples {
			if s.TargetTokens == n {
				part.Samples = append(part.Samples, s)
			}
		}
		if len(part.Samples) > 0 {
			out = append(out, part)
		}
	}
	return out
}

// planTool is this program as plans name it.
func planTool() plan.Tool {
	t := tool()
	return plan.Tool{Name: t.Name, Version: t.Version, Commit: t.Commit}
}

// evalCost estimates an evaluation on prompts of these lengths: the prefills, and memory for the caches of all plans.
func evalCost(cfg engine.Config, lengths []int, plans int) cost {
	c := cost{stage: "eval", disk: 1 << 20, parallel: len(lengths)}
	for _, n := range lengths {
		c.memory = max(c.memory, activationBytes(cfg, n)+2*int64(plans+1)*int64(n)*int64(cfg.Layers)*int64(2*cfg.KVWidth())*4)
		m, t := forwardFlops(cfg, n)
		c.matmul, c.attention = c.matmul+m, c.attention+t
	}
	return c
}

// evalSpeed times decoding after a prompt of running text.
func (a *app) evalSpeed(ctx context.Context, m *model.Model, p *plan.Plan, f *evalFlags) error {
	sets, err := taskSets(m, taskOptions{lengths: []int{f.speed}, texts: 1, seed: a.shared.seed, purpose: datasets.Certification, haystack: datasets.Prose()})
	if err != nil {
		return err
	}
	set, release, err := a.loadOn(1, m)
	if err != nil {
		return err
	}
	defer release()
	const steps = 16
	s, err := eval.MeasureSpeed(ctx, set.First(), m.Tokenizer, sets[0].Samples[0].Tokens, p, f.batch, steps)
	if err != nil {
		return err
	}
	if a.ui.JSON() {
		return a.ui.PrintJSON(s)
	}
	if err := a.ui.Printf("prompts of %d tokens, %d sequences at a time, median of %d steps\n\n", s.Prompt, s.Batch, s.Steps); err != nil {
		return err
	}
	t := ui.Table{Header: []string{"", "full cache", "plan", "plan / full"}, Left: []int{0}}
	share := func(x, y int64) string { return fmt.Sprintf("%.2f", float64(x)/float64(y)) }
	t.Add("KV cache", ui.Bytes(s.FullBytes), ui.Bytes(s.PlanBytes), share(s.PlanBytes, s.FullBytes))
	t.Add("attention", s.FullAttention.Round(time.Microsecond*10), s.PlanAttention.Round(time.Microsecond*10), share(int64(s.PlanAttention), int64(s.FullAttention)))
	t.Add("step", s.Full.Round(time.Microsecond*10), s.Plan.Round(time.Microsecond*10), share(int64(s.Plan), int64(s.Full)))
	return t.Render(a.ui.Out())
}

// showEval shows what came out, and reports a retention below what was asked for.
func (a *app) showEval(path string, r *eval.Result, f *evalFlags) error {
	if a.ui.JSON() {
		if err := a.ui.PrintJSON(r); err != nil {
			return err
		}
	} else {
		if err := a.evalTables(r); err != nil {
			return err
		}
		if err := a.ui.Printf("\nwritten to %s\n", path); err != nil {
			return err
		}
	}
	if f.retention == 0 {
		return nil
	}
	s := r.Overall(&r.Runs[0])
	switch {
	case s.Lower95 == nil:
		return &findingsError{fmt.Sprintf("the full cache gets none of %d prompts right: nothing is certified", s.N)}
	case *s.Lower95 < f.retention:
		return &findingsError{fmt.Sprintf("retention is at least %.3f by its 95 %% lower bound (%d of %d prompts), less than %g", *s.Lower95, s.K, s.M, f.retention)}
	}
	a.ui.Note("retention is at least %.3f by its 95 %% lower bound (%d of %d prompts)", *s.Lower95, s.K, s.M)
	return nil
}

// evalTables shows one plan task by task, several side by side.
func (a *app) evalTables(r *eval.Result) error {
	if len(r.Runs) == 1 {
		return r.PlanTable(a.ui.Out(), &r.Runs[0])
	}
	return r.ComparisonTable(a.ui.Out())
}

// evalShow shows evaluations that were made before.
func (a *app) evalShow(args []string, f *evalFlags) error {
	if len(args) > 0 {
		return usagef("--show runs no model")
	}
	var results []*eval.Result
	for _, path := range f.show {
		r, err := eval.Load(path)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(results, func(old *eval.Result) bool { return old.Join(r) }) {
			results = append(results, r)
		}
	}
	if f.results != "" {
		if err := eval.WriteMarkdown(f.results, results...); err != nil {
			return err
		}
	}
	if a.ui.JSON() {
		return a.ui.PrintJSON(results)
	}
	for i, r := range results {
		if i > 0 {
			if err := a.ui.Printf("\n"); err != nil {
				return err
			}
		}
		if err := a.evalTables(r); err != nil {
			return err
		}
	}
	return nil
}
