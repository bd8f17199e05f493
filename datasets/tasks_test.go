package datasets

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestPasskeysText(t *testing.T) {
	for name, tc := range map[string]struct {
		tok  *wordTokenizer
		chat Chat
	}{
		"chatml":       {newWords(), chatML},
		"inst":         {newWords(), instChat},
		"plain":        {newWords(), nil},
		"inst marked":  {&wordTokenizer{spelling: map[int32]string{}, mark: true}, instChat},
		"plain marked": {&wordTokenizer{spelling: map[int32]string{}, mark: true, bos: "<|s|>"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			o := RecipeCPU()
			o.Count = 18
			d := mustPasskeys(t, tc.tok, tc.chat, o)
			seen := map[int]int{}
			for i := range d.Samples {
				s := &d.Samples[i]
				seen[len(s.Tokens)]++
				text := tc.tok.Decode(s.Tokens)
				needles, questions, answers := s.Find(SpanNeedle), s.Find(SpanQuestion), s.Find(SpanAnswer)
				if len(needles) != 4 {
					t.Fatalf("%d needles", len(needles))
				}
				for k := range needles {
					name := []string{"first", "second", "third", "fourth"}[k]
					want := "Remember the " + name + " passkey: " + s.Expected[k] + "."
					if got := strings.TrimSpace(spanText(tc.tok, s, needles[k])); got != want {
						t.Errorf("needle %d is %q, want %q", k, got, want)
					}
					if got := strings.TrimSpace(spanText(tc.tok, s, questions[k])); got != "What is the "+name+" passkey?" {
						t.Errorf("question %d is %q", k, got)
					}
					if got := strings.TrimSpace(spanText(tc.tok, s, answers[k])); got != s.Expected[k] {
						t.Errorf("answer %d is %q, want %q", k, got, s.Expected[k])
					}
					if n := len(strings.Fields(s.Expected[k])); n != 16 {
						t.Errorf("passkey of %d words", n)
					}
					if strings.Count(text, s.Expected[k]) != 2 {
						t.Errorf("passkey %d stands %d times in the text, want needle and answer", k, strings.Count(text, s.Expected[k]))
					}
				}
				rows := s.AnswerRows()
				if rows[0] != s.PromptLen()-1 || rows[len(rows)-1] != len(s.Tokens)-2 || len(rows) != 64 {
					t.Errorf("answer rows %d..%d (%d), prompt %d of %d", rows[0], rows[len(rows)-1], len(rows), s.PromptLen(), len(s.Tokens))
				}
				if s.TailStart() != questions[0].Start {
					t.Errorf("tail starts at %d", s.TailStart())
				}
				checkSeams(t, text)
			}
			if len(seen) != 9 || seen[1024] != 2 || seen[2048] != 2 || seen[1152] != 2 {
				t.Errorf("lengths are %v, want each of nine twice", seen)
			}
		})
	}
}

var (
	seams     = regexp.MustCompile(`[a-z0-9][.?!,]"?[A-Z]|[a-z][A-Z]|  | \n|\n\n\n|["a-z] [.,?!]`)
	spelledUp = strings.NewReplacer("<|im_start|>", "", "<|im_end|>", "")
)

// checkSeams looks for words that were glued together or parted where pieces meet.
func checkSeams(t *testing.T, text string) {
	t.Helper()
	if at := seams.FindStringIndex(spelledUp.Replace(text)); at != nil {
		text = spelledUp.Replace(text)
		t.Errorf("unnatural seam: %q", text[max(0, at[0]-40):min(len(text), at[1]+40)])
	}
}

func TestPlainText(t *testing.T) {
	tok := newWords()
	d := mustPasskeys(t, tok, nil, PasskeyOptions{Count: 1, Passkeys: 2, Words: 3, Lengths: []int{400}})
	s := &d.Samples[0]
	want := "\n\nQuestion: What is the first passkey?\nAnswer: " + s.Expected[0] +
		"\n\nQuestion: What is the second passkey?\nAnswer: " + s.Expected[1]
	if text := tok.Decode(s.Tokens); !strings.HasSuffix(text, want) {
		t.Errorf("text ends in %q, want %q", text[len(text)-200:], want)
	}
	if n := s.Find(SpanSink); len(n) != 1 || spanText(tok, s, n[0]) != "Read" {
		t.Errorf("sink is %v", n)
	}
}

func TestChatTextIsWhatTheTemplateWrites(t *testing.T) {
	tok := newWords()
	d := mustPasskeys(t, tok, chatML, PasskeyOptions{Count: 1, Passkeys: 2, Words: 3, Lengths: []int{400}})
	s := &d.Samples[0]
	text := tok.Decode(s.Tokens)
	q2 := s.Find(SpanQuestion)[1]
	answers := s.Find(SpanAnswer)
	user := tok.Decode(s.Tokens[s.Find(SpanInstruction)[0].Start:s.Find(SpanQuestion)[0].End])
	rendered, _ := chatML([]Message{{"user", user}, {"assistant", spanText(tok, s, answers[0])}, {"user", spanText(tok, s, q2)}}, true)
	if want := rendered + s.Expected[1]; text != want {
		t.Errorf("text is\n%q\nwant\n%q", text, want)
	}
	// Encoding the text anew may merge across the borders of the pieces, nowhere else.
	again := tok.Encode(text)
	if off := len(s.Tokens) - len(again); off < -4 || off > len(s.Spans) {
		t.Errorf("encoding the text anew gives %d tokens for %d", len(again), len(s.Tokens))
	}
}

func TestHaystackLengths(t *testing.T) {
	tok := newWords()
	o := RecipePaper()
	o.Count = 3
	d := mustPasskeys(t, tok, chatML, o)
	lengths := Linspace(1000, 32000, 50)
	if lengths[0] != 1000 || lengths[49] != 32000 || lengths[1] != 1633 || lengths[2] != 2265 {
		t.Errorf("lengths %v", lengths)
	}
	for i := range d.Samples {
		n := 0
		for _, sp := range d.Samples[i].Find(SpanHaystack) {
			n += sp.Len()
		}
		if !slices.Contains(lengths, n) {
			t.Errorf("haystack of %d tokens is not one of the recipe's", n)
		}
		if extra := len(d.Samples[i].Tokens) - n; extra < 640 || extra > 1500 {
			t.Errorf("%d tokens besides the haystack", extra)
		}
	}
}

func TestDepths(t *testing.T) {
	tok := newWords()
	depths := []float64{0, 0.1, 0.25, 0.5, 0.75, 0.9, 1}
	d := mustGrid(t, tok, chatML, GridOptions{Lengths: []int{300, 2000}, Depths: depths, Repeats: 3, Seed: 4})
	if len(d.Samples) != 2*len(depths)*3 {
		t.Fatalf("%d samples", len(d.Samples))
	}
	for i := range d.Samples {
		s := &d.Samples[i]
		if want := []int{300, 2000}[i/21]; len(s.Tokens) != want {
			t.Errorf("sample %d has %d tokens, want %d", i, len(s.Tokens), want)
		}
		asked := depths[i/3%len(depths)]
		if s.AskedDepths[0] != asked {
			t.Errorf("sample %d asks for depth %v, want %v", i, s.AskedDepths[0], asked)
		}
		var before, all int
		needle := s.Find(SpanNeedle)[0]
		for _, sp := range s.Find(SpanHaystack) {
			if all += sp.Len(); sp.Start < needle.Start {
				before += sp.Len()
			}
		}
		if got := float64(before) / float64(all); math.Abs(got-s.Depths[0]) > 1e-12 {
			t.Errorf("sample %d says depth %v, spans say %v", i, s.Depths[0], got)
		}
		// Half a long sentence, or the fill of a short haystack.
		if off := math.Abs(s.Depths[0]-asked) * float64(all); off > 60 {
			t.Errorf("sample %d: needle is %.0f tokens off its depth", i, off)
		}
		if (asked == 0 || asked == 1) && s.Depths[0] != asked {
			t.Errorf("sample %d: depth %v, want %v exactly", i, s.Depths[0], asked)
		}
		if ans := s.Find(SpanAnswer); len(ans) != 1 || ans[0].End != len(s.Tokens) || !regexp.MustCompile(`^\d{7}$`).MatchString(s.Expected[0]) {
			t.Errorf("sample %d: answer %v %q", i, ans, s.Expected)
		}
		checkSeams(t, tok.Decode(s.Tokens))
	}
}

func TestMinimumLength(t *testing.T) {
	tok := newWords()
	o := PasskeyOptions{Count: 1, Passkeys: 3, Words: 8, Lengths: []int{20}}
	_, err := Passkeys(tok, chatML, o)
	var le *LengthError
	if !errors.As(err, &le) || le.Length != 20 || le.Sample != 0 {
		t.Fatalf("got %v, want a LengthError", err)
	}
	o.Lengths[0] = le.Minimum
	d := mustPasskeys(t, tok, chatML, o)
	if len(d.Samples[0].Tokens) != le.Minimum {
		t.Errorf("%d tokens, want %d", len(d.Samples[0].Tokens), le.Minimum)
	}
	o.Lengths[0]--
	if _, err := Passkeys(tok, chatML, o); !errors.As(err, &le) {
		t.Errorf("one token fewer gives %v, want a LengthError", err)
	}
}

// Every length just above the minimum is met exactly, for all tokenizers.
func TestEveryLength(t *testing.T) {
	for _, tok := range []*wordTokenizer{newWords(), {spelling: map[int32]string{}, mark: true}} {
		_, err := NeedleGrid(tok, nil, GridOptions{Lengths: []int{1}, Depths: []float64{.5}})
		var le *LengthError
		if !errors.As(err, &le) {
			t.Fatal(err)
		}
		var lengths []int
		for n := range 150 {
			lengths = append(lengths, le.Minimum+n)
		}
		d := mustGrid(t, tok, nil, GridOptions{Lengths: lengths, Depths: []float64{0.3, 1}, Seed: 9})
		for i := range d.Samples {
			if len(d.Samples[i].Tokens) != lengths[i/2] {
				t.Errorf("%d tokens, want %d", len(d.Samples[i].Tokens), lengths[i/2])
			}
			if h := d.Samples[i].Find(SpanHaystack); strings.HasSuffix(spanText(tok, &d.Samples[i], h[len(h)-1]), "\n") {
				t.Errorf("%d tokens: the prose had to be padded", lengths[i/2])
			}
		}
	}
}

func TestOptionErrors(t *testing.T) {
	tok := newWords()
	for i, o := range []PasskeyOptions{
		{}, {Count: 1}, {Count: 1, MinLength: 10, MaxLength: 5, Steps: 1}, {Count: 1, MinLength: 10, MaxLength: 50},
		{Count: -1, Lengths: []int{2000}}, {Count: 1, Lengths: []int{2000, -5}}, {Count: 1, Lengths: []int{math.MaxInt}},
		{Count: 1, Lengths: []int{2000}, Passkeys: -1}, {Count: 1, Lengths: []int{2000}, Words: -1}, {Count: 1, Lengths: []int{2000}, Purpose: "fun"},
		{Count: math.MaxInt, Lengths: []int{2000}}, {Count: 1 << 20, Lengths: []int{1 << 24}}, {Count: 1, Lengths: []int{2000}, Passkeys: 27, Words: 1},
		{Count: 1, MinLength: 1, MaxLength: math.MaxInt, Steps: 100},
	} {
		_, err := Passkeys(tok, nil, o)
		var oe *OptionError
		if !errors.As(err, &oe) || oe.Option == "" {
			t.Errorf("options %d: got %v, want an OptionError", i, err)
		}
	}
	for i, o := range []GridOptions{
		{}, {Lengths: []int{500}}, {Depths: []float64{.5}}, {Lengths: []int{500}, Depths: []float64{1.5}},
		{Lengths: []int{500}, Depths: []float64{math.NaN()}}, {Lengths: []int{500}, Depths: []float64{.5}, Repeats: -1},
		{Lengths: []int{500}, Depths: []float64{.5}, Repeats: math.MaxInt}, {Lengths: []int{0}, Depths: []float64{.5}},
		{Lengths: []int{1 << 24}, Depths: []float64{.5}, Repeats: 1000},
	} {
		_, err := NeedleGrid(tok, nil, o)
		var oe *OptionError
		if !errors.As(err, &oe) {
			t.Errorf("grid options %d: got %v, want an OptionError", i, err)
		}
	}
}

func TestChatErrors(t *testing.T) {
	o := PasskeyOptions{Count: 1, Passkeys: 2, Words: 3, Lengths: []int{400}}
	boom := errors.New("boom")
	if _, err := Passkeys(newWords(), func([]Message, bool) (string, error) { return "", boom }, o); !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
	for name, chat := range map[string]Chat{
		"drops":   func(m []Message, g bool) (string, error) { return chatML(m[:1], g) },
		"repeats": func(m []Message, g bool) (string, error) { return chatML(append(m, m...), g) },
		"swaps": func(m []Message, g bool) (string, error) {
			m = slices.Clone(m)
			slices.Reverse(m)
			return chatML(m, g)
		},
	} {
		if _, err := Passkeys(newWords(), chat, o); err == nil || !strings.Contains(err.Error(), "chat template") {
			t.Errorf("a template that %s contents: got %v", name, err)
		}
	}
}

func TestDeterminism(t *testing.T) {
	o := RecipeCPU()
	o.Count, o.Seed = 12, 7
	a := mustPasskeys(t, newWords(), chatML, o)
	b := mustPasskeys(t, newWords(), chatML, o)
	if !reflect.DeepEqual(a, b) {
		t.Error("the same options gave different datasets")
	}
	o.Count = 5
	c := mustPasskeys(t, newWords(), chatML, o)
	if !reflect.DeepEqual(a.Samples[:5], c.Samples) {
		t.Error("fewer samples are not the first ones of more")
	}
	o.Seed = 8
	if d := mustPasskeys(t, newWords(), chatML, o); reflect.DeepEqual(c.Samples, d.Samples) {
		t.Error("another seed gave the same samples")
	}
	g := mustGrid(t, newWords(), nil, GridOptions{Lengths: []int{256, 512}, Depths: []float64{0, .5, 1}, Repeats: 2, Seed: 7})
	// A change of these is a change of everybody's datasets: say so in the change log.
	for _, tc := range []struct{ name, got, want string }{
		{"passkeys", a.Meta.ContentHash, "7bdc5ddb584401c33943f0f2ba75a2b3ef1c3a715000d37225844f26d9d79a8a"},
		{"grid", g.Meta.ContentHash, "cbf42cedfd803d3847ee4d51a3e51dacf5121a851a56c1c14f16eee4e9a2360e"},
	} {
		if tc.got != tc.want {
			t.Errorf("%s: content hash %s, want %s", tc.name, tc.got, tc.want)
		}
	}
	var p map[string]any
	if err := json.Unmarshal(a.Meta.Parameters, &p); err != nil || p["passkeys"] != 4.0 || p["format"] != "chat" {
		t.Errorf("parameters %s: %v", a.Meta.Parameters, err)
	}
}

// Purposes share no passkeys, cities, names, or sentences of any length.
func TestPurposesAreDisjoint(t *testing.T) {
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
	for _, p := range []Purpose{Calibration, Search, Certification} {
		k := mustPasskeys(t, tok, chatML, PasskeyOptions{Count: 6, Passkeys: 4, Words: 16, Lengths: []int{2000}, Purpose: p})
		g := mustGrid(t, tok, chatML, GridOptions{Lengths: []int{1500}, Depths: []float64{.2, .7}, Repeats: 20, Purpose: p})
		for _, s := range k.Samples {
			for _, e := range s.Expected {
				for _, w := range strings.Fields(e) {
					claim("word "+w, p)
				}
			}
		}
		for _, s := range g.Samples {
			city, _, _ := strings.Cut(spanText(tok, &s, s.Find(SpanNeedle)[0]), " is:")
			claim("city "+strings.TrimSpace(city), p)
		}
		for _, s := range slices.Concat(k.Samples, g.Samples) {
			for _, sp := range s.Find(SpanHaystack) {
				for _, sentence := range end.Split(spanText(tok, &s, sp), -1) {
					if len(strings.Fields(sentence)) >= 6 {
						claim("sentence "+strings.TrimSpace(sentence), p)
					}
				}
			}
		}
	}
	lex, err := loadLexicon()
	if err != nil {
		t.Fatal(err)
	}
	for p, names := range lex.people {
		for kind, list := range map[string][]string{"name": slices.Concat(names.female, names.male), "surname": names.surnames, "town": names.towns, "city": names.cities} {
			for i, n := range list {
				claim(kind+" "+n, p)
				if slices.Contains(list[:i], n) {
					t.Errorf("%s %s stands twice for %s", kind, n, p)
				}
			}
		}
		if n := len(lex.passwords[p]); n != 26 {
			t.Errorf("%d passkey words for %s, want 26", n, p)
		}
	}
}

func TestValidate(t *testing.T) {
	good := mustGrid(t, newWords(), chatML, GridOptions{Lengths: []int{200}, Depths: []float64{.5}}).Samples[0]
	for name, spoil := range map[string]func(*Sample){
		"negative token":  func(s *Sample) { s.Tokens[5] = -1 },
		"token too large": func(s *Sample) { s.Tokens[5] = wordVocab },
		"no tokens":       func(s *Sample) { s.Tokens = nil },
		"target":          func(s *Sample) { s.TargetTokens++ },
		"gap":             func(s *Sample) { s.Spans[2].Start++ },
		"overlap":         func(s *Sample) { s.Spans[2].End++ },
		"empty span":      func(s *Sample) { s.Spans[2].End = s.Spans[2].Start },
		"past the end":    func(s *Sample) { s.Spans[len(s.Spans)-1].End++ },
		"short":           func(s *Sample) { s.Spans = s.Spans[:len(s.Spans)-1] },
		"no spans":        func(s *Sample) { s.Spans = nil },
		"kind":            func(s *Sample) { s.Spans[3].Kind = "thing" },
		"index":           func(s *Sample) { s.Spans[3].Index = 9 },
		"no sink":         func(s *Sample) { s.Spans[0].Kind = SpanChat },
		"expected":        func(s *Sample) { s.Expected = nil },
		"depth":           func(s *Sample) { s.Depths[0] = math.NaN() },
		"asked depth":     func(s *Sample) { s.AskedDepths[0] = 2 },
	} {
		s := good
		s.Tokens, s.Spans = slices.Clone(s.Tokens), slices.Clone(s.Spans)
		s.Depths, s.AskedDepths = slices.Clone(s.Depths), slices.Clone(s.AskedDepths)
		spoil(&s)
		if err := s.Validate(wordVocab); err == nil || !strings.Contains(err.Error(), fmt.Sprint("sample ", s.ID)) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if err := good.Validate(wordVocab); err != nil {
		t.Error(err)
	}
}

func ExampleLinspace() {
	fmt.Println(Linspace(1024, 2048, 5))
	// Output: [1024 1280 1536 1792 2048]
}
