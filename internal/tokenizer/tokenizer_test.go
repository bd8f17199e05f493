package tokenizer

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/text/unicode/norm"
)

func gunzip(t testing.TB, path string) []byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

type testCase struct {
	Text         string
	IDs, Special []int32
	Decoded      *string // nil where it was not recorded
}

// recorded is what another library gave: scripts/fixtures_tokenizer.py.
type recorded struct {
	Cases   []testCase // texts, their ids, and the texts that those decode to
	Decodes []testCase // random ids
}

func read(t testing.TB, path string, into any) {
	t.Helper()
	if err := json.Unmarshal(gunzip(t, path), into); err != nil {
		t.Fatal(err)
	}
}

func check(t *testing.T, tok *Tokenizer, r recorded) {
	t.Helper()
	wrong := 0
	fail := func(format string, args ...any) {
		if wrong++; wrong <= 5 {
			t.Errorf(format, args...)
		}
	}
	for _, c := range r.Cases {
		if got := tok.Encode(c.Text); !slices.Equal(got, c.IDs) {
			fail("%q gives %v, want %v", c.Text, got, c.IDs)
		} else if with := tok.EncodeWithSpecial(c.Text); !slices.Equal(with, c.Special) {
			fail("%q with special tokens gives %v, want %v", c.Text, with, c.Special)
		} else if text := tok.Decode(c.IDs); c.Decoded != nil && text != *c.Decoded {
			fail("%v decodes to %q, want %q", c.IDs, text, *c.Decoded)
		}
	}
	for _, c := range r.Decodes {
		if text := tok.Decode(c.IDs); text != *c.Decoded {
			fail("%v decodes to %q, want %q", c.IDs, text, *c.Decoded)
		}
	}
	if wrong > 0 {
		t.Errorf("%d of %d are wrong", wrong, len(r.Cases)+len(r.Decodes))
	}
}

func TestOfficialIDs(t *testing.T) {
	dir := "testdata"
	if other := os.Getenv("KVPROFILE_TOKENIZER_CASES"); other != "" {
		dir = other // whole tokenizers, with as many strings as one likes
	}
	for _, name := range []string{"qwen3", "llama3", "llama2", "gemma3", "nemo"} {
		t.Run(name, func(t *testing.T) {
			tok, err := FromJSON(gunzip(t, filepath.Join(dir, name+".json.gz")), nil)
			if err != nil {
				t.Fatal(err)
			}
			var r recorded
			read(t, filepath.Join(dir, name+".cases.json.gz"), &r)
			if len(r.Cases) < 200 || len(r.Decodes) < 50 {
				t.Errorf("only %d and %d cases", len(r.Cases), len(r.Decodes))
			}
			check(t, tok, r)
		})
	}
}

// Small tokenizers with pipelines of every supported part, and added tokens with every flag.
func TestVariants(t *testing.T) {
	var all []struct {
		Name      string
		Tokenizer json.RawMessage
		recorded
	}
	read(t, "testdata/variants.json.gz", &all)
	if len(all) < 100 {
		t.Errorf("only %d variants", len(all))
	}
	for _, v := range all {
		t.Run(v.Name, func(t *testing.T) {
			tok, err := FromJSON(v.Tokenizer, nil)
			if err != nil {
				t.Fatal(err)
			}
			check(t, tok, v.recorded)
		})
	}
}

// A vocabulary with scores in place of merges, compared with the sentencepiece library.
func TestScoredVocabulary(t *testing.T) {
	dir := "testdata"
	if other := os.Getenv("KVPROFILE_TOKENIZER_CASES"); other != "" {
		dir = other
	}
	var v struct {
		Tokens []string
		Scores []float32
		Types  []int64
		recorded
	}
	read(t, filepath.Join(dir, "scored.json.gz"), &v)
	tok, err := FromVocabulary(Vocabulary{Model: "llama", Tokens: v.Tokens, Scores: v.Scores, Types: v.Types, BOS: 1, EOS: 2, UNK: 0})
	if err != nil {
		t.Fatal(err)
	}
	check(t, tok, v.recorded)

	// The same vocabulary in a tokenizer.json.
	folder, err := FromJSON(gunzip(t, filepath.Join(dir, "llama2.json.gz")), []byte(`{"bos_token":"<s>","eos_token":"</s>"}`))
	if err != nil {
		t.Fatal(err)
	}
	if folder.Fingerprint() != tok.Fingerprint() {
		t.Error("the fingerprints of the two formats differ")
	}
}

func TestConcurrentUse(t *testing.T) {
	tok, err := FromJSON(gunzip(t, "testdata/qwen3.json.gz"), nil)
	if err != nil {
		t.Fatal(err)
	}
	var r recorded
	read(t, "testdata/qwen3.cases.json.gz", &r)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for _, c := range r.Cases {
				if !slices.Equal(tok.Encode(c.Text), c.IDs) {
					t.Errorf("%q differs", c.Text)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestByteLevelAlphabet(t *testing.T) {
	seen := map[rune]bool{}
	for b := range 256 {
		r := byteRune(byte(b))
		back, ok := runeByte(r)
		if !ok || back != byte(b) || seen[r] {
			t.Errorf("byte %d is %q, and back %d", b, r, back)
		}
		seen[r] = true
	}
}

func TestClasses(t *testing.T) {
	v := Vocabulary{Model: "gpt2", Pre: "smollm", Tokens: []string{"<|im_start|>", "a", ".", "Ġ!", "Ġ", "1", "$", "Âµ", "âĢĶ", "!a", "..."},
		Types: []int64{3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, BOS: 1, EOS: -1, UNK: -1}
	tok, err := FromVocabulary(v)
	if err != nil {
		t.Fatal(err)
	}
	for id, want := range []struct{ special, punctuation bool }{{true, false}, {true, false}, {false, true}, {false, true}, {}, {}, {false, true}, {}, {false, true}, {}, {false, true}} {
		if tok.IsSpecial(int32(id)) != want.special || tok.IsPunctuation(int32(id)) != want.punctuation {
			t.Errorf("%q: special %v, punctuation %v", v.Tokens[id], tok.IsSpecial(int32(id)), tok.IsPunctuation(int32(id)))
		}
	}
	if tok.IsPunctuation(-1) || tok.IsPunctuation(1000) || tok.Token(1000) != "" {
		t.Error("ids outside the vocabulary have a class")
	}
}

func TestFingerprintIsOfTheMeaning(t *testing.T) {
	v := Vocabulary{Model: "gpt2", Pre: "gpt-2", Tokens: []string{"a", "b", "ab"}, Merges: []string{"a b"}, BOS: 0, EOS: 1, UNK: -1}
	print := func(edit func(*Vocabulary)) string {
		w := v
		w.Tokens = slices.Clone(v.Tokens)
		edit(&w)
		tok, err := FromVocabulary(w)
		if err != nil {
			t.Fatal(err)
		}
		return tok.Fingerprint()
	}
	same := print(func(*Vocabulary) {})
	fromJSON, err := FromJSON([]byte(`{"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false}}`),
		[]byte(`{"bos_token":"a","eos_token":{"content":"b"}}`))
	if err != nil {
		t.Fatal(err)
	}
	if fromJSON.Fingerprint() != same {
		t.Error("the same tokenizer from tokenizer.json has another fingerprint")
	}
	for name, edit := range map[string]func(*Vocabulary){
		"a token":   func(v *Vocabulary) { v.Tokens[2] = "ab"; v.Tokens = append(v.Tokens, "c") },
		"the order": func(v *Vocabulary) { v.Tokens[0], v.Tokens[1] = "b", "a" },
		"a merge":   func(v *Vocabulary) { v.Merges = nil },
		"EOS":       func(v *Vocabulary) { v.EOS = 0 },
	} {
		if print(edit) == same {
			t.Errorf("another %s leaves the fingerprint as it was", name)
		}
	}
}

func TestRefused(t *testing.T) {
	for name, c := range map[string]struct {
		json string
		want error
	}{
		"unigram":       {`{"model":{"type":"Unigram","vocab":[["a",0]]}}`, ErrUnsupported},
		"pre-tokenizer": {`{"model":{"type":"BPE","vocab":{}},"pre_tokenizer":{"type":"Whitespace"}}`, ErrUnsupported},
		"normalizer":    {`{"model":{"type":"BPE","vocab":{}},"normalizer":{"type":"Nmt"}}`, ErrUnsupported},
		"decoder":       {`{"model":{"type":"BPE","vocab":{}},"decoder":{"type":"CTC"}}`, ErrUnsupported},
		"processor":     {`{"model":{"type":"BPE","vocab":{}},"post_processor":{"type":"RobertaProcessing"}}`, ErrUnsupported},
		"not JSON":      {`{`, ErrCorrupt},
		"huge id":       {`{"model":{"type":"BPE","vocab":{"a":2000000000}}}`, ErrCorrupt},
		"negative id":   {`{"model":{"type":"BPE","vocab":{"a":-1}}}`, ErrCorrupt},
		"merge":         {`{"model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}`, ErrCorrupt},
		"merge shape":   {`{"model":{"type":"BPE","vocab":{"a":0},"merges":[["a"]]}}`, ErrCorrupt},
		"growth": {`{"model":{"type":"BPE","vocab":{}},"normalizer":{"type":"Sequence","normalizers":[{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaa"},
			{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaa"},{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaa"}]}}`, ErrUnsupported},
		"two ids":      {`{"model":{"type":"BPE","vocab":{"a":0,"b":0}}}`, ErrCorrupt},
		"no model":     {`{}`, ErrCorrupt},
		"processor id": {`{"model":{"type":"BPE","vocab":{"a":0}},"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x"}}],"special_tokens":{"x":{"ids":[9]}}}}`, ErrCorrupt},
		"regex":        {`{"model":{"type":"BPE","vocab":{}},"pre_tokenizer":{"type":"Split","behavior":"Isolated","pattern":{"Regex":"("}}}`, ErrCorrupt},
	} {
		if _, err := FromJSON([]byte(c.json), nil); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
	}
	for name, v := range map[string]Vocabulary{
		"model":  {Model: "bert", BOS: -1, EOS: -1, UNK: -1},
		"pre":    {Model: "gpt2", Pre: "new", BOS: -1, EOS: -1, UNK: -1},
		"bos":    {Model: "gpt2", Pre: "gpt-2", BOS: 4, EOS: -1, UNK: -1},
		"twice":  {Model: "gpt2", Pre: "gpt-2", Tokens: []string{"a", "a"}, BOS: -1, EOS: -1, UNK: -1},
		"scores": {Model: "llama", Tokens: []string{"a"}, BOS: -1, EOS: -1, UNK: -1},
		"types":  {Model: "gpt2", Pre: "gpt-2", Tokens: []string{"a"}, Types: []int64{1, 1}, BOS: -1, EOS: -1, UNK: -1},
	} {
		if _, err := FromVocabulary(v); !errors.Is(err, ErrUnsupported) && !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// Whatever a tokenizer.json says, reading and using it must not panic.
func FuzzFromJSON(f *testing.F) {
	f.Add([]byte(`{"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]},"pre_tokenizer":{"type":"ByteLevel"},"decoder":{"type":"ByteLevel"}}`), "abba")
	f.Add([]byte(`{"added_tokens":[{"id":3,"content":"<x>","lstrip":true,"rstrip":true}],"model":{"type":"BPE","vocab":{"▁":0}},"normalizer":{"type":"Prepend","prepend":"▁"}}`), " <x> a")
	f.Add([]byte(`{"model":{"type":"BPE","vocab":{"a":0}},"pre_tokenizer":{"type":"Metaspace","replacement":"▁"},"decoder":{"type":"Strip","content":"","start":3}}`), "a a")
	f.Fuzz(func(t *testing.T, data []byte, text string) {
		tok, err := FromJSON(data, data)
		if err != nil {
			return
		}
		ids := tok.EncodeWithSpecial(text)
		for _, id := range ids {
			if id < 0 || int(id) >= tok.VocabSize() {
				t.Fatalf("id %d of %d", id, tok.VocabSize())
			}
			tok.IsPunctuation(id)
		}
		tok.Decode(ids)
		tok.Fingerprint()
	})
}

// prose makes a megabyte of words that are about as often and as long as those of a language.
func prose() string {
	rng := rand.New(rand.NewPCG(7, 7))
	syllables := strings.Fields("the of and to in is it that was for on are with as his they be at one have this from or had by hot but some what there we can out other were all your when up use how said an each she ing er ly tion")
	words := make([]string, 8000)
	for i := range words {
		for range 1 + rng.IntN(3) {
			words[i] += syllables[rng.IntN(len(syllables))]
		}
	}
	zipf := rand.NewZipf(rng, 1.1, 3, uint64(len(words)-1))
	var b strings.Builder
	for n := 1; b.Len() < 1<<20; n++ {
		b.WriteString(words[zipf.Uint64()])
		switch {
		case n%97 == 0:
			b.WriteString(".\n\n")
		case n%13 == 0:
			b.WriteString(", 1984, it's ")
		default:
			b.WriteByte(' ')
		}
	}
	return b.String()
}

// Whatever a vocabulary says, making a tokenizer of it and using it must not panic. Tokens, merges and scores come from
// one text: lines, and in them fields.
func FuzzFromVocabulary(f *testing.F) {
	f.Add("gpt2", "smollm", "a\nb\nab\n<|x|>\t3", "a b\nab a", "abba <|x|>", int32(0))
	f.Add("llama", "", "<unk>\t2\n<s>\t3\n▁\na\n▁a\n<0x0A>\t6\n▁▁", "", "a  a\n", int32(1))
	f.Add("gpt2", "default", "1\n.\n\u0120", "", "12.3 ..", int32(-7))
	f.Fuzz(func(t *testing.T, model, pre, tokens, merges, text string, id int32) {
		v := Vocabulary{Model: model, Pre: pre, Merges: strings.Split(merges, "\n"), BOS: id, EOS: -1, UNK: id}
		if merges == "" {
			v.Merges = nil
		}
		for i, line := range strings.Split(tokens, "\n") {
			token, kind, _ := strings.Cut(line, "\t")
			v.Tokens = append(v.Tokens, token)
			v.Types = append(v.Types, int64(len(kind)))
			v.Scores = append(v.Scores, float32(i%3))
		}
		tok, err := FromVocabulary(v)
		if err != nil {
			return
		}
		ids := tok.EncodeWithSpecial(text)
		for _, id := range ids {
			if tok.Token(id) == "" {
				t.Fatalf("id %d is not in use", id)
			}
			tok.IsPunctuation(id)
		}
		tok.Decode(ids)
		tok.Fingerprint()
	})
}

// Whatever text is cut into words, nothing of it is lost: byte-level tokenizers decode what they encode.
func TestRoundTrip(t *testing.T) {
	for _, name := range []string{"qwen3", "llama3", "nemo", "gemma3"} {
		tok, err := FromJSON(gunzip(t, "testdata/"+name+".json.gz"), nil)
		if err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(3, 4))
		for range 300 {
			runes := make([]rune, rng.IntN(200))
			for i := range runes {
				if runes[i] = rune(rng.IntN(0x250)); rng.IntN(9) == 0 {
					runes[i] = rune(0xE000 + rng.IntN(0x10000))
				}
			}
			text := norm.NFC.String(strings.ReplaceAll(string(runes), spaceMark, ""))
			if got := tok.Decode(tok.Encode(text)); got != text {
				t.Fatalf("%s: %q comes back as %q", name, text, got)
			}
		}
	}
}

func TestSpacePrefixAndBOS(t *testing.T) {
	no, yes := false, true
	v := Vocabulary{Model: "llama", Tokens: []string{"<unk>", "<s>", "</s>", "▁", "a", "▁a"}, Scores: []float32{0, 0, 0, -2, -3, -1},
		Types: []int64{2, 3, 3, 1, 1, 1}, BOS: 1, EOS: 2, UNK: 0}
	for _, c := range []struct {
		bos, eos, space *bool
		want            []int32
	}{
		{nil, nil, nil, []int32{1, 5}},
		{&no, nil, nil, []int32{5}},
		{nil, &yes, &no, []int32{1, 4, 2}},
		{&no, &yes, &yes, []int32{5, 2}},
	} {
		v.AddBOS, v.AddEOS, v.AddSpacePrefix = c.bos, c.eos, c.space
		tok, err := FromVocabulary(v)
		if err != nil {
			t.Fatal(err)
		}
		if got := tok.EncodeWithSpecial("a"); !slices.Equal(got, c.want) {
			t.Errorf("got %v, want %v", got, c.want)
		}
	}
	// A gpt2 vocabulary begins texts with BOS only where its kind is trained so.
	for pre, want := range map[string]int{"smollm": 1, "qwen2": 1, "default": 1, "llama-bpe": 2, "tekken": 2} {
		tok, err := FromVocabulary(Vocabulary{Model: "gpt2", Pre: pre, Tokens: []string{"a", "<s>"}, BOS: 1, EOS: -1, UNK: -1})
		if err != nil {
			t.Fatal(err)
		}
		if got := tok.EncodeWithSpecial("a"); len(got) != want {
			t.Errorf("%s: %v", pre, got)
		}
	}
}

// A vocabulary that is padded with unused tokens, and one whose file names a BOS, do what the other does.
func TestFingerprintOfConvertedFile(t *testing.T) {
	folder, err := FromJSON([]byte(`{"added_tokens":[{"id":3,"content":"<|end|>","special":true},{"id":4,"content":"<think>"}],
		"normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","behavior":"Isolated","invert":false,
		"pattern":{"Regex":`+strconv.Quote(qwen2Pattern)+`}},{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false}]},
		"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}`), []byte(`{"eos_token":"<|end|>","bos_token":null}`))
	if err != nil {
		t.Fatal(err)
	}
	v := Vocabulary{Model: "gpt2", Pre: "qwen2", Tokens: []string{"a", "b", "ab", "<|end|>", "<think>", "[PAD5]"}, Types: []int64{1, 1, 1, 3, 4, 5},
		Merges: []string{"a b"}, BOS: 3, EOS: 3, UNK: -1}
	file, err := FromVocabulary(v)
	if err != nil {
		t.Fatal(err)
	}
	if folder.Fingerprint() != file.Fingerprint() {
		t.Error("the fingerprints differ")
	}
	v.Pre = "llama-bpe"
	if other, err := FromVocabulary(v); err != nil || other.Fingerprint() == file.Fingerprint() {
		t.Errorf("another way to cut words leaves the fingerprint as it was (%v)", err)
	}
}

func BenchmarkEncode(b *testing.B) {
	text := prose()
	for _, name := range []string{"qwen3", "llama3", "llama2", "gemma3", "nemo"} {
		b.Run(name, func(b *testing.B) {
			tok, err := FromJSON(gunzip(b, "testdata/"+name+".json.gz"), nil)
			if err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				clear(tok.cache)
				tok.Encode(text)
			}
		})
	}
}
