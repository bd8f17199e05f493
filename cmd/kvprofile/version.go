package main

import (
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/internal/run"
)

// tool says which build this is. Plans and records name it, so it has no times in it.
func tool() run.Tool {
	t := run.Tool{Name: program, Version: "devel"}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return t
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		t.Version = v
	}
	modified := false
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			t.Commit = s.Value
		case "vcs.modified":
			modified = s.Value == "true"
		}
	}
	if t.Commit != "" && modified {
		t.Commit += "+changes"
	}
	return t
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: "  kvprofile version --json",
		Args:    exactly(0, "no arguments"),
		RunE: func(*cobra.Command, []string) error {
			t := tool()
			if a.ui.JSON() {
				return a.ui.PrintJSON(struct {
					run.Tool
					Go       string `json:"go"`
					Platform string `json:"platform"`
				}{t, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH})
			}
			line := t.Name + " " + t.Version
			if t.Commit != "" {
				line += " " + t.Commit
			}
			return a.ui.Printf("%s %s %s/%s\n", line, runtime.Version(), runtime.GOOS, runtime.GOARCH)
		},
	}
}
