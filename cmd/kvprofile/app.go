package main

import (
	"context"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cuda"
	"github.com/kvprofile/kvprofile/internal/ui"
)

const program = "kvprofile"

// app is one call of the command. Verbs get all that they depend on from it.
type app struct {
	args   []string
	stdin  io.Reader
	stdout io.Writer
	stderr io.Writer
	env    map[string]string
	ui     *ui.UI
	shared sharedFlags
	// libraries loads the driver and cuBLAS.
	libraries func(cublas string) (cuda.Symbols, error)
}

// Main runs the command and returns its exit code. ctx ends on an interrupt. env holds KEY=VALUE strings.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, env []string) int {
	return (&app{libraries: cuda.Libraries}).main(ctx, args, stdin, stdout, stderr, env)
}

func (a *app) main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, env []string) int {
	a.args, a.stdin, a.stdout, a.stderr, a.env = args, stdin, stdout, stderr, map[string]string{}
	for _, kv := range env {
		if key, value, ok := strings.Cut(kv, "="); ok {
			a.env[key] = value
		}
	}
	// Until the flags are read, errors are shown as the bare arguments ask.
	a.ui = ui.New(ui.Options{Program: program, Out: stdout, Err: stderr, JSON: slices.Contains(args, "--json")})
	root := a.root()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := execute(ctx, root)
	if err == nil {
		return exitDone
	}
	code, err := classify(err)
	a.ui.Error(err, code)
	return code
}

// execute runs the verb. A device that fails where no error can be returned is an error here.
func execute(ctx context.Context, root *cobra.Command) (err error) {
	defer engine.Catch(&err)
	return root.ExecuteContext(ctx)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   program,
		Short: "Measure what of a model's KV cache must be kept, and write a cache plan",
		Long: `kvprofile measures which parts of a language model's KV cache a server has to keep,
and writes a cache plan: for every layer and KV head what to keep, with its exact
bytes and the evidence for it.`,
		Example: `  kvprofile run                          all stages, on the model that is part of this program
  kvprofile run path/to/model            all stages, from a model to a plan
  kvprofile check out/*/plan.json        validate plans
  kvprofile help run                     about one verb`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q", args[0])
			}
			return nil
		},
		SilenceErrors:     true,
		SilenceUsage:      true,
		PersistentPreRunE: a.configure,
		// Without a verb: the short help.
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.ui.Printf("%s\n\nUsage:\n  %s\n\n%s\n\nRun '%s --help' for all verbs and flags.\n", cmd.Long, "kvprofile VERB [flags]", "Examples:\n"+cmd.Example, program)
		},
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: false},
	}
	a.shared.add(root.PersistentFlags())
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return ui.Hint(err, "%s --help lists the flags", cmd.CommandPath())
	})
	root.AddCommand(a.runCommand(), a.inspectCommand(), a.datasetsCommand(), a.profileCommand(), a.distillCommand(),
		a.fastgenCommand(), a.pyramidCommand(), a.compileCommand(), a.checkCommand(), a.evalCommand(), a.reportCommand(), a.exportCommand(), a.diffCommand(), a.mergeCommand(), a.schemaCommand(), a.doctorCommand(), a.versionCommand())
	return root
}

// exactly and between replace cobra's argument checks by ones that name what is missing.
func exactly(n int, what string) cobra.PositionalArgs { return between(n, n, what) }

func between(low, high int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) >= low && len(args) <= high {
			return nil
		}
		if len(args) < low {
			return ui.Hint(usagef("%s needs %s", cmd.CommandPath(), what), "usage: %s", cmd.UseLine())
		}
		return ui.Hint(usagef("%s: unexpected argument %q", cmd.CommandPath(), args[high]), "usage: %s", cmd.UseLine())
	}
}

func (a *app) getenv(key string) string { return a.env[key] }
