package profile

import (
	"fmt"
	"strings"
)

// OptionError says which option is wrong, and why.
type OptionError struct{ Option, Reason string }

func (e *OptionError) Error() string { return fmt.Sprintf("profile: %s: %s", e.Option, e.Reason) }

// MismatchError says that a part belongs to another record: another model, dataset, engine, program or other options.
type MismatchError struct {
	Path string
	// What names the first field of Meta that differs, as in its JSON: "model.sha256.weights".
	What string
	Have string // in the part
	Want string
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("%s belongs to another record: its %s is %s, not %s; choose another folder or remove the old record", e.Path, e.What, e.Have, e.Want)
}

// PartError says that a part cannot be read or does not hold what its metadata say.
type PartError struct {
	Path   string
	Reason string
	Err    error // may be nil
}

func (e *PartError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s: %v", e.Path, e.Reason, e.Err)
	}
	return fmt.Sprintf("%s: %s", e.Path, e.Reason)
}

func (e *PartError) Unwrap() error { return e.Err }

// IncompleteError says that samples of a record are missing: the run that makes it has not ended.
type IncompleteError struct {
	Dir     string
	Missing []string // "heads of sample 3"
}

func (e *IncompleteError) Error() string {
	shown := e.Missing
	more := ""
	if len(shown) > 3 {
		more = fmt.Sprintf(" and %d more", len(shown)-3)
		shown = shown[:3]
	}
	return fmt.Sprintf("%s: the record is not complete: %s%s missing; run profile again to finish it", e.Dir, strings.Join(shown, ", "), more)
}

// NonFiniteError says where a NaN or an infinity first stood.
type NonFiniteError struct {
	Sample int // id
	Layer  int
	Token  int
}

func (e *NonFiniteError) Error() string {
	return fmt.Sprintf("sample %d: the output of layer %d is not finite at token %d: the weights or the precision are unfit", e.Sample, e.Layer, e.Token)
}
