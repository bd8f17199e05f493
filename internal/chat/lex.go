package chat

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// kind is what a token of a template is.
type kind uint8

const (
	tokEOF kind = iota
	tokText
	tokVarBegin
	tokVarEnd
	tokTagBegin
	tokTagEnd
	tokName
	tokString
	tokInt
	tokFloat
	tokOp
)

type token struct {
	kind kind
	text string // for strings the value
	line int
}

func (t token) String() string {
	switch t.kind {
	case tokEOF:
		return "the end of the template"
	case tokText:
		return "text"
	case tokVarEnd:
		return "}}"
	case tokTagEnd:
		return "%}"
	}
	return strconv.Quote(t.text)
}

// lexer cuts a template into tokens, with Jinja's trim_blocks and lstrip_blocks on, as transformers has them.
type lexer struct {
	src       string
	pos       int
	line      int
	lineStart bool // what was read last ended a line
	out       []token
}

func (l *lexer) fail(format string, args ...any) error {
	return fmt.Errorf("%w: line %d: %s", ErrTemplate, l.line, fmt.Sprintf(format, args...))
}

func (l *lexer) add(k kind, text string) { l.out = append(l.out, token{k, text, l.line}) }

// skip moves over n bytes.
func (l *lexer) skip(n int) string {
	s := l.src[l.pos : l.pos+n]
	l.line += strings.Count(s, "\n")
	l.pos += n
	return s
}

func lex(src string) ([]token, error) {
	src = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(src)
	l := &lexer{src: strings.TrimSuffix(src, "\n"), line: 1, lineStart: true}
	for l.pos < len(l.src) {
		if err := l.next(); err != nil {
			return nil, err
		}
	}
	l.add(tokEOF, "")
	return l.out, nil
}

// begin finds the next place where "{{", "{%" or "{#" stands.
func begin(s string) int {
	for i := 0; i+1 < len(s); i++ {
		if s[i] == '{' && (s[i+1] == '{' || s[i+1] == '%' || s[i+1] == '#') {
			return i
		}
	}
	return -1
}

// next reads the text up to the next tag, and the tag.
func (l *lexer) next() error {
	n := begin(l.src[l.pos:])
	if n < 0 {
		l.add(tokText, l.src[l.pos:])
		l.pos = len(l.src)
		return nil
	}
	line := l.line
	text := l.skip(n)
	open := l.skip(2)
	sign := l.sign()
	if text = l.trimmed(text, sign, open != "{{"); text != "" {
		l.out = append(l.out, token{tokText, text, line})
	}
	switch open {
	case "{#":
		end := strings.Index(l.src[l.pos:], "#}")
		if end < 0 {
			return l.fail("a comment has no end")
		}
		body := l.skip(end)
		l.skip(2)
		l.afterTag(strings.HasSuffix(body, "-"), !strings.HasSuffix(body, "+"))
		return nil
	case "{%":
		if rest, minus, ok := tagNamed(l.src[l.pos:], "raw"); ok {
			l.skip(rest)
			l.afterTag(minus, false)
			return l.raw()
		}
		l.add(tokTagBegin, open)
		return l.inside("%}", tokTagEnd)
	}
	l.add(tokVarBegin, open)
	return l.inside("}}", tokVarEnd)
}

// sign reads the - or + behind the opening of a tag.
func (l *lexer) sign() byte {
	if l.pos < len(l.src) && (l.src[l.pos] == '-' || l.src[l.pos] == '+') {
		return l.skip(1)[0]
	}
	return 0
}

// trimmed takes off what white-space control takes from the text before a tag: all with -, and without + what stands
// before a tag of its own line, unless it is an expression.
func (l *lexer) trimmed(text string, sign byte, tag bool) string {
	switch {
	case sign == '-':
		return strings.TrimRightFunc(text, unicode.IsSpace)
	case sign == 0 && tag:
		if i := strings.LastIndexByte(text, '\n') + 1; (i > 0 || l.lineStart) && strings.TrimSpace(text[i:]) == "" {
			return text[:i]
		}
	}
	return text
}

// afterTag skips white space behind a tag: all with -, else one newline where the tag takes it.
func (l *lexer) afterTag(minus, newline bool) {
	l.lineStart = false
	rest := l.src[l.pos:]
	switch {
	case minus:
		s := l.skip(len(rest) - len(strings.TrimLeftFunc(rest, unicode.IsSpace)))
		l.lineStart = strings.HasSuffix(s, "\n")
	case newline && strings.HasPrefix(rest, "\n"):
		l.skip(1)
		l.lineStart = true
	}
}

// tagNamed reports whether s, behind "{%", is the rest of a tag without arguments, how long that is, and whether it
// ends with a minus.
func tagNamed(s, name string) (n int, minus, ok bool) {
	rest := strings.TrimLeftFunc(s, unicode.IsSpace)
	rest, ok = strings.CutPrefix(rest, name)
	if !ok {
		return 0, false, false
	}
	rest = strings.TrimLeftFunc(rest, unicode.IsSpace)
	rest, minus = strings.CutPrefix(rest, "-")
	rest, ok = strings.CutPrefix(rest, "%}")
	return len(s) - len(rest), minus, ok
}

// raw reads up to {% endraw %}.
func (l *lexer) raw() error {
	start := l.pos
	for i := l.pos; ; {
		k := strings.Index(l.src[i:], "{%")
		if k < 0 {
			return l.fail("raw has no endraw")
		}
		i += k
		at := i + 2
		var sign byte
		if at < len(l.src) && (l.src[at] == '-' || l.src[at] == '+') {
			sign = l.src[at]
			at++
		}
		n, minus, ok := tagNamed(l.src[at:], "endraw")
		if !ok {
			i += 2
			continue
		}
		if text := l.trimmed(l.src[start:i], sign, true); text != "" {
			l.add(tokText, text)
		}
		l.skip(at + n - l.pos)
		l.afterTag(minus, true)
		return nil
	}
}

// operators, longer ones first.
const operators = "** // == != <= >= + - * / % ~ | . , : ( ) [ ] { } < > ="

// inside reads the tokens of a tag up to its end, which counts only outside brackets.
func (l *lexer) inside(end string, endKind kind) error {
	ops := strings.Fields(operators)
	var open []byte
	for {
		rest := l.src[l.pos:]
		if trimmed := strings.TrimLeftFunc(rest, unicode.IsSpace); len(trimmed) < len(rest) {
			l.skip(len(rest) - len(trimmed))
			rest = trimmed
		}
		if rest == "" {
			return l.fail("a tag has no %s", end)
		}
		if len(open) == 0 {
			sign := byte(0)
			if rest[0] == '-' || rest[0] == '+' && endKind == tokTagEnd {
				sign = rest[0]
			}
			n := 0
			if sign != 0 {
				n = 1
			}
			if strings.HasPrefix(rest[n:], end) {
				l.skip(n + 2)
				l.add(endKind, end)
				l.afterTag(sign == '-', endKind == tokTagEnd && sign != '+')
				return nil
			}
		}
		r, _ := utf8.DecodeRuneInString(rest)
		switch {
		case r == '\'' || r == '"':
			if err := l.str(); err != nil {
				return err
			}
			continue
		case r >= '0' && r <= '9':
			l.number()
			continue
		case r == '_' || unicode.IsLetter(r):
			n := strings.IndexFunc(rest, func(r rune) bool { return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) })
			if n < 0 {
				n = len(rest)
			}
			l.add(tokName, rest[:n])
			l.skip(n)
			continue
		}
		found := ""
		for _, op := range ops {
			if strings.HasPrefix(rest, op) {
				found = op
				break
			}
		}
		switch found {
		case "":
			return l.fail("unexpected %q", r)
		case "(", "[", "{":
			open = append(open, found[0])
		case ")", "]", "}":
			want := map[string]byte{")": '(', "]": '[', "}": '{'}[found]
			if len(open) == 0 || open[len(open)-1] != want {
				return l.fail("unexpected %q", found)
			}
			open = open[:len(open)-1]
		}
		l.add(tokOp, found)
		l.skip(len(found))
	}
}

func (l *lexer) number() {
	rest := l.src[l.pos:]
	digits := func(i int) int {
		for i < len(rest) && (rest[i] >= '0' && rest[i] <= '9' || rest[i] == '_') {
			i++
		}
		return i
	}
	n, k := digits(0), tokInt
	if n+1 < len(rest) && rest[n] == '.' && rest[n+1] >= '0' && rest[n+1] <= '9' {
		n, k = digits(n+1), tokFloat
	}
	if n < len(rest) && rest[n]|0x20 == 'e' {
		i := n + 1
		if i < len(rest) && (rest[i] == '+' || rest[i] == '-') {
			i++
		}
		if j := digits(i); j > i {
			n, k = j, tokFloat
		}
	}
	l.add(k, strings.ReplaceAll(rest[:n], "_", ""))
	l.skip(n)
}

// str reads a string with Python's escapes.
func (l *lexer) str() error {
	rest := l.src[l.pos:]
	quote := rest[0]
	var b strings.Builder
	for i := 1; i < len(rest); {
		switch c := rest[i]; {
		case c == quote:
			l.add(tokString, b.String())
			l.skip(i + 1)
			return nil
		case c != '\\':
			b.WriteByte(c)
			i++
		default:
			n, err := unescape(rest[i:], &b)
			if err != nil {
				return l.fail("%v", err)
			}
			i += n
		}
	}
	return l.fail("a string has no end")
}

// unescape writes what an escape stands for and gives its length; unknown ones stand for themselves.
func unescape(s string, b *strings.Builder) (int, error) {
	if len(s) < 2 {
		return 0, fmt.Errorf("a string has no end")
	}
	if i := strings.IndexByte(`abfnrtv\'"`, s[1]); i >= 0 {
		b.WriteByte("\a\b\f\n\r\t\v\\'\""[i])
		return 2, nil
	}
	digits, base := 0, 16
	switch s[1] {
	case '\n':
		return 2, nil
	case 'x':
		digits = 2
	case 'u':
		digits = 4
	case 'U':
		digits = 8
	case '0', '1', '2', '3', '4', '5', '6', '7':
		n := 1
		for n < 4 && n < len(s) && s[n] >= '0' && s[n] <= '7' {
			n++
		}
		v, _ := strconv.ParseUint(s[1:n], 8, 16)
		b.WriteRune(rune(v))
		return n, nil
	default:
		b.WriteByte('\\')
		return 1, nil
	}
	if len(s) < 2+digits {
		return 0, fmt.Errorf("an escape is cut short")
	}
	v, err := strconv.ParseUint(s[2:2+digits], base, 32)
	if err != nil || v > unicode.MaxRune {
		return 0, fmt.Errorf("wrong escape %q", s[:2+digits])
	}
	b.WriteRune(rune(v))
	return 2 + digits, nil
}
