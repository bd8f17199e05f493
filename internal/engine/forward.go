package engine

import (
	"context"
	"fmt"
)

// Point names a place in the forward pass where values can be looked at.
type Point int

const (
	PointEmbedding Point = iota // [S,D] after the embedding; layer is 0
	PointQuery                  // [S,H*d] queries before RoPE (after their norm, where there is one)
	PointKey                    // [S,K*d] keys before RoPE
	PointAttention              // [S,H*d] attention output before the output projection
	PointLayer                  // [S,D] residual stream after the layer
	PointFinal                  // [S,D] after the final norm; layer is Layers
)

// Sequence is one run of tokens through the model and what is wanted of it.
type Sequence struct {
	Tokens []int32
	// Cache, when not nil, holds the keys and values of earlier tokens and takes in these.
	Cache *Cache
	// Masks restricts what each KV head sees, [layer][KV head]; nil means that everything is seen.
	Masks [][]Mask
	// Tap returns the statistics wanted of a layer, or nil. Tapped is called when they are there.
	Tap    func(layer int) *Tap
	Tapped func(layer int, tap *Tap) error
	// Observe is called at every Point. The tensor is valid during the call only.
	Observe func(p Point, layer int, t Tensor) error
	// Cached is called when a layer has attended, with its keys as they are cached (rotated) and values [S, K*d], those
	// of this call's tokens where there is no Cache. raw has the keys before RoPE when RawKeys is set, else it is nil.
	// The tensors are valid during the call only.
	Cached  func(layer int, raw, keys, values Tensor, tap *Tap) error
	RawKeys bool
	// LogitRows lists the rows whose logits are wanted.
	LogitRows []int
	// Logits is filled by Forward: one slice of Vocab values per LogitRows.
	Logits [][]float64
}

// NonFiniteError says where a NaN or an infinity first stood.
type NonFiniteError struct {
	Layer    int // the layer whose output has it; Layers for the final norm
	Sequence int // index in the batch
	Row      int // token
}

func (e *NonFiniteError) Error() string {
	return fmt.Sprintf("output of layer %d is not finite at token %d of sequence %d: the weights or the precision are unfit", e.Layer, e.Row, e.Sequence)
}

// Cache holds the keys and values of a sequence, for every layer.
type Cache struct {
	model        *Model
	keys, values []Tensor
	length, size int
}

// NewCache makes room for the keys and values of size tokens.
func (m *Model) NewCache(size int) *Cache {
	c := &Cache{model: m, size: size}
	for range m.layers {
		c.keys = append(c.keys, m.Backend.New(size, m.Config.KVWidth()))
		c.values = append(c.values, m.Backend.New(size, m.Config.KVWidth()))
	}
	return c
}

// Truncate forgets all tokens but the first n.
func (c *Cache) Truncate(n int) { c.length = min(c.length, n) }

// Free gives the memory back.
func (c *Cache) Free() {
	c.model.Backend.Free(c.keys...)
	c.model.Backend.Free(c.values...)
}

// Forward runs the sequences through the model, layer by layer over the whole batch, so that weights that do not fit
// in memory are read once per call. Memory: the residual streams of all sequences and the activations of one layer.
func (m *Model) Forward(ctx context.Context, batch ...*Sequence) (err error) {
	defer Catch(&err)
	b := m.Backend
	streams := make([]Tensor, len(batch))
	defer func() {
		for _, x := range streams {
			if x != nil {
				b.Free(x)
			}
		}
	}()
	for i, s := range batch {
		if err := m.checkSequence(s); err != nil {
			return fmt.Errorf("sequence %d: %w", i, err)
		}
		x := b.New(len(s.Tokens), m.Config.Hidden)
		streams[i] = x
		b.Embed(x, m.embed, s.Tokens)
		if err := s.observe(PointEmbedding, 0, x); err != nil {
			return err
		}
	}
	for l := range m.layers {
		for i, s := range batch {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := m.forwardLayer(s, l, streams[i]); err != nil {
				return err
			}
			if row := b.Finite(streams[i]); row >= 0 {
				return &NonFiniteError{Layer: l, Sequence: i, Row: row}
			}
			if err := s.observe(PointLayer, l, streams[i]); err != nil {
				return err
			}
		}
	}
	for i, s := range batch {
		if err := m.finish(s, i, streams[i]); err != nil {
			return err
		}
	}
	return nil
}

func (m *Model) checkSequence(s *Sequence) error {
	if len(s.Tokens) == 0 {
		return fmt.Errorf("no tokens")
	}
	for i, id := range s.Tokens {
		if id < 0 || int(id) >= m.Config.Vocab {
			return fmt.Errorf("token %d is %d, outside the vocabulary of %d", i, id, m.Config.Vocab)
		}
	}
	if c := s.Cache; c != nil && c.length+len(s.Tokens) > c.size {
		return fmt.Errorf("%d tokens do not fit a cache of %d with %d in it", len(s.Tokens), c.size, c.length)
	}
	if s.Masks != nil && len(s.Masks) != len(m.layers) {
		return fmt.Errorf("masks for %d layers, the model has %d", len(s.Masks), len(m.layers))
	}
	for l, masks := range s.Masks {
		if len(masks) != m.Config.KVHeads {
			return fmt.Errorf("layer %d: %d masks for %d KV heads", l, len(masks), m.Config.KVHeads)
		}
	}
	for _, r := range s.LogitRows {
		if r < 0 || r >= len(s.Tokens) {
			return fmt.Errorf("logit row %d of %d tokens", r, len(s.Tokens))
		}
	}
	return nil
}

func (s *Sequence) observe(p Point, layer int, t Tensor) error {
	if s.Observe == nil {
		return nil
	}
	return s.Observe(p, layer, t)
}

// forwardLayer updates the residual stream x in place.
func (m *Model) forwardLayer(s *Sequence, l int, x Tensor) error {
	b, w, cfg := m.Backend, &m.layers[l], m.Config
	n := x.Rows()

	start := 0
	var k, v Tensor
	if c := s.Cache; c != nil {
		start = c.length
		k, v = b.Slice(c.keys[l], start, start+n), b.Slice(c.values[l], start, start+n)
	} else {
		k, v = b.New(n, cfg.KVWidth()), b.New(n, cfg.KVWidth())
		defer b.Free(k, v)
	}
	q, a := b.New(n, cfg.QueryWidth()), b.New(n, cfg.QueryWidth())
	m.project(w, x, q, k, v)
	if err := s.observe(PointQuery, l, q); err != nil {
		return err
	}
	if err := s.observe(PointKey, l, k); err != nil {
		return err
	}
	var raw Tensor
	if s.RawKeys {
		raw = b.New(n, cfg.KVWidth())
		defer b.Free(raw)
		b.Copy(raw, k)
	}
	m.rotate(q, start, false)
	m.rotate(k, start, false)

	spec := AttentionSpec{Heads: cfg.Heads, KVHeads: cfg.KVHeads, HeadDim: cfg.HeadDim, Start: start, Window: cfg.Window(l)}
	if s.Masks != nil {
		spec.Masks = s.Masks[l]
	}
	var tap *Tap
	if s.Tap != nil {
		tap = s.Tap(l)
	}
	keys, values := k, v
	if c := s.Cache; c != nil {
		keys, values = b.Slice(c.keys[l], 0, start+n), b.Slice(c.values[l], 0, start+n)
		if l == len(m.layers)-1 {
			c.length += n
		}
	}
	b.Attention(a, q, keys, values, spec, tap)
	if tap != nil && s.Tapped != nil {
		if err := s.Tapped(l, tap); err != nil {
			return err
		}
	}
	if s.Cached != nil {
		if err := s.Cached(l, raw, keys, values, tap); err != nil {
			return err
		}
	}
	if err := s.observe(PointAttention, l, a); err != nil {
		return err
	}
	b.MatMul(x, a, w.output, true)
	b.Free(q, a)

	gu := b.New(n, 2*cfg.Intermediate)
	m.mlp(w, x, gu)
	b.Free(gu)
	return nil
}

// project computes the queries, keys and values before RoPE of the residual stream x.
func (m *Model) project(w *layer, x, q, k, v Tensor) {
	b, cfg := m.Backend, m.Config
	h, qkv := b.New(x.Rows(), cfg.Hidden), b.New(x.Rows(), cfg.QueryWidth()+2*cfg.KVWidth())
	b.RMSNorm(h, x, w.attentionNorm, cfg.NormEps)
	b.MatMul(qkv, h, w.qkv, false)
	if w.qkvBias != nil {
		b.AddBias(qkv, w.qkvBias)
	}
	b.Split(q, k, v, qkv)
	b.Free(h, qkv)
	if w.queryNorm != nil {
		m.headNorm(q, q, w.queryNorm)
		m.headNorm(k, k, w.keyNorm)
	}
}

// headNorm normalises every head of every row of x by itself; y may be x.
func (m *Model) headNorm(y, x Tensor, w Weight) {
	d := m.Config.HeadDim
	rows := x.Rows() * x.Cols() / d
	m.Backend.RMSNorm(m.Backend.Reshape(y, rows, d), m.Backend.Reshape(x, rows, d), w, m.Config.NormEps)
}

func (m *Model) rotate(x Tensor, start int, inverse bool) {
	m.Backend.RoPE(x, m.rotaryTo(start+x.Rows()), start, inverse)
}

// mlp adds the gated MLP of x to x, and leaves the gate and up projections in gu.
func (m *Model) mlp(w *layer, x, gu Tensor) {
	b, cfg := m.Backend, m.Config
	h, y := b.New(x.Rows(), cfg.Hidden), b.New(x.Rows(), cfg.Intermediate)
	b.RMSNorm(h, x, w.mlpNorm, cfg.NormEps)
	b.MatMul(gu, h, w.gateUp, false)
	b.SwiGLU(y, gu)
	b.MatMul(x, y, w.down, true)
	b.Free(h, y)
}

// finish applies the final norm and the output matrix.
func (m *Model) finish(s *Sequence, index int, x Tensor) error {
	b := m.Backend
	if s.Observe == nil && len(s.LogitRows) == 0 {
		return nil
	}
	h := b.New(x.Rows(), m.Config.Hidden)
	defer b.Free(h)
	b.RMSNorm(h, x, m.norm, m.Config.NormEps)
	if row := b.Finite(h); row >= 0 {
		return &NonFiniteError{Layer: len(m.layers), Sequence: index, Row: row}
	}
	if err := s.observe(PointFinal, len(m.layers), h); err != nil {
		return err
	}
	s.Logits = nil
	// In blocks: the logits of all rows of a long sequence would be larger than the model.
	const block = 64
	for lo := 0; lo < len(s.LogitRows); lo += block {
		rows := s.LogitRows[lo:min(lo+block, len(s.LogitRows))]
		picked, logits := b.New(len(rows), m.Config.Hidden), b.New(len(rows), m.Config.Vocab)
		for i, r := range rows {
			b.Copy(b.Slice(picked, i, i+1), b.Slice(h, r, r+1))
		}
		b.MatMul(logits, picked, m.head, false)
		flat := make([]float64, len(rows)*m.Config.Vocab)
		b.Download(flat, logits)
		for i := range rows {
			s.Logits = append(s.Logits, flat[i*m.Config.Vocab:(i+1)*m.Config.Vocab])
		}
		b.Free(picked, logits)
	}
	return nil
}
