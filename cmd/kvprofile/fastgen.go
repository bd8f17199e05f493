package main

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvprofile/kvprofile/fastgen"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// fastgenFlags choose the lattice and its threshold.
type fastgenFlags struct {
	options         fastgen.Options
	group, sampling string
}

func (g *fastgenFlags) add(f *pflag.FlagSet) {
	f.Float64Var(&g.options.Threshold, "threshold", 0.95, "share of the attention that a policy has to recover")
	f.Float64Var(&g.options.FrequentRatio, "frequent-ratio", 0.3, "share of the tokens that count as frequent")
	f.Float64Var(&g.options.LocalRatio, "local-ratio", 0.3, "share of the tokens that count as local; one that was recorded")
	f.StringVar(&g.group, "group-rule", string(fastgen.Min), "how the query heads of a KV head agree: min or mean")
	f.StringVar(&g.sampling, "sample-rule", string(fastgen.Mean), "how samples agree: min or mean")
}

func (g *fastgenFlags) resolve(a *app) fastgen.Options {
	o := g.options
	o.Group, o.Samples, o.Threads = fastgen.Rule(g.group), fastgen.Rule(g.sampling), a.shared.threads
	return o
}

func (a *app) fastgenCommand() *cobra.Command {
	var flags fastgenFlags
	c := &cobra.Command{
		Use:   "fastgen RECORD",
		Short: "Pick a FastGen policy for each KV head from a record",
		Long: `fastgen picks for each KV head the cheapest of FastGen's policies (special tokens,
punctuation, frequent tokens, local tokens, everything) that recovers a share of its
attention. It needs the attention record alone; RECORD is its folder, or a run folder.`,
		Example: `  kvprofile fastgen out/model
  kvprofile fastgen out/model/record --threshold 0.98 -o fastgen98.json`,
		Args: exactly(1, "a record"),
		RunE: func(cmd *cobra.Command, args []string) error {
			record, beside := recordAt(args[0])
			path, release, err := a.output(filepath.Join(beside, fastgenFile))
			if err != nil {
				return err
			}
			defer release()
			if a.shared.dryRun {
				return a.ui.Printf("would write %s\n", path)
			}
			r, err := a.fastgen(cmd.Context(), record, path, flags.resolve(a))
			if err != nil {
				return err
			}
			return a.showFastGen(path, r)
		},
	}
	c.Flags().SortFlags = false
	flags.add(c.Flags())
	return c
}

// fastgen analyses a record and writes the policies.
func (a *app) fastgen(ctx context.Context, record, path string, o fastgen.Options) (*fastgen.Result, error) {
	rec, err := openRecord(record)
	if err != nil {
		return nil, err
	}
	t := a.ui.Begin("fastgen", 0)
	r, err := fastgen.Analyze(ctx, rec, tool().Version, o)
	if err == nil {
		err = r.Save(path)
	}
	t.End(err)
	return r, err
}

func (a *app) showFastGen(path string, r *fastgen.Result) error {
	counts := make([]int, len(r.Lattice))
	all := 0
	for _, layer := range r.Layers {
		for _, h := range layer {
			counts[h.Policy]++
			all++
		}
	}
	if a.ui.JSON() {
		heads := map[string]int{}
		for i, p := range r.Lattice {
			heads[p.Name] = counts[i]
		}
		return a.ui.PrintJSON(struct {
			Path      string            `json:"path"`
			Threshold float64           `json:"threshold"`
			Heads     map[string]int    `json:"kv_heads"`
			Agreement fastgen.Agreement `json:"agreement"`
		}{path, r.Options.Threshold, heads, r.Agreement})
	}
	t := ui.Table{Header: []string{"policy", "KV heads", "share"}}
	for i, p := range r.Lattice {
		t.Add(p.Name, counts[i], percent(float64(counts[i])/float64(all)))
	}
	if err := t.Render(a.ui.Out()); err != nil {
		return err
	}
	return a.ui.Printf("\nfirst and second half of the prompts agree on %s of the KV heads, prompts and answers on %s\nwritten to %s\n",
		percent(r.Agreement.Halves), percent(r.Agreement.Answers), path)
}

func percent(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) }
