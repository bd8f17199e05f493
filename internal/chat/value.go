package chat

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Values are nil (None), bool, int64, float64, string, undefined, []any (lists), tuple, *dict, *namespace, *looper and
// function. All but namespaces and loops are immutable, as in the sandbox of transformers.
type (
	undefined struct{ name string }
	tuple     []any
	namespace struct{ values map[string]any }
	function  func(args []any, kw map[string]any) (any, error)

	// dict keeps its entries in order.
	dict struct {
		keys, values []any
		at           map[any]int
	}
)

func newDict() *dict { return &dict{at: map[any]int{}} }

// key makes equal keys equal: Python's 1, 1.0 and True are one key.
func key(k any) (any, bool) {
	switch v := k.(type) {
	case nil, string, int64:
		return k, true
	case bool:
		if v {
			return int64(1), true
		}
		return int64(0), true
	case float64:
		if v == math.Trunc(v) && math.Abs(v) < 1<<53 {
			return int64(v), true
		}
		return v, v == v
	}
	return nil, false
}

func (d *dict) set(k, v any) error {
	h, ok := key(k)
	if !ok {
		return fmt.Errorf("%s can't be a key", kindOf(k))
	}
	if i, ok := d.at[h]; ok {
		d.values[i] = v
		return nil
	}
	d.at[h] = len(d.keys)
	d.keys, d.values = append(d.keys, k), append(d.values, v)
	return nil
}

func (d *dict) get(k any) (any, bool) {
	h, ok := key(k)
	if !ok {
		return nil, false
	}
	i, ok := d.at[h]
	if !ok {
		return nil, false
	}
	return d.values[i], true
}

func kindOf(v any) string {
	switch v := v.(type) {
	case nil:
		return "none"
	case bool:
		return "a boolean"
	case int64, float64:
		return "a number"
	case string:
		return "a string"
	case []any:
		return "a list"
	case tuple:
		return "a tuple"
	case *dict:
		return "a mapping"
	case undefined:
		if v.name != "" {
			return strconv.Quote(v.name) + ", which is undefined,"
		}
		return "an undefined value"
	}
	return "an object"
}

func truth(v any) bool {
	switch v := v.(type) {
	case nil, undefined:
		return false
	case bool:
		return v
	case int64:
		return v != 0
	case float64:
		return v != 0
	case string:
		return v != ""
	case []any:
		return len(v) > 0
	case tuple:
		return len(v) > 0
	case *dict:
		return len(v.keys) > 0
	}
	return true
}

// maxNested bounds the depth of values that are printed.
const maxNested = 100

// str is Python's str().
func str(v any) string {
	switch v := v.(type) {
	case string:
		return v
	case undefined:
		return ""
	}
	return repr(v)
}

// repr is Python's repr().
func repr(v any) string {
	var b strings.Builder
	writeRepr(&b, v, 0)
	return b.String()
}

// tooMuch is panicked with by what walks through values and has no error to return; Render recovers it. Values may
// share parts, so that a short template can make one that is endless to walk.
type tooMuch struct{}

func writeRepr(b *strings.Builder, v any, depth int) {
	if depth > maxNested || b.Len() > maxBytes {
		panic(tooMuch{})
	}
	list := func(items []any) {
		for i, x := range items {
			if i > 0 {
				b.WriteString(", ")
			}
			writeRepr(b, x, depth+1)
		}
	}
	switch v := v.(type) {
	case nil:
		b.WriteString("None")
	case bool:
		if v {
			b.WriteString("True")
		} else {
			b.WriteString("False")
		}
	case int64:
		b.WriteString(strconv.FormatInt(v, 10))
	case float64:
		b.WriteString(floatRepr(v))
	case string:
		b.WriteString(quote(v))
	case undefined:
		b.WriteString("Undefined")
	case []any:
		b.WriteByte('[')
		list(v)
		b.WriteByte(']')
	case tuple:
		b.WriteByte('(')
		list(v)
		if len(v) == 1 {
			b.WriteByte(',')
		}
		b.WriteByte(')')
	case *dict:
		b.WriteByte('{')
		for i, k := range v.keys {
			if i > 0 {
				b.WriteString(", ")
			}
			writeRepr(b, k, depth+1)
			b.WriteString(": ")
			writeRepr(b, v.values[i], depth+1)
		}
		b.WriteByte('}')
	default:
		b.WriteString("<object>")
	}
}

// floatRepr is Python's repr of a float: the shortest that reads back, with an exponent below 1e-4 and from 1e16.
func floatRepr(f float64) string {
	switch {
	case math.IsNaN(f):
		return "nan"
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(f, 'e', -1, 64)
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

func quote(s string) string {
	q := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		q = '"'
	}
	var b strings.Builder
	b.WriteByte(q)
	for _, r := range s {
		switch {
		case r == rune(q) || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\r':
			b.WriteString(`\r`)
		case r == '\t':
			b.WriteString(`\t`)
		case r < ' ' || r == 0x7F || r > 0x7F && r < 0x100 && !unicode.IsPrint(r):
			fmt.Fprintf(&b, `\x%02x`, r)
		case r > 0xFF && !unicode.IsPrint(r) && r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		case r > 0xFFFF && !unicode.IsPrint(r):
			fmt.Fprintf(&b, `\U%08x`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte(q)
	return b.String()
}

// number gives a value as a float, and as an integer where it is one; booleans are numbers.
func number(v any) (f float64, i int64, integer, ok bool) {
	switch v := v.(type) {
	case bool:
		if v {
			return 1, 1, true, true
		}
		return 0, 0, true, true
	case int64:
		return float64(v), v, true, true
	case float64:
		return v, 0, false, true
	}
	return 0, 0, false, false
}

// maxCompared bounds the parts of two values that are compared.
const maxCompared = 1 << 16

// equal is Python's a == b; it also gives how many parts it looked at.
func equal(a, b any) (bool, int) {
	left := maxCompared
	same := equalTo(a, b, &left)
	return same, maxCompared - left
}

func equalTo(a, b any, left *int) bool {
	if *left--; *left < 0 {
		panic(tooMuch{})
	}
	if x, i, int1, ok := number(a); ok {
		y, j, int2, ok := number(b)
		if int1 && int2 {
			return ok && i == j
		}
		return ok && x == y
	}
	items := func(x, y []any) bool {
		if len(x) != len(y) {
			return false
		}
		for i := range x {
			if !equalTo(x[i], y[i], left) {
				return false
			}
		}
		return true
	}
	switch x := a.(type) {
	case nil:
		return b == nil
	case string:
		y, ok := b.(string)
		return ok && x == y
	case undefined:
		_, ok := b.(undefined)
		return ok
	case []any:
		y, ok := b.([]any)
		return ok && items(x, y)
	case tuple:
		y, ok := b.(tuple)
		return ok && items(x, y)
	case *dict:
		y, ok := b.(*dict)
		if !ok || len(x.keys) != len(y.keys) {
			return false
		}
		for i, k := range x.keys {
			if v, ok := y.get(k); !ok || !equalTo(x.values[i], v, left) {
				return false
			}
		}
		return true
	case *namespace:
		y, ok := b.(*namespace)
		return ok && x == y
	}
	return false
}

// order compares numbers, strings, and lists of them.
func order(a, b any) (int, error) { return orderTo(a, b, 0) }

func orderTo(a, b any, depth int) (int, error) {
	if x, i, int1, ok := number(a); ok {
		if y, j, int2, ok := number(b); ok {
			switch {
			case int1 && int2 && i < j, !(int1 && int2) && x < y:
				return -1, nil
			case int1 && int2 && i > j, !(int1 && int2) && x > y:
				return 1, nil
			}
			return 0, nil
		}
	}
	if x, ok := a.(string); ok {
		if y, ok := b.(string); ok {
			return strings.Compare(x, y), nil
		}
	}
	x, ok1 := sequence(a)
	y, ok2 := sequence(b)
	if ok1 && ok2 && depth < maxNested {
		for i := 0; i < len(x) && i < len(y); i++ {
			if same, _ := equal(x[i], y[i]); !same {
				return orderTo(x[i], y[i], depth+1)
			}
		}
		return len(x) - len(y), nil
	}
	return 0, fmt.Errorf("%s and %s have no order", kindOf(a), kindOf(b))
}

// sequence gives the items of a list or tuple.
func sequence(v any) ([]any, bool) {
	switch v := v.(type) {
	case []any:
		return v, true
	case tuple:
		return v, true
	}
	return nil, false
}

// maxLetters bounds the strings that are looped over letter by letter.
const maxLetters = 1 << 16

// iterate gives what a loop over a value would.
func iterate(v any) ([]any, error) {
	switch v := v.(type) {
	case []any:
		return v, nil
	case tuple:
		return v, nil
	case undefined:
		return nil, nil
	case string:
		if len(v) > maxLetters {
			return nil, errTooMuch
		}
		out := make([]any, 0, len(v))
		for _, r := range v {
			out = append(out, string(r))
		}
		return out, nil
	case *dict:
		return v.keys, nil
	}
	return nil, fmt.Errorf("%s can't be iterated over", kindOf(v))
}

func length(v any) (int64, error) {
	switch v := v.(type) {
	case string:
		return int64(utf8.RuneCountInString(v)), nil
	case []any:
		return int64(len(v)), nil
	case tuple:
		return int64(len(v)), nil
	case *dict:
		return int64(len(v.keys)), nil
	case undefined:
		return 0, nil
	}
	return 0, fmt.Errorf("%s has no length", kindOf(v))
}

// item is Python's v[i], undefined where there is none.
func item(v, i any) any {
	n, isInt := i.(int64)
	switch v := v.(type) {
	case *dict:
		if x, ok := v.get(i); ok {
			return x
		}
	case string:
		if isInt {
			r := []rune(v)
			if n < 0 {
				n += int64(len(r))
			}
			if n >= 0 && n < int64(len(r)) {
				return string(r[n])
			}
		}
	default:
		if items, ok := sequence(v); ok && isInt {
			if n < 0 {
				n += int64(len(items))
			}
			if n >= 0 && n < int64(len(items)) {
				return items[n]
			}
		}
	}
	return undefined{}
}

// bounds gives the indices that a slice of n items takes, as Python's slice.indices does.
func bounds(n int64, start, stop, step any) (from, to, by int64, err error) {
	get := func(v any, fallback, low, high int64) int64 {
		if v == nil || err != nil {
			return fallback
		}
		_, i, integer, ok := number(v)
		if !ok || !integer {
			err = fmt.Errorf("%s can't bound a slice", kindOf(v))
			return 0
		}
		if i < 0 {
			i = max(i, -n-1) + n
		}
		return max(low, min(i, high))
	}
	by = 1
	if step != nil {
		var integer, ok bool
		if _, by, integer, ok = number(step); !ok || !integer || by == 0 {
			return 0, 0, 0, fmt.Errorf("%s can't be the step of a slice", str(step))
		}
	}
	if by > 0 {
		from, to = get(start, 0, 0, n), get(stop, n, 0, n)
	} else {
		from, to = get(start, n-1, -1, n-1), get(stop, -1, -1, n-1)
	}
	return from, to, by, err
}

func sliced[T any](v []T, from, to, by int64) []T {
	out := []T{}
	n := int64(len(v))
	by = max(-n-1, min(by, n+1)) // larger steps take one item too, and would overflow
	for i := from; by > 0 && i < to || by < 0 && i > to; i += by {
		out = append(out, v[i])
	}
	return out
}
