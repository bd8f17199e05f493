package datasets

import (
	"bytes"
	"compress/flate"
	"math"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
)

func proseText(t *testing.T, purpose Purpose, seed uint64, size int) (string, []string) {
	t.Helper()
	s, err := Prose().Stream(purpose, rand.New(rand.NewPCG(seed, 0)))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	var sentences []string
	for b.Len() < size {
		x := string(s.Next())
		b.WriteString(x)
		sentences = append(sentences, strings.TrimSpace(x))
	}
	return b.String(), sentences
}

var wordRE = regexp.MustCompile(`[A-Za-z]+(?:['-][A-Za-z]+)*`)

// The bounds enclose what novels of the nineteenth century have, by the same
// measures; docs/datasets.md has the figures.
func TestProseStatistics(t *testing.T) {
	for seed := range uint64(3) {
		text, sentences := proseText(t, Calibration, seed, 400_000)
		seen := map[string]bool{}
		var n, sum, sq float64
		for _, s := range sentences {
			if seen[s] {
				t.Errorf("repeated: %q", s)
			}
			seen[s] = true
			w := float64(len(strings.Fields(s)))
			n, sum, sq = n+1, sum+w, sq+w*w
		}
		mean := sum / n
		if sd := math.Sqrt(sq/n - mean*mean); mean < 8 || mean > 20 || sd < 5 {
			t.Errorf("seed %d: sentences of %.1f words, deviation %.1f", seed, mean, sd)
		}
		words := wordRE.FindAllString(strings.ToLower(text), -1)
		types := map[string]int{}
		for _, w := range words[:20000] {
			types[w]++
		}
		if ratio := float64(len(types)) / 20000; ratio < 0.12 || ratio > 0.25 {
			t.Errorf("seed %d: %d types in 20,000 words", seed, len(types))
		}
		once, few := 0, len(types)
		for _, c := range types {
			if c == 1 {
				once++
			}
		}
		if share := float64(once) / float64(len(types)); share < 0.2 || share > 0.65 {
			t.Errorf("seed %d: %.2f of the types stand once", seed, share)
		}
		for _, w := range words[20000:] {
			types[w]++
		}
		if len(types) < 4000 {
			t.Errorf("seed %d: %d distinct words in %d", seed, len(types), len(words))
		}
		var z bytes.Buffer
		fw, _ := flate.NewWriter(&z, flate.BestCompression)
		fw.Write([]byte(text[:150_000]))
		fw.Close()
		if ratio := float64(z.Len()) / 150_000; ratio < 0.33 || ratio > 0.43 {
			t.Errorf("seed %d: deflated to %.3f", seed, ratio)
		}
		starts := map[string]int{}
		for _, s := range sentences {
			f := strings.Fields(s)
			starts[strings.Join(f[:min(2, len(f))], " ")]++
		}
		for s, c := range starts {
			if float64(c) > 0.04*n {
				t.Errorf("seed %d: %d of %.0f sentences start with %q", seed, c, n, s)
			}
		}
		if seed == 0 {
			t.Logf("mean %.1f words, %d types in 20,000 words, %d of %d, deflate %.3f, hapax %d", mean, few, len(types), len(words), float64(z.Len())/150_000, once)
		}
	}
}

func TestProseIsWellFormed(t *testing.T) {
	// Tense, articles and sentence marks by what can be seen without parsing.
	bad := regexp.MustCompile(`\b(?i:an? the|the the|a an|the an?|an? (?:some|his|her)|the (?:his|her|their)|of of|to to|a [aei][a-z]+|an [bcdfgjklmnpqrstvwxyz][a-z]*)\b|  | [.,;:?!]|[.?!]{2}|,,|%!|\b[A-Z]{3}|,"[a-z]|\b[a-z]+eed\b.{0}ed\b`)
	sentence := regexp.MustCompile(`^["(]?[A-Z0-9].*[.?!]["]?$`)
	_, sentences := proseText(t, Search, 5, 300_000)
	for _, s := range sentences {
		if !sentence.MatchString(s) {
			t.Errorf("not a sentence: %q", s)
		}
		if strings.Count(s, `"`)%2 != 0 || strings.Count(s, "(") != strings.Count(s, ")") {
			t.Errorf("unbalanced: %q", s)
		}
		if m := bad.FindString(s); m != "" && !regexp.MustCompile(`(?i)^a (?:one|uni|use|eu|ewe)`).MatchString(m) {
			t.Errorf("%q in %q", m, s)
		}
		if regexp.MustCompile(`\d{7}`).MatchString(s) {
			t.Errorf("seven digits, as a needle has: %q", s)
		}
		if t.Failed() {
			break
		}
	}
}

// What the needles are made of must not stand in the haystack.
func TestProseHasNoNeedleWords(t *testing.T) {
	lex, err := loadLexicon()
	if err != nil {
		t.Fatal(err)
	}
	needle := map[string]bool{"passkey": true, "passkeys": true, "magic": true}
	for p, words := range lex.passwords {
		for _, w := range words {
			needle[w] = true
		}
		for _, c := range lex.people[p].cities {
			needle[c] = true
		}
	}
	for _, p := range []Purpose{Calibration, Search, Certification} {
		text, _ := proseText(t, p, 3, 1_000_000)
		found := map[string]bool{}
		for _, w := range wordRE.FindAllString(text, -1) {
			w = strings.TrimSuffix(w, "'s")
			if needle[w] && !found[w] {
				found[w] = true
				t.Errorf("%s prose has %q", p, w)
			}
		}
	}
}

func TestProseStreams(t *testing.T) {
	a, _ := proseText(t, Calibration, 1, 20_000)
	b, _ := proseText(t, Calibration, 1, 20_000)
	if a != b {
		t.Error("the same seed gave different prose")
	}
	c, _ := proseText(t, Calibration, 2, 20_000)
	if a[:200] == c[:200] {
		t.Error("another seed gave the same prose")
	}
	if _, err := Prose().Stream("fun", rand.New(rand.NewPCG(1, 1))); err == nil {
		t.Error("an unknown purpose was taken")
	}
}

func TestInflection(t *testing.T) {
	for w, want := range map[string]verb{
		"stop+": {"stop", "stops", "stopped", "stopped", "stopping"},
		"carry": {"carry", "carries", "carried", "carried", "carrying"},
		"bake":  {"bake", "bakes", "baked", "baked", "baking"},
		"tie":   {"tie", "ties", "tied", "tied", "tying"},
		"free":  {"free", "frees", "freed", "freed", "freeing"},
		"reach": {"reach", "reaches", "reached", "reached", "reaching"},
		"play":  {"play", "plays", "played", "played", "playing"},
		"run/ran/run": {
			"run", "runs", "ran", "run", "running"},
		"go/went/gone": {"go", "goes", "went", "gone", "going"},
	} {
		if got := newVerb(w); got != want {
			t.Errorf("%s: %v, want %v", w, got, want)
		}
	}
	for w, want := range map[string]string{"box": "boxes", "city": "cities", "key": "keys", "child/children": "children", "brush": "brushes"} {
		if got := newNoun(w).pl; got != want {
			t.Errorf("plural of %s: %s", w, got)
		}
	}
	for w, want := range map[string]string{"apple": "an", "house": "a", "hour": "an", "honest man": "an", "useful tool": "a", "unusual day": "an", "unimportant day": "an", "European": "a", "one-eyed man": "a", "umpire": "an", "university": "a"} {
		if got := withArticle(w); got != want+" "+w {
			t.Errorf("%q, want %s", got, want)
		}
	}
}
