package tokenizer

import (
	"os"
	"testing"

	"github.com/kvprofile/kvprofile/internal/gguf"
)

// readVocabulary reads what this test needs of a GGUF's metadata; internal/model reads all of it.
func readVocabulary(t *testing.T, path string) Vocabulary {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := gguf.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	v := Vocabulary{UNK: -1}
	v.Model, _ = f.Metadata["tokenizer.ggml.model"].(string)
	v.Pre, _ = f.Metadata["tokenizer.ggml.pre"].(string)
	v.Tokens, _ = f.Metadata["tokenizer.ggml.tokens"].([]string)
	v.Types, _ = f.Metadata["tokenizer.ggml.token_type"].([]int64)
	v.Merges, _ = f.Metadata["tokenizer.ggml.merges"].([]string)
	v.ChatTemplate, _ = f.Metadata["tokenizer.chat_template"].(string)
	bos, _ := f.Metadata["tokenizer.ggml.bos_token_id"].(uint64)
	eos, _ := f.Metadata["tokenizer.ggml.eos_token_id"].(uint64)
	v.BOS, v.EOS = int32(bos), int32(eos)
	return v
}

// SmolLM2's GGUF, compared with the official library's tokenizer of the same vocabulary and merges.
func TestSmolLM2(t *testing.T) {
	path := os.Getenv("KVPROFILE_TEST_MODEL")
	if path == "" {
		t.Skip("set KVPROFILE_TEST_MODEL to the path of SmolLM2-135M-Instruct.Q4_1.gguf")
	}
	v := readVocabulary(t, path)
	tok, err := FromVocabulary(v)
	if err != nil {
		t.Fatal(err)
	}
	var r recorded
	read(t, "testdata/smollm2.cases.json.gz", &r)
	check(t, tok, r)
	if tok.VocabSize() != 49152 {
		t.Errorf("%d tokens, want 49152", tok.VocabSize())
	}
	if tok.ChatTemplate() == "" {
		t.Error("no chat template")
	}
	if id, ok := tok.EOS(); !ok || tok.Token(id) != "<|im_end|>" {
		t.Errorf("EOS is token %d, %q", id, tok.Token(id))
	}

	// The classes, on what a chat is made of.
	want := map[string]string{"<|im_start|>": "special", "<|im_end|>": "special", ".": "punctuation", ",": "punctuation", "!": "punctuation",
		"?": "punctuation", " (": "punctuation", "\"": "punctuation", "user": "", "\n": "", " the": "", "1": ""}
	for text, class := range want {
		ids := tok.Encode(text)
		if len(ids) != 1 {
			t.Errorf("%q is %d tokens", text, len(ids))
			continue
		}
		got := ""
		if tok.IsSpecial(ids[0]) {
			got += "special"
		}
		if tok.IsPunctuation(ids[0]) {
			got += "punctuation"
		}
		if got != class {
			t.Errorf("%q is of class %q, want %q", text, got, class)
		}
	}
	special := 0
	for id := range tok.VocabSize() {
		if tok.IsSpecial(int32(id)) {
			special++
		}
	}
	if special != 17 {
		t.Errorf("%d special tokens, want 17", special)
	}
}
