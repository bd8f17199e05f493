package datasets

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"
)

func smallDataset(t testing.TB) *Dataset {
	t.Helper()
	d, err := Passkeys(newWords(), chatML, PasskeyOptions{Count: 3, Passkeys: 2, Words: 4, Lengths: []int{300, 350}, Seed: 1<<63 + 5, ToolVersion: "v1.2.3"})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestSaveLoad(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "d.parquet")
	d := smallDataset(t)
	if err := Save(path, d); err != nil {
		t.Fatal(err)
	}
	got, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, d) {
		t.Errorf("read back\n%+v\nwant\n%+v", got.Meta, d.Meta)
	}
	if err := got.Validate(wordVocab); err != nil {
		t.Error(err)
	}
	first, _ := os.ReadFile(path)
	if err := Save(path, d); err != nil {
		t.Fatal(err)
	}
	if second, _ := os.ReadFile(path); !bytes.Equal(first, second) {
		t.Error("saving twice gave different bytes")
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("files left behind: %v", left)
	}
	d.Samples[0].Tokens[3]++
	var he *HashError
	if err := Save(path, d); !errors.As(err, &he) {
		t.Errorf("saving changed samples: %v", err)
	}
	if err := Save(filepath.Join(dir, "none", "d"), smallDataset(t)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("saving to a missing folder: %v", err)
	}
}

// Lists of many pages and row groups of several samples come back whole.
func TestSaveLoadLong(t *testing.T) {
	tok := newWords()
	d, err := NeedleGrid(tok, nil, GridOptions{Lengths: []int{100_000, 300, 40_000}, Depths: []float64{.5}, Repeats: 2})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "d.parquet")
	if err := Save(path, d); err != nil {
		t.Fatal(err)
	}
	got, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, d) {
		t.Error("read back something else")
	}
}

// The hash covers every field of a sample.
func TestHashCoversEverything(t *testing.T) {
	d := smallDataset(t)
	hash := HashSamples(d.Samples)
	for name, change := range map[string]func(*Sample){
		"ID": func(s *Sample) { s.ID++ }, "Task": func(s *Sample) { s.Task += "x" }, "Tokens": func(s *Sample) { s.Tokens = s.Tokens[1:] },
		"Spans": func(s *Sample) { s.Spans[1].Kind = SpanNeedle }, "TargetTokens": func(s *Sample) { s.TargetTokens++ },
		"Depths": func(s *Sample) { s.Depths[0] += 1e-12 }, "AskedDepths": func(s *Sample) { s.AskedDepths[1] = 0 },
		"Seed": func(s *Sample) { s.Seed++ }, "Haystack": func(s *Sample) { s.Haystack = "files" }, "Expected": func(s *Sample) { s.Expected[1] += " x" },
	} {
		c := smallDataset(t).Samples
		change(&c[1])
		if HashSamples(c) == hash {
			t.Errorf("a change of %s does not change the hash", name)
		}
	}
	if n := reflect.TypeFor[Sample]().NumField(); n != 10 {
		t.Errorf("a sample has %d fields: hash the new one, and store it", n)
	}
	if HashSamples(d.Samples[:2]) == hash {
		t.Error("fewer samples have the same hash")
	}
}

func TestLoadRefuses(t *testing.T) {
	dir := t.TempDir()
	d := smallDataset(t)
	path := filepath.Join(dir, "good.parquet")
	if err := Save(path, d); err != nil {
		t.Fatal(err)
	}
	good, _ := os.ReadFile(path)
	put := func(data []byte) string {
		p := filepath.Join(dir, "bad.parquet")
		if err := os.WriteFile(p, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return p
	}
	if _, err := Load(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
	for name, data := range map[string][]byte{"empty": {}, "text": []byte("hello"), "magic only": []byte("PAR1PAR1"),
		"huge footer": append(bytes.Clone(good[:len(good)-8]), "\xff\xff\xff\xffPAR1"...)} {
		if _, err := Load(put(data)); !errors.Is(err, ErrNotDataset) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for n := 0; n < len(good); n += len(good)/50 + 1 {
		if _, err := Load(put(good[:n])); err == nil {
			t.Errorf("cut to %d of %d bytes: no error", n, len(good))
		}
	}
	// Another hash in the metadata, of the same length.
	other := strings.Repeat("0", 64)
	if _, err := Load(put(bytes.Replace(good, []byte(d.Meta.ContentHash), []byte(other), 1))); err == nil {
		t.Error("another content hash: no error")
	} else {
		var he *HashError
		if !errors.As(err, &he) || he.Want != other || he.Got != d.Meta.ContentHash {
			t.Errorf("another content hash: %v", err)
		}
	}
	// Other tables: without metadata, of another version, with other columns.
	type strange struct {
		ID int64 `parquet:"id"`
	}
	table := func(opts ...parquet.WriterOption) []byte {
		var b bytes.Buffer
		w := parquet.NewGenericWriter[strange](&b, opts...)
		w.Write([]strange{{1}})
		w.Close()
		return b.Bytes()
	}
	format := parquet.KeyValueMetadata(keyFormat, formatName)
	for name, data := range map[string][]byte{
		"no metadata":   table(),
		"next version":  table(format, parquet.KeyValueMetadata(keyVersion, "2"), parquet.KeyValueMetadata(keySeed, "1")),
		"other columns": table(format, parquet.KeyValueMetadata(keyVersion, "1"), parquet.KeyValueMetadata(keySeed, "1")),
		"no seed":       table(format, parquet.KeyValueMetadata(keyVersion, "1")),
	} {
		if _, err := Load(put(data)); !errors.Is(err, ErrNotDataset) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whatever the bytes, Load gives an error or a dataset whose hash is right.
func FuzzLoad(f *testing.F) {
	path := filepath.Join(f.TempDir(), "d.parquet")
	d, err := NeedleGrid(newWords(), nil, GridOptions{Lengths: []int{160}, Depths: []float64{.5}})
	if err != nil {
		f.Fatal(err)
	}
	if err := Save(path, d); err != nil {
		f.Fatal(err)
	}
	good, _ := os.ReadFile(path)
	f.Add(good, 0, byte(0))
	for i := 8; i < len(good); i += 97 {
		f.Add(good, i, byte(0xff))
	}
	f.Fuzz(func(t *testing.T, data []byte, at int, with byte) {
		data = bytes.Clone(data)
		if at >= 0 && at < len(data) {
			data[at] ^= with
		}
		p := filepath.Join(t.TempDir(), "d")
		if err := os.WriteFile(p, data, 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := Load(p)
		if err != nil {
			return
		}
		if HashSamples(got.Samples) != got.Meta.ContentHash {
			t.Error("a dataset with a wrong hash was loaded")
		}
	})
}
