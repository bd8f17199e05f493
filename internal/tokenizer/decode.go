package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// Decode returns the text of ids, special tokens included. Ids outside the vocabulary are left out; bytes that are
// not UTF-8 become U+FFFD.
func (t *Tokenizer) Decode(ids []int32) string {
	parts := make([]string, 0, len(ids))
	for _, id := range ids {
		if t.has(id) {
			parts = append(parts, t.tokens[id])
		}
	}
	if t.decoder == nil {
		return strings.Join(parts, " ")
	}
	return strings.Join(t.decoder.decode(parts), "")
}

// decode joins the texts of tokens, as they stand in the vocabulary. It may write to parts.
func (c *component) decode(parts []string) []string {
	switch c.Type {
	case "Sequence":
		for i := range c.Decoders {
			parts = c.Decoders[i].decode(parts)
		}
	case "ByteLevel":
		var b []byte
		for _, p := range parts {
			b = appendByteLevel(b, p)
		}
		return []string{lossy(b)}
	case "Replace":
		for i, p := range parts {
			parts[i] = strings.ReplaceAll(p, c.Pattern.String, c.Content)
		}
	case "ByteFallback":
		return decodeBytes(parts)
	case "Fuse":
		return []string{strings.Join(parts, "")}
	case "Strip":
		for i, p := range parts {
			for n := 0; c.Content != "" && n < c.Start && strings.HasPrefix(p, c.Content); n++ {
				p = p[len(c.Content):]
			}
			for n := 0; c.Content != "" && n < c.Stop && strings.HasSuffix(p, c.Content); n++ {
				p = p[:len(p)-len(c.Content)]
			}
			parts[i] = p
		}
	case "Metaspace":
		for i, p := range parts {
			space := " "
			if i == 0 && c.scheme() != "never" {
				space = ""
			}
			parts[i] = strings.ReplaceAll(p, c.Replacement, space)
		}
	}
	return parts
}

// decodeBytes turns runs of <0xNN> tokens into the text that they spell; a run that is not UTF-8 gives one
// replacement character a byte, as the reference does.
func decodeBytes(parts []string) []string {
	out := make([]string, 0, len(parts))
	var run []byte
	flush := func() {
		if len(run) == 0 {
			return
		}
		if utf8.Valid(run) {
			out = append(out, string(run))
		} else {
			out = append(out, strings.Repeat("\uFFFD", len(run)))
		}
		run = run[:0]
	}
	for _, p := range parts {
		if b, ok := byteToken(p); ok {
			run = append(run, b)
			continue
		}
		flush()
		out = append(out, p)
	}
	flush()
	return out
}

// byteToken parses "<0x0A>".
func byteToken(s string) (byte, bool) {
	if len(s) != 6 || s[:3] != "<0x" || s[5] != '>' {
		return 0, false
	}
	hi, lo := hexDigit(s[3]), hexDigit(s[4])
	return byte(hi<<4 | lo), hi >= 0 && lo >= 0
}

func hexDigit(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	}
	return -1
}

// lossy replaces each longest beginning of a character that goes wrong by U+FFFD (Unicode 15, section 3.9, "best
// practice"), where strings.ToValidUTF8 would replace a stretch of them by one.
func lossy(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	var out strings.Builder
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 {
			n = badPrefix(b)
		}
		out.WriteRune(r)
		b = b[n:]
	}
	return out.String()
}

// badPrefix is how many bytes at the start of b could have begun a character, at least 1.
func badPrefix(b []byte) int {
	lo, hi, more := byte(0x80), byte(0xBF), 0
	switch c := b[0]; {
	case c >= 0xC2 && c <= 0xDF:
		more = 1
	case c >= 0xE0 && c <= 0xEF:
		more = 2
		if c == 0xE0 {
			lo = 0xA0
		} else if c == 0xED {
			hi = 0x9F
		}
	case c >= 0xF0 && c <= 0xF4:
		more = 3
		if c == 0xF0 {
			lo = 0x90
		} else if c == 0xF4 {
			hi = 0x8F
		}
	}
	n := 1
	for ; n <= more && n < len(b) && b[n] >= lo && b[n] <= hi; n++ {
		lo, hi = 0x80, 0xBF
	}
	return n
}
