// Package gguf reads GGUF files (versions 2 and 3, little-endian): metadata, and tensors as views of the mapped file.
//
// The reader is written here because files come from strangers: github.com/gpustack/gguf-parser-go accepts a tensor that
// lies beyond the end of its file, and brings 46 packages along. Here every count and offset is checked against the size
// of the file before anything is allocated.
package gguf

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kvprofile/kvprofile/internal/dtype"
)

// ErrCorrupt is wrapped by every error about a file that breaks the format.
var ErrCorrupt = errors.New("not a valid GGUF file")

// ErrUnsupported is wrapped by errors about valid files that use what this reader does not know.
var ErrUnsupported = errors.New("unsupported GGUF")

// File is a parsed GGUF.
type File struct {
	Version  uint32
	Metadata map[string]any // bool, uint64, int64, float64, string, []bool, []uint64, []int64, []float64, []string
	Tensors  []Tensor       // in file order
}

// A sparse file may be of any size, so these bound what a header can make us allocate.
const (
	maxElements = 1 << 24 // of all metadata arrays together, up to 16 bytes each: many times the largest vocabulary and its merges
	maxText     = 1 << 28 // bytes of all strings together
	maxNames    = 1 << 20 // metadata pairs, and tensors
)

// Tensor is a named array. Shape is row-major with the outermost dimension first.
type Tensor struct {
	Name  string
	DType dtype.DType
	Shape []int
	Data  []byte
}

// ggml type numbers, from ggml.h.
var types = map[uint32]dtype.DType{0: dtype.F32, 1: dtype.F16, 2: dtype.Q4_0, 3: dtype.Q4_1, 6: dtype.Q5_0, 7: dtype.Q5_1,
	8: dtype.Q8_0, 12: dtype.Q4_K, 13: dtype.Q5_K, 14: dtype.Q6_K, 30: dtype.BF16}

// others names the formats of ggml.h that are not read, for messages.
var others = map[uint32]string{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
	20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
	34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}

type reader struct {
	data     []byte
	off      uint64
	elements uint64 // of metadata arrays so far
	text     uint64 // bytes of strings so far
}

func (r *reader) take(n uint64) ([]byte, error) {
	if n > uint64(len(r.data))-r.off {
		return nil, fmt.Errorf("%w: %d bytes wanted at offset %d of %d", ErrCorrupt, n, r.off, len(r.data))
	}
	b := r.data[r.off : r.off+n]
	r.off += n
	return b, nil
}

func (r *reader) u32() (uint32, error) {
	b, err := r.take(4)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint32(b), nil
}

func (r *reader) u64() (uint64, error) {
	b, err := r.take(8)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(b), nil
}

func (r *reader) str() (string, error) {
	n, err := r.u64()
	if err != nil {
		return "", err
	}
	b, err := r.take(n)
	if r.text += uint64(len(b)); r.text > maxText {
		return "", fmt.Errorf("%w: strings of more than %d bytes", ErrUnsupported, maxText)
	}
	return string(b), err
}

var scalarSize = map[uint32]uint64{0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

func scalar(kind uint32, b []byte) any {
	switch kind {
	case 0:
		return uint64(b[0])
	case 1:
		return int64(int8(b[0]))
	case 2:
		return uint64(binary.LittleEndian.Uint16(b))
	case 3:
		return int64(int16(binary.LittleEndian.Uint16(b)))
	case 4:
		return uint64(binary.LittleEndian.Uint32(b))
	case 5:
		return int64(int32(binary.LittleEndian.Uint32(b)))
	case 6:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
	case 7:
		return b[0] != 0
	case 10:
		return binary.LittleEndian.Uint64(b)
	case 11:
		return int64(binary.LittleEndian.Uint64(b))
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(b))
}

func (r *reader) value(kind uint32) (any, error) {
	switch kind {
	case 8:
		return r.str()
	case 9:
		return r.array()
	}
	size, ok := scalarSize[kind]
	if !ok {
		return nil, fmt.Errorf("%w: metadata value type %d", ErrCorrupt, kind)
	}
	b, err := r.take(size)
	if err != nil {
		return nil, err
	}
	return scalar(kind, b), nil
}

func collect[T any](r *reader, kind uint32, n uint64) ([]T, error) {
	out := make([]T, 0, n)
	for range n {
		v, err := r.value(kind)
		if err != nil {
			return nil, err
		}
		out = append(out, v.(T))
	}
	return out, nil
}

func (r *reader) array() (any, error) {
	kind, err := r.u32()
	if err != nil {
		return nil, err
	}
	n, err := r.u64()
	if err != nil {
		return nil, err
	}
	size, ok := scalarSize[kind]
	if kind == 8 {
		size, ok = 8, true // a string's length
	}
	if !ok {
		return nil, fmt.Errorf("%w: array of type %d", ErrUnsupported, kind)
	}
	if n > (uint64(len(r.data))-r.off)/size {
		return nil, fmt.Errorf("%w: array of %d at offset %d of %d bytes", ErrCorrupt, n, r.off, len(r.data))
	}
	if r.elements += n; r.elements > maxElements {
		return nil, fmt.Errorf("%w: arrays of more than %d elements", ErrUnsupported, maxElements)
	}
	switch kind {
	case 8:
		return collect[string](r, kind, n)
	case 7:
		return collect[bool](r, kind, n)
	case 6, 12:
		return collect[float64](r, kind, n)
	case 1, 3, 5, 11:
		return collect[int64](r, kind, n)
	}
	return collect[uint64](r, kind, n)
}

// Parse reads a whole file image. Tensors are views of data.
func Parse(data []byte) (*File, error) {
	r := &reader{data: data}
	magic, err := r.take(4)
	if err != nil || string(magic) != "GGUF" {
		return nil, fmt.Errorf("%w: it does not begin with GGUF", ErrCorrupt)
	}
	f := &File{Metadata: map[string]any{}}
	if f.Version, err = r.u32(); err != nil {
		return nil, err
	}
	if f.Version != 2 && f.Version != 3 {
		return nil, fmt.Errorf("%w: version %d (2 and 3 are read)", ErrUnsupported, f.Version)
	}
	tensors, err := r.u64()
	if err != nil {
		return nil, err
	}
	pairs, err := r.u64()
	if err != nil {
		return nil, err
	}
	// A pair takes at least 13 bytes, a tensor at least 32.
	if pairs > min(uint64(len(data))/13, maxNames) || tensors > min(uint64(len(data))/32, maxNames) {
		return nil, fmt.Errorf("%w: %d metadata pairs and %d tensors in %d bytes", ErrCorrupt, pairs, tensors, len(data))
	}
	for range pairs {
		key, err := r.str()
		if err != nil {
			return nil, err
		}
		kind, err := r.u32()
		if err != nil {
			return nil, err
		}
		v, err := r.value(kind)
		if err != nil {
			return nil, fmt.Errorf("metadata %q: %w", key, err)
		}
		if _, dup := f.Metadata[key]; dup {
			return nil, fmt.Errorf("%w: metadata %q twice", ErrCorrupt, key)
		}
		f.Metadata[key] = v
	}
	type place struct{ offset, size uint64 }
	places := make([]place, 0, tensors)
	seen := make(map[string]bool, tensors)
	for range tensors {
		t, offset, size, err := r.tensor()
		if err != nil {
			return nil, err
		}
		if seen[t.Name] {
			return nil, fmt.Errorf("%w: tensor %q twice", ErrCorrupt, t.Name)
		}
		seen[t.Name] = true
		f.Tensors = append(f.Tensors, t)
		places = append(places, place{offset, size})
	}
	align := uint64(32)
	if a, ok := f.Metadata["general.alignment"].(uint64); ok {
		align = a
	}
	if align == 0 || align > 1<<20 || align&(align-1) != 0 {
		return nil, fmt.Errorf("%w: alignment %d", ErrCorrupt, align)
	}
	base := min((r.off+align-1)/align*align, uint64(len(data)))
	body := data[base:]
	order := make([]int, len(places))
	for i, p := range places {
		order[i] = i
		switch t := &f.Tensors[i]; {
		case p.offset > uint64(len(body)) || p.size > uint64(len(body))-p.offset:
			return nil, fmt.Errorf("%w: tensor %q has %d bytes at offset %d of %d bytes of data: the file is truncated", ErrCorrupt, t.Name, p.size, p.offset, len(body))
		case p.offset%align != 0:
			return nil, fmt.Errorf("%w: tensor %q is at offset %d, which is not a multiple of %d", ErrCorrupt, t.Name, p.offset, align)
		default:
			t.Data = body[p.offset : p.offset+p.size : p.offset+p.size]
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(places[a].offset, places[b].offset) })
	for i, t := range order[min(1, len(order)):] {
		if before := order[i]; places[before].offset+places[before].size > places[t].offset {
			return nil, fmt.Errorf("%w: tensors %q and %q overlap", ErrCorrupt, f.Tensors[before].Name, f.Tensors[t].Name)
		}
	}
	return f, nil
}

func (r *reader) tensor() (t Tensor, offset, size uint64, err error) {
	if t.Name, err = r.str(); err != nil {
		return
	}
	dims, err := r.u32()
	if err != nil {
		return
	}
	if dims == 0 || dims > 4 {
		return t, 0, 0, fmt.Errorf("%w: tensor %q has %d dimensions", ErrCorrupt, t.Name, dims)
	}
	t.Shape = make([]int, dims)
	values := uint64(1)
	for i := range dims {
		d, e := r.u64()
		if e != nil {
			return t, 0, 0, e
		}
		if d == 0 || d > math.MaxInt32 || values > math.MaxInt64/4/d { // 4: bytes of the largest value
			return t, 0, 0, fmt.Errorf("%w: tensor %q has a dimension of %d", ErrCorrupt, t.Name, d)
		}
		values *= d
		t.Shape[dims-1-i] = int(d)
	}
	kind, err := r.u32()
	if err != nil {
		return
	}
	if offset, err = r.u64(); err != nil {
		return
	}
	d, ok := types[kind]
	if !ok {
		name, ok := others[kind]
		if !ok {
			name = fmt.Sprintf("ggml type %d", kind)
		}
		return t, 0, 0, fmt.Errorf("%w: tensor %q is %s (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K are read)", ErrUnsupported, t.Name, name)
	}
	t.DType = d
	cols := t.Shape[dims-1]
	if cols%d.BlockLen() != 0 {
		return t, 0, 0, fmt.Errorf("%w: tensor %q has rows of %d values, not a multiple of %v's %d", ErrCorrupt, t.Name, cols, d, d.BlockLen())
	}
	size = values / uint64(d.BlockLen()) * uint64(d.BlockBytes())
	return t, offset, size, nil
}
