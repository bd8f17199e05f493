package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/internal/compile"
	"github.com/kvprofile/kvprofile/internal/defaultmodel"
	"github.com/kvprofile/kvprofile/internal/eval"
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/profile"
	"github.com/kvprofile/kvprofile/schema"
)

// runFlags are those of all stages.
type runFlags struct {
	quick    bool
	lengths  string
	depths   []string
	repeats  int
	haystack haystackFlags
	profile  profileFlags
	distill  distillFlags
	fastgen  fastgenFlags
	pyramid  pyramidFlags
	compile  compileFlags
	passkeys struct{ count, passkeys, words int }
	train    string
	eval     struct {
		samples int
		tasks   []string
	}
	changed func(string) bool
}

func (a *app) runCommand() *cobra.Command {
	var r runFlags
	c := &cobra.Command{
		Use:   "run [MODEL]",
		Short: "All stages: from a model to a cache plan",
		Long: `run takes a model through all stages (datasets, profile, distill, fastgen, pyramid,
compile, check, report) and leaves a run folder with the cache plan and all that it rests on.
The model is a Hugging Face folder, a GGUF file, or org/name in the local cache. Without one
it is the default model, which is part of this program: small, and made to retrieve.

With --eval-samples the plan is tested at the end: on prompts that served nothing before, of
the length that its budget is about, beside the full cache.

Stopped at any moment and started again, it goes on where it was and ends with the same
plan, byte for byte. Stages whose inputs and settings are as before are skipped.`,
		Example: `  kvprofile run
  kvprofile run path/to/model
  kvprofile run HuggingFaceTB/SmolLM2-135M-Instruct --quick
  kvprofile run model.gguf --budget 0.25 -o out/model25
  kvprofile run model.gguf --dry-run`,
		Args: between(0, 1, "at most one model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := defaultmodel.Name
			if len(args) > 0 {
				name = args[0]
			}
			return a.run(cmd.Context(), name, &r)
		},
	}
	n := defaultNeedles()
	f := c.Flags()
	f.SortFlags = false
	f.BoolVar(&r.quick, "quick", false, "shorter samples and fewer training steps: a first look")
	f.StringVar(&r.lengths, "lengths", "", "needles: lengths in tokens, a list or first:last:count (default 1024,2048)")
	f.StringSliceVar(&r.depths, "depths", []string{"0.1", "0.5", "0.9"}, "needles: where they stand, from 0 (first) to 1 (last)")
	f.IntVar(&r.repeats, "repeats", n.repeats, "needles: samples for each length and depth")
	f.StringVar(&r.train, "train-lengths", "", "passkeys: lengths in tokens (default of the recipe)")
	f.IntVar(&r.passkeys.count, "count", 0, "passkeys: samples (default of the recipe)")
	f.IntVar(&r.passkeys.passkeys, "passkeys", 0, "passkeys: in each sample (default of the recipe)")
	f.IntVar(&r.passkeys.words, "words", 0, "passkeys: words of each (default of the recipe)")
	r.haystack.add(f)
	r.profile.add(f)
	r.distill.add(f, "train-batch")
	r.fastgen.add(f)
	r.pyramid.add(f)
	r.compile.add(f)
	f.IntVar(&r.eval.samples, "eval-samples", 0, "test the plan on so many prompts of each task; 0 means not at all")
	f.StringSliceVar(&r.eval.tasks, "eval-tasks", evalTasks(), "tasks of these prompts")
	r.changed = f.Changed
	return c
}

// pipeline is what run will do, with all flags resolved.
type pipeline struct {
	needles  datasets.GridOptions
	passkeys datasets.PasskeyOptions
	plain    bool
	grid     profile.Grid
	batch    int
	distill  distill.Options
	fastgen  fastgenFlags
	pyramid  pyramidSettings
	compile  compile.Options
	eval     evalSettings
}

// evalSettings are those of the test at the end.
type evalSettings struct {
	Tasks    []string `json:"tasks"`
	Samples  int      `json:"samples"`
	Length   int      `json:"length"`
	Seed     uint64   `json:"seed"`
	Haystack string   `json:"haystack"`
	Plain    bool     `json:"plain"`
	from     datasets.Haystack
}

func (r *runFlags) resolve(a *app) (*pipeline, error) {
	if r.quick && !r.changed("recipe") {
		r.distill.recipe = "quick"
	}
	p := &pipeline{plain: r.haystack.plain, batch: r.profile.batch, fastgen: r.fastgen}
	needles := defaultNeedles()
	if r.quick {
		needles.lengths = []int{1024}
	}
	lengths, err := parseLengths(r.lengths)
	if err != nil {
		return nil, err
	}
	if lengths != nil {
		needles.lengths = lengths
	}
	if needles.depths, err = parseDepths(r.depths); err != nil {
		return nil, err
	}
	needles.repeats = r.repeats
	haystack, err := r.haystack.haystack()
	if err != nil {
		return nil, err
	}
	p.needles = needles.options(a.shared.seed, datasets.Calibration, haystack)
	recipe, err := r.distill.resolve(a)
	if err != nil {
		return nil, err
	}
	p.distill, p.passkeys = recipe.Options, recipe.Data
	p.passkeys.Haystack = haystack
	for _, set := range []struct {
		flag string
		to   *int
		from int
	}{{"count", &p.passkeys.Count, r.passkeys.count}, {"passkeys", &p.passkeys.Passkeys, r.passkeys.passkeys}, {"words", &p.passkeys.Words, r.passkeys.words}} {
		if r.changed(set.flag) {
			*set.to = set.from
		}
	}
	train, err := parseLengths(r.train)
	if err != nil {
		return nil, err
	}
	if train != nil {
		p.passkeys.Lengths = train
	}
	if p.grid, err = r.profile.grid(); err != nil {
		return nil, err
	}
	if p.pyramid, err = r.pyramid.resolve(); err != nil {
		return nil, err
	}
	if r.eval.samples < 0 {
		return nil, usagef("--eval-samples must not be negative")
	}
	for _, task := range r.eval.tasks {
		if err := knownTask(task); err != nil {
			return nil, err
		}
	}
	if p.compile, err = r.compile.resolve(a); err != nil {
		return nil, err
	}
	if err := p.recorded(); err != nil {
		return nil, err
	}
	p.eval = evalSettings{Tasks: r.eval.tasks, Samples: r.eval.samples, Length: p.compile.Context, Seed: a.shared.seed, Haystack: haystackName(p.needles), Plain: p.plain, from: haystack}
	if p.eval.Length == 0 {
		p.eval.Length = slices.Max(p.needles.Lengths)
	}
	return p, nil
}

// recorded reports what a late stage would look for in the record in vain, before the early ones have run.
func (p *pipeline) recorded() error {
	c, g := p.compile, p.grid
	missing := func(flag string, value any, widths any, from string) error {
		return ui.Hint(usagef("--%s %v is none of --%s %v", flag, value, from, widths), "the record has what --%s says; name it there, too", from)
	}
	switch {
	case !slices.Contains(g.Recent, c.Recent):
		return missing("recent", c.Recent, g.Recent, "recent-widths")
	case !slices.Contains(g.Windows, c.Window):
		return missing("window", c.Window, g.Windows, "windows")
	case c.Sink > slices.Max(append([]int{0}, g.Sinks...)):
		return ui.Hint(usagef("--sink %d is more than the largest of --sink-widths %v", c.Sink, g.Sinks), "the record has what --sink-widths says; name it there, too")
	case !slices.Contains(g.LocalRatios, p.fastgen.options.LocalRatio):
		return missing("local-ratio", p.fastgen.options.LocalRatio, g.LocalRatios, "local-ratios")
	}
	return c.Check()
}

func (a *app) run(ctx context.Context, name string, flags *runFlags) error {
	p, err := flags.resolve(a)
	if err != nil {
		return err
	}
	m, err := a.openWithTokenizer(name)
	if err != nil {
		return err
	}
	defer m.Close()
	dir := a.folderOf(m)
	if err := run.CheckReference(dir); err != nil {
		return err
	}
	if a.shared.dryRun {
		return a.estimateRun(m, p)
	}
	s, err := a.session(dir, m)
	if err != nil {
		return err
	}
	defer s.Close()
	begin := time.Now()
	if err := s.all(ctx, p); err != nil {
		return err
	}
	if err := s.folder.Finish(); err != nil {
		return err
	}
	return a.finishRun(s, p.eval.Samples > 0, time.Since(begin))
}

// all runs the stages in order.
func (s *session) all(ctx context.Context, p *pipeline) error {
	needles, err := s.dataset(ctx, "needles", needlesFile, p.needles, p.plain, func(c datasets.Chat) (*datasets.Dataset, error) {
		return datasets.NeedleGrid(s.model.Tokenizer, c, p.needles)
	})
	if err != nil {
		return err
	}
	train, err := s.dataset(ctx, "passkeys", trainFile, p.passkeys, p.plain, func(c datasets.Chat) (*datasets.Dataset, error) {
		return datasets.Passkeys(s.model.Tokenizer, c, p.passkeys)
	})
	if err != nil {
		return err
	}
	at := s.folder.Path
	if err := s.profile(ctx, needles, input{"dataset", at(needlesFile)}, p.grid, p.batch); err != nil {
		return err
	}
	record := input{"record", at(recordDir)}
	if err := s.distill(ctx, train, input{"dataset", at(trainFile)}, p.distill); err != nil {
		return err
	}
	if err := s.scores(ctx, train, input{"dataset", at(trainFile)}, record.path, s.app.shared.seed); err != nil {
		return err
	}
	// Nothing below needs the weights.
	s.unload()
	fastgen := p.fastgen.resolve(s.app)
	if err := s.derive(ctx, "fastgen", fastgen, []input{record}, fastgenFile, func(ctx context.Context, path string) error {
		_, err := s.app.fastgen(ctx, record.path, path, fastgen)
		return err
	}); err != nil {
		return err
	}
	if err := s.derive(ctx, "pyramid", p.pyramid, []input{record}, pyramidFile, func(ctx context.Context, path string) error {
		_, err := s.app.pyramid(ctx, record.path, path, p.pyramid)
		return err
	}); err != nil {
		return err
	}
	inputs := []input{record, {"gates", at(gatesDir)}, {"fastgen", at(fastgenFile)}, {"pyramid", at(pyramidFile)}}
	if err := s.derive(ctx, "compile", p.compile, inputs, planFile, func(_ context.Context, path string) error {
		_, err := s.app.compile(inFolder(s.folder.Dir), path, p.compile)
		return err
	}); err != nil || p.eval.Samples == 0 {
		return err
	}
	return s.test(ctx, p.eval)
}

// test is the stage that evaluates the folder's plan. What comes out becomes evidence of the plan, whose digest, the
// stage's input, leaves evidence out.
func (s *session) test(ctx context.Context, o evalSettings) error {
	path := s.folder.Path(planFile)
	p, err := plan.Load(path, plan.Want{Model: planModel(s.model, s.print)})
	if err != nil {
		return err
	}
	stage := run.Stage{Name: "eval", Settings: o, Inputs: map[string]string{"plan": p.Digest()}, Outputs: []string{eval.File}}
	if err := s.do(ctx, stage, func(ctx context.Context) error { return s.evaluate(ctx, p, s.folder.Path(eval.File), o) }); err != nil {
		return err
	}
	result, err := eval.Load(s.folder.Path(eval.File))
	if err != nil {
		return err
	}
	before, err := p.Marshal()
	if err != nil {
		return err
	}
	if _, err := addResults(p, result); err != nil {
		return err
	}
	if after, err := p.Marshal(); err != nil || bytes.Equal(before, after) {
		return err
	}
	return s.folder.Amend("compile", planFile, p.Write)
}

// evaluate runs a plan beside the full cache and writes what comes out.
func (s *session) evaluate(ctx context.Context, p *plan.Plan, path string, o evalSettings) error {
	sets, err := taskSets(s.model, taskOptions{tasks: o.Tasks, lengths: []int{o.Length}, samples: o.Samples, seed: o.Seed,
		purpose: datasets.Certification, haystack: o.from, plain: o.Plain})
	if err != nil {
		return err
	}
	set, err := s.engine()
	if err != nil {
		return err
	}
	result, err := s.app.measure(ctx, s.model, set, sets, []eval.Contender{{Name: "plan", Plan: p}}, nil, eval.DefaultOptions())
	if err != nil {
		return err
	}
	return result.Write(path)
}

// dataset is the stage that builds a dataset; settings are its options. The haystack is known by its name.
func (s *session) dataset(ctx context.Context, name, file string, settings any, plain bool, build func(datasets.Chat) (*datasets.Dataset, error)) (*datasets.Dataset, error) {
	path := s.folder.Path(file)
	stage := run.Stage{Name: name, Settings: struct {
		Options  any    `json:"options"`
		Haystack string `json:"haystack"`
		Plain    bool   `json:"plain"`
	}{settings, haystackName(settings), plain}, Outputs: []string{file}}
	err := s.do(ctx, stage, func(context.Context) error {
		t := s.app.ui.Begin(name, 0)
		d, err := build(chatOf(s.model, plain))
		if err == nil {
			err = saveDataset(path, d)
		}
		t.End(err)
		return datasetAdvice(err)
	})
	if err != nil {
		return nil, err
	}
	d, err := datasets.Load(path)
	if err != nil {
		return nil, err
	}
	return d, fits(d, path, s.model)
}

// haystackName identifies the filler of a dataset's options, whose value itself says nothing as JSON.
func haystackName(options any) string {
	var h datasets.Haystack
	switch o := options.(type) {
	case datasets.GridOptions:
		h = o.Haystack
	case datasets.PasskeyOptions:
		h = o.Haystack
	}
	if h == nil {
		return datasets.Prose().Name()
	}
	return h.Name()
}

// derive is a stage that makes one file from others.
func (s *session) derive(ctx context.Context, name string, settings any, in []input, file string, make func(ctx context.Context, path string) error) error {
	inputs, err := s.inputs(in)
	if err != nil {
		return err
	}
	stage := run.Stage{Name: name, Settings: settings, Inputs: inputs, Outputs: []string{file}}
	return s.do(ctx, stage, func(ctx context.Context) error { return make(ctx, s.folder.Path(file)) })
}

// finishRun checks the plan as a server would, and says what came out.
func (a *app) finishRun(s *session, evaluated bool, took time.Duration) error {
	path := s.folder.Path(planFile)
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	violations, err := schema.Check(data)
	if err != nil {
		return fmt.Errorf("check: %s: %w", path, err)
	}
	if len(violations) > 0 {
		return &findingsError{fmt.Sprintf("check: %s: %s", path, violations[0])}
	}
	p, err := plan.Load(path, plan.Want{Model: planModel(s.model, s.print)})
	if err != nil {
		return fmt.Errorf("check: %w", err)
	}
	a.ui.Note("check: %s is valid and belongs to the model", path)
	report := s.folder.Path(reportFile)
	if _, err := os.Stat(report); err != nil || s.worked {
		t := a.ui.Begin("report", 0)
		_, err := makeReport(s.folder.Dir, report, "", nil, false)
		t.End(err)
		if err != nil {
			return err
		}
	}
	var tested *eval.Result
	if evaluated {
		if tested, err = eval.Load(s.folder.Path(eval.File)); err != nil {
			return err
		}
	}
	manifest := s.folder.Manifest()
	if a.ui.JSON() {
		var evaluations []plan.Evaluation
		if tested != nil {
			evaluations = tested.Evaluations(&tested.Runs[0])
		}
		return a.ui.PrintJSON(struct {
			Folder  string            `json:"folder"`
			Model   run.Model         `json:"model"`
			Seconds float64           `json:"seconds"`
			Stages  []run.Record      `json:"stages"`
			Plan    planSummary       `json:"plan"`
			Report  string            `json:"report"`
			Eval    []plan.Evaluation `json:"evaluations,omitempty"`
		}{s.folder.Dir, manifest.Model, took.Seconds(), manifest.Stages, summarise(path, p), report, evaluations})
	}
	for _, w := range p.Warnings {
		a.ui.Warn("%s", sentence(w))
	}
	if err := a.planTables(p); err != nil {
		return err
	}
	if tested != nil {
		if err := a.ui.Printf("\n"); err != nil {
			return err
		}
		if err := a.evalTables(tested); err != nil {
			return err
		}
	}
	files := ui.Table{Left: []int{1}}
	for _, f := range []struct{ what, name string }{{"plan", planFile}, {"report", reportFile}, {"gates", gatesDir}, {"attention record", recordDir}, {"policies", fastgenFile}, {"layer budgets", pyramidFile}, {"how it was made", run.ManifestName}} {
		files.Add(f.what, filepath.Join(s.folder.Dir, f.name))
	}
	if err := a.ui.Printf("\n"); err != nil {
		return err
	}
	return files.Render(a.ui.Out())
}

// estimateRun estimates all stages before anything is run.
func (a *app) estimateRun(m *model.Model, p *pipeline) error {
	var prompts []profile.Size
	for _, n := range p.needles.Lengths {
		for range len(p.needles.Depths) * max(p.needles.Repeats, 1) {
			prompts = append(prompts, profile.Size{Tokens: n, Prompt: n, Answers: 8})
		}
	}
	var needles, train []int
	for _, s := range prompts {
		needles = append(needles, s.Tokens)
	}
	lengths := p.passkeys.Lengths
	if len(lengths) == 0 {
		if p.passkeys.Steps < 1 || p.passkeys.MinLength < 1 {
			return errors.New("the recipe has no lengths")
		}
		lengths = datasets.Linspace(p.passkeys.MinLength, p.passkeys.MaxLength, p.passkeys.Steps)
	}
	for i := range p.passkeys.Count {
		train = append(train, lengths[i%len(lengths)])
	}
	record, err := profileCostOf(m.Config, prompts, p.grid)
	if err != nil {
		return err
	}
	small := func(stage string) cost { return cost{stage: stage, memory: record.memory, disk: 1 << 16} }
	costs := []cost{datasetCost(append(needles, train...)), record, distillCost(m.Config, train, p.distill), small("fastgen"), small("pyramid"), small("compile")}
	if n := p.eval.Samples * len(p.eval.Tasks); n > 0 {
		costs = append(costs, evalCost(m.Config, slices.Repeat([]int{p.eval.Length}, n), 1))
	}
	return a.dryRun(m, costs)
}
