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
	rate           float64
	regularisation float64
	sink, recent   int
	slow           bool
	stash, teacher int64 // MiB
	changed        func(string) bool
}

func (d *distillFlags) add(f *pflag.FlagSet) {
	f.StringVar(&d.recipe, "recipe", "cpu", "how gates are trained: "+strings.Join(distill.Recipes(), ", "))
	f.IntVar(&d.steps, "steps", 0, "training steps (default of the recipe)")
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
			m, err := a.openWithTokenizer(args[0])
			if err != nil {
				return err
			}
			defer m.Close()
			d, err := datasets.Load(dataset)
			if err != nil {
				return err
			}
			if err := fits(d, dataset, m); err != nil {
				return err
			}
			if a.shared.dryRun {
				return a.dryRun(m, []cost{distillCost(m.Config, lengthsOf(d), r.Options)})
			}
			s, err := a.session(a.folderOf(m), m)
			if err != nil {
				return err
			}
			defer s.Close()
			var inputs []input
			inputs = append(inputs, input{"dataset", dataset})
			if record != "" {
				inputs = append(inputs, input{"record", record})
			}
			if err := s.distill(cmd.Context(), d, inputs, r.Options, record); err != nil {
				return err
			}
			return a.showGates(s.folder.Path(gatesDir))
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&dataset, "dataset", "", "passkeys to train on")
	f.StringVar(&record, "record", "", "attention record whose scores are compared with the gates")
	flags.add(f)
	return c
}

// dataLightTexts is the number of samples, and dataLightTokens the number of tokens of each, that the cheap score reads.
const (
	dataLightTexts  = 4
	dataLightTokens = 512
)

// distill is the stage that trains the gates, adds the cheap scores and their agreement.
func (s *session) distill(ctx context.Context, d *datasets.Dataset, in []input, o distill.Options, record string) error {
	inputs, err := s.inputs(in)
	if err != nil {
		return err
	}
	stage := run.Stage{Name: "distill", Settings: o, Inputs: inputs, Outputs: []string{gatesDir}, Costly: true}
	return s.do(ctx, stage, func(ctx context.Context) error {
		m, err := s.engine()
		if err != nil {
			return err
		}
		g, err := s.train(ctx, m, d, o, record)
		if err != nil {
			return err
		}
		if err := g.Save(s.folder.Path(gatesDir)); err != nil {
			return err
		}
		// Only now: until the gates are whole, an interrupted run needs the checkpoint.
		return os.Remove(s.folder.Path(gatesDir, distill.CheckpointFile))
	})
}

func (s *session) train(ctx context.Context, m *engine.Model, d *datasets.Dataset, o distill.Options, record string) (*distill.Gates, error) {
	o.Model = identity(s.print)
	o.Checkpoint = s.folder.Path(gatesDir)
	t := s.app.ui.Begin("distill", o.Steps)
	g, err := distill.Train(ctx, m, d, o, func(p distill.Progress) {
		if p.Step == p.Resumed+1 {
			t.Set(p.Resumed, p.Steps, "")
		}
		t.Set(p.Step, p.Steps, fmt.Sprintf("loss %.4g, mean gate %.3f", p.Point.Loss, p.Point.Mean))
	})
	t.End(err)
	if err != nil {
		return nil, err
	}
	var texts [][]int32
	for _, s := range d.Samples[:min(dataLightTexts, len(d.Samples))] {
		texts = append(texts, s.Tokens[:min(dataLightTokens, len(s.Tokens))])
	}
	light, err := distill.DataLight(ctx, m, texts)
	if err != nil {
		return nil, err
	}
	g.Scores = append(g.Scores, light)
	if record != "" {
		scores, err := recordScores(record)
		if err != nil {
			return nil, err
		}
		g.Scores = append(g.Scores, scores...)
	}
	if err := g.Agree(o.Seed); err != nil {
		return nil, err
	}
	return g, nil
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
