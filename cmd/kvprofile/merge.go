package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/profile"
)

func (a *app) mergeCommand() *cobra.Command {
	var duplicates string
	c := &cobra.Command{
		Use:   "merge RECORD... -o DIR",
		Short: "Make one attention record of several",
		Long: `merge joins attention records that were made on several machines or over several
datasets. They must be of one model, tokenizer, purpose and grid; the model itself is not
needed. RECORD is a record's folder, or a run folder.

The order of the records does not matter. Samples with pooled maps come first, then the
order is that of task, seed, length and a hash of the tokens. The new record appears whole
or not at all.`,
		Example: `  kvprofile merge machine1/out/model machine2/out/model -o merged/record
  kvprofile merge a b c -o all --duplicates drop
  kvprofile fastgen merged/record`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return ui.Hint(usagef("%s needs two records or more", cmd.CommandPath()), "usage: %s", cmd.UseLine())
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if duplicates != "refuse" && duplicates != "drop" {
				return usagef("--duplicates: %q is neither refuse nor drop", duplicates)
			}
			if a.shared.out == "" {
				return usagef("merge needs --out: the folder of the new record")
			}
			return a.merge(cmd.Context(), args, profile.MergeOptions{Dir: filepath.Clean(a.shared.out), Replace: a.shared.force, DropDuplicates: duplicates == "drop"})
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&duplicates, "duplicates", "refuse", "samples that stand in several records: refuse, or drop all but one")
	return c
}

func (a *app) merge(ctx context.Context, paths []string, o profile.MergeOptions) error {
	if err := run.CheckReference(filepath.Dir(o.Dir)); err != nil {
		return err
	}
	if err := a.replaceable(o); err != nil {
		return err
	}
	var records []*profile.Record
	samples := 0
	for _, path := range paths {
		dir, _ := recordAt(path)
		r, err := openRecord(dir)
		if err != nil {
			return err
		}
		records = append(records, r)
		samples += len(r.Samples())
	}
	if a.shared.dryRun {
		return a.ui.Printf("would write %s\n", o.Dir)
	}
	if err := os.MkdirAll(filepath.Dir(o.Dir), 0o777); err != nil {
		return err
	}
	t := a.ui.Begin("merge", samples)
	dropped, err := profile.Merge(ctx, records, o, func(p profile.Progress) { t.Set(p.Done, p.Samples, "") })
	t.End(err)
	if err != nil {
		return mergeAdvice(err)
	}
	for _, d := range dropped {
		a.ui.Note("%s is left out: %s is the same", d.Sample, d.Stays)
	}
	return a.showRecord(o.Dir)
}

// replaceable refuses to put a record in the place of anything else than a record.
func (a *app) replaceable(o profile.MergeOptions) error {
	entries, err := os.ReadDir(o.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !o.Replace:
		return ui.Hint(fmt.Errorf("%s is already there", o.Dir), "choose another name with --out, or replace it with --force")
	}
	for _, e := range entries {
		switch e.Name() {
		case "samples", "heads", "columns", "maps":
		default:
			return ui.Hint(fmt.Errorf("%s holds %s: it is no attention record", o.Dir, e.Name()), "choose another name with --out")
		}
	}
	return nil
}

// mergeAdvice sorts out why records cannot be merged.
func mergeAdvice(err error) error {
	var mixed *profile.MergeError
	var twice *profile.DuplicateError
	switch {
	case errors.As(err, &mixed) && (strings.HasPrefix(mixed.What, "model") || mixed.What == "dataset.tokenizer"):
		return &otherModelError{err}
	case errors.As(err, &mixed):
		return ui.Hint(err, "records must be made with the same settings; profile again with those of the other one")
	case errors.As(err, &twice):
		return ui.Hint(err, "--duplicates drop keeps one of them")
	case errors.Is(err, fs.ErrExist):
		return ui.Hint(err, "choose another name with --out")
	}
	return err
}
