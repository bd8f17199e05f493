package datasets

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func writeFile(t testing.TB, text string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "text.txt")
	if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestSplit(t *testing.T) {
	text := "\uFEFFMr. J. Smith paid $3.50 for it. He left!\r\nA wrapped\nline. \"Why?\" she said. It was e.g. this.\n\n\n    indented := code()\n    more()\n\n你好。世界！“再见。”完"
	want := []Sentence{"Mr. J. Smith paid $3.50 for it.", " He left!", "\nA wrapped\nline.", " \"Why?\" she said.", " It was e.g. this.\n\n",
		"\n    indented := code()\n    more()\n\n", "你好。", "世界！", "“再见。”", "完\n\n"}
	if got := split(text); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if got := split(" \n\n \r\n\n\t"); len(got) != 0 {
		t.Errorf("blank text gives %q", got)
	}
	for _, s := range split(strings.Repeat("x", 10_000)) {
		if len(s) > 4*longestSentence+8 {
			t.Errorf("a sentence of %d bytes", len(s))
		}
	}
	if got := string(split("a\xffb")[0]); got != "a\uFFFDb\n\n" {
		t.Errorf("invalid UTF-8 gives %q", got)
	}
}

// Sentences put together are the text, but for runs of blank lines.
func FuzzSplit(f *testing.F) {
	for _, s := range []string{"", "One. Two.\n\nThree", "a.b.c 1.2 \"x.\" Y", "你好。世界", "\n\n\n\n", "x\xff.\n Y", "\uFEFFq? R! s"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var got strings.Builder
		for _, s := range split(text) {
			if strings.TrimSpace(string(s)) == "" {
				t.Errorf("blank sentence %q", s)
			}
			got.WriteString(string(s))
		}
		squeeze := func(s string) string { return strings.Join(strings.Fields(s), "") }
		want := strings.TrimPrefix(strings.ToValidUTF8(text, "\uFFFD"), "\uFEFF")
		if squeeze(got.String()) != squeeze(want) {
			t.Errorf("%q became %q", text, got.String())
		}
	})
}

func TestFilesHaystack(t *testing.T) {
	// Numbered sentences show order and origin.
	var b strings.Builder
	for i := range 900 {
		b.WriteString("Sentence number w" + strings.Repeat("a", i/26) + string(rune('a'+i%26)) + " stands here.")
		if i%7 == 6 {
			b.WriteString("\n\n")
		} else {
			b.WriteString(" ")
		}
	}
	h, err := Files([]string{writeFile(t, b.String())})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(h.Name(), "files:") || len(h.Name()) != 6+64 {
		t.Errorf("name %q", h.Name())
	}
	tok := newWords()
	used := map[string]Purpose{}
	for _, p := range []Purpose{Calibration, Search, Certification} {
		d := mustGrid(t, tok, chatML, GridOptions{Lengths: []int{500, 501, 502, 503}, Depths: []float64{0, .5, 1}, Haystack: h, Purpose: p, Seed: 3})
		for i := range d.Samples {
			s := &d.Samples[i]
			if len(s.Tokens) != 500+i/3 {
				t.Errorf("%d tokens, want %d", len(s.Tokens), 500+i/3)
			}
			var text string
			for _, sp := range s.Find(SpanHaystack) {
				text += spanText(tok, s, sp)
			}
			if !strings.Contains(b.String(), strings.TrimSpace(strings.TrimRight(text, "\n"))) && !strings.Contains(b.String()+"\n\n"+b.String(), text) {
				// Reading may have wrapped within the purpose's third.
				if !strings.Contains(text, "here.\n\nSentence") {
					t.Errorf("haystack is not a stretch of the file: %q...", text[:80])
				}
			}
			for _, w := range strings.Fields(text) {
				if strings.HasPrefix(w, "w") {
					if old, ok := used[w]; ok && old != p {
						t.Errorf("%s is in haystacks for %s and %s", w, old, p)
					}
					used[w] = p
				}
			}
		}
	}
	if len(used) < 300 {
		t.Errorf("only %d of 900 sentences were used", len(used))
	}
}

func TestFilesSpecialTokensStayText(t *testing.T) {
	h, err := Files([]string{writeFile(t, strings.Repeat("He wrote <|im_end|> on the wall, and <|im_start|>user too. Nobody knew why it was there. ", 50))})
	if err != nil {
		t.Fatal(err)
	}
	tok := newWords()
	d := mustGrid(t, tok, chatML, GridOptions{Lengths: []int{600}, Depths: []float64{.5}, Repeats: 4, Haystack: h})
	for i := range d.Samples {
		s := &d.Samples[i]
		text := ""
		for _, sp := range s.Find(SpanHaystack) {
			text += spanText(tok, s, sp)
			for _, id := range s.Tokens[sp.Start:sp.End] {
				if tok.IsSpecial(id) {
					t.Fatalf("the haystack has the special token %q", tok.Token(id))
				}
			}
		}
		if !strings.Contains(text, "He wrote <|im_end|> on the wall, and <|im_start|>user too.") {
			t.Error("the text of special tokens was lost")
		}
	}
}

func TestFilesErrors(t *testing.T) {
	if _, err := Files([]string{filepath.Join(t.TempDir(), "none")}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	var oe *OptionError
	for name, paths := range map[string][]string{"no files": nil, "a folder": {t.TempDir()}, "an empty file": {writeFile(t, "")}} {
		if _, err := Files(paths); !errors.As(err, &oe) {
			t.Errorf("%s: got %v, want an OptionError", name, err)
		}
	}
}

// mute makes no tokens of anything but ASCII.
type mute struct{ *wordTokenizer }

func (m mute) Encode(s string) []int32 {
	return m.wordTokenizer.Encode(strings.Map(func(r rune) rune {
		if r > 127 {
			return -1
		}
		return r
	}, s))
}

func TestTextThatGivesNoTokens(t *testing.T) {
	h, err := Files([]string{writeFile(t, strings.Repeat("你好。", 100))})
	if err != nil {
		t.Fatal(err)
	}
	_, err = NeedleGrid(mute{newWords()}, nil, GridOptions{Lengths: []int{600}, Depths: []float64{.5}, Haystack: h})
	var oe *OptionError
	if !errors.As(err, &oe) || oe.Option != "haystack" {
		t.Errorf("got %v, want an OptionError about the haystack", err)
	}
}

func TestFileStreamWraps(t *testing.T) {
	h, err := Files([]string{writeFile(t, "A one. B two. C three. D four. E five. F six.")})
	if err != nil {
		t.Fatal(err)
	}
	s, err := h.Stream(Search, rand.New(rand.NewPCG(1, 1)))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for range 5 {
		b.WriteString(string(s.Next()))
	}
	if got := b.String(); !strings.Contains(got, "C three. D four.\n\nC three. D four.") {
		t.Errorf("got %q", got)
	}
}
