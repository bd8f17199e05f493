package datasets

import (
	"errors"
	"strings"
	"testing"
)

func TestShow(t *testing.T) {
	tok := newWords()
	s := mustPasskeys(t, tok, chatML, PasskeyOptions{Count: 1, Passkeys: 2, Words: 4, Lengths: []int{900}}).Samples[0]
	show := func(o ShowOptions) string {
		var b strings.Builder
		if err := Show(&b, tok, &s, o); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	text := show(ShowOptions{})
	for _, want := range []string{"sample 0  task multi-passkey  tokens 900", "[sink 0  0-1] <|im_start|>", "[needle 1  ", "[answer 0  ", "Remember the second passkey: " + s.Expected[1] + ".",
		"tokens ...\n", `expected "` + s.Expected[0] + `"`, `[instruction 0  `, `\n\n`} {
		if !strings.Contains(text, want) {
			t.Errorf("output lacks %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "\x1b") {
		t.Error("colours without being asked for")
	}
	if !strings.Contains(show(ShowOptions{Color: true}), "\x1b[1;33m[needle 0") {
		t.Error("no colours")
	}
	if all := show(ShowOptions{Edge: -1}); strings.Contains(all, "tokens ...") || len(all) < 2*len(text) {
		t.Error("the haystack was elided")
	}
	if got := show(ShowOptions{Tokens: true}); !strings.Contains(got, "Remember| the| first| passkey") {
		t.Errorf("no borders of tokens:\n%s", got)
	}
	s.Spans[1].End = 10_000
	if err := Show(&strings.Builder{}, tok, &s, ShowOptions{}); err == nil {
		t.Error("a span past the end was taken")
	}
}

func TestShowEscapes(t *testing.T) {
	if got := printable("a\x1b[2Jb\n\tc\u202e\x00é"); got != `a\u{1b}[2Jb\n\tc\u{202e}\u{0}é` {
		t.Errorf("got %s", got)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("full") }

func TestShowWriteError(t *testing.T) {
	tok := newWords()
	s := mustGrid(t, tok, nil, GridOptions{Lengths: []int{300}, Depths: []float64{.5}}).Samples[0]
	if err := Show(failing{}, tok, &s, ShowOptions{}); err == nil {
		t.Error("no error of the writer")
	}
}
