package tokenizer

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"unicode/utf8"
)

// Vocabulary is a tokenizer as the metadata of a GGUF describes it. Ids are positions in Tokens; -1 stands for none.
type Vocabulary struct {
	Model         string // tokenizer.ggml.model: "gpt2" (byte-level BPE) or "llama" (SentencePiece-style BPE)
	Pre           string // tokenizer.ggml.pre: how gpt2 text is cut into words; see PreTokenizers
	Tokens        []string
	Scores        []float32 // llama: higher scores are merged first
	Types         []int64   // 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
	Merges        []string  // gpt2: "left right", in order
	BOS, EOS, UNK int32
	// Whether BOS and EOS are put around a text and a space before it; nil where the file does not say: then BOS and
	// the space are for llama, and BOS for the gpt2 kinds that are trained with it, as llama.cpp has it.
	AddBOS, AddEOS, AddSpacePrefix *bool
	ChatTemplate                   string
}

// Token types of GGUF.
const (
	typeNormal      = 1
	typeUnknown     = 2
	typeControl     = 3
	typeUserDefined = 4
	typeUnused      = 5
)

// splitting is what a name in tokenizer.ggml.pre stands for.
type splitting struct {
	names        []string
	pattern      string // of a Split before the bytes are mapped; "" where ByteLevel itself cuts
	digits       bool   // each digit is a word
	nfc          bool
	ignoreMerges bool
	addBOS       bool
	defaults     bool // llama.cpp's own patterns for files that name none
}

// splittings lists the known names. Names of one entry differ in llama.cpp by nothing that matters here.
func splittings() []splitting {
	return []splitting{
		{names: []string{"smollm"}, digits: true},
		{names: []string{"gpt-2", "phi-2"}},
		{names: []string{"llama-bpe", "llama3", "llama-v3", "falcon3"}, pattern: llama3Pattern, ignoreMerges: true, addBOS: true},
		{names: []string{"qwen2", "deepseek-r1-qwen"}, pattern: qwen2Pattern, nfc: true},
		{names: []string{"tekken"}, pattern: tekkenPattern, ignoreMerges: true, addBOS: true},
		{names: []string{"default", ""}, defaults: true},
	}
}

// PreTokenizers lists the values of tokenizer.ggml.pre that FromVocabulary knows; a file without one is read as default.
func PreTokenizers() []string {
	var out []string
	for _, s := range splittings() {
		for _, name := range s.names {
			if name != "" {
				out = append(out, name)
			}
		}
	}
	return out
}

// components gives the parts of a tokenizer.json that cut text in the same way.
func (s splitting) components() (pre, normalizer *component) {
	no, yes := false, true
	bytes := component{Type: "ByteLevel", AddPrefixSpace: &no, UseRegex: &no}
	split := func(p string) component {
		return component{Type: "Split", Behavior: "Isolated", Pattern: pattern{Regex: p}}
	}
	var steps []component
	switch {
	case s.defaults:
		steps = []component{split(`[\p{P}\$\+<=>\^~\|]+`), split(gpt2Pattern), split(`\p{N}+`), split(`[0-9][0-9][0-9]`)}
	case s.pattern != "":
		steps = []component{split(s.pattern)}
	case s.digits:
		steps = []component{{Type: "Digits", Individual: true}}
		bytes.UseRegex = &yes
	default:
		bytes.UseRegex = &yes
	}
	if s.nfc {
		normalizer = &component{Type: "NFC"}
	}
	return &component{Type: "Sequence", PreTokenizers: append(steps, bytes)}, normalizer
}

// FromVocabulary makes a tokenizer of a GGUF's vocabulary. It keeps no reference to v.
func FromVocabulary(v Vocabulary) (*Tokenizer, error) {
	for name, id := range map[string]*int32{"BOS": &v.BOS, "EOS": &v.EOS, "UNK": &v.UNK} {
		if *id < 0 {
			*id = -1
		}
		if int(*id) >= len(v.Tokens) {
			return nil, fmt.Errorf("%w: %s is token %d of %d", ErrCorrupt, name, *id, len(v.Tokens))
		}
	}
	if len(v.Tokens) > maxVocab {
		return nil, fmt.Errorf("%w: %d tokens", ErrCorrupt, len(v.Tokens))
	}
	if len(v.Types) != 0 && len(v.Types) != len(v.Tokens) {
		return nil, fmt.Errorf("%w: %d token types for %d tokens", ErrCorrupt, len(v.Types), len(v.Tokens))
	}
	t := &Tokenizer{unk: -1, bos: v.BOS, eos: v.EOS, template: v.ChatTemplate}
	vocab := make(map[string]int32, len(v.Tokens))
	for id, text := range v.Tokens {
		kind := int64(typeNormal)
		if len(v.Types) > 0 {
			kind = v.Types[id]
		}
		if text == "" || kind == typeUnused && strings.HasPrefix(text, "[PAD") {
			continue // converters pad vocabularies with these; no text has them
		}
		if old, dup := vocab[text]; dup {
			return nil, fmt.Errorf("%w: tokens %d and %d are both %q", ErrCorrupt, old, id, text)
		}
		vocab[text] = int32(id)
		switch kind {
		case typeControl, typeUnknown:
			t.added = append(t.added, addedToken{ID: int32(id), Content: text, Special: true})
		case typeUserDefined:
			t.added = append(t.added, addedToken{ID: int32(id), Content: text})
		}
	}
	if err := t.setVocab(vocab); err != nil {
		return nil, err
	}
	t.tokens = append(t.tokens, make([]string, len(v.Tokens)-len(t.tokens))...)
	var addBOS bool
	var err error
	switch v.Model {
	case "gpt2":
		addBOS, err = t.byteLevelOf(v)
	case "llama":
		addBOS, err = true, t.sentencePieceOf(v)
	default:
		err = fmt.Errorf("%w: tokenizer.ggml.model %q (gpt2 and llama are known)", ErrUnsupported, v.Model)
	}
	if err != nil {
		return nil, err
	}
	if yes(v.AddBOS, addBOS) && v.BOS >= 0 {
		t.prefix = []int32{v.BOS}
	}
	if yes(v.AddEOS, false) && v.EOS >= 0 {
		t.suffix = []int32{v.EOS}
	}
	return t, t.finish()
}

// byteLevelOf sets up a gpt2 vocabulary and says whether texts begin with BOS by default.
func (t *Tokenizer) byteLevelOf(v Vocabulary) (addBOS bool, err error) {
	all := splittings()
	i := slices.IndexFunc(all, func(s splitting) bool { return slices.Contains(s.names, v.Pre) })
	if i < 0 {
		return false, fmt.Errorf("%w: tokenizer.ggml.pre %q (%s are known)", ErrUnsupported, v.Pre, strings.Join(PreTokenizers(), ", "))
	}
	t.preTokenizer, t.normalizer = all[i].components()
	t.ignoreMerges = all[i].ignoreMerges
	t.decoder = &component{Type: "ByteLevel"}
	merges := make([][2]string, len(v.Merges))
	for i, m := range v.Merges {
		left, right, ok := strings.Cut(m, " ")
		if !ok {
			return false, fmt.Errorf("%w: merge %d is %q, not a pair", ErrCorrupt, i, m)
		}
		merges[i] = [2]string{left, right}
	}
	return all[i].addBOS, t.setMerges(merges)
}

// sentencePieceOf sets up a llama vocabulary.
func (t *Tokenizer) sentencePieceOf(v Vocabulary) error {
	if len(v.Scores) != len(v.Tokens) {
		return fmt.Errorf("%w: %d scores for %d tokens", ErrCorrupt, len(v.Scores), len(v.Tokens))
	}
	for id, s := range v.Scores {
		if s != s {
			return fmt.Errorf("%w: the score of token %d is not a number", ErrCorrupt, id)
		}
	}
	t.unk, t.byteFallback, t.fuseUnk = v.UNK, true, true
	t.rules = scoredRules(v, t.ids)
	steps := []component{{Type: "Replace", Pattern: pattern{String: " "}, Content: spaceMark}}
	decode := []component{{Type: "Replace", Pattern: pattern{String: spaceMark}, Content: " "}, {Type: "ByteFallback"}, {Type: "Fuse"}}
	if yes(v.AddSpacePrefix, true) {
		steps = append([]component{{Type: "Prepend", Prepend: spaceMark}}, steps...)
		decode = append(decode, component{Type: "Strip", Content: " ", Start: 1})
	}
	t.normalizer = &component{Type: "Sequence", Normalizers: steps}
	t.decoder = &component{Type: "Sequence", Decoders: decode}
	return nil
}

// scoredRules lists the pairs of tokens that make a token, in place of the merges that SentencePiece does without: it
// joins whatever pair makes the token with the best score, the leftmost where scores are equal (Kudo & Richardson 2018,
// section 3.1). Equal scores have equal ranks.
func scoredRules(v Vocabulary, vocab map[string]int32) map[pair]rule {
	normal := make([]int32, 0, len(v.Tokens))
	for id := range v.Tokens {
		if v.Tokens[id] != "" && (len(v.Types) == 0 || v.Types[id] == typeNormal) {
			normal = append(normal, int32(id))
		}
	}
	sort.SliceStable(normal, func(i, j int) bool { return v.Scores[normal[i]] > v.Scores[normal[j]] })
	rules := make(map[pair]rule, 2*len(normal))
	rank := int32(0)
	for n, id := range normal {
		if n > 0 && v.Scores[id] != v.Scores[normal[n-1]] {
			rank++
		}
		text := v.Tokens[id]
		for i := range text {
			if i == 0 || !utf8.RuneStart(text[i]) {
				continue
			}
			left, ok1 := vocab[text[:i]]
			right, ok2 := vocab[text[i:]]
			if ok1 && ok2 {
				rules[pair{left, right}] = rule{rank, id}
			}
		}
	}
	return rules
}
