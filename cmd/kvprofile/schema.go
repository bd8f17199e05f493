package main

import (
	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/schema"
)

func (a *app) schemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "schema",
		Short:   "Print the JSON Schema of cache plans",
		Example: "  kvprofile schema > cache-plan.schema.json",
		Args:    exactly(0, "no arguments"),
		RunE: func(*cobra.Command, []string) error {
			text, err := schema.JSON(plan.Version)
			if err != nil {
				return err
			}
			return a.ui.Printf("%s", text)
		},
	}
}
