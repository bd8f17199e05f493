// Package model opens a model from a Hugging Face folder or a GGUF file: its configuration, its weights as views of
// the mapped files, its tokenizer and chat template, and the hashes that identify it.
package model

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/kvprofile/kvprofile/internal/chat"
	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/gguf"
	"github.com/kvprofile/kvprofile/internal/tokenizer"
)

// What is wrong with a model. Every error of Open wraps one of these, or an error of the file system.
var (
	ErrUnsupported   = errors.New("unsupported model")
	ErrCorrupt       = errors.New("corrupt model file")
	ErrMissingTensor = errors.New("missing tensor")
	ErrShape         = errors.New("wrong tensor shape")
)

// Model is an open model. Close unmaps its files; nothing of it may be used afterwards.
type Model struct {
	Path   string
	Name   string // the folder's or file's name, or general.name of a GGUF
	Kind   string // "huggingface" or "gguf"
	Config engine.Config
	EOS    []int32 // ids that end a generation, where the files say so

	Tokenizer *tokenizer.Tokenizer // nil when the folder has none
	Chat      *chat.Template       // nil when the model has none

	tensors map[string]tensor
	maps    []mapping

	hashed sync.Once // print
	print  Fingerprint
}

// tensor is a stored tensor under its canonical name.
type tensor struct {
	file   string
	dtype  dtype.DType
	shape  []int
	data   []byte
	rowMap []int32
}

// Open reads the model at path: a folder with config.json and safetensors, a GGUF file, or a folder with one GGUF and
// no config.json.
func Open(path string) (*Model, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	m := &Model{Path: path, tensors: map[string]tensor{}}
	switch file := onlyGGUF(path); {
	case !info.IsDir():
		err = m.openGGUF(path)
	case file != "":
		err = m.openGGUF(file)
	default:
		m.Name = filepath.Base(path)
		err = m.openHuggingFace(folder{os.DirFS(path), path})
	}
	return m.opened(err)
}

// OpenFS reads a Hugging Face folder from a file system, such as one that is embedded in the program. The weights are
// held in memory. name stands for the path and is the model's name.
func OpenFS(fsys fs.FS, name string) (*Model, error) {
	m := &Model{Path: name, Name: name, tensors: map[string]tensor{}}
	return m.opened(m.openHuggingFace(folder{FS: fsys}))
}

// opened ends the opening of a model: it checks what was read, unless reading failed.
func (m *Model) opened(err error) (*Model, error) {
	if err == nil {
		err = m.check()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("model %s: %w", m.Path, err), m.Close())
	}
	return m, nil
}

// onlyGGUF is the path of a folder's GGUF, when it has exactly one and no config.json: what the hub's cache holds of a
// repository of GGUFs from which one was fetched.
func onlyGGUF(dir string) string {
	if _, err := os.Stat(filepath.Join(dir, "config.json")); !errors.Is(err, os.ErrNotExist) {
		return ""
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ""
	}
	found := ""
	for _, e := range entries {
		if strings.EqualFold(filepath.Ext(e.Name()), ".gguf") {
			if found != "" {
				return ""
			}
			found = filepath.Join(dir, e.Name())
		}
	}
	return found
}

// Close unmaps the files.
func (m *Model) Close() error {
	var errs []error
	for _, f := range m.maps {
		errs = append(errs, f.close())
	}
	m.maps, m.tensors = nil, nil
	return errors.Join(errs...)
}

func (m *Model) mapFile(path string) ([]byte, error) {
	f, err := openMapping(path)
	if err != nil {
		return nil, err
	}
	m.maps = append(m.maps, f)
	return f.data, nil
}

func (m *Model) openGGUF(path string) error {
	m.Kind = "gguf"
	data, err := m.mapFile(path)
	if err != nil {
		return err
	}
	f, err := gguf.Parse(data)
	switch {
	case errors.Is(err, gguf.ErrUnsupported):
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	case err != nil:
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if m.Config, err = ggufConfig(f); err != nil {
		return err
	}
	if err := m.Config.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	m.Name = strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
	var queryRows, keyRows []int32
	if m.Config.Architecture == "llama" || m.Config.Architecture == "mistral" {
		queryRows, keyRows = pairedRows(m.Config.Heads, m.Config.HeadDim), pairedRows(m.Config.KVHeads, m.Config.HeadDim)
	}
	for _, t := range f.Tensors {
		name := canonicalName(t.Name)
		if name == "" {
			if t.Name == "rope_freqs.weight" { // already in the configuration
				continue
			}
			return fmt.Errorf("%w: %s: tensor %s, which %s does not have", ErrUnsupported, filepath.Base(path), t.Name, m.Config.Architecture)
		}
		s := tensor{file: filepath.Base(path), dtype: t.DType, shape: t.Shape, data: t.Data}
		switch {
		case strings.Contains(name, "q_proj"):
			s.rowMap = queryRows
		case strings.Contains(name, "k_proj"):
			s.rowMap = keyRows
		}
		m.tensors[name] = s
	}
	return m.vocabularyOf(f)
}

// addEOS notes ids that end a generation, each once.
func (m *Model) addEOS(ids ...int32) {
	for _, id := range ids {
		if id >= 0 && int(id) < m.Config.Vocab && !slices.Contains(m.EOS, id) {
			m.EOS = append(m.EOS, id)
		}
	}
}

// withinReason refuses sizes that no model has, before memory is set aside for them: a header is cheap to forge. What
// passes is compared with the tensors later.
func withinReason(c engine.Config) error {
	for _, f := range []struct {
		name        string
		value, most int
	}{{"layers", c.Layers, 1 << 16}, {"query heads", c.Heads, 1 << 14}, {"KV heads", c.KVHeads, 1 << 14}, {"dimensions of a head", c.HeadDim, 1 << 14},
		{"values in the hidden state", c.Hidden, 1 << 20}, {"values in the MLP", c.Intermediate, 1 << 22}, {"tokens in the vocabulary", c.Vocab, 1 << 24},
		{"values in the query heads", c.QueryWidth(), 1 << 20}} {
		if f.value < 0 || f.value > f.most {
			return fmt.Errorf("%w: %d %s (at most %d)", ErrCorrupt, f.value, f.name, f.most)
		}
	}
	return nil
}

// wanted lists the tensors that the configuration needs, with their shapes.
func (m *Model) wanted() map[string][]int {
	c := m.Config
	want := map[string][]int{"model.embed_tokens.weight": {c.Vocab, c.Hidden}, "model.norm.weight": {c.Hidden}}
	if !c.TiedEmbeddings {
		want["lm_head.weight"] = []int{c.Vocab, c.Hidden}
	}
	for l := range c.Layers {
		add := func(name string, shape ...int) { want[fmt.Sprintf("model.layers.%d.%s", l, name)] = shape }
		add("input_layernorm.weight", c.Hidden)
		add("post_attention_layernorm.weight", c.Hidden)
		add("self_attn.q_proj.weight", c.QueryWidth(), c.Hidden)
		add("self_attn.k_proj.weight", c.KVWidth(), c.Hidden)
		add("self_attn.v_proj.weight", c.KVWidth(), c.Hidden)
		add("self_attn.o_proj.weight", c.Hidden, c.QueryWidth())
		add("mlp.gate_proj.weight", c.Intermediate, c.Hidden)
		add("mlp.up_proj.weight", c.Intermediate, c.Hidden)
		add("mlp.down_proj.weight", c.Hidden, c.Intermediate)
		if c.QKVBias {
			add("self_attn.q_proj.bias", c.QueryWidth())
			add("self_attn.k_proj.bias", c.KVWidth())
			add("self_attn.v_proj.bias", c.KVWidth())
		}
		if c.QKNorm {
			add("self_attn.q_norm.weight", c.HeadDim)
			add("self_attn.k_norm.weight", c.HeadDim)
		}
	}
	return want
}

// check compares the tensors that are there with those that the configuration needs, in order of their names.
func (m *Model) check() error {
	// A header is cheap to forge: without a bound, a configuration of a billion layers would be listed in full.
	if n := len(m.tensors); m.Config.Layers > n {
		return fmt.Errorf("%w: %d layers, but only %d tensors", ErrMissingTensor, m.Config.Layers, n)
	}
	want := m.wanted()
	names := make([]string, 0, len(want))
	for name := range want {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		t, ok := m.tensors[name]
		if !ok {
			return fmt.Errorf("%w: %s", ErrMissingTensor, name)
		}
		if !slices.Equal(t.shape, want[name]) {
			return fmt.Errorf("%w: %s: tensor %s is %v, want %v", ErrShape, t.file, name, t.shape, want[name])
		}
	}
	for name := range m.tensors {
		if _, ok := want[name]; !ok && !(name == "lm_head.weight" && m.Config.TiedEmbeddings) {
			return fmt.Errorf("%w: tensor %s, which %s does not have", ErrUnsupported, name, m.Config.Architecture)
		}
	}
	return nil
}

// Matrix implements engine.Weights.
func (m *Model) Matrix(name string) (engine.Matrix, error) {
	t, ok := m.tensors[name]
	if !ok {
		return engine.Matrix{}, fmt.Errorf("model %s: %w: %s", m.Path, ErrMissingTensor, name)
	}
	rows, cols := 1, t.shape[len(t.shape)-1]
	if len(t.shape) == 2 {
		rows = t.shape[0]
	}
	return engine.Matrix{Name: name, Rows: rows, Cols: cols, DType: t.dtype, Data: t.data, RowMap: t.rowMap}, nil
}
