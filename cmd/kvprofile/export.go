package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/internal/export"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/plan"
)

func (a *app) exportCommand() *cobra.Command {
	var to string
	var o export.Options
	c := &cobra.Command{
		Use:   "export PLAN",
		Short: "Write a plan in the format of another tool",
		Long: `export writes a cache plan as DuoAttention, kvpress, SnapKV and PyramidKV, HeadKV,
TensorRT-LLM, or readers of kinds of layers take it, or as a CSV table.

No other format says all that a plan says. What cannot be said is listed on standard
error, and with --json beside the files, with the bytes that it costs. An export keeps at
least what the plan keeps, but for losses that are marked "less".`,
		Example: `  kvprofile export plan.json --to duo -o pattern
  kvprofile export plan.json --to trt-llm -o kv_cache_config.json
  kvprofile export plan.json --to csv --json`,
		Args: exactly(1, "a plan"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if to == "" {
				return usagef("export needs --to: one of %s", export.Names())
			}
			p, err := readPlan(args[0])
			if err != nil {
				return err
			}
			r, err := export.Export(p, export.Format(to), o)
			if errors.Is(err, export.ErrPins) {
				return ui.Hint(err, "pinned tokens may stand anywhere, so nothing could be evicted; --without-pins leaves them out and keeps less than the plan")
			}
			if err != nil {
				return err
			}
			paths, err := a.writeExport(r, filepath.Join(filepath.Dir(args[0]), "export", to))
			if err != nil {
				return err
			}
			return a.showExport(r, paths)
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&to, "to", "", "format: "+export.Names())
	f.IntVar(&o.Length, "length", 0, "longest prompt in tokens that the export is for (default: the model's context; for kvpress' ratios the length that the budget is about)")
	f.BoolVar(&o.WithoutPins, "without-pins", false, "leave out pins, which most formats cannot say, and so keep less than the plan")
	return c
}

// readPlan reads a plan that need not belong to any model at hand.
func readPlan(path string) (*plan.Plan, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	p, err := plan.Parse(data)
	if err != nil {
		return nil, ui.Hint(fmt.Errorf("%s: %w", path, err), "%s check lists all that is wrong with it", program)
	}
	return p, nil
}

// writeExport writes the files of an export into a folder; a single file can be named by --out itself.
func (a *app) writeExport(r *export.Result, fallback string) ([]string, error) {
	dir := a.shared.out
	if dir == "" {
		dir = fallback
	}
	var paths []string
	for _, f := range r.Files {
		paths = append(paths, filepath.Join(dir, f.Name))
	}
	if len(paths) == 1 && strings.EqualFold(filepath.Ext(dir), filepath.Ext(paths[0])) {
		paths[0], dir = dir, filepath.Dir(dir)
	}
	if err := run.CheckReference(dir); err != nil {
		return nil, err
	}
	for _, path := range paths {
		if _, err := os.Stat(path); err == nil && !a.shared.force {
			return nil, ui.Hint(fmt.Errorf("%s is already there", path), "choose another folder with --out, or replace it with --force")
		}
	}
	if a.shared.dryRun {
		return paths, nil
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, err
	}
	for i, f := range r.Files {
		if err := run.WriteAtomic(paths[i], func(w io.Writer) error {
			_, err := w.Write(f.Data)
			return err
		}); err != nil {
			return nil, err
		}
	}
	return paths, nil
}

// showExport lists the files and the sizes as a result, and what is lost as notes. Losses that can leave less than the
// plan are warnings.
func (a *app) showExport(r *export.Result, paths []string) error {
	var unsaid []string
	for _, loss := range r.Losses {
		text := loss.Of + ": " + loss.Reason
		if loss.KVHeads > 0 {
			text += fmt.Sprintf(" (%d KV heads: %s)", loss.KVHeads, strings.Join(loss.Policies, ", "))
		}
		if loss.Bytes != 0 {
			text += fmt.Sprintf(": %s at %d tokens", signed(loss.Bytes), r.At.PromptTokens+r.At.GeneratedTokens)
		}
		switch loss.Effect {
		case export.Less:
			a.ui.Warn("less than the plan: %s", text)
		case export.More:
			a.ui.Note("more than the plan: %s", text)
		case export.Other:
			a.ui.Note("other than the plan: %s", text)
		default:
			unsaid = append(unsaid, text)
		}
	}
	if len(unsaid) > 0 {
		a.ui.Note("not said: %s", strings.Join(unsaid, "; "))
	}
	if a.ui.JSON() {
		return a.ui.PrintJSON(struct {
			*export.Result
			Files []string `json:"files"`
		}{r, paths})
	}
	t := ui.Table{Header: []string{"tokens", "plan", "export", "difference", "full"}}
	for _, x := range r.Totals {
		t.Add(fmt.Sprintf("%s + %d", ui.Tokens(x.PromptTokens), x.GeneratedTokens), ui.Bytes(x.Plan), ui.Bytes(x.Export), signed(x.Export-x.Plan), ui.Bytes(x.Full))
	}
	if err := t.Render(a.ui.Out()); err != nil {
		return err
	}
	verb := "written to"
	if a.shared.dryRun {
		verb = "would write"
	}
	return a.ui.Printf("\n%s %s\n", verb, strings.Join(paths, ", "))
}

// signed shows a difference of bytes.
func signed(n int64) string {
	if n > 0 {
		return "+" + ui.Bytes(n)
	}
	return ui.Bytes(n)
}
