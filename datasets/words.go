package datasets

import (
	"embed"
	"fmt"
	"strings"
	"sync"
)

//go:embed words/*.txt
var wordFiles embed.FS

// noun is a countable noun in both numbers.
type noun struct{ sg, pl string }

// verb holds the five forms that English needs.
type verb struct{ base, third, past, part, ing string }

// topic is a set of words that belong together. A paragraph keeps to one.
type topic struct {
	name                   string
	agents, things, places []noun
	stuff, adj             []string
	vt, vi                 []verb
}

// people are the names that one purpose uses.
type people struct {
	female, male, surnames, towns, cities []string
}

// lexicon is all word lists, parsed.
type lexicon struct {
	topics    []topic
	general   topic
	lists     map[string][]string // "section/list" of general.txt
	people    map[Purpose]people
	passwords map[Purpose][]string
}

// loadLexicon parses the embedded lists once; what it returns is never written to.
var loadLexicon = sync.OnceValues(func() (*lexicon, error) { return parseLexicon(wordFiles) })

// section is one bracketed part of a word file.
type section struct {
	name  string
	names []string // list names in file order
	lists map[string][]string
}

// spaced lists the lists whose hyphens stand for spaces ("town-hall"); elsewhere
// a hyphen is meant ("well-fed").
var spaced = map[string]bool{
	"agents": true, "things": true, "stuff": true, "places": true, "towns": true,
	"place": true, "motion": true, "object": true, "time": true, "sentence": true,
	"saying": true, "frequency": true, "vt": true, "past": true,
}

func parseSections(fs embed.FS, file string) ([]section, error) {
	data, err := fs.ReadFile("words/" + file)
	if err != nil {
		return nil, fmt.Errorf("word lists: %w", err)
	}
	var out []section
	for i, line := range strings.Split(string(data), "\n") {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || line[0] == '#':
		case line[0] == '[' && line[len(line)-1] == ']':
			out = append(out, section{name: line[1 : len(line)-1], lists: map[string][]string{}})
		default:
			key, words, ok := strings.Cut(line, ":")
			if !ok || len(out) == 0 {
				return nil, fmt.Errorf("word lists: %s line %d: expected \"list: words\" within a [section]", file, i+1)
			}
			s := &out[len(out)-1]
			fields := strings.Fields(words)
			if spaced[key] {
				for j := range fields {
					fields[j] = strings.ReplaceAll(fields[j], "-", " ")
				}
			}
			s.names = append(s.names, key)
			s.lists[key] = fields
		}
	}
	return out, nil
}

func parseLexicon(fs embed.FS) (*lexicon, error) {
	lex := &lexicon{lists: map[string][]string{}, people: map[Purpose]people{}, passwords: map[Purpose][]string{}}
	topics, err := parseSections(fs, "topics.txt")
	if err != nil {
		return nil, err
	}
	for _, s := range topics {
		lex.topics = append(lex.topics, newTopic(s))
	}
	general, err := parseSections(fs, "general.txt")
	if err != nil {
		return nil, err
	}
	for _, s := range general {
		if s.name == "general" {
			lex.general = newTopic(s)
			continue
		}
		for _, n := range s.names {
			lex.lists[s.name+"/"+n] = s.lists[n]
		}
	}
	names, err := parseSections(fs, "names.txt")
	if err != nil {
		return nil, err
	}
	for _, s := range names {
		lex.people[Purpose(s.name)] = people{
			female: s.lists["female"], male: s.lists["male"], surnames: s.lists["surnames"],
			towns: s.lists["towns"], cities: s.lists["cities"],
		}
	}
	words, err := parseSections(fs, "passkeys.txt")
	if err != nil {
		return nil, err
	}
	for _, s := range words {
		lex.passwords[Purpose(s.name)] = s.lists["words"]
	}
	return lex, nil
}

func newTopic(s section) topic {
	t := topic{name: s.name, stuff: s.lists["stuff"], adj: s.lists["adj"]}
	for _, w := range s.lists["agents"] {
		t.agents = append(t.agents, newNoun(w))
	}
	for _, w := range s.lists["things"] {
		t.things = append(t.things, newNoun(w))
	}
	for _, w := range s.lists["places"] {
		t.places = append(t.places, newNoun(w))
	}
	for _, w := range s.lists["vt"] {
		t.vt = append(t.vt, newVerb(w))
	}
	for _, w := range s.lists["vi"] {
		t.vi = append(t.vi, newVerb(w))
	}
	return t
}

func newNoun(w string) noun {
	if sg, pl, ok := strings.Cut(w, "/"); ok {
		return noun{sg, pl}
	}
	return noun{w, plural(w)}
}

func newVerb(w string) verb {
	if p := strings.Split(w, "/"); len(p) == 3 {
		return verb{base: p[0], third: plural(p[0]), past: p[1], part: p[2], ing: ingForm(p[0])}
	}
	if b, ok := strings.CutSuffix(w, "+"); ok {
		d := b + b[len(b)-1:]
		return verb{base: b, third: plural(b), past: d + "ed", part: d + "ed", ing: d + "ing"}
	}
	p := pastForm(w)
	return verb{base: w, third: plural(w), past: p, part: p, ing: ingForm(w)}
}

func isVowel(b byte) bool { return strings.IndexByte("aeiou", b) >= 0 }

// plural adds the -s of nouns' plurals and of verbs' third person.
func plural(w string) string {
	n := len(w)
	switch {
	case w == "go":
		return "goes"
	case n > 1 && w[n-1] == 'y' && !isVowel(w[n-2]):
		return w[:n-1] + "ies"
	case strings.HasSuffix(w, "s"), strings.HasSuffix(w, "x"), strings.HasSuffix(w, "z"),
		strings.HasSuffix(w, "ch"), strings.HasSuffix(w, "sh"):
		return w + "es"
	}
	return w + "s"
}

func pastForm(w string) string {
	n := len(w)
	switch {
	case w[n-1] == 'e':
		return w + "d"
	case n > 1 && w[n-1] == 'y' && !isVowel(w[n-2]):
		return w[:n-1] + "ied"
	}
	return w + "ed"
}

// doubledIng are the irregular verbs of the lists whose -ing form doubles the
// last letter; the regular ones carry a "+" in the list.
var doubledIng = map[string]bool{
	"run": true, "sit": true, "win": true, "swim": true, "dig": true,
	"outrun": true, "forget": true, "knit": true, "hit": true,
}

func ingForm(w string) string {
	n := len(w)
	switch {
	case w == "lie" || w == "die" || w == "tie":
		return w[:n-2] + "ying"
	case doubledIng[w]:
		return w + w[n-1:] + "ing"
	case strings.HasSuffix(w, "ee"), strings.HasSuffix(w, "oe"), strings.HasSuffix(w, "ye"):
		return w + "ing"
	case w[n-1] == 'e' && w != "be":
		return w[:n-1] + "ing"
	}
	return w + "ing"
}

// withArticle puts "a" or "an" before a phrase, by its sound.
func withArticle(phrase string) string {
	l := strings.ToLower(phrase)
	an := l != "" && isVowel(l[0])
	for _, p := range []string{"one", "uni", "use", "eu", "ewe", "uten"} {
		if strings.HasPrefix(l, p) && !strings.HasPrefix(l, "unim") && !strings.HasPrefix(l, "unin") {
			an = false
		}
	}
	for _, p := range []string{"hour", "honest", "heir", "honour"} {
		if strings.HasPrefix(l, p) {
			an = true
		}
	}
	if an {
		return "an " + phrase
	}
	return "a " + phrase
}
