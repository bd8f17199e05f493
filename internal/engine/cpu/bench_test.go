package cpu

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// Benchmarks run on two threads, and report GFLOP/s beside the share of the peak that a loop of independent FMAs
// reaches in the same run: on a shared machine the share says more.

const benchThreads = 2

// peakRate measures the FMA peak in GFLOP/s: the best of several short runs.
func peakRate(k *kernels, threads int) float64 {
	loop, perTurn := peakLoop(k)
	best := 0.0
	for range 5 {
		const turns = 200_000
		begin := time.Now()
		var wg sync.WaitGroup
		for range threads {
			wg.Go(func() { loop(turns) })
		}
		wg.Wait()
		best = max(best, float64(threads)*turns*perTurn/time.Since(begin).Seconds()*1e-9)
	}
	return best
}

func report(b *testing.B, be *Backend, flop float64) {
	b.Helper()
	rate := flop * float64(b.N) / b.Elapsed().Seconds() * 1e-9
	b.ReportMetric(rate, "GFLOP/s")
	b.ReportMetric(100*rate/peakRate(be.k, be.threads), "%peak")
}

func BenchmarkGEMM(b *testing.B) {
	for _, k := range tiers() {
		for _, threads := range []int{1, benchThreads} {
			for _, s := range [][3]int{{2048, 576, 576}, {2048, 3072, 576}, {2048, 576, 1536}, {512, 4096, 4096}, {1, 3072, 576}} {
				m, n, d := s[0], s[1], s[2]
				if k.tier == "go" && m*n*d > 1<<30 {
					continue
				}
				b.Run(fmt.Sprintf("%s/t%d/%dx%dx%d", k.tier, threads, m, n, d), func(b *testing.B) {
					be := newBackend(b, Options{Tier: k.tier, Threads: threads})
					r := enginetest.Seeded(1)
					x, w, y := enginetest.Random(r, m, d).On(be), enginetest.Random(r, n, d).Weight(b, be), be.New(m, n)
					be.MatMul(y, x, w, false)
					for b.Loop() {
						be.MatMul(y, x, w, false)
					}
					report(b, be, 2*float64(m)*float64(n)*float64(d))
				})
			}
		}
	}
}

// profileTap asks for what a profile asks for by default.
func profileTap(n int) *engine.Tap {
	prompt := n - n/32
	t := &engine.Tap{Prompt: prompt, Far: []int{int(math.Ceil(.3 * float64(prompt)))}, Windows: []int{8, 32, 64}, VarianceWindow: 32,
		Recent: []int{16, 64, 256, 1024}, KeysEvery: 16, Masses: []float64{.9, .95, .99}}
	for i := prompt; i < n; i++ {
		t.Answer = append(t.Answer, i)
	}
	return t
}

func BenchmarkAttention(b *testing.B) {
	const n = 2048
	spec := engine.AttentionSpec{Heads: 9, KVHeads: 3, HeadDim: 64}
	streaming := spec
	streaming.Masks = []engine.Mask{{Sink: 128, Recent: 256}, {Sink: 128, Recent: 256}, {Sink: 128, Recent: 256}}
	pairs := func(s engine.AttentionSpec) (p float64) {
		for i := range n {
			sink, recent := visible(&s, s.Mask(0), i)
			p += float64(s.Heads * (sink.hi - sink.lo + recent.hi - recent.lo))
		}
		return p
	}
	for _, k := range tiers() {
		if k.tier == "go" {
			continue
		}
		for _, c := range []struct {
			name     string
			spec     engine.AttentionSpec
			tap      *engine.Tap
			backward bool
		}{{"full", spec, nil, false}, {"taps", spec, profileTap(n), false}, {"streaming", streaming, nil, false},
			{"backward", spec, nil, true}, {"streaming-backward", streaming, nil, true}} {
			b.Run(k.tier+"/"+c.name, func(b *testing.B) {
				be := newBackend(b, Options{Tier: k.tier, Threads: benchThreads})
				r := enginetest.Seeded(2)
				q, kt, v, dout := enginetest.Random(r, n, 576).On(be), enginetest.Random(r, n, 192).On(be), enginetest.Random(r, n, 192).On(be), enginetest.Random(r, n, 576).On(be)
				out, dq, dk, dv := be.New(n, 576), be.New(n, 576), be.New(n, 192), be.New(n, 192)
				be.Attention(out, q, kt, v, c.spec, c.tap)
				products := 2.0
				if c.backward {
					products = 5
				}
				for b.Loop() {
					if c.backward {
						be.AttentionBackward(dq, dk, dv, dout, q, kt, v, out, c.spec)
					} else {
						be.Attention(out, q, kt, v, c.spec, c.tap)
					}
				}
				report(b, be, products*2*64*pairs(c.spec))
			})
		}
	}
}

// smol has the shape of SmolLM2-135M.
var smol = engine.Config{Architecture: "llama", Layers: 30, Heads: 9, KVHeads: 3, HeadDim: 64, Hidden: 576, Intermediate: 1536,
	Vocab: 49152, MaxPosition: 8192, NormEps: 1e-5, RoPE: engine.RoPE{Theta: 100000}, TiedEmbeddings: true}

// noise makes weights of smol's shapes in bfloat16: uniform, with the spread of a trained model's.
type noise struct{}

func (noise) Matrix(name string) (engine.Matrix, error) {
	c := smol
	rows, cols := 1, c.Hidden
	switch {
	case strings.Contains(name, "embed"):
		rows = c.Vocab
	case strings.Contains(name, "q_proj"), strings.Contains(name, "o_proj"):
		rows = c.Hidden
	case strings.Contains(name, "k_proj"), strings.Contains(name, "v_proj"):
		rows = c.KVWidth()
	case strings.Contains(name, "gate_proj"), strings.Contains(name, "up_proj"):
		rows = c.Intermediate
	case strings.Contains(name, "down_proj"):
		rows, cols = c.Hidden, c.Intermediate
	}
	m := engine.Matrix{Name: name, Rows: rows, Cols: cols, DType: dtype.BF16, Data: make([]byte, 2*rows*cols)}
	seed := uint32(len(name))
	scale := float32(math.Sqrt(3 / float64(cols)))
	for i := 0; i < len(m.Data); i += 2 {
		seed = seed*1664525 + 1013904223
		v := scale * (float32(seed>>8)/(1<<23) - 1)
		if rows == 1 {
			v = 1
		}
		u := math.Float32bits(v) >> 16
		m.Data[i], m.Data[i+1] = byte(u), byte(u>>8)
	}
	return m, nil
}

// BenchmarkUnpacked is a prefill with no memory for packed weights: every use converts them, as of a model that is
// larger than memory.
func BenchmarkUnpacked(b *testing.B) {
	be := newBackend(b, Options{Threads: benchThreads, PackLimit: -1})
	m, err := engine.New(smol, noise{}, be)
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	for _, n := range []int{1, 1024} {
		b.Run(fmt.Sprintf("%s/prefill-%d", be.k.tier, n), func(b *testing.B) {
			for b.Loop() {
				if err := m.Forward(context.Background(), &engine.Sequence{Tokens: make([]int32, n)}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkModel runs the whole of a model with SmolLM2-135M's shape.
func BenchmarkModel(b *testing.B) {
	for _, k := range tiers() {
		if k.tier == "go" {
			continue
		}
		be := newBackend(b, Options{Tier: k.tier, Threads: benchThreads})
		m, err := engine.New(smol, noise{}, be)
		if err != nil {
			b.Fatal(err)
		}
		tokens := func(n int) []int32 {
			ids := make([]int32, n)
			for i := range ids {
				ids[i] = int32(i * 7919 % smol.Vocab)
			}
			return ids
		}
		ctx := context.Background()
		run := func(b *testing.B, f func() error) {
			if err := f(); err != nil { // packs the weights
				b.Fatal(err)
			}
			for b.Loop() {
				if err := f(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(peakRate(k, benchThreads), "peak-GFLOP/s")
		}
		for _, n := range []int{1024, 2048} {
			b.Run(fmt.Sprintf("%s/prefill-%d", k.tier, n), func(b *testing.B) {
				run(b, func() error { return m.Forward(ctx, &engine.Sequence{Tokens: tokens(n)}) })
			})
			b.Run(fmt.Sprintf("%s/prefill-taps-%d", k.tier, n), func(b *testing.B) {
				run(b, func() error {
					return m.Forward(ctx, &engine.Sequence{Tokens: tokens(n), Tap: func(int) *engine.Tap { return profileTap(n) }})
				})
			})
		}
		b.Run(k.tier+"/decode-after-1024", func(b *testing.B) {
			cache := m.NewCache(1025)
			defer cache.Free()
			if err := m.Forward(ctx, &engine.Sequence{Tokens: tokens(1024), Cache: cache}); err != nil {
				b.Fatal(err)
			}
			run(b, func() error {
				cache.Truncate(1024)
				return m.Forward(ctx, &engine.Sequence{Tokens: []int32{5}, Cache: cache, LogitRows: []int{0}})
			})
		})
		b.Run(k.tier+"/distill-1024", func(b *testing.B) {
			ids := tokens(1024)
			teacher, err := m.Teach(ctx, ids)
			if err != nil {
				b.Fatal(err)
			}
			defer teacher.Free()
			gates := make([][]float64, smol.Layers)
			for l := range gates {
				gates[l] = []float64{.3, .5, .8}
			}
			rows := []int{1000, 1010, 1020}
			run(b, func() error {
				s, err := m.Study(ctx, ids, teacher, gates, engine.Mask{Sink: 128, Recent: 256}, rows, 4<<30)
				if err != nil {
					return err
				}
				defer s.Free()
				_, err = s.Backward(ctx, 1)
				return err
			})
		})
		m.Close()
	}
}
