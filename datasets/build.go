package datasets

import (
	"slices"
	"strings"
	"unicode"
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

// insert is what is put between two sentences of the haystack: a sentence of its
// own (a needle or a distractor), or for SpanDialog a question and its answer, as
// turns of the conversation.
type insert struct {
	kind             SpanKind // SpanNeedle, SpanDistractor or SpanDialog
	text             string   // of a sentence
	question, answer string   // of a dialog
	depth            float64  // fraction of the haystack before it
	early            bool     // never behind its depth: at the border before it, not the nearest
}

// seam is the place that a text is put in.
type seam struct {
	block bool   // a paragraph begins here
	turn  bool   // a dialog ends here
	lead  string // white space that the template's text before left to this one
}

// sample makes sample id of length tokens (of haystack tokens if haystackLength).
func (b *builder) sample(id, length int, haystackLength bool, q *quiz) (Sample, error) {
	head, tail := b.frameTokens(q)
	fixed := count(head) + count(tail)
	forms := []seam{{}, {block: true}}
	dialogs := q.dialogs()
	if dialogs > 0 {
		forms = append(forms, seam{block: true, lead: " "})
	}
	number := numbers(q.inserts)
	most := 0
	for i := range q.inserts {
		longest := 0
		for _, f := range forms {
			pieces, _ := b.insert(q, i, number[i], f)
			longest = max(longest, count(pieces))
		}
		most += longest
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

	// Whole sentences, up to a margin that is filled once the inserts stand. A
	// sentence that begins a turn may have another token than within a paragraph.
	h := hay{tok: b.tok, name: b.haystack.Name(), stream: stream}
	h.pull(budget - 24 - dialogs)
	places := h.place(q.inserts, budget, dialogs > 0)

	// The form of an insert, or of a sentence behind one, depends on what is before it.
	want := budget
	if !haystackLength {
		want = length - fixed
	}
	put := make([][]piece, len(q.inserts))
	at, next := seam{block: true}, 0
	form := func(place int) {
		for ; next < len(places) && places[next] == place; next++ {
			put[next], at = b.insert(q, next, number[next], at)
			if !haystackLength {
				want -= count(put[next])
			}
		}
	}
	for i := range h.units {
		form(i)
		if at.lead != "" || at.block && !h.blockAt(i) {
			h.begin(i, at.lead)
		}
		at = seam{block: h.units[i].block}
	}
	form(len(h.units))
	before := at
	at = seam{block: h.lines()}
	form(placeEnd)
	fill := h.fill(want-h.total, before)
	if h.err != nil {
		return Sample{}, h.err
	}

	var body []piece
	var depths, asked []float64
	done, next := 0, 0
	lay := func(place int) {
		for ; next < len(places) && places[next] == place; next++ {
			body = append(body, put[next]...)
			if q.inserts[next].kind == SpanNeedle {
				depths = append(depths, float64(done)/float64(want))
				asked = append(asked, q.inserts[next].depth)
			}
		}
	}
	for i, u := range h.units {
		lay(i)
		body = append(body, piece{SpanHaystack, 0, u.tokens})
		done += len(u.tokens)
	}
	lay(len(h.units))
	for _, f := range fill {
		body = append(body, piece{SpanHaystack, 0, f})
		done += len(f)
	}
	lay(placeEnd)

	s := Sample{ID: id, Task: b.task, Seed: b.seed, Haystack: b.haystack.Name(),
		Depths: depths, AskedDepths: asked, Expected: slices.Clone(q.expected)}
	s.assemble(slices.Concat(head, body, tail))
	s.TargetTokens = len(s.Tokens)
	return s, nil
}

// numbers counts the inserts of each kind.
func numbers(inserts []insert) []int {
	counts := map[SpanKind]int{}
	out := make([]int, len(inserts))
	for i, in := range inserts {
		out[i] = counts[in.kind]
		counts[in.kind]++
	}
	return out
}

// insert encodes insert i, number n of its kind, for a seam, and returns the seam
// behind it.
func (b *builder) insert(q *quiz, i, n int, at seam) ([]piece, seam) {
	in := &q.inserts[i]
	if in.kind != SpanDialog {
		// A sentence within a paragraph, or a paragraph of its own.
		if at.block {
			return []piece{{in.kind, n, b.tok.after(at.lead + in.text + q.paragraph())}}, seam{block: true}
		}
		return []piece{{in.kind, n, b.tok.after(" " + in.text)}}, seam{}
	}
	paragraph := ""
	if !at.block {
		paragraph = "\n\n"
	}
	texts := []part{{SpanDialog, 2 * n, at.lead + paragraph + in.question}, {SpanChat, 2 * n, b.frame[2*n+1]},
		{SpanDialog, 2*n + 1, in.answer}, {SpanChat, 2*n + 1, b.frame[2*n+2]}}
	if b.plain {
		texts[0].text = in.question
		texts[3].text = "\n\n"
		texts = append([]part{{SpanChat, 2*n - 1, at.lead + paragraph + "Question: "}}, texts...)
	}
	pieces, lead := b.encode(texts, false)
	return pieces, seam{block: true, turn: true, lead: lead}
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

// part is a text that becomes a piece.
type part struct {
	kind  SpanKind
	index int
	text  string
}

// frameTokens encodes everything but haystack and inserts: what stands before and
// what behind them.
func (b *builder) frameTokens(q *quiz) (head, tail []piece) {
	head, lead := b.encode([]part{{SpanChat, 0, b.frame[0]}, {SpanInstruction, 0, q.intro}}, true)
	texts := []part{{SpanInstruction, 0, lead + q.outro}}
	if b.plain {
		texts = append(texts, part{SpanChat, 0, "Question: "})
	}
	turn := 2 * q.dialogs()
	for k := range q.questions {
		if k > 0 {
			texts = append(texts, part{SpanChat, 0, b.frame[turn+2*k]})
		}
		texts = append(texts,
			part{SpanQuestion, k, q.questions[k]},
			part{SpanChat, 0, b.frame[turn+2*k+1]})
		answer := q.answers[k]
		if q.begin != "" {
			texts = append(texts, part{SpanInstruction, 0, q.begin})
			if !strings.HasSuffix(q.begin, `"`) {
				answer = " " + answer
			}
		}
		texts = append(texts, part{SpanAnswer, k, answer})
	}
	tail, _ = b.encode(texts, false)
	return head, tail
}

// encode encodes texts in a row; first says that they begin the sample. A space
// at the end of template text belongs to the word that follows it, as tokenizers
// have it: lead is that of the last text.
func (b *builder) encode(texts []part, first bool) (pieces []piece, lead string) {
	for _, t := range texts {
		s := lead + t.text
		lead = ""
		if t.kind == SpanChat && strings.HasSuffix(s, " ") {
			s, lead = s[:len(s)-1], " "
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
		pieces = append(pieces, piece{t.kind, t.index, toks})
	}
	return pieces, lead
}

// unit is an encoded sentence.
type unit struct {
	text   Sentence
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
		h.units = append(h.units, unit{s, toks, s.endsBlock()})
		h.total += len(toks)
	}
}

// blockAt says whether a paragraph begins at sentence i.
func (h *hay) blockAt(i int) bool { return i == 0 || h.units[i-1].block }

// begin makes sentence i begin a paragraph, behind lead.
func (h *hay) begin(i int, lead string) {
	u := &h.units[i]
	h.total -= len(u.tokens)
	u.tokens = h.encode(lead + strings.TrimLeftFunc(string(u.text), unicode.IsSpace))
	h.total += len(u.tokens)
}

// filler is what a Stream may offer besides: it is of lines, and can make one of
// exactly n tokens, as tokens counts them, or the longest that has not more.
type filler interface {
	fill(n int, tokens func(string) int) string
}

// lines reports whether every sentence, the fill too, is a line of its own.
func (h *hay) lines() bool { _, ok := h.stream.(filler); return ok }

// place chooses for each insert (depths ascending) the border between sentences
// that is nearest to that fraction of total tokens: i is before sentence i,
// len(units) is before the fill, placeEnd behind everything, which inside rules out.
func (h *hay) place(inserts []insert, total int, inside bool) []int {
	offsets := []int{0}
	for _, u := range h.units {
		offsets = append(offsets, offsets[len(offsets)-1]+len(u.tokens))
	}
	end := len(offsets)
	if !inside {
		offsets = append(offsets, total)
	}
	out := make([]int, len(inserts))
	at := 0
	for i, in := range inserts {
		// The conversion keeps a fused multiply-add from changing the last bit.
		want := float64(in.depth * float64(total))
		for at+1 < len(offsets) {
			behind := float64(offsets[at+1]) - want
			if in.early && behind > 0 || behind > want-float64(offsets[at]) {
				break
			}
			at++
		}
		if out[i] = at; at == end {
			out[i] = placeEnd
		}
	}
	return out
}

// fill returns sentences of exactly n tokens together. Loose text is searched for
// one or two sentences that fit; contiguous text, or text without such a pair, is
// cut off at a word and the remainder filled with line breaks. The fill stands at
// a seam.
func (h *hay) fill(n int, at seam) [][]int32 {
	var out [][]int32
	if f, ok := h.stream.(filler); ok {
		line := h.encode(f.fill(n, func(s string) int { return len(h.encode(s)) }))
		return [][]int32{h.pad(line, n)}
	}
	if !h.stream.Contiguous() {
		next := func() string { return strings.Trim(string(h.next()), " \t\r\n") }
		// lead is the space before a sentence unless it starts a paragraph.
		lead := func() string {
			if len(out) == 0 && at.block {
				return at.lead
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
		s := string(h.next())
		if len(out) == 0 && len(rest) == 0 && at.turn {
			s = at.lead + strings.TrimLeftFunc(s, unicode.IsSpace)
		}
		rest = append(rest, h.encode(s)...)
	}
	if h.err != nil {
		return nil
	}
	cut := n
	if len(h.tok.after("\n")) == 1 {
		for k := n; k > 0 && k > n-8; k-- {
			if h.tok.startsWord(rest[k]) {
				cut = k
				break
			}
		}
	}
	return append(out, h.pad(rest[:cut:cut], n))
}

// pad adds line breaks up to n tokens.
func (h *hay) pad(toks []int32, n int) []int32 {
	br := h.tok.after("\n")
	if len(toks) > n || len(toks) < n && len(br) != 1 {
		h.err = badOption("lengths", "with this tokenizer %s cannot be made %d tokens long", h.name, n)
		return nil
	}
	for len(toks) < n {
		toks = append(toks, br[0])
	}
	return toks
}
