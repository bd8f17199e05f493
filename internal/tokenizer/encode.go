package tokenizer

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Encode returns the ids of text. Added tokens in it are recognised; nothing is put before or after. Text that is not
// UTF-8 is read as if each stretch of wrong bytes were U+FFFD.
func (t *Tokenizer) Encode(text string) []int32 {
	text = strings.ToValidUTF8(text, "\uFFFD")
	out := make([]int32, 0, len(text)/4+1)
	first := true
	t.added0.each(text, func(part string, a *addedToken) {
		if a != nil {
			out, first = append(out, a.ID), false
			return
		}
		t.added1.each(t.normalizer.normalize(part), func(part string, a *addedToken) {
			if a != nil {
				out = append(out, a.ID)
			} else {
				out = t.encodePart(part, first, out)
			}
			first = false
		})
		first = false
	})
	return out
}

// EncodeWithSpecial is Encode with what the tokenizer puts before and after a text, such as BOS.
func (t *Tokenizer) EncodeWithSpecial(text string) []int32 {
	out := append([]int32(nil), t.prefix...)
	return append(append(out, t.Encode(text)...), t.suffix...)
}

// matcher finds added tokens in text.
type matcher struct {
	root  trieNode
	first [256]bool // bytes that begin a token: most do not
}

type trieNode struct {
	next  map[byte]*trieNode
	token *addedToken
}

func (m *matcher) insert(text string, a *addedToken) {
	if text == "" {
		return
	}
	m.first[text[0]] = true
	n := &m.root
	for i := range len(text) {
		child := n.next[text[i]]
		if child == nil {
			if n.next == nil {
				n.next = map[byte]*trieNode{}
			}
			child = &trieNode{}
			n.next[text[i]] = child
		}
		n = child
	}
	n.token = a
}

// each cuts text at added tokens: at the first place where one begins, the longest. The search goes on behind a token
// that was found but refused as no word of its own, and behind a token proper where white space beyond it was taken,
// as in the reference.
func (m *matcher) each(text string, f func(part string, a *addedToken)) {
	done := 0
	for i := 0; i < len(text); {
		if !m.first[text[i]] {
			i++
			continue
		}
		n, best, end := &m.root, (*addedToken)(nil), 0
		for k := i; k < len(text); k++ {
			if n = n.next[text[k]]; n == nil {
				break
			}
			if n.token != nil {
				best, end = n.token, k+1
			}
		}
		if best == nil {
			i++
			continue
		}
		begin, stop := i, end
		i = end
		if best.SingleWord && (wordBefore(text[:begin]) || wordAfter(text[end:])) {
			continue
		}
		if best.LStrip {
			begin = max(done, len(strings.TrimRightFunc(text[:begin], unicode.IsSpace)))
		}
		if best.RStrip {
			stop = len(text) - len(strings.TrimLeftFunc(text[end:], unicode.IsSpace))
		}
		if done < begin {
			f(text[done:begin], nil)
		}
		f(text[begin:stop], best)
		done = stop
	}
	if done < len(text) {
		f(text[done:], nil)
	}
}

// isWord is \w of Unicode's regular expressions (UTS 18).
func isWord(r rune) bool {
	return unicode.In(r, unicode.L, unicode.Nl, unicode.Other_Alphabetic, unicode.M, unicode.Nd, unicode.Pc, unicode.Join_Control)
}
func wordBefore(s string) bool { r, n := utf8.DecodeLastRuneInString(s); return n > 0 && isWord(r) }
func wordAfter(s string) bool  { r, n := utf8.DecodeRuneInString(s); return n > 0 && isWord(r) }

// maxCache bounds the number of remembered words, maxCachedWord their bytes.
const (
	maxCache      = 1 << 16
	maxCachedWord = 64
)

// encodePart appends the ids of normalised text without added tokens.
func (t *Tokenizer) encodePart(text string, first bool, out []int32) []int32 {
	for _, w := range t.preTokenizer.split([]string{text}, first) {
		for w != "" {
			n := len(w)
			if t.cut != "" {
				n = nextCut(w, t.cut)
			}
			out = append(out, t.encodeWord(w[:n])...)
			w = w[n:]
		}
	}
	return out
}

// nextCut is the length of the stretch of s that ends before a mark that follows something else.
func nextCut(s, mark string) int {
	i := 0
	for strings.HasPrefix(s[i:], mark) {
		i += len(mark)
	}
	if k := strings.Index(s[i:], mark); k >= 0 {
		return i + k
	}
	return len(s)
}

// encodeWord gives the ids of a word; callers must not write to them.
func (t *Tokenizer) encodeWord(w string) []int32 {
	if len(w) > maxCachedWord {
		return merge(t.symbols(w), t.rules)
	}
	t.mu.RLock()
	ids, ok := t.cache[w]
	t.mu.RUnlock()
	if ok {
		return ids
	}
	ids = merge(t.symbols(w), t.rules)
	t.mu.Lock()
	if len(t.cache) >= maxCache {
		clear(t.cache)
	}
	t.cache[strings.Clone(w)] = ids // w would keep the whole text alive
	t.mu.Unlock()
	return ids
}

// symbols gives the ids that merging begins with: the word itself where the tokenizer looks it up first, or one a
// character, or the bytes of a character that is not in the vocabulary.
func (t *Tokenizer) symbols(w string) []int32 {
	if t.byteLevel {
		w = toByteLevel(w)
	}
	if t.ignoreMerges {
		if id, ok := t.ids[w]; ok {
			return []int32{id}
		}
	}
	out := make([]int32, 0, len(w))
	unknown := false // an unknown token waits, for others to be fused with it
	for i, r := range w {
		symbol := w[i : i+utf8.RuneLen(r)]
		if id, ok := t.ids[symbol]; ok {
			if unknown {
				out, unknown = append(out, t.unk), false
			}
			out = append(out, id)
			continue
		}
		if t.byteFallback && t.hasBytes(symbol) {
			for k := range len(symbol) {
				out = append(out, t.bytes[symbol[k]])
			}
			continue
		}
		if t.unk >= 0 {
			if unknown && !t.fuseUnk {
				out = append(out, t.unk)
			}
			unknown = true
		}
	}
	if unknown {
		out = append(out, t.unk)
	}
	return out
}

func (t *Tokenizer) hasBytes(s string) bool {
	for i := range len(s) {
		if t.bytes[s[i]] < 0 {
			return false
		}
	}
	return true
}
