package tokenizer

import (
	"unicode"
	"unicode/utf8"
)

// The patterns by which byte-level tokenizers cut text into words.
const (
	gpt2Pattern   = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	llama3Pattern = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	qwen2Pattern  = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	tekkenPattern = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

// scanner gives the length of the word that s, which is not empty, begins with. Scanners stand for patterns that match
// everywhere, and are tested to cut like them. They take 6 to 11 ms a megabyte of prose where regexp2 takes 100 to 130.
type scanner func(s string) int

// scannerOf is the scanner of a pattern, nil for patterns that the regular expression engine must run.
func scannerOf(pattern string) scanner {
	switch pattern {
	case gpt2Pattern:
		return scanGPT2
	case llama3Pattern:
		return func(s string) int { return scanLlama3(s, 3) }
	case qwen2Pattern:
		return func(s string) int { return scanLlama3(s, 1) }
	}
	return nil
}

// kind is what the patterns ask of a character.
type kind uint8

const (
	letter kind = iota // \p{L}
	number             // \p{N}
	space              // \s
	other
	end // of the text
)

// kindAt is the kind of the character that s begins with, and its length.
func kindAt(s string) (kind, int) {
	if s == "" {
		return end, 0
	}
	r, n := rune(s[0]), 1
	if r >= utf8.RuneSelf {
		r, n = utf8.DecodeRuneInString(s)
	}
	switch {
	case r|0x20 >= 'a' && r|0x20 <= 'z' && r < utf8.RuneSelf:
		return letter, n
	case unicode.IsSpace(r):
		return space, n
	case unicode.IsLetter(r):
		return letter, n
	case unicode.IsNumber(r):
		return number, n
	}
	return other, n
}

// run is the length of the characters of one kind at the start of s.
func run(s string, k kind) int {
	i := 0
	for {
		got, n := kindAt(s[i:])
		if got != k {
			return i
		}
		i += n
	}
}

// contraction is the length of 's, 't, 're, 've, 'm, 'll or 'd at the start of s, 0 when there is none; with fold in
// any case.
func contraction(s string, fold bool) int {
	if len(s) < 2 || s[0] != '\'' {
		return 0
	}
	at := func(i int) byte {
		if i >= len(s) {
			return 0
		}
		if fold && s[i] >= 'A' && s[i] <= 'Z' {
			return s[i] | 0x20
		}
		return s[i]
	}
	switch a, b := at(1), at(2); {
	case a == 's' || a == 't' || a == 'm' || a == 'd':
		return 2
	case a == 'r' && b == 'e', a == 'v' && b == 'e', a == 'l' && b == 'l':
		return 3
	}
	return 0
}

// blanks is the length of the word that a stretch of white space begins with: the stretch without its last character,
// which belongs to what follows, unless nothing follows or there is but one.
func blanks(s string) int {
	n := run(s, space)
	if n == len(s) {
		return n
	}
	if _, last := utf8.DecodeLastRuneInString(s[:n]); last < n {
		return n - last
	}
	return n
}

func scanGPT2(s string) int {
	if n := contraction(s, false); n > 0 {
		return n
	}
	lead := 0
	if s[0] == ' ' {
		lead = 1
	}
	if k, _ := kindAt(s[lead:]); k != space && k != end {
		return lead + run(s[lead:], k)
	}
	return blanks(s)
}

// scanLlama3 cuts for Llama 3, with up to three digits a word, and Qwen 2, with one.
func scanLlama3(s string, digits int) int {
	if n := contraction(s, true); n > 0 {
		return n
	}
	k, n := kindAt(s)
	switch k {
	case letter:
		return run(s, letter)
	case number:
		i := 0
		for ; digits > 0; digits-- {
			k, n := kindAt(s[i:])
			if k != number {
				break
			}
			i += n
		}
		return i
	}
	if s[0] != '\r' && s[0] != '\n' {
		if m := run(s[n:], letter); m > 0 {
			return n + m
		}
	}
	lead := 0
	if s[0] == ' ' {
		lead = 1
	}
	if m := run(s[lead:], other); m > 0 {
		i := lead + m
		for i < len(s) && (s[i] == '\r' || s[i] == '\n') {
			i++
		}
		return i
	}
	stretch := run(s, space)
	for i := stretch; i > 0; i-- {
		if s[i-1] == '\r' || s[i-1] == '\n' {
			return i
		}
	}
	return blanks(s)
}
