package model_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/model"
)

// The GGUFs hold the checkpoints of the folders of the same name: scripts/fixtures_gguf.py. tolerance is the rounding of
// their format, relative.
var ggufs = map[string]float64{"llama": 0, "llama3": 1.0 / 256, "yarn": 1.0 / 256, "qwen2": 1.0 / 256, "qwen3": 1.0 / 2048}

// A GGUF gives the weights of its folder in the same order of rows, and the same configuration.
func TestGGUFIsItsFolder(t *testing.T) {
	for name, tolerance := range ggufs {
		folder, file := open(t, filepath.Join("testdata", name)), open(t, filepath.Join("testdata", name+".gguf"))
		if a, b := model.ConfigHash(folder.Config), model.ConfigHash(file.Config); a != b {
			t.Errorf("%s: the configurations differ:\n%+v\n%+v", name, folder.Config, file.Config)
		}
		for _, tensor := range []string{"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight",
			"model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight",
			"model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"} {
			want, err := folder.Matrix(tensor)
			if err != nil {
				t.Fatal(err)
			}
			got, err := file.Matrix(tensor)
			if err != nil {
				t.Fatal(err)
			}
			if err := got.Check(); err != nil || got.Rows != want.Rows || got.Cols != want.Cols {
				t.Fatalf("%s: %s is %d x %d, %v", name, tensor, got.Rows, got.Cols, err)
			}
			a, b := make([]float32, want.Cols), make([]float32, want.Cols)
			for r := range want.Rows {
				want.DecodeRow(a, r)
				got.DecodeRow(b, r)
				for i := range a {
					if d := float64(a[i] - b[i]); max(d, -d) > tolerance*float64(max(a[i], -a[i])) {
						t.Fatalf("%s: %s at %d, %d is %g, want %g", name, tensor, r, i, b[i], a[i])
					}
				}
			}
		}
		if _, err := file.Matrix("model.layers.2.mlp.up_proj.weight"); !errors.Is(err, model.ErrMissingTensor) {
			t.Errorf("a tensor that is not there gives %v", err)
		}
	}
	folder, file := open(t, "testdata/llama"), open(t, "testdata/llama.gguf")
	const text = "<|im_start|>user\n Naïve?\t12 — ▁<|im_end|>"
	if a, b := folder.Tokenizer.Encode(text), file.Tokenizer.Encode(text); !slices.Equal(a, b) || len(a) < 10 {
		t.Errorf("text is %v in the folder, %v in the GGUF", a, b)
	}
	if a, b := folder.Fingerprint(), file.Fingerprint(); a.Tokenizer != b.Tokenizer || a.Tokenizer == "" || a.Config != b.Config || a.Weights == b.Weights {
		t.Errorf("the fingerprints are %+v in the folder, %+v in the GGUF", a, b)
	}
	if !slices.Equal(folder.EOS, file.EOS) || len(file.EOS) != 1 || file.Tokenizer.Token(file.EOS[0]) != "<|im_end|>" {
		t.Errorf("generation ends at %v in the folder, at %v in the GGUF", folder.EOS, file.EOS)
	}
	a, err1 := folder.Chat.Render(nil, true)
	b, err2 := file.Chat.Render(nil, true)
	if a != b || a == "" || err1 != nil || err2 != nil {
		t.Errorf("the chat template gives %q and %q", a, b)
	}
}

// The converter computes divisors in float32; the folder's parameters must still give the same hash, for every model
// that uses them.
func TestConfigHashOfPublishedScaling(t *testing.T) {
	data, err := os.ReadFile("testdata/rope_freqs.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases map[string]struct {
		HeadDim           int `json:"head_dim"`
		Theta             float64
		Factor, Low, High float64
		Original          int
		Divisors          []float64
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	for name, c := range cases {
		config := func(s engine.RoPEScaling) string {
			return model.ConfigHash(engine.Config{Layers: 1, Heads: 1, KVHeads: 1, HeadDim: c.HeadDim, NormEps: 1e-5, RoPE: engine.RoPE{Theta: c.Theta, Scaling: &s}})
		}
		folder := config(engine.RoPEScaling{Kind: "llama3", Factor: c.Factor, LowFreqFactor: c.Low, HighFreqFactor: c.High, OriginalMaxPosition: c.Original})
		if folder != config(engine.RoPEScaling{Kind: "llama3", Divisors: c.Divisors}) {
			t.Errorf("%s: folder and GGUF have different hashes", name)
		}
		if folder == config(engine.RoPEScaling{Kind: "llama3", Factor: c.Factor, LowFreqFactor: c.Low, HighFreqFactor: 2 * c.High, OriginalMaxPosition: c.Original}) {
			t.Errorf("%s: another scaling has the same hash", name)
		}
	}
}

func edited(t *testing.T, name string, edit func([]byte) []byte) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, edit(data), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// number overwrites the 32-bit value of a metadata key.
func number(key string, v uint32) func([]byte) []byte {
	return func(b []byte) []byte {
		i := bytes.Index(b, []byte(key))
		if i < 0 {
			panic("no " + key)
		}
		binary.LittleEndian.PutUint32(b[i+len(key)+4:], v)
		return b
	}
}

func rename(from, to string) func([]byte) []byte {
	if len(from) != len(to) {
		panic("lengths differ")
	}
	return func(b []byte) []byte { return bytes.Replace(b, []byte(from), []byte(to), 1) }
}

func TestGGUFRefused(t *testing.T) {
	for name, c := range map[string]struct {
		file  string
		edit  func([]byte) []byte
		want  error
		names string
	}{
		"empty":                   {"llama.gguf", func(b []byte) []byte { return nil }, model.ErrCorrupt, "empty"},
		"not a GGUF":              {"llama.gguf", func(b []byte) []byte { return []byte("hello, world") }, model.ErrCorrupt, "GGUF"},
		"truncated in the header": {"llama.gguf", func(b []byte) []byte { return b[:100] }, model.ErrCorrupt, "100 bytes"},
		"truncated in the data":   {"llama.gguf", func(b []byte) []byte { return b[:len(b)-1000] }, model.ErrCorrupt, "blk."},
		"architecture":            {"qwen2.gguf", rename("qwen2", "gemma"), model.ErrUnsupported, "gemma"},
		"no layers":               {"llama.gguf", number("llama.block_count", 0), model.ErrCorrupt, "layers"},
		"two billion layers":      {"llama.gguf", number("llama.block_count", 1<<31-1), model.ErrCorrupt, "layers"},
		"layers past an int":      {"llama.gguf", number("llama.block_count", 1<<32-1), model.ErrCorrupt, "block_count"},
		"one more layer":          {"llama.gguf", number("llama.block_count", 3), model.ErrMissingTensor, "model.layers.2."},
		"one layer less":          {"llama.gguf", number("llama.block_count", 1), model.ErrUnsupported, "model.layers.1."},
		"many heads":              {"llama.gguf", number("llama.attention.head_count", 1<<30), model.ErrCorrupt, "heads"},
		"no heads":                {"llama.gguf", number("llama.attention.head_count", 0), model.ErrCorrupt, "heads"},
		"odd groups":              {"llama.gguf", number("llama.attention.head_count_kv", 3), model.ErrCorrupt, "KV heads"},
		"long heads":              {"qwen2.gguf", number("qwen2.attention.key_length", 1<<30), model.ErrUnsupported, "values of 12"},
		"both long": {"qwen2.gguf", func(b []byte) []byte {
			return number("qwen2.attention.value_length", 1<<30)(number("qwen2.attention.key_length", 1<<30)(b))
		}, model.ErrCorrupt, "dimensions of a head"},
		"part of a head turned": {"llama.gguf", number("llama.rope.dimension_count", 6), model.ErrUnsupported, "rope"},
		"width":                 {"llama.gguf", number("llama.embedding_length", 52), model.ErrShape, "is [264 48], want [264 52]"},
		"no epsilon":            {"llama.gguf", number("llama.attention.layer_norm_rms_epsilon", 0), model.ErrCorrupt, "epsilon"},
		"theta not a number":    {"llama.gguf", number("llama.rope.freq_base", 0x7fc00000), model.ErrCorrupt, "theta"},
		"yarn of nothing":       {"yarn.gguf", number("llama.rope.scaling.factor", 0), model.ErrCorrupt, "factor"},
		"another scaling":       {"yarn.gguf", rename("yarn", "dyna"), model.ErrUnsupported, "dyna"},
		"a tensor less":         {"llama.gguf", rename("blk.1.ffn_up.weight", "blk.1.ffn_ux.weight"), model.ErrUnsupported, "blk.1.ffn_ux.weight"},
		"a tensor moved":        {"llama.gguf", rename("blk.1.ffn_up.weight", "blk.7.ffn_up.weight"), model.ErrMissingTensor, "model.layers.1.mlp.up_proj.weight"},
		"scaling table renamed": {"llama3.gguf", rename("rope_freqs.weight", "rope_freqz.weight"), model.ErrUnsupported, "rope_freqz.weight"},
		"scaling table of zeros": {"llama3.gguf", func(b []byte) []byte {
			one := bytes.Index(b, []byte{0, 0, 128, 63, 0, 0, 0, 65}) // the divisors begin with 1 and 8
			copy(b[one:], []byte{0, 0, 0, 0})
			return b
		}, model.ErrCorrupt, "rope_freqs.weight"},
		"tokenizer": {"llama.gguf", rename("gpt-2", "gpt-9"), model.ErrUnsupported, "gpt-9"},
	} {
		path := edited(t, c.file, c.edit)
		_, err := model.Open(path)
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.names) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v, want %v that names %s", name, err, c.want, c.names)
		}
	}
}

func TestFolderOfOneGGUF(t *testing.T) {
	path := edited(t, "llama.gguf", func(b []byte) []byte { return b })
	if m := open(t, filepath.Dir(path)); m.Kind != "gguf" {
		t.Errorf("a folder with one GGUF opens as %s", m.Kind)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(path), "other.GGUF"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := model.Open(filepath.Dir(path)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("two GGUFs give %v", err)
	}
}

// What an absent member means is transformers' affair, and not what null means.
func TestAbsentMembers(t *testing.T) {
	without := func(name, member string) *model.Model {
		t.Helper()
		return open(t, copyFolder(t, name, func(files map[string][]byte) {
			var j map[string]any
			if err := json.Unmarshal(files["config.json"], &j); err != nil {
				t.Fatal(err)
			}
			delete(j, member)
			files["config.json"], _ = json.Marshal(j)
		}))
	}
	if w := without("mistral", "sliding_window").Config.Window(0); w != 4096 {
		t.Errorf("Mistral without sliding_window has a window of %d, want 4096", w)
	}
	m := open(t, copyFolder(t, "mistral", func(f map[string][]byte) { replace(f, "config.json", `"sliding_window": 20`, `"sliding_window": null`) }))
	if m.Config.SlidingWindow != nil {
		t.Errorf("Mistral with a sliding_window of null has windows %v", m.Config.SlidingWindow)
	}
	if d := without("llama", "head_dim").Config.HeadDim; d != 12 {
		t.Errorf("Llama without head_dim has heads of %d, want 48/4", d)
	}
	for name, member := range map[string]string{"qwen3": "head_dim", "qwen2": "num_key_value_heads"} {
		_, err := model.Open(copyFolder(t, name, func(f map[string][]byte) { replace(f, "config.json", fmt.Sprintf("%q:", member), `"other":`) }))
		if err == nil {
			t.Errorf("%s without %s opens: transformers takes another value than this checkpoint's", name, member)
		}
	}
}

func TestSlidingLayersOfQwen(t *testing.T) {
	windows := func(edit func(j map[string]any)) []int {
		t.Helper()
		return open(t, copyFolder(t, "qwen2", func(files map[string][]byte) {
			var j map[string]any
			if err := json.Unmarshal(files["config.json"], &j); err != nil {
				t.Fatal(err)
			}
			delete(j, "layer_types")
			j["sliding_window"] = 16
			edit(j)
			files["config.json"], _ = json.Marshal(j)
		})).Config.SlidingWindow
	}
	if w := windows(func(j map[string]any) {}); w != nil {
		t.Errorf("use_sliding_window is false, yet the windows are %v", w)
	}
	if w := windows(func(j map[string]any) { j["use_sliding_window"], j["max_window_layers"] = true, 1 }); !slices.Equal(w, []int{0, 16}) {
		t.Errorf("windows from layer 1 on are %v", w)
	}
	if w := windows(func(j map[string]any) {
		j["use_sliding_window"], j["layer_types"] = true, []string{"sliding_attention", "full_attention"}
	}); !slices.Equal(w, []int{16, 0}) {
		t.Errorf("windows by layer_types are %v", w)
	}
}

func TestEndOfGeneration(t *testing.T) {
	dir := copyFolder(t, "llama", func(f map[string][]byte) { f["generation_config.json"] = []byte(`{"eos_token_id":[2,0,70000]}`) })
	if got := open(t, dir).EOS; !slices.Equal(got, []int32{2, 0}) {
		t.Errorf("generation ends at %v", got)
	}
}

// Old checkpoints of Llama-2 hold a table that follows from the configuration.
func TestOldRotaryTables(t *testing.T) {
	dir := copyFolder(t, "llama", func(f map[string][]byte) {
		const name = "model.safetensors"
		n := binary.LittleEndian.Uint64(f[name])
		header := strings.TrimSpace(string(f[name][8 : 8+n]))
		body := f[name][8+n:]
		header = header[:len(header)-1] + fmt.Sprintf(`,"model.layers.0.self_attn.rotary_emb.inv_freq":{"dtype":"F32","shape":[6],"data_offsets":[%d,%d]}}`, len(body), len(body)+24)
		f[name] = slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), []byte(header), body, make([]byte, 24))
	})
	if open(t, dir).Fingerprint() != open(t, "testdata/llama").Fingerprint() {
		t.Error("the table changes the fingerprint")
	}
}

// Whatever the bytes of a GGUF: an error of a known kind or a model, and never a panic.
func FuzzOpenGGUF(f *testing.F) {
	for name := range ggufs {
		data, err := os.ReadFile(filepath.Join("testdata", name+".gguf"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(dir, "model.gguf")
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		check(t, path)
	})
}

// Whatever stands in config.json: an error of a known kind or a model, and never a panic.
func FuzzConfig(f *testing.F) {
	for _, name := range tiny {
		data, err := os.ReadFile(filepath.Join("testdata", name, "config.json"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	dir := f.TempDir()
	weights, err := os.ReadFile("testdata/llama/model.safetensors")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "model.safetensors"), weights, 0o644)
	}
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, "config.json"), data, 0o644); err != nil {
			t.Fatal(err)
		}
		check(t, dir)
	})
}

func check(t *testing.T, path string) {
	m, err := model.Open(path)
	if err != nil {
		if !errors.Is(err, model.ErrCorrupt) && !errors.Is(err, model.ErrUnsupported) && !errors.Is(err, model.ErrMissingTensor) && !errors.Is(err, model.ErrShape) {
			t.Fatalf("an error of no kind: %v", err)
		}
		return
	}
	m.Inspect()
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
}
