package tokenizer

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/dlclark/regexp2"
)

// scanned lists the patterns that a scanner stands for.
func scanned() []string { return []string{gpt2Pattern, llama3Pattern, qwen2Pattern} }

func compare(t *testing.T, re *regexp2.Regexp, scan scanner, text string) {
	t.Helper()
	var want, got []string
	eachMatch(re, text, func(part string, _ bool) { want = append(want, part) })
	(&component{scan: scan}).stretches(text, func(part string, _ bool) { got = append(got, part) })
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q is cut into %q, want %q", re, text, got, want)
	}
}

func TestScanners(t *testing.T) {
	// Letters of every kind that the patterns ask for, often enough for every pair and triple of them to occur.
	letters := []string{"a", "Z", "é", "日", "ſ", "1", "٣", "Ⅷ", " ", " ", "\t", "\n", "\r", "\u0085", "\u00a0", "\u2028", "\u3000", "'", "'s", "'T", "'rE", "'ll", "'v", ".", "_",
		"€", "\u0301", "👍", "\u200d", "\x00", "\ufffd", "\U0010ffff", "²"}
	rng := rand.New(rand.NewPCG(1, 2))
	for _, p := range scanned() {
		re, scan := regexp2.MustCompile(p, regexp2.None), scannerOf(p)
		for range 20000 {
			var b strings.Builder
			for range rng.IntN(12) {
				if rng.IntN(8) == 0 {
					b.WriteRune(rune(rng.IntN(0x30000)))
				} else {
					b.WriteString(letters[rng.IntN(len(letters))])
				}
			}
			compare(t, re, scan, strings.ToValidUTF8(b.String(), ""))
			if t.Failed() {
				return
			}
		}
	}
}

func FuzzScanners(f *testing.F) {
	f.Add("I'll  go\r\n \n'S 1234 a\u0301…")
	f.Add(" \t\n x'ſ'\u212a ")
	var res []*regexp2.Regexp
	for _, p := range scanned() {
		res = append(res, regexp2.MustCompile(p, regexp2.None))
	}
	f.Fuzz(func(t *testing.T, text string) {
		if !utf8.ValidString(text) {
			return
		}
		for i, re := range res {
			compare(t, re, scannerOf(scanned()[i]), text)
		}
	})
}

func BenchmarkWords(b *testing.B) {
	text := prose()
	for _, c := range []struct {
		name string
		c    component
	}{
		{"scanner", component{scan: scannerOf(llama3Pattern)}},
		{"regexp2", component{re: regexp2.MustCompile(llama3Pattern, regexp2.None)}},
		{"gpt2 scanner", component{scan: scanGPT2}},
		{"gpt2 regexp2", component{re: regexp2.MustCompile(gpt2Pattern, regexp2.None)}},
		{"tekken regexp2", component{re: regexp2.MustCompile(tekkenPattern, regexp2.None)}},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				c.c.stretches(text, func(string, bool) {})
			}
		})
	}
}
