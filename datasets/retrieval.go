package datasets

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// Value is the kind of thing that a needle holds.
type Value string

// The kinds of values. The zero value of an option means the task's own.
const (
	// ValueNumber is a number of Digits decimal digits.
	ValueNumber Value = "number"
	// ValueWord is one word of the purpose's passkey words: the shortest answer.
	ValueWord Value = "word"
	// ValueUUID is a UUID, for TaskUUID.
	ValueUUID Value = "uuid"
	// ValueCredential is an API key, a password or a constant, for TaskDormant.
	ValueCredential Value = "credential"
)

// None asks for no distractors, where 0 means the task's default.
const None = -1

// TaskOptions describes a dataset of an evaluation task: one question per sample.
// The retrieval tasks are those of RULER (Hsieh et al. 2024), TaskUUID is that of
// Liu et al. 2023. As in RULER the prompt ends with the words that the answer
// begins with ("The special magic number for Lisbon mentioned in the text is:"), so
// that a model that repeats the question does not use up the tokens it is given.
type TaskOptions struct {
	// Task is one of TaskMultiKey, TaskMultiValue, TaskMultiQuery, TaskVariables,
	// TaskUUID, TaskDormant and TaskText.
	Task string
	// Lengths are whole samples' lengths in tokens.
	Lengths []int
	// Depths are where the needle stands: 0 is before the haystack, 1 behind it.
	// Empty means random depths: 5 to 95 %, a dormant credential's at most 10 %.
	// Only for tasks that ask for one needle; TaskDormant takes none above 0.1.
	Depths []float64
	// Count is the number of samples; 0 means one for each length and depth. Sample
	// i has length and depth number i modulo len(Lengths) x max(1, len(Depths)),
	// the depths of the first length first, and is the same whatever Count is.
	Count int
	// Needles are asked for together: the values of TaskMultiValue (0 means 4), the
	// keys of TaskMultiQuery (4), the variables of TaskVariables' chain (5).
	Needles int
	// Distractors are not asked for: other keys of TaskMultiKey (0 means 3),
	// TaskMultiValue and TaskMultiQuery (none), other chains of TaskVariables (1),
	// questions and answers in between of TaskDormant (3). None means none.
	Distractors int
	// Value is what is asked for: ValueNumber or ValueWord, for TaskUUID also
	// ValueUUID, for TaskDormant also ValueCredential, which are their defaults.
	Value Value
	// Digits of numbers, 1 to 18; 0 means 7, for TaskVariables 5.
	Digits int
	// Seed, with Purpose, determines everything random.
	Seed    uint64
	Purpose Purpose
	// Haystack is the filler; nil means Prose. TaskUUID makes pairs whatever it is.
	Haystack Haystack
	// ToolVersion is noted in the dataset's Meta.
	ToolVersion string
}

// maxDigits keeps numbers within an int64.
const maxDigits = 18

// dormantDepth is the greatest depth of a dormant credential.
const dormantDepth = 0.1

// traits say which options a task takes.
type traits struct {
	needles, distractors int // defaults; 0 needles: asks for one or none
	distracts            bool
	depths               bool
	values               []Value // the first is the default
	digits               int
	make                 func(*maker, *rand.Rand, float64) (*quiz, error)
}

func taskTraits(task string) (traits, bool) {
	short := []Value{ValueNumber, ValueWord}
	switch task {
	case TaskMultiKey:
		return traits{distractors: 3, distracts: true, depths: true, values: short, digits: 7, make: (*maker).multiKey}, true
	case TaskMultiValue:
		return traits{needles: 4, distracts: true, values: short, digits: 7, make: (*maker).multiValue}, true
	case TaskMultiQuery:
		return traits{needles: 4, distracts: true, values: short, digits: 7, make: (*maker).multiQuery}, true
	case TaskVariables:
		return traits{needles: 5, distractors: 1, distracts: true, values: short, digits: 5, make: (*maker).variables}, true
	case TaskUUID:
		return traits{depths: true, values: []Value{ValueUUID, ValueNumber, ValueWord}, digits: 7, make: (*maker).uuid}, true
	case TaskDormant:
		return traits{distractors: 3, distracts: true, depths: true, values: []Value{ValueCredential, ValueNumber, ValueWord}, digits: 7,
			make: (*maker).dormant}, true
	case TaskText:
		return traits{}, true
	}
	return traits{}, false
}

// Tasks are the tasks that Build makes.
func Tasks() []string {
	return []string{TaskMultiKey, TaskMultiValue, TaskMultiQuery, TaskVariables, TaskUUID, TaskDormant, TaskText}
}

// taskParameters is what Meta.Parameters holds: the options, resolved.
type taskParameters struct {
	Lengths     []int     `json:"lengths"`
	Depths      []float64 `json:"depths,omitempty"`
	Count       int       `json:"count"`
	Needles     int       `json:"needles,omitempty"`
	Distractors int       `json:"distractors,omitempty"`
	Value       Value     `json:"value,omitempty"`
	Digits      int       `json:"digits,omitempty"`
	Format      string    `json:"format"`
	Template    string    `json:"template_sha256,omitempty"`
}

// resolve checks the options and fills in the task's defaults.
func (o *TaskOptions) resolve() (traits, error) {
	t, ok := taskTraits(o.Task)
	if !ok {
		return t, badOption("task", "%q is none of %s", o.Task, strings.Join(Tasks(), ", "))
	}
	if err := checkLengths(o.Lengths); err != nil {
		return t, err
	}
	if len(o.Depths) > 0 && !t.depths {
		return t, badOption("depths", "those of %s are random", o.Task)
	}
	if len(o.Depths) > maxSamples/len(o.Lengths) {
		return t, badOption("depths", "%d lengths x %d depths are more than %d", len(o.Lengths), len(o.Depths), maxSamples)
	}
	for _, d := range o.Depths {
		if !(d >= 0 && d <= 1) {
			return t, badOption("depths", "needs values from 0 to 1, have %v", d)
		}
		if o.Task == TaskDormant && d > dormantDepth {
			return t, badOption("depths", "a dormant credential stands in the first %v of the text, not at %v", dormantDepth, d)
		}
	}
	if o.Count == 0 {
		o.Count = len(o.Lengths) * max(1, len(o.Depths))
	}
	switch {
	case o.Count < 0 || o.Count > maxSamples:
		return t, badOption("count", "needs 1 to %d samples, have %d", maxSamples, o.Count)
	case o.Count*(slices.Max(o.Lengths)/2+1) > maxTokens:
		return t, badOption("count", "%d samples of these lengths are too many tokens to hold", o.Count)
	case o.Needles != 0 && t.needles == 0:
		return t, badOption("needles", "%s takes no number of them", o.Task)
	case o.Needles < 0 || o.Needles > maxPasskeys:
		return t, badOption("needles", "needs 1 to %d, have %d", maxPasskeys, o.Needles)
	case o.Distractors > 0 && !t.distracts:
		return t, badOption("distractors", "%s takes none", o.Task)
	case o.Distractors < None || o.Distractors > maxPasskeys:
		return t, badOption("distractors", "needs up to %d, have %d", maxPasskeys, o.Distractors)
	case o.Value != "" && !slices.Contains(t.values, o.Value):
		return t, badOption("value", "%s does not ask for %q", o.Task, o.Value)
	case o.Digits < 0 || o.Digits > maxDigits:
		return t, badOption("digits", "needs 1 to %d, have %d", maxDigits, o.Digits)
	}
	if o.Needles == 0 {
		o.Needles = t.needles
	}
	switch o.Distractors {
	case 0:
		o.Distractors = t.distractors
	case None:
		o.Distractors = 0
	}
	if o.Value == "" && len(t.values) > 0 {
		o.Value = t.values[0]
	}
	if o.Digits == 0 {
		o.Digits = t.digits
	}
	if o.Task == TaskUUID {
		// Which pairs, is said for each sample.
		o.Haystack = pairs{}
	}
	return t, nil
}

// Build makes a dataset of an evaluation task. A nil chat gives the plain format;
// TaskText uses neither. Errors: *OptionError, *LengthError, or what chat returned.
func Build(tok Tokenizer, chat Chat, o TaskOptions) (*Dataset, error) {
	t, err := o.resolve()
	if err != nil {
		return nil, err
	}
	turns := 1
	switch o.Task {
	case TaskDormant:
		turns += o.Distractors
	case TaskText:
		chat = nil
	}
	b, err := newBuilder(tok, chat, o.Task, o.Purpose, o.Seed, o.Haystack, turns)
	if err != nil {
		return nil, err
	}
	if o.Task == TaskText {
		b.format, b.template = "text", ""
	}
	m := &maker{b: b, o: &o}
	ds := &Dataset{Meta: b.meta(o.ToolVersion)}
	for id := range o.Count {
		cell := id % (len(o.Lengths) * max(1, len(o.Depths)))
		length := o.Lengths[cell/max(1, len(o.Depths))]
		var s Sample
		if o.Task == TaskText {
			s, err = b.runningText(id, length)
		} else {
			r := b.rand("needles", uint64(id))
			depth := randomDepth(r)
			if o.Task == TaskDormant {
				depth = dormantDepth * r.Float64()
			}
			if len(o.Depths) > 0 {
				depth = o.Depths[cell%len(o.Depths)]
			}
			var q *quiz
			if q, err = t.make(m, r, depth); err == nil {
				s, err = b.sample(id, length, false, q)
			}
		}
		if err != nil {
			return nil, err
		}
		ds.Samples = append(ds.Samples, s)
	}
	p := taskParameters{Lengths: o.Lengths, Depths: o.Depths, Count: o.Count, Needles: o.Needles, Distractors: o.Distractors,
		Value: o.Value, Format: b.format, Template: b.template}
	if o.Value == ValueNumber || o.Task == TaskDormant {
		p.Digits = o.Digits
	}
	return b.finish(ds, p)
}

// runningText makes a sample that is nothing but haystack, cut off at the exact token.
func (b *builder) runningText(id, length int) (Sample, error) {
	begin := b.tok.first("")
	if m := len(begin) + minHaystack; length < m {
		return Sample{}, &LengthError{Sample: id, Length: length, Minimum: m}
	}
	stream, err := b.haystack.Stream(b.purpose, b.rand("haystack", uint64(id)))
	if err != nil {
		return Sample{}, err
	}
	h := hay{tok: b.tok, name: b.haystack.Name(), stream: stream}
	toks := begin
	for len(toks) < length && h.err == nil {
		toks = append(toks, h.encode(string(h.next()))...)
	}
	if h.err != nil {
		return Sample{}, h.err
	}
	s := Sample{ID: id, Task: b.task, Seed: b.seed, Haystack: b.haystack.Name(), TargetTokens: length}
	s.assemble([]piece{{SpanHaystack, 0, toks[:length]}})
	return s, nil
}

// maker words the samples of the retrieval tasks.
type maker struct {
	b *builder
	o *TaskOptions
}

// drawNumber draws a number of so many digits.
func drawNumber(r *rand.Rand, digits int) string {
	least := int64(1)
	for range digits - 1 {
		least *= 10
	}
	return fmt.Sprint(least + r.Int64N(9*least))
}

// values draws n different values of a kind.
func (b *builder) values(r *rand.Rand, kind Value, digits, n int) ([]string, error) {
	var draw func() string
	pool := b.lex.passwords[b.purpose]
	switch kind {
	case ValueWord:
		if n > len(pool) {
			return nil, badOption("value", "%d different words are needed, there are %d", n, len(pool))
		}
		draw = func() string { return pool[r.IntN(len(pool))] }
	case ValueUUID:
		draw = func() string { return drawUUID(r, b.purpose) }
	default:
		// With at most half of all numbers in use a free one is found soon.
		if digits < 4 && 2*n > [...]int{0, 9, 90, 900}[digits] {
			return nil, badOption("digits", "%d different numbers of %d digits are needed", n, digits)
		}
		draw = func() string { return drawNumber(r, digits) }
	}
	var out []string
	for len(out) < n {
		if v := draw(); !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return out, nil
}

// cities draws n different cities.
func (b *builder) cities(r *rand.Rand, n int) ([]string, error) {
	all := b.lex.people[b.purpose].cities
	if n > len(all) {
		return nil, badOption("needles", "%d different keys are needed, there are %d", n, len(all))
	}
	var out []string
	for _, i := range r.Perm(len(all))[:n] {
		out = append(out, all[i])
	}
	return out, nil
}

// noun is what a magic value is called.
func (v Value) noun() string {
	if v == ValueWord {
		return "word"
	}
	return "number"
}

const textEnds = "\n\nThe text ends here.\n\n"

func magicIntro(v Value) string {
	return "Read the text below with care. Some special magic " + v.noun() + "s are hidden in it. Remember them; you will be asked for them afterwards.\n\n"
}

func magicNeedle(v Value, city, value string) string {
	return "The special magic " + v.noun() + " for " + city + " is: " + value + "."
}

func magicQuestion(v Value, city string) string {
	return "What is the special magic " + v.noun() + " for " + city + " mentioned in the text?"
}

func magicAnswer(v Value, city string) string {
	return "The special magic " + v.noun() + " for " + city + " mentioned in the text is:"
}

func magicAnswers(v Value, cities string) string {
	return "The special magic " + v.noun() + "s for " + cities + " mentioned in the text are:"
}

// byDepth sorts inserts, the first of equals first.
func byDepth(inserts []insert) {
	slices.SortStableFunc(inserts, func(a, b insert) int {
		switch {
		case a.depth < b.depth:
			return -1
		case a.depth > b.depth:
			return 1
		}
		return 0
	})
}

// distract adds magic needles that are not asked for.
func (m *maker) distract(q *quiz, r *rand.Rand, cities, values []string) {
	for i, city := range cities {
		q.inserts = append(q.inserts, insert{kind: SpanDistractor, text: magicNeedle(m.o.Value, city, values[i]), depth: randomDepth(r)})
	}
}

// draw draws cities and as many values.
func (m *maker) draw(r *rand.Rand, cities, values int) ([]string, []string, error) {
	c, err := m.b.cities(r, cities)
	if err != nil {
		return nil, nil, err
	}
	v, err := m.b.values(r, m.o.Value, m.o.Digits, values)
	return c, v, err
}

// multiKey hides needles for several cities and asks for one.
func (m *maker) multiKey(r *rand.Rand, depth float64) (*quiz, error) {
	cities, values, err := m.draw(r, 1+m.o.Distractors, 1+m.o.Distractors)
	if err != nil {
		return nil, err
	}
	v := m.o.Value
	q := &quiz{
		intro:     magicIntro(v),
		outro:     textEnds,
		inserts:   []insert{{kind: SpanNeedle, text: magicNeedle(v, cities[0], values[0]), depth: depth}},
		questions: []string{magicQuestion(v, cities[0])},
		begin:     magicAnswer(v, cities[0]),
		answers:   values[:1],
		expected:  values[:1],
	}
	m.distract(q, r, cities[1:], values[1:])
	byDepth(q.inserts)
	return q, nil
}

// multiValue hides several values of one city and asks for all.
func (m *maker) multiValue(r *rand.Rand, _ float64) (*quiz, error) {
	n := m.o.Needles
	cities, values, err := m.draw(r, 1+m.o.Distractors, n+m.o.Distractors)
	if err != nil {
		return nil, err
	}
	v := m.o.Value
	q := &quiz{
		intro:     magicIntro(v),
		outro:     textEnds,
		questions: []string{"What are all the special magic " + v.noun() + "s for " + cities[0] + " mentioned in the text?"},
		begin:     magicAnswers(v, cities[0]),
		answers:   []string{strings.Join(values[:n], ", ")},
		expected:  values[:n],
	}
	for i, depth := range sortedDepths(r, n) {
		q.inserts = append(q.inserts, insert{kind: SpanNeedle, depth: depth,
			text: "One of the special magic " + v.noun() + "s for " + cities[0] + " is: " + values[i] + "."})
	}
	m.distract(q, r, cities[1:], values[n:])
	byDepth(q.inserts)
	return q, nil
}

// multiQuery hides needles for several cities and asks for several at once, in
// another order than that of the text.
func (m *maker) multiQuery(r *rand.Rand, _ float64) (*quiz, error) {
	n := m.o.Needles
	cities, values, err := m.draw(r, n+m.o.Distractors, n+m.o.Distractors)
	if err != nil {
		return nil, err
	}
	v := m.o.Value
	q := &quiz{intro: magicIntro(v), outro: textEnds, expected: values[:n]}
	for i, depth := range sortedDepths(r, n) {
		q.inserts = append(q.inserts, insert{kind: SpanNeedle, text: magicNeedle(v, cities[i], values[i]), depth: depth})
	}
	var askedCities, askedValues []string
	for _, i := range r.Perm(n) {
		askedCities, askedValues = append(askedCities, cities[i]), append(askedValues, values[i])
	}
	question := "What are the special magic " + v.noun() + "s for " + enumerate(askedCities) + " mentioned in the text?"
	q.begin = magicAnswers(v, enumerate(askedCities))
	if n == 1 {
		question, q.begin = magicQuestion(v, askedCities[0]), magicAnswer(v, askedCities[0])
	}
	q.questions, q.answers = []string{question}, []string{strings.Join(askedValues, ", ")}
	m.distract(q, r, cities[n:], values[n:])
	byDepth(q.inserts)
	return q, nil
}

// enumerate writes "a", "a and b", or "a, b and c".
func enumerate(list []string) string {
	last := len(list) - 1
	if last == 0 {
		return list[0]
	}
	return strings.Join(list[:last], ", ") + " and " + list[last]
}

func sortedDepths(r *rand.Rand, n int) []float64 {
	out := make([]float64, n)
	for i := range out {
		out[i] = randomDepth(r)
	}
	slices.Sort(out)
	return out
}

// variableLetters are what names of variables begin with, so that no two purposes
// share one.
var variableLetters = map[Purpose]string{Calibration: "ABCDEFGHI", Search: "JKLMNOPQR", Certification: "STUVWXYZ"}

// drawVariable draws a name of five capital letters, as RULER has them.
func drawVariable(r *rand.Rand, p Purpose) string {
	first := variableLetters[p]
	name := []byte{first[r.IntN(len(first))]}
	for range 4 {
		name = append(name, byte('A'+r.IntN(26)))
	}
	return string(name)
}

// variables hides chains of assignments, each in its order, and asks for all
// variables of one.
func (m *maker) variables(r *rand.Rand, _ float64) (*quiz, error) {
	n, chains := m.o.Needles, 1+m.o.Distractors
	if n*chains > maxPasskeys {
		return nil, badOption("distractors", "%d chains of %d variables are more than %d", chains, n, maxPasskeys)
	}
	values, err := m.b.values(r, m.o.Value, m.o.Digits, chains)
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	names := make([][]string, chains)
	var turns []int // the chain of each assignment, in the order of the text
	for c := range names {
		for len(names[c]) < n {
			if v := drawVariable(r, m.b.purpose); !used[v] {
				used[v] = true
				names[c] = append(names[c], v)
			}
		}
		turns = append(turns, slices.Repeat([]int{c}, n)...)
	}
	r.Shuffle(len(turns), func(i, j int) { turns[i], turns[j] = turns[j], turns[i] })
	q := &quiz{
		intro:     "Read the text below with care. Assignments of variables are hidden in it. Remember them; you will be asked for them afterwards.\n\n",
		outro:     textEnds,
		questions: []string{"Which variables have the value " + values[0] + ", directly or by way of other variables?"},
		begin:     "The variables that have the value " + values[0] + " are:",
		answers:   []string{strings.Join(names[0], ", ")},
		expected:  names[0],
	}
	done := make([]int, chains)
	for i, depth := range sortedDepths(r, len(turns)) {
		c := turns[i]
		in := insert{kind: SpanDistractor, depth: depth}
		if c == 0 {
			in.kind = SpanNeedle
		}
		if k := done[c]; k == 0 {
			in.text = "VAR " + names[c][0] + " = " + values[c] + "."
		} else {
			in.text = "VAR " + names[c][k] + " = VAR " + names[c][k-1] + "."
		}
		done[c]++
		q.inserts = append(q.inserts, in)
	}
	return q, nil
}

// uuid hides one pair among others and asks for its value.
func (m *maker) uuid(r *rand.Rand, depth float64) (*quiz, error) {
	key := drawUUID(r, m.b.purpose)
	values, err := m.b.values(r, m.o.Value, m.o.Digits, 1)
	if err != nil {
		return nil, err
	}
	m.b.haystack = pairs{b: m.b, value: m.o.Value, digits: m.o.Digits, asked: values[0]}
	return &quiz{
		intro:     "Read the JSON object below with care. You will be asked for the value of one of its keys afterwards.\n\n{\n",
		outro:     "\"end\": true\n}\n\nThe object ends here.\n\n",
		inserts:   []insert{{kind: SpanNeedle, text: pairLine(key, values[0]), depth: depth}},
		questions: []string{"What is the value of the key \"" + key + "\"?"},
		begin:     "The value of this key is \"",
		answers:   values,
		expected:  values,
		lines:     true,
	}, nil
}

// dormant states a credential in passing, then has the conversation turn to other
// things: magic values are stated, asked for and answered. At the end it asks for
// the credential.
func (m *maker) dormant(r *rand.Rand, depth float64) (*quiz, error) {
	n := m.o.Distractors
	cities, err := m.b.cities(r, 1+n)
	if err != nil {
		return nil, err
	}
	numbers, err := m.b.values(r, ValueNumber, m.o.Digits, 1+n)
	if err != nil {
		return nil, err
	}
	word, err := m.b.values(r, ValueWord, 0, 1)
	if err != nil {
		return nil, err
	}
	thing, secret := "", ""
	kind := r.IntN(3)
	switch m.o.Value {
	case ValueNumber:
		kind = 2
	case ValueWord:
		kind = 1
	}
	switch kind {
	case 0:
		thing, secret = "the API key for the "+cities[0]+" server", drawAPIKey(r)
	case 1:
		thing, secret = "the password for the "+cities[0]+" account", word[0]
		if m.o.Value == ValueCredential {
			secret += "-" + drawNumber(r, 4)
		}
	default:
		thing, secret = "the constant MAX_ROWS of the "+cities[0]+" database", numbers[0]
	}
	q := &quiz{
		intro:     "Read the text below. Questions are asked in between and at its end.\n\n",
		outro:     textEnds + "One more question.\n\n",
		inserts:   []insert{{kind: SpanNeedle, text: "Incidentally, " + thing + " is " + secret + ".", depth: depth, early: true}},
		questions: []string{"What is " + thing + "?"},
		begin:     "The" + strings.TrimPrefix(thing, "the") + " is",
		answers:   []string{secret},
		expected:  []string{secret},
	}
	for i, city := range cities[1:] {
		// Questions are spread over 20 to 95 % of the text; what each asks for
		// stands anywhere before it, but behind the credential.
		asked := 0.2 + float64(0.75*(float64(i)+r.Float64())/float64(n))
		stated := 0.12 + float64((asked-0.12)*r.Float64())
		q.inserts = append(q.inserts,
			insert{kind: SpanDistractor, text: magicNeedle(ValueNumber, city, numbers[1+i]), depth: stated},
			insert{kind: SpanDialog, depth: asked,
				question: magicQuestion(ValueNumber, city), answer: "The special magic number for " + city + " is " + numbers[1+i] + "."})
	}
	byDepth(q.inserts)
	return q, nil
}

// drawAPIKey draws eight capital letters and digits, without those that look alike.
func drawAPIKey(r *rand.Rand) string {
	const signs = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
	key := make([]byte, 8)
	for i := range key {
		key[i] = signs[r.IntN(len(signs))]
	}
	return string(key)
}
