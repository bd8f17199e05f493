// Package engine runs a decoder-only transformer forward and backward, and taps attention statistics on the way.
//
// The transformer is written once (forward.go, distill.go) as a list of named operations on opaque tensors. A
// Backend supplies the operations; [ref] is the plain oracle, [cpu] the fast one. Every operation with a gradient
// stands beside its Backward.
//
// [ref]: github.com/kvprofile/kvprofile/internal/engine/ref
// [cpu]: github.com/kvprofile/kvprofile/internal/engine/cpu
package engine

// Tensor is a matrix of floats that lives on the backend's device.
type Tensor interface {
	Rows() int
	Cols() int
}

// Weight is a matrix or vector that a backend has taken over in the form it likes best.
type Weight interface {
	Rows() int
	Cols() int
}

// Mask says which keys a KV head's queries see: key j is visible to query i when j <= i and (j < Sink or i-j < Recent).
// Recent 0 means every key: the zero Mask is full causal attention. Positions are absolute.
type Mask struct{ Sink, Recent int }

// Full reports whether the mask hides nothing.
func (m Mask) Full() bool { return m.Recent == 0 }

// AttentionSpec is the shape of one attention operation.
type AttentionSpec struct {
	Heads, KVHeads, HeadDim int
	// Start is the absolute position of the first query row. There are Start + S key rows for S query rows.
	Start int
	// Window is the layer's own sliding window (i-j < Window), 0 for none; it holds beside the masks.
	Window int
	// Masks has one mask per KV head; nil means that all see everything.
	Masks []Mask
}

// Mask returns the mask of a KV head.
func (s AttentionSpec) Mask(kvHead int) Mask {
	if s.Masks == nil {
		return Mask{}
	}
	return s.Masks[kvHead]
}

// Rotary is a RoPE table: cos and sin of position * frequency, one row of HeadDim/2 values per position.
type Rotary struct {
	HeadDim  int
	Cos, Sin []float32
}

// Backend supplies the operations. S is the number of rows (tokens), D the hidden width, F the MLP width, H and K the
// numbers of query and KV heads, d the head dimension. All calls are made from one goroutine, in order; tensors of one
// backend never mix with another's. Operations panic on shapes that the transformer would never produce (a defect of
// the caller, not bad input); errors are left to allocation and loading.
//
// Results do not depend on the number of threads.
type Backend interface {
	// Name says device, tier and precision, as it is written to artefacts: "cpu avx512 f32".
	Name() string
	// Close frees everything.
	Close() error

	// New makes a zeroed tensor. Free returns tensors for reuse; views must not be used afterwards.
	New(rows, cols int) Tensor
	Free(t ...Tensor)
	// Slice is a view of rows [lo, hi); Reshape a view with the same values in row-major order.
	Slice(t Tensor, lo, hi int) Tensor
	Reshape(t Tensor, rows, cols int) Tensor
	Copy(dst, src Tensor)
	// Upload and Download convert between the device and row-major host values.
	Upload(dst Tensor, src []float64)
	Download(dst []float64, src Tensor)

	// Load takes over a weight: parts are stacked along rows and must have equal columns.
	Load(parts ...Matrix) (Weight, error)
	// Unload gives back what Load took.
	Unload(w Weight)

	// Embed: dst[S,D] = rows ids of w[V,D].
	Embed(dst Tensor, w Weight, ids []int32)

	// MatMul: dst[S,N] (+)= x[S,M] * transpose(w[N,M]); accumulate adds to dst (the residual add).
	MatMul(dst, x Tensor, w Weight, accumulate bool)
	// MatMulBackward: dx[S,M] (+)= dy[S,N] * w[N,M].
	MatMulBackward(dx, dy Tensor, w Weight, accumulate bool)
	// AddBias: x[S,N] += b[N] on every row. Its backward is the identity.
	AddBias(x Tensor, b Weight)

	// RMSNorm: y[S,D] = x / sqrt(mean(x^2) + eps) * w[D].
	RMSNorm(y, x Tensor, w Weight, eps float64)
	// RMSNormBackward: dx[S,D] += gradient of RMSNorm given dy and the same x.
	RMSNormBackward(dx, dy, x Tensor, w Weight, eps float64)

	// Split: q[S,H*d], k[S,K*d], v[S,K*d] = the column blocks of qkv[S,(H+2K)*d].
	Split(q, k, v, qkv Tensor)
	// SplitBackward: dqkv = (dq | dk | dv).
	SplitBackward(dqkv, dq, dk, dv Tensor)

	// RoPE rotates x[S,heads*d] in place, row s at position start+s. Its backward is RoPE with inverse set.
	RoPE(x Tensor, table *Rotary, start int, inverse bool)

	// Attention: out[S,H*d] = softmax(q k^T / sqrt(d) under the masks) v, with k, v [Start+S, K*d].
	// A tap, when not nil, is filled with the statistics that it asks for (see Tap), but for heads under a mask.
	Attention(out, q, k, v Tensor, spec AttentionSpec, tap *Tap)
	// AttentionBackward: dq, dk, dv are overwritten, given dout and the same q, k, v and out. Start must be 0.
	AttentionBackward(dq, dk, dv, dout, q, k, v, out Tensor, spec AttentionSpec)

	// StorePages copies the rows of one KV head of k and v [S, K*d] to the slots of a page table: slot s takes in row
	// rows[s], and none where that is negative.
	StorePages(pages *Pages, table []int32, rows []int32, k, v Tensor, kvHead int)
	// MovePages copies rows of the pages, as if all were read before any is written.
	MovePages(pages *Pages, from, to []int)
	// PagedAttention: out[S,H*d] of q[S,H*d], k[S,K*d], v[S,K*d] before RoPE. First every row writes its key and value
	// where its lanes [row][KV head] say, then every row attends to what they say it sees. Of spec only the shape is used.
	PagedAttention(out, q, k, v Tensor, pages *Pages, lanes [][]Lane, table *Rotary, spec AttentionSpec)

	// GatedMerge: out[S,H*d] = g*full + (1-g)*stream per query head with the gate of its KV head (DuoAttention, Xiao et
	// al. 2024, section 2.2). gates has K values.
	GatedMerge(out, full, stream Tensor, gates []float64, headDim int)
	// GatedMergeBackward: dstream = (1-g)*dout; returns K values, sum over tokens and the group's heads of
	// <dout, full - stream>. full has no gradient: it is the teacher's.
	GatedMergeBackward(dstream, dout, full, stream Tensor, gates []float64, headDim int) []float64

	// SwiGLU: y[S,F] = silu(gu[:, :F]) * gu[:, F:] of gu[S,2F].
	SwiGLU(y, gu Tensor)
	// SwiGLUBackward: dgu[S,2F] given dy[S,F] and the same gu.
	SwiGLUBackward(dgu, dy, gu Tensor)

	// SquaredError returns the mean over rows and columns of (a-b)^2 of the given rows, and writes its gradient with
	// respect to a to da (zero on other rows).
	SquaredError(da, a, b Tensor, rows []int) float64

	// Finite reports the first row with a NaN or an infinity, or -1.
	Finite(t Tensor) int
}

// Parker is a Backend that can do with less memory than its tensors take: it is told which ones are not needed for a while.
type Parker interface {
	// Park says that tensors, which are only read from now on, are not read soon. They can be used as before; the backend may keep
	// their values elsewhere until then. Views share the fate of their tensor.
	Park(t ...Tensor)
}
