package tokenizer

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/dlclark/regexp2"
	"golang.org/x/text/unicode/norm"
)

// component is a node of the normalizer, pre_tokenizer, decoder or post_processor trees of a tokenizer.json.
type component struct {
	Type           string      `json:"type"`
	Normalizers    []component `json:"normalizers"`
	PreTokenizers  []component `json:"pretokenizers"`
	Decoders       []component `json:"decoders"`
	Processors     []component `json:"processors"`
	Prepend        string      `json:"prepend"`
	Content        string      `json:"content"`
	Pattern        pattern     `json:"pattern"`
	Behavior       string      `json:"behavior"`
	Invert         bool        `json:"invert"`
	AddPrefixSpace *bool       `json:"add_prefix_space"`
	UseRegex       *bool       `json:"use_regex"`
	Individual     bool        `json:"individual_digits"`
	Replacement    string      `json:"replacement"`
	PrependScheme  string      `json:"prepend_scheme"`
	Split          *bool       `json:"split"`
	Start          int         `json:"start"`
	Stop           int         `json:"stop"`
	StripLeft      bool        `json:"strip_left"`
	StripRight     bool        `json:"strip_right"`
	Single         []piece     `json:"single"`
	SpecialTokens  map[string]struct {
		IDs []int32 `json:"ids"`
	} `json:"special_tokens"`

	re   *regexp2.Regexp
	scan scanner // stands for re where it is not nil
}

type pattern struct {
	Regex  string `json:"Regex"`
	String string `json:"String"`
}

// piece is one entry of a TemplateProcessing: a special token, or the sequence.
type piece struct {
	SpecialToken *struct {
		ID string `json:"id"`
	} `json:"SpecialToken"`
	Sequence *json.RawMessage `json:"Sequence"`
}

func yes(p *bool, fallback bool) bool {
	if p == nil {
		return fallback
	}
	return *p
}

// compileNormalizer checks that every part is known; so do its siblings below.
func (c *component) compileNormalizer() error {
	switch c.Type {
	case "Sequence":
		for i := range c.Normalizers {
			if err := c.Normalizers[i].compileNormalizer(); err != nil {
				return err
			}
		}
	case "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Lowercase":
	case "Strip":
	case "Replace":
		return c.compilePattern()
	default:
		return fmt.Errorf("%w: normalizer %q", ErrUnsupported, c.Type)
	}
	return nil
}

// maxPattern bounds the length of a regular expression, of which the longest in use has some 400 bytes: parsing is
// recursive.
const maxPattern = 4096

func (c *component) compilePattern() (err error) {
	switch {
	case len(c.Pattern.Regex) > maxPattern:
		return fmt.Errorf("%w: pattern of %d bytes", ErrUnsupported, len(c.Pattern.Regex))
	case c.Pattern.Regex != "":
		if c.scan = scannerOf(c.Pattern.Regex); c.scan != nil && c.Type == "Split" {
			return nil
		}
		c.re, err = regexp2.Compile(c.Pattern.Regex, regexp2.None)
		if err != nil {
			return fmt.Errorf("%w: pattern %q: %w", ErrCorrupt, c.Pattern.Regex, err)
		}
	case c.Pattern.String == "":
		return fmt.Errorf("%w: %s without a pattern", ErrCorrupt, c.Type)
	}
	return nil
}

func (c *component) compilePreTokenizer() error {
	switch c.Type {
	case "Sequence":
		for i := range c.PreTokenizers {
			if err := c.PreTokenizers[i].compilePreTokenizer(); err != nil {
				return err
			}
		}
	case "Split":
		switch c.Behavior {
		case "Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous":
		default:
			return fmt.Errorf("%w: Split behaviour %q", ErrUnsupported, c.Behavior)
		}
		return c.compilePattern()
	case "Digits":
	case "ByteLevel":
		if yes(c.UseRegex, true) {
			c.scan = scanGPT2
		}
	case "Metaspace":
		if utf8.RuneCountInString(c.Replacement) != 1 {
			return fmt.Errorf("%w: Metaspace with the replacement %q, not one character", ErrCorrupt, c.Replacement)
		}
		switch c.PrependScheme {
		case "", "always", "never", "first":
		default:
			return fmt.Errorf("%w: Metaspace with prepend_scheme %q", ErrUnsupported, c.PrependScheme)
		}
	default:
		return fmt.Errorf("%w: pre-tokenizer %q", ErrUnsupported, c.Type)
	}
	return nil
}

func (c *component) compileDecoder() error {
	switch c.Type {
	case "Sequence":
		for i := range c.Decoders {
			if err := c.Decoders[i].compileDecoder(); err != nil {
				return err
			}
		}
	case "ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip":
	case "Replace":
		if c.Pattern.String == "" {
			return fmt.Errorf("%w: decoder Replace without a plain string", ErrUnsupported)
		}
	default:
		return fmt.Errorf("%w: decoder %q", ErrUnsupported, c.Type)
	}
	return nil
}

// normalize rewrites text before it is split. c may be nil.
func (c *component) normalize(s string) string {
	if c == nil {
		return s
	}
	switch c.Type {
	case "Sequence":
		for i := range c.Normalizers {
			s = c.Normalizers[i].normalize(s)
		}
	case "NFC":
		s = norm.NFC.String(s)
	case "NFD":
		s = norm.NFD.String(s)
	case "NFKC":
		s = norm.NFKC.String(s)
	case "NFKD":
		s = norm.NFKD.String(s)
	case "Lowercase":
		// The one letter that becomes two, where strings.ToLower maps letter by letter.
		s = strings.ToLower(strings.ReplaceAll(s, "\u0130", "i\u0307"))
	case "Strip":
		if c.StripLeft {
			s = strings.TrimLeftFunc(s, unicode.IsSpace)
		}
		if c.StripRight {
			s = strings.TrimRightFunc(s, unicode.IsSpace)
		}
	case "Prepend":
		if s != "" {
			s = c.Prepend + s
		}
	case "Replace":
		if c.re == nil {
			return strings.ReplaceAll(s, c.Pattern.String, c.Content)
		}
		var b strings.Builder
		eachMatch(c.re, s, func(part string, match bool) {
			if match {
				part = c.Content
			}
			b.WriteString(part)
		})
		s = b.String()
	}
	return s
}

// eachMatch calls f on the stretches of s in order, matches and what lies between them.
func eachMatch(re *regexp2.Regexp, s string, f func(part string, match bool)) {
	runes := []rune(s)
	pos := 0
	m, err := re.FindRunesMatch(runes)
	for err == nil && m != nil {
		if m.Index > pos {
			f(string(runes[pos:m.Index]), false)
		}
		if m.Length > 0 {
			f(string(runes[m.Index:m.Index+m.Length]), true)
		}
		pos = m.Index + m.Length
		m, err = re.FindNextMatch(m)
	}
	if pos < len(runes) {
		f(string(runes[pos:]), false)
	}
}

// stretches cuts s into matches of the component's pattern and what lies between.
func (c *component) stretches(s string, f func(part string, match bool)) {
	if c.Invert {
		g := f
		f = func(part string, match bool) { g(part, !match) }
	}
	switch {
	case c.scan != nil:
		for s != "" {
			n := c.scan(s)
			f(s[:n], true)
			s = s[n:]
		}
	case c.re != nil:
		eachMatch(c.re, s, f)
	default:
		for s != "" {
			before, after, found := strings.Cut(s, c.Pattern.String)
			if before != "" {
				f(before, false)
			}
			if found {
				f(c.Pattern.String, true)
			}
			s = after
		}
	}
}

// scheme is when a Metaspace puts its mark before a text: always, first or never.
func (c *component) scheme() string {
	switch {
	case c.PrependScheme != "":
		return c.PrependScheme
	case yes(c.AddPrefixSpace, true):
		return "always"
	}
	return "never"
}

// split cuts the words of text further; first says that the text begins the input.
func (c *component) split(words []string, first bool) []string {
	if c == nil {
		return words
	}
	var out []string
	switch c.Type {
	case "Sequence":
		for i := range c.PreTokenizers {
			words = c.PreTokenizers[i].split(words, first)
		}
		return words
	case "Split":
		for _, w := range words {
			out = c.splitWord(w, out)
		}
	case "Digits":
		for _, w := range words {
			out = splitDigits(w, c.Individual, out)
		}
	case "ByteLevel":
		for _, w := range words {
			if yes(c.AddPrefixSpace, true) && !strings.HasPrefix(w, " ") {
				w = " " + w
			}
			if c.scan == nil {
				out = append(out, w)
				continue
			}
			c.stretches(w, func(part string, _ bool) { out = append(out, part) })
		}
	case "Metaspace":
		for i, w := range words {
			w = strings.ReplaceAll(w, " ", c.Replacement)
			if s := c.scheme(); !strings.HasPrefix(w, c.Replacement) && (s == "always" || s == "first" && first && i == 0) {
				w = c.Replacement + w
			}
			if !yes(c.Split, true) {
				out = append(out, w)
				continue
			}
			// A word begins at each replacement.
			start := 0
			for j := range w {
				if j > start && strings.HasPrefix(w[j:], c.Replacement) {
					out = append(out, w[start:j])
					start = j
				}
			}
			out = append(out, w[start:])
		}
	}
	return out
}

func (c *component) splitWord(w string, out []string) []string {
	switch c.Behavior {
	case "MergedWithPrevious", "Contiguous":
		begin := len(out)
		wasMatch := false
		c.stretches(w, func(part string, match bool) {
			join := match == wasMatch
			if c.Behavior == "MergedWithPrevious" {
				join = match && !wasMatch
			}
			if join && len(out) > begin {
				out[len(out)-1] += part
			} else {
				out = append(out, part)
			}
			wasMatch = match
		})
	case "MergedWithNext":
		pending := ""
		c.stretches(w, func(part string, match bool) {
			if match {
				if pending != "" {
					out = append(out, pending)
				}
				pending = part
				return
			}
			out = append(out, pending+part)
			pending = ""
		})
		if pending != "" {
			out = append(out, pending)
		}
	default:
		c.stretches(w, func(part string, match bool) {
			if !match || c.Behavior != "Removed" {
				out = append(out, part)
			}
		})
	}
	return out
}

func splitDigits(w string, individual bool, out []string) []string {
	start, inNumber := 0, false
	for i, r := range w {
		number := unicode.IsNumber(r)
		if i > start && (number != inNumber || number && individual) {
			out = append(out, w[start:i])
			start = i
		}
		inNumber = number
	}
	if start < len(w) {
		out = append(out, w[start:])
	}
	return out
}

// has reports whether the pre-tokenizer contains a type.
func (c *component) has(kind string) bool {
	if c == nil {
		return false
	}
	if c.Type == kind {
		return true
	}
	for _, list := range [][]component{c.PreTokenizers, c.Decoders} {
		for i := range list {
			if list[i].has(kind) {
				return true
			}
		}
	}
	return false
}
