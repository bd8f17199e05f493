package datasets

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// Specials is what a Tokenizer may offer besides: which ids are special tokens.
// With it, "<|im_end|>" in a user's file is encoded as text and does not end the
// turn.
type Specials interface {
	IsSpecial(id int32) bool
}

// PrefixEncoder is what a Tokenizer may offer besides: encoding with what it puts
// in front of every text. Without it, the id that BOS reports is put there.
type PrefixEncoder interface {
	EncodeWithSpecial(text string) []int32
}

// segments encodes a text piece by piece, so that the borders of the pieces are
// borders of tokens.
//
// A piece is not encoded as if it began the text, since some tokenizers put a
// word mark in front of that: it is encoded behind a short anchor, whose tokens
// are cut off again. Where a tokenizer merges across the anchor the piece is
// encoded by itself. So the ids are those of the whole text encoded at once but
// for merges across the borders of the pieces.
type segments struct {
	Tokenizer
	anchors map[string][]int32
}

func newSegments(tok Tokenizer) *segments {
	return &segments{Tokenizer: tok, anchors: map[string][]int32{}}
}

// first encodes the text that a sample begins with, behind what the tokenizer
// puts in front of texts, unless the text brings that along, as many chat
// templates do.
func (s *segments) first(text string) []int32 {
	toks := s.before(text)
	var prefix []int32
	if p, ok := s.Tokenizer.(PrefixEncoder); ok {
		const probe = "a"
		with, without := p.EncodeWithSpecial(probe), s.Encode(probe)
		for len(without) > 0 && len(prefix)+len(without) <= len(with) && !slices.Equal(with[len(prefix):len(prefix)+len(without)], without) {
			prefix = with[:len(prefix)+1]
		}
		if len(prefix)+len(without) > len(with) {
			prefix = nil
		}
	} else if bos, ok := s.BOS(); ok {
		prefix = []int32{bos}
	}
	if len(toks) >= len(prefix) && slices.Equal(toks[:len(prefix)], prefix) {
		return toks
	}
	return slices.Concat(prefix, toks)
}

// textAfter encodes haystack text, in which nothing is a special token: where one
// is spelt out it is encoded in two parts.
func (s *segments) textAfter(text string) []int32 {
	toks := s.after(text)
	sp, ok := s.Tokenizer.(Specials)
	if !ok {
		return toks
	}
	for _, id := range toks {
		if !sp.IsSpecial(id) {
			continue
		}
		if at := strings.Index(text, s.Token(id)); at >= 0 && s.Token(id) != "" {
			_, n := utf8.DecodeRuneInString(text[at:])
			if at+n < len(text) {
				return slices.Concat(s.textAfter(text[:at+n]), s.textAfter(text[at+n:]))
			}
		}
		// Not spelt as the vocabulary has it (an unknown character, say): leave it out.
		return slices.DeleteFunc(slices.Clone(toks), sp.IsSpecial)
	}
	return toks
}

// after encodes text that follows other text.
func (s *segments) after(text string) []int32 {
	if text == "" {
		return nil
	}
	// A word or number stands behind a line break, anything else behind a word.
	anchor := "a"
	if c := text[0]; c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c >= 0x80 {
		anchor = "\n"
	}
	head, ok := s.anchors[anchor]
	if !ok {
		head = s.Encode(anchor)
		s.anchors[anchor] = head
	}
	all := s.before(anchor + text)
	if len(all) > len(head) && slices.Equal(all[:len(head)], head) {
		return all[len(head):]
	}
	return s.before(text)
}

// before encodes text that other text follows. White space at its end is encoded
// in front of a word, since some tokenizers cut it otherwise at the end of a text.
func (s *segments) before(text string) []int32 {
	if !strings.HasSuffix(text, "\n") {
		return s.Encode(text)
	}
	const word = "A"
	all := s.Encode(text + word)
	if n := len(all) - 1; n > 0 && s.Decode(all[n:]) == word && s.Decode(all[:n]) == text {
		return all[:n:n]
	}
	return s.Encode(text)
}

// startsWord reports whether a token's own spelling begins with white space or a
// mark for it.
func (s *segments) startsWord(id int32) bool {
	t := s.Token(id)
	for _, p := range []string{" ", "\n", "Ġ", "Ċ", "▁", "<0x0A>"} {
		if strings.HasPrefix(t, p) {
			return true
		}
	}
	return false
}
