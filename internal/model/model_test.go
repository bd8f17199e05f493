package model_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
	"github.com/kvprofile/kvprofile/internal/model"
)

var tiny = []string{"llama", "llama3", "linear", "yarn", "mistral", "qwen2", "qwen3", "bf16"}

func open(t testing.TB, path string) *model.Model {
	t.Helper()
	m, err := model.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// recorded is what transformers computed: scripts/fixtures_models.py.
type recorded struct {
	Tokens []int32
	Rows   []int
	Norms  []float64
	Hidden map[int][][]float64
	Logits []float64
}

// relative is |a-b| / |b|.
func relative(a, b []float64) float64 {
	var d, n float64
	for i := range b {
		d += (a[i] - b[i]) * (a[i] - b[i])
		n += b[i] * b[i]
	}
	return math.Sqrt(d / n)
}

func TestEqualsTransformers(t *testing.T) {
	for _, name := range tiny {
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join("testdata", name+".json"))
			if err != nil {
				t.Fatal(err)
			}
			var want recorded
			if err := json.Unmarshal(data, &want); err != nil {
				t.Fatal(err)
			}
			files := open(t, filepath.Join("testdata", name))
			m, err := engine.New(files.Config, files, ref.New[float64]())
			if err != nil {
				t.Fatal(err)
			}
			compared := 0
			check := func(state int, x engine.Tensor) {
				all := make([]float64, x.Rows()*x.Cols())
				m.Backend.Download(all, x)
				var n float64
				for _, v := range all {
					n += v * v
				}
				if n = math.Sqrt(n); math.Abs(n-want.Norms[state]) > 1e-5*n {
					t.Errorf("hidden states %d have norm %g, want %g", state, n, want.Norms[state])
				}
				for i, row := range want.Rows {
					if e := relative(all[row*x.Cols():(row+1)*x.Cols()], want.Hidden[state][i]); e > 1e-5 {
						t.Errorf("hidden states %d, row %d: relative error %.2g", state, row, e)
					}
				}
				compared++
			}
			last := files.Config.Layers - 1
			s := &engine.Sequence{Tokens: want.Tokens, LogitRows: []int{len(want.Tokens) - 1}, Observe: func(p engine.Point, l int, x engine.Tensor) error {
				switch {
				case p == engine.PointEmbedding:
					check(0, x)
				case p == engine.PointLayer && l < last: // transformers gives the last layer after the final norm only
					check(l+1, x)
				case p == engine.PointFinal:
					check(l, x)
				}
				return nil
			}}
			if err := m.Forward(context.Background(), s); err != nil {
				t.Fatal(err)
			}
			if e := relative(s.Logits[0], want.Logits); e > 1e-5 {
				t.Errorf("logits: relative error %.2g", e)
			}
			if compared != len(want.Norms) {
				t.Errorf("%d states compared, %d recorded", compared, len(want.Norms))
			}
		})
	}
}

func TestTokenizerAndChat(t *testing.T) {
	m := open(t, "testdata/llama")
	text, err := m.Chat.Render(nil, true)
	if err != nil || text != "<|im_start|>assistant\n" {
		t.Errorf("the chat template gives %q and %v", text, err)
	}
	if got := m.Tokenizer.Decode(m.Tokenizer.Encode("<|im_start|>é")); got != "<|im_start|>é" {
		t.Errorf("text comes back as %q", got)
	}
	if bos, ok := m.Tokenizer.BOS(); !ok || bos != 1 {
		t.Errorf("BOS is %d, %v", bos, ok)
	}
}

func TestInspect(t *testing.T) {
	i := open(t, "testdata/mistral").Inspect()
	if i.KVBytesPerToken != 2*2*2*2*12 || i.Group != 2 {
		t.Errorf("%d bytes per token, group %d", i.KVBytesPerToken, i.Group)
	}
	if i.CacheBytes[0].Bytes != 20*i.KVBytesPerToken {
		t.Errorf("a cache of %d tokens takes %d bytes, the window holds 20", i.CacheBytes[0].Tokens, i.CacheBytes[0].Bytes)
	}
	if i.WeightBytes != 4*i.Parameters || i.WeightTypes["F32"] != i.WeightBytes {
		t.Errorf("%d parameters in %d bytes", i.Parameters, i.WeightBytes)
	}
}

// A GGUF made from a folder has the folder's configuration hash; any change of meaning changes it.
func TestConfigHash(t *testing.T) {
	seen := map[string]string{}
	for _, name := range tiny {
		h := model.ConfigHash(open(t, filepath.Join("testdata", name)).Config)
		if other := seen[h]; other != "" {
			t.Errorf("%s and %s have one hash", name, other)
		}
		seen[h] = name
	}
	c := open(t, "testdata/llama3").Config
	want := model.ConfigHash(c)
	plain := c
	plain.RoPE.Scaling = nil
	base, _, _ := plain.Frequencies()
	scaled, _, _ := c.Frequencies()
	divisors := make([]float64, len(base))
	for i := range base {
		divisors[i] = float64(float32(base[i] / scaled[i]))
	}
	c.RoPE.Scaling = &engine.RoPEScaling{Kind: "llama3", Divisors: divisors}
	c.NormEps = float64(float32(c.NormEps))
	if model.ConfigHash(c) != want {
		t.Error("the configuration as GGUF stores it has another hash")
	}
}

func TestFingerprint(t *testing.T) {
	a, again, b := open(t, "testdata/qwen2").Fingerprint(), open(t, "testdata/qwen2").Fingerprint(), open(t, "testdata/qwen3").Fingerprint()
	if a != again {
		t.Error("the fingerprint is not stable")
	}
	if a.Weights == b.Weights || a.Config == b.Config {
		t.Error("two models share a hash")
	}
}

// copyFolder copies a tiny checkpoint and lets edit change its files.
func copyFolder(t *testing.T, name string, edit func(files map[string][]byte)) string {
	t.Helper()
	files := map[string][]byte{}
	entries, err := os.ReadDir(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if files[e.Name()], err = os.ReadFile(filepath.Join("testdata", name, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	edit(files)
	dir := t.TempDir()
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func replace(files map[string][]byte, name, old, new string) {
	files[name] = []byte(strings.Replace(string(files[name]), old, new, 1))
}

func TestRefused(t *testing.T) {
	const weights = "model.safetensors"
	for name, c := range map[string]struct {
		edit  func(map[string][]byte)
		want  error
		names string
	}{
		"unknown architecture": {func(f map[string][]byte) { replace(f, "config.json", `"model_type": "llama"`, `"model_type": "mamba"`) }, model.ErrUnsupported, "mamba"},
		"activation":           {func(f map[string][]byte) { replace(f, "config.json", `"silu"`, `"gelu"`) }, model.ErrUnsupported, "gelu"},
		"bias": {func(f map[string][]byte) {
			replace(f, "config.json", `"attention_bias": false`, `"attention_bias": true`)
		}, model.ErrUnsupported, "attention_bias"},
		"config not JSON": {func(f map[string][]byte) { f["config.json"] = []byte("{") }, model.ErrCorrupt, "config.json"},
		"no heads": {func(f map[string][]byte) {
			replace(f, "config.json", `"num_attention_heads": 4`, `"num_attention_heads": 0`)
		}, model.ErrCorrupt, "num_attention_heads"},
		"too many layers": {func(f map[string][]byte) {
			replace(f, "config.json", `"num_hidden_layers": 2`, `"num_hidden_layers": 60000`)
		}, model.ErrMissingTensor, "60000"},
		"one more layer": {func(f map[string][]byte) {
			replace(f, "config.json", `"num_hidden_layers": 2`, `"num_hidden_layers": 3`)
		}, model.ErrMissingTensor, "model.layers.2."},
		"one layer less": {func(f map[string][]byte) {
			replace(f, "config.json", `"num_hidden_layers": 2`, `"num_hidden_layers": 1`)
		}, model.ErrUnsupported, "model.layers.1."},
		"shape": {func(f map[string][]byte) {
			replace(f, "config.json", `"intermediate_size": 64`, `"intermediate_size": 65`)
		}, model.ErrShape, "mlp.down_proj"},
		"no weights":      {func(f map[string][]byte) { delete(f, weights) }, model.ErrMissingTensor, weights},
		"truncated":       {func(f map[string][]byte) { f[weights] = f[weights][:len(f[weights])-4] }, model.ErrCorrupt, weights},
		"empty":           {func(f map[string][]byte) { f[weights] = nil }, model.ErrCorrupt, weights},
		"header beyond":   {func(f map[string][]byte) { binary.LittleEndian.PutUint64(f[weights], 1<<40) }, model.ErrCorrupt, weights},
		"renamed tensor":  {func(f map[string][]byte) { replace(f, weights, "model.norm.weight", "model.nurm.weight") }, model.ErrMissingTensor, "model.norm.weight"},
		"integer weights": {func(f map[string][]byte) { replace(f, weights, `"dtype":"F32"`, `"dtype":"I32"`) }, model.ErrUnsupported, "I32"},
		"index outside": {func(f map[string][]byte) {
			f["model.safetensors.index.json"] = []byte(`{"weight_map":{"a":"../x.safetensors"}}`)
		}, model.ErrCorrupt, "../x"},
		"tokenizer": {func(f map[string][]byte) { replace(f, "tokenizer.json", `"BPE"`, `"WordPiece"`) }, nil, "WordPiece"},
	} {
		dir := copyFolder(t, "llama", c.edit)
		_, err := model.Open(dir)
		if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.names) || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: got %v, want %v that names %s", name, err, c.want, c.names)
		}
	}
	if _, err := model.Open("testdata/none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing path gives %v", err)
	}
}
