package datasets

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/parquet-go/parquet-go"
)

// FormatVersion is the version of the Parquet layout.
const FormatVersion = 1

// The keys of the file's metadata.
const (
	keyFormat     = "kvprofile.format"
	keyVersion    = "kvprofile.version"
	keyTask       = "kvprofile.task"
	keyParameters = "kvprofile.parameters"
	keyPurpose    = "kvprofile.purpose"
	keySeed       = "kvprofile.seed"
	keyHaystack   = "kvprofile.haystack"
	keyTokenizer  = "kvprofile.tokenizer"
	keyTool       = "kvprofile.tool_version"
	keyHash       = "kvprofile.content_hash"
	formatName    = "kvprofile.dataset"
)

// ErrNotDataset says that a file is no dataset of this program, or of a version
// that this program does not know.
var ErrNotDataset = errors.New("not a dataset")

type row struct {
	ID           int64     `parquet:"id"`
	Task         string    `parquet:"task,dict"`
	Tokens       []int32   `parquet:"tokens,list" parquet-element:",zstd"`
	Spans        []spanRow `parquet:"spans,list"`
	TargetTokens int64     `parquet:"target_tokens"`
	Depths       []float64 `parquet:"depths,list"`
	AskedDepths  []float64 `parquet:"asked_depths,list"`
	Seed         uint64    `parquet:"seed"`
	Haystack     string    `parquet:"haystack,dict"`
	Expected     []string  `parquet:"expected,list"`
}

type spanRow struct {
	Kind  string `parquet:"kind,dict"`
	Index int64  `parquet:"index"`
	Start int64  `parquet:"start"`
	End   int64  `parquet:"end"`
}

// Save writes a dataset as one Parquet file, to a temporary name beside path that
// is renamed when it is whole. The same dataset gives the same bytes.
func Save(path string, d *Dataset) (err error) {
	if got := HashSamples(d.Samples); got != d.Meta.ContentHash {
		return fmt.Errorf("save dataset %s: %w", path, &HashError{Want: d.Meta.ContentHash, Got: got})
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*.tmp")
	if err != nil {
		return fmt.Errorf("save dataset: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
			err = fmt.Errorf("save dataset %s: %w", path, err)
		}
	}()
	if err := write(f, d); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

func write(out io.Writer, d *Dataset) error {
	m := &d.Meta
	w := parquet.NewGenericWriter[row](out,
		parquet.MaxRowsPerRowGroup(256),
		parquet.KeyValueMetadata(keyFormat, formatName),
		parquet.KeyValueMetadata(keyVersion, strconv.Itoa(FormatVersion)),
		parquet.KeyValueMetadata(keyTask, m.Task),
		parquet.KeyValueMetadata(keyParameters, string(m.Parameters)),
		parquet.KeyValueMetadata(keyPurpose, string(m.Purpose)),
		parquet.KeyValueMetadata(keySeed, strconv.FormatUint(m.Seed, 10)),
		parquet.KeyValueMetadata(keyHaystack, m.Haystack),
		parquet.KeyValueMetadata(keyTokenizer, m.Tokenizer),
		parquet.KeyValueMetadata(keyTool, m.ToolVersion),
		parquet.KeyValueMetadata(keyHash, m.ContentHash),
	)
	for i := range d.Samples {
		if _, err := w.Write([]row{toRow(&d.Samples[i])}); err != nil {
			return err
		}
	}
	return w.Close()
}

func toRow(s *Sample) row {
	r := row{ID: int64(s.ID), Task: s.Task, Tokens: s.Tokens, TargetTokens: int64(s.TargetTokens),
		Depths: s.Depths, AskedDepths: s.AskedDepths, Seed: s.Seed, Haystack: s.Haystack, Expected: s.Expected}
	for _, sp := range s.Spans {
		r.Spans = append(r.Spans, spanRow{string(sp.Kind), int64(sp.Index), int64(sp.Start), int64(sp.End)})
	}
	return r
}

func (r *row) sample() Sample {
	s := Sample{ID: int(r.ID), Task: r.Task, Tokens: r.Tokens, TargetTokens: int(r.TargetTokens),
		Depths: r.Depths, AskedDepths: r.AskedDepths, Seed: r.Seed, Haystack: r.Haystack, Expected: r.Expected}
	for _, sp := range r.Spans {
		s.Spans = append(s.Spans, Span{SpanKind(sp.Kind), int(sp.Index), int(sp.Start), int(sp.End)})
	}
	return s
}

// Load reads a dataset and verifies its content hash. Errors wrap ErrNotDataset
// for another kind of file, *HashError for changed contents. It does not know the
// model's vocabulary: call Validate with its size, and compare Meta.Tokenizer with
// the model's tokenizer, before the tokens are used.
func Load(path string) (d *Dataset, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("load dataset: %w", err)
	}
	defer f.Close()
	// The Parquet reader panics on some broken files.
	defer func() {
		if p := recover(); p != nil {
			d, err = nil, fmt.Errorf("load dataset %s: %w: broken Parquet: %v", path, ErrNotDataset, p)
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("load dataset: %w", err)
	}
	d, err = read(f, info.Size())
	if err != nil {
		return nil, fmt.Errorf("load dataset %s: %w", path, err)
	}
	return d, nil
}

func read(f io.ReaderAt, size int64) (*Dataset, error) {
	// The reader allocates what the footer's length says before it reads it.
	var end [8]byte
	if size < 12 {
		return nil, fmt.Errorf("%w: %d bytes are no Parquet file", ErrNotDataset, size)
	}
	if _, err := f.ReadAt(end[:], size-8); err != nil {
		return nil, err
	}
	if n := int64(binary.LittleEndian.Uint32(end[:])); n > size-12 {
		return nil, fmt.Errorf("%w: its footer of %d bytes does not fit in a file of %d", ErrNotDataset, n, size)
	}
	file, err := parquet.OpenFile(f, size)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotDataset, err)
	}
	get := func(key string) string { v, _ := file.Lookup(key); return v }
	if got := get(keyFormat); got != formatName {
		return nil, fmt.Errorf("%w: its %s is %q, not %q", ErrNotDataset, keyFormat, got, formatName)
	}
	if got := get(keyVersion); got != strconv.Itoa(FormatVersion) {
		return nil, fmt.Errorf("%w of version %d: its version is %q; make it anew or use another release", ErrNotDataset, FormatVersion, got)
	}
	seed, err := strconv.ParseUint(get(keySeed), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrNotDataset, keySeed, err)
	}
	if n := file.NumRows(); n < 0 || n > maxSamples {
		return nil, fmt.Errorf("%w: %d rows", ErrNotDataset, n)
	}
	if want := parquet.SchemaOf(row{}); !parquet.EqualNodes(want, file.Schema()) {
		return nil, fmt.Errorf("%w: its columns are not those of version %d", ErrNotDataset, FormatVersion)
	}
	d := &Dataset{Meta: Meta{Task: get(keyTask), Parameters: []byte(get(keyParameters)), Purpose: Purpose(get(keyPurpose)), Seed: seed,
		Haystack: get(keyHaystack), Tokenizer: get(keyTokenizer), ToolVersion: get(keyTool), ContentHash: get(keyHash)}}
	r := parquet.NewGenericReader[row](file)
	defer r.Close()
	for {
		// One fresh row at a time: the reader reuses the slices of the rows it is given.
		buf := make([]row, 1)
		n, err := r.Read(buf)
		if n == 1 {
			d.Samples = append(d.Samples, buf[0].sample())
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return nil, io.ErrUnexpectedEOF
		}
	}
	if got := HashSamples(d.Samples); got != d.Meta.ContentHash {
		return nil, &HashError{Want: d.Meta.ContentHash, Got: got}
	}
	return d, nil
}
