// Package chat renders conversations with the Jinja templates that models ship, as transformers renders them.
package chat

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2/builtins"
	"github.com/nikolalohinski/gonja/v2/config"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/loaders"
)

// ErrTemplate is wrapped by every error about a template.
var ErrTemplate = errors.New("chat template")

// Message is one turn.
type Message struct {
	Role    string // "system", "user" or "assistant"
	Content string
}

// Template is a parsed chat template.
type Template struct {
	template *exec.Template
	bos, eos string
}

// Date is what strftime_now gives: templates that print today's date would otherwise give other prompts every day.
var date = time.Date(2024, time.July, 26, 0, 0, 0, 0, time.UTC)

// Parse reads a template. bos and eos are the texts of the special tokens.
func Parse(source, bos, eos string) (t *Template, err error) {
	defer recovered(&err)
	const name = "/chat"
	loader, err := loaders.NewMemoryLoader(map[string]string{name: source})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTemplate, err)
	}
	env := &exec.Environment{
		Filters:           builtins.Filters,
		Tests:             builtins.Tests,
		ControlStructures: builtins.ControlStructures,
		Methods:           builtins.Methods,
		Context:           exec.EmptyContext().Update(builtins.GlobalFunctions),
	}
	conf := config.New()
	// As transformers configures Jinja.
	conf.TrimBlocks, conf.LeftStripBlocks, conf.KeepTrailingNewline = true, true, false
	tpl, err := exec.NewTemplate(name, conf, loader, env)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTemplate, err)
	}
	return &Template{template: tpl, bos: bos, eos: eos}, nil
}

// recovered turns a panic of the template engine into an error: templates come with models, from strangers.
func recovered(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("%w: %v", ErrTemplate, p)
	}
}

// Render gives the text of a conversation; with generate, it ends where the assistant begins to speak.
func (t *Template) Render(messages []Message, generate bool) (text string, err error) {
	defer recovered(&err)
	list := make([]any, len(messages))
	for i, m := range messages {
		list[i] = map[string]any{"role": m.Role, "content": m.Content}
	}
	var refused error
	ctx := exec.NewContext(map[string]any{
		"messages": list, "add_generation_prompt": generate, "bos_token": t.bos, "eos_token": t.eos,
		"raise_exception": func(_ *exec.Evaluator, p *exec.VarArgs) *exec.Value {
			refused = fmt.Errorf("%w: it refuses the conversation: %s", ErrTemplate, p.First().String())
			return exec.AsValue(refused)
		},
		"strftime_now": func(_ *exec.Evaluator, p *exec.VarArgs) *exec.Value {
			return exec.AsValue(strftime(p.First().String()))
		},
	})
	var b strings.Builder
	if err := t.template.Execute(&writer{&b}, ctx); err != nil {
		if refused != nil {
			return "", refused
		}
		return "", fmt.Errorf("%w: %w", ErrTemplate, err)
	}
	if refused != nil {
		return "", refused
	}
	return b.String(), nil
}

// writer bounds what a template may print.
type writer struct{ b *strings.Builder }

func (w *writer) Write(p []byte) (int, error) {
	if w.b.Len()+len(p) > 1<<26 {
		return 0, io.ErrShortWrite
	}
	return w.b.Write(p)
}

func strftime(format string) string {
	return strings.NewReplacer("%d", date.Format("02"), "%b", date.Format("Jan"), "%B", date.Format("January"), "%Y", date.Format("2006"),
		"%m", date.Format("01"), "%y", date.Format("06")).Replace(format)
}
