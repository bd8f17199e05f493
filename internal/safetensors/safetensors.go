// Package safetensors reads safetensors files as views of their bytes.
package safetensors

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	st "github.com/nlpodyssey/safetensors"

	"github.com/kvprofile/kvprofile/internal/dtype"
)

// ErrCorrupt is wrapped by errors about files that break the format, ErrUnsupported by errors about valid files with
// a number format that is not read.
var (
	ErrCorrupt     = errors.New("not a valid safetensors file")
	ErrUnsupported = errors.New("unsupported safetensors")
)

// Tensor is a named array. Shape is row-major with the outermost dimension first.
type Tensor struct {
	Name  string
	DType dtype.DType
	Shape []int
	Data  []byte // a view of the file
}

var types = map[st.DType]dtype.DType{st.F32: dtype.F32, st.F16: dtype.F16, st.BF16: dtype.BF16}

// Parse reads a whole file image. The tensors are sorted by name.
func Parse(data []byte) ([]Tensor, error) {
	if err := checkHeader(data); err != nil {
		return nil, err
	}
	f, err := st.Deserialize(data)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	var out []Tensor
	for _, v := range f.Tensors() {
		d, ok := types[v.TensorView.DType()]
		if !ok {
			return nil, fmt.Errorf("%w: tensor %q is %v (F32, F16 and BF16 are read)", ErrUnsupported, v.Name, v.TensorView.DType())
		}
		t := Tensor{Name: v.Name, DType: d, Data: v.TensorView.Data()}
		for _, n := range v.TensorView.Shape() {
			if n == 0 || n > math.MaxInt32 {
				return nil, fmt.Errorf("%w: tensor %q has a dimension of %d", ErrCorrupt, v.Name, n)
			}
			t.Shape = append(t.Shape, int(n))
		}
		out = append(out, t)
	}
	slices.SortFunc(out, func(a, b Tensor) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}
