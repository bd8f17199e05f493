package model_test

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cpu"
)

func randomTokens(n int) []int32 {
	r := rand.New(rand.NewPCG(1, 1))
	out := make([]int32, n)
	for i := range out {
		out[i] = 20 + r.Int32N(49000)
	}
	return out
}

// fullTap asks for all that a record holds.
func fullTap(n int) *engine.Tap {
	return &engine.Tap{Prompt: n, Far: []int{int(math.Ceil(.3 * float64(n))), 64, 256}, Windows: []int{8, 32, 64}, VarianceWindow: 32,
		Recent: []int{64, 256, 1024}, KeysEvery: 16, Masses: []float64{.9, .95, .99}}
}

func BenchmarkSmolLM2(b *testing.B) {
	files := openSmolLM2(b)
	m := loadCPU(b, files, cpu.Options{})
	ctx := context.Background()
	forward := func(b *testing.B, s *engine.Sequence) {
		for b.Loop() {
			if err := m.Forward(ctx, s); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(len(s.Tokens)*b.N)/b.Elapsed().Seconds(), "tokens/s")
	}
	b.Run("prefill-2048", func(b *testing.B) { forward(b, &engine.Sequence{Tokens: randomTokens(2048)}) })
	b.Run("prefill-2048-statistics", func(b *testing.B) {
		forward(b, &engine.Sequence{Tokens: randomTokens(2048), Tap: func(int) *engine.Tap { return fullTap(2048) }})
	})
	b.Run("distill-1024", func(b *testing.B) {
		tokens := randomTokens(1024)
		teacher, err := m.Teach(ctx, tokens)
		if err != nil {
			b.Fatal(err)
		}
		defer teacher.Free()
		gates := make([][]float64, files.Config.Layers)
		for l := range gates {
			gates[l] = []float64{.3, .5, .7}
		}
		for b.Loop() {
			s, err := m.Study(ctx, tokens, teacher, gates, engine.Mask{Sink: 128, Recent: 256}, []int{1000, 1023}, math.MaxInt64)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := s.Backward(ctx, 1); err != nil {
				b.Fatal(err)
			}
			s.Free()
		}
	})
}
