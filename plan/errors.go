package plan

import (
	"errors"
	"fmt"
	"strings"
)

// What a caller may want to tell apart, with [errors.Is]. The types below carry the details.
var (
	// ErrFormat is for a file that is no cache plan.
	ErrFormat = errors.New("not a cache plan")
	// ErrVersion is for a plan of a version that this package does not read.
	ErrVersion = errors.New("unknown version of the cache plan format")
	// ErrKind is for a plan with a kind of policy that its version does not have.
	ErrKind = errors.New("unknown kind of policy")
	// ErrMember is for a plan with members that its version does not have.
	ErrMember = errors.New("unknown member")
	// ErrInvalid is for a plan that breaks a rule of its version in another way.
	ErrInvalid = errors.New("invalid cache plan")
	// ErrModel is for a plan that belongs to another model.
	ErrModel = errors.New("cache plan belongs to another model")
	// ErrContent is for a question whose answer depends on the text, and not on the number of tokens alone.
	ErrContent = errors.New("depends on the content of the prompt")
	// ErrOverflow is for a prompt of which more would have to be kept than a bound allows, and the plan says to refuse it.
	ErrOverflow = errors.New("more tokens to keep than the plan allows")
	// ErrNoBlocks is for a pool that has too few blocks left. Nothing was changed; the call may be made again.
	ErrNoBlocks = errors.New("too few free blocks")
	// ErrAttention is for attention that a policy needs and that is missing or of another shape.
	ErrAttention = errors.New("attention is missing or of another shape")
	// ErrState is for a call that does not fit what was called before.
	ErrState = errors.New("call out of order")
	// ErrArgument is for a value that is out of its range.
	ErrArgument = errors.New("invalid argument")
)

// OverflowError says what exceeds which bound. It is an [ErrOverflow].
type OverflowError struct {
	Where  string // the pin, or layer and KV head
	Tokens int    // that would have to be kept
	Bound  int    // most tokens that may be
}

// Error names the bound.
func (e *OverflowError) Error() string {
	return fmt.Sprintf("%s: %d tokens would have to be kept, at most %d may, and the plan refuses such a prompt", e.Where, e.Tokens, e.Bound)
}

// Is reports whether target is [ErrOverflow].
func (e *OverflowError) Is(target error) bool { return target == ErrOverflow }

// VersionError says which version a plan has. It is an [ErrVersion].
type VersionError struct {
	Version string // as in the file
}

// Error names the version.
func (e *VersionError) Error() string {
	return fmt.Sprintf("cache plan has version %s, this reader knows version %d", e.Version, Version)
}

// Is reports whether target is [ErrVersion].
func (e *VersionError) Is(target error) bool { return target == ErrVersion }

// KindError says which policies are of an unknown kind. It is an [ErrKind].
type KindError struct {
	Violations []Violation
}

// Error names the first such policy.
func (e *KindError) Error() string { return summary(e.Violations) }

// Is reports whether target is [ErrKind].
func (e *KindError) Is(target error) bool { return target == ErrKind }

// MemberError says which members are unknown. It is an [ErrMember].
type MemberError struct {
	Violations []Violation
}

// Error names the first such member.
func (e *MemberError) Error() string { return summary(e.Violations) }

// Is reports whether target is [ErrMember].
func (e *MemberError) Is(target error) bool { return target == ErrMember }

// InvalidError has everything that is wrong with a plan. It is an [ErrInvalid].
type InvalidError struct {
	Violations []Violation
}

// Error names the first violation.
func (e *InvalidError) Error() string { return summary(e.Violations) }

// Is reports whether target is [ErrInvalid].
func (e *InvalidError) Is(target error) bool { return target == ErrInvalid }

// Mismatch is a difference between a plan's model and the server's.
type Mismatch struct {
	Pointer string // JSON pointer into the plan
	Plan    string // the plan's value
	Want    string // the server's value
}

// ModelError lists the differences between a plan's model and the server's. It is an [ErrModel].
type ModelError struct {
	Name       string // of the plan's model
	Mismatches []Mismatch
}

// Error lists the differences.
func (e *ModelError) Error() string {
	parts := make([]string, len(e.Mismatches))
	for i, m := range e.Mismatches {
		parts[i] = fmt.Sprintf("%s is %s in the plan, %s in the model", m.Pointer, m.Plan, m.Want)
	}
	return fmt.Sprintf("cache plan belongs to another model (%s): %s", e.Name, strings.Join(parts, "; "))
}

// Is reports whether target is [ErrModel].
func (e *ModelError) Is(target error) bool { return target == ErrModel }

// Violation is a rule of the format that a document breaks.
type Violation struct {
	// Pointer is the JSON pointer (RFC 6901) of the offending value, "" for the whole document.
	Pointer string `json:"pointer"`
	// Reason says what is wrong with it.
	Reason string `json:"reason"`
}

// String is the pointer and the reason; the whole document's pointer is shown as "/".
func (v Violation) String() string {
	if v.Pointer == "" {
		return "/: " + v.Reason
	}
	return v.Pointer + ": " + v.Reason
}

func summary(vs []Violation) string {
	switch len(vs) {
	case 0:
		return "invalid cache plan"
	case 1:
		return vs[0].String()
	}
	return fmt.Sprintf("%s (and %d more)", vs[0], len(vs)-1)
}

// PointerTo appends a reference token to a JSON pointer.
func PointerTo(parent, token string) string {
	return parent + "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(token)
}
