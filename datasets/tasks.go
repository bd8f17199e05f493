package datasets

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strings"
)

// PasskeyOptions describes a multi-passkey dataset, the task that DuoAttention's
// gates are trained on: Passkeys needles of Words words each at random depths of a
// haystack, and as many questions and answers at the end.
type PasskeyOptions struct {
	// Count is the number of samples. Sample i is the same whatever Count is.
	Count int
	// Passkeys per sample; 0 means 10.
	Passkeys int
	// Words per passkey; 0 means 32.
	Words int
	// Lengths are the samples' lengths in tokens. Every cycle of len(Lengths)
	// samples has each of them once, in random order. Empty means Steps values
	// evenly spaced from MinLength to MaxLength.
	Lengths                     []int
	MinLength, MaxLength, Steps int
	// HaystackLengths says that a length is the haystack's own, without needles,
	// questions, answers and template, as the paper counts.
	HaystackLengths bool
	// Seed, with Purpose, determines everything random.
	Seed    uint64
	Purpose Purpose
	// Haystack is the filler; nil means Prose.
	Haystack Haystack
	// ToolVersion is noted in the dataset's Meta.
	ToolVersion string
}

// RecipePaper is the data of DuoAttention's paper (Xiao et al. 2024): 10 passkeys
// of 32 words, haystacks of 50 lengths from 1,000 to 32,000 tokens, 2,000 samples.
func RecipePaper() PasskeyOptions {
	return PasskeyOptions{Count: 2000, Passkeys: 10, Words: 32, MinLength: 1000, MaxLength: 32000, Steps: 50, HaystackLengths: true}
}

// RecipeCPU is a smaller version for training without a GPU: 4 passkeys of 16
// words, whole samples of 1,024 to 2,048 tokens in steps of 128, 125 samples.
func RecipeCPU() PasskeyOptions {
	return PasskeyOptions{Count: 125, Passkeys: 4, Words: 16, MinLength: 1024, MaxLength: 2048, Steps: 9}
}

// GridOptions describes a single-needle grid: Repeats samples for every length
// and depth, in this order: lengths, depths, repeats.
type GridOptions struct {
	// Lengths are whole samples' lengths in tokens.
	Lengths []int
	// Depths are where the needle stands: 0 is before the haystack, 1 behind it.
	Depths []float64
	// Repeats per cell, each with its own needle and haystack; 0 means 1.
	Repeats int
	// Value is ValueNumber (the default) or ValueWord.
	Value Value
	// Digits of numbers, 1 to 18; 0 means 7.
	Digits  int
	Seed    uint64
	Purpose Purpose
	// Haystack is the filler; nil means Prose.
	Haystack    Haystack
	ToolVersion string
}

// gridDigits are the digits of a grid's numbers unless told otherwise.
const gridDigits = 7

// The limits keep a mistyped option from filling memory.
const (
	maxSamples      = 1 << 20
	maxLength       = 1 << 24
	maxTokens       = 1 << 31
	maxPasskeys     = 1000
	maxPasskeyWords = 4096
)

func badOption(option, format string, args ...any) error {
	return &OptionError{Option: option, Reason: fmt.Sprintf(format, args...)}
}

// Linspace returns n lengths evenly spaced from lo to hi, both included, rounded
// to the nearest token.
func Linspace(lo, hi, n int) []int {
	if n <= 1 {
		return []int{lo}
	}
	out := make([]int, n)
	for i := range out {
		out[i] = lo + ((hi-lo)*i*2+(n-1))/(2*(n-1))
	}
	return out
}

// passkeyParameters is what Meta.Parameters holds: the options, resolved.
type passkeyParameters struct {
	Count           int    `json:"count"`
	Passkeys        int    `json:"passkeys"`
	Words           int    `json:"words"`
	Lengths         []int  `json:"lengths"`
	HaystackLengths bool   `json:"haystack_lengths"`
	Format          string `json:"format"`
	Template        string `json:"template_sha256"`
}

type gridParameters struct {
	Lengths  []int     `json:"lengths"`
	Depths   []float64 `json:"depths"`
	Repeats  int       `json:"repeats"`
	Value    Value     `json:"value,omitempty"`  // unless it is the default
	Digits   int       `json:"digits,omitempty"` // unless it is the default
	Format   string    `json:"format"`
	Template string    `json:"template_sha256"`
}

// Passkeys makes a multi-passkey dataset. A nil chat gives the plain format.
// Errors: *OptionError, *LengthError, or what chat returned.
func Passkeys(tok Tokenizer, chat Chat, o PasskeyOptions) (*Dataset, error) {
	if o.Passkeys == 0 {
		o.Passkeys = 10
	}
	if o.Words == 0 {
		o.Words = 32
	}
	lengths := o.Lengths
	if len(lengths) == 0 {
		switch {
		case o.MinLength <= 0 || o.MaxLength < o.MinLength:
			return nil, badOption("lengths", "needs a list, or 0 < minimum <= maximum; have %d and %d", o.MinLength, o.MaxLength)
		case o.Steps <= 0 || o.Steps > maxSamples:
			return nil, badOption("steps", "needs 1 to %d, have %d", maxSamples, o.Steps)
		case o.MaxLength > maxLength:
			return nil, badOption("lengths", "%d is more than %d tokens", o.MaxLength, maxLength)
		}
		lengths = Linspace(o.MinLength, o.MaxLength, o.Steps)
	}
	if err := checkLengths(lengths); err != nil {
		return nil, err
	}
	switch {
	case o.Count <= 0 || o.Count > maxSamples:
		return nil, badOption("count", "needs 1 to %d samples, have %d", maxSamples, o.Count)
	case o.Passkeys < 0 || o.Passkeys > maxPasskeys:
		return nil, badOption("passkeys", "needs 1 to %d, have %d", maxPasskeys, o.Passkeys)
	case o.Words < 0 || o.Words > maxPasskeyWords:
		return nil, badOption("words", "needs 1 to %d, have %d", maxPasskeyWords, o.Words)
	case o.Count*(slices.Max(lengths)/2+1) > maxTokens:
		return nil, badOption("count", "%d samples of these lengths are too many tokens to hold", o.Count)
	}
	b, err := newBuilder(tok, chat, TaskPasskeys, o.Purpose, o.Seed, o.Haystack, o.Passkeys)
	if err != nil {
		return nil, err
	}
	pool := b.lex.passwords[b.purpose]
	ds := &Dataset{Meta: b.meta(o.ToolVersion)}
	for id := range o.Count {
		// A new permutation of the lengths for every cycle.
		cycle := id / len(lengths)
		order := b.rand("lengths", uint64(cycle)).Perm(len(lengths))
		r := b.rand("needles", uint64(id))
		q := quiz{
			intro: "Read the text below with care. Passkeys are hidden in it, each a sequence of words. Remember every one of them; you will be asked for them afterwards.\n\n",
			outro: "\n\nThe text ends here. Answer with the words of the passkey and nothing else.\n\n",
		}
		var depths []float64
		used := map[string]bool{}
		for k := range o.Passkeys {
			key := drawPasskey(r, pool, o.Words)
			for try := 0; used[key] && try < 1000; try++ {
				key = drawPasskey(r, pool, o.Words)
			}
			if used[key] {
				return nil, badOption("words", "%d words per passkey are too few for %d different passkeys", o.Words, o.Passkeys)
			}
			used[key] = true
			q.inserts = append(q.inserts, insert{kind: SpanNeedle, text: "Remember the " + ordinalName(k+1) + " passkey: " + key + "."})
			q.questions = append(q.questions, "What is the "+ordinalName(k+1)+" passkey?")
			q.answers = append(q.answers, key)
			depths = append(depths, randomDepth(r))
		}
		slices.Sort(depths)
		for k := range q.inserts {
			q.inserts[k].depth = depths[k]
		}
		q.expected = q.answers
		s, err := b.sample(id, lengths[order[id%len(lengths)]], o.HaystackLengths, &q)
		if err != nil {
			return nil, err
		}
		ds.Samples = append(ds.Samples, s)
	}
	return b.finish(ds, passkeyParameters{o.Count, o.Passkeys, o.Words, lengths, o.HaystackLengths, b.format, b.template})
}

// randomDepth is uniform in 5 to 95 %.
func randomDepth(r *rand.Rand) float64 {
	// The conversion keeps a fused multiply-add from changing the last bit.
	return 0.05 + float64(0.9*r.Float64())
}

func drawPasskey(r *rand.Rand, pool []string, n int) string {
	words := make([]string, n)
	for i := range words {
		words[i] = pool[r.IntN(len(pool))]
	}
	return strings.Join(words, " ")
}

// NeedleGrid makes a single-needle dataset. A nil chat gives the plain format.
// Errors: *OptionError, *LengthError, or what chat returned.
func NeedleGrid(tok Tokenizer, chat Chat, o GridOptions) (*Dataset, error) {
	if o.Repeats == 0 {
		o.Repeats = 1
	}
	if err := checkLengths(o.Lengths); err != nil {
		return nil, err
	}
	if len(o.Depths) == 0 {
		return nil, badOption("depths", "needs at least one")
	}
	for _, d := range o.Depths {
		if !(d >= 0 && d <= 1) {
			return nil, badOption("depths", "needs values from 0 to 1, have %v", d)
		}
	}
	switch {
	case o.Repeats < 0 || o.Repeats > maxSamples || len(o.Depths) > maxSamples || len(o.Lengths)*len(o.Depths) > maxSamples/o.Repeats:
		return nil, badOption("repeats", "%d lengths x %d depths x %d repeats: needs 1 to %d samples", len(o.Lengths), len(o.Depths), o.Repeats, maxSamples)
	case o.Value != "" && o.Value != ValueNumber && o.Value != ValueWord:
		return nil, badOption("value", "%q is neither %s nor %s", o.Value, ValueNumber, ValueWord)
	case o.Digits < 0 || o.Digits > maxDigits:
		return nil, badOption("digits", "needs 1 to %d, have %d", maxDigits, o.Digits)
	case len(o.Lengths)*len(o.Depths)*o.Repeats*(slices.Max(o.Lengths)/2+1) > maxTokens:
		return nil, badOption("repeats", "this many samples of these lengths are too many tokens to hold")
	}
	if o.Digits == 0 {
		o.Digits = gridDigits
	}
	b, err := newBuilder(tok, chat, TaskNeedleGrid, o.Purpose, o.Seed, o.Haystack, 1)
	if err != nil {
		return nil, err
	}
	cities := b.lex.people[b.purpose].cities
	ds := &Dataset{Meta: b.meta(o.ToolVersion)}
	for _, length := range o.Lengths {
		for _, depth := range o.Depths {
			for range o.Repeats {
				id := len(ds.Samples)
				r := b.rand("needles", uint64(id))
				city := cities[r.IntN(len(cities))]
				value, err := b.values(r, o.Value, o.Digits, 1)
				if err != nil {
					return nil, err
				}
				s, err := b.sample(id, length, false, &quiz{
					intro:     magicIntro(o.Value),
					outro:     "\n\nThe text ends here. Answer with the " + o.Value.noun() + " and nothing else.\n\n",
					inserts:   []insert{{kind: SpanNeedle, text: magicNeedle(o.Value, city, value[0]), depth: depth}},
					questions: []string{magicQuestion(o.Value, city)},
					answers:   value,
					expected:  value,
				})
				if err != nil {
					return nil, err
				}
				ds.Samples = append(ds.Samples, s)
			}
		}
	}
	p := gridParameters{Lengths: o.Lengths, Depths: o.Depths, Repeats: o.Repeats, Format: b.format, Template: b.template}
	if o.Value == ValueWord {
		p.Value = o.Value
	} else if o.Digits != gridDigits {
		p.Digits = o.Digits
	}
	return b.finish(ds, p)
}

func checkLengths(lengths []int) error {
	if len(lengths) == 0 || len(lengths) > maxSamples {
		return badOption("lengths", "needs 1 to %d, have %d", maxSamples, len(lengths))
	}
	for _, n := range lengths {
		if n <= 0 || n > maxLength {
			return badOption("lengths", "needs 1 to %d tokens, have %d", maxLength, n)
		}
	}
	return nil
}

var ordinalNames = [...]string{"first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
	"eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth", "twentieth"}

// ordinalName is "first" to "twentieth", then "21st" and so on.
func ordinalName(n int) string {
	if n <= len(ordinalNames) {
		return ordinalNames[n-1]
	}
	return ordinalDigits(n)
}

// builder makes the samples of one dataset.
type builder struct {
	tok      *segments
	lex      *lexicon
	task     string
	purpose  Purpose
	seed     uint64
	haystack Haystack
	frame    []string // template text before each turn's content
	plain    bool
	format   string
	template string
}

// quiz is the text of one sample but for its haystack.
type quiz struct {
	intro, outro       string
	inserts            []insert // by rising depth
	questions, answers []string
	begin              string   // of every answer, as part of the prompt: not in answers
	expected           []string // per needle, in the order of the inserts
	lines              bool     // the haystack is of lines, not of paragraphs
}

// dialogs is the number of turns before that of the first question.
func (q *quiz) dialogs() int {
	n := 0
	for _, in := range q.inserts {
		if in.kind == SpanDialog {
			n++
		}
	}
	return n
}

// paragraph is what ends one.
func (q *quiz) paragraph() string {
	if q.lines {
		return "\n"
	}
	return "\n\n"
}

func newBuilder(tok Tokenizer, chat Chat, task string, purpose Purpose, seed uint64, h Haystack, questions int) (*builder, error) {
	lex, err := loadLexicon()
	if err != nil {
		return nil, err
	}
	if purpose == "" {
		purpose = Calibration
	}
	if _, ok := lex.people[purpose]; !ok {
		return nil, badOption("purpose", "%q is none of calibration, search, certification", purpose)
	}
	if h == nil {
		h = Prose()
	}
	b := &builder{tok: newSegments(tok), lex: lex, task: task, purpose: purpose, seed: seed, haystack: h, format: "chat"}
	if chat == nil {
		b.plain, b.format = true, "plain"
		b.frame = plainFrame(questions)
	} else if b.frame, err = chatFrame(chat, questions); err != nil {
		return nil, err
	}
	d := sha256.Sum256([]byte(strings.Join(b.frame, "\x00")))
	b.template = hex.EncodeToString(d[:])
	return b, nil
}

// rand is the generator for one use within one sample. Task, purpose and use are
// hashed into the seed, so no two of them share a stream.
func (b *builder) rand(use string, index uint64) *rand.Rand {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s/%s/%s", b.task, b.purpose, use)
	return rand.New(rand.NewPCG(b.seed^h.Sum64(), index))
}

func (b *builder) meta(version string) Meta {
	return Meta{Task: b.task, Purpose: b.purpose, Seed: b.seed, Haystack: b.haystack.Name(),
		Tokenizer: b.tok.Fingerprint(), ToolVersion: version}
}

func (b *builder) finish(ds *Dataset, parameters any) (*Dataset, error) {
	p, err := json.Marshal(parameters)
	if err != nil {
		return nil, fmt.Errorf("dataset parameters: %w", err)
	}
	ds.Meta.Parameters = p
	ds.Meta.ContentHash = HashSamples(ds.Samples)
	return ds, nil
}

// plainFrame is the frame for models without chat template.
func plainFrame(questions int) []string {
	f := []string{"", "\nAnswer: "}
	for range questions - 1 {
		f = append(f, "\n\nQuestion: ", "\nAnswer: ")
	}
	return f
}

// slot marks where a turn's content goes while the template is rendered. It has no
// white space at its ends, since templates trim contents.
func slot(i int) string { return fmt.Sprintf("KVPROFILE-SLOT-%d-END", i) }

// chatFrame renders a conversation of questions turns with slots for contents and
// returns the template's text before each content. The last answer follows the
// generation prompt, as on a server; what a template writes behind it is left off.
func chatFrame(chat Chat, questions int) ([]string, error) {
	var msgs []Message
	for i := range questions {
		msgs = append(msgs, Message{"user", slot(2 * i)})
		if i < questions-1 {
			msgs = append(msgs, Message{"assistant", slot(2*i + 1)})
		}
	}
	rest, err := chat(msgs, true)
	if err != nil {
		return nil, fmt.Errorf("chat template: %w", err)
	}
	var frame []string
	for i := range msgs {
		before, after, ok := strings.Cut(rest, slot(i))
		if !ok || strings.Contains(after, slot(i)) {
			return nil, fmt.Errorf("chat template: turn %d's content is not written exactly once, in order", i)
		}
		frame = append(frame, before)
		rest = after
	}
	return append(frame, rest), nil
}
