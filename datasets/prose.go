package datasets

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
)

// Sentence is a piece of haystack with its own whitespace: it either starts with
// the space that parts it from the sentence before, or follows one that ends in a
// line break.
type Sentence string

// endsBlock reports whether the sentence ends its paragraph.
func (s Sentence) endsBlock() bool { return strings.HasSuffix(string(s), "\n") }

// Stream yields the sentences of one haystack without end.
type Stream interface {
	// Next yields a sentence that is not blank.
	Next() Sentence
	// Contiguous reports whether the sentences make sense in this order only. If
	// not, some may be left out to reach an exact length.
	Contiguous() bool
}

// Haystack is a source of filler text.
type Haystack interface {
	// Name is "prose", or "files:" and a digest of the contents.
	Name() string
	// Stream starts a haystack. The same purpose and a generator in the same
	// state give the same sentences.
	Stream(purpose Purpose, r *rand.Rand) (Stream, error)
}

// Prose is a haystack of synthetic English: a grammar with some forty sentence
// shapes over a vocabulary of several thousand words, in paragraphs that keep to
// a topic, a place, a tense and a few persons. It means nothing, repeats no
// sentence within a stream, and its statistics are near those of a plain novel
// (docs/datasets.md has them). The names of persons and towns differ by purpose.
func Prose() Haystack { return proseSource{} }

type proseSource struct{}

func (proseSource) Name() string { return "prose" }

func (proseSource) Stream(purpose Purpose, r *rand.Rand) (Stream, error) {
	lex, err := loadLexicon()
	if err != nil {
		return nil, err
	}
	names, ok := lex.people[purpose]
	if !ok {
		return nil, &OptionError{Option: "purpose", Reason: fmt.Sprintf("%q is none of calibration, search, certification", purpose)}
	}
	g := &prose{r: r, lex: lex, names: names, seen: map[uint64]bool{}}
	g.shapes = g.shapeTable()
	for _, s := range g.shapes {
		g.weight += s.weight
	}
	return g, nil
}

// person is a character of a paragraph.
type person struct {
	name, pronoun, possessive string
}

// phrase is a noun phrase that can be a subject.
type phrase struct {
	text   string
	plural bool
}

type prose struct {
	r      *rand.Rand
	lex    *lexicon
	names  people
	shapes []shape
	weight int
	seen   map[uint64]bool

	// The state of the paragraph.
	left    int // sentences to go
	topic   *topic
	present bool
	cast    []person
	focus   int // index of the person a pronoun would mean, or -1
}

type shape struct {
	weight int
	make   func() string
}

// Next yields the next sentence.
func (g *prose) Next() Sentence {
	first := false
	if g.left == 0 {
		g.paragraph()
		first = true
	}
	g.left--
	text := g.fresher()
	if !first {
		text = " " + text
	}
	if g.left == 0 {
		text += "\n\n"
	}
	return Sentence(text)
}

// Contiguous is false: no sentence depends on another.
func (g *prose) Contiguous() bool { return false }

// fresher draws sentences until one is new. Only short shapes can meet an old
// sentence, and a shape is drawn anew each time, so this ends soon.
func (g *prose) fresher() string {
	for {
		s := g.sentence()
		h := fnv.New64a()
		h.Write([]byte(s))
		if k := h.Sum64(); !g.seen[k] {
			g.seen[k] = true
			return s
		}
	}
}

func (g *prose) paragraph() {
	g.left = 2 + g.r.IntN(5) + g.r.IntN(4)
	// A topic lasts for some paragraphs; a cast may outlive it.
	if g.topic == nil || g.chance(0.35) {
		g.topic = &g.lex.topics[g.r.IntN(len(g.lex.topics))]
	}
	g.present = g.chance(0.2)
	if len(g.cast) == 0 || g.chance(0.4) {
		g.cast = g.cast[:0]
		for range 2 + g.r.IntN(3) {
			g.cast = append(g.cast, g.newPerson())
		}
	}
	g.focus = -1
}

// sentence draws a shape; now and then it joins several to a longer sentence.
func (g *prose) sentence() string {
	s := g.shape()
	for range 3 {
		if !joinable(s) || !g.chance(0.2) {
			break
		}
		more := g.shape()
		if !joinable(more) {
			break
		}
		s = strings.TrimSuffix(s, ".") + g.any([]string{", and ", ", but ", "; ", ", while ", ", and then ", ", though ", " - "}) + more
	}
	return capitalise(s)
}

func joinable(s string) bool { return strings.HasSuffix(s, ".") && !strings.Contains(s, "\"") }

func (g *prose) shape() string {
	n := g.r.IntN(g.weight)
	for _, s := range g.shapes {
		if n -= s.weight; n < 0 {
			return s.make()
		}
	}
	return ""
}

func capitalise(s string) string {
	i := 0
	for i < len(s) && (s[i] == '"' || s[i] == '(') {
		i++
	}
	if i < len(s) && s[i] >= 'a' && s[i] <= 'z' {
		return s[:i] + strings.ToUpper(s[i:i+1]) + s[i+1:]
	}
	return s
}

func (g *prose) chance(p float64) bool { return g.r.Float64() < p }

// rank draws an index in [0, n) that favours the front, as words' frequencies do.
// Only correctly rounded operations, so every platform draws the same.
func (g *prose) rank(n int) int {
	u := g.r.Float64()
	return int(float64(u*math.Sqrt(u)) * float64(n))
}

func (g *prose) pick(list []string) string { return list[g.rank(len(list))] }
func (g *prose) any(list []string) string  { return list[g.r.IntN(len(list))] }
func (g *prose) list(name string) string   { return g.pick(g.lex.lists[name]) }

// from chooses between the topic's words and the general ones.
func (g *prose) from(p float64) *topic {
	if g.chance(p) {
		return g.topic
	}
	return &g.lex.general
}

func (g *prose) agent() noun   { t := g.from(0.6); return t.agents[g.rank(len(t.agents))] }
func (g *prose) thing() noun   { t := g.from(0.7); return t.things[g.rank(len(t.things))] }
func (g *prose) place() noun   { t := g.from(0.7); return t.places[g.rank(len(t.places))] }
func (g *prose) stuff() string { return g.pick(g.from(0.6).stuff) }
func (g *prose) adj() string   { return g.pick(g.from(0.45).adj) }
func (g *prose) vt() verb      { t := g.from(0.45); return t.vt[g.rank(len(t.vt))] }
func (g *prose) vi() verb      { t := g.from(0.45); return t.vi[g.rank(len(t.vi))] }

func (g *prose) newPerson() person {
	p := person{pronoun: "he", possessive: "his"}
	given := g.names.male
	if g.chance(0.5) {
		p.pronoun, p.possessive = "she", "her"
		given = g.names.female
	}
	first, last := g.any(given), g.any(g.names.surnames)
	switch g.r.IntN(6) {
	case 0:
		title := "Mr"
		if p.pronoun == "she" {
			title = g.any([]string{"Mrs", "Miss", "Lady"})
		} else if g.chance(0.4) {
			title = g.any([]string{"Dr", "Professor", "Captain", "Old"})
		}
		p.name = title + " " + last
	case 1:
		p.name = first + " " + last
	default:
		p.name = first
	}
	return p
}

// who names a person of the cast, or says he or she where that is clear.
func (g *prose) who() phrase {
	if g.focus >= 0 && g.chance(0.5) {
		return phrase{text: g.cast[g.focus].pronoun}
	}
	g.focus = g.rank(len(g.cast))
	return phrase{text: g.cast[g.focus].name}
}

// subject makes a noun phrase for the front of a clause.
func (g *prose) subject(depth int) phrase {
	switch n := g.r.IntN(20); {
	case n < 7:
		return g.who()
	case n < 14:
		return g.nounPhrase(g.agent(), true, depth)
	case n < 17:
		return g.nounPhrase(g.thing(), false, depth)
	case n < 18:
		return phrase{text: g.any([]string{"nobody", "everyone", "somebody", "no one else", "each of them"})}
	case n < 19 && len(g.cast) > 1:
		return phrase{text: g.cast[0].name + " and " + g.cast[1].name, plural: true}
	default:
		return phrase{text: g.determiner(false) + g.adjectives() + g.stuff()}
	}
}

// object makes a noun phrase for what a verb acts on.
func (g *prose) object(depth int) string {
	switch n := g.r.IntN(12); {
	case n < 8:
		return g.nounPhrase(g.thing(), false, depth).text
	case n < 9:
		return g.nounPhrase(g.agent(), true, depth).text
	case n < 10:
		return g.determiner(false) + g.adjectives() + g.stuff()
	case n < 11:
		return "the " + g.list("qualities/names") + " of " + g.nounPhrase(g.thing(), false, 0).text
	default:
		return g.nounPhrase(g.place(), false, depth).text
	}
}

// determiner gives one that suits a mass noun (and, with article, any noun).
func (g *prose) determiner(article bool) string {
	switch g.r.IntN(6) {
	case 0, 1:
		return "the "
	case 2:
		if p := g.owner(); p != "" {
			return p + " "
		}
		return "the "
	case 3:
		if article {
			return "the "
		}
		return g.any([]string{"some ", "all the ", "enough ", "a little ", "too much "})
	case 4:
		return g.any([]string{"this ", "that "})
	default:
		return ""
	}
}

func (g *prose) owner() string {
	if len(g.cast) == 0 {
		return ""
	}
	p := g.cast[g.rank(len(g.cast))]
	switch g.r.IntN(4) {
	case 0:
		if g.focus >= 0 {
			return g.cast[g.focus].possessive
		}
		return "their"
	case 1:
		return "the " + g.agent().sg + "'s"
	default:
		if strings.HasSuffix(p.name, "s") {
			return p.name + "'"
		}
		return p.name + "'s"
	}
}

func (g *prose) adjectives() string {
	switch n := g.r.IntN(20); {
	case n < 9:
		return ""
	case n < 16:
		return g.adj() + " "
	case n < 18:
		return g.list("adverbs/degree") + " " + g.adj() + " "
	default:
		if a, b := g.adj(), g.adj(); a != b {
			return a + ", " + b + " "
		}
		return ""
	}
}

// nounPhrase dresses a noun: a number or article, adjectives, and below depth a
// modifier behind it.
func (g *prose) nounPhrase(n noun, human bool, depth int) phrase {
	var p phrase
	adj := g.adjectives()
	switch k := g.r.IntN(24); {
	case k < 8:
		p.text = "the " + adj + n.sg
	case k < 13:
		p.text = withArticle(adj + n.sg)
	case k < 15:
		p.text = g.owner() + " " + adj + n.sg
	case k < 16:
		p.text = g.any([]string{"every ", "another ", "this ", "that ", "one ", "no "}) + adj + n.sg
	case k < 18:
		p = phrase{"the " + adj + n.pl, true}
	case k < 20:
		p = phrase{g.smallNumber() + " " + adj + n.pl, true}
	case k < 21:
		p = phrase{g.any([]string{"several ", "a few ", "many ", "some ", "most ", "those ", "all the ", "both "}) + adj + n.pl, true}
	case k < 22:
		p = phrase{adj + n.pl, true}
	case k < 23 && !human:
		m := g.thing()
		p.text = withArticle(adj+n.sg) + " made of " + g.list("materials/names")
		if m.sg != n.sg && g.chance(0.5) {
			p.text = "the " + n.sg + " and the " + m.sg
			p.plural = true
		}
	default:
		p.text = "the " + adj + n.sg + " of " + g.any(g.names.towns)
	}
	if depth > 0 && g.chance(0.3) {
		p.text += g.modifier(human, p.plural, depth-1)
	}
	return p
}

// modifier is a prepositional phrase or a relative clause after a noun.
func (g *prose) modifier(human, plural bool, depth int) string {
	switch g.r.IntN(5) {
	case 0, 1:
		return " " + g.where(depth)
	case 2:
		return " with " + withArticle(g.adjectives()+g.thing().sg)
	case 3:
		rel := " that "
		if human {
			rel = " who "
		}
		return rel + g.predicate(phrase{plural: plural}, depth)
	default:
		w := g.cast[g.rank(len(g.cast))].name
		v := g.vt()
		if g.present {
			return " that " + w + " " + v.third
		}
		return " that " + w + " had " + v.part
	}
}

// where says a place.
func (g *prose) where(depth int) string {
	if g.chance(0.12) {
		return "in " + g.any(g.names.towns)
	}
	prep := g.list("prepositions/place")
	pl := g.place()
	det := "the "
	switch g.r.IntN(5) {
	case 0:
		return prep + " " + withArticle(g.adj()+" "+pl.sg)
	case 1:
		det = g.owner() + " "
	}
	s := prep + " " + det
	if g.chance(0.4) {
		s += g.adj() + " "
	}
	s += pl.sg
	if depth > 0 && g.chance(0.1) {
		s += " of " + g.any(g.names.towns)
	}
	return s
}

// finite inflects a verb for a subject in the paragraph's tense, with now and
// then an auxiliary or a negation.
func (g *prose) finite(v verb, s phrase) string {
	aux := func(sg, pl string) string {
		if s.plural {
			return pl
		}
		return sg
	}
	switch k := g.r.IntN(30); {
	case k < 2:
		return g.any([]string{"could", "would", "might", "must", "should", "could not", "would never"}) + " " + v.base
	case k < 4 && !g.present:
		return "had " + g.maybe(0.3, "already ", "never ", "often ") + v.part
	case k < 5 && g.present:
		return aux("has", "have") + " " + v.part
	case k < 6 && !g.present:
		return aux("was", "were") + " " + g.maybe(0.2, "still ") + v.ing
	case k < 7:
		if g.present {
			return aux("does", "do") + " not " + v.base
		}
		return "did not " + v.base
	case k < 8:
		return g.list("adverbs/frequency") + " " + g.plain(v, s)
	}
	return g.plain(v, s)
}

func (g *prose) plain(v verb, s phrase) string {
	switch {
	case !g.present:
		return v.past
	case s.plural:
		return v.base
	}
	return v.third
}

func (g *prose) be(s phrase) string {
	switch {
	case g.present && s.plural:
		return "are"
	case g.present:
		return "is"
	case s.plural:
		return "were"
	}
	return "was"
}

func (g *prose) maybe(p float64, options ...string) string {
	if g.chance(p) {
		return g.any(options)
	}
	return ""
}

// predicate is a verb with what belongs to it.
func (g *prose) predicate(s phrase, depth int) string {
	tail := ""
	switch g.r.IntN(8) {
	case 0:
		tail = " " + g.list("adverbs/manner")
	case 1, 2:
		tail = " " + g.where(depth)
	case 3:
		tail = " " + g.list("prepositions/object") + " " + g.object(0)
	}
	switch k := g.r.IntN(20); {
	case k < 9:
		return g.finite(g.vt(), s) + " " + g.object(depth) + tail
	case k < 13:
		v := g.finite(g.vi(), s)
		if g.chance(0.4) {
			return v + " " + g.list("prepositions/motion") + " the " + g.place().sg
		}
		return v + tail
	case k < 16:
		if g.present || s.plural {
			return g.be(s) + " " + g.list("adverbs/degree") + " " + g.adj()
		}
		return g.list("linking/past") + " " + g.maybe(0.4, "very ", "rather ", "quite ", "almost ") + g.adj()
	case k < 18 && !g.present:
		inf := g.list("verbs-with-infinitive/past")
		if g.chance(0.3) {
			return inf + " to " + g.vi().base + tail
		}
		return inf + " to " + g.vt().base + " " + g.object(0)
	case k < 19:
		return g.be(s) + " " + g.where(0)
	default:
		return g.finite(g.vt(), s) + " " + g.object(0) + " and " + g.finite(g.vt(), s) + " " + g.object(0)
	}
}

func (g *prose) clause(depth int) string {
	s := g.subject(depth)
	return s.text + " " + g.predicate(s, depth)
}

// with runs f with the paragraph's tense set, and puts it back.
func (g *prose) with(present bool, f func() string) string {
	old := g.present
	g.present = present
	s := f()
	g.present = old
	return s
}

var units = []string{"two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
	"thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"}

var tens = []string{"twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"}

func (g *prose) smallNumber() string {
	if g.chance(0.8) {
		return units[g.rank(len(units))]
	}
	t := tens[g.rank(len(tens))]
	if d := g.r.IntN(9); d < 8 {
		return t + "-" + units[d]
	}
	return t
}

// amount is a number in digits; never seven digits in a row, which are the grid's needles.
func (g *prose) amount() string {
	switch g.r.IntN(4) {
	case 0:
		return strconv.Itoa(2 + g.r.IntN(98))
	case 1:
		return strconv.Itoa(100 + g.r.IntN(900))
	case 2:
		return fmt.Sprintf("%d,%03d", 1+g.r.IntN(60), g.r.IntN(1000))
	default:
		return fmt.Sprintf("%d.%d", 1+g.r.IntN(90), 1+g.r.IntN(9))
	}
}

// ordinalDigits is "21st" and the like.
func ordinalDigits(n int) string {
	suffix := "th"
	switch {
	case n%100/10 == 1:
	case n%10 == 1:
		suffix = "st"
	case n%10 == 2:
		suffix = "nd"
	case n%10 == 3:
		suffix = "rd"
	}
	return strconv.Itoa(n) + suffix
}

func (g *prose) year() string { return strconv.Itoa(1690 + g.r.IntN(310)) }

func (g *prose) date() string {
	month := g.any(g.lex.lists["months/names"])
	switch g.r.IntN(5) {
	case 0:
		return "in " + g.year()
	case 1:
		return "in " + month + " " + g.year()
	case 2:
		return "on the " + ordinalDigits(1+g.r.IntN(28)) + " of " + month
	case 3:
		return "on " + month + " " + strconv.Itoa(1+g.r.IntN(28)) + ", " + g.year()
	default:
		return "on " + g.any(g.lex.lists["weekdays/names"]) + " " + g.any([]string{"morning", "afternoon", "evening", "night"})
	}
}

// speech is one clause as people say it, in the present or past.
func (g *prose) speech() string {
	return g.with(g.chance(0.6), func() string {
		switch g.r.IntN(6) {
		case 0:
			return "I " + g.any([]string{"can", "will", "could", "must", "shall"}) + " " + g.maybe(0.3, "never ", "not ") + g.vt().base + " " + g.object(0)
		case 1:
			return "you " + g.any([]string{"must", "should", "cannot", "might", "need not"}) + " " + g.vt().base + " " + g.object(0)
		case 2:
			return "we " + g.plain(g.vt(), phrase{plural: true}) + " " + g.object(1)
		case 3:
			return g.any([]string{"there is", "I see", "look at", "bring me", "give me", "here comes"}) + " " + g.nounPhrase(g.thing(), false, 1).text
		default:
			return g.clause(1)
		}
	})
}

func (g *prose) question() string {
	v := g.vt()
	switch g.r.IntN(8) {
	case 0:
		return "why did " + g.who().text + " " + v.base + " " + g.object(0)
	case 1:
		return "who " + g.any([]string{"could", "would", "had ever wanted to"}) + " " + v.base + " " + g.object(0)
	case 2:
		return "where was " + g.nounPhrase(g.thing(), false, 1).text
	case 3:
		return "how many " + g.thing().pl + " had " + g.who().text + " " + v.part
	case 4:
		return "what had become of " + g.nounPhrase(g.thing(), false, 1).text
	case 5:
		return "was it " + g.list("adverbs/degree") + " " + g.adj() + " to " + v.base + " " + g.object(0)
	case 6:
		return "had " + g.nounPhrase(g.agent(), true, 0).text + " " + g.maybe(0.5, "really ", "ever ", "already ") + v.part + " " + g.object(0)
	default:
		return "when would " + g.nounPhrase(g.agent(), true, 0).text + " " + g.vi().base
	}
}

func (g *prose) said() string {
	v := g.list("adverbs/saying")
	if g.focus >= 0 && g.chance(0.5) {
		return g.cast[g.focus].pronoun + " " + v
	}
	if g.chance(0.5) {
		g.focus = g.rank(len(g.cast))
		if g.chance(0.4) {
			return v + " " + g.cast[g.focus].name
		}
		return g.cast[g.focus].name + " " + v
	}
	return v + " the " + g.maybe(0.4, g.adj()+" ") + g.agent().sg
}

func (g *prose) enumeration(n int) string {
	var b strings.Builder
	for i := range n {
		switch {
		case i == 0:
		case i == n-1:
			b.WriteString(g.any([]string{" and ", ", and ", " or "}))
		default:
			b.WriteString(", ")
		}
		t := g.thing()
		switch g.r.IntN(4) {
		case 0:
			b.WriteString(g.adjectives() + t.pl)
		case 1:
			b.WriteString(g.smallNumber() + " " + t.pl)
		case 2:
			b.WriteString(g.stuff())
		default:
			b.WriteString(withArticle(g.adjectives() + t.sg))
		}
	}
	return b.String()
}

// shapeTable lists the shapes of sentences with their weights.
func (g *prose) shapeTable() []shape {
	conj := func() string {
		return g.any([]string{"because", "although", "when", "while", "after", "before", "since", "if", "until", "as", "as soon as", "even though", "whenever", "unless"})
	}
	return []shape{
		{12, func() string { return g.clause(2) + "." }},
		{5, func() string { return g.list("adverbs/time") + ", " + g.clause(1) + "." }},
		{4, func() string { return g.list("adverbs/sentence") + ", " + g.clause(1) + "." }},
		{6, func() string {
			return g.clause(1) + g.any([]string{", and ", ", but ", ", so ", ", yet ", " and ", ", for "}) + g.clause(0) + "."
		}},
		{4, func() string { return g.clause(0) + "; " + g.clause(1) + "." }},
		{6, func() string { return conj() + " " + g.clause(0) + ", " + g.clause(1) + "." }},
		{5, func() string { return g.clause(1) + " " + conj() + " " + g.clause(1) + "." }},
		{3, func() string { return g.clause(0) + g.any([]string{" - ", ": "}) + g.clause(0) + "." }},
		{3, func() string {
			s := g.subject(0)
			return s.text + ", " + g.any([]string{"so they said", "as everyone knew", "for all that", "to be fair", "it turned out", "like it or not", "more than ever"}) + ", " + g.predicate(s, 1) + "."
		}},
		{3, func() string {
			g.focus = g.rank(len(g.cast))
			p := g.cast[g.focus].name
			return p + ", " + withArticle(g.adjectives()+g.agent().sg) + " from " + g.any(g.names.towns) + ", " + g.predicate(phrase{}, 1) + "."
		}},
		{4, func() string {
			s := g.subject(0)
			return s.text + " " + g.plain(g.vt(), s) + " " + g.enumeration(3+g.r.IntN(3)) + "."
		}},
		{2, func() string {
			return g.where(0) + " " + g.be(phrase{plural: true}) + " " + g.enumeration(2+g.r.IntN(4)) + "."
		}},
		{4, func() string { return "there " + g.be(phrase{}) + " " + g.existing() + " " + g.where(1) + "." }},
		{2, func() string {
			return "there were " + g.any([]string{strconv.Itoa(20 + g.r.IntN(980)), g.smallNumber()}) + " " + g.thing().pl + " " + g.where(0) + "."
		}},
		{7, func() string { return "\"" + capitalise(g.speech()) + ",\" " + g.said() + "." }},
		{3, func() string {
			return "\"" + capitalise(g.speech()) + ",\" " + g.said() + ", \"" + g.any([]string{"and ", "but ", "because "}) + g.speech() + ".\""
		}},
		{3, func() string {
			return g.who().text + " " + g.list("adverbs/saying") + ": \"" + capitalise(g.speech()) + ".\""
		}},
		{3, func() string { return "\"" + capitalise(g.question()) + "?\" " + g.said() + "." }},
		{2, func() string {
			return "\"" + g.any([]string{"No", "Yes", "Never", "Of course", "Good heavens", "Well", "Listen", "Wait", "Nonsense", "Please", "Perhaps", "Not yet"}) + "!\" " + g.said() + ". \"" + capitalise(g.speech()) + ".\""
		}},
		{4, func() string { return g.question() + "?" }},
		{4, func() string {
			return g.date() + ", " + g.clause(1) + "."
		}},
		{2, func() string { return g.clause(0) + " " + g.date() + "." }},
		{2, func() string {
			return g.nounPhrase(g.thing(), false, 1).text + " cost " + g.amount() + " " + g.any([]string{"crowns", "shillings", "dollars", "francs", "pounds", "florins"}) + g.maybe(0.4, ", not counting the "+g.stuff()) + "."
		}},
		{2, func() string {
			return "it " + g.be(phrase{}) + " " + g.amount() + " " + g.any([]string{"miles", "yards", "kilometres", "leagues", "feet"}) + " from the " + g.place().sg + " to " + g.any(g.names.towns) + g.maybe(0.4, ", more or less", ", and the road "+g.be(phrase{})+" "+g.adj()) + "."
		}},
		{3, func() string {
			t := g.thing()
			return "the " + t.sg + " had been " + g.vt().part + " by " + g.nounPhrase(g.agent(), true, 1).text + g.maybe(0.4, " "+g.date()) + "."
		}},
		{2, func() string {
			v := g.vt()
			return "it was said that " + g.with(false, func() string { return g.clause(1) }) + g.maybe(0.3, ", and that nobody could "+v.base+" it") + "."
		}},
		{3, func() string {
			s := g.nounPhrase(g.thing(), false, 0)
			return s.text + " " + g.be(s) + " " + g.any([]string{"more", "less", "no less"}) + " " + g.adj() + " than " + g.nounPhrase(g.thing(), false, 0).text + "."
		}},
		{2, func() string {
			return g.list("prepositions/motion") + " the " + g.place().sg + " came " + g.nounPhrase(g.agent(), true, 1).text + ", " + g.vi().ing + " " + g.list("adverbs/manner") + "."
		}},
		{3, func() string {
			return g.any([]string{"beyond", "beside", "behind", "under", "above"}) + " the " + g.adjectives() + g.place().sg + g.any([]string{" lay ", " stood ", " stretched "}) + withArticle(g.adj()+" "+g.place().sg) + "."
		}},
		{3, func() string {
			s := g.who()
			return s.text + " " + g.list("adverbs/thinking") + " that " + g.with(false, func() string { return g.clause(1) }) + "."
		}},
		{2, func() string {
			return g.vt().ing + " " + g.object(1) + g.any([]string{" took ", " cost "}) + g.smallNumber() + " " + g.any([]string{"hours", "days", "weeks", "minutes", "years", "evenings"}) + "."
		}},
		{2, func() string {
			return "it " + g.be(phrase{}) + " " + g.list("adverbs/degree") + " " + g.adj() + " to " + g.vt().base + " " + g.object(1) + "."
		}},
		{2, func() string {
			return "not only " + g.with(false, func() string {
				return "had " + g.nounPhrase(g.agent(), true, 0).text + " " + g.vt().part + " " + g.object(0)
			}) + ", but " + g.with(false, func() string { return g.clause(0) }) + "."
		}},
		{2, func() string {
			return g.any([]string{"never ", "always ", "do not ", "one should "}) + g.vt().base + " " + g.object(0) + " " + g.any([]string{"before", "after", "without", "instead of"}) + " " + g.vt().ing + " " + g.object(0) + g.any([]string{".", ".", "!"})
		}},
		{3, func() string {
			v := g.vi()
			return g.subject(0).text + " " + g.with(false, func() string { return g.plain(v, phrase{}) }) + g.maybe(0.5, " "+g.list("adverbs/manner")) + "."
		}},
		{2, func() string {
			return g.vt().ing + " " + g.object(0) + ", " + g.clause(1) + "."
		}},
		{2, func() string {
			return g.clause(0) + " (" + g.any([]string{"or so ", "as ", "at least "}) + g.who().text + " " + g.list("adverbs/thinking") + ")" + "."
		}},
		{2, func() string {
			return g.any([]string{"the more ", "the longer "}) + g.who().text + " " + g.vi().past + ", the more " + g.adj() + " the " + g.thing().sg + " " + g.list("linking/past") + "."
		}},
		{2, func() string {
			return "if " + g.who().text + " had " + g.vt().part + " " + g.object(0) + ", " + g.nounPhrase(g.agent(), true, 0).text + " would have " + g.vt().part + " " + g.object(0) + "."
		}},
		{2, func() string {
			return "the " + g.thing().sg + " held " + g.amount() + " " + g.any(g.lex.lists["units/names"]) + " of " + g.stuff() + "."
		}},
		{2, func() string {
			return "what " + g.who().text + " " + g.any([]string{"wanted", "needed", "liked", "feared"}) + " most was " + g.nounPhrase(g.thing(), false, 2).text + "."
		}},
		{2, func() string {
			return g.any([]string{"of all the ", "among the "}) + g.adjectives() + g.thing().pl + ", only the " + g.thing().sg + " " + g.list("linking/past") + " " + g.adj() + "."
		}},
	}
}

// existing is a noun phrase that can follow "there is".
func (g *prose) existing() string {
	switch g.r.IntN(4) {
	case 0:
		return "no " + g.adjectives() + g.thing().sg
	case 1:
		return g.any([]string{"hardly any ", "a great deal of ", "always some ", "plenty of "}) + g.stuff()
	case 2:
		return withArticle(g.adjectives() + g.agent().sg)
	default:
		return withArticle(g.adjectives() + g.thing().sg)
	}
}
