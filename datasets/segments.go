package datasets

import (
	"slices"
	"strings"
)

// PlainEncoder is what a Tokenizer may offer besides: EncodePlain encodes text in
// which special tokens are not recognised. Haystacks are encoded with it, so that
// "<|im_end|>" in a user's file stays text and does not end the turn.
type PlainEncoder interface {
	EncodePlain(text string) []int32
}

// segments encodes a text piece by piece, so that the borders of the pieces are
// borders of tokens.
//
// A piece is not encoded as if it began the text, since some tokenizers put a
// word mark in front of that: it is encoded behind a short anchor, whose tokens
// are cut off again. Where a tokenizer merges across the anchor the piece is
// encoded by itself.
type segments struct {
	Tokenizer
	anchors map[string][]int32
}

func newSegments(tok Tokenizer) *segments {
	return &segments{Tokenizer: tok, anchors: map[string][]int32{}}
}

// after encodes text that follows other text.
func (s *segments) after(text string) []int32 { return s.behind(text, s.Encode) }

// textAfter does so for haystack text, in which nothing is a special token.
func (s *segments) textAfter(text string) []int32 {
	if p, ok := s.Tokenizer.(PlainEncoder); ok {
		return s.behind(text, p.EncodePlain)
	}
	return s.behind(text, s.Encode)
}

func (s *segments) behind(text string, encode func(string) []int32) []int32 {
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
	all := encode(anchor + text)
	if len(all) > len(head) && slices.Equal(all[:len(head)], head) {
		return all[len(head):]
	}
	return encode(text)
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
