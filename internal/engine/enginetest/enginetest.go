// Package enginetest has what the tests of several backends share: small random models, problems for every operation, and the
// comparison with the float64 oracle. What a backend allows itself, and the sizes at which it changes its ways, its own tests say.
package enginetest

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
)

// Tiny is a Llama of 3 layers, 4 query heads and 2 KV heads.
func Tiny() engine.Config {
	return engine.Config{Architecture: "llama", Layers: 3, Heads: 4, KVHeads: 2, HeadDim: 8, Hidden: 24, Intermediate: 40,
		Vocab: 50, MaxPosition: 512, NormEps: 1e-5, RoPE: engine.RoPE{Theta: 10000}}
}

// Variants are one configuration for each thing an architecture may have.
func Variants() map[string]engine.Config {
	llama, mistral, qwen2, qwen3 := Tiny(), Tiny(), Tiny(), Tiny()
	llama.TiedEmbeddings = true
	mistral.SlidingWindow = []int{5, 0, 12} // narrower and wider than the recent tokens of a streaming mask
	qwen2.QKVBias = true
	qwen3.QKNorm, qwen3.HeadDim = true, 10
	return map[string]engine.Config{"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}
}

// Weights are the weights of a configuration, drawn from a seed and the tensor's name.
type Weights struct {
	Config engine.Config
	Seed   uint64
}

// Matrix implements engine.Weights.
func (w Weights) Matrix(name string) (engine.Matrix, error) {
	c := w.Config
	rows, cols := 1, c.Hidden
	part := name[strings.LastIndex(strings.TrimSuffix(name, ".weight"), ".")+1:]
	switch part {
	case "embed_tokens.weight", "lm_head.weight":
		rows = c.Vocab
	case "q_proj.weight":
		rows = c.QueryWidth()
	case "k_proj.weight", "v_proj.weight":
		rows = c.KVWidth()
	case "o_proj.weight":
		rows, cols = c.Hidden, c.QueryWidth()
	case "gate_proj.weight", "up_proj.weight":
		rows = c.Intermediate
	case "down_proj.weight":
		rows, cols = c.Hidden, c.Intermediate
	case "q_norm.weight", "k_norm.weight":
		cols = c.HeadDim
	case "input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight":
	default:
		switch {
		case strings.HasSuffix(name, "q_proj.bias"):
			cols = c.QueryWidth()
		case strings.HasSuffix(name, "k_proj.bias"), strings.HasSuffix(name, "v_proj.bias"):
			cols = c.KVWidth()
		default:
			return engine.Matrix{}, fmt.Errorf("no tensor %s", name)
		}
	}
	seed := w.Seed
	for _, b := range []byte(name) {
		seed = seed*1099511628211 + uint64(b)
	}
	r := rand.New(rand.NewPCG(seed, 1))
	data := make([]byte, 0, rows*cols*4)
	for range rows * cols {
		x := r.NormFloat64() * 2 / math.Sqrt(float64(cols))
		if rows == 1 && strings.HasSuffix(name, "weight") {
			x = 1 + 0.2*r.NormFloat64()
		}
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(x)))
	}
	return engine.Matrix{Name: name, Rows: rows, Cols: cols, DType: dtype.F32, Data: data}, nil
}

// Tokens draws n token ids.
func Tokens(c engine.Config, n int, seed uint64) []int32 {
	r := rand.New(rand.NewPCG(seed, 2))
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(r.IntN(c.Vocab))
	}
	return out
}
