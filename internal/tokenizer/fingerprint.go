package tokenizer

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
)

// Fingerprint is the SHA-256, in hex, of what the tokenizer does, such that a Hugging Face folder and a GGUF made from
// it have the same:
//
//   - for every id in use, the id and the token's bytes (those of the text, whatever alphabet the vocabulary spells
//     them in); a vocabulary padded with unused tokens is the same as one that is not;
//   - byte-level: the merges in order, and how text is normalised and cut into words, from a spelling that both formats
//     are brought to; SentencePiece: the tokens that merging makes, in order, since the pairs follow from them, and
//     whether a space is put before a text;
//   - the ids that are recognised in text, and EOS.
//
// BOS and what is put around a text are left out: converters name a BOS for models that have none, and tokenizer.json
// files leave to their library what a GGUF says. So are the flags of added tokens and how ids are decoded.
func (t *Tokenizer) Fingerprint() string { return t.print() }

func (t *Tokenizer) fingerprint() string {
	h := sha256.New()
	var buf []byte
	number := func(n int32) { buf = binary.LittleEndian.AppendUint32(buf, uint32(n)) }
	text := func(s string) {
		number(int32(len(s)))
		buf = append(buf, s...)
	}
	flush := func() {
		h.Write(buf)
		buf = buf[:0]
	}
	added := map[int32]bool{}
	for _, a := range t.added {
		added[a.ID] = true
	}
	text("kvprofile tokenizer 1")
	for i, s := range t.tokens {
		if s == "" {
			continue
		}
		id := int32(i)
		number(id)
		switch {
		case added[id]:
			number(1)
			text(s)
		case t.byteLevel:
			number(0)
			text(string(appendByteLevel(nil, s)))
		default:
			number(0)
			text(s)
		}
		if len(buf) > 1<<12 {
			flush()
		}
	}
	number(-1)
	text(t.behaviour())
	type merge struct {
		pair
		rule
	}
	merges := make([]merge, 0, len(t.rules))
	for p, r := range t.rules {
		merges = append(merges, merge{p, r})
	}
	slices.SortFunc(merges, func(a, b merge) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.id, b.id), cmp.Compare(a.left, b.left))
	})
	made := map[int32]bool{}
	for _, m := range merges {
		if t.byteLevel {
			number(m.left)
			number(m.right)
		} else if !made[m.id] {
			made[m.id] = true
			number(m.id)
		}
		if len(buf) > 1<<12 {
			flush()
		}
	}
	number(-1)
	number(t.eos)
	flush()
	return hex.EncodeToString(h.Sum(nil))
}

// behaviour spells how text is normalised and cut into words, the same for the same behaviour in both formats.
func (t *Tokenizer) behaviour() string {
	var parts []string
	prefix := false
	var add func(c *component)
	add = func(c *component) {
		if c == nil {
			return
		}
		switch c.Type {
		case "Sequence":
			for _, list := range [][]component{c.Normalizers, c.PreTokenizers} {
				for i := range list {
					add(&list[i])
				}
			}
			return
		case "ByteLevel":
			parts = append(parts, fmt.Sprintf("bytes space=%t words=%t", yes(c.AddPrefixSpace, true), c.scan != nil))
			return
		case "Digits":
			parts = append(parts, fmt.Sprintf("digits each=%t", c.Individual))
			return
		}
		if !t.byteLevel {
			// The ways to write SentencePiece's treatment of spaces.
			switch {
			case c.Type == "Prepend" && c.Prepend == spaceMark:
				prefix = true
				return
			case c.Type == "Metaspace" && c.Replacement == spaceMark && !yes(c.Split, true):
				prefix = prefix || c.scheme() != "never"
				return
			case c.Type == "Replace" && c.Pattern.String == " " && c.Content == spaceMark:
				return
			case c.Type == "Split" && c.Pattern.String == " ": // there are none left
				return
			}
		}
		parts = append(parts, fmt.Sprintf("%s %q %q %q %q %s %t %t %t %t", c.Type, c.Pattern.Regex, c.Pattern.String, c.Content, c.Prepend,
			c.Behavior, c.Invert, c.StripLeft, c.StripRight, yes(c.Split, true)))
		if c.Type == "Metaspace" {
			parts = append(parts, c.Replacement, c.scheme())
		}
	}
	add(t.normalizer)
	add(t.preTokenizer)
	if !t.byteLevel {
		parts = append(parts, fmt.Sprintf("spaces prefix=%t", prefix))
	}
	return strings.Join(parts, "; ")
}
