// Package datasets makes synthetic retrieval tasks for calibrating and testing
// KV-cache policies: token ids with labelled spans, over a haystack of seeded
// prose or of the user's own text. Nothing downstream has to look for text
// again: where a needle, a question or an answer stands is a token range.
//
// The same options, tokenizer and chat template give the same bytes on every
// machine. A dataset is stored as one Parquet file (see Save) whose content
// hash is verified when it is read.
package datasets

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"math"
)

// SpanKind says what the tokens of a span are.
type SpanKind string

// The kinds of spans. The spans of a sample are sorted, do not overlap and
// cover every token.
const (
	// SpanSink is the first token: BOS, or what stands first without one. Models
	// park attention there whatever it says.
	SpanSink SpanKind = "sink"
	// SpanChat is text of the chat template (role headers, end-of-turn marks, a
	// default system prompt), or the labels of the plain format.
	SpanChat SpanKind = "chat"
	// SpanInstruction is the task's fixed text around the haystack, and what the
	// answer begins with where that is part of the prompt.
	SpanInstruction SpanKind = "instruction"
	// SpanHaystack is a stretch of filler between needles.
	SpanHaystack SpanKind = "haystack"
	// SpanNeedle is a sentence that has to be found.
	SpanNeedle SpanKind = "needle"
	// SpanDistractor is a sentence of a needle's form that no question asks for.
	SpanDistractor SpanKind = "distractor"
	// SpanDialog is a question of an earlier turn, or its answer, that nobody
	// scores: it stands in the conversation as given.
	SpanDialog SpanKind = "dialog"
	// SpanQuestion asks for needle Index, or for all needles where it is the only one.
	SpanQuestion SpanKind = "question"
	// SpanAnswer is the gold answer to question Index.
	SpanAnswer SpanKind = "answer"
)

// Span is a labelled range of tokens, half open: [Start, End).
type Span struct {
	Kind SpanKind
	// Index is the number of the needle, question or answer; for the other
	// kinds it counts the spans of that kind from 0.
	Index      int
	Start, End int
}

// Len is the number of tokens.
func (s Span) Len() int { return s.End - s.Start }

// Sample is one prompt with its gold answers.
type Sample struct {
	// ID is the sample's index in its dataset, from 0.
	ID int
	// Task is the dataset's task, one of the Task constants.
	Task string
	// Tokens are the token ids, prompt and answers.
	Tokens []int32
	// Spans cover Tokens without gaps or overlaps, in order.
	Spans []Span
	// TargetTokens is the length that was asked for; it equals len(Tokens).
	TargetTokens int
	// Depths says for each needle which fraction of the haystack's tokens
	// stands before it. Needles are put between sentences, so it differs a
	// little from AskedDepths.
	Depths []float64
	// AskedDepths are the depths as drawn, or as the grid's cell names them.
	AskedDepths []float64
	// Seed is the dataset's seed. (Seed, ID) and the purpose determine the sample.
	Seed uint64
	// Haystack is "prose", "pairs" (TaskUUID), or "files:" and the digest of the
	// user's files.
	Haystack string
	// Expected holds for each needle the text that it is asked for. Where every
	// needle has a question of its own that is the whole answer, else a part of the
	// one answer.
	Expected []string
}

// Find returns the spans of a kind in order of position.
func (s *Sample) Find(kind SpanKind) []Span {
	var out []Span
	for _, sp := range s.Spans {
		if sp.Kind == kind {
			out = append(out, sp)
		}
	}
	return out
}

// PromptLen is the number of tokens before the first answer; all of them when
// there is no answer.
func (s *Sample) PromptLen() int {
	for _, sp := range s.Spans {
		if sp.Kind == SpanAnswer {
			return sp.Start
		}
	}
	return len(s.Tokens)
}

// AnswerRows returns the query positions whose next token is an answer token,
// ascending: every answer position less one.
func (s *Sample) AnswerRows() []int {
	var rows []int
	for _, sp := range s.Spans {
		if sp.Kind != SpanAnswer {
			continue
		}
		for p := sp.Start; p < sp.End; p++ {
			rows = append(rows, p-1)
		}
	}
	return rows
}

// TailStart is the position of the first token of the first question: from
// there to the end is the question/answer tail on which DuoAttention's loss is
// taken. It is len(Tokens) when there is no question.
func (s *Sample) TailStart() int {
	for _, sp := range s.Spans {
		if sp.Kind == SpanQuestion {
			return sp.Start
		}
	}
	return len(s.Tokens)
}

// Quiz returns the one test that a sample makes for an evaluation: prompt is what
// a server would be sent, gold are the tokens of the expected answer, expected the
// strings that all have to occur in what the model writes.
//
// A sample with several questions (TaskPasskeys) is tested with the last one; the
// earlier questions and their gold answers are part of the prompt. A sample
// without question (TaskText) gives all its tokens and nothing to expect. The
// slices are parts of the sample.
func (s *Sample) Quiz() (prompt, gold []int32, expected []string) {
	answers := s.Find(SpanAnswer)
	if len(answers) == 0 {
		return s.Tokens, nil, nil
	}
	last := answers[len(answers)-1]
	expected = s.Expected
	if n := len(answers); n > 1 {
		expected = expected[n-1 : n : n]
	}
	return s.Tokens[:last.Start:last.Start], s.Tokens[last.Start:last.End:last.End], expected
}

// QuestionStart is the position at which the turn of Quiz's question begins, or
// the question itself where it stands in one turn with the haystack. What comes
// before does not say what will be asked for: it is the context that a cache is
// compressed to when the question is not known yet. It is len(Tokens) when there
// is no question.
func (s *Sample) QuestionStart() int {
	for i := len(s.Spans) - 1; i >= 0; i-- {
		if s.Spans[i].Kind != SpanQuestion {
			continue
		}
		if i > 0 && s.Spans[i-1].Kind == SpanChat {
			i--
		}
		return s.Spans[i].Start
	}
	return len(s.Tokens)
}

// Validate checks a sample against a vocabulary of vocab ids; it needs neither
// tokenizer nor model. The error names the sample and what is wrong.
func (s *Sample) Validate(vocab int) error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("sample %d: %s", s.ID, fmt.Sprintf(format, args...))
	}
	if len(s.Tokens) == 0 {
		return fail("no tokens")
	}
	if s.TargetTokens != len(s.Tokens) {
		return fail("has %d tokens but a target of %d", len(s.Tokens), s.TargetTokens)
	}
	for i, t := range s.Tokens {
		if t < 0 || int(t) >= vocab {
			return fail("token %d is id %d, outside a vocabulary of %d", i, t, vocab)
		}
	}
	at, counts := 0, map[SpanKind]int{}
	for i, sp := range s.Spans {
		switch sp.Kind {
		case SpanSink, SpanChat, SpanInstruction, SpanHaystack, SpanNeedle, SpanDistractor, SpanDialog, SpanQuestion, SpanAnswer:
		default:
			return fail("span %d has unknown kind %q", i, sp.Kind)
		}
		if sp.Start != at || sp.End <= sp.Start || sp.End > len(s.Tokens) {
			return fail("span %d (%s) is [%d, %d); expected a non-empty one from %d within %d tokens",
				i, sp.Kind, sp.Start, sp.End, at, len(s.Tokens))
		}
		if sp.Index != counts[sp.Kind] {
			return fail("span %d is %s %d; expected number %d", i, sp.Kind, sp.Index, counts[sp.Kind])
		}
		counts[sp.Kind]++
		at = sp.End
	}
	if at != len(s.Tokens) {
		return fail("spans end at %d of %d tokens", at, len(s.Tokens))
	}
	if counts[SpanSink] != 1 || s.Spans[0] != (Span{SpanSink, 0, 0, 1}) {
		return fail("the first span must be the one sink token")
	}
	// Each needle has its question, or one question asks for all of them.
	n, asked := counts[SpanNeedle], counts[SpanQuestion]
	if asked != n && !(asked == 1 && n > 0) || counts[SpanAnswer] != asked || len(s.Expected) != n || len(s.Depths) != n || len(s.AskedDepths) != n {
		return fail("%d needles, %d questions, %d answers, %d expected texts, %d depths and %d asked depths: the counts differ",
			n, asked, counts[SpanAnswer], len(s.Expected), len(s.Depths), len(s.AskedDepths))
	}
	for i, d := range s.Depths {
		if !(d >= 0 && d <= 1) || !(s.AskedDepths[i] >= 0 && s.AskedDepths[i] <= 1) {
			return fail("depth %d is outside [0, 1]", i)
		}
	}
	return nil
}

// Meta is what is known of a dataset as a whole.
type Meta struct {
	// Task is one of the Task constants.
	Task string
	// Parameters is the options as resolved, as compact JSON.
	Parameters json.RawMessage
	// Purpose is what the dataset is for; purposes share no needles, names or haystacks.
	Purpose Purpose
	// Seed is the options' seed.
	Seed uint64
	// Haystack is as in Sample.
	Haystack string
	// Tokenizer is the fingerprint of the tokenizer that made the ids.
	Tokenizer string
	// ToolVersion is the version of the program that made the dataset.
	ToolVersion string
	// ContentHash is the SHA-256, in hex, of the samples' canonical bytes.
	ContentHash string
}

// Dataset is a set of samples of one task.
type Dataset struct {
	Meta    Meta
	Samples []Sample
}

// Validate checks every sample and the content hash.
func (d *Dataset) Validate(vocab int) error {
	for i := range d.Samples {
		if d.Samples[i].ID != i {
			return fmt.Errorf("sample at index %d has id %d", i, d.Samples[i].ID)
		}
		if err := d.Samples[i].Validate(vocab); err != nil {
			return err
		}
	}
	if got := HashSamples(d.Samples); got != d.Meta.ContentHash {
		return &HashError{Want: d.Meta.ContentHash, Got: got}
	}
	return nil
}

// HashError says that the samples are not those that the dataset was saved with.
type HashError struct{ Want, Got string }

func (e *HashError) Error() string {
	return fmt.Sprintf("content hash is %s, the samples give %s: the dataset was changed after it was made", e.Want, e.Got)
}

// HashSamples returns the SHA-256, in hex, of the samples' canonical bytes: all
// fields in the order of the struct, integers as 64-bit little endian (tokens
// as 32-bit), floats as IEEE bits, strings and lists led by their length.
func HashSamples(samples []Sample) string {
	h := canonical{h: sha256.New()}
	h.int(len(samples))
	for i := range samples {
		s := &samples[i]
		h.int(s.ID)
		h.str(s.Task)
		h.int(len(s.Tokens))
		for _, t := range s.Tokens {
			h.buf = binary.LittleEndian.AppendUint32(h.buf, uint32(t))
		}
		h.int(len(s.Spans))
		for _, sp := range s.Spans {
			h.str(string(sp.Kind))
			h.int(sp.Index)
			h.int(sp.Start)
			h.int(sp.End)
		}
		h.int(s.TargetTokens)
		h.floats(s.Depths)
		h.floats(s.AskedDepths)
		h.u64(s.Seed)
		h.str(s.Haystack)
		h.int(len(s.Expected))
		for _, e := range s.Expected {
			h.str(e)
		}
		h.flush()
	}
	h.flush()
	return hex.EncodeToString(h.h.Sum(nil))
}

type canonical struct {
	h   hash.Hash
	buf []byte
}

func (c *canonical) u64(v uint64) { c.buf = binary.LittleEndian.AppendUint64(c.buf, v) }
func (c *canonical) int(v int)    { c.u64(uint64(int64(v))) }
func (c *canonical) str(s string) { c.int(len(s)); c.buf = append(c.buf, s...) }
func (c *canonical) floats(v []float64) {
	c.int(len(v))
	for _, f := range v {
		c.u64(math.Float64bits(f))
	}
}
func (c *canonical) flush() { c.h.Write(c.buf); c.buf = c.buf[:0] }

// Tokenizer turns text into ids. Encode adds no BOS or EOS and recognises
// special tokens that are written out in the text, as chat templates do.
type Tokenizer interface {
	Encode(text string) []int32
	Decode(ids []int32) string
	// Token is the vocabulary's own spelling of an id.
	Token(id int32) string
	// BOS and EOS report the ids; false when the model has none.
	BOS() (int32, bool)
	EOS() (int32, bool)
	Fingerprint() string
}

// Message is one turn of a chat.
type Message struct {
	Role    string // "system", "user" or "assistant"
	Content string
}

// Chat renders a conversation as the model's template writes it; with
// addGenerationPrompt the text ends where the assistant's answer begins. It must
// be deterministic: a template that prints today's date has to be given a fixed
// one. A nil Chat stands for a model without template.
type Chat func(messages []Message, addGenerationPrompt bool) (string, error)

// Tasks.
const (
	TaskPasskeys   = "multi-passkey" // made by Passkeys
	TaskNeedleGrid = "needle-grid"   // made by NeedleGrid
	// Made by Build.
	TaskMultiKey   = "multi-key"         // several keys in the text, one asked for
	TaskMultiValue = "multi-value"       // several values of one key, all asked for
	TaskMultiQuery = "multi-query"       // several keys, all asked for at once
	TaskVariables  = "variable-tracking" // chains of assignments
	TaskUUID       = "uuid"              // a value among pairs of UUIDs
	TaskDormant    = "dormant"           // a credential that nobody refers to until the end
	TaskText       = "text"              // running text, no question
)

// Purpose keeps datasets for different stages apart: each has its own needle
// words, its own names and places, and its own stream of random numbers, so that
// what a plan was fitted or searched on cannot also certify it.
type Purpose string

// The purposes. The zero value of an option means Calibration.
const (
	Calibration   Purpose = "calibration"
	Search        Purpose = "search"
	Certification Purpose = "certification"
)
