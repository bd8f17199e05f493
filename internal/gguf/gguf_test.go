package gguf

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math"
	"os"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/dtype"
)

// all.gguf was written by another implementation: scripts/fixtures_gguf.py.
func TestReadsWhatAnotherWriterWrote(t *testing.T) {
	data := read(t)
	f, err := Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]any{
		"general.architecture": "llama", "general.alignment": uint64(64),
		"t.u8": uint64(250), "t.i8": int64(-5), "t.u16": uint64(60000), "t.i16": int64(-30000), "t.u32": uint64(1 << 31), "t.i32": int64(math.MinInt32),
		"t.u64": uint64(1<<53 - 1), "t.i64": int64(-1<<53 + 1), "t.f32": float64(float32(0.1)), "t.f64": 0.1, "t.true": true, "t.false": false,
		"t.text": "naïve ▁ text", "t.texts": []string{"", "a", "ü"}, "t.ints": []int64{-1, 0, 1 << 20}, "t.floats": []float64{0.5, -0.25},
		"t.bools": []bool{true, false, true},
	} {
		if got := f.Metadata[key]; !reflect.DeepEqual(got, want) {
			t.Errorf("metadata %s is %v (%T), want %v (%T)", key, got, got, want, want)
		}
	}
	text, err := os.ReadFile("testdata/all.json")
	if err != nil {
		t.Fatal(err)
	}
	var want map[string]struct {
		Shape []int
		Data  string
	}
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	kinds := map[dtype.DType]bool{}
	for _, got := range f.Tensors {
		w, ok := want[got.Name]
		if !ok || !reflect.DeepEqual(got.Shape, w.Shape) || hex.EncodeToString(got.Data) != w.Data {
			t.Errorf("tensor %s %v %v of %d bytes differs from what was written", got.Name, got.DType, got.Shape, len(got.Data))
		}
		if name, ok := strings.CutPrefix(got.Name, "t.Q"); ok && "Q"+name != got.DType.String() {
			t.Errorf("tensor %s has type %v", got.Name, got.DType)
		}
		kinds[got.DType] = true
	}
	if len(f.Tensors) != len(want) || len(kinds) != len(types) {
		t.Errorf("%d tensors of %d types, want %d of %d", len(f.Tensors), len(kinds), len(want), len(types))
	}
}

func read(t testing.TB) []byte {
	t.Helper()
	data, err := os.ReadFile("testdata/all.gguf")
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// A cut at any byte is an error, and never a panic.
func TestTruncated(t *testing.T) {
	data := read(t)
	f, err := Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	// The writer pads the last tensor: the file may lose that.
	end := 0
	for _, tensor := range f.Tensors {
		end = max(end, indexOf(data, tensor.Data)+len(tensor.Data))
	}
	for n := range end {
		if _, err := Parse(data[:n:n]); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("%d of %d bytes: %v", n, end, err)
		}
	}
	if _, err := Parse(data[:end:end]); err != nil {
		t.Errorf("without its padding: %v", err)
	}
}

// indexOf is where part, a view of data, begins in it.
func indexOf(data, part []byte) int {
	for i := range data {
		if &data[i] == &part[0] {
			return i
		}
	}
	return -1
}

// builder writes the pieces of a GGUF.
type builder struct{ b []byte }

func (w *builder) u32(v uint32) *builder { w.b = binary.LittleEndian.AppendUint32(w.b, v); return w }
func (w *builder) u64(v uint64) *builder { w.b = binary.LittleEndian.AppendUint64(w.b, v); return w }
func (w *builder) str(s string) *builder {
	w.u64(uint64(len(s)))
	w.b = append(w.b, s...)
	return w
}

func start(version uint32, tensors, pairs uint64) *builder {
	w := &builder{b: []byte("GGUF")}
	return w.u32(version).u64(tensors).u64(pairs)
}

// tensor describes a tensor; dims are in GGUF's order, the innermost first.
func (w *builder) tensor(name string, kind uint32, offset uint64, dims ...uint64) *builder {
	w.str(name).u32(uint32(len(dims)))
	for _, d := range dims {
		w.u64(d)
	}
	return w.u32(kind).u64(offset)
}

// data pads to the default alignment and adds n bytes.
func (w *builder) data(n int) *builder {
	for len(w.b)%32 != 0 {
		w.b = append(w.b, 0)
	}
	w.b = append(w.b, make([]byte, n)...)
	return w
}

var hostile = map[string]struct {
	file  *builder
	want  error
	names string
}{
	"empty":                {&builder{}, ErrCorrupt, "GGUF"},
	"another format":       {&builder{b: []byte("GGML\x03\x00\x00\x00")}, ErrCorrupt, "GGUF"},
	"version 1":            {start(1, 0, 0), ErrUnsupported, "version 1"},
	"big-endian":           {start(3<<24, 0, 0), ErrUnsupported, "version"},
	"tensor count":         {start(3, 1<<60, 0), ErrCorrupt, "tensors"},
	"pair count":           {start(3, 0, 1<<60), ErrCorrupt, "pairs"},
	"key length":           {start(3, 0, 1).u64(1 << 62).data(64), ErrCorrupt, "wanted"},
	"string length":        {start(3, 0, 1).str("k").u32(8).u64(math.MaxUint64).data(64), ErrCorrupt, `"k"`},
	"value type":           {start(3, 0, 1).str("k").u32(99).data(64), ErrCorrupt, "99"},
	"array count":          {start(3, 0, 1).str("k").u32(9).u32(4).u64(1 << 62).data(64), ErrCorrupt, `"k"`},
	"array count of texts": {start(3, 0, 1).str("k").u32(9).u32(8).u64(1 << 40).data(64), ErrCorrupt, `"k"`},
	"array of arrays":      {start(3, 0, 1).str("k").u32(9).u32(9).u64(1).data(64), ErrUnsupported, `"k"`},
	"one key twice":        {start(3, 0, 2).str("k").u32(4).u32(1).str("k").u32(4).u32(2).data(64), ErrCorrupt, `"k"`},
	"alignment zero":       {start(3, 0, 1).str("general.alignment").u32(4).u32(0).data(64), ErrCorrupt, "alignment"},
	"alignment odd":        {start(3, 0, 1).str("general.alignment").u32(4).u32(33).data(64), ErrCorrupt, "alignment"},
	"alignment huge":       {start(3, 0, 1).str("general.alignment").u32(4).u32(1 << 31).data(64), ErrCorrupt, "alignment"},
	"no dimensions":        {start(3, 1, 0).tensor("t", 0, 0).data(64), ErrCorrupt, `"t"`},
	"many dimensions":      {start(3, 1, 0).tensor("t", 0, 0, 1, 1, 1, 1, 1).data(64), ErrCorrupt, `"t"`},
	"a dimension of zero":  {start(3, 1, 0).tensor("t", 0, 0, 4, 0).data(64), ErrCorrupt, `"t"`},
	"a dimension beyond":   {start(3, 1, 0).tensor("t", 0, 0, 1<<40).data(64), ErrCorrupt, `"t"`},
	// 2^62 values of 4 bytes are 2^64: zero, if that were let overflow.
	"size overflows":   {start(3, 1, 0).tensor("t", 0, 0, 1<<20, 1<<20, 1<<20, 4).data(64), ErrCorrupt, `"t"`},
	"unknown format":   {start(3, 1, 0).tensor("t", 200, 0, 8).data(64), ErrUnsupported, "ggml type 200"},
	"a format unread":  {start(3, 1, 0).tensor("t", 23, 0, 256).data(256), ErrUnsupported, "IQ4_XS"},
	"half a block":     {start(3, 1, 0).tensor("t", 2, 0, 48).data(64), ErrCorrupt, `"t"`},
	"offset beyond":    {start(3, 1, 0).tensor("t", 0, 1<<62, 8).data(64), ErrCorrupt, `"t"`},
	"end beyond":       {start(3, 1, 0).tensor("t", 0, 32, 9).data(64), ErrCorrupt, `"t"`},
	"offset unaligned": {start(3, 1, 0).tensor("t", 0, 4, 8).data(64), ErrCorrupt, `"t"`},
	"one name twice":   {start(3, 2, 0).tensor("t", 0, 0, 8).tensor("t", 0, 32, 8).data(64), ErrCorrupt, `"t"`},
	"tensors overlap":  {start(3, 2, 0).tensor("a", 0, 32, 8).tensor("b", 0, 0, 9).data(96), ErrCorrupt, `"b" and "a"`},
}

func TestHostile(t *testing.T) {
	for name, c := range hostile {
		if _, err := Parse(c.file.b); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.names) {
			t.Errorf("%s: got %v, want %v that says %s", name, err, c.want, c.names)
		}
	}
	// The builder itself is sound: what is left is accepted.
	f, err := Parse(start(2, 2, 0).tensor("a", 0, 32, 8).tensor("b", 0, 0, 8).data(64).b)
	if err != nil || len(f.Tensors) != 2 {
		t.Errorf("a plain file gives %v", err)
	}
}

// Many strings in a small file must not cost more than a small multiple of its size.
func TestMemoryIsBounded(t *testing.T) {
	w := start(3, 0, 1).str("k").u32(9).u32(8).u64(1 << 17)
	w.data(8 << 17)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := Parse(w.b); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 8*uint64(len(w.b)) {
		t.Errorf("%d bytes allocated for a file of %d", n, len(w.b))
	}
}

// Whatever the bytes: no panic, and every tensor lies in the file with the size that its shape says.
func FuzzParse(f *testing.F) {
	f.Add(read(f))
	for _, c := range hostile {
		f.Add(c.file.b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := Parse(data)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrUnsupported) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		for _, tensor := range file.Tensors {
			rows, cols := 1, tensor.Shape[len(tensor.Shape)-1]
			for _, n := range tensor.Shape[:len(tensor.Shape)-1] {
				rows *= n
			}
			if size := rows * (cols / tensor.DType.BlockLen()) * tensor.DType.BlockBytes(); size != len(tensor.Data) {
				t.Fatalf("tensor %q %v %v has %d bytes, want %d", tensor.Name, tensor.DType, tensor.Shape, len(tensor.Data), size)
			}
			tensor.DType.Decode(make([]float32, cols), tensor.Data)
		}
	})
}

// A header like that of a model with a vocabulary of 128,000 tokens.
func BenchmarkParse(b *testing.B) {
	const n = 128000
	w := start(3, 300, 3).str("tokenizer.ggml.tokens").u32(9).u32(8).u64(n)
	for range n {
		w.str("token")
	}
	w.str("tokenizer.ggml.scores").u32(9).u32(6).u64(n)
	for range n {
		w.u32(0)
	}
	w.str("tokenizer.ggml.merges").u32(9).u32(8).u64(2 * n)
	for range 2 * n {
		w.str("to ken")
	}
	for i := range uint64(300) {
		w.tensor(strings.Repeat("x", int(i)+1), 0, i*32, 8)
	}
	w.data(300 * 32)
	b.SetBytes(int64(len(w.b)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(w.b); err != nil {
			b.Fatal(err)
		}
	}
}
