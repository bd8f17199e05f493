// Package chat renders conversations with the Jinja templates that models ship, as transformers renders them.
//
// It interprets the part of Jinja that chat templates use: expressions, the tags if, for, set, macro, call, filter,
// with, generation, break, continue and raw, and the filters, tests and methods that builtins.go lists. What is not
// supported is an error that names it, and not rendered some other way; only what a template has no reason to print,
// such as a function or the keys of a mapping as they are, may look otherwise than in Python. A template comes with a
// model, from a stranger: it sees nothing but the conversation, and what it does is bounded.
package chat

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
)

// ErrTemplate is wrapped by every error about a template.
var ErrTemplate = errors.New("chat template")

// Message is one turn.
type Message struct {
	Role    string // "system", "user" or "assistant"
	Content string
}

// Template is a parsed chat template. It is safe for concurrent use.
type Template struct {
	body     []stmt
	bos, eos string
}

// maxSource bounds the length of a template; the longest in use has some 20 kB.
const maxSource = 1 << 20

// Parse reads a template. bos and eos are the texts of the special tokens.
func Parse(source, bos, eos string) (*Template, error) {
	if len(source) > maxSource {
		return nil, fmt.Errorf("%w: it has %d bytes, more than %d", ErrTemplate, len(source), maxSource)
	}
	tokens, err := lex(strings.ToValidUTF8(source, "\uFFFD"))
	if err != nil {
		return nil, err
	}
	body, _, err := (&parser{tokens: tokens}).block()
	if err != nil {
		return nil, err
	}
	return &Template{body, bos, eos}, nil
}

// Render gives the text of a conversation; with generate, it ends where the assistant begins to speak. There are no
// tools and no documents, and the date is always 26 July 2024, which templates that ask for none have as their own:
// another prompt every day would be another calibration.
func (t *Template) Render(messages []Message, generate bool) (result string, err error) {
	defer func() {
		if p := recover(); p != nil {
			if _, ok := p.(tooMuch); !ok {
				panic(p)
			}
			result, err = "", fmt.Errorf("%w: %w", ErrTemplate, errTooMuch)
		}
	}()
	list := make([]any, len(messages))
	for i, x := range messages {
		d := newDict()
		_ = d.set("role", x.Role) // strings can be keys
		_ = d.set("content", strings.ToValidUTF8(x.Content, "\uFFFD"))
		list[i] = d
	}
	m := &machine{out: &strings.Builder{}}
	globals := &scope{vars: map[string]any{
		"messages": list, "add_generation_prompt": generate, "bos_token": t.bos, "eos_token": t.eos, "tools": nil, "documents": nil,
		"raise_exception": positional(1, 1, func(args []any) (any, error) { return nil, &refusal{str(args[0])} }),
		"strftime_now": positional(1, 1, func(args []any) (any, error) {
			format, err := textArg(args, 0, "")
			if err != nil {
				return nil, err
			}
			return strftime(format)
		}),
		"range":     positional(1, 3, m.span),
		"namespace": function(makeNamespace),
		"dict": function(func(args []any, kw map[string]any) (any, error) {
			ns, err := makeNamespace(args, kw)
			if err != nil || len(kw) > 1 {
				return nil, cmpErr(err, "dict with several names, whose order would be lost")
			}
			d := newDict()
			for k, v := range ns.(*namespace).values {
				_ = d.set(k, v)
			}
			return d, nil
		}),
	}}
	if err := m.run(t.body, globals); err != nil {
		return "", fmt.Errorf("%w: %w", ErrTemplate, err)
	}
	return m.out.String(), nil
}

func makeNamespace(args []any, kw map[string]any) (any, error) {
	ns := &namespace{values: map[string]any{}}
	for _, a := range args {
		d, ok := a.(*dict)
		if !ok {
			return nil, fmt.Errorf("a namespace of %s", kindOf(a))
		}
		for i, k := range d.keys {
			if s, ok := k.(string); ok {
				ns.values[s] = d.values[i]
			}
		}
	}
	for k, v := range kw {
		ns.values[k] = v
	}
	return ns, nil
}

// span is range.
func (m *machine) span(args []any) (any, error) {
	n := [3]int64{0, 0, 1}
	for i := range args {
		v, err := intArg(args, i, 0)
		if err != nil {
			return nil, err
		}
		n[i] = v
	}
	if len(args) == 1 {
		n[0], n[1] = 0, n[0]
	}
	if n[2] == 0 {
		return nil, errors.New("a range with a step of zero")
	}
	// In floats, for differences that integers do not hold.
	count := math.Ceil((float64(n[1]) - float64(n[0])) / float64(n[2]))
	if count > maxRange {
		return nil, fmt.Errorf("a range of more than %d", maxRange)
	}
	out := make([]any, 0, int(max(count, 0)))
	for i := range int64(max(count, 0)) {
		out = append(out, n[0]+i*n[2])
	}
	return out, m.spend(len(out) * stepBytes)
}

// strftime formats the date that Render's comment names, in English.
func strftime(format string) (string, error) {
	day := time.Date(2024, time.July, 26, 0, 0, 0, 0, time.UTC)
	layouts := map[byte]string{'d': "02", 'm': "01", 'Y': "2006", 'y': "06", 'b': "Jan", 'B': "January", 'a': "Mon", 'A': "Monday",
		'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'j': "002", 'F': "2006-01-02", 'T': "15:04:05", 'D': "01/02/06"}
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		switch {
		case format[i] != '%':
			b.WriteByte(format[i])
			continue
		case i+1 < len(format) && format[i+1] == '%':
			b.WriteByte('%')
		case i+1 < len(format) && layouts[format[i+1]] != "":
			b.WriteString(day.Format(layouts[format[i+1]]))
		default:
			return "", fmt.Errorf("the date format %q is not supported", format)
		}
		i++
	}
	return b.String(), nil
}
