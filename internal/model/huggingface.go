package model

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/safetensors"
)

// configJSON is what config.json says that the mathematics depends on. Pointers tell absent from zero.
type configJSON struct {
	Architectures         []string     `json:"architectures"`
	ModelType             string       `json:"model_type"`
	NumHiddenLayers       int          `json:"num_hidden_layers"`
	NumAttentionHeads     int          `json:"num_attention_heads"`
	NumKeyValueHeads      *int         `json:"num_key_value_heads"`
	HeadDim               *int         `json:"head_dim"`
	HiddenSize            int          `json:"hidden_size"`
	IntermediateSize      int          `json:"intermediate_size"`
	VocabSize             int          `json:"vocab_size"`
	MaxPositionEmbeddings int          `json:"max_position_embeddings"`
	RMSNormEps            *float64     `json:"rms_norm_eps"`
	RopeTheta             *float64     `json:"rope_theta"`
	RopeScaling           *ropeJSON    `json:"rope_scaling"`
	RopeParameters        *ropeJSON    `json:"rope_parameters"`
	SlidingWindow         *int         `json:"sliding_window"`
	UseSlidingWindow      *bool        `json:"use_sliding_window"`
	MaxWindowLayers       *int         `json:"max_window_layers"`
	LayerTypes            []string     `json:"layer_types"`
	TieWordEmbeddings     *bool        `json:"tie_word_embeddings"`
	HiddenAct             string       `json:"hidden_act"`
	AttentionBias         bool         `json:"attention_bias"`
	MLPBias               bool         `json:"mlp_bias"`
	PartialRotaryFactor   *float64     `json:"partial_rotary_factor"`
	NumExperts            *int         `json:"num_experts"`
	NumLocalExperts       *int         `json:"num_local_experts"`
	QuantizationConfig    any          `json:"quantization_config"`
	EOSTokenID            tokenIDsJSON `json:"eos_token_id"`
}

type ropeJSON struct {
	RopeType                      string   `json:"rope_type"`
	FullAttention                 any      `json:"full_attention"` // each kind of layer has its own: not of our architectures
	Type                          string   `json:"type"`           // the older name
	RopeTheta                     *float64 `json:"rope_theta"`
	Factor                        float64  `json:"factor"`
	LowFreqFactor                 float64  `json:"low_freq_factor"`
	HighFreqFactor                float64  `json:"high_freq_factor"`
	OriginalMaxPositionEmbeddings int      `json:"original_max_position_embeddings"`
	BetaFast                      float64  `json:"beta_fast"`
	BetaSlow                      float64  `json:"beta_slow"`
	AttentionFactor               float64  `json:"attention_factor"`
	MScale                        float64  `json:"mscale"`
	MScaleAllDim                  float64  `json:"mscale_all_dim"`
	Truncate                      *bool    `json:"truncate"`
	PartialRotaryFactor           *float64 `json:"partial_rotary_factor"`
}

// tokenIDsJSON is a token id or a list of them.
type tokenIDsJSON []int32

func (t *tokenIDsJSON) UnmarshalJSON(data []byte) error {
	var one *int32
	if json.Unmarshal(data, &one) == nil {
		if one != nil {
			*t = tokenIDsJSON{*one}
		}
		return nil
	}
	return json.Unmarshal(data, (*[]int32)(t))
}

// architectures maps model_type, and the class that must implement it.
var architectures = map[string]string{"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

func or[T any](p *T, fallback T) T {
	if p == nil {
		return fallback
	}
	return *p
}

// parseConfig fills in what transformers takes an absent member for, which is not what it takes null for.
func parseConfig(data []byte) (j configJSON, err error) {
	var kind struct {
		ModelType string `json:"model_type"`
	}
	if err := json.Unmarshal(data, &kind); err != nil {
		return j, err
	}
	defaults := map[string]struct{ kvHeads, headDim, window int }{"mistral": {kvHeads: 8, window: 4096}, "qwen2": {kvHeads: 32, window: 4096}, "qwen3": {kvHeads: 32, headDim: 128, window: 4096}}
	if d, ok := defaults[kind.ModelType]; ok {
		j.NumKeyValueHeads, j.SlidingWindow = &d.kvHeads, &d.window
		if d.headDim > 0 {
			j.HeadDim = &d.headDim
		}
		if strings.HasPrefix(kind.ModelType, "qwen") {
			layers := 28
			j.MaxWindowLayers = &layers
		}
	}
	err = json.Unmarshal(data, &j)
	return j, err
}

// huggingFaceConfig reads a config.json. What would change the mathematics and is not implemented is refused.
func huggingFaceConfig(data []byte) (engine.Config, configJSON, error) {
	j, err := parseConfig(data)
	if err != nil {
		return engine.Config{}, j, fmt.Errorf("%w: config.json: %w", ErrCorrupt, err)
	}
	unsupported := func(format string, args ...any) (engine.Config, configJSON, error) {
		return engine.Config{}, j, fmt.Errorf("%w: config.json: "+format, append([]any{ErrUnsupported}, args...)...)
	}
	class, ok := architectures[j.ModelType]
	if !ok || len(j.Architectures) > 0 && !slices.Contains(j.Architectures, class) {
		return unsupported("model type %q with architectures %q (llama, mistral, qwen2 and qwen3 for causal language modelling are read)", j.ModelType, j.Architectures)
	}
	experts := or(j.NumExperts, 0) + or(j.NumLocalExperts, 0)
	switch {
	case j.HiddenAct != "silu" && j.HiddenAct != "":
		return unsupported("hidden_act %q (silu is known)", j.HiddenAct)
	case j.AttentionBias && j.ModelType != "qwen2", j.MLPBias: // Qwen2 ignores the first: its q, k and v always have a bias
		return unsupported("attention_bias or mlp_bias")
	case or(j.PartialRotaryFactor, 1) != 1:
		return unsupported("partial_rotary_factor %g", *j.PartialRotaryFactor)
	case experts > 0:
		return unsupported("a mixture of %d experts", experts)
	case j.QuantizationConfig != nil:
		return unsupported("quantization_config: give the unquantised checkpoint, or a GGUF")
	case j.NumAttentionHeads <= 0:
		return engine.Config{}, j, fmt.Errorf("%w: config.json: num_attention_heads is %d", ErrCorrupt, j.NumAttentionHeads)
	}
	c := engine.Config{
		Architecture: j.ModelType, Layers: j.NumHiddenLayers, Heads: j.NumAttentionHeads, KVHeads: or(j.NumKeyValueHeads, j.NumAttentionHeads),
		HeadDim: or(j.HeadDim, j.HiddenSize/j.NumAttentionHeads), Hidden: j.HiddenSize, Intermediate: j.IntermediateSize, Vocab: j.VocabSize,
		MaxPosition: j.MaxPositionEmbeddings, NormEps: or(j.RMSNormEps, 1e-6), RoPE: engine.RoPE{Theta: or(j.RopeTheta, 10000)},
		TiedEmbeddings: or(j.TieWordEmbeddings, false), QKVBias: j.ModelType == "qwen2", QKNorm: j.ModelType == "qwen3",
	}
	rope := j.RopeScaling
	if rope == nil {
		rope = j.RopeParameters
	}
	if rope != nil {
		c.RoPE.Theta = or(rope.RopeTheta, c.RoPE.Theta)
		kind := rope.RopeType
		if kind == "" {
			kind = rope.Type
		}
		if rope.FullAttention != nil {
			return unsupported("rope parameters for each kind of layer")
		}
		if or(rope.PartialRotaryFactor, 1) != 1 {
			return unsupported("partial_rotary_factor %g", *rope.PartialRotaryFactor)
		}
		switch kind {
		case "", "default":
		case "linear", "llama3", "yarn":
			if rope.MScale != 0 || rope.MScaleAllDim != 0 || !or(rope.Truncate, true) {
				return unsupported("rope scaling with mscale or truncate")
			}
			c.RoPE.Scaling = &engine.RoPEScaling{Kind: kind, Factor: rope.Factor, LowFreqFactor: rope.LowFreqFactor, HighFreqFactor: rope.HighFreqFactor,
				OriginalMaxPosition: rope.OriginalMaxPositionEmbeddings, BetaFast: rope.BetaFast, BetaSlow: rope.BetaSlow, AttentionFactor: rope.AttentionFactor}
			if kind != "linear" && rope.OriginalMaxPositionEmbeddings == 0 {
				c.RoPE.Scaling.OriginalMaxPosition = c.MaxPosition
			}
			if s := c.RoPE.Scaling; !(s.Factor >= 1) || kind == "llama3" && !(s.HighFreqFactor > s.LowFreqFactor && s.LowFreqFactor > 0) {
				return engine.Config{}, j, fmt.Errorf("%w: config.json: rope scaling %+v", ErrCorrupt, *s)
			}
		default:
			return unsupported("rope scaling %q (linear, llama3 and yarn are known)", kind)
		}
	}
	if err := withinReason(c); err != nil {
		return engine.Config{}, j, fmt.Errorf("config.json: %w", err)
	}
	if window := or(j.SlidingWindow, 0); window > 0 {
		// Qwen has the key even where it is off; Mistral's is always on.
		first := 0
		on := j.ModelType == "mistral"
		if j.ModelType == "qwen2" || j.ModelType == "qwen3" {
			on, first = or(j.UseSlidingWindow, false), or(j.MaxWindowLayers, 0)
		}
		windows := make([]int, c.Layers)
		any := false
		for l := range windows {
			slides := on && l >= first
			if strings.HasPrefix(j.ModelType, "qwen") && j.LayerTypes != nil {
				if len(j.LayerTypes) != c.Layers {
					return engine.Config{}, j, fmt.Errorf("%w: config.json: %d layer_types for %d layers", ErrCorrupt, len(j.LayerTypes), c.Layers)
				}
				slides = on && j.LayerTypes[l] == "sliding_attention"
			}
			if slides {
				windows[l], any = window, true
			}
		}
		if any {
			c.SlidingWindow = windows
		}
	}
	return c, j, nil
}

// folder is a Hugging Face folder: on disk, where weights are mapped, or in another file system.
type folder struct {
	fs.FS
	path string // on disk; "" elsewhere
}

func (m *Model) openHuggingFace(dir folder) error {
	m.Kind = "huggingface"
	data, err := fs.ReadFile(dir, "config.json")
	if err != nil {
		return err
	}
	var j configJSON
	if m.Config, j, err = huggingFaceConfig(data); err != nil {
		return err
	}
	if err := m.Config.Validate(); err != nil {
		return fmt.Errorf("%w: config.json: %w", ErrCorrupt, err)
	}
	m.addEOS(j.EOSTokenID...)
	// A fine-tune for chat often names the end of a turn only here.
	switch data, err := fs.ReadFile(dir, "generation_config.json"); {
	case err == nil:
		var g struct {
			EOSTokenID tokenIDsJSON `json:"eos_token_id"`
		}
		if err := json.Unmarshal(data, &g); err != nil {
			return fmt.Errorf("%w: generation_config.json: %w", ErrCorrupt, err)
		}
		m.addEOS(g.EOSTokenID...)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	files, err := weightFiles(dir)
	if err != nil {
		return err
	}
	for _, file := range files {
		data, err := m.weights(dir, file)
		if err != nil {
			return err
		}
		tensors, err := safetensors.Parse(data)
		switch {
		case errors.Is(err, safetensors.ErrUnsupported):
			return fmt.Errorf("%w: %s: %w", ErrUnsupported, file, err)
		case err != nil:
			return fmt.Errorf("%w: %s: %w", ErrCorrupt, file, err)
		}
		for _, t := range tensors {
			if strings.HasSuffix(t.Name, ".rotary_emb.inv_freq") { // old checkpoints keep this table, which follows from the configuration
				continue
			}
			if old, dup := m.tensors[t.Name]; dup {
				return fmt.Errorf("%w: tensor %s stands in %s and in %s", ErrCorrupt, t.Name, old.file, file)
			}
			m.tensors[t.Name] = tensor{file: file, dtype: t.DType, shape: t.Shape, data: t.Data}
		}
	}
	return m.readTokenizer(dir)
}

// weights are the bytes of a file of weights.
func (m *Model) weights(dir folder, file string) ([]byte, error) {
	if dir.path == "" {
		return fs.ReadFile(dir, file)
	}
	return m.mapFile(filepath.Join(dir.path, file))
}

// weightFiles lists the safetensors files of a folder, as its index names them.
func weightFiles(dir fs.FS) ([]string, error) {
	data, err := fs.ReadFile(dir, "model.safetensors.index.json")
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := fs.Stat(dir, "model.safetensors"); err != nil {
			return nil, fmt.Errorf("%w: no model.safetensors and no model.safetensors.index.json", ErrMissingTensor)
		}
		return []string{"model.safetensors"}, nil
	}
	if err != nil {
		return nil, err
	}
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(data, &index); err != nil {
		return nil, fmt.Errorf("%w: model.safetensors.index.json: %w", ErrCorrupt, err)
	}
	var files []string
	for tensor, file := range index.WeightMap {
		if filepath.Base(file) != file || file == ".." {
			return nil, fmt.Errorf("%w: model.safetensors.index.json puts %s in %q, outside the folder", ErrCorrupt, tensor, file)
		}
		if !slices.Contains(files, file) {
			files = append(files, file)
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%w: model.safetensors.index.json names no file", ErrCorrupt)
	}
	sort.Strings(files)
	return files, nil
}
