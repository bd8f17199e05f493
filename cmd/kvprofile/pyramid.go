package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/profile"
	"github.com/kvprofile/kvprofile/pyramid"
)

// pyramidFlags choose how a budget is divided among layers.
type pyramidFlags struct {
	mode    string
	share   float64
	tokens  int
	window  int
	beta    float64
	floor   float64
	mass    float64
	changed func(string) bool
}

func modeNames() string {
	var names []string
	for _, m := range pyramid.Modes() {
		names = append(names, string(m))
	}
	return strings.Join(names, ", ")
}

func (p *pyramidFlags) add(f *pflag.FlagSet) {
	f.StringVar(&p.mode, "schedule", string(pyramid.Keys), "how the budget is divided: "+modeNames())
	f.Float64Var(&p.share, "topk-share", 0.25, "average budget of top-k heads as a share of the longest prompt recorded")
	f.IntVar(&p.tokens, "topk-tokens", 0, "the same in tokens")
	f.IntVar(&p.window, "schedule-window", 8, "window that the schedules leave out, in tokens; 0 means none")
	f.Float64Var(&p.beta, "beta", 20, "steepness of arithmetic and geometric: average / smallest budget")
	f.Float64Var(&p.floor, "floor", 0.25, "measured modes: share of the average that every layer gets; 0 means none")
	f.Float64Var(&p.mass, "mass", 0.9, "measured-keys: share of the attention that keys are counted for; one that was recorded")
	p.changed = f.Changed
}

func (p *pyramidFlags) resolve() (pyramidSettings, error) {
	s := pyramidSettings{Measure: pyramid.MeasureOptions{Mass: p.mass}, Share: p.share, Tokens: p.tokens,
		Request: pyramid.Request{Mode: pyramid.Mode(p.mode), Beta: p.beta, Window: p.window, Floor: p.floor}}
	if p.window == 0 {
		s.Request.Window = pyramid.NoWindow
	}
	if p.floor == 0 {
		s.Request.Floor = pyramid.NoFloor
	}
	switch {
	case p.changed("topk-share") && p.changed("topk-tokens"):
		return s, usagef("--topk-share and --topk-tokens exclude one another")
	case !(p.share > 0 && p.share <= 1):
		return s, usagef("--topk-share must lie in (0, 1], not %g", p.share)
	case p.changed("topk-tokens") && (p.tokens < 1 || p.tokens > 1<<27):
		return s, usagef("--topk-tokens must be positive, not %d", p.tokens)
	case p.floor < 0 || p.window < 0:
		return s, usagef("--floor and --schedule-window must not be negative")
	}
	return s, nil
}

// pyramidSettings are what the stage depends on.
type pyramidSettings struct {
	Request pyramid.Request        `json:"request"`
	Measure pyramid.MeasureOptions `json:"measure"`
	Share   float64                `json:"share"`
	Tokens  int                    `json:"tokens"`
}

func (a *app) pyramidCommand() *cobra.Command {
	var flags pyramidFlags
	c := &cobra.Command{
		Use:   "pyramid RECORD",
		Short: "Divide a budget among layers from a record",
		Long: `pyramid divides a budget of tokens among the layers: by PyramidKV's schedules, or by what
the attention record says that the layers need. The budgets add up exactly. RECORD is
the record's folder, or a run folder.`,
		Example: `  kvprofile pyramid out/model
  kvprofile pyramid out/model --schedule arithmetic --topk-tokens 512 -o arithmetic.json`,
		Args: exactly(1, "a record"),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := flags.resolve()
			if err != nil {
				return err
			}
			record, beside := recordAt(args[0])
			path, release, err := a.output(filepath.Join(beside, pyramidFile))
			if err != nil {
				return err
			}
			defer release()
			if a.shared.dryRun {
				return a.ui.Printf("would write %s\n", path)
			}
			r, err := a.pyramid(cmd.Context(), record, path, s)
			if err != nil {
				return err
			}
			return a.showPyramid(path, r)
		},
	}
	c.Flags().SortFlags = false
	flags.add(c.Flags())
	return c
}

// pyramid measures a record and writes the budgets.
func (a *app) pyramid(ctx context.Context, record, path string, s pyramidSettings) (*pyramid.Artefact, error) {
	rec, err := openRecord(record)
	if err != nil {
		return nil, err
	}
	q := s.Request
	average := s.Tokens
	if average == 0 {
		longest := 0
		for _, x := range rec.Samples() {
			longest = max(longest, x.Prompt)
		}
		average = profile.Tokens(s.Share, longest)
	}
	q.Total = average * rec.Meta().Model.Layers
	t := a.ui.Begin("pyramid", 0)
	r, err := pyramid.Build(ctx, rec, tool().Version, s.Measure, q)
	if err == nil {
		err = r.Save(path)
	}
	t.End(err)
	return r, err
}

func (a *app) showPyramid(path string, r *pyramid.Artefact) error {
	for _, w := range r.Warnings {
		a.ui.Note("%s", w.Message)
	}
	if a.ui.JSON() {
		return a.ui.PrintJSON(struct {
			Path     string            `json:"path"`
			Mode     pyramid.Mode      `json:"mode"`
			Length   int               `json:"length"`
			Total    int               `json:"total_tokens"`
			Budgets  []int             `json:"budgets"`
			Warnings []pyramid.Warning `json:"warnings"`
		}{path, r.Request.Mode, r.Request.Length, r.Total(), r.Budgets, r.Warnings})
	}
	t := ui.Table{Header: []string{"layer", "tokens", "share of " + fmt.Sprint(r.Request.Length)}}
	for l, b := range r.Budgets {
		t.Add(l, b, percent(float64(b)/float64(r.Request.Length)))
	}
	if err := t.Render(a.ui.Out()); err != nil {
		return err
	}
	return a.ui.Printf("\n%d tokens over %d layers, %s\nwritten to %s\n", r.Total(), len(r.Budgets), r.Request.Mode, path)
}
