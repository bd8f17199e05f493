package datasets_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/chat"
	"github.com/kvprofile/kvprofile/internal/model"
)

// TestRealTokenizer makes datasets with the tokenizer and chat template of
// SmolLM2-135M-Instruct.
func TestRealTokenizer(t *testing.T) {
	path := os.Getenv("KVPROFILE_TEST_MODEL")
	if path == "" {
		t.Skip("set KVPROFILE_TEST_MODEL to the GGUF of SmolLM2-135M-Instruct to run this test")
	}
	m, err := model.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	tok := m.Tokenizer
	render := func(msgs []datasets.Message, generate bool) (string, error) {
		var out []chat.Message
		for _, m := range msgs {
			out = append(out, chat.Message(m))
		}
		return m.Chat.Render(out, generate)
	}
	o := datasets.RecipeCPU()
	o.Count = 9
	for name, tmpl := range map[string]datasets.Chat{"chat": render, "plain": nil} {
		d, err := datasets.Passkeys(tok, tmpl, o)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Validate(tok.VocabSize()); err != nil {
			t.Fatal(err)
		}
		if d.Meta.Tokenizer != tok.Fingerprint() {
			t.Error("the fingerprint is not the tokenizer's")
		}
		var lengths []int
		for i := range d.Samples {
			s := &d.Samples[i]
			lengths = append(lengths, len(s.Tokens))
			for k, sp := range s.Find(datasets.SpanAnswer) {
				if got := strings.TrimSpace(tok.Decode(s.Tokens[sp.Start:sp.End])); got != s.Expected[k] {
					t.Errorf("%s: answer is %q, want %q", name, got, s.Expected[k])
				}
			}
			for k, sp := range s.Find(datasets.SpanNeedle) {
				if got := tok.Decode(s.Tokens[sp.Start:sp.End]); !strings.Contains(got, s.Expected[k]+".") {
					t.Errorf("%s: needle %d is %q", name, k, got)
				}
			}
			text := tok.Decode(s.Tokens)
			if first := "<|im_start|>system\n"; (name == "chat") != strings.HasPrefix(text, first) {
				t.Errorf("%s: text begins with %q", name, text[:40])
			}
			// This tokenizer merges nothing across the borders of the pieces.
			if again := tok.Encode(text); !slices.Equal(again, s.Tokens) {
				t.Errorf("%s: sample %d has other tokens than its text encoded at once", name, i)
			}
		}
		for _, task := range datasets.Tasks() {
			for _, value := range []datasets.Value{"", datasets.ValueWord} {
				if task == datasets.TaskText && value != "" {
					continue
				}
				realTask(t, m, tmpl, datasets.TaskOptions{Task: task, Value: value, Lengths: []int{600, 1001, 1503}, Count: 9})
			}
		}
		slices.Sort(lengths)
		if !slices.Equal(lengths, datasets.Linspace(1024, 2048, 9)) {
			t.Errorf("%s: lengths %v", name, lengths)
		}
		file := filepath.Join(t.TempDir(), "d.parquet")
		if err := datasets.Save(file, d); err != nil {
			t.Fatal(err)
		}
		if got, err := datasets.Load(file); err != nil || !reflect.DeepEqual(got, d) {
			t.Errorf("%s: read back something else (%v)", name, err)
		}
	}
}

// realTask checks a task of an evaluation with a real tokenizer.
func realTask(t *testing.T, m *model.Model, tmpl datasets.Chat, o datasets.TaskOptions) {
	t.Helper()
	tok := m.Tokenizer
	d, err := datasets.Build(tok, tmpl, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Validate(tok.VocabSize()); err != nil {
		t.Fatal(err)
	}
	for i := range d.Samples {
		s := &d.Samples[i]
		if want := o.Lengths[i%len(o.Lengths)]; len(s.Tokens) != want {
			t.Errorf("%s: %d tokens, want %d", o.Task, len(s.Tokens), want)
		}
		text := tok.Decode(s.Tokens)
		if again := tok.Encode(text); !slices.Equal(again, s.Tokens) {
			// Text may be cut off within a word.
			if n := len(again) - 4; o.Task != datasets.TaskText || !slices.Equal(again[:n], s.Tokens[:n]) {
				t.Errorf("%s: sample %d has other tokens than its text encoded at once: %q", o.Task, i, text)
			}
		}
		_, gold, expected := s.Quiz()
		answer := strings.TrimSpace(tok.Decode(gold))
		for k, e := range expected {
			needle := s.Find(datasets.SpanNeedle)[k]
			if !strings.Contains(answer, e) || !strings.Contains(tok.Decode(s.Tokens[needle.Start:needle.End]), e) {
				t.Errorf("%s: expected %q, needle %d, answer %q", o.Task, e, k, answer)
			}
		}
		if o.Task == datasets.TaskUUID {
			object := text[strings.Index(text, "{"):strings.Index(text, "\n\nThe object ends here")]
			var pairs map[string]any
			if err := json.Unmarshal([]byte(object), &pairs); err != nil {
				t.Errorf("%v in %s", err, object)
			}
		}
	}
}
