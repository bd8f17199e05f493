package chat

import (
	"fmt"
	"slices"
	"strconv"
)

// Expressions.
type (
	expr any

	literal struct{ value any }
	name    struct{ name string }
	listOf  struct{ items []expr }
	tupleOf struct{ items []expr }
	dictOf  struct{ keys, values []expr }
	unary   struct {
		op string // - + not
		x  expr
	}
	binary struct {
		op   string // and or + - * / // % ** ~
		x, y expr
		line int
	}
	compare struct {
		x    expr
		ops  []string // == != < <= > >= in "not in"
		ys   []expr
		line int
	}
	choice struct{ test, then, otherwise expr } // otherwise may be nil
	attr   struct {
		x    expr
		name string
		line int
	}
	index struct {
		x, i expr
		line int
	}
	slice struct {
		x                 expr
		start, stop, step expr // nil where left out
		line              int
	}
	call struct {
		f    expr
		args arguments
		line int
	}
	filter struct {
		x    expr // nil in filter blocks
		name string
		args arguments
		line int
	}
	test struct {
		x    expr
		name string
		args arguments
		not  bool
		line int
	}
	arguments struct {
		list     []expr
		names    []string // of keywords
		keywords []expr
		star     expr // *x, or nil
	}
)

// Statements.
type (
	stmt any

	text   struct{ s string }
	output struct{ x expr }
	branch struct {
		tests  []expr
		bodies [][]stmt
		other  []stmt
	}
	loop struct {
		target expr
		over   expr
		filter expr // nil without
		body   []stmt
		other  []stmt
		line   int
	}
	set struct {
		target expr
		value  expr   // nil with a body
		body   []stmt // {% set x %}...{% endset %}
		filter expr
		line   int
	}
	macro struct {
		name           string
		params         []string
		defaults       []expr // of the last parameters
		body           []stmt
		varargs, kwarg bool // the body asks for what was passed beyond the parameters
		line           int
	}
	callBlock struct {
		call   expr
		caller *macro
		line   int
	}
	filterBlock struct {
		filter expr
		body   []stmt
	}
	with struct {
		targets, values []expr
		body            []stmt
		line            int
	}
	group struct{ body []stmt } // {% generation %}
	jump  struct{ out bool }    // break, or continue
)

// maxDepth bounds how deeply expressions and blocks may nest.
const maxDepth = 100

type parser struct {
	tokens []token
	pos    int
	depth  int
	loops  int
	macros []*macro // being parsed
}

func (p *parser) peek() token { return p.tokens[p.pos] }
func (p *parser) next() token {
	t := p.tokens[p.pos]
	if t.kind != tokEOF {
		p.pos++
	}
	return t
}

func (p *parser) fail(format string, args ...any) error {
	return fmt.Errorf("%w: line %d: %s", ErrTemplate, p.peek().line, fmt.Sprintf(format, args...))
}

func (p *parser) isOp(op string) bool   { t := p.peek(); return t.kind == tokOp && t.text == op }
func (p *parser) isName(n string) bool  { t := p.peek(); return t.kind == tokName && t.text == n }
func (p *parser) skipOp(op string) bool { return p.isOp(op) && p.advance() }
func (p *parser) skipName(n string) bool {
	return p.isName(n) && p.advance()
}
func (p *parser) advance() bool { p.next(); return true }

func (p *parser) wantOp(op string) error {
	if !p.skipOp(op) {
		return p.fail("found %v, want %q", p.peek(), op)
	}
	return nil
}

func (p *parser) wantName() (string, error) {
	if p.peek().kind != tokName {
		return "", p.fail("found %v, want a name", p.peek())
	}
	return p.next().text, nil
}

func (p *parser) wantEnd() error {
	if p.peek().kind != tokTagEnd {
		return p.fail("found %v, want %%}", p.peek())
	}
	p.next()
	return nil
}

func (p *parser) deeper() error {
	if p.depth++; p.depth > maxDepth {
		return p.fail("nested more than %d deep", maxDepth)
	}
	return nil
}

// block reads statements up to a tag with one of the names, and gives that; the tag is read up to its name.
func (p *parser) block(ends ...string) (body []stmt, end string, err error) {
	if err := p.deeper(); err != nil {
		return nil, "", err
	}
	defer func() { p.depth-- }()
	for {
		switch t := p.next(); t.kind {
		case tokText:
			body = append(body, text{t.text})
		case tokVarBegin:
			x, err := p.tuple(true)
			if err != nil {
				return nil, "", err
			}
			if p.peek().kind != tokVarEnd {
				return nil, "", p.fail("found %v, want }}", p.peek())
			}
			p.next()
			body = append(body, output{x})
		case tokTagBegin:
			n, err := p.wantName()
			if err != nil {
				return nil, "", err
			}
			if slices.Contains(ends, n) {
				return body, n, nil
			}
			s, err := p.statement(n, t.line)
			if err != nil {
				return nil, "", err
			}
			body = append(body, s)
		case tokEOF:
			if len(ends) > 0 {
				return nil, "", p.fail("the template ends, want %s", ends[0])
			}
			return body, "", nil
		}
	}
}

// to reads the body of a tag, from the tag's end to that of the closing one.
func (p *parser) to(end string) ([]stmt, error) {
	if err := p.wantEnd(); err != nil {
		return nil, err
	}
	body, _, err := p.block(end)
	if err != nil {
		return nil, err
	}
	return body, p.wantEnd()
}

func (p *parser) statement(n string, line int) (s stmt, err error) {
	switch n {
	case "if":
		return p.ifs()
	case "for":
		return p.forLoop(line)
	case "set":
		return p.setTo(line)
	case "macro":
		return p.macro(line)
	case "generation":
		body, err := p.to("endgeneration")
		return group{body}, err
	case "break", "continue":
		if p.loops == 0 {
			return nil, p.fail("%s outside a loop", n)
		}
		return jump{n == "break"}, p.wantEnd()
	case "with":
		w := with{line: line}
		for p.peek().kind != tokTagEnd {
			if len(w.targets) > 0 {
				if err := p.wantOp(","); err != nil {
					return nil, err
				}
			}
			t, err := p.target()
			if err == nil {
				err = p.wantOp("=")
			}
			if err != nil {
				return nil, err
			}
			v, err := p.expression()
			if err != nil {
				return nil, err
			}
			w.targets, w.values = append(w.targets, t), append(w.values, v)
		}
		w.body, err = p.to("endwith")
		return w, err
	case "filter":
		f, err := p.filters(nil, true)
		if err != nil {
			return nil, err
		}
		body, err := p.to("endfilter")
		return filterBlock{f, body}, err
	case "call":
		m := &macro{name: "caller", line: line}
		if p.isOp("(") {
			if err := p.signature(m); err != nil {
				return nil, err
			}
		}
		x, err := p.expression()
		if err != nil {
			return nil, err
		}
		if _, ok := x.(call); !ok {
			return nil, p.fail("call wants a call")
		}
		m.body, err = p.macroBody(m, "endcall")
		return callBlock{x, m, line}, err
	}
	return nil, p.fail("the tag %q is not supported", n)
}

func (p *parser) ifs() (stmt, error) {
	var b branch
	for {
		x, err := p.tuple(true)
		if err == nil {
			err = p.wantEnd()
		}
		if err != nil {
			return nil, err
		}
		body, end, err := p.block("endif", "elif", "else")
		if err != nil {
			return nil, err
		}
		b.tests, b.bodies = append(b.tests, x), append(b.bodies, body)
		switch end {
		case "else":
			b.other, err = p.to("endif")
			return b, err
		case "endif":
			return b, p.wantEnd()
		}
	}
}

func (p *parser) forLoop(line int) (stmt, error) {
	l := loop{line: line}
	var err error
	if l.target, err = p.target(); err != nil {
		return nil, err
	}
	if !p.skipName("in") {
		return nil, p.fail("found %v, want in", p.peek())
	}
	if l.over, err = p.tuple(false); err != nil {
		return nil, err
	}
	if p.skipName("if") {
		if l.filter, err = p.expression(); err != nil {
			return nil, err
		}
	}
	if p.isName("recursive") {
		return nil, p.fail("recursive loops are not supported")
	}
	if err := p.wantEnd(); err != nil {
		return nil, err
	}
	p.loops++
	body, end, err := p.block("endfor", "else")
	p.loops--
	if err != nil {
		return nil, err
	}
	l.body = body
	if end == "else" {
		l.other, err = p.to("endfor")
		return l, err
	}
	return l, p.wantEnd()
}

// target reads what is assigned to: a name, names with commas between, or an attribute of a namespace.
func (p *parser) target() (expr, error) {
	var items []expr
	many := false
	paren := p.skipOp("(")
	for {
		n, err := p.wantName()
		if err != nil {
			return nil, err
		}
		if n == "true" || n == "false" || n == "none" || n == "True" || n == "False" || n == "None" {
			return nil, p.fail("%s can't be assigned to", n)
		}
		if len(items) == 0 && !paren && p.skipOp(".") {
			a, err := p.wantName()
			return attr{name{n}, a, p.peek().line}, err
		}
		items = append(items, name{n})
		if !p.skipOp(",") {
			break
		}
		many = true
		if p.isName("in") || p.isOp(")") || p.isOp("=") {
			break
		}
	}
	if paren {
		if err := p.wantOp(")"); err != nil {
			return nil, err
		}
	}
	if many {
		return tupleOf{items}, nil
	}
	return items[0], nil
}

func (p *parser) setTo(line int) (stmt, error) {
	s := set{line: line}
	var err error
	if s.target, err = p.target(); err != nil {
		return nil, err
	}
	if p.skipOp("=") {
		if s.value, err = p.tuple(true); err != nil {
			return nil, err
		}
		return s, p.wantEnd()
	}
	if s.filter, err = p.filters(nil, false); err != nil {
		return nil, err
	}
	s.body, err = p.to("endset")
	return s, err
}

func (p *parser) macro(line int) (stmt, error) {
	n, err := p.wantName()
	if err != nil {
		return nil, err
	}
	m := &macro{name: n, line: line}
	if err := p.signature(m); err != nil {
		return nil, err
	}
	m.body, err = p.macroBody(m, "endmacro")
	return m, err
}

func (p *parser) macroBody(m *macro, end string) ([]stmt, error) {
	loops := p.loops
	p.loops = 0
	p.macros = append(p.macros, m)
	body, err := p.to(end)
	p.macros = p.macros[:len(p.macros)-1]
	p.loops = loops
	return body, err
}

func (p *parser) signature(m *macro) error {
	if err := p.wantOp("("); err != nil {
		return err
	}
	for !p.skipOp(")") {
		if len(m.params) > 0 {
			if err := p.wantOp(","); err != nil {
				return err
			}
		}
		n, err := p.wantName()
		if err != nil {
			return err
		}
		m.params = append(m.params, n)
		if p.skipOp("=") {
			x, err := p.expression()
			if err != nil {
				return err
			}
			m.defaults = append(m.defaults, x)
		} else if len(m.defaults) > 0 {
			return p.fail("a parameter without a default follows one with")
		}
	}
	return nil
}

// tuple reads expressions with commas between; one without a comma is itself.
func (p *parser) tuple(conditional bool) (expr, error) {
	one := p.expression
	if !conditional {
		one = p.or
	}
	x, err := one()
	if err != nil || !p.isOp(",") {
		return x, err
	}
	items := []expr{x}
	for p.skipOp(",") {
		if t := p.peek(); t.kind == tokTagEnd || t.kind == tokVarEnd || t.kind == tokOp && (t.text == ")" || t.text == "=") {
			break
		}
		x, err := one()
		if err != nil {
			return nil, err
		}
		items = append(items, x)
	}
	return tupleOf{items}, nil
}

func (p *parser) expression() (expr, error) {
	if err := p.deeper(); err != nil {
		return nil, err
	}
	defer func() { p.depth-- }()
	x, err := p.or()
	if err != nil {
		return nil, err
	}
	for n := 0; p.skipName("if"); n++ {
		if n > maxDepth {
			return nil, p.fail("nested more than %d deep", maxDepth)
		}
		c := choice{then: x}
		if c.test, err = p.or(); err != nil {
			return nil, err
		}
		if p.skipName("else") {
			if c.otherwise, err = p.expression(); err != nil {
				return nil, err
			}
		}
		x = c
	}
	return x, nil
}

// chain reads operands with operators between, from the left.
func (p *parser) chain(operand func() (expr, error), op func() string) (expr, error) {
	x, err := operand()
	for n := 0; err == nil; n++ {
		line := p.peek().line
		o := op()
		if o == "" {
			return x, nil
		}
		// The tree leans to the left, and is walked by recursion.
		if n > 1000 {
			return nil, p.fail("more than 1000 operators in a row")
		}
		var y expr
		if y, err = operand(); err == nil {
			x = binary{o, x, y, line}
		}
	}
	return nil, err
}

// oneOf reads one of some operators, "" when there is none.
func (p *parser) oneOf(ops ...string) func() string {
	return func() string {
		for _, o := range ops {
			if p.skipOp(o) || (o == "and" || o == "or") && p.skipName(o) {
				return o
			}
		}
		return ""
	}
}

func (p *parser) or() (expr, error)  { return p.chain(p.and, p.oneOf("or")) }
func (p *parser) and() (expr, error) { return p.chain(p.not, p.oneOf("and")) }

func (p *parser) not() (expr, error) {
	if !p.skipName("not") {
		return p.compare()
	}
	if err := p.deeper(); err != nil {
		return nil, err
	}
	defer func() { p.depth-- }()
	x, err := p.not()
	return unary{"not", x}, err
}

func (p *parser) compare() (expr, error) {
	x, err := p.sum()
	if err != nil {
		return nil, err
	}
	c := compare{x: x, line: p.peek().line}
	for {
		op := p.oneOf("==", "!=", "<=", ">=", "<", ">")()
		switch {
		case op != "":
		case p.skipName("in"):
			op = "in"
		case p.isName("not") && p.tokens[p.pos+1].kind == tokName && p.tokens[p.pos+1].text == "in":
			p.pos += 2
			op = "not in"
		case len(c.ops) == 0:
			return x, nil
		default:
			return c, nil
		}
		y, err := p.sum()
		if err != nil {
			return nil, err
		}
		c.ops, c.ys = append(c.ops, op), append(c.ys, y)
	}
}

func (p *parser) sum() (expr, error)     { return p.chain(p.joined, p.oneOf("+", "-")) }
func (p *parser) joined() (expr, error)  { return p.chain(p.product, p.oneOf("~")) }
func (p *parser) product() (expr, error) { return p.chain(p.power, p.oneOf("*", "//", "/", "%")) }
func (p *parser) power() (expr, error) {
	return p.chain(func() (expr, error) { return p.unary(true) }, p.oneOf("**"))
}

func (p *parser) unary(filters bool) (expr, error) {
	if err := p.deeper(); err != nil {
		return nil, err
	}
	defer func() { p.depth-- }()
	var x expr
	var err error
	if op := p.oneOf("-", "+")(); op != "" {
		if x, err = p.unary(false); err != nil {
			return nil, err
		}
		x = unary{op, x}
	} else if x, err = p.primary(); err != nil {
		return nil, err
	}
	if x, err = p.postfix(x); err != nil || !filters {
		return x, err
	}
	return p.filtersAndTests(x)
}

func (p *parser) primary() (expr, error) {
	t := p.next()
	switch t.kind {
	case tokName:
		switch t.text {
		case "true", "True":
			return literal{true}, nil
		case "false", "False":
			return literal{false}, nil
		case "none", "None":
			return literal{nil}, nil
		}
		for _, m := range p.macros {
			m.varargs = m.varargs || t.text == "varargs"
			m.kwarg = m.kwarg || t.text == "kwargs"
		}
		return name{t.text}, nil
	case tokString:
		s := t.text
		for p.peek().kind == tokString {
			s += p.next().text
		}
		return literal{s}, nil
	case tokInt:
		n, err := strconv.ParseInt(t.text, 10, 64)
		if err != nil {
			return nil, p.fail("the number %s is too large", t.text)
		}
		return literal{n}, nil
	case tokFloat:
		f, err := strconv.ParseFloat(t.text, 64)
		if err != nil {
			return nil, p.fail("the number %s is too large", t.text)
		}
		return literal{f}, nil
	case tokOp:
		switch t.text {
		case "(":
			if p.skipOp(")") {
				return tupleOf{}, nil
			}
			x, err := p.tuple(true)
			if err != nil {
				return nil, err
			}
			return x, p.wantOp(")")
		case "[":
			items, err := p.items("]")
			return listOf{items}, err
		case "{":
			return p.dict()
		}
	}
	p.pos = max(p.pos-1, 0)
	return nil, p.fail("unexpected %v", t)
}

func (p *parser) items(end string) (items []expr, err error) {
	for !p.skipOp(end) {
		if len(items) > 0 {
			if err := p.wantOp(","); err != nil {
				return nil, err
			}
			if p.skipOp(end) {
				break
			}
		}
		x, err := p.expression()
		if err != nil {
			return nil, err
		}
		items = append(items, x)
	}
	return items, nil
}

func (p *parser) dict() (expr, error) {
	var d dictOf
	for !p.skipOp("}") {
		if len(d.keys) > 0 {
			if err := p.wantOp(","); err != nil {
				return nil, err
			}
			if p.skipOp("}") {
				break
			}
		}
		k, err := p.expression()
		if err == nil {
			err = p.wantOp(":")
		}
		if err != nil {
			return nil, err
		}
		v, err := p.expression()
		if err != nil {
			return nil, err
		}
		d.keys, d.values = append(d.keys, k), append(d.values, v)
	}
	return d, nil
}

// maxChain bounds what may follow one operand: attributes, subscripts, calls, filters.
const maxChain = 200

func (p *parser) postfix(x expr) (expr, error) {
	for n := 0; ; n++ {
		if n > maxChain {
			return nil, p.fail("more than %d attributes and calls in a row", maxChain)
		}
		line := p.peek().line
		switch {
		case p.skipOp("."):
			switch t := p.next(); t.kind {
			case tokName:
				x = attr{x, t.text, line}
			case tokInt:
				i, err := strconv.ParseInt(t.text, 10, 64)
				if err != nil {
					return nil, p.fail("the number %s is too large", t.text)
				}
				x = index{x, literal{i}, line}
			default:
				return nil, p.fail("found %v behind a dot", t)
			}
		case p.skipOp("["):
			var err error
			if x, err = p.subscript(x, line); err != nil {
				return nil, err
			}
		case p.isOp("("):
			args, err := p.arguments()
			if err != nil {
				return nil, err
			}
			x = call{x, args, line}
		default:
			return x, nil
		}
	}
}

func (p *parser) subscript(x expr, line int) (expr, error) {
	var parts [3]expr
	n := 0
	for !p.isOp("]") {
		if p.skipOp(":") {
			if n++; n > 2 {
				return nil, p.fail("a slice has more than three parts")
			}
			continue
		}
		if parts[n] != nil {
			return nil, p.fail("found %v, want ]", p.peek())
		}
		var err error
		if parts[n], err = p.expression(); err != nil {
			return nil, err
		}
	}
	p.next()
	switch {
	case n > 0:
		return slice{x, parts[0], parts[1], parts[2], line}, nil
	case parts[0] == nil:
		return nil, p.fail("a subscript is empty")
	}
	return index{x, parts[0], line}, nil
}

func (p *parser) arguments() (a arguments, err error) {
	if err := p.wantOp("("); err != nil {
		return a, err
	}
	for first := true; !p.skipOp(")"); first = false {
		if !first {
			if err := p.wantOp(","); err != nil {
				return a, err
			}
			if p.skipOp(")") {
				break
			}
		}
		switch {
		case p.isOp("**"):
			return a, p.fail("** in calls is not supported")
		case p.skipOp("*"):
			if a.star, err = p.expression(); err != nil {
				return a, err
			}
		case p.peek().kind == tokName && p.tokens[p.pos+1].kind == tokOp && p.tokens[p.pos+1].text == "=":
			n := p.next().text
			p.next()
			x, err := p.expression()
			if err != nil {
				return a, err
			}
			a.names, a.keywords = append(a.names, n), append(a.keywords, x)
		default:
			if len(a.names) > 0 {
				return a, p.fail("an argument without a name follows one with")
			}
			x, err := p.expression()
			if err != nil {
				return a, err
			}
			a.list = append(a.list, x)
		}
	}
	return a, nil
}

func (p *parser) filtersAndTests(x expr) (expr, error) {
	for n := 0; ; n++ {
		if n > maxChain {
			return nil, p.fail("more than %d filters and tests in a row", maxChain)
		}
		var err error
		switch {
		case p.isOp("|"):
			x, err = p.filters(x, false)
		case p.isName("is"):
			x, err = p.test(x)
		case p.isOp("("):
			line := p.peek().line
			var a arguments
			a, err = p.arguments()
			x = call{x, a, line}
		default:
			return x, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// filters reads a row of filters; inline, the first has no | before it.
func (p *parser) filters(x expr, inline bool) (expr, error) {
	for n := 0; inline || p.skipOp("|"); n++ {
		if n > maxChain {
			return nil, p.fail("more than %d filters in a row", maxChain)
		}
		inline = false
		f := filter{x: x, line: p.peek().line}
		var err error
		if f.name, err = p.wantName(); err != nil {
			return nil, err
		}
		if p.isOp("(") {
			if f.args, err = p.arguments(); err != nil {
				return nil, err
			}
		}
		x = f
	}
	return x, nil
}

func (p *parser) test(x expr) (expr, error) {
	t := test{x: x, line: p.next().line}
	t.not = p.skipName("not")
	var err error
	if t.name, err = p.wantName(); err != nil {
		return nil, err
	}
	switch k := p.peek(); {
	case p.isOp("("):
		t.args, err = p.arguments()
	case k.kind == tokName && !slices.Contains([]string{"else", "or", "and", "if", "in", "not", "is", "recursive"}, k.text),
		k.kind == tokString, k.kind == tokInt, k.kind == tokFloat, p.isOp("["), p.isOp("{"):
		var y expr
		if y, err = p.primary(); err == nil {
			y, err = p.postfix(y)
		}
		t.args.list = []expr{y}
	case p.isName("is"):
		return nil, p.fail("tests can't be chained with is")
	}
	return t, err
}
