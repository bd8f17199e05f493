package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// distillFlags choose how gates are trained.
type distillFlags struct {
	recipe         string
	steps          int
	batch          int
	rate           float64
	regularisation float64
	sink, recent   int
	slow           bool
	stash, teacher int64 // MiB
	changed        func(string) bool
}

// add adds the flags; the number of samples a step is called batch here, and otherwise where another stage has a flag of that name.
func (d *distillFlags) add(f *pflag.FlagSet, batch string) {
	f.StringVar(&d.recipe, "recipe", "cpu", "how gates are trained: "+strings.Join(distill.Recipes(), ", "))
	f.IntVar(&d.steps, "steps", 0, "training steps (default of the recipe)")
	f.IntVar(&d.batch, batch, 1, "samples of a training step: gradients are averaged, and the samples shared out to the devices")
	f.Float64Var(&d.rate, "learning-rate", 0, "peak learning rate (default of the recipe)")
	f.Float64Var(&d.regularisation, "regularisation", 0, "weight of the mean gate in the loss (default of the recipe)")
	f.IntVar(&d.sink, "train-sink", 0, "first tokens that a streaming head sees in training (default of the recipe)")
	f.IntVar(&d.recent, "train-recent", 0, "last tokens that a streaming head sees in training (default of the recipe)")
	f.BoolVar(&d.slow, "allow-low-rate", false, "train even if the learning rates are too small to move the gates")
	f.Int64Var(&d.stash, "stash-mib", 0, "memory for activations; above it they are computed again (default of the recipe)")
	f.Int64Var(&d.teacher, "teacher-mib", 0, "memory for the unmodified model's results (default of the recipe)")
	d.changed = f.Changed
}

// resolve returns the recipe with the flags that were given.
func (d *distillFlags) resolve(a *app) (distill.Recipe, error) {
	r, err := distill.RecipeNamed(d.recipe)
	if err != nil {
		return r, usagef("%v", err)
	}
	o := &r.Options
	o.Seed, o.Tool, o.AllowLowRate = a.shared.seed, tool().Version, d.slow
	if d.batch < 1 {
		return r, usagef("a training step takes at least one sample, not %d", d.batch)
	}
	if d.batch > 1 { // one sample is no batch: settings and files are as without
		o.Batch = d.batch
	}
	for flag, set := range map[string]func(){
		"steps":          func() { o.Steps = d.steps },
		"learning-rate":  func() { o.LearningRate = d.rate },
		"regularisation": func() { o.Regularisation = d.regularisation },
		"train-sink":     func() { o.Sink = d.sink },
		"train-recent":   func() { o.Recent = d.recent },
		"stash-mib":      func() { o.StashLimit = d.stash << 20 },
		"teacher-mib":    func() { o.TeacherLimit = d.teacher << 20 },
	} {
		if d.changed(flag) {
			set()
		}
	}
	r.Data.Seed, r.Data.ToolVersion = a.shared.seed, tool().Version
	return r, nil
}

func (a *app) distillCommand() *cobra.Command {
	var flags distillFlags
	var dataset, record string
	c := &cobra.Command{
		Use:   "distill MODEL --dataset FILE",
		Short: "Train DuoAttention's gates",
		Long: `distill trains one gate for each layer and KV head: near 1 where the head needs the
whole cache, near 0 where the first and the last tokens do. It writes a folder with
gates.parquet, the files that DuoAttention reads (full_attention_heads.tsv, config.json),
the training curve, and the rank correlations with cheaper scores. Stopped and started
again with the same flags, it goes on and ends with the same bytes.`,
		Example: `  kvprofile datasets build model.gguf --task passkeys -o train.parquet
  kvprofile distill model.gguf --dataset train.parquet -o gates`,
		Args: exactly(1, "a model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if dataset == "" {
				return usagef("distill needs --dataset; %s datasets build --task passkeys makes one", program)
			}
			r, err := flags.resolve(a)
			if err != nil {
				return err
			}
			m, d, err := a.openWithDataset(args[0], dataset)
			if err != nil {
				return err
			}
			defer m.Close()
			if a.shared.dryRun {
				return a.dryRun(m, []cost{distillCost(m.Config, lengthsOf(d), r.Options)})
			}
			s, err := a.session(a.folderOf(m), m)
			if err != nil {
				return err
			}
			defer s.Close()
			if err := s.distill(cmd.Context(), d, input{"dataset", dataset}, r.Options); err != nil {
				return err
			}
			if record == "" {
				if _, err := os.Stat(s.folder.Path(recordDir)); err == nil {
					record = s.folder.Path(recordDir)
				}
			}
			if err := s.scores(cmd.Context(), d, input{"dataset", dataset}, record, a.shared.seed); err != nil {
				return err
			}
			return a.showGates(s.folder.Path(gatesDir))
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&dataset, "dataset", "", "passkeys to train on")
	f.StringVar(&record, "record", "", "attention record whose scores are compared with the gates (default: the one in the run folder)")
	flags.add(f, "batch")
	return c
}

// dataLightTexts is the number of samples, and dataLightTokens the number of tokens of each, that the cheap score reads.
const (
	dataLightTexts  = 4
	dataLightTokens = 512
)

// distill is the stage that trains the gates.
func (s *session) distill(ctx context.Context, d *datasets.Dataset, in input, o distill.Options) error {
	inputs, err := s.inputs([]input{in})
	if err != nil {
		return err
	}
	stage := run.Stage{Name: "distill", Settings: o, Inputs: inputs, Outputs: []string{trainedDir}, Scratch: []string{checkpointDir}, Costly: true}
	o.Model, o.Checkpoint = identity(s.print), s.folder.Path(checkpointDir)
	return s.do(ctx, stage, func(ctx context.Context) error {
		set, err := s.engine()
		if err != nil {
			return err
		}
		if err := os.MkdirAll(o.Checkpoint, 0o777); err != nil {
			return err
		}
		if used := o.BatchSize(); used < set.Len() {
			s.app.ui.Note("distill: steps of %d samples use as many of the %d GPUs; larger batches use more, and are another training", used, set.Len())
		}
		t := s.app.ui.Begin("distill", o.Steps)
		g, err := distill.TrainOn(ctx, set, d, o, func(p distill.Progress) {
			if p.Step == p.Resumed+1 {
				t.Set(p.Resumed, p.Steps, "")
			}
			t.Set(p.Step, p.Steps, fmt.Sprintf("loss %.4g, mean gate %.3f", p.Point.Loss, p.Point.Mean))
		})
		if err == nil {
			err = g.Save(s.folder.Path(trainedDir))
		}
		t.End(err)
		return err
	})
}

// scores is the stage that puts cheaper scores beside the trained gates, with their rank correlations. It is apart from
// the training, so that another record does not make that begin anew.
func (s *session) scores(ctx context.Context, d *datasets.Dataset, in input, record string, seed uint64) error {
	from := []input{{"trained", s.folder.Path(trainedDir)}, in}
	if record != "" {
		from = append(from, input{"record", record})
	}
	inputs, err := s.inputs(from)
	if err != nil {
		return err
	}
	settings := struct {
		Texts  int    `json:"texts"`
		Tokens int    `json:"tokens"`
		Seed   uint64 `json:"seed"`
	}{dataLightTexts, dataLightTokens, seed}
	return s.do(ctx, run.Stage{Name: "scores", Settings: settings, Inputs: inputs, Outputs: []string{gatesDir}}, func(ctx context.Context) error {
		set, err := s.engine()
		if err != nil {
			return err
		}
		t := s.app.ui.Begin("scores", 0)
		err = score(ctx, set.First(), d, s.folder.Path(trainedDir), record, s.folder.Path(gatesDir), seed)
		t.End(err)
		return err
	})
}

// score reads trained gates and writes them with their scores.
func score(ctx context.Context, m *engine.Model, d *datasets.Dataset, trained, record, dir string, seed uint64) error {
	g, err := distill.Load(trained)
	if err != nil {
		return err
	}
	var texts [][]int32
	for _, s := range d.Samples[:min(dataLightTexts, len(d.Samples))] {
		texts = append(texts, s.Tokens[:min(dataLightTokens, len(s.Tokens))])
	}
	light, err := distill.DataLight(ctx, m, texts)
	if err != nil {
		return err
	}
	g.Scores = append(g.Scores, light)
	if record != "" {
		scores, err := recordScores(record)
		if err != nil {
			return err
		}
		g.Scores = append(g.Scores, scores...)
	}
	if err := g.Agree(seed); err != nil {
		return err
	}
	return g.Save(dir)
}

// showGates says what came out of a training.
func (a *app) showGates(dir string) error {
	g, err := distill.Load(dir)
	if err != nil {
		return err
	}
	open, all := 0, 0
	for _, layer := range g.Values {
		for _, v := range layer {
			all++
			if v > 0.5 {
				open++
			}
		}
	}
	ties := distill.Ties(g.Values)
	if a.ui.JSON() {
		return a.ui.PrintJSON(struct {
			Path      string                `json:"path"`
			Gates     [][]float64           `json:"gates"`
			Open      int                   `json:"gates_above_half"`
			Ties      []distill.Tie         `json:"ties"`
			Agreement []distill.Correlation `json:"agreement"`
		}{dir, g.Values, open, ties, g.Agreement})
	}
	t := ui.Table{Left: []int{1}}
	t.Add("folder", dir)
	t.Add("gates above .5", fmt.Sprintf("%d of %d", open, all))
	for _, c := range g.Agreement {
		value := c.Undefined
		if value == "" {
			value = fmt.Sprintf("%.2f (95 %%: %.2f to %.2f)", c.Rho, c.Low, c.High)
		}
		t.Add(fmt.Sprintf("rank correlation of %s and %s", c.A, c.B), value)
	}
	return t.Render(a.ui.Out())
}
