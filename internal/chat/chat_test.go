package chat

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
)

// The renderings were recorded from transformers: scripts/fixtures_chat.py.
func TestRender(t *testing.T) {
	path := "testdata/renderings.json"
	if other := os.Getenv("KVPROFILE_CHAT_CASES"); other != "" {
		path = other // whole templates of models
	}
	data, err := os.ReadFile(path)
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
	if len(cases) < 40 {
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

func TestUnsupported(t *testing.T) {
	for source, want := range map[string]string{
		"{% include 'x' %}": "line 1: the tag \"include\" is not supported",
		"a\n{% for m in messages recursive %}{% endfor %}": "line 2: recursive loops are not supported",
		"\n\n{{ messages | groupby('role') }}":             "line 3: the filter \"groupby\" is not supported",
		"{{ 1 is prime }}":                                 "line 1: the test \"prime\" is not supported",
		"{% if true %}":                                    "want endif",
		"{{ 'a }}":                                         "a string has no end",
		"{% raw %}":                                        "raw has no endraw",
		"{{ (1 }}":                                         "",
		"{# x":                                             "a comment has no end",
		"{{ 1 $ 2 }}":                                      "unexpected",
		"{{ strftime_now('%Q') }}":                         "date format",
		"{{ raise_exception('only one turn') }}":           "it refuses the conversation: only one turn",
		"{{ messages.append(1) }}":                         "can't be called",
		"{{ x.y.z }}":                                      "\"x\", which is undefined, has no attribute y",
		"{% set messages[0].role = 'x' %}":                 "",
		"{% set messages.role = 'x' %}":                    "non-namespace",
		"{% break %}":                                      "outside a loop",
		"{{ 9223372036854775807 + 1 }}":                    "too large",
		"{{ -9223372036854775807 - 2 }}":                   "too large",
		"{{ 3037000500 * 3037000500 }}":                    "too large",
		"{{ 1 // 0 }}":                                     "division by zero",
		"{% for a, b in [[1, 2, 3]] %}{% endfor %}":        "3 values for 2 names",
	} {
		tpl, err := Parse(source, "<s>", "</s>")
		if err == nil {
			_, err = tpl.Render([]Message{{"user", "x"}}, true)
		}
		if !errors.Is(err, ErrTemplate) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", source, err, want)
		}
	}
}

// What a hostile template does is bounded, in memory and, more or less, in time.
func TestBounds(t *testing.T) {
	double := strings.Repeat("{% set x = x ~ x %}", 60)
	lists := "{% set x = [] %}" + strings.Repeat("{% set x = [x, x] %}", 60)
	for name, source := range map[string]string{
		"recursion":      "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
		"two macros":     "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
		"range":          "{{ range(10 ** 12) }}",
		"loops":          "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
		"parentheses":    "{{ " + strings.Repeat("(", 100000) + strings.Repeat(")", 100000) + " }}",
		"nots":           "{{ " + strings.Repeat("not ", 100000) + "1 }}",
		"minuses":        "{{ " + strings.Repeat("-", 100000) + "1 }}",
		"sum":            "{{ 1" + strings.Repeat(" + 1", 100000) + " }}",
		"filters":        "{{ 1" + strings.Repeat(" | string", 100000) + " }}",
		"attributes":     "{{ messages" + strings.Repeat("[0]", 100000) + " }}",
		"conditions":     "{{ 1" + strings.Repeat(" if 1 else 1", 100000) + " }}",
		"blocks":         strings.Repeat("{% if 1 %}", 100000),
		"doubled":        "{% set x = 'xxxx' %}" + double + "{{ x }}",
		"shared lists":   lists + "{{ x }}",
		"shared equal":   lists + "{% set y = [x, x] %}{% set x = [x, x] %}{{ x == y }}",
		"shared json":    lists + "{{ x | tojson }}",
		"repeated":       "{{ 'x' * 999999999999 }}",
		"replaced":       "{{ ('x' * 9999999) | replace('x', 'x' * 9999999) }}",
		"joined":         "{{ range(99999) | join('x' * 999999) }}",
		"indented":       "{{ ('\n' * 9999999) | indent('x' * 9999) }}",
		"formatted":      "{{ '%999999999d' % 1 }}",
		"batch":          "{{ [1] | batch(999999999999, 0) }}",
		"power":          "{{ 2 ** 99999 }}",
		"long":           strings.Repeat("x", maxSource+1),
		"step":           "{{ 'abc'[::9223372036854775807] }}{{ range(0, 9, 9223372036854775807) }}{{ 1 // 0 }}",
		"captured loops": "{% for a in range(9999) %}{% set x %}{% for b in range(9999) %}y{% endfor %}{% endset %}{% endfor %}",
	} {
		t.Run(name, func(t *testing.T) {
			tpl, err := Parse(source, "<s>", "</s>")
			if err == nil {
				_, err = tpl.Render([]Message{{"user", "x"}}, true)
			}
			if !errors.Is(err, ErrTemplate) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestConcurrentRender(t *testing.T) {
	tpl, err := Parse("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}", "", "")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if got, err := tpl.Render(make([]Message, 100), false); got != "5050" {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
	wg.Wait()
}

func FuzzRender(f *testing.F) {
	data, err := os.ReadFile("testdata/renderings.json")
	if err != nil {
		f.Fatal(err)
	}
	var cases []struct{ Template string }
	if err := json.Unmarshal(data, &cases); err != nil {
		f.Fatal(err)
	}
	for _, c := range cases {
		f.Add(c.Template, "user", "x")
	}
	f.Fuzz(func(t *testing.T, source, role, content string) {
		tpl, err := Parse(source, "<s>", "</s>")
		if err != nil {
			if !errors.Is(err, ErrTemplate) {
				t.Errorf("%v is no template error", err)
			}
			return
		}
		messages := []Message{{role, content}, {"assistant", "y"}}
		one, err1 := tpl.Render(messages, true)
		two, err2 := tpl.Render(messages, true)
		if one != two || (err1 == nil) != (err2 == nil) {
			t.Errorf("two renderings differ: %q, %v and %q, %v", one, err1, two, err2)
		}
	})
}
