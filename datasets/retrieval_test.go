package datasets

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func mustBuild(t testing.TB, tok Tokenizer, chat Chat, o TaskOptions) *Dataset {
	t.Helper()
	d, err := Build(tok, chat, o)
	if err != nil {
		t.Fatalf("%s: %v", o.Task, err)
	}
	if err := d.Validate(wordVocab); err != nil {
		t.Fatalf("%s: %v", o.Task, err)
	}
	return d
}

// asked are the tasks with a question.
func asked() []string {
	return slices.DeleteFunc(Tasks(), func(t string) bool { return t == TaskText })
}

var (
	magicSaid   = regexp.MustCompile(`pecial magic (?:number|word)s? for ([A-Z]\w+) is: (\w+)\.`) // not "mentioned in the text is: 7."
	magicAsked  = regexp.MustCompile(`What (?:is|are|are all) the special magic (?:number|word)s? for (.+?) mentioned in the text\?`)
	assignment  = regexp.MustCompile(`VAR (\w+) = (VAR )?(\w+)\.`)
	valueAsked  = regexp.MustCompile(`Which variables have the value (\w+)`)
	keyAsked    = regexp.MustCompile(`What is the value of the key "([^"]+)"\?`)
	secretAsked = regexp.MustCompile(`What is (the (?:API key|password|constant) [^?]+)\?`)
)

// solve answers the last question of a prompt from its text alone.
func solve(t *testing.T, task, prompt string) string {
	t.Helper()
	last := func(re *regexp.Regexp) string {
		all := re.FindAllStringSubmatch(prompt, -1)
		if len(all) == 0 {
			t.Fatalf("%s: no question in %q", task, prompt[max(0, len(prompt)-300):])
		}
		return all[len(all)-1][1]
	}
	switch task {
	case TaskMultiKey, TaskMultiValue, TaskMultiQuery:
		said := map[string][]string{}
		for _, m := range magicSaid.FindAllStringSubmatch(prompt, -1) {
			said[m[1]] = append(said[m[1]], m[2])
		}
		var out []string
		for _, city := range strings.Split(strings.ReplaceAll(last(magicAsked), " and ", ", "), ", ") {
			out = append(out, said[city]...)
		}
		return strings.Join(out, ", ")
	case TaskVariables:
		values := map[string]string{}
		var out []string
		for _, m := range assignment.FindAllStringSubmatch(prompt, -1) {
			if _, twice := values[m[1]]; twice {
				t.Errorf("%s is assigned twice", m[1])
			}
			if values[m[1]] = m[3]; m[2] != "" {
				v, ok := values[m[3]]
				if !ok {
					t.Errorf("%s is used before it is assigned", m[3])
				}
				values[m[1]] = v
			}
			if values[m[1]] == last(valueAsked) {
				out = append(out, m[1])
			}
		}
		return strings.Join(out, ", ")
	case TaskUUID:
		object := prompt[strings.Index(prompt, "{"):strings.Index(prompt, "\n\nThe object ends here")]
		var pairs map[string]any
		if err := json.Unmarshal([]byte(object), &pairs); err != nil {
			t.Fatalf("the object is not valid: %v\n%s", err, object)
		}
		s, _ := pairs[last(keyAsked)].(string)
		return s
	case TaskDormant:
		_, rest, _ := strings.Cut(prompt, "Incidentally, "+last(secretAsked)+" is ")
		secret, _, _ := strings.Cut(rest, ".")
		return secret
	}
	t.Fatalf("no solver for %s", task)
	return ""
}

func TestTasksAreWhatTheySay(t *testing.T) {
	type format struct {
		tok  *wordTokenizer
		chat Chat
	}
	for name, f := range map[string]format{
		"chatml":       {newWords(), chatML},
		"inst":         {newWords(), instChat},
		"plain":        {newWords(), nil},
		"inst marked":  {&wordTokenizer{spelling: map[int32]string{}, mark: true}, instChat},
		"plain marked": {&wordTokenizer{spelling: map[int32]string{}, mark: true, bos: "<|s|>"}, nil},
	} {
		for _, task := range asked() {
			for _, value := range []Value{"", ValueNumber, ValueWord} {
				t.Run(name+"/"+task+"/"+string(value), func(t *testing.T) {
					lengths := []int{700, 701, 1500}
					d := mustBuild(t, f.tok, f.chat, TaskOptions{Task: task, Lengths: lengths, Count: 6, Value: value, Seed: 5})
					if len(d.Samples) != 6 {
						t.Fatalf("%d samples", len(d.Samples))
					}
					for i := range d.Samples {
						s := &d.Samples[i]
						if len(s.Tokens) != lengths[i%3] {
							t.Errorf("sample %d has %d tokens, want %d", i, len(s.Tokens), lengths[i%3])
						}
						checkSample(t, f.tok, s, value)
					}
				})
			}
		}
	}
}

// checkSample checks what all tasks with one question have in common.
func checkSample(t *testing.T, tok Tokenizer, s *Sample, value Value) {
	t.Helper()
	needles, questions, answers := s.Find(SpanNeedle), s.Find(SpanQuestion), s.Find(SpanAnswer)
	if len(questions) != 1 || len(answers) != 1 || answers[0].End != len(s.Tokens) || s.TailStart() != questions[0].Start {
		t.Fatalf("questions %v, answers %v of %d tokens", questions, answers, len(s.Tokens))
	}
	prompt, gold, expected := s.Quiz()
	if len(prompt) != s.PromptLen() || !slices.Equal(slices.Concat(prompt, gold), s.Tokens) || !slices.Equal(expected, s.Expected) {
		t.Errorf("quiz of %d and %d tokens, %q", len(prompt), len(gold), expected)
	}
	answer := strings.TrimSpace(tok.Decode(gold))
	text := tok.Decode(prompt)
	if last := s.Spans[len(s.Spans)-2]; last.Kind != SpanInstruction || !regexp.MustCompile(`^ ?The .* (is:?|are:|is ")$`).MatchString(spanText(tok, s, last)) {
		t.Errorf("the answer begins with %q", spanText(tok, s, last))
	}
	if got := solve(t, s.Task, text); got != answer {
		t.Errorf("sample %d: the text says %q, the gold answer is %q", s.ID, got, answer)
	}
	total := 0
	for _, e := range expected {
		total += len(e)
		if !strings.Contains(answer, e) {
			t.Errorf("the answer %q lacks %q", answer, e)
		}
		uses := 1
		if s.Task == TaskVariables && e != expected[len(expected)-1] {
			uses = 2
		}
		// Short numbers stand in prose, and the pairs have few words to share.
		common := len(e) < 5 && e[0] <= '9' || s.Task == TaskUUID && value == ValueWord
		if got := len(regexp.MustCompile(`\b`+e+`\b`).FindAllString(text, -1)); got != uses && !common {
			t.Errorf("%q stands %d times in the prompt, want %d", e, got, uses)
		}
		if strings.Contains(spanText(tok, s, questions[0]), e) {
			t.Errorf("the question says the answer %q", e)
		}
	}
	if n := len(expected); len(answer) != total+2*(n-1) {
		t.Errorf("answer %q is more than %q", answer, expected)
	}
	var before, all int
	for _, sp := range s.Find(SpanHaystack) {
		all += sp.Len()
	}
	next := 0
	for _, sp := range s.Spans {
		switch sp.Kind {
		case SpanHaystack:
			before += sp.Len()
		case SpanNeedle:
			if got := float64(before) / float64(all); math.Abs(got-s.Depths[next]) > 1e-12 {
				t.Errorf("needle %d says depth %v, the spans say %v", next, s.Depths[next], got)
			}
			next++
		}
	}
	for i, sp := range needles {
		if got := spanText(tok, s, sp); !strings.Contains(got, expected[i]) || strings.Count(strings.TrimSpace(got), "\n") > 0 {
			t.Errorf("needle %d is %q, expected %q", i, got, expected[i])
		}
	}
	start := s.QuestionStart()
	if context := tok.Decode(s.Tokens[:start]); strings.Contains(context, strings.TrimSpace(spanText(tok, s, questions[0]))) ||
		start < needles[len(needles)-1].End || start > questions[0].Start {
		t.Errorf("the question's turn starts at %d: %q", start, tok.Decode(s.Tokens[start:]))
	}
	if s.Haystack == "prose" {
		checkSeams(t, text)
	}
}

func TestTaskForms(t *testing.T) {
	tok := newWords()
	build := func(o TaskOptions) *Sample {
		o.Lengths = []int{2000}
		return &mustBuild(t, tok, chatML, o).Samples[0]
	}
	for _, tc := range []struct {
		o                               TaskOptions
		needles, distractors, dialogs   int
		needle, distractor, answerMatch string
	}{
		{TaskOptions{Task: TaskMultiKey}, 1, 3, 0, `^The special magic number for \w+ is: \d{7}\.$`, `^The special magic number for \w+ is: \d{7}\.$`, `^\d{7}$`},
		{TaskOptions{Task: TaskMultiKey, Distractors: None, Digits: 3}, 1, 0, 0, `\d{3}\.$`, ``, `^\d{3}$`},
		{TaskOptions{Task: TaskMultiKey, Distractors: 25, Value: ValueWord}, 1, 25, 0, `^The special magic word for \w+ is: [a-z]+\.$`, `magic word`, `^[a-z]+$`},
		{TaskOptions{Task: TaskMultiValue}, 4, 0, 0, `^One of the special magic numbers for \w+ is: \d{7}\.$`, ``, `^\d{7}, \d{7}, \d{7}, \d{7}$`},
		{TaskOptions{Task: TaskMultiValue, Needles: 2, Distractors: 2, Digits: 1}, 2, 2, 0, `One of .*\d\.$`, `^The special magic number for \w+ is: \d\.$`, `^\d, \d$`},
		{TaskOptions{Task: TaskMultiQuery, Needles: 1, Value: ValueWord}, 1, 0, 0, `^The special magic word`, ``, `^[a-z]+$`},
		{TaskOptions{Task: TaskMultiQuery, Needles: 3, Distractors: 1, Digits: 18}, 3, 1, 0, `\d{18}\.$`, `\d{18}\.$`, `^(\d{18}, ){2}\d{18}$`},
		{TaskOptions{Task: TaskVariables}, 5, 5, 0, `^VAR [A-I][A-Z]{4} = (\d{5}|VAR [A-I][A-Z]{4})\.$`, `^VAR [A-I]`, `^([A-I][A-Z]{4}, ){4}[A-I][A-Z]{4}$`},
		{TaskOptions{Task: TaskVariables, Needles: 1, Distractors: 3, Value: ValueWord}, 1, 3, 0, `^VAR [A-Z]{5} = [a-z]+\.$`, `[a-z]+\.$`, `^[A-Z]{5}$`},
		{TaskOptions{Task: TaskUUID}, 1, 0, 0, `^"[0-9a-f-]{36}": "[0-9a-f-]{36}",$`, ``, `^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-8[0-9a-f]{3}-[0-9a-f]{12}$`},
		{TaskOptions{Task: TaskUUID, Value: ValueWord}, 1, 0, 0, `^"[0-9a-f-]{36}": "[a-z]+",$`, ``, `^[a-z]+$`},
		{TaskOptions{Task: TaskDormant}, 1, 3, 6, `^Incidentally, the (API key|password|constant) .* is \S+\.$`, `^The special magic number for`, `^([A-Z2-9]{8}|[a-z]+-\d{4}|\d{7})$`},
		{TaskOptions{Task: TaskDormant, Distractors: None, Value: ValueWord}, 1, 0, 0, `^Incidentally, the password .* is [a-z]+\.$`, ``, `^[a-z]+$`},
		{TaskOptions{Task: TaskDormant, Distractors: 5, Value: ValueNumber, Digits: 4}, 1, 5, 10, `MAX_ROWS .* is \d{4}\.$`, `\d{4}\.$`, `^\d{4}$`},
	} {
		s := build(tc.o)
		name := fmt.Sprintf("%+v", tc.o)
		for kind, want := range map[SpanKind]int{SpanNeedle: tc.needles, SpanDistractor: tc.distractors, SpanDialog: tc.dialogs} {
			if got := len(s.Find(kind)); got != want {
				t.Errorf("%s: %d %s spans, want %d", name, got, kind, want)
			}
		}
		for kind, re := range map[SpanKind]string{SpanNeedle: tc.needle, SpanDistractor: tc.distractor, SpanAnswer: tc.answerMatch} {
			for _, sp := range s.Find(kind) {
				if got := strings.TrimSpace(spanText(tok, s, sp)); !regexp.MustCompile(re).MatchString(got) {
					t.Errorf("%s: %s is %q, want %s", name, kind, got, re)
				}
			}
		}
		checkSample(t, tok, s, tc.o.Value)
	}
}

func TestDormant(t *testing.T) {
	tok := newWords()
	kinds := map[string]int{}
	for _, chat := range []Chat{chatML, instChat, nil} {
		d := mustBuild(t, tok, chat, TaskOptions{Task: TaskDormant, Lengths: []int{500, 900, 3000}, Count: 60, Distractors: 4, Seed: 2})
		for i := range d.Samples {
			s := &d.Samples[i]
			text := tok.Decode(s.Tokens)
			if s.Depths[0] > 0.1 || s.AskedDepths[0] > 0.1 || s.Depths[0] > s.AskedDepths[0] {
				t.Errorf("sample %d: depth %v, asked %v", i, s.Depths[0], s.AskedDepths[0])
			}
			needle := s.Find(SpanNeedle)[0]
			thing := secretAsked.FindStringSubmatch(spanText(tok, s, s.Find(SpanQuestion)[0]))[1]
			kinds[strings.Fields(thing)[1]]++
			if strings.Count(text, thing) != 2 || strings.Count(text, s.Expected[0]) != 2 {
				t.Errorf("sample %d: %s is referred to in between", i, thing)
			}
			dialogs := s.Find(SpanDialog)
			for k := 0; k < len(dialogs); k += 2 {
				q, a := dialogs[k], dialogs[k+1]
				if got := strings.TrimSpace(spanText(tok, s, a)); q.Start < needle.End || !strings.HasSuffix(got, " is "+solve(t, TaskMultiKey, tok.Decode(s.Tokens[:q.End]))+".") {
					t.Errorf("sample %d: %q is answered by %q", i, spanText(tok, s, q), got)
				}
			}
			if chat != nil {
				var msgs []Message
				at := s.Find(SpanInstruction)[0].Start
				for k := 0; k <= len(dialogs); k += 2 {
					end := s.Find(SpanQuestion)[0].End
					if k < len(dialogs) {
						end = dialogs[k].End
					}
					msgs = append(msgs, Message{"user", strings.TrimPrefix(tok.Decode(s.Tokens[at:end]), " ")})
					if k < len(dialogs) {
						msgs = append(msgs, Message{"assistant", strings.TrimPrefix(spanText(tok, s, dialogs[k+1]), " ")})
						at = s.Spans[slices.Index(s.Spans, dialogs[k+1])+1].End
					}
				}
				want, err := chat(msgs, true)
				if err != nil {
					t.Fatal(err)
				}
				// The prompt goes on with the answer's begin.
				begin := "The" + strings.TrimPrefix(thing, "the") + " is"
				if got := tok.Decode(s.Tokens[:s.PromptLen()]); got != want+begin {
					t.Errorf("sample %d is\n%q\nthe template writes\n%q", i, got, want)
				}
			}
		}
	}
	if len(kinds) != 3 {
		t.Errorf("kinds of credentials: %v", kinds)
	}
}

// Turns in the middle of a paragraph, in text that is read in order.
func TestDormantInFiles(t *testing.T) {
	one := strings.Repeat("It was the first of them. She said nothing to it, and nobody else did. The door stood open for a while. ", 100)
	for name, text := range map[string]string{"one paragraph": one, "paragraphs": strings.ReplaceAll(one, "while. ", "while.\n\n"), "lines": strings.ReplaceAll(one, ". ", ".\n")} {
		h, err := Files([]string{writeFile(t, text)})
		if err != nil {
			t.Fatal(err)
		}
		tok := newWords()
		var lengths []int
		for n := 420; n < 480; n++ {
			lengths = append(lengths, n)
		}
		for _, chat := range []Chat{chatML, instChat, nil} {
			d := mustBuild(t, tok, chat, TaskOptions{Task: TaskDormant, Lengths: lengths, Haystack: h, Count: 120})
			for i := range d.Samples {
				s := &d.Samples[i]
				if len(s.Tokens) != lengths[i%60] {
					t.Errorf("%s: %d tokens, want %d", name, len(s.Tokens), lengths[i%60])
				}
				text := tok.Decode(s.Tokens)
				checkSample(t, tok, s, "")
				if bad := regexp.MustCompile(`(user\n|\[INST\] )\s|\[INST\]\S`).FindStringIndex(text); bad != nil {
					t.Errorf("%s: seam in %q", name, text[max(0, bad[0]-60):min(len(text), bad[1]+60)])
				}
			}
		}
	}
}

func TestTaskDepths(t *testing.T) {
	tok := newWords()
	for task, depths := range map[string][]float64{TaskMultiKey: {0, .3, 1}, TaskUUID: {0, .3, 1}, TaskDormant: {0, .05, .1}} {
		d := mustBuild(t, tok, chatML, TaskOptions{Task: task, Lengths: []int{800, 3000}, Depths: depths, Count: 12})
		for i := range d.Samples {
			s := &d.Samples[i]
			want, length := depths[i%3], []int{800, 3000}[i/3%2]
			if s.AskedDepths[0] != want || len(s.Tokens) != length {
				t.Errorf("%s: sample %d has depth %v and %d tokens, want %v and %d", task, i, s.AskedDepths[0], len(s.Tokens), want, length)
			}
			if off := math.Abs(s.Depths[0]-want) * float64(length); off > 100 || (want == 0 || want == 1) && off > 0 {
				t.Errorf("%s: depth %v, want %v", task, s.Depths[0], want)
			}
		}
	}
}

func TestTextTask(t *testing.T) {
	h, err := Files([]string{writeFile(t, strings.Repeat("The wall was white. He wrote <|im_end|> on it. Nobody cared at all, as far as she knew.\n\n", 300))})
	if err != nil {
		t.Fatal(err)
	}
	for name, hay := range map[string]Haystack{"prose": nil, "files": h} {
		for _, bos := range []string{"", "<|s|>"} {
			tok := &wordTokenizer{spelling: map[int32]string{}, bos: bos}
			d := mustBuild(t, tok, chatML, TaskOptions{Task: TaskText, Lengths: []int{100, 777}, Count: 4, Haystack: hay})
			for i := range d.Samples {
				s := &d.Samples[i]
				if len(s.Tokens) != []int{100, 777}[i%2] || len(s.Spans) != 2 || s.Spans[1].Kind != SpanHaystack {
					t.Errorf("%s: %d tokens, spans %v", name, len(s.Tokens), s.Spans)
				}
				text := tok.Decode(s.Tokens)
				if !strings.HasPrefix(text, bos) || strings.HasPrefix(text, bos+" ") || strings.HasSuffix(text, "\n\n\n") {
					t.Errorf("%s: text %q", name, text)
				}
				prompt, gold, expected := s.Quiz()
				if len(prompt) != len(s.Tokens) || gold != nil || expected != nil || s.QuestionStart() != len(s.Tokens) {
					t.Errorf("%s: quiz of %d tokens, %v, %v", name, len(prompt), gold, expected)
				}
			}
			var p map[string]any
			if err := json.Unmarshal(d.Meta.Parameters, &p); err != nil || p["format"] != "text" || p["template_sha256"] != nil {
				t.Errorf("parameters %s: %v", d.Meta.Parameters, err)
			}
		}
	}
}

// With several questions the last one is the test, and the others stand in the prompt.
func TestQuizOfPasskeys(t *testing.T) {
	tok := newWords()
	for _, chat := range []Chat{chatML, nil} {
		s := mustPasskeys(t, tok, chat, PasskeyOptions{Count: 1, Passkeys: 3, Words: 4, Lengths: []int{600}}).Samples[0]
		prompt, gold, expected := s.Quiz()
		if !slices.Equal(expected, s.Expected[2:]) || strings.TrimSpace(tok.Decode(gold)) != s.Expected[2] || len(prompt)+len(gold) != len(s.Tokens) {
			t.Errorf("quiz %q, %q", tok.Decode(gold), expected)
		}
		if text := tok.Decode(prompt); strings.Count(text, s.Expected[0]) != 2 || strings.Count(text, s.Expected[2]) != 1 {
			t.Errorf("prompt ends in %q", text[len(text)-200:])
		}
		if rest := tok.Decode(s.Tokens[s.QuestionStart():]); !regexp.MustCompile(`^(<\|im_end\|>\n<\|im_start\|>user\n|\n\nQuestion: )What is the third passkey\?`).MatchString(rest) {
			t.Errorf("the question's turn is %q", rest)
		}
	}
}

func TestGridValues(t *testing.T) {
	tok := newWords()
	g := GridOptions{Lengths: []int{300}, Depths: []float64{.5}, Repeats: 5}
	plain := mustGrid(t, tok, chatML, g)
	if strings.Contains(string(plain.Meta.Parameters), "digits") {
		t.Errorf("parameters %s", plain.Meta.Parameters)
	}
	g.Digits = 7
	if same := mustGrid(t, tok, chatML, g); !reflect.DeepEqual(same, plain) {
		t.Error("seven digits are not the default")
	}
	g.Digits = 2
	for _, s := range mustGrid(t, tok, chatML, g).Samples {
		if !regexp.MustCompile(`^\d\d$`).MatchString(s.Expected[0]) {
			t.Errorf("expected %q", s.Expected)
		}
	}
	g.Value = ValueWord
	words := mustGrid(t, tok, chatML, g)
	for i := range words.Samples {
		s := &words.Samples[i]
		if got := solve(t, TaskMultiKey, tok.Decode(s.Tokens[:s.PromptLen()])); got != s.Expected[0] || s.Find(SpanAnswer)[0].Len() != 1 {
			t.Errorf("the text says %q, expected %q", got, s.Expected)
		}
	}
	if !strings.Contains(string(words.Meta.Parameters), `"value":"word"`) {
		t.Errorf("parameters %s", words.Meta.Parameters)
	}
}

func TestTaskMinimumLength(t *testing.T) {
	for _, tok := range []*wordTokenizer{newWords(), {spelling: map[int32]string{}, mark: true}} {
		for _, task := range Tasks() {
			for _, chat := range []Chat{instChat, nil} {
				o := TaskOptions{Task: task, Lengths: []int{5}}
				_, err := Build(tok, chat, o)
				var le *LengthError
				if !errors.As(err, &le) || le.Length != 5 || le.Sample != 0 {
					t.Fatalf("%s: got %v, want a LengthError", task, err)
				}
				// Sample 0 has the smallest length; the others say their own.
				for n := range 24 {
					o.Lengths = []int{le.Minimum + n}
					d := mustBuild(t, tok, chat, o)
					if s := d.Samples[0]; len(s.Tokens) != le.Minimum+n {
						t.Errorf("%s: %d tokens, want %d", task, len(s.Tokens), le.Minimum+n)
					} else if h := s.Find(SpanHaystack); task != TaskText && strings.Contains(spanText(tok, &s, h[len(h)-1]), "\n\n\n") {
						t.Errorf("%s: %d tokens had to be padded", task, le.Minimum+n)
					}
				}
				o.Lengths = []int{le.Minimum - 1}
				if _, err := Build(tok, chat, o); !errors.As(err, &le) {
					t.Errorf("%s: one token fewer gives %v", task, err)
				}
			}
		}
	}
}

func TestTaskDeterminism(t *testing.T) {
	// A change of these is a change of everybody's datasets: say so in the change log.
	golden := map[string]string{
		TaskMultiKey:   "5f5ba6af85e320a99011881ef1316403079a4932604a9780da5756d165748df2",
		TaskMultiValue: "80f88bee02006231f16e5f51e999e6921c345d1aa6527a5f86f6c7ea5eb79e31",
		TaskMultiQuery: "a0f742811c1b323b3bc096b6881981ff3224665a8e55045c69277dd065b6d769",
		TaskVariables:  "f8c51bef88cb2179e2dfec328dca0de4db2c541049a67e06b1a8c2fc1d2502f9",
		TaskUUID:       "5a56a8c86154a3bf135b769afd3219744c9c5f8afa05e63812dfa3a9d05e90cc",
		TaskDormant:    "5c88584e560bd83758dc8dbb3e443f712011257788e102232943c25a478e3383",
		TaskText:       "8223b0750a613360be5f00f0fffb0cbf5628d9859481f91c0755e7708a529b24",
	}
	for _, task := range Tasks() {
		o := TaskOptions{Task: task, Lengths: []int{640, 800}, Count: 6, Seed: 7, Purpose: Search}
		a, b := mustBuild(t, newWords(), chatML, o), mustBuild(t, newWords(), chatML, o)
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: the same options gave different datasets", task)
		}
		o.Count = 3
		if c := mustBuild(t, newWords(), chatML, o); !reflect.DeepEqual(c.Samples, a.Samples[:3]) {
			t.Errorf("%s: fewer samples are not the first ones of more", task)
		}
		o.Seed = 8
		if c := mustBuild(t, newWords(), chatML, o); reflect.DeepEqual(c.Samples[0].Tokens, a.Samples[0].Tokens) {
			t.Errorf("%s: another seed gave the same samples", task)
		}
		if a.Meta.Task != task || a.Meta.Purpose != Search {
			t.Errorf("meta %+v", a.Meta)
		}
		if want := golden[task]; a.Meta.ContentHash != want {
			t.Errorf("%s: content hash %s, want %s", task, a.Meta.ContentHash, want)
		}
	}
}

// Purposes share no cities, words, names, UUIDs or sentences, and equal seeds no numbers.
func TestTaskPurposesAreDisjoint(t *testing.T) {
	tok := newWords()
	owner := map[string]Purpose{}
	claim := func(what string, p Purpose) {
		t.Helper()
		if old, ok := owner[what]; ok && old != p {
			t.Errorf("%q is used for %s and for %s", what, old, p)
		}
		owner[what] = p
	}
	end := regexp.MustCompile(`[.?!]["]?\s`)
	uuid := regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}`)
	for _, p := range []Purpose{Calibration, Search, Certification} {
		for _, task := range Tasks() {
			value := ValueWord
			if task == TaskText || task == TaskUUID || task == TaskDormant {
				value = ""
			}
			d := mustBuild(t, tok, chatML, TaskOptions{Task: task, Lengths: []int{1200}, Count: 8, Purpose: p, Value: value})
			for i := range d.Samples {
				s := &d.Samples[i]
				text := tok.Decode(s.Tokens)
				for _, m := range magicSaid.FindAllStringSubmatch(text, -1) {
					claim("city "+m[1], p)
					claim("value "+m[2], p)
				}
				for _, m := range assignment.FindAllStringSubmatch(text, -1) {
					claim("variable "+m[1], p)
				}
				for _, u := range uuid.FindAllString(text, -1) {
					claim("uuid "+u, p)
				}
				for _, e := range s.Expected {
					claim("answer "+e, p)
				}
				for _, sp := range s.Find(SpanHaystack) {
					for _, sentence := range end.Split(spanText(tok, s, sp), -1) {
						if len(strings.Fields(sentence)) >= 6 {
							claim("sentence "+strings.TrimSpace(sentence), p)
						}
					}
				}
			}
		}
	}
	if len(owner) < 1000 {
		t.Errorf("only %d things were compared", len(owner))
	}
	// No answer that is a word is part of another one: a substring would count as right.
	lex, err := loadLexicon()
	if err != nil {
		t.Fatal(err)
	}
	for p, words := range lex.passwords {
		for _, a := range words {
			for _, b := range words {
				if a != b && strings.Contains(a, b) {
					t.Errorf("%s: %q is part of %q", p, b, a)
				}
			}
		}
	}
}

// Different samples ask for different things at different places.
func TestTaskVariety(t *testing.T) {
	tok := newWords()
	for _, task := range asked() {
		d := mustBuild(t, tok, chatML, TaskOptions{Task: task, Lengths: []int{1500}, Count: 40})
		answers, firsts, below := map[string]bool{}, map[string]bool{}, 0
		for i := range d.Samples {
			s := &d.Samples[i]
			answers[strings.Join(s.Expected, " ")] = true
			firsts[tok.Decode(s.Tokens[s.Find(SpanHaystack)[0].Start:][:6])] = true
			if s.Depths[0] < 0.5 {
				below++
			}
		}
		if len(answers) < 40 || len(firsts) < 35 {
			t.Errorf("%s: %d answers, %d haystacks in 40 samples", task, len(answers), len(firsts))
		}
		if n := below; (task == TaskMultiKey || task == TaskUUID) && (n < 8 || n > 32) {
			t.Errorf("%s: %d of 40 needles stand in the first half", task, n)
		}
	}
}

func TestTaskOptionErrors(t *testing.T) {
	tok := newWords()
	ok := []int{900}
	for i, tc := range []struct {
		option string
		o      TaskOptions
	}{
		{"task", TaskOptions{Lengths: ok}},
		{"task", TaskOptions{Task: "multi-passkey", Lengths: ok}},
		{"lengths", TaskOptions{Task: TaskText}},
		{"lengths", TaskOptions{Task: TaskUUID, Lengths: []int{0}}},
		{"lengths", TaskOptions{Task: TaskUUID, Lengths: []int{900, math.MaxInt}}},
		{"depths", TaskOptions{Task: TaskMultiKey, Lengths: ok, Depths: []float64{math.NaN()}}},
		{"depths", TaskOptions{Task: TaskMultiKey, Lengths: ok, Depths: []float64{-.1}}},
		{"depths", TaskOptions{Task: TaskMultiKey, Lengths: slices.Repeat(ok, 1<<12), Depths: make([]float64, 1<<12)}},
		{"depths", TaskOptions{Task: TaskMultiValue, Lengths: ok, Depths: []float64{.5}}},
		{"depths", TaskOptions{Task: TaskText, Lengths: ok, Depths: []float64{.5}}},
		{"depths", TaskOptions{Task: TaskDormant, Lengths: ok, Depths: []float64{.11}}},
		{"count", TaskOptions{Task: TaskMultiKey, Lengths: ok, Count: -1}},
		{"count", TaskOptions{Task: TaskMultiKey, Lengths: ok, Count: math.MaxInt}},
		{"count", TaskOptions{Task: TaskMultiKey, Lengths: []int{1 << 24}, Count: 1 << 20}},
		{"needles", TaskOptions{Task: TaskMultiKey, Lengths: ok, Needles: 2}},
		{"needles", TaskOptions{Task: TaskMultiValue, Lengths: ok, Needles: -2}},
		{"needles", TaskOptions{Task: TaskMultiValue, Lengths: ok, Needles: math.MaxInt}},
		{"needles", TaskOptions{Task: TaskMultiQuery, Lengths: ok, Needles: 31}},
		{"needles", TaskOptions{Task: TaskDormant, Lengths: ok, Distractors: 30}},
		{"distractors", TaskOptions{Task: TaskMultiKey, Lengths: ok, Distractors: -2}},
		{"distractors", TaskOptions{Task: TaskMultiKey, Lengths: ok, Distractors: math.MaxInt}},
		{"distractors", TaskOptions{Task: TaskUUID, Lengths: ok, Distractors: 1}},
		{"distractors", TaskOptions{Task: TaskText, Lengths: ok, Distractors: 1}},
		{"distractors", TaskOptions{Task: TaskVariables, Lengths: ok, Needles: 500, Distractors: 2}},
		{"value", TaskOptions{Task: TaskMultiKey, Lengths: ok, Value: ValueUUID}},
		{"value", TaskOptions{Task: TaskText, Lengths: ok, Value: ValueWord}},
		{"value", TaskOptions{Task: TaskDormant, Lengths: ok, Value: "secret"}},
		{"value", TaskOptions{Task: TaskMultiValue, Lengths: ok, Needles: 27, Value: ValueWord}},
		{"digits", TaskOptions{Task: TaskMultiKey, Lengths: ok, Digits: -1}},
		{"digits", TaskOptions{Task: TaskMultiKey, Lengths: ok, Digits: 19}},
		{"digits", TaskOptions{Task: TaskMultiValue, Lengths: ok, Needles: 5, Digits: 1}},
		{"purpose", TaskOptions{Task: TaskMultiKey, Lengths: ok, Purpose: "fun"}},
		{"purpose", TaskOptions{Task: TaskText, Lengths: ok, Purpose: "fun"}},
	} {
		_, err := Build(tok, nil, tc.o)
		var oe *OptionError
		if !errors.As(err, &oe) || oe.Option != tc.option {
			t.Errorf("options %d: got %v, want an OptionError for %s", i, err, tc.option)
		}
	}
	for i, o := range []GridOptions{{Value: ValueUUID}, {Digits: 19}, {Digits: -3}} {
		o.Lengths, o.Depths = ok, []float64{.5}
		var oe *OptionError
		if _, err := NeedleGrid(tok, nil, o); !errors.As(err, &oe) {
			t.Errorf("grid options %d: got %v, want an OptionError", i, err)
		}
	}
	boom := errors.New("boom")
	if _, err := Build(tok, func([]Message, bool) (string, error) { return "", boom }, TaskOptions{Task: TaskDormant, Lengths: ok}); !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
}

// Whatever the options, Build returns an error that says so or a valid dataset.
func FuzzBuild(f *testing.F) {
	f.Add(byte(0), 300, 2, 0, 0, 0, byte(0), .5, uint64(1))
	f.Add(byte(5), 200, 3, 0, 9, 4, byte(1), .05, uint64(2))
	f.Add(byte(4), 150, 1, 0, 0, 1, byte(1), 1., uint64(3))
	f.Fuzz(func(t *testing.T, task byte, length, count, needles, distractors, digits int, value byte, depth float64, seed uint64) {
		if length > 1500 || count > 4 {
			return
		}
		o := TaskOptions{Task: Tasks()[int(task)%len(Tasks())], Lengths: []int{length}, Count: count, Needles: needles, Distractors: distractors, Digits: digits,
			Value: []Value{"", ValueNumber, ValueWord, ValueUUID, ValueCredential}[value%5], Seed: seed}
		if depth != 0 {
			o.Depths = []float64{depth}
		}
		tok := newWords()
		d, err := Build(tok, instChat, o)
		var oe *OptionError
		var le *LengthError
		if errors.As(err, &oe) || errors.As(err, &le) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Validate(wordVocab); err != nil {
			t.Fatal(err)
		}
		for i := range d.Samples {
			s := &d.Samples[i]
			if s.TargetTokens != length {
				t.Errorf("%d tokens, want %d", s.TargetTokens, length)
			}
			if prompt, gold, _ := s.Quiz(); o.Task != TaskText {
				if got := solve(t, o.Task, tok.Decode(prompt)); got != strings.TrimSpace(tok.Decode(gold)) {
					t.Errorf("the text says %q, the gold answer is %q", got, tok.Decode(gold))
				}
			}
		}
	})
}

func TestTaskSaveLoad(t *testing.T) {
	for _, task := range Tasks() {
		d := mustBuild(t, newWords(), chatML, TaskOptions{Task: task, Lengths: []int{800}, Count: 2, ToolVersion: "v1"})
		path := filepath.Join(t.TempDir(), task+".parquet")
		if err := Save(path, d); err != nil {
			t.Fatal(err)
		}
		got, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := got.Validate(wordVocab); err != nil {
			t.Error(err)
		}
		// Parquet has no difference between an empty list and none.
		for i := range d.Samples {
			w, g := &d.Samples[i], &got.Samples[i]
			if len(w.Depths)+len(g.Depths)+len(w.Expected)+len(g.Expected) == 0 {
				*g = Sample{g.ID, g.Task, g.Tokens, g.Spans, g.TargetTokens, nil, nil, g.Seed, g.Haystack, nil}
			}
		}
		if !reflect.DeepEqual(got, d) {
			t.Errorf("%s: read back\n%+v\nwant\n%+v", task, got.Samples[0], d.Samples[0])
		}
	}
}

// A file that was written before tasks for evaluations existed.
func TestOldFile(t *testing.T) {
	old, err := Load("testdata/needle-grid-v1.parquet")
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Validate(wordVocab); err != nil {
		t.Error(err)
	}
	now := mustGrid(t, newWords(), nil, GridOptions{Lengths: []int{256, 300}, Depths: []float64{0, .5}, Seed: 7, ToolVersion: "0.1"})
	if !reflect.DeepEqual(old, now) {
		t.Errorf("the same options give\n%+v\nthe file has\n%+v", now.Meta, old.Meta)
	}
}

func TestValidateSharedQuestion(t *testing.T) {
	good := mustBuild(t, newWords(), chatML, TaskOptions{Task: TaskMultiQuery, Lengths: []int{500}, Needles: 3, Distractors: 2}).Samples[0]
	at := func(s *Sample, k SpanKind) *Span {
		return &s.Spans[slices.IndexFunc(s.Spans, func(sp Span) bool { return sp.Kind == k })]
	}
	for name, spoil := range map[string]func(*Sample){
		"a needle lost": func(s *Sample) {
			*at(s, SpanNeedle) = Span{SpanDialog, 0, at(s, SpanNeedle).Start, at(s, SpanNeedle).End}
		},
		"two answers": func(s *Sample) {
			*at(s, SpanNeedle) = Span{SpanAnswer, 0, at(s, SpanNeedle).Start, at(s, SpanNeedle).End}
		},
		"no answer":          func(s *Sample) { at(s, SpanAnswer).Kind = SpanDialog },
		"an expected lost":   func(s *Sample) { s.Expected = s.Expected[:2] },
		"a depth too many":   func(s *Sample) { s.Depths = append(s.Depths, .5) },
		"distractors' index": func(s *Sample) { at(s, SpanDistractor).Index = 5 },
	} {
		s := good
		s.Spans, s.Expected, s.Depths = slices.Clone(s.Spans), slices.Clone(s.Expected), slices.Clone(s.Depths)
		spoil(&s)
		if err := s.Validate(wordVocab); err == nil || !strings.Contains(err.Error(), "sample 0") {
			t.Errorf("%s: got %v", name, err)
		}
	}
	none := good
	none.Spans = slices.Clone(none.Spans)
	for i := range none.Spans {
		if k := none.Spans[i].Kind; k == SpanNeedle || k == SpanDistractor {
			none.Spans[i].Kind = SpanDialog
		}
	}
	n := 0
	for i := range none.Spans {
		if none.Spans[i].Kind == SpanDialog {
			none.Spans[i].Index = n
			n++
		}
	}
	none.Expected, none.Depths, none.AskedDepths = nil, nil, nil
	if err := none.Validate(wordVocab); err == nil || !strings.Contains(err.Error(), "0 needles, 1 questions") {
		t.Errorf("a question without needles: got %v", err)
	}
}

func TestShowTasks(t *testing.T) {
	tok := newWords()
	for task, want := range map[string][]string{
		TaskMultiKey: {"[distractor 2  ", "[needle 0  "}, TaskDormant: {"[dialog 5  ", "\x1b[1;36m[question 0", "\x1b[33m[distractor 0", "\x1b[36m[dialog 0"},
		TaskText: {"task text", "[haystack 0  1-800]"}, TaskUUID: {"haystack pairs"},
	} {
		s := mustBuild(t, tok, chatML, TaskOptions{Task: task, Lengths: []int{800}}).Samples[0]
		var b strings.Builder
		if err := Show(&b, tok, &s, ShowOptions{Color: true}); err != nil {
			t.Fatal(err)
		}
		for _, w := range want {
			if !strings.Contains(b.String(), w) {
				t.Errorf("%s: output lacks %q:\n%s", task, w, b.String())
			}
		}
	}
}
