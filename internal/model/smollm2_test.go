package model_test

import (
	"context"
	"encoding/json"
	"os"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cpu"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/model"
)

// openSmolLM2 opens the real model that tests use; scripts/smollm2.sh fetches it.
func openSmolLM2(t testing.TB) *model.Model {
	t.Helper()
	path := os.Getenv("KVPROFILE_TEST_MODEL")
	if path == "" {
		t.Skip("set KVPROFILE_TEST_MODEL to the path that scripts/smollm2.sh prints")
	}
	return open(t, path)
}

func loadCPU(t testing.TB, files *model.Model, options cpu.Options) *engine.Model {
	t.Helper()
	b, err := cpu.New(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	m, err := engine.New(files.Config, files, b)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// The GGUF run here equals its dequantised weights run by transformers: scripts/fixtures_models.py.
func TestSmolLM2EqualsTransformers(t *testing.T) {
	files := openSmolLM2(t)
	data, err := os.ReadFile("testdata/smollm2.json")
	if err != nil {
		t.Fatal(err)
	}
	var prompts []struct {
		recorded
		Top    [][2]float64
		Greedy []int32
	}
	if err := json.Unmarshal(data, &prompts); err != nil {
		t.Fatal(err)
	}
	m := loadCPU(t, files, cpu.Options{})
	ctx := context.Background()
	for _, want := range prompts {
		n := len(want.Tokens)
		check := func(state int, x engine.Tensor) {
			rows, ok := want.Hidden[state]
			if !ok {
				return
			}
			values := make([]float64, x.Cols())
			for i, r := range want.Rows {
				m.Backend.Download(values, m.Backend.Slice(x, r, r+1))
				var every []float64
				for j := 0; j < len(values); j += 9 {
					every = append(every, values[j])
				}
				if e := relative(every, rows[i]); e > 1e-4 {
					t.Errorf("%d tokens, hidden states %d, row %d: relative error %.2g", n, state, r, e)
				}
			}
		}
		s := &engine.Sequence{Tokens: want.Tokens, LogitRows: []int{n - 1}, Observe: func(p engine.Point, l int, x engine.Tensor) error {
			switch {
			case p == engine.PointEmbedding:
				check(0, x)
			case p == engine.PointLayer && l < 29:
				check(l+1, x)
			case p == engine.PointFinal:
				check(l, x)
			}
			return nil
		}}
		if err := m.Forward(ctx, s); err != nil {
			t.Fatal(err)
		}
		var got, logits []float64
		for _, top := range want.Top {
			got, logits = append(got, s.Logits[0][int(top[0])]), append(logits, top[1])
		}
		if e := relative(got, logits); e > 1e-4 {
			t.Errorf("%d tokens: the top logits have relative error %.2g", n, e)
		}
		if want.Greedy == nil {
			continue
		}
		// The same continuation, token by token from a cache.
		_, generated := enginetest.Greedy(t, m, want.Tokens, len(want.Greedy))
		if !slices.Equal(generated, want.Greedy) {
			t.Errorf("%d tokens are continued with %v, want %v", n, generated, want.Greedy)
		}
	}
}
