// Package schema has the JSON Schema of the cache plan, and checks documents against it.
//
// The schema states the form of a plan: members, types, ranges, kinds. What relates one part to another (a row for each
// layer, names that exist, totals that the policies give) is checked by package plan; [Check] does both.
package schema

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"github.com/kvprofile/kvprofile/plan"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
	"golang.org/x/text/language"
	"golang.org/x/text/message"
)

//go:generate go run ./internal/gen/write

//go:embed cache-plan-v1.schema.json
var v1 []byte

// ID is the identifier ($id) of the schema of version 1.
const ID = "urn:kvprofile:cache-plan:v1"

// JSON returns the JSON Schema (draft 2020-12) of a version of the cache plan. An unknown version is a
// [plan.VersionError].
func JSON(version int) ([]byte, error) {
	if version != 1 {
		return nil, &plan.VersionError{Version: strconv.Itoa(version)}
	}
	return bytes.Clone(v1), nil
}

// Validate checks the form of a document against the schema of its version, and returns every violation in order of
// the pointers. The error is for a document that is no JSON or no cache plan, or of an unknown version.
func Validate(doc []byte) ([]plan.Violation, error) {
	// Package plan says what can be checked at all, and refuses what a JSON decoder passes over in silence.
	if _, _, err := plan.Check(doc); err != nil {
		return nil, err
	}
	return validate(doc)
}

func validate(doc []byte) ([]plan.Violation, error) {
	schema, err := compile()
	if err != nil {
		return nil, err
	}
	instance, err := jsonschema.UnmarshalJSON(bytes.NewReader(doc))
	if err != nil {
		return nil, fmt.Errorf("read cache plan: %w", err)
	}
	var invalid *jsonschema.ValidationError
	if err := schema.Validate(instance); err == nil {
		return nil, nil
	} else if !errors.As(err, &invalid) {
		return nil, fmt.Errorf("check cache plan: %w", err)
	}
	var vs []plan.Violation
	leaves(invalid, message.NewPrinter(language.English), &vs)
	return plan.SortViolations(vs), nil
}

// compile reads the embedded schema. It takes milliseconds, so nothing is kept between calls.
func compile() (*jsonschema.Schema, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(v1))
	if err != nil {
		return nil, fmt.Errorf("read the embedded schema: %w", err)
	}
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	if err := c.AddResource(ID, doc); err != nil {
		return nil, fmt.Errorf("read the embedded schema: %w", err)
	}
	s, err := c.Compile(ID)
	if err != nil {
		return nil, fmt.Errorf("compile the embedded schema: %w", err)
	}
	return s, nil
}

// Check returns everything that is wrong with a document: violations of the schema, and of what a plan means, in order
// of the pointers, each value once. The error is as of [Validate].
func Check(doc []byte) ([]plan.Violation, error) {
	form, meaning, err := plan.Check(doc)
	if err != nil {
		return nil, err
	}
	vs, err := validate(doc)
	if err != nil {
		return nil, err
	}
	// The schema's word comes first; what package plan finds at the same place is the same fault in other words.
	said := map[string]bool{}
	for _, v := range vs {
		said[v.Pointer] = true
	}
	for _, v := range slices.Concat(form, meaning) {
		if !said[v.Pointer] {
			vs = append(vs, v)
		}
	}
	return plan.SortViolations(vs), nil
}

// leaves gathers the violations that have no further cause. The library gives them in no fixed order.
func leaves(e *jsonschema.ValidationError, p *message.Printer, out *[]plan.Violation) {
	at := ""
	for _, token := range e.InstanceLocation {
		at = plan.PointerTo(at, token)
	}
	if len(e.Causes) > 0 {
		for _, c := range e.Causes {
			leaves(c, p, out)
		}
		return
	}
	switch k := e.ErrorKind.(type) {
	case *kind.Required:
		for _, name := range k.Missing {
			*out = append(*out, plan.Violation{Pointer: at, Reason: fmt.Sprintf("member %q is missing", name)})
		}
	case *kind.AdditionalProperties:
		reason := "unknown member"
		if at == "/policies" {
			reason = "name must be letters, digits, '.', '_' and '-', at most 64, the first a letter or digit"
		}
		for _, name := range k.Properties {
			*out = append(*out, plan.Violation{Pointer: plan.PointerTo(at, name), Reason: reason})
		}
	default:
		*out = append(*out, plan.Violation{Pointer: at, Reason: reason(e.ErrorKind, p)})
	}
}

// reason says in the words of package plan what is wrong with a value.
func reason(k jsonschema.ErrorKind, p *message.Printer) string {
	switch k := k.(type) {
	case *kind.Type:
		return fmt.Sprintf("is %s, must be %s", article(k.Got), article(k.Want...))
	case *kind.Enum:
		return fmt.Sprintf("is %s, must be %s", show(k.Got), shows(k.Want))
	case *kind.Const:
		return fmt.Sprintf("is %s, must be %s", show(k.Got), show(k.Want))
	case *kind.Minimum:
		return fmt.Sprintf("is %s, must be at least %s", decimal(k.Got), decimal(k.Want))
	case *kind.ExclusiveMinimum:
		return fmt.Sprintf("is %s, must be greater than %s", decimal(k.Got), decimal(k.Want))
	case *kind.Maximum:
		return fmt.Sprintf("is %s, must be at most %s", decimal(k.Got), decimal(k.Want))
	case *kind.MultipleOf:
		return fmt.Sprintf("is %s, must be a multiple of %s", decimal(k.Got), decimal(k.Want))
	case *kind.MinItems:
		return fmt.Sprintf("has %d entries, must have at least %d", k.Got, k.Want)
	case *kind.MaxItems:
		return fmt.Sprintf("has %d entries, must have at most %d", k.Got, k.Want)
	case *kind.MinProperties:
		return fmt.Sprintf("has %d members, must have at least %d", k.Got, k.Want)
	case *kind.MinLength:
		return fmt.Sprintf("has %d characters, must have at least %d", k.Got, k.Want)
	case *kind.MaxLength:
		return fmt.Sprintf("has %d characters, must have at most %d", k.Got, k.Want)
	case *kind.UniqueItems:
		return fmt.Sprintf("has the same entry twice, at %d and %d", k.Duplicates[0], k.Duplicates[1])
	case *kind.Pattern:
		return fmt.Sprintf("is %s, must match %s", show(k.Got), k.Want)
	}
	return k.LocalizedString(p)
}

func article(types ...string) string {
	out := make([]string, len(types))
	for i, t := range types {
		switch t {
		case "null":
			out[i] = t
		case "object", "array", "integer":
			out[i] = "an " + t
		default:
			out[i] = "a " + t
		}
	}
	return strings.Join(out, " or ")
}

// show writes a value for a message, not longer than a line.
func show(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	if len(b) > 80 {
		return strings.ToValidUTF8(string(b[:77]), "") + "..."
	}
	return string(b)
}

func shows(vs []any) string {
	out := make([]string, len(vs))
	for i, v := range vs {
		out[i] = show(v)
	}
	return strings.Join(out, " or ")
}

func decimal(r *big.Rat) string {
	if r.IsInt() && r.Num().BitLen() <= 64 {
		return r.Num().String()
	}
	f, _ := r.Float64()
	return strconv.FormatFloat(f, 'g', -1, 64)
}
