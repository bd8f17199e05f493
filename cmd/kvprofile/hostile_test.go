package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// hostile changes a copy of a model folder.
type hostile struct {
	name  string
	from  string // folder in the model package's testdata
	spoil func(dir string) error
	// want stands in the error.
	want string
}

func replaceIn(file, old, new string) func(string) error {
	return func(dir string) error {
		path := filepath.Join(dir, file)
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if !bytes.Contains(b, []byte(old)) {
			return fmt.Errorf("%s has no %q", file, old)
		}
		return os.WriteFile(path, bytes.Replace(b, []byte(old), []byte(new), 1), 0o644)
	}
}

func write(file, text string) func(string) error {
	return func(dir string) error { return os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644) }
}

func remove(file string) func(string) error {
	return func(dir string) error { return os.Remove(filepath.Join(dir, file)) }
}

func change(file string, f func([]byte) []byte) func(string) error {
	return func(dir string) error {
		path := filepath.Join(dir, file)
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(path, f(b), 0o644)
	}
}

// ggufFile is a GGUF header with what follows it.
func ggufFile(tensors, pairs uint64, rest ...byte) string {
	b := append([]byte("GGUF"), 3, 0, 0, 0)
	b = binary.LittleEndian.AppendUint64(b, tensors)
	b = binary.LittleEndian.AppendUint64(b, pairs)
	return string(append(b, rest...))
}

// Every damaged or foreign model ends with exit code 10 and one line that says why; none with a panic.
func TestHostileModels(t *testing.T) {
	const weights, config = "model.safetensors", "config.json"
	cases := []hostile{
		{"no config", "llama", remove(config), "config.json"},
		{"no weights", "llama", remove(weights), "safetensors"},
		{"broken config", "llama", write(config, `{"model_type": "llama",`), "config.json"},
		{"config is a list", "llama", write(config, `[]`), "config.json"},
		{"config is empty", "llama", write(config, ``), "config.json"},
		{"unknown architecture", "llama", replaceIn(config, `"model_type": "llama"`, `"model_type": "gpt2"`), "gpt2"},
		{"negative layers", "llama", replaceIn(config, `"num_hidden_layers": 2`, `"num_hidden_layers": -2`), "layers"},
		{"a billion layers", "llama", replaceIn(config, `"num_hidden_layers": 2`, `"num_hidden_layers": 1000000000`), "layers"},
		{"more layers than tensors", "llama", replaceIn(config, `"num_hidden_layers": 2`, `"num_hidden_layers": 3`), "missing tensor"},
		{"wrong width", "llama", replaceIn(config, `"hidden_size": 48`, `"hidden_size": 64`), "want"},
		{"wrong vocabulary", "llama", replaceIn(config, `"vocab_size": `, `"vocab_size": 9`), "want"},
		{"odd head", "llama", replaceIn(config, `"head_dim": 12`, `"head_dim": 13`), ""},
		{"heads that do not divide", "llama", replaceIn(config, `"num_attention_heads": 4`, `"num_attention_heads": 3`), ""},
		{"text in a number", "llama", replaceIn(config, `"num_hidden_layers": 2`, `"num_hidden_layers": "two"`), "config.json"},
		{"truncated weights", "llama", change(weights, func(b []byte) []byte { return b[:len(b)/2] }), weights},
		{"truncated header", "llama", change(weights, func(b []byte) []byte { return b[:20] }), weights},
		{"empty weights", "llama", write(weights, ""), weights},
		{"header past the end", "llama", change(weights, func(b []byte) []byte {
			binary.LittleEndian.PutUint64(b, 1<<60)
			return b
		}), weights},
		{"header is no JSON", "llama", change(weights, func(b []byte) []byte { b[8] = '#'; return b }), weights},
		{"renamed tensor", "llama", replaceIn(weights, "model.norm.weight", "model.morn.weight"), "model.norm.weight"},
		{"offsets past the end", "llama", replaceIn(weights, `"data_offsets":[0,`, `"data_offsets":[9,`), weights},
		{"missing shard", "mistral", remove("model-00002-of-00003.safetensors"), "model-00002-of-00003"},
		{"broken index", "mistral", write("model.safetensors.index.json", "{"), "index.json"},
		{"index out of the folder", "mistral", replaceIn("model.safetensors.index.json", "model-00001-of-00003.safetensors", "../../../../../etc/passwd"), ""},
		{"broken tokenizer", "llama", write("tokenizer.json", "{"), "tokenizer"},
		{"unknown tokenizer", "llama", write("tokenizer.json", `{"model": {"type": "Unigram", "vocab": []}}`), "tokenizer"},
		{"broken chat template", "llama", write("chat_template.jinja", "{% for %}"), "template"},
		{"empty folder", "", func(string) error { return nil }, "config.json"},
		{"empty GGUF", "", write("m.gguf", ""), "m.gguf"},
		{"not a GGUF", "", write("m.gguf", "this is not a model at all, whatever its name says"), "m.gguf"},
		{"GGUF of nothing", "", write("m.gguf", ggufFile(0, 0)), "m.gguf"},
		{"GGUF of too many tensors", "", write("m.gguf", ggufFile(1<<40, 0)), "m.gguf"},
		{"GGUF of too many pairs", "", write("m.gguf", ggufFile(0, 1<<62)), "m.gguf"},
		{"GGUF with a string past the end", "", write("m.gguf", ggufFile(0, 1, 255, 255, 255, 255, 255, 255, 255, 127)), "m.gguf"},
	}
	if len(cases) < 30 {
		t.Errorf("%d cases", len(cases))
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "m")
			if c.from == "" {
				if err := os.Mkdir(dir, 0o777); err != nil {
					t.Fatal(err)
				}
			} else if err := os.CopyFS(dir, os.DirFS(testdata+c.from)); err != nil {
				t.Fatal(err)
			}
			if err := c.spoil(dir); err != nil {
				t.Fatal(err)
			}
			name := dir
			if _, err := os.Stat(filepath.Join(dir, "m.gguf")); err == nil {
				name = filepath.Join(dir, "m.gguf")
			}
			var out, log bytes.Buffer
			code := Main(context.Background(), []string{"inspect", name}, strings.NewReader(""), &out, &log, nil)
			first, _, _ := strings.Cut(log.String(), "\n")
			if code != exitModel || out.Len() > 0 || !strings.HasPrefix(first, "kvprofile: error: ") || !strings.Contains(first, c.want) {
				t.Errorf("exit code %d, want %d; want %q in:\n%s%s", code, exitModel, c.want, log.String(), out.String())
			}
			t.Log(first)
		})
	}
}
