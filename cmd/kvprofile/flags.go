package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/kvprofile/kvprofile/internal/defaultmodel"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// envPrefix begins the variables that stand for flags: KVPROFILE_DRY_RUN is --dry-run.
const envPrefix = "KVPROFILE_"

// sharedFlags are those that every verb has.
type sharedFlags struct {
	out     string
	device  string
	cublas  string
	threads int
	seed    uint64
	json    bool
	quiet   bool
	verbose bool
	config  string
	dryRun  bool
	force   bool
	offline bool
}

func (s *sharedFlags) add(f *pflag.FlagSet) {
	f.SortFlags = false
	f.StringVarP(&s.out, "out", "o", "", "where the results go (default depends on the verb)")
	f.StringVar(&s.device, "device", "auto", "auto (the CPU), cpu, cuda or cuda:N, the N-th NVIDIA GPU, cuda:N,M,... or cuda:all, several that are alike")
	f.StringVar(&s.cublas, "cublas", "", "file or folder of libcublas; looked for in the usual places by default")
	f.IntVar(&s.threads, "threads", 0, "threads to compute with; 0 means all CPUs; results do not depend on it")
	f.Uint64Var(&s.seed, "seed", 42, "seed of everything drawn by chance")
	f.BoolVar(&s.json, "json", false, "write results, and the error, as JSON")
	f.BoolVarP(&s.quiet, "quiet", "q", false, "no progress and no notes; warnings and errors stay")
	f.BoolVarP(&s.verbose, "verbose", "v", false, "say more")
	f.StringVar(&s.config, "config", "", "YAML file with values for flags")
	f.BoolVar(&s.dryRun, "dry-run", false, "show memory, disk and time per stage, and do nothing")
	f.BoolVar(&s.force, "force", false, "replace what is there")
	f.BoolVar(&s.offline, "offline", false, "touch no network (models are always looked up on this machine)")
}

// configure runs before every verb: it fills the flags that were not given, and sets up the output.
func (a *app) configure(cmd *cobra.Command, args []string) error {
	if err := a.fill(cmd, args); err != nil {
		return err
	}
	a.ui = ui.New(ui.Options{Program: program, Out: a.stdout, Err: a.stderr,
		JSON: a.shared.json, Quiet: a.shared.quiet, Verbose: a.shared.verbose})
	if a.shared.threads < 0 || a.shared.threads > 4096 {
		return usagef("--threads must lie between 0 and 4096, not %d", a.shared.threads)
	}
	if a.shared.threads == 0 {
		a.shared.threads = runtime.GOMAXPROCS(0)
	}
	return a.shared.checkDevice()
}

// fill sets the flags that the command line left out: from KVPROFILE_* variables, then from the configuration file, then
// from the settings of the default model where the verb is about that.
func (a *app) fill(cmd *cobra.Command, args []string) error {
	flags := cmd.Flags()
	var failed error
	set := func(f *pflag.Flag, value, source string) {
		if err := f.Value.Set(value); err != nil && failed == nil {
			failed = usagef("%s: --%s: invalid value %q: %v", source, f.Name, value, err)
		}
	}
	given := map[string]bool{}
	flags.Visit(func(f *pflag.Flag) { given[f.Name] = true })
	flags.VisitAll(func(f *pflag.Flag) {
		name := envPrefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		if value, ok := a.env[name]; ok && !given[f.Name] && f.Name != "help" {
			given[f.Name], f.Changed = true, true
			set(f, value, name)
		}
	})
	apply := func(name string, text []byte) error {
		values, err := readConfig(name, text, cmd)
		if err != nil {
			return err
		}
		for _, v := range values {
			if given[v.flag.Name] {
				continue
			}
			given[v.flag.Name], v.flag.Changed = true, true
			for _, text := range v.values {
				set(v.flag, text, fmt.Sprintf("%s:%d", name, v.line))
			}
		}
		return failed
	}
	if failed != nil {
		return failed
	}
	if a.shared.config != "" {
		text, err := os.ReadFile(a.shared.config)
		if err != nil {
			return fmt.Errorf("--config: %w", err)
		}
		if err := apply(a.shared.config, text); err != nil {
			return err
		}
	}
	if ofDefaultModel(cmd, args) {
		return apply("settings of the default model", defaultmodel.Settings)
	}
	return nil
}

// ofDefaultModel says whether a verb is about the default model, or about a run folder of it.
func ofDefaultModel(cmd *cobra.Command, args []string) bool {
	if len(args) == 0 {
		return cmd.Name() == "run"
	}
	if args[0] == defaultmodel.Name {
		return true
	}
	m, err := run.Read(args[0])
	return err == nil && m.Model.Path == defaultmodel.Name
}

// configValue is what a configuration file says for one flag of the verb.
type configValue struct {
	flag   *pflag.Flag
	line   int
	values []string
}

// readConfig reads a YAML mapping; path names it in errors. A key is the long name of a flag, or of a verb whose value is
// a mapping of that verb's flags; the verb's own section wins over the top level. Keys of other verbs are checked and left
// alone; a key that no verb knows is an error with its line.
func readConfig(path string, text []byte, cmd *cobra.Command) ([]configValue, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(doc.Content) == 0 {
		return nil, nil
	}
	// One node per verb, from the verb up to the root: kvprofile datasets build has "build" in "datasets".
	var chain []*cobra.Command
	for c := cmd; c != nil; c = c.Parent() {
		chain = append([]*cobra.Command{c}, chain...)
	}
	found := map[string]configValue{}
	var order []string
	var walk func(node *yaml.Node, c *cobra.Command, depth int) error
	walk = func(node *yaml.Node, c *cobra.Command, depth int) error {
		if node.Kind != yaml.MappingNode {
			return fmt.Errorf("%s:%d: expected a mapping of flags to values", path, node.Line)
		}
		seen := map[string]bool{}
		for i := 0; i+1 < len(node.Content); i += 2 {
			key, value := node.Content[i], node.Content[i+1]
			if seen[key.Value] {
				return fmt.Errorf("%s:%d: key %q stands twice", path, key.Line, key.Value)
			}
			seen[key.Value] = true
			if sub := child(c, key.Value); sub != nil && value.Kind == yaml.MappingNode {
				below := -1
				if depth >= 0 && depth+1 < len(chain) && chain[depth+1] == sub {
					below = depth + 1
				}
				if err := walk(value, sub, below); err != nil {
					return err
				}
				continue
			}
			if key.Value == "config" || key.Value == "help" || !hasFlag(c, key.Value) {
				return ui.Hint(fmt.Errorf("%s:%d: unknown key %q", path, key.Line, key.Value),
					"keys are the long names of flags, or a verb with its flags below it")
			}
			f := cmd.Flags().Lookup(key.Value)
			values, err := scalars(value)
			if err != nil {
				return fmt.Errorf("%s:%d: %s: %w", path, value.Line, key.Value, err)
			}
			if depth >= 0 && f != nil {
				if _, ok := found[key.Value]; !ok {
					order = append(order, key.Value)
				}
				found[key.Value] = configValue{flag: f, line: key.Line, values: values}
			}
		}
		return nil
	}
	// Flags first, sections after: walk visits in file order, so a section that stands first would lose.
	top := doc.Content[0]
	if top.Kind == yaml.MappingNode {
		sorted := *top
		sorted.Content = nil
		for _, sections := range []bool{false, true} {
			for i := 0; i+1 < len(top.Content); i += 2 {
				if (top.Content[i+1].Kind == yaml.MappingNode) == sections {
					sorted.Content = append(sorted.Content, top.Content[i], top.Content[i+1])
				}
			}
		}
		top = &sorted
	}
	if err := walk(top, chain[0], 0); err != nil {
		return nil, err
	}
	var out []configValue
	for _, name := range order {
		out = append(out, found[name])
	}
	return out, nil
}

func child(c *cobra.Command, name string) *cobra.Command {
	for _, sub := range c.Commands() {
		if sub.Name() == name {
			return sub
		}
	}
	return nil
}

// hasFlag says whether the command, or one below it, has a flag.
func hasFlag(c *cobra.Command, name string) bool {
	if c.Flags().Lookup(name) != nil || c.InheritedFlags().Lookup(name) != nil || c.PersistentFlags().Lookup(name) != nil {
		return true
	}
	for _, sub := range c.Commands() {
		if hasFlag(sub, name) {
			return true
		}
	}
	return false
}

// scalars returns a scalar, or a list of scalars, as text.
func scalars(n *yaml.Node) ([]string, error) {
	switch n.Kind {
	case yaml.ScalarNode:
		if n.Tag == "!!null" {
			return nil, fmt.Errorf("no value")
		}
		return []string{n.Value}, nil
	case yaml.SequenceNode:
		var out []string
		for _, c := range n.Content {
			if c.Kind != yaml.ScalarNode {
				return nil, fmt.Errorf("expected a list of plain values")
			}
			out = append(out, c.Value)
		}
		return out, nil
	}
	return nil, fmt.Errorf("expected a value or a list of values")
}
