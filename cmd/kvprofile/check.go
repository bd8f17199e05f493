package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/schema"
)

// checked is what check says of one file with --json.
type checked struct {
	Path       string           `json:"path"`
	Valid      bool             `json:"valid"`
	Error      string           `json:"error,omitempty"` // the file is no plan that can be looked at
	Violations []plan.Violation `json:"violations"`
	OtherModel string           `json:"other_model,omitempty"`
}

func (a *app) checkCommand() *cobra.Command {
	var modelName string
	var anyWeights, advice bool
	c := &cobra.Command{
		Use:   "check PLAN...",
		Short: "Validate cache plans",
		Long: `check validates plans against the JSON Schema and against what they mean (a row for each
layer, names that exist, totals that the policies give), and reports every violation as a
JSON pointer and a reason. With --model it also checks that the plans belong to a model.

It ends with exit code 0 if all plans are valid, 3 if one is not, 12 if one belongs to
another model.`,
		Example: `  kvprofile check out/reference/*/plan.json
  kvprofile check plan.json --model path/to/model
  kvprofile check plan.json --json`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return ui.Hint(usagef("%s needs a plan", cmd.CommandPath()), "usage: %s", cmd.UseLine())
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if anyWeights && modelName == "" {
				return usagef("--allow-weights needs --model")
			}
			var want *plan.Want
			if modelName != "" {
				m, err := a.openModel(modelName)
				if err != nil {
					return err
				}
				want = &plan.Want{Model: planModel(m, m.Fingerprint()), AllowWeights: anyWeights}
				m.Close()
			}
			return a.check(args, want, advice)
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar(&modelName, "model", "", "the model that the plans have to belong to")
	f.BoolVar(&anyWeights, "allow-weights", false, "accept plans made from other weights of the model, such as another quantisation")
	f.BoolVar(&advice, "advice", false, "also say what is allowed but seldom meant")
	return c
}

func (a *app) check(paths []string, want *plan.Want, advice bool) error {
	var all []checked
	invalid, other := 0, 0
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		c := checked{Path: path, Violations: []plan.Violation{}}
		violations, err := schema.Check(data)
		switch {
		case err != nil:
			c.Error = err.Error()
		case len(violations) > 0:
			c.Violations = violations
		default:
			c.Valid = true
			p, err := plan.Parse(data)
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			if want != nil {
				var mismatch *plan.ModelError
				if err := p.Matches(*want); errors.As(err, &mismatch) {
					c.OtherModel = mismatch.Error()
				} else if err != nil {
					return fmt.Errorf("%s: %w", path, err)
				}
			}
			if advice {
				for _, v := range p.Advice() {
					a.ui.Note("%s: %s", path, v)
				}
			}
		}
		if !c.Valid {
			invalid++
		}
		if c.OtherModel != "" {
			other++
		}
		all = append(all, c)
	}
	if a.ui.JSON() {
		if err := a.ui.PrintJSON(all); err != nil {
			return err
		}
	} else if err := a.showChecks(all); err != nil {
		return err
	}
	switch {
	case invalid > 0:
		return &findingsError{fmt.Sprintf("%d of %d plans are not valid", invalid, len(paths))}
	case other > 0:
		return &otherModelError{fmt.Errorf("%d of %d plans belong to another model", other, len(paths))}
	}
	return nil
}

func (a *app) showChecks(all []checked) error {
	for _, c := range all {
		var lines []string
		switch {
		case c.Error != "":
			lines = append(lines, c.Error)
		case c.OtherModel != "":
			lines = append(lines, c.OtherModel)
		case c.Valid:
			lines = append(lines, "valid")
		}
		for _, v := range c.Violations {
			lines = append(lines, v.String())
		}
		for _, line := range lines {
			if err := a.ui.Printf("%s: %s\n", c.Path, line); err != nil {
				return err
			}
		}
	}
	return nil
}
