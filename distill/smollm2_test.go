package distill

import (
	"context"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/chat"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cpu"
	"github.com/kvprofile/kvprofile/internal/model"
)

// smollm2 opens the real model, or skips the test.
func smollm2(t testing.TB, threads int) (*model.Model, *engine.Model) {
	t.Helper()
	path := os.Getenv("KVPROFILE_TEST_MODEL")
	if path == "" {
		t.Skip("set KVPROFILE_TEST_MODEL to the GGUF of SmolLM2-135M-Instruct to test with it")
	}
	files, err := model.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { files.Close() })
	backend, err := cpu.New(cpu.Options{Threads: threads})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { backend.Close() })
	m, err := engine.New(files.Config, files, backend)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return files, m
}

// passkeys makes data for a purpose in the model's own chat format.
func passkeys(t testing.TB, files *model.Model, opt datasets.PasskeyOptions) *datasets.Dataset {
	t.Helper()
	ds, err := datasets.Passkeys(files.Tokenizer, chatOf(files), opt)
	if err != nil {
		t.Fatal(err)
	}
	return ds
}

// chatOf adapts the model's template; nil when it has none.
func chatOf(files *model.Model) datasets.Chat {
	if files.Chat == nil {
		return nil
	}
	return func(messages []datasets.Message, generate bool) (string, error) {
		out := make([]chat.Message, len(messages))
		for i, m := range messages {
			out[i] = chat.Message(m)
		}
		return files.Chat.Render(out, generate)
	}
}

// A few steps on the real model give the same gates with 1 and with 2 threads, and with activations computed again.
func TestSmolLM2StepsAreReproducible(t *testing.T) {
	var first *Gates
	for _, c := range []struct {
		threads int
		stash   int64
	}{{1, 1 << 40}, {2, 0}} {
		files, m := smollm2(t, c.threads)
		ds := passkeys(t, files, datasets.PasskeyOptions{Count: 2, Passkeys: 1, Words: 4, Lengths: []int{320}, Seed: 1})
		g, err := Train(context.Background(), m, ds, Options{Steps: 2, LearningRate: 0.1, Regularisation: 0.05, InitialGate: 1, Sink: 16, Recent: 64,
			AllowLowRate: true, StashLimit: c.stash}, nil)
		if err != nil {
			t.Fatal(err)
		}
		g.Meta.Options = nil
		if first == nil {
			first = g
		}
		if !reflect.DeepEqual(first.Values, g.Values) || !reflect.DeepEqual(first.Curve, g.Curve) {
			t.Errorf("%d threads, %d bytes of activations: another result", c.threads, c.stash)
		}
	}
	if first.Curve[1].Loss <= 0 || first.Curve[1].Mean >= 0.95 {
		t.Errorf("training did not move: %+v", first.Curve[1])
	}
}

// The gates that the default recipe found on SmolLM2 (docs/distill.md) lie on both sides of .5, and mean something: at
// equal bytes, letting the top heads stream loses more of the held-out answers' log-probability than keeping them.
func TestSmolLM2GatesMeanSomething(t *testing.T) {
	files, m := smollm2(t, 0)
	g, _, err := LoadDuo(filepath.Join("testdata", "smollm2"))
	if err != nil {
		t.Fatal(err)
	}
	open := Threshold(g.Values, 0.5).Count
	if open < 10 || open > 80 {
		t.Errorf("%d of 90 gates are at .5 or above", open)
	}
	held := passkeys(t, files, datasets.PasskeyOptions{Count: 2, Passkeys: 4, Words: 16, Lengths: []int{1024}, Seed: 5, Purpose: datasets.Certification})
	got, err := MeasureMeaning(context.Background(), m, held.Samples, g.Values, MeaningOptions{Sparsity: 0.75, Sink: 64, Recent: 256, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("full %.3f, kept %.3f, random %.3f, reversed %.3f, all streaming %.3f", got.Full.LogProbability, got.Kept.LogProbability,
		got.Random.LogProbability, got.Reversed.LogProbability, got.Streaming.LogProbability)
	if !got.Holds() || got.Kept.LogProbability < got.Random.LogProbability {
		t.Errorf("keeping the top heads gives %g, reversing them %g, random ones %g", got.Kept.LogProbability, got.Reversed.LogProbability, got.Random.LogProbability)
	}
}
