package engine

import (
	"fmt"
	"math"
)

// Model is a transformer whose weights a backend holds. Its methods must not be called concurrently.
type Model struct {
	Config  Config
	Backend Backend

	embed, norm, head Weight
	layers            []layer
	rotary            *Rotary
}

// layer holds the weights of one block; bias and head norms are nil where the architecture has none.
type layer struct {
	attentionNorm, mlpNorm Weight
	qkv                    Weight // [(H+2K)*d, D]: q, k and v projections stacked
	qkvBias                Weight
	queryNorm, keyNorm     Weight
	output                 Weight // [D, H*d]
	gateUp                 Weight // [2F, D]: gate and up projections stacked
	down                   Weight // [D, F]
}

// New loads a model's weights into a backend. The error names the tensor that is missing or has another shape.
func New(cfg Config, weights Weights, backend Backend) (*Model, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	m := &Model{Config: cfg, Backend: backend, layers: make([]layer, cfg.Layers)}
	l := loader{weights: weights, backend: backend}
	m.embed = l.load(cfg.Hidden, []int{cfg.Vocab}, "model.embed_tokens.weight")
	m.norm = l.load(cfg.Hidden, []int{1}, "model.norm.weight")
	m.head = m.embed
	if !cfg.TiedEmbeddings {
		m.head = l.load(cfg.Hidden, []int{cfg.Vocab}, "lm_head.weight")
	}
	qw, kw := cfg.QueryWidth(), cfg.KVWidth()
	for i := range m.layers {
		p := fmt.Sprintf("model.layers.%d.", i)
		b := &m.layers[i]
		b.attentionNorm = l.load(cfg.Hidden, []int{1}, p+"input_layernorm.weight")
		b.qkv = l.load(cfg.Hidden, []int{qw, kw, kw}, p+"self_attn.q_proj.weight", p+"self_attn.k_proj.weight", p+"self_attn.v_proj.weight")
		if cfg.QKVBias {
			b.qkvBias = l.loadBias([]int{qw, kw, kw}, p+"self_attn.q_proj.bias", p+"self_attn.k_proj.bias", p+"self_attn.v_proj.bias")
		}
		if cfg.QKNorm {
			b.queryNorm = l.load(cfg.HeadDim, []int{1}, p+"self_attn.q_norm.weight")
			b.keyNorm = l.load(cfg.HeadDim, []int{1}, p+"self_attn.k_norm.weight")
		}
		b.output = l.load(qw, []int{cfg.Hidden}, p+"self_attn.o_proj.weight")
		b.mlpNorm = l.load(cfg.Hidden, []int{1}, p+"post_attention_layernorm.weight")
		b.gateUp = l.load(cfg.Hidden, []int{cfg.Intermediate, cfg.Intermediate}, p+"mlp.gate_proj.weight", p+"mlp.up_proj.weight")
		b.down = l.load(cfg.Intermediate, []int{cfg.Hidden}, p+"mlp.down_proj.weight")
	}
	if l.err != nil {
		return nil, l.err
	}
	return m, nil
}

// Streams reports whether weights are read anew each time that they are needed, because they do not fit the backend's memory. Then it
// pays to take several sequences through a layer together.
func (m *Model) Streams() bool {
	s, ok := m.Backend.(interface{ Streamed() int64 })
	return ok && s.Streamed() > 0
}

// Close gives the weights back; the backend stays open.
func (m *Model) Close() {
	seen := map[Weight]bool{}
	unload := func(ws ...Weight) {
		for _, w := range ws {
			if w != nil && !seen[w] {
				seen[w] = true
				m.Backend.Unload(w)
			}
		}
	}
	unload(m.embed, m.norm, m.head)
	for _, l := range m.layers {
		unload(l.attentionNorm, l.mlpNorm, l.qkv, l.qkvBias, l.queryNorm, l.keyNorm, l.output, l.gateUp, l.down)
	}
}

// loader keeps the first error, so that New reads as a list.
type loader struct {
	weights Weights
	backend Backend
	err     error
}

func (l *loader) load(cols int, rows []int, names ...string) Weight {
	parts := make([]Matrix, 0, len(names))
	for i, name := range names {
		w, ok := l.matrix(name)
		if !ok {
			return nil
		}
		if w.Rows != rows[i] || w.Cols != cols {
			l.err = fmt.Errorf("tensor %s is %d x %d, want %d x %d", name, w.Rows, w.Cols, rows[i], cols)
			return nil
		}
		parts = append(parts, w)
	}
	return l.take(parts)
}

// loadBias stacks vectors end to end into one row.
func (l *loader) loadBias(lens []int, names ...string) Weight {
	var all Matrix
	for i, name := range names {
		w, ok := l.matrix(name)
		if !ok {
			return nil
		}
		if w.Rows != 1 || w.Cols != lens[i] {
			l.err = fmt.Errorf("tensor %s is %d x %d, want 1 x %d", name, w.Rows, w.Cols, lens[i])
			return nil
		}
		if i > 0 && w.DType != all.DType {
			l.err = fmt.Errorf("tensor %s is %v, but %s is %v", name, w.DType, names[0], all.DType)
			return nil
		}
		all = Matrix{Name: names[0], Rows: 1, Cols: all.Cols + w.Cols, DType: w.DType,
			Data: append(all.Data[:len(all.Data):len(all.Data)], w.Data[:w.RowBytes()]...)}
	}
	return l.take([]Matrix{all})
}

func (l *loader) matrix(name string) (Matrix, bool) {
	if l.err != nil {
		return Matrix{}, false
	}
	w, err := l.weights.Matrix(name)
	if err == nil {
		err = w.Check()
	}
	l.err = err
	return w, err == nil
}

func (l *loader) take(parts []Matrix) Weight {
	w, err := l.backend.Load(parts...)
	if err != nil {
		l.err = fmt.Errorf("tensor %s: %w", parts[0].Name, err)
	}
	return w
}

// rotaryTo returns the RoPE table for positions below n.
func (m *Model) rotaryTo(n int) *Rotary {
	half := m.Config.HeadDim / 2
	if m.rotary != nil && len(m.rotary.Cos) >= n*half {
		return m.rotary
	}
	n = max(n, 2048)
	freq, factor, err := m.Config.Frequencies()
	if err != nil {
		panic(err) // New has validated the configuration
	}
	t := &Rotary{HeadDim: m.Config.HeadDim, Cos: make([]float32, n*half), Sin: make([]float32, n*half)}
	for p := range n {
		for j, f := range freq {
			// The angle is rounded to float32 as transformers does: models are served with these angles.
			sin, cos := math.Sincos(float64(float32(p) * float32(f)))
			t.Cos[p*half+j], t.Sin[p*half+j] = float32(cos*factor), float32(sin*factor)
		}
	}
	m.rotary = t
	return t
}
