package chat

import (
	"errors"
	"fmt"
	"math"
	"strings"
)

// Bounds of one rendering: templates come with models, from strangers.
const (
	maxSteps  = 3_000_000 // statements and expressions evaluated, items handled, and bytes handled / 16
	maxBytes  = 1 << 25   // of the text, and of any string
	maxCalls  = 100       // macros within macros
	maxRange  = 100_000   // as in Jinja's sandbox
	stepBytes = 16
)

var errTooMuch = errors.New("it does more than a chat template has to")

// scope is where names are looked up, from the inside out.
type scope struct {
	vars   map[string]any
	parent *scope
}

func (s *scope) get(n string) (any, bool) {
	for ; s != nil; s = s.parent {
		if v, ok := s.vars[n]; ok {
			return v, true
		}
	}
	return nil, false
}

func (s *scope) inner() *scope { return &scope{vars: map[string]any{}, parent: s} }

// machine renders a template once.
type machine struct {
	out   *strings.Builder
	steps int
	calls int
}

// errBreak and errContinue travel up to their loop.
var (
	errBreak    = errors.New("break")
	errContinue = errors.New("continue")
)

// refusal is an error that the template raised.
type refusal struct{ message string }

func (r *refusal) Error() string { return "it refuses the conversation: " + r.message }

func at(line int, err error) error {
	var placed *placedError
	if err == nil || errors.As(err, &placed) {
		return err
	}
	return &placedError{line, err}
}

// placedError names the line of the template where something went wrong.
type placedError struct {
	line int
	err  error
}

func (e *placedError) Error() string { return fmt.Sprintf("line %d: %v", e.line, e.err) }
func (e *placedError) Unwrap() error { return e.err }

func (m *machine) spend(n int) error {
	if m.steps += 1 + n/stepBytes; m.steps > maxSteps {
		return errTooMuch
	}
	return nil
}

// handle spends what it takes to walk through values once.
func (m *machine) handle(values ...any) error {
	n := 0
	for _, v := range values {
		switch v := v.(type) {
		case string:
			n += len(v)
		case []any:
			n += len(v) * stepBytes
		case tuple:
			n += len(v) * stepBytes
		case *dict:
			n += len(v.keys) * stepBytes
		}
	}
	return m.spend(n)
}

func (m *machine) write(s string) error {
	if m.out.Len()+len(s) > maxBytes {
		return errTooMuch
	}
	m.out.WriteString(s)
	return m.spend(len(s))
}

// capture renders statements into a string.
func (m *machine) capture(body []stmt, s *scope) (string, error) {
	saved := m.out
	m.out = &strings.Builder{}
	err := m.run(body, s)
	text := m.out.String()
	m.out = saved
	return text, err
}

func (m *machine) run(body []stmt, s *scope) error {
	for _, st := range body {
		if err := m.spend(0); err != nil {
			return err
		}
		if err := m.exec(st, s); err != nil {
			return err
		}
	}
	return nil
}

func (m *machine) exec(st stmt, s *scope) error {
	switch st := st.(type) {
	case text:
		return m.write(st.s)
	case output:
		v, err := m.eval(st.x, s)
		if err != nil {
			return err
		}
		return m.write(str(v))
	case branch:
		for i, x := range st.tests {
			v, err := m.eval(x, s)
			if err != nil {
				return err
			}
			if truth(v) {
				return m.run(st.bodies[i], s)
			}
		}
		return m.run(st.other, s)
	case loop:
		return m.loop(st, s)
	case set:
		var v any
		var err error
		if st.value != nil {
			v, err = m.eval(st.value, s)
		} else if v, err = m.capture(st.body, s.inner()); err == nil && st.filter != nil {
			v, err = m.filtered(st.filter, v, s)
		}
		if err != nil {
			return err
		}
		return at(st.line, m.assign(st.target, v, s))
	case *macro:
		s.vars[st.name] = m.function(st, s)
		return nil
	case callBlock:
		c := st.call.(call)
		f, err := m.eval(c.f, s)
		if err != nil {
			return err
		}
		args, kw, err := m.arguments(c.args, s)
		if err != nil {
			return err
		}
		if kw == nil {
			kw = map[string]any{}
		}
		kw["caller"] = m.function(st.caller, s)
		v, err := m.apply(f, args, kw)
		if err != nil {
			return at(st.line, err)
		}
		return m.write(str(v))
	case filterBlock:
		t, err := m.capture(st.body, s.inner())
		if err != nil {
			return err
		}
		v, err := m.filtered(st.filter, t, s)
		if err != nil {
			return err
		}
		return m.write(str(v))
	case with:
		inner := s.inner()
		for i, t := range st.targets {
			v, err := m.eval(st.values[i], s)
			if err == nil {
				err = at(st.line, m.assign(t, v, inner))
			}
			if err != nil {
				return err
			}
		}
		return m.run(st.body, inner)
	case group:
		return m.run(st.body, s.inner())
	case jump:
		if st.out {
			return errBreak
		}
		return errContinue
	}
	return fmt.Errorf("unknown statement %T", st)
}

func (m *machine) assign(target expr, v any, s *scope) error {
	switch t := target.(type) {
	case name:
		s.vars[t.name] = v
	case attr:
		ns, _ := s.get(t.x.(name).name)
		n, ok := ns.(*namespace)
		if !ok {
			return fmt.Errorf("cannot assign attribute on non-namespace object %s", t.x.(name).name)
		}
		n.values[t.name] = v
	case tupleOf:
		items, err := iterate(v)
		if err != nil {
			return err
		}
		if len(items) != len(t.items) {
			return fmt.Errorf("%d values for %d names", len(items), len(t.items))
		}
		for i, x := range t.items {
			if err := m.assign(x, items[i], s); err != nil {
				return err
			}
		}
	}
	return nil
}

// looper is the variable named loop.
type looper struct {
	items   []any
	i       int
	depth   int
	changed any // what changed was last asked about, nil before
}

func (l *looper) attr(n string) any {
	count := len(l.items)
	at := func(i int) any {
		if i < 0 || i >= count {
			return undefined{n}
		}
		return l.items[i]
	}
	switch n {
	case "index":
		return int64(l.i + 1)
	case "index0":
		return int64(l.i)
	case "revindex":
		return int64(count - l.i)
	case "revindex0":
		return int64(count - l.i - 1)
	case "first":
		return l.i == 0
	case "last":
		return l.i == count-1
	case "length":
		return int64(count)
	case "depth":
		return int64(l.depth + 1)
	case "depth0":
		return int64(l.depth)
	case "previtem":
		return at(l.i - 1)
	case "nextitem":
		return at(l.i + 1)
	case "cycle":
		return function(func(args []any, _ map[string]any) (any, error) {
			if len(args) == 0 {
				return nil, errors.New("cycle needs something to cycle through")
			}
			return args[l.i%len(args)], nil
		})
	case "changed":
		return function(func(args []any, _ map[string]any) (any, error) {
			now := tuple(args)
			if l.changed != nil {
				if same, _ := equal(l.changed, now); same {
					return false, nil
				}
			}
			l.changed = now
			return true, nil
		})
	}
	return undefined{n}
}

func (m *machine) loop(st loop, s *scope) error {
	v, err := m.eval(st.over, s)
	if err != nil {
		return err
	}
	items, err := iterate(v)
	if err != nil {
		return at(st.line, err)
	}
	if err := m.spend(len(items)); err != nil {
		return err
	}
	if st.filter != nil {
		var kept []any
		for _, x := range items {
			inner := s.inner()
			if err := m.assign(st.target, x, inner); err != nil {
				return at(st.line, err)
			}
			ok, err := m.eval(st.filter, inner)
			if err != nil {
				return err
			}
			if truth(ok) {
				kept = append(kept, x)
			}
		}
		items = kept
	}
	if len(items) == 0 {
		return m.run(st.other, s.inner())
	}
	l := &looper{items: items}
	for i, x := range items {
		l.i = i
		inner := s.inner() // what a round sets is gone in the next
		inner.vars["loop"] = l
		if err := m.assign(st.target, x, inner); err != nil {
			return at(st.line, err)
		}
		switch err := m.run(st.body, inner); {
		case err == errBreak:
			return nil
		case err != nil && err != errContinue:
			return err
		}
	}
	return nil
}

// function makes a macro something to call. It sees the names of where it was defined.
func (m *machine) function(st *macro, defined *scope) function {
	return func(args []any, kw map[string]any) (any, error) {
		if m.calls++; m.calls > maxCalls {
			return nil, fmt.Errorf("macros call one another more than %d deep", maxCalls)
		}
		defer func() { m.calls-- }()
		s := defined.inner()
		first := len(st.params) - len(st.defaults)
		used := 0
		for i, p := range st.params {
			v, named := kw[p]
			switch {
			case i < len(args) && named:
				return nil, fmt.Errorf("macro %s has two values for %s", st.name, p)
			case i < len(args):
				v = args[i]
			case named:
				used++
			case i >= first:
				var err error
				if v, err = m.eval(st.defaults[i-first], s); err != nil {
					return nil, err
				}
			default:
				v = undefined{p}
			}
			s.vars[p] = v
		}
		rest := newDict()
		for k, v := range kw {
			if _, isParam := s.vars[k]; isParam {
				continue
			}
			if k == "caller" {
				s.vars[k] = v
				used++
				continue
			}
			if !st.kwarg {
				return nil, fmt.Errorf("macro %s takes no argument named %s", st.name, k)
			}
			_ = rest.set(k, v) // a string
		}
		if len(args) > len(st.params) && !st.varargs {
			return nil, fmt.Errorf("macro %s takes %d arguments", st.name, len(st.params))
		}
		if st.varargs {
			s.vars["varargs"] = tuple(args[min(len(args), len(st.params)):])
		}
		if st.kwarg {
			s.vars["kwargs"] = rest
		}
		return m.capture(st.body, s)
	}
}

func (m *machine) evalAll(xs []expr, s *scope) ([]any, error) {
	out := make([]any, len(xs))
	for i, x := range xs {
		var err error
		if out[i], err = m.eval(x, s); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (m *machine) arguments(a arguments, s *scope) ([]any, map[string]any, error) {
	args, err := m.evalAll(a.list, s)
	if err != nil {
		return nil, nil, err
	}
	if a.star != nil {
		v, err := m.eval(a.star, s)
		if err != nil {
			return nil, nil, err
		}
		more, err := iterate(v)
		if err != nil {
			return nil, nil, err
		}
		args = append(args, more...)
	}
	var kw map[string]any
	for i, n := range a.names {
		v, err := m.eval(a.keywords[i], s)
		if err != nil {
			return nil, nil, err
		}
		if kw == nil {
			kw = map[string]any{}
		}
		kw[n] = v
	}
	return args, kw, nil
}

func (m *machine) apply(f any, args []any, kw map[string]any) (any, error) {
	call, ok := f.(function)
	if !ok {
		return nil, fmt.Errorf("%s can't be called", kindOf(f))
	}
	v, err := call(args, kw)
	if s, ok := v.(string); ok && err == nil {
		err = m.spend(len(s))
	}
	return v, err
}

func (m *machine) eval(x expr, s *scope) (any, error) {
	if err := m.spend(0); err != nil {
		return nil, err
	}
	switch x := x.(type) {
	case literal:
		return x.value, nil
	case name:
		if v, ok := s.get(x.name); ok {
			return v, nil
		}
		return undefined(x), nil
	case listOf:
		return m.evalAll(x.items, s)
	case tupleOf:
		items, err := m.evalAll(x.items, s)
		return tuple(items), err
	case dictOf:
		d := newDict()
		for i := range x.keys {
			k, err := m.eval(x.keys[i], s)
			if err != nil {
				return nil, err
			}
			v, err := m.eval(x.values[i], s)
			if err != nil {
				return nil, err
			}
			if err := d.set(k, v); err != nil {
				return nil, err
			}
		}
		return d, nil
	case unary:
		v, err := m.eval(x.x, s)
		if err != nil {
			return nil, err
		}
		if x.op == "not" {
			return !truth(v), nil
		}
		f, i, integer, ok := number(v)
		switch {
		case !ok:
			return nil, fmt.Errorf("%s has no sign", kindOf(v))
		case integer && x.op == "-" && i == math.MinInt64:
			return nil, errTooLarge
		case integer && x.op == "-":
			return -i, nil
		case integer:
			return i, nil
		case x.op == "-":
			return -f, nil
		}
		return f, nil
	case binary:
		return m.binary(x, s)
	case compare:
		left, err := m.eval(x.x, s)
		if err != nil {
			return nil, err
		}
		for i, op := range x.ops {
			right, err := m.eval(x.ys[i], s)
			if err != nil {
				return nil, err
			}
			ok, err := m.compared(op, left, right)
			if err != nil {
				return nil, at(x.line, err)
			}
			if !ok {
				return false, nil
			}
			left = right
		}
		return true, nil
	case choice:
		v, err := m.eval(x.test, s)
		if err != nil {
			return nil, err
		}
		switch {
		case truth(v):
			return m.eval(x.then, s)
		case x.otherwise == nil:
			return undefined{}, nil
		}
		return m.eval(x.otherwise, s)
	case attr:
		v, err := m.eval(x.x, s)
		if err != nil {
			return nil, err
		}
		if u, ok := v.(undefined); ok {
			return nil, at(x.line, fmt.Errorf("%s has no attribute %s", kindOf(u), x.name))
		}
		if _, ok := v.(string); ok {
			err = m.handle(v) // a method will walk through it
		}
		return attribute(v, x.name, true), err
	case index:
		v, err := m.eval(x.x, s)
		if err != nil {
			return nil, err
		}
		i, err := m.eval(x.i, s)
		if err != nil {
			return nil, err
		}
		if u, ok := v.(undefined); ok {
			return nil, at(x.line, fmt.Errorf("%s has no items", kindOf(u)))
		}
		if n, ok := i.(string); ok {
			return attribute(v, n, false), nil
		}
		if _, ok := v.(string); ok {
			err = m.handle(v)
		}
		return item(v, i), err
	case slice:
		vs, err := m.evalAll([]expr{x.x, orNone(x.start), orNone(x.stop), orNone(x.step)}, s)
		if err != nil {
			return nil, err
		}
		v, err := m.slice(vs[0], vs[1], vs[2], vs[3])
		return v, at(x.line, err)
	case call:
		f, err := m.eval(x.f, s)
		if err != nil {
			return nil, err
		}
		args, kw, err := m.arguments(x.args, s)
		if err != nil {
			return nil, err
		}
		v, err := m.apply(f, args, kw)
		return v, at(x.line, err)
	case filter:
		return m.filtered(x, nil, s)
	case test:
		v, err := m.eval(x.x, s)
		if err != nil {
			return nil, err
		}
		args, _, err := m.arguments(x.args, s)
		if err != nil {
			return nil, err
		}
		ok, err := m.tested(x.name, v, args)
		return ok != x.not, at(x.line, err)
	}
	return nil, fmt.Errorf("unknown expression %T", x)
}

func orNone(x expr) expr {
	if x == nil {
		return literal{}
	}
	return x
}

// filtered applies a row of filters; the innermost is given v where it has no operand of its own.
func (m *machine) filtered(x expr, v any, s *scope) (any, error) {
	f, ok := x.(filter)
	if !ok {
		return m.eval(x, s)
	}
	var err error
	if f.x != nil {
		if v, err = m.filtered(f.x, v, s); err != nil {
			return nil, err
		}
	}
	args, kw, err := m.arguments(f.args, s)
	if err != nil {
		return nil, err
	}
	if err := m.handle(v); err != nil {
		return nil, err
	}
	out, err := m.filter(f.name, v, args, kw)
	if text, ok := out.(string); ok && err == nil {
		err = m.spend(len(text))
	}
	return out, at(f.line, err)
}

func (m *machine) slice(v, start, stop, step any) (any, error) {
	n, err := length(v)
	if err != nil {
		return nil, err
	}
	if err := m.handle(v); err != nil {
		return nil, err
	}
	from, to, by, err := bounds(n, start, stop, step)
	if err != nil {
		return nil, err
	}
	switch v := v.(type) {
	case string:
		return string(sliced([]rune(v), from, to, by)), nil
	case []any:
		return sliced(v, from, to, by), nil
	case tuple:
		return tuple(sliced(v, from, to, by)), nil
	}
	return nil, fmt.Errorf("%s can't be sliced", kindOf(v))
}

func (m *machine) compared(op string, a, b any) (bool, error) {
	switch op {
	case "==", "!=":
		same, parts := equal(a, b)
		if err := m.spend(parts * stepBytes); err != nil {
			return false, err
		}
		return same == (op == "=="), m.handle(a)
	case "in", "not in":
		ok, err := m.contains(b, a)
		return ok == (op == "in"), err
	}
	if err := m.handle(a, b); err != nil {
		return false, err
	}
	n, err := order(a, b)
	switch op {
	case "<":
		return n < 0, err
	case "<=":
		return n <= 0, err
	case ">":
		return n > 0, err
	}
	return n >= 0, err
}

// contains is Python's x in v.
func (m *machine) contains(v, x any) (bool, error) {
	switch v := v.(type) {
	case string:
		s, ok := x.(string)
		if !ok {
			return false, fmt.Errorf("%s can't be in a string", kindOf(x))
		}
		return strings.Contains(v, s), m.handle(v)
	case *dict:
		_, ok := v.get(x)
		return ok, nil
	}
	items, err := iterate(v)
	for _, y := range items {
		same, parts := equal(x, y)
		if err := m.spend(parts * stepBytes); err != nil {
			return false, err
		}
		if same {
			return true, nil
		}
	}
	return false, err
}

var errTooLarge = errors.New("a number is too large")

func (m *machine) binary(x binary, s *scope) (any, error) {
	a, err := m.eval(x.x, s)
	if err != nil {
		return nil, err
	}
	if x.op == "and" && !truth(a) || x.op == "or" && truth(a) {
		return a, nil
	}
	b, err := m.eval(x.y, s)
	if err != nil || x.op == "and" || x.op == "or" {
		return b, err
	}
	v, err := m.operate(x.op, a, b)
	return v, at(x.line, err)
}

func (m *machine) operate(op string, a, b any) (any, error) {
	if op == "~" {
		return m.concat(str(a), str(b))
	}
	f, i, int1, ok1 := number(a)
	g, j, int2, ok2 := number(b)
	if ok1 && ok2 {
		if int1 && int2 && op != "/" && !(op == "**" && j < 0) {
			return integers(op, i, j)
		}
		return floats(op, f, g)
	}
	switch x := a.(type) {
	case string:
		switch y, isString := b.(string); {
		case op == "+" && isString:
			return m.concat(x, y)
		case op == "*" && int2:
			return m.repeat(x, j)
		case op == "%":
			return percent(x, b)
		}
	case []any:
		if y, ok := b.([]any); ok && op == "+" {
			return append(append(make([]any, 0, len(x)+len(y)), x...), y...), m.spend((len(x) + len(y)) * stepBytes)
		}
	case tuple:
		if y, ok := b.(tuple); ok && op == "+" {
			return append(append(make(tuple, 0, len(x)+len(y)), x...), y...), m.spend((len(x) + len(y)) * stepBytes)
		}
	}
	if y, ok := b.(string); ok && op == "*" && ok1 && int1 {
		return m.repeat(y, i)
	}
	return nil, fmt.Errorf("%s and %s can't be combined with %s", kindOf(a), kindOf(b), op)
}

func (m *machine) concat(a, b string) (any, error) {
	if len(a)+len(b) > maxBytes {
		return nil, errTooMuch
	}
	return a + b, m.spend(len(a) + len(b))
}

func (m *machine) repeat(s string, n int64) (any, error) {
	if n <= 0 || s == "" {
		return "", nil
	}
	if n > maxBytes/int64(len(s)) {
		return nil, errTooMuch
	}
	return strings.Repeat(s, int(n)), m.spend(len(s) * int(n))
}

func integers(op string, i, j int64) (any, error) {
	switch op {
	case "+":
		if n := i + j; (n > i) == (j > 0) {
			return n, nil
		}
	case "-":
		if n := i - j; (n < i) == (j > 0) {
			return n, nil
		}
	case "*":
		if i == 0 || j == 0 {
			return int64(0), nil
		}
		if n := i * j; n/j == i && !(i == -1 && j == math.MinInt64) && !(j == -1 && i == math.MinInt64) {
			return n, nil
		}
	case "//", "%":
		switch {
		case j == 0:
			return nil, errors.New("division by zero")
		case j == -1 && op == "%":
			return int64(0), nil
		case i == math.MinInt64 && j == -1:
			return nil, errTooLarge
		}
		q, r := i/j, i%j
		if r != 0 && (r < 0) != (j < 0) {
			q, r = q-1, r+j
		}
		if op == "%" {
			return r, nil
		}
		return q, nil
	case "**":
		n := int64(1)
		for ; j > 0; j-- {
			v, err := integers("*", n, i)
			if err != nil {
				return nil, err
			}
			if n = v.(int64); n == 0 || n == 1 && i == 1 {
				break
			}
			if i == -1 {
				return 1 - 2*(j%2), nil // j is counted down from the exponent, once here
			}
		}
		return n, nil
	}
	return nil, errTooLarge
}

func floats(op string, f, g float64) (any, error) {
	switch op {
	case "+":
		return f + g, nil
	case "-":
		return f - g, nil
	case "*":
		return f * g, nil
	case "**":
		return math.Pow(f, g), nil
	}
	if g == 0 {
		return nil, errors.New("division by zero")
	}
	switch op {
	case "//":
		return math.Floor(f / g), nil
	case "%":
		r := math.Mod(f, g)
		if r != 0 && (r < 0) != (g < 0) {
			r += g
		}
		return r, nil
	}
	return f / g, nil
}
