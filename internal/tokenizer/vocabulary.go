package tokenizer

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"sort"
	"strings"
)

// Vocabulary is a tokenizer as the metadata of a GGUF describes it. Ids are positions in Tokens; -1 stands for none.
type Vocabulary struct {
	Model          string // tokenizer.ggml.model: "gpt2" (byte-level BPE) or "llama" (SentencePiece-style BPE)
	Pre            string // tokenizer.ggml.pre: how gpt2 text is cut into words
	Tokens         []string
	Scores         []float32 // llama: higher scores are merged first
	Types          []int64   // 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
	Merges         []string  // gpt2: "left right", in order
	BOS, EOS, UNK  int32
	AddBOS, AddEOS bool
	AddSpacePrefix bool
	ChatTemplate   string
}

// Token types of GGUF.
const (
	typeControl     = 3
	typeUserDefined = 4
)

// Patterns that cut text into words, by GGUF's names for them. They stand in llama.cpp's conversion script as the
// names of tokenizer.json files whose pre-tokenizers are these.
const (
	llama3Pattern = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	qwen2Pattern  = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

// preTokenizers gives the pre-tokenizer and normalizer behind a GGUF name.
func preTokenizers(name string) (pre, normalizer *component, ignoreMerges bool, err error) {
	no := false
	bytes := component{Type: "ByteLevel", AddPrefixSpace: &no, UseRegex: &no}
	sequence := func(first component, rest ...component) *component {
		return &component{Type: "Sequence", PreTokenizers: append([]component{first}, rest...)}
	}
	split := func(p string) component {
		return component{Type: "Split", Behavior: "Isolated", Pattern: pattern{Regex: p}}
	}
	switch name {
	case "smollm":
		return sequence(component{Type: "Digits", Individual: true}, component{Type: "ByteLevel", AddPrefixSpace: &no}), nil, false, nil
	case "gpt-2":
		return &component{Type: "ByteLevel", AddPrefixSpace: &no}, nil, false, nil
	case "llama-bpe", "llama3", "llama-v3":
		return sequence(split(llama3Pattern), bytes), nil, true, nil
	case "qwen2":
		return sequence(split(qwen2Pattern), bytes), &component{Type: "NFC"}, false, nil
	}
	return nil, nil, false, fmt.Errorf("%w: tokenizer.ggml.pre %q (smollm, gpt-2, llama-bpe and qwen2 are known)", ErrUnsupported, name)
}

// FromVocabulary makes a tokenizer of a GGUF's vocabulary.
func FromVocabulary(v Vocabulary) (*Tokenizer, error) {
	t := &Tokenizer{unk: v.UNK, bos: v.BOS, eos: v.EOS, template: v.ChatTemplate}
	for _, id := range []int32{v.BOS, v.EOS, v.UNK} {
		if int(id) >= len(v.Tokens) {
			return nil, fmt.Errorf("%w: special id %d in a vocabulary of %d", ErrCorrupt, id, len(v.Tokens))
		}
	}
	if len(v.Types) != 0 && len(v.Types) != len(v.Tokens) {
		return nil, fmt.Errorf("%w: %d token types for %d tokens", ErrCorrupt, len(v.Types), len(v.Tokens))
	}
	vocab := make(map[string]int32, len(v.Tokens))
	for id, text := range v.Tokens {
		if old, dup := vocab[text]; dup {
			return nil, fmt.Errorf("%w: tokens %d and %d are both %q", ErrCorrupt, old, id, text)
		}
		vocab[text] = int32(id)
		if id < len(v.Types) && (v.Types[id] == typeControl || v.Types[id] == typeUserDefined) {
			t.added = append(t.added, addedToken{ID: int32(id), Content: text, Special: v.Types[id] == typeControl})
		}
	}
	if err := t.setVocab(vocab); err != nil {
		return nil, err
	}
	var merges [][2]string
	switch v.Model {
	case "gpt2":
		var err error
		if t.preTokenizer, t.normalizer, t.ignoreMerges, err = preTokenizers(v.Pre); err != nil {
			return nil, err
		}
		t.decoder = &component{Type: "ByteLevel"}
		for _, m := range v.Merges {
			left, right, ok := strings.Cut(m, " ")
			if !ok {
				return nil, fmt.Errorf("%w: merge %q", ErrCorrupt, m)
			}
			merges = append(merges, [2]string{left, right})
		}
	case "llama":
		if len(v.Scores) != len(v.Tokens) {
			return nil, fmt.Errorf("%w: %d scores for %d tokens", ErrCorrupt, len(v.Scores), len(v.Tokens))
		}
		merges = scoredMerges(v, vocab)
		t.byteFallback, t.fuseUnk = true, true
		steps := []component{{Type: "Replace", Pattern: pattern{String: " "}, Content: "▁"}}
		decode := []component{{Type: "Replace", Pattern: pattern{String: "▁"}, Content: " "}, {Type: "ByteFallback"}, {Type: "Fuse"}}
		if v.AddSpacePrefix {
			steps = append([]component{{Type: "Prepend", Prepend: "▁"}}, steps...)
			decode = append(decode, component{Type: "Strip", Content: " ", Start: 1})
		}
		t.normalizer = &component{Type: "Sequence", Normalizers: steps}
		t.decoder = &component{Type: "Sequence", Decoders: decode}
	default:
		return nil, fmt.Errorf("%w: tokenizer.ggml.model %q (gpt2 and llama are known)", ErrUnsupported, v.Model)
	}
	if err := t.setMerges(merges); err != nil {
		return nil, err
	}
	if v.AddBOS && v.BOS >= 0 {
		t.prefix = []int32{v.BOS}
	}
	if v.AddEOS && v.EOS >= 0 {
		t.suffix = []int32{v.EOS}
	}
	return t, t.finish()
}

// scoredMerges lists the pairs of tokens that make a token, the best score first: SentencePiece merges whatever pair
// gives the best token, and so has no list. This is how Hugging Face converts such a vocabulary.
func scoredMerges(v Vocabulary, vocab map[string]int32) [][2]string {
	type scored struct {
		left, right string
		score       float32
		l, r        int32
	}
	var all []scored
	for id, text := range v.Tokens {
		if id < len(v.Types) && v.Types[id] != 1 {
			continue
		}
		for i := range text {
			if i == 0 {
				continue
			}
			l, ok1 := vocab[text[:i]]
			r, ok2 := vocab[text[i:]]
			if ok1 && ok2 {
				all = append(all, scored{text[:i], text[i:], v.Scores[id], l, r})
			}
		}
	}
	sort.SliceStable(all, func(i, j int) bool {
		a, b := all[i], all[j]
		if a.score != b.score {
			return a.score > b.score
		}
		if a.l != b.l {
			return a.l < b.l
		}
		return a.r < b.r
	})
	out := make([][2]string, len(all))
	for i, m := range all {
		out[i] = [2]string{m.left, m.right}
	}
	return out
}

// Fingerprint is the SHA-256, in hex, of what the tokenizer does: the text of every id, the merges in order, and the
// ids of BOS and EOS. A GGUF and the folder that it was made from have the same, as long as neither pads the
// vocabulary: how text is normalised and cut into words is spelt differently by the two formats and is left out.
func (t *Tokenizer) Fingerprint() string {
	h := sha256.New()
	number := func(n int32) {
		var b [4]byte
		binary.LittleEndian.PutUint32(b[:], uint32(n))
		h.Write(b[:])
	}
	text := func(s string) {
		number(int32(len(s)))
		h.Write([]byte(s))
	}
	number(int32(len(t.tokens)))
	for _, s := range t.tokens {
		text(s)
	}
	merges := make([]pair, 0, len(t.rules))
	for p := range t.rules {
		merges = append(merges, p)
	}
	sort.Slice(merges, func(i, j int) bool { return t.rules[merges[i]].rank < t.rules[merges[j]].rank })
	for _, p := range merges {
		number(p.left)
		number(p.right)
	}
	number(t.bos)
	number(t.eos)
	return hex.EncodeToString(h.Sum(nil))
}
