package model

import "github.com/kvprofile/kvprofile/internal/engine"

// Info is what matters for KV caches about a model. Sizes are in bytes, with keys and values in bf16.
type Info struct {
	Name            string              `json:"name"`
	Path            string              `json:"path"`
	Format          string              `json:"format"`
	Architecture    string              `json:"architecture"`
	Layers          int                 `json:"layers"`
	Heads           int                 `json:"query_heads"`
	KVHeads         int                 `json:"kv_heads"`
	Group           int                 `json:"query_heads_per_kv_head"`
	HeadDim         int                 `json:"head_dim"`
	Hidden          int                 `json:"hidden"`
	Vocab           int                 `json:"vocabulary"`
	MaxPosition     int                 `json:"max_position"`
	RoPETheta       float64             `json:"rope_theta"`
	RoPEScaling     *engine.RoPEScaling `json:"rope_scaling,omitempty"`
	SlidingWindow   []int               `json:"sliding_window,omitempty"`
	Parameters      int64               `json:"parameters"`
	WeightBytes     int64               `json:"weight_bytes"`
	WeightTypes     map[string]int64    `json:"weight_types"` // bytes by number format
	KVBytesPerToken int64               `json:"kv_bytes_per_token"`
	CacheBytes      []CacheSize         `json:"cache_bytes"`
	Tokenizer       bool                `json:"tokenizer"`
	ChatTemplate    bool                `json:"chat_template"`
	ConfigHash      string              `json:"config_sha256"`
}

// CacheSize is the full cache of one sequence.
type CacheSize struct {
	Tokens int   `json:"tokens"`
	Bytes  int64 `json:"bytes"`
}

// Inspect describes an open model.
func (m *Model) Inspect() Info {
	c := m.Config
	i := Info{Name: m.Name, Path: m.Path, Format: m.Kind, Architecture: c.Architecture, Layers: c.Layers, Heads: c.Heads, KVHeads: c.KVHeads,
		Group: c.Group(), HeadDim: c.HeadDim, Hidden: c.Hidden, Vocab: c.Vocab, MaxPosition: c.MaxPosition, RoPETheta: c.RoPE.Theta,
		RoPEScaling: c.RoPE.Scaling, SlidingWindow: c.SlidingWindow, WeightTypes: map[string]int64{}, Tokenizer: m.Tokenizer != nil,
		ChatTemplate: m.Chat != nil, ConfigHash: ConfigHash(c), KVBytesPerToken: 2 * 2 * int64(c.Layers*c.KVWidth())}
	for _, t := range m.tensors {
		values := int64(1)
		for _, n := range t.shape {
			values *= int64(n)
		}
		i.Parameters += values
		i.WeightBytes += int64(len(t.data))
		i.WeightTypes[t.dtype.String()] += int64(len(t.data))
	}
	for _, tokens := range []int{4096, 32768, 131072} {
		size := CacheSize{Tokens: tokens}
		for l := range c.Layers {
			kept := tokens
			if w := c.Window(l); w > 0 {
				kept = min(kept, w)
			}
			size.Bytes += int64(kept) * i.KVBytesPerToken / int64(c.Layers)
		}
		i.CacheBytes = append(i.CacheBytes, size)
	}
	return i
}
