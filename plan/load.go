package plan

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
)

// maxFile bounds the size of a plan's file in bytes: a thousand layers of 512 KV heads take less.
const maxFile = 64 << 20

// Want is what a server knows of its own model.
type Want struct {
	// Model of the server. Compared are shape (layers, heads, head_dim, sliding windows), rotary embedding, and hashes;
	// not the name, the architecture and max_position. An empty Config hash is not compared: shape and rotary embedding
	// are. An empty Tokenizer hash is that of a model without a tokenizer.
	Model Model
	// AllowWeights accepts a plan that was made from other weights, such as another quantisation of the same model.
	AllowWeights bool
}

// Load reads a plan and checks it, as [Parse] does, and that it belongs to the server's model. The error names the
// file; one of another model is a [ModelError].
func Load(path string, want Want) (*Plan, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("load cache plan: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("load cache plan: %w", err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("load cache plan %s: %w: larger than %d MiB", path, ErrFormat, maxFile>>20)
	}
	p, err := Parse(data)
	if err == nil {
		err = p.Matches(want)
	}
	if err != nil {
		return nil, fmt.Errorf("load cache plan %s: %w", path, err)
	}
	return p, nil
}

// Matches reports as a [ModelError] how the plan's model differs from the server's; nil when it does not. The plan must
// be valid.
func (p *Plan) Matches(want Want) error {
	e := &ModelError{Name: p.Model.Name}
	add := func(pointer string, plan, server any) {
		e.Mismatches = append(e.Mismatches, Mismatch{pointer, show(plan), show(server)})
	}
	m, w := &p.Model, &want.Model
	for _, f := range []struct {
		pointer      string
		plan, server int
	}{{"/model/n_layers", m.NLayers, w.NLayers}, {"/model/n_heads", m.NHeads, w.NHeads},
		{"/model/n_kv_heads", m.NKVHeads, w.NKVHeads}, {"/model/head_dim", m.HeadDim, w.HeadDim}} {
		if f.plan != f.server {
			add(f.pointer, f.plan, f.server)
		}
	}
	if a, b := windows(m), windows(w); !slices.Equal(a, b) {
		add("/model/sliding_window", a, b)
	}
	if m.HeadDim == w.HeadDim && !sameRoPE(&m.RoPE, &w.RoPE, m.HeadDim) {
		add("/model/rope", m.RoPE, w.RoPE)
	}
	if w.SHA256.Config != "" && m.SHA256.Config != w.SHA256.Config {
		add("/model/sha256/config", m.SHA256.Config, w.SHA256.Config)
	}
	if m.SHA256.Tokenizer != w.SHA256.Tokenizer {
		add("/model/sha256/tokenizer", m.SHA256.Tokenizer, w.SHA256.Tokenizer)
	}
	if !want.AllowWeights && m.SHA256.Weights != w.SHA256.Weights {
		add("/model/sha256/weights", m.SHA256.Weights, w.SHA256.Weights)
	}
	if len(e.Mismatches) > 0 {
		return e
	}
	return nil
}

// windows are the sliding windows of all layers, nil when there is none.
func windows(m *Model) []int {
	if !slices.ContainsFunc(m.SlidingWindow, func(w int) bool { return w != 0 }) {
		return nil
	}
	return m.SlidingWindow
}

// show writes a value for a message.
func show(v any) string {
	if s, ok := v.(string); ok {
		if s == "" {
			return "none"
		}
		return s
	}
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	return shorten(string(b))
}
