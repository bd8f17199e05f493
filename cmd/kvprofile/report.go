package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/internal/report"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
)

const reportFile = "report.html"

func (a *app) reportCommand() *cobra.Command {
	var evals []string
	var figures string
	c := &cobra.Command{
		Use:   "report RUN",
		Short: "Show a run folder as one HTML file",
		Long: `report writes one HTML file that needs no network: policies, gates, layer budgets,
attention maps, recovery, evaluations, memory against the length of the context,
agreement of the scores, and where all of it comes from. What the folder does not have
is left out with a sentence.

It shows the folder's eval.json and those that --eval names. --figures writes each figure
as an SVG file and as a PNG file of twice its size.`,
		Example: `  kvprofile report out/model
  kvprofile report out/model --eval eval.json -o report.html
  kvprofile report out/model --figures figures`,
		Args: exactly(1, "a run folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			// The folder's own report is made of what the folder has now: an old one is no loss.
			path, release, err := a.claim(filepath.Join(args[0], reportFile), a.shared.force || a.shared.out == "")
			if err != nil {
				return err
			}
			defer release()
			if figures != "" {
				if err := run.CheckReference(figures); err != nil {
					return err
				}
				if err := freeFolder(figures, a.shared.force); err != nil {
					return err
				}
			}
			t := a.ui.Begin("report", 0)
			result, err := makeReport(args[0], path, figures, evals, a.shared.dryRun)
			t.End(err)
			if err != nil {
				return err
			}
			return a.showReport(result)
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringSliceVar(&evals, "eval", nil, "further evaluations to show beside the folder's eval.json")
	f.StringVar(&figures, "figures", "", "folder that each figure is written to, as an SVG and as a PNG file")
	return c
}

// freeFolder refuses a folder that has something in it.
func freeFolder(dir string, force bool) error {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case len(entries) > 0 && !force:
		return ui.Hint(fmt.Errorf("%s is not empty", dir), "choose another folder with --figures, or replace what is there with --force")
	}
	return nil
}

// reported is the result of report.
type reported struct {
	Path    string   `json:"report"`
	Bytes   int64    `json:"bytes"`
	Figures []string `json:"figures"`
	Missing []string `json:"missing"`
	figures int      // each is in several files
	dryRun  bool
}

func makeReport(dir, path, figures string, evals []string, dryRun bool) (*reported, error) {
	in, err := report.Open(dir, evals...)
	var other *report.ModelError
	if errors.As(err, &other) {
		return nil, &otherModelError{err}
	}
	if err != nil {
		return nil, err
	}
	r, err := report.New(in)
	if err != nil {
		return nil, err
	}
	out := &reported{Path: path, Figures: []string{}, Missing: r.Missing(), dryRun: dryRun}
	if dryRun {
		return out, nil
	}
	if err := run.WriteAtomic(path, r.WriteHTML); err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	out.Bytes = info.Size()
	if figures != "" {
		out.figures = len(r.Figures())
		if out.Figures, err = r.WriteFigures(figures); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (a *app) showReport(r *reported) error {
	for _, m := range r.Missing {
		a.ui.Note("%s", m)
	}
	if a.ui.JSON() {
		return a.ui.PrintJSON(r)
	}
	if r.dryRun {
		return a.ui.Printf("would write %s\n", r.Path)
	}
	if len(r.Figures) > 0 {
		return a.ui.Printf("report in %s (%s), %d figures in %s\n", r.Path, ui.Bytes(r.Bytes), r.figures, filepath.Dir(r.Figures[0]))
	}
	return a.ui.Printf("report in %s (%s)\n", r.Path, ui.Bytes(r.Bytes))
}
