package chat

import (
	"encoding/json"
	"errors"
	"os"
	"testing"
)

// The renderings were recorded from Jinja as transformers configures it: scripts/fixtures_chat.py.
func TestRender(t *testing.T) {
	data, err := os.ReadFile("testdata/renderings.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name, Template, BOS, EOS string
		Messages                 []Message
		Generate                 bool
		Text                     *string
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 12 {
		t.Errorf("only %d renderings", len(cases))
	}
	for _, c := range cases {
		tpl, err := Parse(c.Template, c.BOS, c.EOS)
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		got, err := tpl.Render(c.Messages, c.Generate)
		switch {
		case c.Text == nil && !errors.Is(err, ErrTemplate):
			t.Errorf("%s: got %q and %v, want a refusal", c.Name, got, err)
		case c.Text != nil && (err != nil || got != *c.Text):
			t.Errorf("%s: got %q and %v, want %q", c.Name, got, err, *c.Text)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("{% for m in messages %}{{ m['role'] }}{% endfor %}")
	f.Add("{{ raise_exception('no') }}")
	f.Add("{%- if")
	f.Fuzz(func(t *testing.T, source string) {
		if len(source) > 200 {
			return
		}
		if tpl, err := Parse(source, "<s>", "</s>"); err == nil {
			_, _ = tpl.Render([]Message{{"user", "x"}}, true)
		}
	})
}
