package engine

import (
	"fmt"

	"github.com/kvprofile/kvprofile/internal/dtype"
)

// Matrix is one weight as it is stored: Rows x Cols values of DType, row-major, usually a view of a mapped file.
// A vector is a Matrix of one row.
type Matrix struct {
	Name       string // canonical Hugging Face name, for messages
	Rows, Cols int
	DType      dtype.DType
	Data       []byte
	// RowMap, when not nil, says that row r of the matrix is stored as row RowMap[r]: GGUF stores the q and k
	// projections of Llama models with their rows permuted.
	RowMap []int32
}

// DecodeRow writes row r in float32 to dst, which must hold Cols values.
func (m Matrix) DecodeRow(dst []float32, r int) {
	if m.RowMap != nil {
		r = int(m.RowMap[r])
	}
	size := m.RowBytes()
	m.DType.Decode(dst[:m.Cols], m.Data[r*size:(r+1)*size])
}

// RowBytes is the stored size of one row in bytes.
func (m Matrix) RowBytes() int { return m.Cols / m.DType.BlockLen() * m.DType.BlockBytes() }

// Check reports data that does not have the stated shape.
func (m Matrix) Check() error {
	if m.Rows <= 0 || m.Cols <= 0 || m.Cols%m.DType.BlockLen() != 0 || len(m.Data) < m.Rows*m.RowBytes() {
		return fmt.Errorf("tensor %s: %d x %d of %v does not fit %d bytes", m.Name, m.Rows, m.Cols, m.DType, len(m.Data))
	}
	if m.RowMap != nil && len(m.RowMap) != m.Rows {
		return fmt.Errorf("tensor %s: row map of %d for %d rows", m.Name, len(m.RowMap), m.Rows)
	}
	return nil
}

// Weights gives the named matrices of a model under the names that Hugging Face uses for Llama
// ("model.layers.0.self_attn.q_proj.weight"). The error names the file and the tensor.
type Weights interface {
	Matrix(name string) (Matrix, error)
}
