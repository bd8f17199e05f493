package plan

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
)

// Parse reads a plan and checks it. The error is a [SyntaxError], a [VersionError], a [KindError], a [MemberError] or
// an [InvalidError], in this order of precedence, or an [ErrFormat] for JSON that is no cache plan.
func Parse(data []byte) (*Plan, error) {
	d, err := decodePlan(data)
	if err != nil {
		return nil, err
	}
	switch {
	case len(d.kinds) > 0:
		return nil, &KindError{Violations: d.kinds}
	case len(d.unknown) > 0:
		return nil, &MemberError{Violations: d.unknown}
	}
	if vs := append(d.other, d.meaning()...); len(vs) > 0 {
		return nil, &InvalidError{Violations: SortViolations(vs)}
	}
	return d.plan, nil
}

// Check returns everything that is wrong with a document, in order of the pointers: with its form (what a schema can
// see), and with its meaning (what it cannot). The error is for a document that cannot be checked: a [SyntaxError], a
// [VersionError], or an [ErrFormat].
func Check(data []byte) (form, meaning []Violation, err error) {
	d, err := decodePlan(data)
	if err != nil {
		return nil, nil, err
	}
	form = append(append(append(form, d.kinds...), d.unknown...), d.other...)
	return SortViolations(form), d.meaning(), nil
}

// decoder fills a plan from a document and gathers what does not fit.
type decoder struct {
	plan    *Plan
	kinds   []Violation // policies of unknown kinds
	unknown []Violation // unknown members
	other   []Violation
	// unread are the pointers of values that are missing or could not be read: what Validate says of them or of what is
	// below them is about the zero values in their place.
	unread  map[string]bool
	lenient bool // unknown members are ignored
}

// meaning is what Validate finds, less what is about values that the document does not have.
func (d *decoder) meaning() []Violation {
	var out []Violation
	for _, v := range d.plan.Validate() {
		read := true
		for p := v.Pointer; p != "" && read; p = p[:strings.LastIndexByte(p, '/')] {
			read = !d.unread[p]
		}
		if read {
			out = append(out, v)
		}
	}
	return out
}

func decodePlan(data []byte) (*decoder, error) {
	n, err := parseJSON(data)
	if err != nil {
		return nil, err
	}
	if n.kind != nodeObject {
		return nil, fmt.Errorf("%w: the document is %v", ErrFormat, n.kind)
	}
	switch f := n.get("format"); {
	case f == nil:
		return nil, fmt.Errorf("%w: member \"format\" is missing", ErrFormat)
	case f.kind != nodeString || f.text != Format:
		return nil, fmt.Errorf("%w: format is %s, not %q", ErrFormat, f.appendInline(nil), Format)
	}
	switch v := n.get("version"); {
	case v == nil:
		return nil, &VersionError{Version: "none"}
	case v.kind != nodeNumber || !integerIs(v.text, Version):
		return nil, &VersionError{Version: string(v.appendInline(nil))}
	}
	d := &decoder{plan: &Plan{}, unread: map[string]bool{}}
	d.value(n, reflect.ValueOf(d.plan).Elem(), "")
	return d, nil
}

func integerIs(text string, want int64) bool {
	i, ok := parseInteger(text)
	return ok && i == want
}

// parseInteger reads an integer as JSON Schema understands it: 30, 30.0 and 3e1 are the same number.
func parseInteger(text string) (int64, bool) {
	if i, err := strconv.ParseInt(text, 10, 64); err == nil {
		return i, true
	}
	if f, err := strconv.ParseFloat(text, 64); err == nil && f == math.Trunc(f) && math.Abs(f) <= 1<<53 {
		return int64(f), true
	}
	return 0, false
}

func (d *decoder) fail(pointer, format string, args ...any) {
	d.other = append(d.other, Violation{pointer, fmt.Sprintf(format, args...)})
	d.unread[pointer] = true
}

func (d *decoder) missing(pointer, name string) {
	d.other = append(d.other, Violation{pointer, fmt.Sprintf("member %q is missing", name)})
	d.unread[PointerTo(pointer, name)] = true
}

var (
	policyType   = reflect.TypeFor[Policy]()
	evidenceType = reflect.TypeFor[Evidence]()
)

// value fills v from n.
func (d *decoder) value(n *node, v reflect.Value, pointer string) {
	mismatch := func(want string) { d.fail(pointer, "is %v, must be %s", n.kind, want) }
	t := v.Type()
	if t == policyType {
		d.policy(n, v, pointer)
		return
	}
	switch t.Kind() {
	case reflect.Pointer:
		target := reflect.New(t.Elem())
		d.value(n, target.Elem(), pointer)
		v.Set(target)
	case reflect.Struct:
		if n.kind != nodeObject {
			mismatch("an object")
			return
		}
		lenient := d.lenient
		d.lenient = lenient || t == evidenceType
		d.object(n, v, pointer, false)
		d.lenient = lenient
	case reflect.Map:
		if n.kind != nodeObject {
			mismatch("an object")
			return
		}
		m := reflect.MakeMap(t)
		for _, e := range n.members {
			x := reflect.New(t.Elem()).Elem()
			d.value(e.value, x, PointerTo(pointer, e.key))
			m.SetMapIndex(reflect.ValueOf(e.key), x)
		}
		v.Set(m)
	case reflect.Slice:
		if n.kind != nodeArray {
			mismatch("an array")
			return
		}
		s := reflect.MakeSlice(t, len(n.elems), len(n.elems))
		for i, e := range n.elems {
			d.value(e, s.Index(i), pointer+"/"+strconv.Itoa(i))
		}
		v.Set(s)
	case reflect.String:
		if n.kind != nodeString {
			mismatch("a string")
			return
		}
		v.SetString(n.text)
	case reflect.Bool:
		if n.kind != nodeBool {
			mismatch("a boolean")
			return
		}
		v.SetBool(n.text == "true")
	case reflect.Float64:
		if n.kind != nodeNumber {
			mismatch("a number")
			return
		}
		f, _ := strconv.ParseFloat(n.text, 64) // parseJSON has seen to it that it can be read
		v.SetFloat(f)
	case reflect.Int, reflect.Int64:
		if n.kind != nodeNumber {
			mismatch("an integer")
			return
		}
		i, ok := parseInteger(n.text)
		if !ok || v.OverflowInt(i) {
			d.fail(pointer, "is %s, must be an integer", n.text)
			return
		}
		v.SetInt(i)
	case reflect.Uint64:
		if n.kind != nodeNumber {
			mismatch("an integer")
			return
		}
		u, err := strconv.ParseUint(n.text, 10, 64)
		if err != nil {
			i, ok := parseInteger(n.text)
			if !ok || i < 0 {
				d.fail(pointer, "is %s, must be an integer from 0", n.text)
				return
			}
			u = uint64(i)
		}
		v.SetUint(u)
	}
}

// object fills the fields of a struct. tagged allows a member "kind" that has no field.
func (d *decoder) object(n *node, v reflect.Value, pointer string, tagged bool) {
	t := v.Type()
	known := map[string]bool{"kind": tagged}
	for i := range t.NumField() {
		name, options, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		known[name] = true
		optional := options == "omitempty"
		field := v.Field(i)
		switch e := n.get(name); {
		case e == nil:
			if !optional {
				d.missing(pointer, name)
			}
		case e.kind == nodeNull && field.Kind() == reflect.Pointer && !optional:
			// null stands for nothing where the member itself must be there.
		default:
			d.value(e, field, PointerTo(pointer, name))
			if !optional || !field.IsZero() && field.Kind() != reflect.Slice {
				break
			}
			switch field.Kind() {
			case reflect.Slice:
				if field.Len() == 0 {
					field.SetZero() // an empty list is one that was left out
				}
			case reflect.String, reflect.Int, reflect.Float64:
				// One way to say that there is no value.
				if at := PointerTo(pointer, name); !d.unread[at] {
					d.fail(at, "is %s, must be left out when there is no value", e.appendInline(nil))
				}
			}
		}
	}
	if d.lenient {
		return
	}
	for _, m := range n.members {
		if !known[m.key] {
			d.unknown = append(d.unknown, Violation{PointerTo(pointer, m.key), "unknown member"})
		}
	}
}

// policy fills an interface with the policy that the document's kind names.
func (d *decoder) policy(n *node, v reflect.Value, pointer string) {
	if n.kind != nodeObject {
		d.fail(pointer, "is %v, must be an object", n.kind)
		return
	}
	kind := n.get("kind")
	if kind == nil {
		d.missing(pointer, "kind")
		d.unread[pointer] = true
		return
	}
	if kind.kind != nodeString {
		d.unread[pointer] = true
		d.fail(pointer+"/kind", "is %v, must be a string", kind.kind)
		return
	}
	var target reflect.Value
	switch Kind(kind.text) {
	case KindFull:
		target = reflect.New(reflect.TypeFor[Full]())
	case KindStreaming:
		target = reflect.New(reflect.TypeFor[Streaming]())
	case KindFastGen:
		target = reflect.New(reflect.TypeFor[FastGen]())
	case KindTopK:
		target = reflect.New(reflect.TypeFor[TopK]())
	case KindH2O:
		target = reflect.New(reflect.TypeFor[H2O]())
	default:
		d.unread[pointer] = true
		d.kinds = append(d.kinds, Violation{pointer + "/kind", fmt.Sprintf("unknown kind of policy %q", kind.text)})
		return
	}
	d.object(n, target.Elem(), pointer, true)
	v.Set(target.Elem())
}
