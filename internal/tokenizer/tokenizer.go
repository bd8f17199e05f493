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
	tokens []string // by id, as the vocabulary spells them; "" for unused ids
	ids    map[string]int32
	rules  map[pair]rule
	added  []addedToken
	trie   [2]*trieNode // added tokens found in raw text, and in normalised text

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

	special  map[int32]bool
	template string

	mu    sync.Mutex
	cache map[string][]int32
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

type trieNode struct {
	next  map[byte]*trieNode
	token *addedToken
}

func (n *trieNode) insert(text string, t *addedToken) {
	for i := range len(text) {
		child := n.next[text[i]]
		if child == nil {
			child = &trieNode{next: map[byte]*trieNode{}}
			n.next[text[i]] = child
		}
		n = child
	}
	n.token = t
}

// maxVocab bounds ids: a larger one is a defect of the file, and would be allocated.
const maxVocab = 1 << 24

// FromJSON reads a tokenizer.json, and a tokenizer_config.json for the names of BOS and EOS and the chat template;
// the second may be nil.
func FromJSON(tokenizerJSON, configJSON []byte) (*Tokenizer, error) {
	var j struct {
		AddedTokens   []addedToken `json:"added_tokens"`
		Normalizer    *component   `json:"normalizer"`
		PreTokenizer  *component   `json:"pre_tokenizer"`
		PostProcessor *component   `json:"post_processor"`
		Decoder       *component   `json:"decoder"`
		Model         struct {
			Type          string            `json:"type"`
			Vocab         map[string]int32  `json:"vocab"`
			Merges        []json.RawMessage `json:"merges"`
			ByteFallback  bool              `json:"byte_fallback"`
			IgnoreMerges  bool              `json:"ignore_merges"`
			FuseUnk       bool              `json:"fuse_unk"`
			Unk           *string           `json:"unk_token"`
			Dropout       *float64          `json:"dropout"`
			SubwordPrefix *string           `json:"continuing_subword_prefix"`
			WordSuffix    *string           `json:"end_of_word_suffix"`
		} `json:"model"`
	}
	var head struct {
		Model struct {
			Type string `json:"type"`
		} `json:"model"`
	}
	// The kind first: the vocabulary of a Unigram model has another shape, and would give an unclear error.
	if err := json.Unmarshal(tokenizerJSON, &head); err != nil {
		return nil, fmt.Errorf("%w: tokenizer.json: %w", ErrCorrupt, err)
	}
	if head.Model.Type != "BPE" && head.Model.Type != "" {
		return nil, fmt.Errorf("%w: model %q (BPE is known)", ErrUnsupported, head.Model.Type)
	}
	if err := json.Unmarshal(tokenizerJSON, &j); err != nil {
		return nil, fmt.Errorf("%w: tokenizer.json: %w", ErrCorrupt, err)
	}
	if p := j.Model.SubwordPrefix; p != nil && *p != "" {
		return nil, fmt.Errorf("%w: continuing_subword_prefix", ErrUnsupported)
	}
	if p := j.Model.WordSuffix; p != nil && *p != "" {
		return nil, fmt.Errorf("%w: end_of_word_suffix", ErrUnsupported)
	}
	t := &Tokenizer{normalizer: j.Normalizer, preTokenizer: j.PreTokenizer, decoder: j.Decoder, added: j.AddedTokens,
		byteFallback: j.Model.ByteFallback, ignoreMerges: j.Model.IgnoreMerges, fuseUnk: j.Model.FuseUnk, unk: -1, bos: -1, eos: -1}
	if err := t.setVocab(j.Model.Vocab); err != nil {
		return nil, err
	}
	if j.Model.Unk != nil {
		if id, ok := t.ids[*j.Model.Unk]; ok {
			t.unk = id
		}
	}
	merges := make([][2]string, 0, len(j.Model.Merges))
	for _, m := range j.Model.Merges {
		var two []string
		if json.Unmarshal(m, &two) != nil {
			var s string
			if err := json.Unmarshal(m, &s); err != nil {
				return nil, fmt.Errorf("%w: merge %s", ErrCorrupt, m)
			}
			two = strings.SplitN(s, " ", 2)
		}
		if len(two) != 2 {
			return nil, fmt.Errorf("%w: merge %s", ErrCorrupt, m)
		}
		merges = append(merges, [2]string{two[0], two[1]})
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
	t.ids = make(map[string]int32, len(vocab)+len(t.added))
	for text, id := range vocab {
		t.ids[text], t.tokens[id] = id, text
	}
	for _, a := range t.added {
		t.ids[a.Content], t.tokens[a.ID] = a.ID, a.Content
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
	t.byteLevel = t.preTokenizer.has("ByteLevel")
	t.cache = map[string][]int32{}
	t.special = map[int32]bool{}
	for i := range t.bytes {
		t.bytes[i] = -1
		if id, ok := t.ids[fmt.Sprintf("<0x%02X>", i)]; ok {
			t.bytes[i] = id
		}
	}
	t.trie = [2]*trieNode{{next: map[byte]*trieNode{}}, {next: map[byte]*trieNode{}}}
	for i := range t.added {
		a := &t.added[i]
		if a.Special {
			t.special[a.ID] = true
		}
		switch {
		case a.Content == "":
		case a.Normalized && t.normalizer != nil:
			t.trie[1].insert(t.normalizer.normalize(a.Content), a)
		default:
			t.trie[0].insert(a.Content, a)
		}
	}
	for _, id := range []int32{t.bos, t.eos} {
		if id >= 0 {
			t.special[id] = true
		}
	}
	return nil
}

// Encode returns the ids of text. Added tokens in it are recognised; nothing is put before or after.
func (t *Tokenizer) Encode(text string) []int32 {
	var out []int32
	first := true
	t.eachAdded(0, text, func(part string, a *addedToken) {
		if a != nil {
			out = append(out, a.ID)
		} else {
			t.eachAdded(1, t.normalizer.normalize(part), func(part string, a *addedToken) {
				if a != nil {
					out = append(out, a.ID)
				} else {
					out = t.encodeWords(part, first, out)
				}
				first = false
			})
		}
		first = false
	})
	return out
}

// EncodeWithSpecial is Encode with what the tokenizer puts before and after a text, such as BOS.
func (t *Tokenizer) EncodeWithSpecial(text string) []int32 {
	out := append([]int32(nil), t.prefix...)
	return append(append(out, t.Encode(text)...), t.suffix...)
}

// eachAdded cuts text at the added tokens of one trie: the longest at the first place where one begins.
func (t *Tokenizer) eachAdded(which int, text string, f func(part string, a *addedToken)) {
	root := t.trie[which]
	if len(root.next) == 0 {
		if text != "" {
			f(text, nil)
		}
		return
	}
	start := 0
	for i := 0; i < len(text); {
		n, best, end := root, (*addedToken)(nil), 0
		for k := i; k < len(text); k++ {
			if n = n.next[text[k]]; n == nil {
				break
			}
			if n.token != nil {
				best, end = n.token, k+1
			}
		}
		if best == nil || best.SingleWord && (wordBefore(text[:i]) || wordAfter(text[end:])) {
			i++
			continue
		}
		before := text[start:i]
		if best.LStrip {
			before = strings.TrimRightFunc(before, unicode.IsSpace)
		}
		if before != "" {
			f(before, nil)
		}
		f(best.Content, best)
		i = end
		if best.RStrip {
			i = len(text) - len(strings.TrimLeftFunc(text[i:], unicode.IsSpace))
		}
		start = i
	}
	if start < len(text) {
		f(text[start:], nil)
	}
}

func isWord(r rune) bool {
	return r == '_' || unicode.IsLetter(r) || unicode.IsNumber(r) || unicode.IsMark(r)
}
func wordBefore(s string) bool { r, n := utf8.DecodeLastRuneInString(s); return n > 0 && isWord(r) }
func wordAfter(s string) bool  { r, n := utf8.DecodeRuneInString(s); return n > 0 && isWord(r) }

// maxCache bounds the memory of remembered words.
const maxCache = 1 << 16

func (t *Tokenizer) encodeWords(text string, first bool, out []int32) []int32 {
	for _, w := range t.preTokenizer.split([]string{text}, first) {
		if t.byteLevel {
			w = toByteLevel(w)
		}
		t.mu.Lock()
		ids, ok := t.cache[w]
		t.mu.Unlock()
		if !ok {
			ids = t.encodeWord(w)
			if len(w) <= 64 {
				t.mu.Lock()
				if len(t.cache) >= maxCache {
					clear(t.cache)
				}
				t.cache[w] = ids
				t.mu.Unlock()
			}
		}
		out = append(out, ids...)
	}
	return out
}

func (t *Tokenizer) encodeWord(w string) []int32 {
	if t.ignoreMerges {
		if id, ok := t.ids[w]; ok {
			return []int32{id}
		}
	}
	var ids []int32
	unknown := false
	for _, r := range w {
		symbol := string(r)
		id, ok := t.ids[symbol]
		if ok {
			ids, unknown = append(ids, id), false
			continue
		}
		if t.byteFallback && t.hasBytes(symbol) {
			for i := range len(symbol) {
				ids = append(ids, t.bytes[symbol[i]])
			}
			unknown = false
			continue
		}
		if t.unk >= 0 && !(t.fuseUnk && unknown) {
			ids = append(ids, t.unk)
		}
		unknown = true
	}
	return merge(ids, t.rules)
}

func (t *Tokenizer) hasBytes(s string) bool {
	for i := range len(s) {
		if t.bytes[s[i]] < 0 {
			return false
		}
	}
	return true
}

// Decode returns the text of ids, special tokens included. Unknown ids are left out.
func (t *Tokenizer) Decode(ids []int32) string {
	var b strings.Builder
	var parts []string
	flush := func() {
		if len(parts) > 0 {
			if t.decoder != nil {
				parts = t.decoder.decode(parts)
			}
			for _, p := range parts {
				b.WriteString(p)
			}
			parts = nil
		}
	}
	if t.decoder == nil || !t.decoder.has("ByteLevel") {
		for _, id := range ids {
			if s := t.Token(id); s != "" {
				parts = append(parts, s)
			}
		}
		flush()
		return b.String()
	}
	// The letters of an added token are not byte-level symbols, though they may look like ones.
	for _, id := range ids {
		if a := t.addedByID(id); a != nil {
			flush()
			b.WriteString(a.Content)
			continue
		}
		if s := t.Token(id); s != "" {
			parts = append(parts, s)
		}
	}
	flush()
	return b.String()
}

func (t *Tokenizer) addedByID(id int32) *addedToken {
	for i := range t.added {
		if t.added[i].ID == id {
			return &t.added[i]
		}
	}
	return nil
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
// added tokens that the tokenizer marks as special, such as the turns of a chat.
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
		s = strings.ReplaceAll(s, "▁", " ")
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
