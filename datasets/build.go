package datasets

import (
	"slices"
	"strings"
)

// minHaystack is the fewest haystack tokens that a sample may have.
const minHaystack = 32

// The last stretch of a haystack is filled to the exact token. fillSearch is how
// long a stretch is searched for, fillCandidates among how many sentences at a
// time, fillRounds how often.
const (
	fillSearch     = 56
	fillCandidates = 48
	fillRounds     = 6
)

// piece is a stretch of tokens of one kind.
type piece struct {
	kind   SpanKind
	index  int
	tokens []int32
}

// sample makes sample id of length tokens (of haystack tokens if haystackLength).
func (b *builder) sample(id, length int, haystackLength bool, q *quiz) (Sample, error) {
	head, tail := b.frameTokens(q)
	fixed := count(head) + count(tail)
	// A needle is a sentence within a paragraph, or a paragraph of its own.
	inline, block := make([][]int32, len(q.needles)), make([][]int32, len(q.needles))
	most := 0
	for i, n := range q.needles {
		inline[i] = b.tok.after(" " + n)
		block[i] = b.tok.after(n + "\n\n")
		most += max(len(inline[i]), len(block[i]))
	}
	budget := length
	if !haystackLength {
		budget -= fixed + most
	}
	if budget < minHaystack {
		m := minHaystack
		if !haystackLength {
			m += fixed + most
		}
		return Sample{}, &LengthError{Sample: id, Length: length, Minimum: m}
	}
	stream, err := b.haystack.Stream(b.purpose, b.rand("haystack", uint64(id)))
	if err != nil {
		return Sample{}, err
	}

	// Whole sentences, up to a margin that is filled once the needles stand.
	h := hay{tok: b.tok, name: b.haystack.Name(), stream: stream}
	h.pull(budget - 24)
	places := h.place(q.depths, budget)

	needle := func(i int) []int32 {
		if h.blockAt(places[i]) {
			return block[i]
		}
		return inline[i]
	}
	want := budget
	if !haystackLength {
		want = length - fixed
		for i := range places {
			want -= len(needle(i))
		}
	}
	fill := h.fill(want - h.total)
	if h.err != nil {
		return Sample{}, h.err
	}

	var body []piece
	depths := make([]float64, len(places))
	at, next := 0, 0
	put := func(place int) {
		for ; next < len(places) && places[next] == place; next++ {
			body = append(body, piece{SpanNeedle, next, needle(next)})
			depths[next] = float64(at) / float64(want)
		}
	}
	for i, u := range h.units {
		put(i)
		body = append(body, piece{SpanHaystack, 0, u.tokens})
		at += len(u.tokens)
	}
	put(len(h.units))
	for _, f := range fill {
		body = append(body, piece{SpanHaystack, 0, f})
		at += len(f)
	}
	put(placeEnd)

	s := Sample{ID: id, Task: b.task, Seed: b.seed, Haystack: b.haystack.Name(),
		Depths: depths, AskedDepths: slices.Clone(q.depths), Expected: slices.Clone(q.answers)}
	s.assemble(slices.Concat(head, body, tail))
	s.TargetTokens = len(s.Tokens)
	return s, nil
}

func count(pieces []piece) int {
	n := 0
	for _, p := range pieces {
		n += len(p.tokens)
	}
	return n
}

// assemble lays the pieces in a row: neighbours of one kind and index become one
// span, the first token becomes the sink, spans are numbered.
func (s *Sample) assemble(pieces []piece) {
	var spans []Span
	for _, p := range pieces {
		if len(p.tokens) == 0 {
			continue
		}
		start := len(s.Tokens)
		s.Tokens = append(s.Tokens, p.tokens...)
		if n := len(spans); n > 0 && spans[n-1].Kind == p.kind && spans[n-1].Index == p.index {
			spans[n-1].End = len(s.Tokens)
			continue
		}
		if start == 0 {
			spans = append(spans, Span{SpanSink, 0, 0, 1})
			if start++; start == len(s.Tokens) {
				continue
			}
		}
		spans = append(spans, Span{p.kind, p.index, start, len(s.Tokens)})
	}
	counts := map[SpanKind]int{}
	for i := range spans {
		spans[i].Index = counts[spans[i].Kind]
		counts[spans[i].Kind]++
	}
	s.Spans = spans
}

// frameTokens encodes everything but haystack and needles: what stands before and
// what behind them.
func (b *builder) frameTokens(q *quiz) (head, tail []piece) {
	type text struct {
		kind  SpanKind
		index int
		text  string
	}
	texts := []text{{SpanChat, 0, b.frame[0]}, {SpanInstruction, 0, q.intro}, {SpanHaystack, 0, ""}}
	outro := q.outro
	texts = append(texts, text{SpanInstruction, 0, outro})
	if b.plain {
		texts = append(texts, text{SpanChat, 0, "Question: "})
	}
	for k := range q.questions {
		if k > 0 {
			texts = append(texts, text{SpanChat, 0, b.frame[2*k]})
		}
		texts = append(texts,
			text{SpanQuestion, k, q.questions[k]},
			text{SpanChat, 0, b.frame[2*k+1]},
			text{SpanAnswer, k, q.answers[k]})
	}
	out := &head
	first := true
	carry := ""
	for _, t := range texts {
		if t.kind == SpanHaystack {
			out = &tail
			continue
		}
		s := carry + t.text
		carry = ""
		// A space at the end of template text belongs to the word that follows it,
		// as tokenizers have it.
		if t.kind == SpanChat && strings.HasSuffix(s, " ") {
			s, carry = s[:len(s)-1], " "
		}
		if s == "" {
			continue
		}
		var toks []int32
		if first {
			toks = b.tok.first(s)
			first = false
		} else {
			toks = b.tok.after(s)
		}
		*out = append(*out, piece{t.kind, t.index, toks})
	}
	return head, tail
}

// unit is an encoded sentence.
type unit struct {
	tokens []int32
	block  bool // ends its paragraph
}

// placeEnd is the place behind the whole haystack.
const placeEnd = -1

// hay collects the sentences of one haystack.
type hay struct {
	tok     *segments
	name    string
	stream  Stream
	units   []unit
	total   int
	pending Sentence
	err     error

	full, blank int // sentences that gave tokens, or none
}

// next yields the sentence that was put back, or a new one.
func (h *hay) next() Sentence {
	if s := h.pending; s != "" {
		h.pending = ""
		return s
	}
	return h.stream.Next()
}

// encode encodes haystack text. When nine sentences in ten give no tokens, as with
// a vocabulary that lacks the script, it sets err.
func (h *hay) encode(text string) []int32 {
	toks := h.tok.textAfter(text)
	if len(toks) > 0 {
		h.full++
	} else if h.blank++; h.blank > 1000 && h.blank > 9*h.full && h.err == nil {
		h.err = badOption("haystack", "the tokenizer makes next to no tokens of %s", h.name)
	}
	return toks
}

// pull takes whole sentences while they fit within limit tokens.
func (h *hay) pull(limit int) {
	for h.err == nil {
		s := h.next()
		toks := h.encode(string(s))
		if len(toks) == 0 {
			continue
		}
		if h.total+len(toks) > limit {
			h.pending = s
			break
		}
		h.units = append(h.units, unit{toks, s.endsBlock()})
		h.total += len(toks)
	}
}

// blockAt says whether a needle at a place is a paragraph of its own: at the start
// and after a paragraph's end. Elsewhere it is a sentence among others.
func (h *hay) blockAt(place int) bool {
	return place == 0 || place > 0 && h.units[place-1].block
}

// place chooses for each depth (ascending) the border between sentences that is
// nearest to that fraction of total tokens: i is before sentence i, len(units) is
// before the fill, placeEnd behind everything.
func (h *hay) place(depths []float64, total int) []int {
	offsets := []int{0}
	for _, u := range h.units {
		offsets = append(offsets, offsets[len(offsets)-1]+len(u.tokens))
	}
	offsets = append(offsets, total)
	out := make([]int, len(depths))
	at := 0
	for i, d := range depths {
		want := d * float64(total)
		for at+1 < len(offsets) && float64(offsets[at+1])-want <= want-float64(offsets[at]) {
			at++
		}
		out[i] = at
		if at == len(offsets)-1 {
			out[i] = placeEnd
		}
	}
	return out
}

// fill returns sentences of exactly n tokens together. Loose text is searched for
// one or two sentences that fit; contiguous text, or text without such a pair, is
// cut off at a word and the remainder filled with line breaks.
func (h *hay) fill(n int) [][]int32 {
	var out [][]int32
	if !h.stream.Contiguous() {
		next := func() string { return strings.Trim(string(h.next()), " \t\r\n") }
		// lead is the space before a sentence unless it starts a paragraph.
		lead := func() string {
			if len(out) == 0 && h.blockAt(len(h.units)) {
				return ""
			}
			return " "
		}
		for tries := 0; n > fillSearch && tries < fillCandidates; tries++ {
			toks := h.encode(lead() + next())
			// What is left has to be long enough for a sentence.
			if left := n - len(toks); left >= 20 {
				out = append(out, toks)
				n = left
			}
		}
		for range fillRounds {
			texts := make([]string, fillCandidates)
			first, second := make([][]int32, len(texts)), make([][]int32, len(texts))
			for i := range texts {
				texts[i] = next()
				first[i], second[i] = h.encode(lead()+texts[i]), h.encode(" "+texts[i])
				if len(first[i]) == n {
					return append(out, first[i])
				}
			}
			for i := range texts {
				for j := range texts {
					if i != j && len(first[i])+len(second[j]) == n {
						return append(out, first[i], second[j])
					}
				}
			}
		}
	}
	// Cut the running text at the exact token.
	var rest []int32
	for len(rest) <= n && h.err == nil {
		rest = append(rest, h.encode(string(h.next()))...)
	}
	if h.err != nil {
		return nil
	}
	cut := n
	pad := h.tok.after("\n")
	if len(pad) == 1 {
		for k := n; k > 0 && k > n-8; k-- {
			if h.tok.startsWord(rest[k]) {
				cut = k
				break
			}
		}
	}
	rest = rest[:cut:cut]
	for len(rest) < n {
		rest = append(rest, pad[0])
	}
	return append(out, rest)
}
