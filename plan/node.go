package plan

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// node is a JSON value with its members in order.
type node struct {
	kind    nodeKind
	text    string // of a string (unescaped), of a number or a literal (as in the document)
	members []member
	elems   []*node
}

type member struct {
	key   string
	value *node
}

type nodeKind byte

const (
	nodeObject nodeKind = iota
	nodeArray
	nodeString
	nodeNumber
	nodeBool
	nodeNull
)

func (k nodeKind) String() string {
	return [...]string{"an object", "an array", "a string", "a number", "a boolean", "null"}[k]
}

// maxDepth is far beyond what a plan needs and far below what recursion could hurt.
const maxDepth = 64

// SyntaxError is for a document that is no JSON, or has an object with the same key twice. It is an [ErrFormat].
type SyntaxError struct {
	Line, Column int // from 1, in bytes
	Reason       string
}

// Error says where and what.
func (e *SyntaxError) Error() string {
	return fmt.Sprintf("line %d, column %d: %s", e.Line, e.Column, e.Reason)
}

// Is reports whether target is [ErrFormat].
func (e *SyntaxError) Is(target error) bool { return target == ErrFormat }

func syntaxError(data []byte, offset int64, reason string) *SyntaxError {
	before := data[:min(max(offset, 0), int64(len(data)))]
	line := 1 + bytes.Count(before, []byte("\n"))
	return &SyntaxError{Line: line, Column: len(before) - bytes.LastIndexByte(before, '\n'), Reason: reason}
}

// parseJSON reads one JSON document. Unlike encoding/json it refuses invalid UTF-8 and repeated keys.
func parseJSON(data []byte) (*node, error) {
	if !utf8.Valid(data) {
		i := 0
		for i < len(data) {
			r, size := utf8.DecodeRune(data[i:])
			if r == utf8.RuneError && size == 1 {
				break
			}
			i += size
		}
		return nil, syntaxError(data, int64(i), "invalid UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	n, err := parseValue(dec, 0)
	if err == nil {
		if _, err = dec.Token(); errors.Is(err, io.EOF) {
			return n, nil
		} else if err == nil {
			err = errors.New("a second value after the document")
		}
	}
	offset, reason := dec.InputOffset(), err.Error()
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &syntax):
		offset = syntax.Offset - 1
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		offset, reason = int64(len(data)), "the document ends too early"
	}
	return nil, syntaxError(data, offset, reason)
}

func parseValue(dec *json.Decoder, depth int) (*node, error) {
	token, err := dec.Token()
	if err != nil {
		return nil, err
	}
	if depth > maxDepth {
		return nil, fmt.Errorf("nested deeper than %d levels", maxDepth)
	}
	switch t := token.(type) {
	case json.Delim:
		n := &node{kind: nodeArray}
		if t == '{' {
			n.kind = nodeObject
		}
		seen := map[string]bool{}
		for dec.More() {
			var key string
			if n.kind == nodeObject {
				token, err := dec.Token()
				if err != nil {
					return nil, err
				}
				key, _ = token.(string)
				if seen[key] {
					return nil, fmt.Errorf("key %q stands twice in an object", key)
				}
				seen[key] = true
			}
			v, err := parseValue(dec, depth+1)
			if err != nil {
				return nil, err
			}
			if n.kind == nodeObject {
				n.members = append(n.members, member{key, v})
			} else {
				n.elems = append(n.elems, v)
			}
		}
		_, err = dec.Token()
		return n, err
	case string:
		return &node{kind: nodeString, text: t}, nil
	case json.Number:
		// Numbers that a double cannot hold are no values of a plan, and exact arithmetic on them can be made to take
		// all memory.
		text := t.String()
		mantissa, _, _ := strings.Cut(strings.ToLower(text), "e")
		if f, err := strconv.ParseFloat(text, 64); err != nil || f == 0 && strings.ContainsAny(mantissa, "123456789") || len(text) > 400 {
			return nil, errors.New("number beyond the range of a double")
		}
		return &node{kind: nodeNumber, text: text}, nil
	case bool:
		return &node{kind: nodeBool, text: fmt.Sprint(t)}, nil
	}
	return &node{kind: nodeNull, text: "null"}, nil
}

// get returns the value of a key, nil when there is none.
func (n *node) get(key string) *node {
	for _, m := range n.members {
		if m.key == key {
			return m.value
		}
	}
	return nil
}

// appendString writes a JSON string as RFC 8785 does: it escapes only what must be.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for _, r := range s {
		switch r {
		case '"', '\\':
			b = append(b, '\\', byte(r))
		case '\b':
			b = append(b, `\b`...)
		case '\f':
			b = append(b, `\f`...)
		case '\n':
			b = append(b, `\n`...)
		case '\r':
			b = append(b, `\r`...)
		case '\t':
			b = append(b, `\t`...)
		default:
			if r < 0x20 {
				b = fmt.Appendf(b, `\u%04x`, r)
			} else {
				b = utf8.AppendRune(b, r)
			}
		}
	}
	return append(b, '"')
}

// appendCanonical writes the value without white space, members sorted by key.
func (n *node) appendCanonical(b []byte) []byte {
	switch n.kind {
	case nodeObject:
		sorted := slices.SortedFunc(slices.Values(n.members), func(x, y member) int { return strings.Compare(x.key, y.key) })
		b = append(b, '{')
		for i, m := range sorted {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(appendString(b, m.key), ':')
			b = m.value.appendCanonical(b)
		}
		return append(b, '}')
	case nodeArray:
		b = append(b, '[')
		for i, e := range n.elems {
			if i > 0 {
				b = append(b, ',')
			}
			b = e.appendCanonical(b)
		}
		return append(b, ']')
	case nodeString:
		return appendString(b, n.text)
	}
	return append(b, n.text...)
}

// appendInline writes the value on one line.
func (n *node) appendInline(b []byte) []byte {
	switch n.kind {
	case nodeObject:
		b = append(b, '{')
		for i, m := range n.members {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = append(appendString(b, m.key), ": "...)
			b = m.value.appendInline(b)
		}
		return append(b, '}')
	case nodeArray:
		b = append(b, '[')
		for i, e := range n.elems {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = e.appendInline(b)
		}
		return append(b, ']')
	}
	return n.appendCanonical(b)
}

// lineWidth is how long a line may get before a value is spread over several; entryWidth is the same for the entries of
// brokenMembers, which are easier to compare on one line each.
const (
	lineWidth  = 160
	entryWidth = 260
)

// appendPretty writes the value for people: on one line where it fits, lists of scalars filled into lines, everything
// else one member or element per line. column is where the value starts and width where lines should end; broken forces
// the last form for the value itself.
func (n *node) appendPretty(b []byte, indent, column, width int, broken bool) []byte {
	empty := len(n.members) == 0 && len(n.elems) == 0
	if !broken || empty {
		inline := n.appendInline(nil)
		if empty || column+len(inline) <= width {
			return append(b, inline...)
		}
	}
	newline := func(b []byte, indent int) []byte {
		return append(append(b, '\n'), strings.Repeat(" ", indent)...)
	}
	inner, innerWidth := indent+2, lineWidth
	if broken && indent > 0 {
		innerWidth = entryWidth
	}
	if n.kind == nodeObject {
		b = append(b, '{')
		for i, m := range n.members {
			if i > 0 {
				b = append(b, ',')
			}
			b = newline(b, inner)
			key := append(appendString(nil, m.key), ": "...)
			b = append(b, key...)
			b = m.value.appendPretty(b, inner, inner+len(key)+1, innerWidth, indent == 0 && slices.Contains(brokenMembers, m.key))
		}
		return append(newline(b, indent), '}')
	}
	b = append(b, '[')
	scalars := !slices.ContainsFunc(n.elems, func(e *node) bool { return e.kind <= nodeArray })
	column = lineWidth
	for i, e := range n.elems {
		text := e.appendPretty(nil, inner, inner+1, innerWidth, false)
		if i > 0 {
			b = append(b, ',')
		}
		if scalars && i > 0 && column+len(text)+2 <= lineWidth {
			b = append(b, ' ')
			column++
		} else {
			b = newline(b, inner)
			column = inner
		}
		b = append(b, text...)
		column += len(text) + 1
	}
	return append(newline(b, indent), ']')
}
