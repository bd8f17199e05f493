package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// Names of tasks on the command line.
const (
	taskPasskeys = "passkeys"
	taskNeedles  = "needles"
)

func (a *app) datasetsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "datasets",
		Short: "Build and show datasets",
		Long: `A dataset is a file of samples: token ids with labelled spans (haystack, needles,
questions, answers), made with the model's own tokenizer and chat template.`,
		Example: `  kvprofile datasets build model.gguf --task needles --lengths 1024,2048
  kvprofile datasets show needles.parquet --model model.gguf --sample 3`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q of datasets", args[0])
			}
			return usagef("datasets needs build or show")
		},
		RunE: func(*cobra.Command, []string) error { return nil },
	}
	c.AddCommand(a.datasetsBuildCommand(), a.datasetsShowCommand())
	return c
}

// haystackFlags choose the filler and the format of samples.
type haystackFlags struct {
	files []string
	plain bool
}

func (h *haystackFlags) add(f *pflag.FlagSet) {
	f.StringSliceVar(&h.files, "haystack", nil, "text files to hide the needles in (default: generated prose)")
	f.BoolVar(&h.plain, "plain", false, "plain text even if the model has a chat template")
}

// haystack reads the files; name is what stage settings and metadata call it.
func (h *haystackFlags) haystack() (datasets.Haystack, error) {
	if len(h.files) == 0 {
		return datasets.Prose(), nil
	}
	return datasets.Files(h.files)
}

// needleFlags describe a grid of single needles.
type needleFlags struct {
	lengths []int
	depths  []float64
	repeats int
}

func (n *needleFlags) options(seed uint64, purpose datasets.Purpose, h datasets.Haystack) datasets.GridOptions {
	return datasets.GridOptions{Lengths: n.lengths, Depths: n.depths, Repeats: n.repeats, Seed: seed, Purpose: purpose, Haystack: h, ToolVersion: tool().Version}
}

// defaultNeedles is the grid that attention is recorded on.
func defaultNeedles() needleFlags {
	return needleFlags{lengths: []int{1024, 2048}, depths: []float64{0.1, 0.5, 0.9}, repeats: 1}
}

// saveDataset writes a dataset, and the folder for it.
func saveDataset(path string, d *datasets.Dataset) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}
	return datasets.Save(path, d)
}

// taskFlags are the flags of datasets build that some tasks take only.
func taskFlags(task string) []string {
	common := []string{"lengths", "count", "haystack", "plain"}
	grid := []string{"depths", "repeats"}
	value := []string{"value", "digits"}
	switch task {
	case taskPasskeys:
		return append(common, "recipe", "passkeys", "words")
	case taskNeedles:
		return slices.Concat([]string{"lengths", "haystack", "plain"}, grid, value)
	case datasets.TaskMultiKey, datasets.TaskDormant:
		return slices.Concat(common, grid, value, []string{"distractors"})
	case datasets.TaskMultiValue, datasets.TaskMultiQuery, datasets.TaskVariables:
		return slices.Concat(common, value, []string{"repeats", "needles", "distractors"})
	case datasets.TaskUUID:
		return slices.Concat([]string{"lengths", "count", "plain"}, grid, value)
	case datasets.TaskText:
		return []string{"lengths", "count", "repeats", "haystack"}
	}
	return nil
}

// buildFlags are the flags of datasets build.
type buildFlags struct {
	task, recipe, purpose, lengths, value string
	depths                                []string
	count, passkeys, words, repeats       int
	needles, distractors, digits          int
	hay                                   haystackFlags
}

func (a *app) datasetsBuildCommand() *cobra.Command {
	var o buildFlags
	c := &cobra.Command{
		Use:   "build MODEL",
		Short: "Build a dataset for a model",
		Long: `build makes a dataset with the model's tokenizer and chat template. The same model,
flags and seed give the same bytes on every machine.

  passkeys           several passkeys in a haystack, asked for at its end: what gates are trained on
  needles            one needle for each length and depth: what attention is recorded on

What plans are evaluated on, one question each:

  multi-key          several needles of one form, one of them asked for
  multi-value        several values of one key, all asked for
  multi-query        several keys, asked for at once
  variable-tracking  chains of assignments: which variables have a value?
  uuid               one value among pairs of UUIDs
  dormant            a credential, named early and in passing, asked for at the very end
  text               running text without question, for perplexity`,
		Example: `  kvprofile datasets build model.gguf --task needles --lengths 1024,2048 --depths 0.1,0.5,0.9
  kvprofile datasets build model.gguf --task passkeys --recipe cpu -o train.parquet
  kvprofile datasets build model.gguf --task passkeys --haystack book.txt --lengths 1024:4096:7
  kvprofile datasets build model.gguf --task multi-key --purpose certification --lengths 4096 --count 100`,
		Args: exactly(1, "a model"),
		RunE: func(cmd *cobra.Command, args []string) error { return a.buildDataset(cmd.Flags(), args[0], &o) },
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&o.task, "task", taskNeedles, "what to build: "+strings.Join(taskNames(), ", "))
	f.StringVar(&o.lengths, "lengths", "", "lengths in tokens: a list, or first:last:count")
	f.StringVar(&o.purpose, "purpose", string(datasets.Calibration), "calibration, search or certification: they share no words")
	f.StringSliceVar(&o.depths, "depths", []string{"0.1", "0.5", "0.9"}, "where the needle stands, from 0 (first) to 1 (last); random but for needles unless given")
	f.IntVar(&o.repeats, "repeats", 1, "samples for each length and depth")
	f.IntVar(&o.count, "count", 0, "samples in all (default: --repeats for each length and depth; passkeys: of the recipe)")
	f.StringVar(&o.recipe, "recipe", "cpu", "passkeys: "+strings.Join(distill.Recipes(), ", "))
	f.IntVar(&o.passkeys, "passkeys", 0, "passkeys: in each sample (default of the recipe)")
	f.IntVar(&o.words, "words", 0, "passkeys: words of each (default of the recipe)")
	f.IntVar(&o.needles, "needles", 0, "values, keys or variables asked for at once (default 4, variable-tracking 5)")
	f.IntVar(&o.distractors, "distractors", 0, "needles of the same form that are not asked for; variable-tracking: other chains; dormant: other questions (default 3, multi-value and multi-query 0, variable-tracking 1)")
	f.StringVar(&o.value, "value", "", "what is asked for: number or word; uuid and dormant have their own (default)")
	f.IntVar(&o.digits, "digits", 0, "digits of numbers (default 7, variable-tracking 5)")
	o.hay.add(f)
	return c
}

// taskNames are the tasks that can be built.
func taskNames() []string { return append([]string{taskPasskeys, taskNeedles}, datasets.Tasks()...) }

func (a *app) buildDataset(f *pflag.FlagSet, modelName string, o *buildFlags) error {
	p := datasets.Purpose(o.purpose)
	if !slices.Contains([]datasets.Purpose{datasets.Calibration, datasets.Search, datasets.Certification}, p) {
		return usagef("unknown purpose %q, expected calibration, search or certification", o.purpose)
	}
	takes := taskFlags(o.task)
	if takes == nil {
		return usagef("unknown task %q, expected one of %s", o.task, strings.Join(taskNames(), ", "))
	}
	for _, name := range []string{"depths", "repeats", "count", "recipe", "passkeys", "words", "needles", "distractors", "value", "digits", "haystack", "plain"} {
		if f.Changed(name) && !slices.Contains(takes, name) {
			return usagef("--%s does not belong to the task %s", name, o.task)
		}
	}
	if f.Changed("count") && f.Changed("repeats") {
		return usagef("--count and --repeats exclude each other")
	}
	lens, err := parseLengths(o.lengths)
	if err != nil {
		return err
	}
	depths, err := parseDepths(o.depths)
	if err != nil {
		return err
	}
	m, err := a.openWithTokenizer(modelName)
	if err != nil {
		return err
	}
	defer m.Close()
	haystack, err := o.hay.haystack()
	if err != nil {
		return err
	}
	path, err := a.target(fmt.Sprintf("out/%s.%s.parquet", slug(m.Name), o.task), a.shared.force)
	if err != nil {
		return err
	}
	needles := needleFlags{lengths: lens, depths: depths, repeats: o.repeats}
	if lens == nil {
		needles.lengths = defaultNeedles().lengths
	}
	chat := chatOf(m, o.hay.plain)
	var build func() (*datasets.Dataset, error)
	switch o.task {
	case taskPasskeys:
		r, err := distill.RecipeNamed(o.recipe)
		if err != nil {
			return usagef("%v", err)
		}
		d := r.Data
		d.Seed, d.Purpose, d.Haystack, d.ToolVersion = a.shared.seed, p, haystack, tool().Version
		if lens != nil {
			d.Lengths = lens
		}
		for _, set := range []struct {
			flag string
			to   *int
			from int
		}{{"count", &d.Count, o.count}, {"passkeys", &d.Passkeys, o.passkeys}, {"words", &d.Words, o.words}} {
			if f.Changed(set.flag) {
				*set.to = set.from
			}
		}
		build = func() (*datasets.Dataset, error) { return datasets.Passkeys(m.Tokenizer, chat, d) }
	case taskNeedles:
		d := needles.options(a.shared.seed, p, haystack)
		d.Value, d.Digits = datasets.Value(o.value), o.digits
		build = func() (*datasets.Dataset, error) { return datasets.NeedleGrid(m.Tokenizer, chat, d) }
	default:
		d := datasets.TaskOptions{Task: o.task, Lengths: needles.lengths, Count: o.count, Needles: o.needles, Distractors: o.distractors,
			Value: datasets.Value(o.value), Digits: o.digits, Seed: a.shared.seed, Purpose: p, Haystack: haystack, ToolVersion: tool().Version}
		if f.Changed("depths") {
			d.Depths = depths
		}
		if !f.Changed("count") {
			if o.repeats < 1 || o.repeats > 1<<20 {
				return usagef("--repeats must lie between 1 and %d, not %d", 1<<20, o.repeats)
			}
			d.Count = o.repeats * len(d.Lengths) * max(1, len(d.Depths))
		}
		if f.Changed("distractors") && o.distractors == 0 {
			d.Distractors = datasets.None
		}
		build = func() (*datasets.Dataset, error) { return datasets.Build(m.Tokenizer, chat, d) }
	}
	if a.shared.dryRun {
		return a.ui.Printf("would write %s\n", path)
	}
	t := a.ui.Begin("datasets", 0)
	d, err := build()
	t.End(err)
	if err != nil {
		return datasetAdvice(err)
	}
	if err := saveDataset(path, d); err != nil {
		return err
	}
	return a.showDataset(path, d)
}

// datasetAdvice adds a hint to what may go wrong when a dataset is built.
func datasetAdvice(err error) error {
	var length *datasets.LengthError
	var option *datasets.OptionError
	switch {
	case errors.As(err, &length):
		return ui.Hint(err, "ask for lengths of at least %d tokens, or for fewer or shorter needles", length.Minimum)
	case errors.As(err, &option):
		return err
	}
	return ui.Hint(err, "if it is the model's chat template, --plain does without it")
}

// showDataset says what a dataset holds.
func (a *app) showDataset(path string, d *datasets.Dataset) error {
	shortest, longest, total := 0, 0, 0
	for i, s := range d.Samples {
		if i == 0 || len(s.Tokens) < shortest {
			shortest = len(s.Tokens)
		}
		longest = max(longest, len(s.Tokens))
		total += len(s.Tokens)
	}
	if a.ui.JSON() {
		return a.ui.PrintJSON(struct {
			Path       string          `json:"path"`
			Task       string          `json:"task"`
			Purpose    string          `json:"purpose"`
			Samples    int             `json:"samples"`
			Shortest   int             `json:"shortest_tokens"`
			Longest    int             `json:"longest_tokens"`
			Tokens     int             `json:"tokens"`
			Seed       uint64          `json:"seed"`
			Haystack   string          `json:"haystack"`
			Tokenizer  string          `json:"tokenizer_sha256"`
			Content    string          `json:"content_sha256"`
			Parameters json.RawMessage `json:"parameters"`
		}{path, d.Meta.Task, string(d.Meta.Purpose), len(d.Samples), shortest, longest, total, d.Meta.Seed, d.Meta.Haystack,
			d.Meta.Tokenizer, d.Meta.ContentHash, d.Meta.Parameters})
	}
	t := ui.Table{Left: []int{1}}
	t.Add("file", path)
	t.Add("task", fmt.Sprintf("%s, for %s", d.Meta.Task, d.Meta.Purpose))
	t.Add("samples", fmt.Sprintf("%d of %d to %d tokens, %d in all", len(d.Samples), shortest, longest, total))
	t.Add("haystack", d.Meta.Haystack)
	t.Add("seed", d.Meta.Seed)
	t.Add("content sha256", d.Meta.ContentHash)
	return t.Render(a.ui.Out())
}

func (a *app) datasetsShowCommand() *cobra.Command {
	var modelName string
	var sample, edge int
	var tokens, color bool
	c := &cobra.Command{
		Use:   "show DATASET",
		Short: "Show a dataset, or one sample with its spans marked",
		Example: `  kvprofile datasets show needles.parquet
  kvprofile datasets show needles.parquet --model model.gguf --sample 3 --edge -1`,
		Args: exactly(1, "a dataset"),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := datasets.Load(args[0])
			if err != nil {
				return err
			}
			if modelName == "" {
				if cmd.Flags().Changed("sample") {
					return usagef("--sample needs --model, whose tokenizer turns the tokens into text")
				}
				return a.showDataset(args[0], d)
			}
			m, err := a.openWithTokenizer(modelName)
			if err != nil {
				return err
			}
			defer m.Close()
			if err := fits(d, args[0], m); err != nil {
				return err
			}
			if sample < 0 || sample >= len(d.Samples) {
				return usagef("--sample %d: %s has samples 0 to %d", sample, args[0], len(d.Samples)-1)
			}
			if a.ui.JSON() {
				return a.ui.PrintJSON(d.Samples[sample])
			}
			return datasets.Show(a.ui.Out(), m.Tokenizer, &d.Samples[sample], datasets.ShowOptions{Color: color, Edge: edge, Tokens: tokens})
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&modelName, "model", "", "the model whose tokenizer made the dataset")
	f.IntVar(&sample, "sample", 0, "which sample")
	f.IntVar(&edge, "edge", 0, "tokens shown at both ends of a haystack; 0 means 24, -1 all")
	f.BoolVar(&tokens, "tokens", false, "mark the borders of tokens")
	f.BoolVar(&color, "color", false, "mark the spans with colours, too")
	return c
}

// openWithDataset opens a model and a dataset that was made with its tokenizer.
func (a *app) openWithDataset(name, path string) (*model.Model, *datasets.Dataset, error) {
	m, err := a.openWithTokenizer(name)
	if err != nil {
		return nil, nil, err
	}
	d, err := datasets.Load(path)
	if err == nil {
		err = fits(d, path, m)
	}
	if err != nil {
		m.Close()
		return nil, nil, err
	}
	return m, d, nil
}

// fits reports a dataset that was made with another tokenizer, or is damaged.
func fits(d *datasets.Dataset, path string, m *model.Model) error {
	if d.Meta.Tokenizer != m.Tokenizer.Fingerprint() {
		return &otherModelError{fmt.Errorf("%s was made with another tokenizer than that of %s", path, m.Name)}
	}
	if err := d.Validate(m.Config.Vocab); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// parseLengths reads "1024,2048" or "1024:4096:7"; "" gives nil.
func parseLengths(text string) ([]int, error) {
	if text == "" {
		return nil, nil
	}
	wrong := usagef("--lengths %q: expected a list such as 1024,2048, or first:last:count", text)
	numbers := func(parts []string) ([]int, error) {
		var out []int
		for _, p := range parts {
			n, err := strconv.Atoi(strings.TrimSpace(p))
			if err != nil || n <= 0 || n > 1<<30 {
				return nil, wrong
			}
			out = append(out, n)
		}
		return out, nil
	}
	if parts := strings.Split(text, ":"); len(parts) > 1 {
		n, err := numbers(parts)
		if err != nil || len(n) != 3 || n[2] > 1<<16 {
			return nil, wrong
		}
		return datasets.Linspace(n[0], n[1], n[2]), nil
	}
	return numbers(strings.Split(text, ","))
}

func parseDepths(parts []string) ([]float64, error) {
	var out []float64
	for _, p := range parts {
		d, err := strconv.ParseFloat(strings.TrimSpace(p), 64)
		if err != nil || !(d >= 0 && d <= 1) {
			return nil, usagef("--depths: %q is no number from 0 to 1", p)
		}
		out = append(out, d)
	}
	return out, nil
}
