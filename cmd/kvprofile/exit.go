package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/internal/compile"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/profile"
)

// Exit codes: a contract for scripts, see docs/cli.md.
const (
	exitDone        = 0
	exitFailed      = 1   // or wrong usage
	exitFindings    = 3   // a check found what it looks for
	exitModel       = 10  // model missing, damaged or unsupported
	exitLocked      = 11  // the folder is in use
	exitOtherModel  = 12  // an artefact belongs to another model
	exitInterrupted = 130 // stopped by a signal; can be resumed
)

// usageError is a mistake in the arguments.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// findingsError says that a check found what it looks for; the findings themselves are a result.
type findingsError struct{ text string }

func (e *findingsError) Error() string { return e.text }

// modelError is any failure to find, open or understand a model.
type modelError struct{ err error }

func (e *modelError) Error() string { return e.err.Error() }
func (e *modelError) Unwrap() error { return e.err }

// otherModelError says that an artefact was made with another model.
type otherModelError struct{ err error }

func (e *otherModelError) Error() string { return e.err.Error() }
func (e *otherModelError) Unwrap() error { return e.err }

// classify is the one place that maps errors to exit codes. It also adds advice to errors that have none.
func classify(err error) (int, error) {
	advise := func(format string, args ...any) error {
		if ui.HintOf(err) != "" {
			return err
		}
		return ui.Hint(err, format, args...)
	}
	var (
		usage     *usageError
		findings  *findingsError
		model     *modelError
		other     *otherModelError
		locked    *run.LockedError
		folder    *run.OtherModelError
		stale     *run.StaleError
		reference *run.ReferenceError
		artefact  *compile.MismatchError
		record    *profile.MismatchError
		unfit     *engine.NonFiniteError
		recorded  *profile.NonFiniteError
		trained   *distill.NonFiniteError
	)
	switch {
	case errors.Is(err, context.Canceled):
		return exitInterrupted, ui.Hint(errors.New("interrupted"), "run the same command again to resume")
	case errors.As(err, &locked):
		return exitLocked, advise("wait for it to end, or choose another folder with --out")
	case errors.As(err, &folder):
		return exitOtherModel, advise("choose another folder with --out, or discard this one's work with --force")
	case errors.As(err, &other), errors.As(err, &artefact), errors.As(err, &record), errors.Is(err, plan.ErrModel):
		return exitOtherModel, err
	case errors.As(err, &unfit), errors.As(err, &recorded), errors.As(err, &trained):
		return exitModel, advise("the model's weights hold values that are no numbers, or too large for this precision")
	case errors.As(err, &model):
		return exitModel, err
	case errors.As(err, &findings):
		return exitFindings, err
	case errors.As(err, &stale):
		return exitFailed, advise("give the settings it was made with, choose another folder with --out, or begin anew with --force")
	case errors.As(err, &reference):
		return exitFailed, advise("choose another folder with --out, and copy the plan when it has been reviewed")
	case errors.As(err, &usage):
		return exitFailed, advise("%s --help says how it is used", program)
	}
	return exitFailed, err
}
