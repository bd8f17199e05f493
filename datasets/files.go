package datasets

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxFilesBytes bounds what Files reads into memory.
const maxFilesBytes = 1 << 30

// longestSentence, in bytes, is where text without sentence ends is parted.
const longestSentence = 600

// Files is a haystack of the user's own text: the files' contents in the order
// given, as UTF-8 (invalid bytes become U+FFFD). White space is kept, but runs of
// blank lines become one blank line. They are read at once.
//
// Every purpose has a third of the text to itself. A sample starts at a random
// sentence and reads on; at the end of the third it goes on at its beginning.
// Errors: what reading gave, or *OptionError for too little or too much text.
func Files(paths []string) (Haystack, error) {
	if len(paths) == 0 {
		return nil, badOption("haystack", "needs at least one file")
	}
	digest := sha256.New()
	var all []Sentence
	total := int64(0)
	for _, p := range paths {
		info, err := os.Stat(p)
		if err != nil {
			return nil, fmt.Errorf("haystack: %w", err)
		}
		if total += info.Size(); !info.Mode().IsRegular() || total > maxFilesBytes {
			return nil, badOption("haystack", "%s is not a regular file, or the files have more than %d bytes", p, maxFilesBytes)
		}
		data, err := os.ReadFile(p)
		if err != nil {
			return nil, fmt.Errorf("haystack: %w", err)
		}
		digest.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(data))))
		digest.Write(data)
		all = append(all, split(string(data))...)
	}
	f := &fileSource{name: "files:" + hex.EncodeToString(digest.Sum(nil)), sentences: all}
	if len(all) < 3 {
		return nil, badOption("haystack", "the files have %d sentences; needs at least 3, better thousands", len(all))
	}
	return f, nil
}

type fileSource struct {
	name      string
	sentences []Sentence
}

func (f *fileSource) Name() string { return f.name }

func (f *fileSource) Stream(purpose Purpose, r *rand.Rand) (Stream, error) {
	third := -1
	for i, p := range []Purpose{Calibration, Search, Certification} {
		if p == purpose {
			third = i
		}
	}
	if third < 0 {
		return nil, badOption("purpose", "%q is none of calibration, search, certification", purpose)
	}
	n := len(f.sentences)
	part := f.sentences[n*third/3 : n*(third+1)/3]
	return &fileStream{part: part, at: r.IntN(len(part)), start: true}, nil
}

type fileStream struct {
	part  []Sentence
	at    int
	start bool // reading starts, or starts again
}

// Contiguous is true: the text is read in order.
func (s *fileStream) Contiguous() bool { return true }

// Next yields the next sentence as it stands in the file.
func (s *fileStream) Next() Sentence {
	t := s.part[s.at]
	if s.start {
		t = Sentence(strings.TrimLeftFunc(string(t), unicode.IsSpace))
	}
	s.at++
	s.start = s.at == len(s.part)
	if s.start {
		s.at = 0
		if !t.endsBlock() {
			t += "\n\n"
		}
	}
	return t
}

// split parts text into sentences with their own white space: what parts one from
// the sentence before stands at its front, what ends a paragraph at its end.
func split(text string) []Sentence {
	text = strings.ToValidUTF8(text, "\uFFFD")
	text = strings.TrimPrefix(text, "\uFEFF")
	text = strings.ReplaceAll(text, "\r\n", "\n")
	var out []Sentence
	add := func(s, end string) {
		if strings.TrimFunc(s, unicode.IsSpace) != "" {
			out = append(out, Sentence(s+end))
		} else if n := len(out); n > 0 && !out[n-1].endsBlock() {
			out[n-1] += Sentence(end)
		}
	}
	for _, par := range strings.Split(text, "\n\n") {
		start := 0
		wide := false // behind a full stop that needs no space after it
		for i, r := range par {
			space := r == ' ' || r == '\n'
			closing := strings.ContainsRune("\"')]”’」』）", r)
			switch {
			case i == start:
			case wide && !closing,
				space && sentenceEnds(par[start:i], par[i:]),
				space && i-start > longestSentence,
				i-start > 4*longestSentence:
				add(par[start:i], "")
				start = i
			}
			wide = strings.ContainsRune("。！？", r) || wide && closing
		}
		add(par[start:], "\n\n")
	}
	return out
}

// sentenceEnds reports whether before ends a sentence and after starts another.
func sentenceEnds(before, after string) bool {
	b := strings.TrimRight(before, "\"')]”’")
	if b == "" || strings.IndexByte(".!?", b[len(b)-1]) < 0 {
		return false
	}
	// An initial or an abbreviation of one or two letters ends nothing.
	if w := b[strings.LastIndexAny(b, " \n")+1:]; len(w) <= 3 && b[len(b)-1] == '.' && w != "" && unicode.IsUpper(rune(w[0])) {
		return false
	}
	r, _ := utf8.DecodeRuneInString(strings.TrimLeft(after, " \n\"'([“‘"))
	return !unicode.IsLower(r)
}
