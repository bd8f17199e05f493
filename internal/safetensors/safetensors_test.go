package safetensors

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/dtype"
)

// file is a safetensors file with the given header and n bytes of data.
func file(header string, n int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	b = append(b, header...)
	return append(b, make([]byte, n)...)
}

const one = `{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}`

func TestParse(t *testing.T) {
	data := file(`{"__metadata__":{"format":"pt"},"b":{"shape":[],"data_offsets":[24,26],"dtype":"BF16"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}  `, 26)
	data[len(data)-1] = 0x3f
	got, err := Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	want := []Tensor{{Name: "a", DType: dtype.F32, Shape: []int{2, 3}, Data: make([]byte, 24)}, {Name: "b", DType: dtype.BF16, Data: []byte{0, 0x3f}}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v", got)
	}
}

// The tiny checkpoints were written by the official library.
func TestOfficialFiles(t *testing.T) {
	paths, err := filepath.Glob("../model/testdata/*/*.safetensors")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		tensors, err := Parse(data)
		if err != nil || len(tensors) == 0 {
			t.Fatalf("%s: %d tensors, %v", path, len(tensors), err)
		}
		bytes := 0
		for _, tensor := range tensors {
			bytes += len(tensor.Data)
		}
		if header := int(binary.LittleEndian.Uint64(data)); bytes != len(data)-8-header {
			t.Errorf("%s: tensors hold %d bytes of %d", path, bytes, len(data)-8-header)
		}
	}
}

var hostile = map[string]struct {
	file  []byte
	want  error
	names string
}{
	"empty":               {nil, ErrCorrupt, "0 bytes"},
	"header length":       {binary.LittleEndian.AppendUint64(nil, 1<<63), ErrCorrupt, "header"},
	"header truncated":    {file(one, 24)[:30], ErrCorrupt, "truncated"},
	"data truncated":      {file(one, 23), ErrCorrupt, "truncated"},
	"data left over":      {file(one, 25), ErrCorrupt, "metadata"},
	"not JSON":            {file(`{"a":`, 0), ErrCorrupt, "header"},
	"not an object":       {file(`[1]`, 0), ErrCorrupt, "header"},
	"two objects":         {file(one+one, 24), ErrCorrupt, "follows"},
	"one name twice":      {file(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}`, 4), ErrCorrupt, `"a" twice`},
	"one member twice":    {file(`{"a":{"dtype":"F32","dtype":"BF16","shape":[1],"data_offsets":[0,4]}}`, 4), ErrCorrupt, "dtype"},
	"unknown member":      {file(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}}`, 4), ErrCorrupt, `"x"`},
	"no shape":            {file(`{"a":{"dtype":"F32","data_offsets":[0,4]}}`, 4), ErrCorrupt, `"a"`},
	"one offset":          {file(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[4]}}`, 4), ErrCorrupt, `"a"`},
	"three offsets":       {file(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}}`, 4), ErrCorrupt, `"a"`},
	"negative offset":     {file(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}`, 4), ErrCorrupt, `"a"`},
	"backwards":           {file(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}`, 4), ErrCorrupt, `"a"`},
	"huge offset":         {file(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,9223372036854775807]}}`, 4), ErrCorrupt, "truncated"},
	"offset too large":    {file(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,99999999999999999999]}}`, 4), ErrCorrupt, `"a"`},
	"negative shape":      {file(`{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}`, 4), ErrCorrupt, `"a"`},
	"shape of floats":     {file(`{"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}}`, 4), ErrCorrupt, `"a"`},
	"shape overflows":     {file(`{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0), ErrCorrupt, ""},
	"many dimensions":     {file(`{"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}}`, 4), ErrCorrupt, `"a"`},
	"shape and length":    {file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}`, 4), ErrCorrupt, ""},
	"overlap":             {file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}`, 12), ErrCorrupt, `"b"`},
	"a gap":               {file(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}`, 12), ErrCorrupt, `"b"`},
	"8-bit floats":        {file(`{"a":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}`, 4), ErrUnsupported, "F8_E4M3"},
	"metadata of numbers": {file(`{"__metadata__":{"a":1}}`, 0), ErrCorrupt, "header"},
	"metadata nested":     {file(`{"__metadata__":{"a":{}}}`, 0), ErrCorrupt, "header"},
	"deep":                {file(strings.Repeat(`{"a":`, 100000), 0), ErrCorrupt, `"a"`},
}

func TestHostile(t *testing.T) {
	for name, c := range hostile {
		if _, err := Parse(c.file); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.names) {
			t.Errorf("%s: got %v, want %v that says %s", name, err, c.want, c.names)
		}
	}
	if _, err := Parse(file(one, 24)); err != nil {
		t.Errorf("a plain file gives %v", err)
	}
}

// A header of nonsense is refused at its first fault, before it costs anything.
func TestNonsenseIsCheap(t *testing.T) {
	var b strings.Builder
	b.WriteString("{")
	for i := range 1 << 16 {
		fmt.Fprintf(&b, `"%d":{},`, i)
	}
	b.WriteString(`"a":{}}`)
	data := file(b.String(), 0)
	if n := testing.AllocsPerRun(1, func() {
		if _, err := Parse(data); !errors.Is(err, ErrCorrupt) {
			t.Errorf("got %v", err)
		}
	}); n > 200 {
		t.Errorf("%g allocations", n)
	}
}

// Whatever the bytes: no panic, and the tensors cover the data with the sizes that their shapes say.
func FuzzParse(f *testing.F) {
	f.Add(file(one, 24))
	for _, c := range hostile {
		if len(c.file) < 1000 {
			f.Add(c.file)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		tensors, err := Parse(data)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrUnsupported) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		total := 0
		for _, tensor := range tensors {
			size := tensor.DType.BlockBytes()
			for _, n := range tensor.Shape {
				size *= n
			}
			if size != len(tensor.Data) {
				t.Fatalf("tensor %q %v %v has %d bytes, want %d", tensor.Name, tensor.DType, tensor.Shape, len(tensor.Data), size)
			}
			total += size
		}
		if body := len(data) - 8 - int(binary.LittleEndian.Uint64(data)); total != body {
			t.Fatalf("tensors hold %d bytes of %d", total, body)
		}
	})
}

// A header like that of a shard of a large model.
func BenchmarkParse(b *testing.B) {
	var h strings.Builder
	h.WriteString("{")
	for i := range 1000 {
		if i > 0 {
			h.WriteString(",")
		}
		fmt.Fprintf(&h, `"model.layers.%d.self_attn.q_proj.weight":{"dtype":"BF16","shape":[2,8],"data_offsets":[%d,%d]}`, i, 32*i, 32*(i+1))
	}
	h.WriteString("}")
	data := file(h.String(), 32000)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(data); err != nil {
			b.Fatal(err)
		}
	}
}
