package model

import (
	"fmt"
	"math"
	"strings"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/gguf"
)

// ggufNames maps the parts of GGUF tensor names to Hugging Face's.
var ggufNames = map[string]string{
	"attn_norm.weight": "input_layernorm.weight", "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight",
	"attn_v.weight": "self_attn.v_proj.weight", "attn_q.bias": "self_attn.q_proj.bias", "attn_k.bias": "self_attn.k_proj.bias",
	"attn_v.bias": "self_attn.v_proj.bias", "attn_output.weight": "self_attn.o_proj.weight", "attn_q_norm.weight": "self_attn.q_norm.weight",
	"attn_k_norm.weight": "self_attn.k_norm.weight", "ffn_norm.weight": "post_attention_layernorm.weight", "ffn_gate.weight": "mlp.gate_proj.weight",
	"ffn_up.weight": "mlp.up_proj.weight", "ffn_down.weight": "mlp.down_proj.weight",
}

// canonicalName is the Hugging Face name of a GGUF tensor, or "" when a transformer of ours has no such tensor.
func canonicalName(name string) string {
	switch name {
	case "token_embd.weight":
		return "model.embed_tokens.weight"
	case "output_norm.weight":
		return "model.norm.weight"
	case "output.weight":
		return "lm_head.weight"
	}
	rest, ok := strings.CutPrefix(name, "blk.")
	if !ok {
		return ""
	}
	layer, part, _ := strings.Cut(rest, ".")
	if hf, ok := ggufNames[part]; ok {
		return "model.layers." + layer + "." + hf
	}
	return ""
}

// pairedRows undoes the row order in which llama.cpp stores the q and k projections of Llama models: it interleaves
// the two halves of every head, as its RoPE rotates neighbours.
func pairedRows(heads, headDim int) []int32 {
	rows := make([]int32, heads*headDim)
	for h := range heads {
		for j := range headDim / 2 {
			rows[h*headDim+j] = int32(h*headDim + 2*j)
			rows[h*headDim+headDim/2+j] = int32(h*headDim + 2*j + 1)
		}
	}
	return rows
}

// ggufConfig reads the configuration from a GGUF's metadata.
func ggufConfig(f *gguf.File) (engine.Config, error) {
	arch, _ := f.Metadata["general.architecture"].(string)
	switch arch {
	case "llama", "mistral", "qwen2", "qwen3":
	default:
		return engine.Config{}, fmt.Errorf("%w: architecture %q (llama, mistral, qwen2 and qwen3 are read)", ErrUnsupported, arch)
	}
	if n, _ := f.Metadata["split.count"].(uint64); n > 1 {
		return engine.Config{}, fmt.Errorf("%w: one of %d parts of a split GGUF: merge them first (llama-gguf-split --merge)", ErrUnsupported, n)
	}
	var err error
	number := func(key string, fallback int, required bool) int {
		switch v := f.Metadata[arch+"."+key].(type) {
		case uint64:
			if v < 1<<31 {
				return int(v)
			}
			err = fmt.Errorf("%w: metadata %s.%s is %d", ErrCorrupt, arch, key, v)
		case nil:
			if required && err == nil {
				err = fmt.Errorf("%w: metadata %s.%s is missing", ErrCorrupt, arch, key)
			}
		default:
			err = fmt.Errorf("%w: metadata %s.%s is %v", ErrUnsupported, arch, key, v)
		}
		return fallback
	}
	float := func(key string, fallback float64) float64 {
		if v, ok := f.Metadata[arch+"."+key].(float64); ok {
			return v
		}
		return fallback
	}
	c := engine.Config{
		Architecture: arch,
		Layers:       number("block_count", 0, true),
		Heads:        number("attention.head_count", 0, true),
		Hidden:       number("embedding_length", 0, true),
		Intermediate: number("feed_forward_length", 0, true),
		MaxPosition:  number("context_length", 0, true),
		NormEps:      float("attention.layer_norm_rms_epsilon", 1e-5),
		RoPE:         engine.RoPE{Theta: float("rope.freq_base", 10000)},
		QKVBias:      arch == "qwen2",
		QKNorm:       arch == "qwen3",
	}
	c.KVHeads = number("attention.head_count_kv", c.Heads, false)
	if err != nil {
		return c, err
	}
	if c.Heads == 0 {
		return c, fmt.Errorf("%w: metadata %s.attention.head_count: no query heads", ErrCorrupt, arch)
	}
	c.HeadDim = number("attention.key_length", c.Hidden/c.Heads, false)
	if n := number("attention.value_length", c.HeadDim, false); n != c.HeadDim {
		return c, fmt.Errorf("%w: values of %d dimensions beside keys of %d", ErrUnsupported, n, c.HeadDim)
	}
	if n := number("rope.dimension_count", c.HeadDim, false); n != c.HeadDim {
		return c, fmt.Errorf("%w: rope turns %d of %d dimensions of a head", ErrUnsupported, n, c.HeadDim)
	}
	if n := number("expert_count", 0, false); n > 0 {
		return c, fmt.Errorf("%w: a mixture of %d experts", ErrUnsupported, n)
	}
	for _, key := range []string{"attention.scale", "logit_scale", "residual_scale", "embedding_scale", "rope.scale_linear", "attention.clamp_kqv"} {
		if v, ok := f.Metadata[arch+"."+key]; ok {
			return c, fmt.Errorf("%w: metadata %s.%s is %v", ErrUnsupported, arch, key, v)
		}
	}
	if err := withinReason(c); err != nil {
		return c, err
	}
	if w := number("attention.sliding_window", 0, false); w > 0 {
		c.SlidingWindow = make([]int, c.Layers)
		for l := range c.SlidingWindow {
			c.SlidingWindow[l] = w
		}
	}
	switch kind, _ := f.Metadata[arch+".rope.scaling.type"].(string); kind {
	case "", "none":
	case "linear":
		c.RoPE.Scaling = &engine.RoPEScaling{Kind: kind, Factor: float("rope.scaling.factor", 1)}
	case "yarn":
		c.RoPE.Scaling = &engine.RoPEScaling{Kind: kind, Factor: float("rope.scaling.factor", 1),
			OriginalMaxPosition: number("rope.scaling.original_context_length", c.MaxPosition, false),
			BetaFast:            float("rope.scaling.yarn_beta_fast", 0), BetaSlow: float("rope.scaling.yarn_beta_slow", 0)}
		if v := float("rope.scaling.attn_factor", 1); v != 1 {
			return c, fmt.Errorf("%w: metadata %s.rope.scaling.attn_factor is %g", ErrUnsupported, arch, v)
		}
	default:
		return c, fmt.Errorf("%w: rope scaling %q", ErrUnsupported, kind)
	}
	if s := c.RoPE.Scaling; s != nil && !(s.Factor >= 1) {
		return c, fmt.Errorf("%w: metadata %s.rope.scaling.factor is %g", ErrCorrupt, arch, s.Factor)
	}
	for _, t := range f.Tensors {
		switch t.Name {
		case "token_embd.weight":
			c.Vocab = t.Shape[0]
		case "rope_freqs.weight":
			if len(t.Shape) != 1 || t.Shape[0] != c.HeadDim/2 || t.DType != dtype.F32 {
				return c, fmt.Errorf("%w: tensor %s is %v %v, want F32 [%d]", ErrShape, t.Name, t.DType, t.Shape, c.HeadDim/2)
			}
			d := make([]float32, t.Shape[0])
			t.DType.Decode(d, t.Data)
			c.RoPE.Scaling = &engine.RoPEScaling{Kind: "llama3"}
			for _, v := range d {
				if !(v > 0) || math.IsInf(float64(v), 0) {
					return c, fmt.Errorf("%w: tensor %s holds %g", ErrCorrupt, t.Name, v)
				}
				c.RoPE.Scaling.Divisors = append(c.RoPE.Scaling.Divisors, float64(v))
			}
		}
	}
	c.TiedEmbeddings = true
	for _, t := range f.Tensors {
		if t.Name == "output.weight" {
			c.TiedEmbeddings = false
		}
	}
	return c, err
}
