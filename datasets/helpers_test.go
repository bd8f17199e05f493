package datasets

import (
	"fmt"
	"hash/fnv"
	"regexp"
	"strings"
	"testing"
)

// wordTokenizer makes a token of each word with the space before it, digit, run of
// punctuation with the line breaks behind it, and run of white space, as byte-level
// BPE tokenizers do. Ids are hashes of the spelling, so they are the same in every
// test. With mark set it writes a "▁" in front of any text, as SentencePiece does.
type wordTokenizer struct {
	spelling map[int32]string
	mark     bool
	bos      string
}

const wordVocab = 1<<31 - 1

var (
	wordPieces = regexp.MustCompile(`<\|[a-z_]+\|>| ?[\p{L}']+|[0-9]| ?[^\s\p{L}0-9]+\n*|\n+| +`)
)

func newWords() *wordTokenizer { return &wordTokenizer{spelling: map[int32]string{}} }

func (w *wordTokenizer) encode(re *regexp.Regexp, s string) []int32 {
	if w.mark {
		s = "▁" + strings.ReplaceAll(s, " ", "▁")
		re = regexp.MustCompile(`<\|[a-z_]+\|>|▁?[\p{L}']+|[0-9]|▁|[^\s\p{L}0-9▁]+|\n`)
	}
	var ids []int32
	for _, p := range re.FindAllString(s, -1) {
		h := fnv.New32a()
		h.Write([]byte(p))
		id := int32(h.Sum32() % wordVocab)
		if old, ok := w.spelling[id]; ok && old != p {
			panic(fmt.Sprintf("the test tokenizer's hashes collide: %q and %q", old, p))
		}
		w.spelling[id] = p
		ids = append(ids, id)
	}
	return ids
}

func (w *wordTokenizer) Encode(s string) []int32 { return w.encode(wordPieces, s) }
func (w *wordTokenizer) IsSpecial(id int32) bool { return strings.HasPrefix(w.spelling[id], "<|") }
func (w *wordTokenizer) Token(id int32) string   { return w.spelling[id] }
func (w *wordTokenizer) EOS() (int32, bool)      { return 0, false }
func (w *wordTokenizer) Fingerprint() string     { return "words" }
func (w *wordTokenizer) BOS() (int32, bool) {
	if w.bos == "" {
		return 0, false
	}
	return w.Encode(w.bos)[0], true
}
func (w *wordTokenizer) Decode(ids []int32) string {
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(w.spelling[id])
	}
	if w.mark {
		return strings.TrimPrefix(strings.ReplaceAll(b.String(), "▁", " "), " ")
	}
	return b.String()
}

// chatML is the template of SmolLM2 and Qwen2, with its default system prompt.
func chatML(msgs []Message, generation bool) (string, error) {
	var b strings.Builder
	b.WriteString("<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n")
	for _, m := range msgs {
		b.WriteString("<|im_start|>" + m.Role + "\n" + strings.TrimSpace(m.Content) + "<|im_end|>\n")
	}
	if generation {
		b.WriteString("<|im_start|>assistant\n")
	}
	return b.String(), nil
}

// instChat is the template of Llama-2 and Mistral: spaces around contents.
func instChat(msgs []Message, generation bool) (string, error) {
	var b strings.Builder
	b.WriteString("<|s|>")
	for _, m := range msgs {
		if m.Role == "user" {
			b.WriteString("[INST] " + m.Content + " [/INST]")
		} else {
			b.WriteString(" " + m.Content + "<|e|>")
		}
	}
	if generation {
		b.WriteString(" ")
	}
	return b.String(), nil
}

func mustPasskeys(t *testing.T, tok Tokenizer, chat Chat, o PasskeyOptions) *Dataset {
	t.Helper()
	d, err := Passkeys(tok, chat, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Validate(wordVocab); err != nil {
		t.Fatal(err)
	}
	return d
}

func mustGrid(t *testing.T, tok Tokenizer, chat Chat, o GridOptions) *Dataset {
	t.Helper()
	d, err := NeedleGrid(tok, chat, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Validate(wordVocab); err != nil {
		t.Fatal(err)
	}
	return d
}

func spanText(tok Tokenizer, s *Sample, sp Span) string { return tok.Decode(s.Tokens[sp.Start:sp.End]) }
