package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/fastgen"
	"github.com/kvprofile/kvprofile/internal/compile"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/pyramid"
)

// compileFlags choose what a plan is to reach.
type compileFlags struct {
	budget, recovery float64
	least            bool
	context          int
	sink, recent     int
	window, kernel   int
	pool             string
	topkSinks        int
	ratio            bool
	block            int
	dtype            string
	totals           []int
	order            string
	changed          func(string) bool
}

func (c *compileFlags) add(f *pflag.FlagSet) {
	d := compile.DefaultOptions()
	f.Float64Var(&c.budget, "budget", d.Budget, "kept bytes / full bytes at the context")
	f.Float64Var(&c.recovery, "recovery", 0, "in place of a budget: share of the attention that is to fall on what is kept")
	f.BoolVar(&c.least, "worst-head", false, "the recovery is that of the worst KV head, not the mean")
	f.StringVar(&c.order, "order", string(compile.OrderRanks), "score by which KV heads are kept in full first: gate, data-light, needle-mass, copy or ranks (the mean of all); methods have their own")
	f.IntVar(&c.context, "context", 0, "length in tokens that the budget is about (default: the longest recorded)")
	f.IntVar(&c.sink, "sink", d.Sink, "first tokens that streaming heads keep")
	f.IntVar(&c.recent, "recent", d.Recent, "last tokens that streaming heads keep; a width that was recorded")
	f.IntVar(&c.window, "window", d.Window, "observation window of top-k heads in tokens; one that was recorded")
	f.StringVar(&c.pool, "pool", string(d.Pool), "pooling of top-k votes: max, avg or none")
	f.IntVar(&c.kernel, "kernel", d.Kernel, "width of the pooling in tokens, odd")
	f.IntVar(&c.topkSinks, "topk-sink", d.TopKSinks, "first tokens that top-k heads keep in any case")
	f.BoolVar(&c.ratio, "topk-ratio", d.RatioBudgets, "write top-k budgets as shares of the prompt, not as tokens")
	f.IntVar(&c.block, "block-size", d.BlockSize, "tokens in a block of the server's cache")
	f.StringVar(&c.dtype, "dtype", string(d.Dtype), "type of the cache: f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8")
	f.IntSliceVar(&c.totals, "totals", d.Lengths, "lengths in tokens that the plan states bytes for")
	c.changed = f.Changed
}

func (c *compileFlags) resolve(a *app) (compile.Options, error) {
	o := compile.DefaultOptions()
	o.Budget, o.Recovery, o.LeastRecovery, o.Context = c.budget, c.recovery, c.least, c.context
	o.Sink, o.Recent, o.Window, o.Pool, o.Kernel, o.TopKSinks = c.sink, c.recent, c.window, plan.PoolKind(c.pool), c.kernel, c.topkSinks
	o.Order = compile.Order(c.order)
	o.RatioBudgets, o.BlockSize, o.Dtype, o.Lengths, o.Seed = c.ratio, c.block, plan.Dtype(c.dtype), c.totals, a.shared.seed
	if c.changed("recovery") {
		if c.changed("budget") {
			return o, usagef("--budget and --recovery exclude one another")
		}
		o.Budget = 0
	} else if c.least {
		return o, usagef("--worst-head needs --recovery")
	}
	return o, nil
}

// compileInputs name the artefacts.
type compileInputs struct{ model, record, gates, fastgen, pyramid, train string }

// inFolder names the artefacts of a run folder.
func inFolder(dir string) compileInputs {
	at := func(name string) string { return filepath.Join(dir, filepath.FromSlash(name)) }
	return compileInputs{model: at(modelFile), record: at(recordDir), gates: at(gatesDir), fastgen: at(fastgenFile), pyramid: at(pyramidFile), train: at(trainFile)}
}

func (a *app) compileCommand() *cobra.Command {
	var flags compileFlags
	var given compileInputs
	var method string
	var search searchFlags
	var evidence []string
	c := &cobra.Command{
		Use:   "compile RUN",
		Short: "Make a cache plan from the scores and a budget",
		Long: `compile merges gates, FastGen policies and layer budgets into a plan with one policy for
each KV head. RUN is a run folder; single artefacts can be named in its place or beside it.

KV heads that come first in the order of their scores keep everything. The others get the
cheapest of streaming and FastGen's policies that recovers the threshold of its attention,
else top-k with the budget of their layer. How many come first, and the budgets, are searched
until the bytes that are kept meet --budget, or the smallest plan reaches --recovery.

--method makes the plan of one published method in its place, of at most --budget:
` + methodList() + `
  auto           the best plan that a search finds by running the model: of at most --budget,
                 or the smallest whose measured --retention clears what is asked for

--evidence adds the results of eval to the plan that they are about.`,
		Example: `  kvprofile compile out/model
  kvprofile compile out/model --budget 0.25 -o plan25.json
  kvprofile compile out/model --method snapkv --budget 0.25 -o snapkv25.json
  kvprofile compile out/model --recovery 0.95 --gates published/Llama-3.1-8B -o plan.json`,
		Args: between(0, 1, "at most one run folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := flags.resolve(a)
			if err != nil {
				return err
			}
			if len(evidence) > 0 {
				return a.addEvidence(args, evidence)
			}
			if _, ok := compile.Describe(method); !ok && method != methodAuto {
				return usagef("--method %q is none of %s, %s", method, strings.Join(compile.Methods(), ", "), methodAuto)
			}
			if err := search.check(method, &flags); err != nil {
				return err
			}
			if method != compile.MethodRecipe && (o.Recovery > 0 || o.RatioBudgets) {
				return usagef("--recovery and --topk-ratio need --method %s", compile.MethodRecipe)
			}
			in, fallback := given, planFile
			if len(args) == 1 {
				in, fallback = inFolder(args[0]), filepath.Join(args[0], planFile)
				for _, p := range []struct{ to, from *string }{{&in.model, &given.model}, {&in.record, &given.record}, {&in.gates, &given.gates},
					{&in.fastgen, &given.fastgen}, {&in.pyramid, &given.pyramid}} {
					if *p.from != "" {
						*p.to = *p.from
					}
				}
			}
			for _, p := range []struct{ flag, path string }{{"model", in.model}, {"record", in.record}, {"gates", in.gates}, {"fastgen", in.fastgen}, {"pyramid", in.pyramid}} {
				if p.path == "" {
					return usagef("compile needs a run folder, or --%s", p.flag)
				}
			}
			path, release, err := a.output(fallback)
			if err != nil {
				return err
			}
			defer release()
			if a.shared.dryRun {
				return a.ui.Printf("would write %s\n", path)
			}
			var p *plan.Plan
			if method == methodAuto {
				p, err = a.search(cmd.Context(), in, path, &search, flags.method(o))
			} else if method == compile.MethodRecipe {
				var r *compile.Result
				if r, err = a.compile(in, path, o); err == nil {
					p = r.Plan
				}
			} else {
				p, err = a.compileMethod(in, path, method, flags.method(o))
			}
			if err != nil {
				return err
			}
			if err := a.showPlan(path, p); err != nil || a.ui.JSON() {
				return err
			}
			return a.ui.Printf("\nwritten to %s\n", path)
		},
	}
	f := c.Flags()
	f.SortFlags = false
	flags.add(f)
	f.StringVar(&method, "method", compile.MethodRecipe, "method to make a plan of, one of those above")
	search.add(f)
	f.StringSliceVar(&evidence, "evidence", nil, "results of eval to add to the plan RUN/plan.json, or to the plan named in place of RUN")
	f.StringVar(&given.model, "model", "", "model.json of a run folder, or the model itself")
	f.StringVar(&given.record, "record", "", "attention record")
	f.StringVar(&given.gates, "gates", "", "folder with gates, trained here or published by DuoAttention's authors")
	f.StringVar(&given.fastgen, "fastgen", "", "FastGen policies")
	f.StringVar(&given.pyramid, "pyramid", "", "layer budgets")
	return c
}

// methodList lists the methods for the help.
func methodList() string {
	var b strings.Builder
	for _, name := range compile.Methods() {
		m, _ := compile.Describe(name)
		fmt.Fprintf(&b, "  %-14s %s\n", m.Name, m.Short)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// method returns the options of one method that ask for the same; what was not asked for is the method's own.
func (c *compileFlags) method(o compile.Options) compile.MethodOptions {
	m := compile.MethodOptions{Budget: o.Budget, Context: o.Context, BlockSize: o.BlockSize, Dtype: o.Dtype, Lengths: o.Lengths,
		Pool: o.Pool, Kernel: o.Kernel, TopKSinks: o.TopKSinks, Seed: o.Seed}
	if c.changed("sink") || c.changed("recent") {
		m.Sink, m.Recent = o.Sink, o.Recent
	}
	if c.changed("window") {
		m.Window = o.Window
	}
	if c.changed("order") {
		m.Order = o.Order
	}
	return m
}

// compileMethod reads the artefacts, makes the plan of one method and writes it.
func (a *app) compileMethod(from compileInputs, path, method string, o compile.MethodOptions) (*plan.Plan, error) {
	in, err := a.readInputs(from)
	if err != nil {
		return nil, err
	}
	t := a.ui.Begin("compile", 0)
	p, err := compile.Method(method, *in, o)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o777)
	}
	if err == nil {
		err = p.Write(path)
	}
	t.End(err)
	return p, err
}

// compile reads the artefacts, makes the plan and writes it.
func (a *app) compile(from compileInputs, path string, o compile.Options) (*compile.Result, error) {
	in, err := a.readInputs(from)
	if err != nil {
		return nil, err
	}
	t := a.ui.Begin("compile", 0)
	r, err := compile.Compile(*in, o)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o777)
	}
	if err == nil {
		err = r.Plan.Write(path)
	}
	t.End(err)
	return r, err
}

func (a *app) readInputs(from compileInputs) (*compile.Inputs, error) {
	c, err := a.readModel(from.model)
	if err != nil {
		return nil, err
	}
	t := tool()
	in := &compile.Inputs{Tool: plan.Tool{Name: t.Name, Version: t.Version, Commit: t.Commit}, Model: c.Model, Classes: c.Classes,
		ModelID: identityOf(c.Model.SHA256.Config, c.Model.SHA256.Weights, c.Model.SHA256.Tokenizer)}
	rec, err := openRecord(from.record)
	if err != nil {
		return nil, err
	}
	in.Record = rec
	if in.Gates, in.GatesSHA256, err = a.readGates(from.gates); err != nil {
		return nil, err
	}
	if in.FastGen, err = fastgen.Load(from.fastgen); err != nil {
		return nil, err
	}
	if in.Budgets, err = pyramid.Load(from.pyramid); err != nil {
		return nil, err
	}
	if in.PoliciesSHA256, _, err = run.DigestPath(from.fastgen); err != nil {
		return nil, err
	}
	if in.BudgetsSHA256, _, err = run.DigestPath(from.pyramid); err != nil {
		return nil, err
	}
	meta := rec.Meta().Dataset
	ref := plan.DatasetRef{Use: "profile", Task: meta.Task, Samples: meta.Samples, Seed: meta.Seed, SHA256: meta.Hash}
	var lengths []int
	for _, s := range rec.Samples() {
		lengths = append(lengths, len(s.Tokens))
	}
	ref.MinTokens, ref.MaxTokens = slices.Min(lengths), slices.Max(lengths)
	in.Datasets = append(in.Datasets, ref)
	return in, addTraining(in, from.train)
}

// addTraining names the data of the gates where the file is at hand and is the one that they were trained on.
func addTraining(in *compile.Inputs, path string) error {
	if path == "" {
		return nil
	}
	d, err := datasets.Load(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if d.Meta.ContentHash != in.Gates.Meta.Dataset || len(d.Samples) == 0 {
		return nil
	}
	n := lengthsOf(d)
	in.Datasets = append(in.Datasets, plan.DatasetRef{Use: "distill", Task: d.Meta.Task, Samples: len(d.Samples), MinTokens: slices.Min(n), MaxTokens: slices.Max(n),
		Seed: d.Meta.Seed, SHA256: d.Meta.ContentHash})
	return nil
}

// readModel reads a model.json, or opens the model itself.
func (a *app) readModel(path string) (*card, error) {
	if strings.HasSuffix(path, ".json") {
		c, err := readCard(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, ui.Hint(fmt.Errorf("no description of the model: %w", err), "profile and distill write it to the run folder; --model names the model itself, too")
		}
		return c, err
	}
	m, err := a.openModel(path)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	c := cardOf(m, m.Fingerprint())
	return &c, nil
}

// readGates reads gates that were trained here, or those of DuoAttention's authors.
func (a *app) readGates(dir string) (*distill.Gates, string, error) {
	g, err := distill.Load(dir)
	file := distill.GatesFile
	if errors.Is(err, fs.ErrNotExist) {
		file = distill.DuoFile
		var imported *distill.Import
		if g, imported, err = distill.LoadDuo(dir); err == nil && imported != nil {
			for _, tie := range imported.Ties {
				if len(tie.Heads) > 1 {
					a.ui.Note("gates: %d KV heads are tied at %g", len(tie.Heads), tie.Value)
				}
			}
		}
	}
	if err != nil {
		return nil, "", fmt.Errorf("gates: %w", err)
	}
	sha, _, err := run.DigestPath(filepath.Join(dir, file))
	return g, sha, err
}

// planSummary is what compile and run say of a plan with --json.
type planSummary struct {
	Path       string         `json:"path"`
	SHA256     string         `json:"plan_sha256"`
	Heads      map[string]int `json:"kv_heads"`
	Context    int            `json:"context_tokens,omitempty"`
	Kept       float64        `json:"kept_share,omitempty"`
	Mean       float64        `json:"mean_recovery,omitempty"`
	Least      float64        `json:"least_recovery,omitempty"`
	Totals     []plan.Totals  `json:"totals"`
	Warnings   []string       `json:"warnings"`
	RequestMet bool           `json:"request_met"`
}

func summarise(path string, p *plan.Plan) planSummary {
	s := planSummary{Path: path, SHA256: p.Digest(), Heads: p.HeadsByPolicy(), Totals: p.Totals, Warnings: p.Warnings, RequestMet: true}
	if e := p.Evidence; e != nil && e.Recipe != nil {
		r := e.Recipe
		s.Context, s.Kept, s.Mean, s.Least = r.ContextTokens, r.Figures["kept_share"], r.Figures["mean_recovery"], r.Figures["least_recovery"]
		s.RequestMet = r.Figures["request_met"] == 1
	}
	return s
}

// kinds counts the KV heads by kind of policy, in a fixed order.
func kinds(p *plan.Plan) []struct {
	kind  plan.Kind
	heads int
} {
	counts := map[plan.Kind]int{}
	for name, n := range p.HeadsByPolicy() {
		counts[p.Policies[name].Kind()] += n
	}
	var out []struct {
		kind  plan.Kind
		heads int
	}
	for _, k := range []plan.Kind{plan.KindFull, plan.KindStreaming, plan.KindFastGen, plan.KindTopK, plan.KindH2O} {
		if counts[k] > 0 {
			out = append(out, struct {
				kind  plan.Kind
				heads int
			}{k, counts[k]})
		}
	}
	return out
}

// showPlan says what a plan keeps.
func (a *app) showPlan(path string, p *plan.Plan) error {
	for _, w := range p.Warnings {
		a.ui.Warn("%s", sentence(w))
	}
	if a.ui.JSON() {
		return a.ui.PrintJSON(summarise(path, p))
	}
	return a.planTables(p)
}

// sentence makes a plan's warning a message: lowercase, no full stop.
func sentence(w string) string {
	if w == "" {
		return w
	}
	return strings.TrimSuffix(strings.ToLower(w[:1])+w[1:], ".")
}

// planTables shows heads by policy, and what is kept by length.
func (a *app) planTables(p *plan.Plan) error {
	all := p.Model.NLayers * p.Model.NKVHeads
	t := ui.Table{Header: []string{"policy", "KV heads", "share"}}
	for _, k := range kinds(p) {
		t.Add(k.kind, k.heads, percent(float64(k.heads)/float64(all)))
	}
	if err := t.Render(a.ui.Out()); err != nil {
		return err
	}
	if err := a.ui.Printf("\n"); err != nil {
		return err
	}
	t = ui.Table{Header: []string{"tokens", "kept", "of", "share", "saved"}}
	for _, x := range p.Totals {
		note := ""
		if x.PromptTokens > p.Model.MaxPosition {
			note = " *"
		}
		t.Add(ui.Tokens(x.PromptTokens)+note, ui.Bytes(x.KeptBytes), ui.Bytes(x.FullBytes), percent(float64(x.KeptBytes)/float64(x.FullBytes)), ui.Bytes(x.FullBytes-x.KeptBytes))
	}
	if err := t.Render(a.ui.Out()); err != nil {
		return err
	}
	if e := p.Evidence; e != nil && e.Recipe != nil {
		r := e.Recipe
		recovery := ""
		if mean, ok := r.Figures["mean_recovery"]; ok {
			recovery = fmt.Sprintf("; attention on what is kept: %.3f on average, %.3f for the worst KV head", mean, r.Figures["least_recovery"])
		}
		if err := a.ui.Printf("\nat %d tokens: %s of the bytes kept%s\n", r.ContextTokens, percent(r.Figures["kept_share"]), recovery); err != nil {
			return err
		}
	}
	for _, x := range p.Totals {
		if x.PromptTokens > p.Model.MaxPosition {
			return a.ui.Printf("* beyond the model's context of %d tokens\n", p.Model.MaxPosition)
		}
	}
	return nil
}
