// Package tokenizer encodes text with the byte-pair tokenizers of Llama, Mistral, Qwen and SmolLM models, from a
// tokenizer.json or from the vocabulary in a GGUF. Ids equal those of the official tokenizers library.
package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// ErrUnsupported is wrapped by errors about tokenizers of a kind that is not known here, ErrCorrupt by errors about
// files that contradict themselves.
var (
	ErrUnsupported = errors.New("unsupported tokenizer")
	ErrCorrupt     = errors.New("corrupt tokenizer")
)

// Tokenizer encodes and decodes text. It is safe for concurrent use.
type Tokenizer struct {
	tokens []string         // by id, as the vocabulary spells them; "" for unused ids
	ids    map[string]int32 // without added tokens
	rules  map[pair]rule
	added  []addedToken
	added0 matcher // added tokens found in raw text
	added1 matcher // and in normalised text

	normalizer   *component
	preTokenizer *component
	decoder      *component
	prefix       []int32 // put before and after by EncodeWithSpecial
	suffix       []int32

	byteLevel    bool
	byteFallback bool
	ignoreMerges bool
	fuseUnk      bool
	unk          int32
	bos, eos     int32
	bytes        [256]int32 // ids of <0xNN>, or -1

	// cut is a mark, such as the one that stands for a space, that no token has behind anything but itself, "" when
	// there is none: words can be cut before it, and then remembered, without a change in what is merged.
	cut string

	special  map[int32]bool
	template string
	print    func() string // the fingerprint, computed once

	mu    sync.RWMutex
	cache map[string][]int32 // by the word's text
}

type addedToken struct {
	ID         int32  `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// maxVocab bounds ids: a larger one is a defect of the file, and would be allocated.
const maxVocab = 1 << 21

// FromJSON reads a tokenizer.json, and a tokenizer_config.json for the names of BOS and EOS and the chat template;
// the second may be nil.
func FromJSON(tokenizerJSON, configJSON []byte) (*Tokenizer, error) {
	var j struct {
		AddedTokens   []addedToken    `json:"added_tokens"`
		Normalizer    *component      `json:"normalizer"`
		PreTokenizer  *component      `json:"pre_tokenizer"`
		PostProcessor *component      `json:"post_processor"`
		Decoder       *component      `json:"decoder"`
		Model         json.RawMessage `json:"model"`
	}
	if err := json.Unmarshal(tokenizerJSON, &j); err != nil {
		return nil, fmt.Errorf("%w: tokenizer.json: %w", ErrCorrupt, err)
	}
	// The kind first: the vocabulary of a Unigram model has another shape, and would give an unclear error.
	var head struct {
		Type string `json:"type"`
	}
	if len(j.Model) == 0 {
		return nil, fmt.Errorf("%w: tokenizer.json: no model", ErrCorrupt)
	}
	if err := json.Unmarshal(j.Model, &head); err != nil {
		return nil, fmt.Errorf("%w: tokenizer.json: model: %w", ErrCorrupt, err)
	}
	if head.Type != "BPE" && head.Type != "" {
		return nil, fmt.Errorf("%w: model %q (BPE is known)", ErrUnsupported, head.Type)
	}
	var m struct {
		Vocab         map[string]int32 `json:"vocab"`
		Merges        json.RawMessage  `json:"merges"`
		ByteFallback  bool             `json:"byte_fallback"`
		IgnoreMerges  bool             `json:"ignore_merges"`
		FuseUnk       bool             `json:"fuse_unk"`
		Unk           *string          `json:"unk_token"`
		Dropout       *float64         `json:"dropout"`
		SubwordPrefix *string          `json:"continuing_subword_prefix"`
		WordSuffix    *string          `json:"end_of_word_suffix"`
	}
	if err := json.Unmarshal(j.Model, &m); err != nil {
		return nil, fmt.Errorf("%w: tokenizer.json: model: %w", ErrCorrupt, err)
	}
	if m.Dropout != nil && *m.Dropout != 0 {
		return nil, fmt.Errorf("%w: dropout", ErrUnsupported)
	}
	if p := m.SubwordPrefix; p != nil && *p != "" {
		return nil, fmt.Errorf("%w: continuing_subword_prefix", ErrUnsupported)
	}
	if p := m.WordSuffix; p != nil && *p != "" {
		return nil, fmt.Errorf("%w: end_of_word_suffix", ErrUnsupported)
	}
	t := &Tokenizer{normalizer: j.Normalizer, preTokenizer: j.PreTokenizer, decoder: j.Decoder, added: j.AddedTokens,
		byteFallback: m.ByteFallback, ignoreMerges: m.IgnoreMerges, fuseUnk: m.FuseUnk, unk: -1, bos: -1, eos: -1}
	if err := t.setVocab(m.Vocab); err != nil {
		return nil, err
	}
	if m.Unk != nil {
		if id, ok := t.ids[*m.Unk]; ok {
			t.unk = id
		}
	}
	merges, err := readMerges(m.Merges)
	if err != nil {
		return nil, err
	}
	if err := t.setMerges(merges); err != nil {
		return nil, err
	}
	if j.PostProcessor != nil {
		if err := t.setProcessor(j.PostProcessor); err != nil {
			return nil, err
		}
	}
	if configJSON != nil {
		if err := t.readConfig(configJSON); err != nil {
			return nil, err
		}
	}
	return t, t.finish()
}

// readMerges reads merges, written as pairs or, in older files, as strings with a space between.
func readMerges(raw json.RawMessage) ([][2]string, error) {
	if len(raw) == 0 {
		return nil, nil
	}
	var pairs [][]string
	if err := json.Unmarshal(raw, &pairs); err != nil {
		var lines []string
		if json.Unmarshal(raw, &lines) != nil {
			return nil, fmt.Errorf("%w: merges: %w", ErrCorrupt, err)
		}
		pairs = make([][]string, len(lines))
		for i, s := range lines {
			pairs[i] = strings.SplitN(s, " ", 2)
		}
	}
	out := make([][2]string, len(pairs))
	for i, p := range pairs {
		if len(p) != 2 {
			return nil, fmt.Errorf("%w: merge %d is %q, not a pair", ErrCorrupt, i, p)
		}
		out[i] = [2]string{p[0], p[1]}
	}
	return out, nil
}

func (t *Tokenizer) setVocab(vocab map[string]int32) error {
	size := int32(0)
	for text, id := range vocab {
		if id < 0 || id >= maxVocab {
			return fmt.Errorf("%w: token %q has id %d", ErrCorrupt, text, id)
		}
		size = max(size, id+1)
	}
	for _, a := range t.added {
		if a.ID < 0 || a.ID >= maxVocab {
			return fmt.Errorf("%w: token %q has id %d", ErrCorrupt, a.Content, a.ID)
		}
		size = max(size, a.ID+1)
	}
	t.tokens = make([]string, size)
	t.ids = vocab
	for text, id := range vocab {
		if t.tokens[id] != "" {
			return fmt.Errorf("%w: tokens %q and %q both have id %d", ErrCorrupt, text, t.tokens[id], id)
		}
		t.tokens[id] = text
	}
	for _, a := range t.added {
		t.tokens[a.ID] = a.Content
	}
	return nil
}

func (t *Tokenizer) setMerges(merges [][2]string) error {
	t.rules = make(map[pair]rule, len(merges))
	for rank, m := range merges {
		left, ok1 := t.ids[m[0]]
		right, ok2 := t.ids[m[1]]
		id, ok3 := t.ids[m[0]+m[1]]
		if !ok1 || !ok2 || !ok3 {
			return fmt.Errorf("%w: merge %d of %q and %q is not in the vocabulary", ErrCorrupt, rank, m[0], m[1])
		}
		// A repeated pair keeps its last rank, as in the reference, where the rules are collected into a map.
		t.rules[pair{left, right}] = rule{int32(rank), id}
	}
	return nil
}

func (t *Tokenizer) setProcessor(c *component) error {
	switch c.Type {
	case "ByteLevel": // changes offsets only
	case "Sequence":
		for i := range c.Processors {
			if err := t.setProcessor(&c.Processors[i]); err != nil {
				return err
			}
		}
	case "TemplateProcessing":
		list := &t.prefix
		for _, p := range c.Single {
			if p.Sequence != nil {
				list = &t.suffix
				continue
			}
			if p.SpecialToken != nil {
				*list = append(*list, c.SpecialTokens[p.SpecialToken.ID].IDs...)
			}
		}
	default:
		return fmt.Errorf("%w: post-processor %q", ErrUnsupported, c.Type)
	}
	return nil
}

// readConfig takes BOS, EOS and the chat template from a tokenizer_config.json.
func (t *Tokenizer) readConfig(data []byte) error {
	var j struct {
		BOS      json.RawMessage `json:"bos_token"`
		EOS      json.RawMessage `json:"eos_token"`
		Template json.RawMessage `json:"chat_template"`
	}
	if err := json.Unmarshal(data, &j); err != nil {
		return fmt.Errorf("%w: tokenizer_config.json: %w", ErrCorrupt, err)
	}
	id := func(raw json.RawMessage) int32 {
		var text string
		if json.Unmarshal(raw, &text) != nil {
			var object struct{ Content string }
			if json.Unmarshal(raw, &object) != nil {
				return -1
			}
			text = object.Content
		}
		for _, a := range t.added {
			if a.Content == text {
				return a.ID
			}
		}
		if id, ok := t.ids[text]; ok && text != "" {
			return id
		}
		return -1
	}
	t.bos, t.eos = id(j.BOS), id(j.EOS)
	if json.Unmarshal(j.Template, &t.template) != nil {
		var named []struct{ Name, Template string }
		if json.Unmarshal(j.Template, &named) == nil {
			for _, n := range named {
				if n.Name == "default" {
					t.template = n.Template
				}
			}
		}
	}
	return nil
}

// finish compiles what the constructors have gathered.
func (t *Tokenizer) finish() error {
	if t.normalizer != nil {
		if err := t.normalizer.compileNormalizer(); err != nil {
			return err
		}
	}
	if t.preTokenizer != nil {
		if err := t.preTokenizer.compilePreTokenizer(); err != nil {
			return err
		}
	}
	if t.decoder != nil {
		if err := t.decoder.compileDecoder(); err != nil {
			return err
		}
	}
	if err := t.checkGrowth(); err != nil {
		return err
	}
	t.byteLevel = t.preTokenizer.has("ByteLevel")
	t.cache = map[string][]int32{}
	t.print = sync.OnceValue(t.fingerprint)
	t.special = map[int32]bool{}
	for i := range t.bytes {
		t.bytes[i] = -1
		if id, ok := t.ids[fmt.Sprintf("<0x%02X>", i)]; ok {
			t.bytes[i] = id
		}
	}
	for i := range t.added {
		a := &t.added[i]
		if a.Special || looksSpecial(a.Content) {
			t.special[a.ID] = true
		}
		if a.Normalized {
			t.added1.insert(t.normalizer.normalize(a.Content), a)
		} else {
			t.added0.insert(a.Content, a)
		}
	}
	for _, list := range [][]int32{t.prefix, t.suffix} {
		for _, id := range list {
			if !t.has(id) {
				return fmt.Errorf("%w: the post-processor adds id %d, which is not in the vocabulary", ErrCorrupt, id)
			}
		}
	}
	t.findCut()
	for _, id := range []int32{t.bos, t.eos} {
		if id >= 0 {
			t.special[id] = true
		}
	}
	return nil
}

// looksSpecial reports whether an added token is spelt like those that steer a chat. Converters to GGUF go by this too,
// where tokenizer.json files are not always careful with the flag.
func looksSpecial(s string) bool {
	return strings.HasPrefix(s, "<|") && strings.HasSuffix(s, "|>") || strings.HasPrefix(s, "<｜") && strings.HasSuffix(s, "｜>")
}

// spaceMark is what SentencePiece writes for a space.
const spaceMark = "▁"

// findCut looks for a mark to cut words at.
func (t *Tokenizer) findCut() {
	if _, ok := t.ids[spaceMark]; t.byteLevel || t.ignoreMerges || !ok {
		return
	}
	if t.unk < 0 && !(t.byteFallback && t.hasBytes(everyByte())) {
		return // characters may vanish, and what stood around them be merged
	}
	for _, m := range t.rules {
		rest := strings.TrimLeft(t.tokens[m.id], spaceMark)
		if strings.Contains(rest, spaceMark) {
			return
		}
	}
	t.cut = spaceMark
}

func everyByte() string {
	var b [256]byte
	for i := range b {
		b[i] = byte(i)
	}
	return string(b[:])
}

// maxGrowth bounds how much longer normalizers may make a text: a chain of replacements can double it at each step.
const maxGrowth = 64

func (t *Tokenizer) checkGrowth() error {
	if g := t.normalizer.growth(); g > maxGrowth {
		return fmt.Errorf("%w: normalizers that may make a text more than %d times as long", ErrUnsupported, maxGrowth)
	}
	return nil
}

// growth is a bound on how many times as long a normalizer makes a text, saturating.
func (c *component) growth() int {
	if c == nil {
		return 1
	}
	g := 1
	switch c.Type {
	case "Sequence":
		for i := range c.Normalizers {
			g = min(g*c.Normalizers[i].growth(), 1<<20)
		}
	case "Prepend":
		g += len(c.Prepend)
	case "Replace":
		if n := max(len(c.Pattern.String), 1); len(c.Content) > n {
			g = len(c.Content)/n + 1
		}
	case "NFD", "NFKC", "NFKD":
		g = 2 // eighteen-fold for one character, but not a second time
	}
	return min(g, 1<<20)
}

// has reports whether an id is in use.
func (t *Tokenizer) has(id int32) bool {
	return id >= 0 && int(id) < len(t.tokens) && t.tokens[id] != ""
}

// Token is the vocabulary's spelling of an id, "" when there is none.
func (t *Tokenizer) Token(id int32) string {
	if id < 0 || int(id) >= len(t.tokens) {
		return ""
	}
	return t.tokens[id]
}

// VocabSize is the largest id plus one.
func (t *Tokenizer) VocabSize() int { return len(t.tokens) }

// BOS and EOS are the ids that begin and end a text, where the tokenizer has them.
func (t *Tokenizer) BOS() (int32, bool) { return t.bos, t.bos >= 0 }
func (t *Tokenizer) EOS() (int32, bool) { return t.eos, t.eos >= 0 }

// ChatTemplate is the Jinja template of the model's chat format, "" when it has none.
func (t *Tokenizer) ChatTemplate() string { return t.template }

// IsSpecial reports whether a token belongs to FastGen's special class (Ge et al. 2023, section 3.2): BOS, EOS, and the
// added tokens that the tokenizer marks as special or that are spelt like <|this|>, such as the turns of a chat.
func (t *Tokenizer) IsSpecial(id int32) bool { return t.special[id] }

// IsPunctuation reports whether a token belongs to FastGen's punctuation class: its text, without white space around
// it, is not empty and consists of Unicode punctuation and symbols (categories P and S). Special tokens do not count.
func (t *Tokenizer) IsPunctuation(id int32) bool {
	s := t.Token(id)
	if s == "" || t.special[id] {
		return false
	}
	if t.byteLevel {
		s = string(appendByteLevel(nil, s))
	} else {
		s = strings.ReplaceAll(s, spaceMark, " ")
		if b, ok := byteToken(s); ok {
			s = string(rune(b))
			if b >= 0x80 {
				return false // part of a character
			}
		}
	}
	s = strings.TrimSpace(s)
	for _, r := range s {
		if r == utf8.RuneError || !unicode.IsPunct(r) && !unicode.IsSymbol(r) {
			return false
		}
	}
	return s != ""
}
