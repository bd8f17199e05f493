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

// Teach runs the unmodified model on one sample. Free the result.
func (m *Model) Teach(ctx context.Context, tokens []int32) (*Teacher, error) {
	ts, err := m.TeachAll(ctx, tokens)
	if err != nil {
		return nil, err
	}
	return ts[0], nil
}

// TeachAll runs the unmodified model on several samples, layer by layer, so that weights that do not fit in memory are read once.
// Free the results, one for each sample. A *NonFiniteError says which sample in its Sequence.
func (m *Model) TeachAll(ctx context.Context, samples ...[]int32) (_ []*Teacher, err error) {
	defer Catch(&err)
	b := m.Backend
	keep := func(x Tensor) Tensor {
		y := b.New(x.Rows(), x.Cols())
		b.Copy(y, x)
		m.park(y)
		return y
	}
	teachers, batch := make([]*Teacher, len(samples)), make([]*Sequence, len(samples))
	for i, tokens := range samples {
		t := &Teacher{model: m}
		teachers[i] = t
		batch[i] = &Sequence{Tokens: tokens, Observe: func(p Point, _ int, x Tensor) error {
			switch p {
			case PointAttention:
				t.attention = append(t.attention, keep(x))
			case PointFinal:
				t.hidden = keep(x)
			}
			return nil
		}}
	}
	if err := m.Forward(ctx, batch...); err != nil {
		for _, t := range teachers {
			t.Free()
		}
		return nil, err
	}
	return teachers, nil
}

// park tells the backend that tensors are not read soon, if it wants to know.
func (m *Model) park(t ...Tensor) {
	if p, ok := m.Backend.(Parker); ok {
		p.Park(t...)
	}
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

// LessonBytes is the memory that a sample of that many tokens takes from its teacher's run to its gradient when activations are
// computed again: the Teacher and the Student's residual streams, at 4 bytes a value.
func (c Config) LessonBytes(tokens int) int64 {
	return c.TeacherBytes(tokens) + 4*int64(tokens)*int64(c.Hidden)*int64(c.Layers+2)
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
	again   bool     // activations are computed again
	inputs  []Tensor // per layer [S,D]: the residual stream that enters it
	stashes []*stash // per layer, or nil where Backward computes it again
	top     Tensor   // [S,D] residual stream after the last layer so far
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

// Lesson is one sample of distillation.
type Lesson struct {
	Tokens  []int32
	Teacher *Teacher // of these tokens; it must live as long as the Student
	Rows    []int    // labelled tokens
}

// Study runs the gated model on one sample, as StudyAll does.
func (m *Model) Study(ctx context.Context, tokens []int32, t *Teacher, gates [][]float64, mask Mask, rows []int, stashLimit int64) (*Student, error) {
	s, err := m.StudyAll(ctx, []Lesson{{tokens, t, rows}}, gates, mask, stashLimit)
	if err != nil {
		return nil, err
	}
	return s[0], nil
}

// StudyAll runs the gated model on several samples, layer by layer, so that weights that do not fit in memory are read once. gates
// is [layer][KV head]; stashLimit is the memory in bytes that may hold activations of all samples until Backward: what goes above
// it is computed again, one layer at a time. Free the results, one for each sample. A *NonFiniteError says which sample in its
// Sequence.
func (m *Model) StudyAll(ctx context.Context, lessons []Lesson, gates [][]float64, mask Mask, stashLimit int64) (_ []*Student, err error) {
	defer Catch(&err)
	if len(gates) != len(m.layers) {
		return nil, fmt.Errorf("gates for %d layers, the model has %d", len(gates), len(m.layers))
	}
	for l, g := range gates {
		if len(g) != m.Config.KVHeads {
			return nil, fmt.Errorf("layer %d: %d gates for %d KV heads", l, len(g), m.Config.KVHeads)
		}
	}
	for _, x := range lessons {
		if err := m.checkSequence(&Sequence{Tokens: x.Tokens, LogitRows: x.Rows}); err != nil {
			return nil, err
		}
		if x.Teacher.hidden == nil || x.Teacher.hidden.Rows() != len(x.Tokens) {
			return nil, fmt.Errorf("the teacher saw another sample")
		}
		if len(x.Rows) == 0 {
			return nil, fmt.Errorf("no labelled rows")
		}
	}
	b := m.Backend
	students := make([]*Student, len(lessons))
	fail := func(err error) ([]*Student, error) {
		for _, s := range students {
			if s != nil {
				s.Free()
			}
		}
		return nil, err
	}
	for i, x := range lessons {
		bytes := m.Config.StashBytes(len(x.Tokens))
		s := &Student{model: m, teacher: x.Teacher, gates: gates, mask: mask, again: bytes > stashLimit, top: b.New(len(x.Tokens), m.Config.Hidden)}
		students[i] = s
		if !s.again {
			stashLimit -= bytes
		}
		b.Embed(s.top, m.embed, x.Tokens)
	}
	for l := range m.layers {
		for i, s := range students {
			if err := ctx.Err(); err != nil {
				return fail(err)
			}
			next, kept := s.layerForward(l, s.top)
			if s.again {
				kept.free()
				kept = nil
			}
			m.park(s.top)
			if kept != nil {
				m.park(kept.allocated...)
			}
			s.inputs, s.stashes, s.top = append(s.inputs, s.top), append(s.stashes, kept), next
			if row := b.Finite(next); row >= 0 {
				return fail(&NonFiniteError{Layer: l, Sequence: i, Row: row})
			}
		}
	}
	for i, s := range students {
		n := len(lessons[i].Tokens)
		h := b.New(n, m.Config.Hidden)
		b.RMSNorm(h, s.top, m.norm, m.Config.NormEps)
		s.dhidden = b.New(n, m.Config.Hidden)
		s.Loss = b.SquaredError(s.dhidden, h, s.teacher.hidden, lessons[i].Rows)
		b.Free(h)
		m.park(s.teacher.hidden, s.top, s.dhidden)
	}
	return students, nil
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
	m.park(s.teacher.attention[l])
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
func (s *Student) Backward(ctx context.Context, scale float64) ([][]float64, error) {
	grads, err := BackwardAll(ctx, []*Student{s})
	if err != nil {
		return nil, err
	}
	for _, g := range grads[0] {
		for i := range g {
			g[i] *= scale
		}
	}
	return grads[0], nil
}

// BackwardAll returns the gradient of every student's Loss with respect to the gates, [student][layer][KV head]. The students are of
// one StudyAll, and go backward layer by layer. It can be called once.
func BackwardAll(ctx context.Context, students []*Student) (_ [][][]float64, err error) {
	defer Catch(&err)
	if len(students) == 0 {
		return nil, nil
	}
	m := students[0].model
	b, cfg := m.Backend, m.Config
	grads, dx := make([][][]float64, len(students)), make([]Tensor, 0, len(students))
	defer func() { b.Free(dx...) }()
	for i, s := range students {
		grads[i] = make([][]float64, len(m.layers))
		dx = append(dx, b.New(s.top.Rows(), cfg.Hidden))
		b.RMSNormBackward(dx[i], s.dhidden, s.top, m.norm, cfg.NormEps)
		m.park(s.dhidden, s.top)
	}
	for l := len(m.layers) - 1; l >= 0; l-- {
		for i, s := range students {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			k := s.stashes[l]
			if k == nil {
				var out Tensor
				out, k = s.layerForward(l, s.inputs[l])
				b.Free(out)
			}
			grads[i][l] = s.layerBackward(l, dx[i], k)
			k.free()
			b.Free(s.inputs[l]) // what is below needs it no more
			s.stashes[l], s.inputs = nil, s.inputs[:l]
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
	m.park(s.teacher.attention[l])
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
