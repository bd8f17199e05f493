package defaultmodel_test

import (
	"encoding/json"
	"io/fs"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/defaultmodel"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cpu"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// What is embedded stays small, and is an ordinary folder.
func TestFiles(t *testing.T) {
	total := int64(0)
	files, err := fs.ReadDir(defaultmodel.Files(), ".")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		total += info.Size()
		names = append(names, f.Name())
	}
	if want := []string{"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}; !slices.Equal(names, want) {
		t.Errorf("files %v, want %v", names, want)
	}
	if total > 4_000_000 {
		t.Errorf("%d bytes are more than 4 MB", total)
	}
}

// Tokenizer and logits are those of the official libraries: scripts/fixtures_default.py.
func TestEqualsTransformers(t *testing.T) {
	data, err := os.ReadFile("testdata/transformers.json")
	if err != nil {
		t.Fatal(err)
	}
	var prompts []struct {
		Text           string
		Tokens, Greedy []int32
		Top            [][2]float64
	}
	if err := json.Unmarshal(data, &prompts); err != nil {
		t.Fatal(err)
	}
	files, err := defaultmodel.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	b, err := cpu.New(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	m, err := engine.New(files.Config, files, b)
	if err != nil {
		t.Fatal(err)
	}
	bos, ok := files.Tokenizer.BOS()
	if !ok {
		t.Fatal("no BOS")
	}
	for _, want := range prompts {
		n := len(want.Tokens)
		if ids := append([]int32{bos}, files.Tokenizer.Encode(want.Text)...); !slices.Equal(ids, want.Tokens) {
			t.Errorf("%.40q: tokens %v, want %v", want.Text, ids, want.Tokens)
		}
		logits, generated := enginetest.Greedy(t, m, want.Tokens, len(want.Greedy))
		for _, top := range want.Top {
			if got := logits[int(top[0])]; math.Abs(got-top[1]) > 1e-4 {
				t.Errorf("%d tokens: the logit of %g is %g, want %g", n, top[0], got, top[1])
			}
		}
		if !slices.Equal(generated, want.Greedy) {
			t.Errorf("%d tokens are continued with %v, want %v", n, generated, want.Greedy)
		}
	}
}
