package tokenizer

import (
	"os"
	"testing"

	parser "github.com/gpustack/gguf-parser-go"
)

// readVocabulary reads the metadata of a GGUF with a parser that is not this project's. It trims strings, which the
// printable letters of byte-level tokens survive.
func readVocabulary(t *testing.T, path string) Vocabulary {
	t.Helper()
	f, err := parser.ParseGGUFFile(path, parser.UseMMap())
	if err != nil {
		t.Fatal(err)
	}
	get := func(key string) (parser.GGUFMetadataKV, bool) { return f.Header.MetadataKV.Get("tokenizer." + key) }
	text := func(key string) string {
		if kv, ok := get(key); ok {
			return kv.ValueString()
		}
		return ""
	}
	id := func(key string) int32 {
		if kv, ok := get("ggml." + key); ok {
			return int32(kv.ValueUint32())
		}
		return -1
	}
	flag := func(key string) *bool {
		if kv, ok := get("ggml." + key); ok {
			b := kv.ValueBool()
			return &b
		}
		return nil
	}
	v := Vocabulary{Model: text("ggml.model"), Pre: text("ggml.pre"), ChatTemplate: text("chat_template"),
		BOS: id("bos_token_id"), EOS: id("eos_token_id"), UNK: id("unknown_token_id"),
		AddBOS: flag("add_bos_token"), AddEOS: flag("add_eos_token"), AddSpacePrefix: flag("add_space_prefix")}
	if kv, ok := get("ggml.tokens"); ok {
		v.Tokens = kv.ValueArray().ValuesString()
	}
	if kv, ok := get("ggml.merges"); ok {
		v.Merges = kv.ValueArray().ValuesString()
	}
	if kv, ok := get("ggml.token_type"); ok {
		for _, n := range kv.ValueArray().ValuesInt32() {
			v.Types = append(v.Types, int64(n))
		}
	}
	if kv, ok := get("ggml.scores"); ok {
		v.Scores = kv.ValueArray().ValuesFloat32()
	}
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
