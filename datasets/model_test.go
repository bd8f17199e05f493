package datasets_test

import (
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
