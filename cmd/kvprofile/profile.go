package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/profile"
)

// profileFlags choose what is recorded.
type profileFlags struct {
	localRatios []string
	windows     []int
	recent      []int
	sinks       []int
	mapSamples  int
	maps        string
	heads       []string
	batch       int
}

func (p *profileFlags) add(f *pflag.FlagSet) {
	d := profile.DefaultGrid()
	var ratios []string
	for _, r := range d.LocalRatios {
		ratios = append(ratios, strconv.FormatFloat(r, 'g', -1, 64))
	}
	f.StringSliceVar(&p.localRatios, "local-ratios", ratios, "FastGen's local windows, as shares of the prompt")
	f.IntSliceVar(&p.windows, "windows", d.Windows, "observation windows in tokens")
	f.IntSliceVar(&p.recent, "recent-widths", d.Recent, "recent parts of streaming policies in tokens")
	f.IntSliceVar(&p.sinks, "sink-widths", d.Sinks, "sinks of streaming policies in tokens")
	f.IntVar(&p.mapSamples, "map-samples", d.MapSamples, "first samples with attention maps; 0 means none")
	f.StringVar(&p.maps, "maps", "pooled", "pooled, or exact for the heads of --heads")
	f.StringSliceVar(&p.heads, "heads", nil, "query heads with exact maps: layer:head,...")
	f.IntVar(&p.batch, "batch", 1, "samples that pass through the model together: the weights are read once for each batch")
}

// grid turns the flags into what profile takes.
func (p *profileFlags) grid() (profile.Grid, error) {
	g := profile.DefaultGrid()
	g.LocalRatios, g.Windows, g.Recent, g.Sinks, g.MapSamples = nil, p.windows, p.recent, p.sinks, p.mapSamples
	for _, text := range p.localRatios {
		r, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil {
			return g, usagef("--local-ratios: %q is no number", text)
		}
		g.LocalRatios = append(g.LocalRatios, r)
	}
	if p.mapSamples == 0 {
		g.MapSamples = profile.NoMaps
	}
	switch {
	case p.maps != "pooled" && p.maps != "exact":
		return g, usagef("--maps must be pooled or exact, not %q", p.maps)
	case (p.maps == "exact") != (len(p.heads) > 0):
		return g, usagef("--maps exact and --heads belong together: exact maps are large")
	}
	for _, text := range p.heads {
		layer, head, ok := strings.Cut(text, ":")
		l, err1 := strconv.Atoi(layer)
		h, err2 := strconv.Atoi(head)
		if !ok || err1 != nil || err2 != nil {
			return g, usagef("--heads: %q is not layer:head", text)
		}
		g.ExactHeads = append(g.ExactHeads, profile.Head{Layer: l, Head: h})
	}
	return g, nil
}

func (a *app) profileCommand() *cobra.Command {
	var flags profileFlags
	var dataset string
	c := &cobra.Command{
		Use:   "profile MODEL --dataset FILE",
		Short: "Record how a model attends over a dataset",
		Long: `profile runs a model over a dataset and records its attention in Parquet tables: what each
token received from which queries, how much falls on sinks, recent tokens, needles. All
that fastgen, pyramid and compile need is in the record; no attention map is stored
whole unless asked for. Stopped and started again, it goes on at the next sample.`,
		Example: `  kvprofile datasets build model.gguf --task needles -o needles.parquet
  kvprofile profile model.gguf --dataset needles.parquet -o out/model
  kvprofile profile model.gguf --dataset needles.parquet --maps exact --heads 3:1,7:0`,
		Args: exactly(1, "a model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if dataset == "" {
				return usagef("profile needs --dataset; %s datasets build makes one", program)
			}
			grid, err := flags.grid()
			if err != nil {
				return err
			}
			m, d, err := a.openWithDataset(args[0], dataset)
			if err != nil {
				return err
			}
			defer m.Close()
			if a.shared.dryRun {
				c, err := profileCost(m.Config, d, grid)
				if err != nil {
					return err
				}
				return a.dryRun(m, []cost{c})
			}
			s, err := a.session(a.folderOf(m), m)
			if err != nil {
				return err
			}
			defer s.Close()
			if err := s.profile(cmd.Context(), d, input{"dataset", dataset}, grid, flags.batch); err != nil {
				return err
			}
			return a.showRecord(s.folder.Path(recordDir))
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&dataset, "dataset", "", "what the model reads")
	flags.add(f)
	return c
}

// profile is the stage that records attention.
func (s *session) profile(ctx context.Context, d *datasets.Dataset, in input, grid profile.Grid, batch int) error {
	inputs, err := s.inputs([]input{in})
	if err != nil {
		return err
	}
	stage := run.Stage{Name: "profile", Settings: grid, Inputs: inputs, Outputs: []string{recordDir}, Costly: true}
	return s.do(ctx, stage, func(ctx context.Context) error {
		set, err := s.engine()
		if err != nil {
			return err
		}
		t := s.app.ui.Begin("profile", len(d.Samples)*s.model.Config.Layers)
		furthest := 0 // several devices are not at one layer
		err = profile.RunOn(ctx, set, d, s.model.Tokenizer, profile.Options{Dir: s.folder.Path(recordDir), Tool: tool().Version,
			ModelName: s.model.Name, SHA256: digests(s.print), Grid: grid, Batch: batch}, func(p profile.Progress) {
			furthest = max(furthest, p.Done*p.Layers+p.Layer)
			t.Set(furthest, p.Samples*p.Layers, fmt.Sprintf("%d of %d samples", p.Done, p.Samples))
		})
		t.End(err)
		return err
	})
}
