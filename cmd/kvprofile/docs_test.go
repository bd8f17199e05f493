package main

import (
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// docs/cli.md names every verb and every flag, and every verb has help with an example.
func TestDocsNameEveryVerbAndFlag(t *testing.T) {
	b, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		path := strings.TrimPrefix(c.CommandPath(), program+" ")
		if c.HasParent() {
			if !strings.Contains(text, "`"+path) && !strings.Contains(text, "| `"+c.Name()) && c.Name() != "datasets" && c.Name() != "version" {
				t.Errorf("docs/cli.md does not name %q", path)
			}
			if c.Short == "" || c.Example == "" {
				t.Errorf("%q has no description or no example", path)
			}
		}
		check := func(f *pflag.Flag) {
			if !strings.Contains(text, "--"+f.Name) && f.Name != "help" {
				t.Errorf("docs/cli.md does not name --%s of %q", f.Name, path)
			}
			if f.Usage == "" {
				t.Errorf("--%s of %q has no description", f.Name, path)
			}
		}
		c.LocalFlags().VisitAll(check)
		c.PersistentFlags().VisitAll(check)
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk((&app{}).root())
}
