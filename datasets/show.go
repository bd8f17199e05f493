package datasets

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"unicode"
)

// ShowOptions says how Show prints.
type ShowOptions struct {
	// Color marks the spans with ANSI colours besides the labels.
	Color bool
	// Edge is how many tokens stay at both ends of a haystack span whose middle is
	// left out; 0 means 24, a negative number prints everything.
	Edge int
	// Tokens shows the borders of the tokens, as "|".
	Tokens bool
}

// Show prints one sample: a line of facts, then every span with its label, token
// range and text. Control characters of the text are escaped.
func Show(w io.Writer, tok Tokenizer, s *Sample, o ShowOptions) error {
	edge := o.Edge
	if edge == 0 {
		edge = 24
	}
	out := bufio.NewWriter(w)
	fmt.Fprintf(out, "sample %d  task %s  tokens %d  prompt %d  seed %d  haystack %s\n", s.ID, s.Task, len(s.Tokens), s.PromptLen(), s.Seed, s.Haystack)
	for i := range s.Depths {
		fmt.Fprintf(out, "needle %d  depth %.3f (asked %.3f)", i, s.Depths[i], s.AskedDepths[i])
		if i < len(s.Expected) {
			fmt.Fprintf(out, "  expected %q", s.Expected[i])
		}
		fmt.Fprintln(out)
	}
	for _, sp := range s.Spans {
		if sp.Start < 0 || sp.End > len(s.Tokens) || sp.Start > sp.End {
			return fmt.Errorf("show sample %d: span [%d, %d) is outside its %d tokens", s.ID, sp.Start, sp.End, len(s.Tokens))
		}
		label := fmt.Sprintf("[%s %d  %d-%d]", sp.Kind, sp.Index, sp.Start, sp.End)
		on, off := "", ""
		if o.Color {
			on, off = color(sp.Kind), "\x1b[0m"
		}
		toks := s.Tokens[sp.Start:sp.End]
		if sp.Kind == SpanHaystack && edge > 0 && len(toks) > 2*edge+8 {
			fmt.Fprintf(out, "%s%s %s%s\n    ... %d tokens ...\n%s    %s%s\n", on, label, text(tok, toks[:edge], o.Tokens), off,
				len(toks)-2*edge, on, text(tok, toks[len(toks)-edge:], o.Tokens), off)
			continue
		}
		fmt.Fprintf(out, "%s%s %s%s\n", on, label, text(tok, toks, o.Tokens), off)
	}
	return out.Flush()
}

func color(k SpanKind) string {
	switch k {
	case SpanNeedle:
		return "\x1b[1;33m"
	case SpanDistractor:
		return "\x1b[33m"
	case SpanQuestion:
		return "\x1b[1;36m"
	case SpanDialog:
		return "\x1b[36m"
	case SpanAnswer:
		return "\x1b[1;32m"
	case SpanInstruction:
		return "\x1b[34m"
	case SpanSink, SpanChat:
		return "\x1b[35m"
	}
	return "\x1b[2m"
}

func text(tok Tokenizer, ids []int32, borders bool) string {
	if !borders {
		return printable(tok.Decode(ids))
	}
	parts := make([]string, len(ids))
	for i, id := range ids {
		parts[i] = printable(tok.Decode([]int32{id}))
	}
	return strings.Join(parts, "|")
}

// printable escapes line breaks and everything that could steer a terminal.
func printable(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case unicode.IsPrint(r) || r == '\u00a0':
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, `\u{%x}`, r)
		}
	}
	return b.String()
}
