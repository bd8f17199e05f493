package engine

import (
	"context"
	"fmt"
)

// Teacher holds what DuoAttention's distillation needs of the unmodified model on one sample: the attention output of
// every layer, which is the full branch of the merge, and the final hidden states.
type Teacher struct {
	model     *Model
	attention []Tensor // per layer [S,H*d], before the output projection
	hidden    Tensor   // [S,D] after the final norm
}

// Teach runs the unmodified model. Free the result.
func (m *Model) Teach(ctx context.Context, tokens []int32) (_ *Teacher, err error) {
	defer caught(&err)
	b := m.Backend
	t := &Teacher{model: m}
	keep := func(x Tensor) Tensor {
		y := b.New(x.Rows(), x.Cols())
		b.Copy(y, x)
		return y
	}
	err = m.Forward(ctx, &Sequence{Tokens: tokens, Observe: func(p Point, _ int, x Tensor) error {
		switch p {
		case PointAttention:
			t.attention = append(t.attention, keep(x))
		case PointFinal:
			t.hidden = keep(x)
		}
		return nil
	}})
	if err != nil {
		t.Free()
		return nil, err
	}
	return t, nil
}

// TeacherBytes is the memory that a Teacher of that many tokens takes, at 4 bytes a value.
func (c Config) TeacherBytes(tokens int) int64 {
	return 4 * int64(tokens) * int64(c.Layers*c.QueryWidth()+c.Hidden)
}

// StashBytes is the memory that a Student of that many tokens takes between Forward and Backward, at 4 bytes a value.
func (c Config) StashBytes(tokens int) int64 {
	width := 2*c.Hidden + 2*c.QueryWidth() + 2*c.KVWidth() + 2*c.Intermediate
	if c.QKNorm {
		width += c.QueryWidth() + c.KVWidth()
	}
	return 4 * int64(tokens) * int64(c.Layers) * int64(width)
}

// Free gives the memory back.
func (t *Teacher) Free() {
	t.model.Backend.Free(t.attention...)
	if t.hidden != nil {
		t.model.Backend.Free(t.hidden)
	}
	t.attention, t.hidden = nil, nil
}

// Student is one forward pass of the gated model of DuoAttention (Xiao et al. 2024, section 2.2): in every layer the
// attention output is gate * teacher's full attention + (1-gate) * the student's own streaming attention. Only the
// streaming branch carries a gradient, as in the authors' code.
type Student struct {
	// Loss is the mean over labelled rows and hidden dimensions of the squared difference to the teacher's final
	// hidden states (no regularisation).
	Loss float64

	model   *Model
	teacher *Teacher
	gates   [][]float64
	mask    Mask
	inputs  []Tensor // per layer [S,D]: the residual stream that enters it
	stashes []*stash // per layer, or nil where Backward computes it again
	top     Tensor   // [S,D] residual stream after the last layer
	dhidden Tensor   // [S,D] gradient of Loss with respect to the final hidden states
}

// stash is what a layer's backward needs of its forward.
type stash struct {
	qRaw, kRaw   Tensor // before the head norms; nil without them
	q, k, v      Tensor // after RoPE
	stream       Tensor // [S,H*d] streaming attention
	mid          Tensor // [S,D] residual stream between attention and MLP
	gateUp       Tensor // [S,2F]
	allocated    []Tensor
	ownedBackend Backend
}

func (s *stash) new(rows, cols int) Tensor {
	t := s.ownedBackend.New(rows, cols)
	s.allocated = append(s.allocated, t)
	return t
}

func (s *stash) free() { s.ownedBackend.Free(s.allocated...) }

// Study runs the gated model. gates is [layer][KV head]; rows are the labelled tokens; stashLimit is the memory in
// bytes that may hold activations until Backward: above it they are computed again, one layer at a time. Free the
// result; the teacher must live as long.
func (m *Model) Study(ctx context.Context, tokens []int32, t *Teacher, gates [][]float64, mask Mask, rows []int, stashLimit int64) (_ *Student, err error) {
	defer caught(&err)
	if err := m.checkSequence(&Sequence{Tokens: tokens, LogitRows: rows}); err != nil {
		return nil, err
	}
	if t.hidden == nil || t.hidden.Rows() != len(tokens) {
		return nil, fmt.Errorf("the teacher saw another sample")
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("no labelled rows")
	}
	if len(gates) != len(m.layers) {
		return nil, fmt.Errorf("gates for %d layers, the model has %d", len(gates), len(m.layers))
	}
	for l, g := range gates {
		if len(g) != m.Config.KVHeads {
			return nil, fmt.Errorf("layer %d: %d gates for %d KV heads", l, len(g), m.Config.KVHeads)
		}
	}
	b := m.Backend
	s := &Student{model: m, teacher: t, gates: gates, mask: mask}
	recompute := m.Config.StashBytes(len(tokens)) > stashLimit
	x := b.New(len(tokens), m.Config.Hidden)
	s.inputs = append(s.inputs, x)
	b.Embed(x, m.embed, tokens)
	for l := range m.layers {
		if err := ctx.Err(); err != nil {
			s.Free()
			return nil, err
		}
		next, kept := s.layerForward(l, x)
		if recompute {
			kept.free()
			kept = nil
		}
		s.stashes = append(s.stashes, kept)
		if row := b.Finite(next); row >= 0 {
			b.Free(next)
			s.Free()
			return nil, &NonFiniteError{Layer: l, Row: row}
		}
		if l+1 < len(m.layers) {
			s.inputs = append(s.inputs, next)
		} else {
			s.top = next
		}
		x = next
	}
	h := b.New(len(tokens), m.Config.Hidden)
	b.RMSNorm(h, s.top, m.norm, m.Config.NormEps)
	s.dhidden = b.New(len(tokens), m.Config.Hidden)
	s.Loss = b.SquaredError(s.dhidden, h, t.hidden, rows)
	b.Free(h)
	return s, nil
}

// layerForward computes a layer's output from its input x, and keeps what the backward needs.
func (s *Student) layerForward(l int, x Tensor) (Tensor, *stash) {
	m := s.model
	b, w, cfg, n := m.Backend, &m.layers[l], m.Config, x.Rows()
	k := &stash{ownedBackend: b}
	k.q, k.k, k.v = k.new(n, cfg.QueryWidth()), k.new(n, cfg.KVWidth()), k.new(n, cfg.KVWidth())
	if w.queryNorm == nil {
		m.project(w, x, k.q, k.k, k.v)
	} else {
		k.qRaw, k.kRaw = k.new(n, cfg.QueryWidth()), k.new(n, cfg.KVWidth())
		plain := *w
		plain.queryNorm, plain.keyNorm = nil, nil
		m.project(&plain, x, k.qRaw, k.kRaw, k.v)
		m.headNorm(k.q, k.qRaw, w.queryNorm)
		m.headNorm(k.k, k.kRaw, w.keyNorm)
	}
	m.rotate(k.q, 0, false)
	m.rotate(k.k, 0, false)
	k.stream = k.new(n, cfg.QueryWidth())
	b.Attention(k.stream, k.q, k.k, k.v, s.spec(l), nil)

	merged := b.New(n, cfg.QueryWidth())
	b.GatedMerge(merged, s.teacher.attention[l], k.stream, s.gates[l], cfg.HeadDim)
	k.mid = k.new(n, cfg.Hidden)
	b.Copy(k.mid, x)
	b.MatMul(k.mid, merged, w.output, true)
	b.Free(merged)

	k.gateUp = k.new(n, 2*cfg.Intermediate)
	out := b.New(n, cfg.Hidden)
	b.Copy(out, k.mid)
	m.mlp(w, out, k.gateUp)
	return out, k
}

func (s *Student) spec(l int) AttentionSpec {
	cfg := s.model.Config
	masks := make([]Mask, cfg.KVHeads)
	for i := range masks {
		masks[i] = s.mask
	}
	return AttentionSpec{Heads: cfg.Heads, KVHeads: cfg.KVHeads, HeadDim: cfg.HeadDim, Window: cfg.Window(l), Masks: masks}
}

// Backward returns the gradient of scale * Loss with respect to the gates, [layer][KV head]. It can be called once.
func (s *Student) Backward(ctx context.Context, scale float64) (_ [][]float64, err error) {
	defer caught(&err)
	m := s.model
	b, cfg, n := m.Backend, m.Config, s.top.Rows()
	grads := make([][]float64, len(m.layers))
	dx := b.New(n, cfg.Hidden)
	defer b.Free(dx)
	b.RMSNormBackward(dx, s.dhidden, s.top, m.norm, cfg.NormEps)
	for l := len(m.layers) - 1; l >= 0; l-- {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		k := s.stashes[l]
		if k == nil {
			var out Tensor
			out, k = s.layerForward(l, s.inputs[l])
			b.Free(out)
		}
		grads[l] = s.layerBackward(l, dx, k)
		k.free()
		s.stashes[l] = nil
	}
	for _, g := range grads {
		for i := range g {
			g[i] *= scale
		}
	}
	return grads, nil
}

// layerBackward turns dx, the gradient of a layer's output, into that of its input, and returns that of its gates.
func (s *Student) layerBackward(l int, dx Tensor, k *stash) []float64 {
	m := s.model
	b, w, cfg, n := m.Backend, &m.layers[l], m.Config, dx.Rows()

	// MLP: out = mid + down(swiglu(gateUp(norm(mid)))).
	dy, dgu, dh := b.New(n, cfg.Intermediate), b.New(n, 2*cfg.Intermediate), b.New(n, cfg.Hidden)
	b.MatMulBackward(dy, dx, w.down, false)
	b.SwiGLUBackward(dgu, dy, k.gateUp)
	b.MatMulBackward(dh, dgu, w.gateUp, false)
	b.RMSNormBackward(dx, dh, k.mid, w.mlpNorm, cfg.NormEps)
	b.Free(dy, dgu)

	// Attention: mid = x + output(merge(full, stream)).
	dmerged, dstream := b.New(n, cfg.QueryWidth()), b.New(n, cfg.QueryWidth())
	b.MatMulBackward(dmerged, dx, w.output, false)
	grad := b.GatedMergeBackward(dstream, dmerged, s.teacher.attention[l], k.stream, s.gates[l], cfg.HeadDim)
	b.Free(dmerged)
	if l > 0 { // nothing below the first layer has a gate
		dq, dk, dv := b.New(n, cfg.QueryWidth()), b.New(n, cfg.KVWidth()), b.New(n, cfg.KVWidth())
		b.AttentionBackward(dq, dk, dv, dstream, k.q, k.k, k.v, k.stream, s.spec(l))
		m.rotate(dq, 0, true)
		m.rotate(dk, 0, true)
		if w.queryNorm != nil {
			m.headNormBackward(&dq, k.qRaw, w.queryNorm)
			m.headNormBackward(&dk, k.kRaw, w.keyNorm)
		}
		dqkv := b.New(n, cfg.QueryWidth()+2*cfg.KVWidth())
		b.SplitBackward(dqkv, dq, dk, dv)
		b.MatMulBackward(dh, dqkv, w.qkv, false)
		b.RMSNormBackward(dx, dh, s.inputs[l], w.attentionNorm, cfg.NormEps)
		b.Free(dq, dk, dv, dqkv)
	}
	b.Free(dstream, dh)
	return grad
}

// headNormBackward replaces the gradient of the normalised heads by that of the raw ones.
func (m *Model) headNormBackward(dy *Tensor, x Tensor, w Weight) {
	b, d := m.Backend, m.Config.HeadDim
	rows := x.Rows() * x.Cols() / d
	dx := b.New(x.Rows(), x.Cols())
	b.RMSNormBackward(b.Reshape(dx, rows, d), b.Reshape(*dy, rows, d), b.Reshape(x, rows, d), w, m.Config.NormEps)
	b.Free(*dy)
	*dy = dx
}

// Free gives the memory back.
func (s *Student) Free() {
	b := s.model.Backend
	for _, k := range s.stashes {
		if k != nil {
			k.free()
		}
	}
	b.Free(s.inputs...)
	for _, t := range []Tensor{s.top, s.dhidden} {
		if t != nil {
			b.Free(t)
		}
	}
	s.inputs, s.stashes, s.top, s.dhidden = nil, nil, nil, nil
}
