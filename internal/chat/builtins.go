package chat

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// attribute is Jinja's v.n and, with dot unset, v["n"]: methods come first behind a dot, items within brackets.
func attribute(v any, n string, dot bool) any {
	switch v := v.(type) {
	case *looper:
		return v.attr(n)
	case *namespace:
		if x, ok := v.values[n]; ok {
			return x
		}
	case *dict:
		f := dictMethod(v, n)
		x, ok := v.get(n)
		switch {
		case ok && (!dot || f == nil):
			return x
		case f != nil:
			return f
		}
	case string:
		if f := stringMethod(v, n); f != nil {
			return f
		}
	}
	return undefined{n}
}

// params sorts arguments by the names of parameters; missing ones are nil in got and false in given.
func params(args []any, kw map[string]any, names ...string) (got []any, given []bool, err error) {
	got, given = make([]any, len(names)), make([]bool, len(names))
	if len(args) > len(names) {
		return nil, nil, fmt.Errorf("%d arguments, want at most %d", len(args), len(names))
	}
	for i, a := range args {
		got[i], given[i] = a, true
	}
	for k, v := range kw {
		i := slices.Index(names, k)
		if i < 0 || given[i] {
			return nil, nil, fmt.Errorf("unexpected argument %s", k)
		}
		got[i], given[i] = v, true
	}
	return got, given, nil
}

// textArg reads an optional string.
func textArg(args []any, i int, fallback string) (string, error) {
	if i >= len(args) || args[i] == nil {
		return fallback, nil
	}
	s, ok := args[i].(string)
	if !ok {
		return "", fmt.Errorf("%s where a string is wanted", kindOf(args[i]))
	}
	return s, nil
}

func intArg(args []any, i int, fallback int64) (int64, error) {
	if i >= len(args) || args[i] == nil {
		return fallback, nil
	}
	_, n, integer, ok := number(args[i])
	if !ok || !integer {
		return 0, fmt.Errorf("%s where an integer is wanted", kindOf(args[i]))
	}
	return n, nil
}

// positional makes a function of one that takes a number of arguments without names.
func positional(least, most int, f func(args []any) (any, error)) function {
	return func(args []any, kw map[string]any) (any, error) {
		if len(kw) > 0 || len(args) < least || len(args) > most {
			return nil, fmt.Errorf("%d arguments and %d with names, want %d to %d without", len(args), len(kw), least, most)
		}
		return f(args)
	}
}

func dictMethod(d *dict, n string) any {
	switch n {
	case "get":
		return positional(1, 2, func(args []any) (any, error) {
			if v, ok := d.get(args[0]); ok {
				return v, nil
			}
			if len(args) == 2 {
				return args[1], nil
			}
			return nil, nil
		})
	case "items":
		return positional(0, 0, func([]any) (any, error) { return entries(d), nil })
	case "keys":
		return positional(0, 0, func([]any) (any, error) { return slices.Clone(d.keys), nil })
	case "values":
		return positional(0, 0, func([]any) (any, error) { return slices.Clone(d.values), nil })
	}
	return nil
}

func entries(d *dict) []any {
	out := make([]any, len(d.keys))
	for i, k := range d.keys {
		out[i] = tuple{k, d.values[i]}
	}
	return out
}

// stripper makes strip, lstrip and rstrip.
func stripper(s string, left, right bool) function {
	return positional(0, 1, func(args []any) (any, error) {
		cut, err := textArg(args, 0, "")
		if err != nil {
			return nil, err
		}
		in := unicode.IsSpace
		if len(args) > 0 && args[0] != nil {
			in = func(r rune) bool { return strings.ContainsRune(cut, r) }
		}
		t := s
		if left {
			t = strings.TrimLeftFunc(t, in)
		}
		if right {
			t = strings.TrimRightFunc(t, in)
		}
		return t, nil
	})
}

func stringMethod(s, n string) any {
	plain := func(f func(string) any) any {
		return positional(0, 0, func([]any) (any, error) { return f(s), nil })
	}
	affix := func(f func(s, affix string) bool) any {
		return positional(1, 1, func(args []any) (any, error) {
			options, ok := args[0].(tuple)
			if !ok {
				options = tuple{args[0]}
			}
			for i := range options {
				a, ok := options[i].(string)
				if !ok {
					return nil, fmt.Errorf("%s where a string is wanted", kindOf(options[i]))
				}
				if f(s, a) {
					return true, nil
				}
			}
			return false, nil
		})
	}
	oneText := func(f func(t string) (any, error)) any {
		return positional(1, 1, func(args []any) (any, error) {
			t, ok := args[0].(string)
			if !ok {
				return nil, fmt.Errorf("%s where a string is wanted", kindOf(args[0]))
			}
			return f(t)
		})
	}
	position := func(i int) int64 {
		if i < 0 {
			return -1
		}
		return int64(utf8.RuneCountInString(s[:i]))
	}
	all := func(in func(rune) bool) any {
		return plain(func(s string) any {
			return s != "" && strings.IndexFunc(s, func(r rune) bool { return !in(r) }) < 0
		})
	}
	switch n {
	case "strip":
		return stripper(s, true, true)
	case "lstrip":
		return stripper(s, true, false)
	case "rstrip":
		return stripper(s, false, true)
	case "upper":
		return plain(func(s string) any { return strings.ToUpper(s) })
	case "lower":
		return plain(func(s string) any { return strings.ToLower(s) })
	case "title":
		return plain(func(s string) any { return title(s) })
	case "capitalize":
		return plain(func(s string) any { return capitalize(s) })
	case "isdigit":
		return all(unicode.IsDigit)
	case "isalpha":
		return all(unicode.IsLetter)
	case "isspace":
		return all(unicode.IsSpace)
	case "startswith":
		return affix(strings.HasPrefix)
	case "endswith":
		return affix(strings.HasSuffix)
	case "removeprefix":
		return oneText(func(t string) (any, error) { return strings.TrimPrefix(s, t), nil })
	case "removesuffix":
		return oneText(func(t string) (any, error) { return strings.TrimSuffix(s, t), nil })
	case "find":
		return oneText(func(t string) (any, error) { return position(strings.Index(s, t)), nil })
	case "rfind":
		return oneText(func(t string) (any, error) { return position(strings.LastIndex(s, t)), nil })
	case "index":
		return oneText(func(t string) (any, error) {
			if i := strings.Index(s, t); i >= 0 {
				return position(i), nil
			}
			return nil, errors.New("substring not found")
		})
	case "count":
		return oneText(func(t string) (any, error) { return int64(strings.Count(s, t)), nil })
	case "join":
		return positional(1, 1, func(args []any) (any, error) {
			items, err := iterate(args[0])
			if err != nil {
				return nil, err
			}
			for _, x := range items {
				if _, ok := x.(string); !ok {
					return nil, fmt.Errorf("%s can't be joined to strings", kindOf(x))
				}
			}
			return joined(items, s)
		})
	case "replace":
		return positional(2, 3, func(args []any) (any, error) {
			old, err := textArg(args, 0, "")
			if err != nil {
				return nil, err
			}
			with, err := textArg(args, 1, "")
			if err != nil {
				return nil, err
			}
			count, err := intArg(args, 2, -1)
			if err != nil {
				return nil, err
			}
			return replaced(s, old, with, count)
		})
	case "split", "rsplit":
		return function(func(args []any, kw map[string]any) (any, error) {
			got, _, err := params(args, kw, "sep", "maxsplit")
			if err != nil {
				return nil, err
			}
			sep, err := textArg(got, 0, "")
			if err != nil {
				return nil, err
			}
			most, err := intArg(got, 1, -1)
			if err != nil {
				return nil, err
			}
			if got[0] != nil && sep == "" {
				return nil, errors.New("empty separator")
			}
			return split(s, sep, most, n == "rsplit"), nil
		})
	case "splitlines":
		return plain(func(s string) any {
			out := []any{}
			for s != "" {
				i := strings.IndexFunc(s, isLineEnd)
				if i < 0 {
					return append(out, s)
				}
				out = append(out, s[:i])
				_, n := utf8.DecodeRuneInString(s[i:])
				if strings.HasPrefix(s[i:], "\r\n") {
					n = 2
				}
				s = s[i+n:]
			}
			return out
		})
	}
	return nil
}

// isLineEnd reports where Python's splitlines splits.
func isLineEnd(r rune) bool {
	return r >= '\n' && r <= '\r' || r >= 0x1C && r <= 0x1E || r == 0x85 || r == 0x2028 || r == 0x2029
}

func capitalize(s string) string {
	r, n := utf8.DecodeRuneInString(s)
	if n == 0 {
		return ""
	}
	return string(unicode.ToTitle(r)) + strings.ToLower(s[n:])
}

// title is Python's str.title: letters behind what is not a letter are capitals.
func title(s string) string {
	inWord := false
	return strings.Map(func(r rune) rune {
		was := inWord
		inWord = unicode.IsLetter(r)
		if was {
			return unicode.ToLower(r)
		}
		return unicode.ToTitle(r)
	}, s)
}

// titleWords is Jinja's title: the first letter of a word is a capital, and words are parted by white space and the
// opening of brackets.
func titleWords(s string) string {
	begins := true
	return strings.Map(func(r rune) rune {
		first := begins
		begins = unicode.IsSpace(r) || strings.ContainsRune("-({[<", r)
		if first {
			return unicode.ToUpper(r)
		}
		return unicode.ToLower(r)
	}, s)
}

// split is Python's str.split and rsplit; an empty separator stands for white space.
func split(s, sep string, most int64, fromRight bool) []any {
	out := []any{}
	if most < 0 {
		most = math.MaxInt64
	}
	if sep == "" && !fromRight {
		s = strings.TrimLeftFunc(s, unicode.IsSpace)
		for ; s != ""; most-- {
			i := strings.IndexFunc(s, unicode.IsSpace)
			if i < 0 || most == 0 {
				return append(out, s)
			}
			out = append(out, s[:i])
			s = strings.TrimLeftFunc(s[i:], unicode.IsSpace)
		}
		return out
	}
	if !fromRight {
		for ; most > 0; most-- {
			before, after, found := strings.Cut(s, sep)
			if !found {
				break
			}
			out = append(out, before)
			s = after
		}
		return append(out, s)
	}
	if sep == "" {
		s = strings.TrimRightFunc(s, unicode.IsSpace)
	}
	for ; s != "" || sep != ""; most-- {
		i, n := strings.LastIndex(s, sep), len(sep)
		if sep == "" {
			if i = strings.LastIndexFunc(s, unicode.IsSpace); i >= 0 {
				_, n = utf8.DecodeRuneInString(s[i:])
			}
		}
		if i < 0 || most == 0 {
			out = append(out, s)
			break
		}
		out = append(out, s[i+n:])
		if s = s[:i]; sep == "" {
			s = strings.TrimRightFunc(s, unicode.IsSpace)
		}
	}
	slices.Reverse(out)
	return out
}

func replaced(s, old, with string, count int64) (any, error) {
	n := int64(strings.Count(s, old))
	if count >= 0 {
		n = min(n, count)
	}
	if int64(len(s))+n*int64(len(with)) > maxBytes {
		return nil, errTooMuch
	}
	return strings.Replace(s, old, with, int(n)), nil
}

func joined(items []any, sep string) (any, error) {
	parts := make([]string, len(items))
	size := 0
	for i, x := range items {
		parts[i] = str(x)
		if size += len(parts[i]) + len(sep); size > maxBytes {
			return nil, errTooMuch
		}
	}
	return strings.Join(parts, sep), nil
}

func (m *machine) tested(n string, v any, args []any) (bool, error) {
	_, isUndefined := v.(undefined)
	_, i, integer, isNumber := number(v)
	_, isBool := v.(bool)
	want := 0
	switch n {
	case "eq", "equalto", "ne", "gt", "greaterthan", "ge", "lt", "lessthan", "le", "in", "sameas", "divisibleby":
		want = 1
	}
	if len(args) != want {
		return false, fmt.Errorf("test %s: %d arguments, want %d", n, len(args), want)
	}
	switch n {
	case "defined":
		return !isUndefined, nil
	case "undefined":
		return isUndefined, nil
	case "none":
		return v == nil, nil
	case "true":
		return v == true, nil
	case "false":
		return v == false, nil
	case "boolean":
		return isBool, nil
	case "string":
		_, ok := v.(string)
		return ok, nil
	case "number":
		return isNumber, nil
	case "integer":
		return integer && !isBool, nil
	case "float":
		_, ok := v.(float64)
		return ok, nil
	case "mapping":
		_, ok := v.(*dict)
		return ok, nil
	case "iterable":
		_, err := iterate(v)
		return err == nil, nil
	case "sequence":
		_, err := length(v)
		return err == nil, nil
	case "callable":
		_, ok := v.(function)
		return ok, nil
	case "odd", "even":
		if !integer {
			return false, fmt.Errorf("test %s of %s", n, kindOf(v))
		}
		return (i%2 != 0) == (n == "odd"), nil
	case "divisibleby":
		d, err := intArg(args, 0, 0)
		if err != nil || !integer || d == 0 {
			return false, fmt.Errorf("test %s of %s by %s", n, kindOf(v), str(args[0]))
		}
		return i%d == 0, nil
	case "lower", "upper":
		s := str(v)
		lower, upper := strings.ToLower(s), strings.ToUpper(s)
		return lower != upper && (n == "lower" && s == lower || n == "upper" && s == upper), nil
	case "in":
		return m.contains(args[0], v)
	case "sameas":
		if v == nil || isBool {
			return v == args[0], nil
		}
		return false, errors.New("test sameas of other than none and booleans")
	}
	op := map[string]string{"eq": "==", "equalto": "==", "ne": "!=", "gt": ">", "greaterthan": ">", "ge": ">=", "lt": "<", "lessthan": "<", "le": "<="}[n]
	if op == "" {
		return false, fmt.Errorf("the test %q is not supported", n)
	}
	return m.compared(op, v, args[0])
}

// filter applies a filter by name.
func (m *machine) filter(n string, v any, args []any, kw map[string]any) (any, error) {
	fail := func(err error) (any, error) { return nil, fmt.Errorf("filter %s: %w", n, err) }
	take := func(names ...string) ([]any, []bool, error) { return params(args, kw, names...) }
	items := func() ([]any, error) {
		x, err := iterate(v)
		if err == nil {
			err = m.spend(len(x) * stepBytes)
		}
		return x, err
	}
	// method filters stand for a method of strings.
	method := func(name string) (any, error) {
		return attribute(str(v), name, true).(function)(args, kw)
	}
	switch n {
	case "upper", "lower", "capitalize":
		return method(n)
	case "title":
		if len(args)+len(kw) > 0 {
			return fail(errors.New("it takes no arguments"))
		}
		return titleWords(str(v)), nil
	case "trim":
		return stripper(str(v), true, true)(positionalOf(args, kw, "chars"), nil)
	case "length", "count":
		return length(v)
	case "string":
		return str(v), nil
	case "safe":
		return v, nil
	case "default", "d":
		got, _, err := take("default_value", "boolean")
		if err != nil {
			return fail(err)
		}
		if _, isUndefined := v.(undefined); isUndefined || truth(got[1]) && !truth(v) {
			if got[0] == nil {
				return "", nil
			}
			return got[0], nil
		}
		return v, nil
	case "replace":
		got, given, err := take("old", "new", "count")
		if err != nil || !given[0] || !given[1] {
			return fail(cmpErr(err, "it takes what to replace, and by what"))
		}
		count, err := intArg(got, 2, -1)
		if err != nil {
			return fail(err)
		}
		return replaced(str(v), str(got[0]), str(got[1]), count)
	case "join":
		got, _, err := take("d", "attribute")
		if err != nil {
			return fail(err)
		}
		list, err := items()
		if err != nil {
			return fail(err)
		}
		if got[1] != nil {
			if list, err = mapped(list, got[1], nil); err != nil {
				return fail(err)
			}
		}
		sep, err := textArg(got, 0, "")
		if err != nil {
			return fail(err)
		}
		return joined(list, sep)
	case "list":
		list, err := items()
		return slices.Clone(list), err
	case "items":
		switch d := v.(type) {
		case *dict:
			return entries(d), nil
		case undefined:
			return []any{}, nil
		}
		return fail(fmt.Errorf("%s has no items", kindOf(v)))
	case "first", "last":
		list, err := items()
		switch {
		case err != nil:
			return fail(err)
		case len(list) == 0:
			return undefined{}, nil
		case n == "first":
			return list[0], nil
		}
		return list[len(list)-1], nil
	case "reverse":
		if s, ok := v.(string); ok {
			r := []rune(s)
			slices.Reverse(r)
			return string(r), nil
		}
		list, err := items()
		list = slices.Clone(list)
		slices.Reverse(list)
		return list, err
	case "map":
		list, err := items()
		if err != nil {
			return fail(err)
		}
		if a, ok := kw["attribute"]; ok && len(args) == 0 {
			out, err := mapped(list, a, kw["default"])
			if err != nil {
				return fail(err)
			}
			return out, nil
		}
		f, err := textArg(args, 0, "")
		if err != nil || f == "" {
			return fail(cmpErr(err, "it takes a filter or an attribute"))
		}
		out := make([]any, len(list))
		for i, x := range list {
			if err := m.handle(x); err != nil {
				return nil, err
			}
			if out[i], err = m.filter(f, x, args[1:], kw); err != nil {
				return fail(err)
			}
		}
		return out, nil
	case "select", "reject", "selectattr", "rejectattr":
		list, err := items()
		if err != nil || len(kw) > 0 {
			return fail(cmpErr(err, "it takes no names"))
		}
		return m.chosen(n, list, args)
	case "sort", "unique", "min", "max", "sum", "dictsort":
		return m.ordering(n, v, args, kw)
	case "abs":
		if f, i, integer, ok := number(v); ok && integer && i != math.MinInt64 {
			return max(i, -i), nil
		} else if ok {
			return math.Abs(f), nil
		}
	case "round":
		got, given, err := take("precision", "method")
		if err != nil || given[1] && got[1] != "common" {
			return fail(cmpErr(err, "only the common method is supported"))
		}
		digits, err := intArg(got, 0, 0)
		f, i, integer, ok := number(v)
		if integer && err == nil && digits >= 0 {
			return i, nil
		}
		if err != nil || !ok || digits < 0 || digits > 15 {
			return fail(cmpErr(err, "of "+kindOf(v)))
		}
		r, err := strconv.ParseFloat(strconv.FormatFloat(f, 'f', int(digits), 64), 64) // half to even, as Python does
		return r, err
	case "int":
		got, given, err := take("default", "base")
		if err != nil || given[1] {
			return fail(cmpErr(err, "a base is not supported"))
		}
		return toInt(v, got[0], given[0])
	case "float":
		got, given, err := take("default")
		if err != nil {
			return fail(err)
		}
		if f, _, _, ok := number(v); ok {
			return f, nil
		}
		if s, ok := v.(string); ok {
			if f, err := strconv.ParseFloat(strings.TrimSpace(s), 64); err == nil {
				return f, nil
			}
		}
		if given[0] {
			return got[0], nil
		}
		return 0.0, nil
	case "indent":
		if s, ok := v.(string); ok {
			return indent(s, args, kw)
		}
	case "batch":
		got, _, err := take("linecount", "fill_with")
		if err != nil {
			return fail(err)
		}
		size, err := intArg(got, 0, 0)
		if err != nil || size < 1 {
			return fail(cmpErr(err, "of fewer than one"))
		}
		list, err := items()
		if err != nil {
			return fail(err)
		}
		out := []any{}
		for part := range slices.Chunk(list, int(min(size, int64(len(list))+1))) {
			part = slices.Clone(part)
			for got[1] != nil && int64(len(part)) < size {
				if err := m.spend(0); err != nil {
					return nil, err
				}
				part = append(part, got[1])
			}
			out = append(out, part)
		}
		return out, nil
	case "format":
		return percent(str(v), tuple(args))
	case "attr":
		if name, err := textArg(args, 0, ""); err == nil && len(args) == 1 {
			return attribute(v, name, true), nil
		}
	case "tojson":
		got, given, err := take("indent", "ensure_ascii", "separators", "sort_keys")
		if err != nil || given[2] {
			return fail(cmpErr(err, "separators are not supported"))
		}
		spaces, err := intArg(got, 0, -1)
		if err != nil || spaces > 32 {
			return fail(cmpErr(err, "of so much space"))
		}
		var b strings.Builder
		j := jsonWriter{&b, int(spaces), truth(got[1]), truth(got[3])}
		if got[0] == nil {
			j.indent = -1
		}
		if err := j.write(v, 0); err != nil {
			return fail(err)
		}
		return b.String(), nil
	default:
		return nil, fmt.Errorf("the filter %q is not supported", n)
	}
	return fail(fmt.Errorf("of %s", kindOf(v)))
}

// positionalOf gives the arguments of a filter with one parameter.
func positionalOf(args []any, kw map[string]any, name string) []any {
	if v, ok := kw[name]; ok && len(args) == 0 && len(kw) == 1 {
		return []any{v}
	}
	return args
}

// cmpErr is err, or, without one, a message.
func cmpErr(err error, message string) error {
	if err != nil {
		return err
	}
	return errors.New(message)
}

// path follows an attribute as map and selectattr name it: names and numbers with dots between.
func path(v, at any) (any, error) {
	switch at := at.(type) {
	case int64:
		return item(v, at), nil
	case string:
		for _, part := range strings.Split(at, ".") {
			if _, ok := v.(undefined); ok {
				return v, nil
			}
			if i, err := strconv.ParseInt(part, 10, 64); err == nil && i >= 0 {
				v = item(v, i)
			} else {
				v = attribute(v, part, false)
			}
		}
		return v, nil
	}
	return nil, fmt.Errorf("%s can't name an attribute", kindOf(at))
}

func mapped(list []any, at, fallback any) ([]any, error) {
	out := make([]any, len(list))
	for i, x := range list {
		v, err := path(x, at)
		if err != nil {
			return nil, err
		}
		if _, ok := v.(undefined); ok && fallback != nil {
			v = fallback
		}
		out[i] = v
	}
	return out, nil
}

// chosen is select, reject, selectattr and rejectattr.
func (m *machine) chosen(n string, list, args []any) (any, error) {
	want := strings.HasPrefix(n, "select")
	byAttr := strings.HasSuffix(n, "attr")
	var at any
	if byAttr {
		if len(args) == 0 {
			return nil, fmt.Errorf("filter %s: it takes an attribute", n)
		}
		at, args = args[0], args[1:]
	}
	out := []any{}
	for _, x := range list {
		v := x
		var err error
		if byAttr {
			if v, err = path(x, at); err != nil {
				return nil, err
			}
		}
		ok := truth(v)
		if len(args) > 0 {
			name, err := textArg(args, 0, "")
			if err != nil {
				return nil, err
			}
			if op := map[string]string{"==": "eq", "!=": "ne", ">": "gt", ">=": "ge", "<": "lt", "<=": "le"}[name]; op != "" {
				name = op
			}
			if ok, err = m.tested(name, v, args[1:]); err != nil {
				return nil, err
			}
		}
		if ok == want {
			out = append(out, x)
		}
	}
	return out, nil
}

// ordering is the filters that compare items, strings without regard to case.
func (m *machine) ordering(n string, v any, args []any, kw map[string]any) (any, error) {
	fail := func(err error) (any, error) { return nil, fmt.Errorf("filter %s: %w", n, err) }
	names := map[string][]string{"sort": {"reverse", "case_sensitive", "attribute"}, "unique": {"case_sensitive", "attribute"},
		"min": {"case_sensitive", "attribute"}, "max": {"case_sensitive", "attribute"}, "sum": {"attribute", "start"},
		"dictsort": {"case_sensitive", "by", "reverse"}}[n]
	got, _, err := params(args, kw, names...)
	if err != nil {
		return fail(err)
	}
	arg := func(name string) any {
		if i := slices.Index(names, name); i >= 0 {
			return got[i]
		}
		return nil
	}
	var list []any
	if d, ok := v.(*dict); ok && n == "dictsort" {
		list = entries(d)
	} else if list, err = iterate(v); err != nil || n == "dictsort" {
		return fail(cmpErr(err, "of "+kindOf(v)))
	}
	list = slices.Clone(list)
	if err := m.spend(len(list) * stepBytes * 16); err != nil {
		return nil, err
	}
	keys := list
	if at := arg("attribute"); at != nil {
		if keys, err = mapped(list, at, nil); err != nil {
			return fail(err)
		}
	}
	if n == "sum" {
		var total any = int64(0)
		if s := arg("start"); s != nil {
			total = s
		}
		for _, x := range keys {
			if total, err = m.operate("+", total, x); err != nil {
				return fail(err)
			}
		}
		return total, nil
	}
	type entry struct{ key, value any }
	all := make([]entry, len(list))
	for i, x := range list {
		k := keys[i]
		if n == "dictsort" {
			which := 0
			if arg("by") == "value" {
				which = 1
			}
			k = x.(tuple)[which]
		}
		if s, ok := k.(string); ok && !truth(arg("case_sensitive")) {
			k = strings.ToLower(s)
		}
		all[i] = entry{k, x}
	}
	if n == "unique" {
		out := []any{}
		seen := newDict()
		for _, e := range all {
			if _, dup := seen.get(e.key); dup {
				continue
			}
			if err := seen.set(e.key, true); err != nil {
				return fail(err)
			}
			out = append(out, e.value)
		}
		return out, nil
	}
	slices.SortStableFunc(all, func(a, b entry) int {
		c, e := order(a.key, b.key)
		if err == nil {
			err = e
		}
		if n == "max" || truth(arg("reverse")) {
			return -c
		}
		return c
	})
	if err != nil {
		return fail(err)
	}
	if n == "min" || n == "max" {
		if len(all) == 0 {
			return undefined{}, nil
		}
		return all[0].value, nil
	}
	for i, e := range all {
		list[i] = e.value
	}
	return list, nil
}

func toInt(v, fallback any, given bool) (any, error) {
	f, i, integer, ok := number(v)
	if s, isString := v.(string); isString {
		s = strings.TrimSpace(s)
		if n, err := strconv.ParseInt(strings.ReplaceAll(s, "_", ""), 10, 64); err == nil {
			return n, nil
		}
		var err error
		f, err = strconv.ParseFloat(s, 64)
		ok = err == nil
	}
	switch {
	case integer:
		return i, nil
	case ok && math.Abs(f) < 1<<62:
		return int64(f), nil
	case given:
		return fallback, nil
	}
	return int64(0), nil
}

// indent puts white space before every line but the first and, by default, empty ones.
func indent(s string, args []any, kw map[string]any) (any, error) {
	got, given, err := params(args, kw, "width", "first", "blank")
	if err != nil {
		return nil, err
	}
	space := "    "
	if w, ok := got[0].(string); ok {
		space = w
	} else if given[0] {
		n, err := intArg(got, 0, 4)
		if err != nil || n < 0 || n > 1000 {
			return nil, fmt.Errorf("filter indent: by %s", str(got[0]))
		}
		space = strings.Repeat(" ", int(n))
	}
	if len(s)+(strings.Count(s, "\n")+1)*len(space) > maxBytes {
		return nil, errTooMuch
	}
	lines := strings.Split(s, "\n")
	for i := range lines {
		if i == 0 && truth(got[1]) || i > 0 && (lines[i] != "" || truth(got[2])) {
			lines[i] = space + lines[i]
		}
	}
	return strings.Join(lines, "\n"), nil
}

// percent is Python's format % values, for %s, %r, %d, %i, %f, %e, %g, %x and %%.
func percent(format string, v any) (any, error) {
	values, ok := v.(tuple)
	if !ok {
		values = tuple{v}
	}
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			b.WriteByte(format[i])
			continue
		}
		start := i
		for i++; i < len(format) && strings.IndexByte("0123456789.+- #", format[i]) >= 0; i++ {
		}
		if i >= len(format) || i-start > 8 {
			return nil, errors.New("an incomplete format")
		}
		verb := format[i]
		if verb == '%' {
			b.WriteByte('%')
			continue
		}
		if len(values) == 0 {
			return nil, errors.New("not enough values for the format")
		}
		x := values[0]
		values = values[1:]
		f, n, integer, isNumber := number(x)
		flags := format[start:i]
		switch {
		case verb == 's':
			fmt.Fprintf(&b, flags+"s", str(x))
		case verb == 'r':
			fmt.Fprintf(&b, flags+"s", repr(x))
		case (verb == 'd' || verb == 'i') && isNumber:
			if !integer {
				n = int64(f)
			}
			fmt.Fprintf(&b, flags+"d", n)
		case verb == 'x' && integer:
			fmt.Fprintf(&b, flags+"x", n)
		case (verb == 'f' || verb == 'e') && isNumber:
			fmt.Fprintf(&b, flags+string(verb), f)
		default:
			return nil, fmt.Errorf("the format %%%c of %s is not supported", verb, kindOf(x))
		}
		if b.Len() > maxBytes {
			return nil, errTooMuch
		}
	}
	_, isList := v.([]any)
	_, isDict := v.(*dict)
	if len(values) > 0 && !isList && !isDict {
		return nil, errors.New("not all values are formatted")
	}
	return b.String(), nil
}

// jsonWriter is Python's json.dumps, as the tojson of transformers calls it.
type jsonWriter struct {
	b      *strings.Builder
	indent int // -1 for one line
	ascii  bool
	sorted bool
}

func (j *jsonWriter) newline(depth int) {
	if j.indent >= 0 {
		j.b.WriteByte('\n')
		for range j.indent * depth {
			j.b.WriteByte(' ')
		}
	}
}

func (j *jsonWriter) write(v any, depth int) error {
	if depth > maxNested || j.b.Len() > maxBytes {
		return errTooMuch
	}
	sep := ", "
	if j.indent >= 0 {
		sep = ","
	}
	switch v := v.(type) {
	case nil:
		j.b.WriteString("null")
	case bool:
		j.b.WriteString(strconv.FormatBool(v))
	case int64:
		j.b.WriteString(strconv.FormatInt(v, 10))
	case float64:
		switch {
		case math.IsNaN(v):
			j.b.WriteString("NaN")
		case math.IsInf(v, 1):
			j.b.WriteString("Infinity")
		case math.IsInf(v, -1):
			j.b.WriteString("-Infinity")
		default:
			j.b.WriteString(floatRepr(v))
		}
	case string:
		j.text(v)
	case []any, tuple:
		items, _ := sequence(v)
		if len(items) == 0 {
			j.b.WriteString("[]")
			return nil
		}
		for i, x := range items {
			if i == 0 {
				j.b.WriteByte('[')
			} else {
				j.b.WriteString(sep)
			}
			j.newline(depth + 1)
			if err := j.write(x, depth+1); err != nil {
				return err
			}
		}
		j.newline(depth)
		j.b.WriteByte(']')
	case *dict:
		if len(v.keys) == 0 {
			j.b.WriteString("{}")
			return nil
		}
		for i, e := range j.order(v) {
			if i == 0 {
				j.b.WriteByte('{')
			} else {
				j.b.WriteString(sep)
			}
			j.newline(depth + 1)
			k, ok := e[0].(string)
			if !ok {
				var b strings.Builder
				if err := (&jsonWriter{b: &b, indent: -1}).write(e[0], depth+1); err != nil {
					return err
				}
				k = b.String()
			}
			j.text(k)
			j.b.WriteString(": ")
			if err := j.write(e[1], depth+1); err != nil {
				return err
			}
		}
		j.newline(depth)
		j.b.WriteByte('}')
	default:
		return fmt.Errorf("%s is no JSON", kindOf(v))
	}
	return nil
}

func (j *jsonWriter) order(d *dict) []tuple {
	out := make([]tuple, len(d.keys))
	for i, k := range d.keys {
		out[i] = tuple{k, d.values[i]}
	}
	if j.sorted {
		slices.SortStableFunc(out, func(a, b tuple) int { return strings.Compare(str(a[0]), str(b[0])) })
	}
	return out
}

func (j *jsonWriter) text(s string) {
	j.b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			j.b.WriteByte('\\')
			j.b.WriteRune(r)
		case r == '\n':
			j.b.WriteString(`\n`)
		case r == '\r':
			j.b.WriteString(`\r`)
		case r == '\t':
			j.b.WriteString(`\t`)
		case r == '\b':
			j.b.WriteString(`\b`)
		case r == '\f':
			j.b.WriteString(`\f`)
		case r < ' ' || j.ascii && r >= 0x7F && r < 0x10000:
			fmt.Fprintf(j.b, `\u%04x`, r)
		case j.ascii && r >= 0x10000:
			r -= 0x10000
			fmt.Fprintf(j.b, `\u%04x\u%04x`, 0xD800+r>>10, 0xDC00+r&0x3FF)
		default:
			j.b.WriteRune(r)
		}
	}
	j.b.WriteByte('"')
}
