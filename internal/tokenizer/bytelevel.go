package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// GPT-2's byte-level alphabet: printable Latin-1 bytes stand for themselves, the others for the runes from 256 on.

// byteRune is the rune that stands for a byte.
func byteRune(b byte) rune {
	switch {
	case b >= '!' && b <= '~', b >= 0xA1 && b <= 0xAC, b >= 0xAE:
		return rune(b)
	case b <= ' ':
		return 256 + rune(b)
	case b == 0xAD:
		return 256 + 67
	}
	return 256 + 33 + rune(b) - 0x7F // 0x7F..0xA0
}

// runeByte is the byte that a rune stands for.
func runeByte(r rune) (byte, bool) {
	switch {
	case r >= '!' && r <= '~', r >= 0xA1 && r <= 0xAC, r >= 0xAE && r <= 0xFF:
		return byte(r), true
	case r >= 256 && r <= 256+32:
		return byte(r - 256), true
	case r == 256+67:
		return 0xAD, true
	case r >= 256+33 && r <= 256+66:
		return byte(r - 256 - 33 + 0x7F), true
	}
	return 0, false
}

func toByteLevel(s string) string {
	var b strings.Builder
	b.Grow(len(s) + len(s)/4)
	for i := range len(s) {
		b.WriteRune(byteRune(s[i]))
	}
	return b.String()
}

// appendByteLevel appends the bytes that s spells; a rune outside the alphabet stands for itself.
func appendByteLevel(dst []byte, s string) []byte {
	for _, r := range s {
		if b, ok := runeByte(r); ok {
			dst = append(dst, b)
		} else {
			dst = utf8.AppendRune(dst, r)
		}
	}
	return dst
}
