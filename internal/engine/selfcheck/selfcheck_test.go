package selfcheck

import (
	"math"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cpu"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

var small = Size{Rows: 64, Heads: 4, KVHeads: 2, HeadDim: 16}

func TestSound(t *testing.T) {
	b, err := cpu.New(cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	results, err := Run(b, ref.New[float64](), small, 1e-5, 1e-5)
	if err != nil {
		t.Fatal(err)
	}
	if len(results) != len(operations()) {
		t.Errorf("%d results", len(results))
	}
	for _, r := range results {
		if !r.OK() {
			t.Errorf("%+v", r)
		}
	}
}

// broken computes one thing wrongly.
type broken struct{ engine.Backend }

func (b broken) SwiGLU(y, gu engine.Tensor) {
	b.Backend.SwiGLU(y, gu)
	v := make([]float64, y.Rows()*y.Cols())
	b.Download(v, y)
	v[3] = math.NaN()
	b.Upload(y, v)
}

func (b broken) PagedAttention(out, _, _, _ engine.Tensor, _ *engine.Pages, _ [][]engine.Lane, _ *engine.Rotary, _ engine.AttentionSpec) {
}

func TestUnsound(t *testing.T) {
	results, err := Run(broken{ref.New[float64]()}, ref.New[float64](), small, 1e-5, 1e-5)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range results {
		if wrong := r.Operation == "activation" || r.Operation == "decoding over pages"; wrong == r.OK() {
			t.Errorf("%+v", r)
		}
	}
}
