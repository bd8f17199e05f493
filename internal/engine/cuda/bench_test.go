//go:build linux

package cuda

import (
	"context"
	"fmt"
	"testing"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
)

// The benchmarks are for a real GPU: KVPROFILE_TEST_CUDA names it. scripts/gpu.sh runs them.
func benchmarked(b *testing.B) *Backend {
	if _, ok := realDevice(b); !ok {
		b.Skip("KVPROFILE_TEST_CUDA is not set")
	}
	return newBackend(b, "bf16")
}

// wait lets the GPU finish.
func (b *Backend) wait() { b.must(b.dev.sync) }

// llama is a model of Llama-3-8B's width with fewer layers and a small vocabulary.
func llama(layers int) engine.Config {
	return engine.Config{Architecture: "llama", Layers: layers, Heads: 32, KVHeads: 8, HeadDim: 128, Hidden: 4096, Intermediate: 14336,
		Vocab: 1024, MaxPosition: 131072, NormEps: 1e-5, RoPE: engine.RoPE{Theta: 500000}}
}

// flat are weights that are all about the same small number, or zero.
type flat struct {
	c    engine.Config
	zero bool
}

func (w flat) Matrix(name string) (engine.Matrix, error) {
	shapes := map[string][2]int{
		"model.embed_tokens.weight": {w.c.Vocab, w.c.Hidden}, "lm_head.weight": {w.c.Vocab, w.c.Hidden}, "model.norm.weight": {1, w.c.Hidden},
	}
	for l := range w.c.Layers {
		p := fmt.Sprintf("model.layers.%d.", l)
		for part, shape := range map[string][2]int{
			"input_layernorm": {1, w.c.Hidden}, "post_attention_layernorm": {1, w.c.Hidden},
			"self_attn.q_proj": {w.c.QueryWidth(), w.c.Hidden}, "self_attn.k_proj": {w.c.KVWidth(), w.c.Hidden}, "self_attn.v_proj": {w.c.KVWidth(), w.c.Hidden},
			"self_attn.o_proj": {w.c.Hidden, w.c.QueryWidth()}, "mlp.gate_proj": {w.c.Intermediate, w.c.Hidden}, "mlp.up_proj": {w.c.Intermediate, w.c.Hidden},
			"mlp.down_proj": {w.c.Hidden, w.c.Intermediate},
		} {
			shapes[p+part+".weight"] = shape
		}
	}
	s, ok := shapes[name]
	if !ok {
		return engine.Matrix{}, fmt.Errorf("no tensor %s", name)
	}
	data := make([]byte, 2*s[0]*s[1])
	for i := 0; i < len(data) && !w.zero; i += 2 {
		data[i], data[i+1] = byte(i>>3), 0x3c // about 0.01
	}
	return engine.Matrix{Name: name, Rows: s[0], Cols: s[1], DType: dtype.BF16, Data: data}, nil
}

func BenchmarkMatMul(bench *testing.B) {
	b := benchmarked(bench)
	for _, s := range [][3]int{{2048, 4096, 4096}, {8192, 4096, 4096}, {8192, 28672, 4096}, {8192, 4096, 14336}} {
		bench.Run(fmt.Sprint(s), func(bench *testing.B) {
			w, err := b.Load(engine.Matrix{Name: "w", Rows: s[1], Cols: s[2], DType: dtype.BF16, Data: make([]byte, 2*s[1]*s[2])})
			if err != nil {
				bench.Fatal(err)
			}
			x, y := b.New(s[0], s[2]), b.New(s[0], s[1])
			for bench.Loop() {
				b.MatMul(y, x, w, false)
				b.wait()
			}
			bench.ReportMetric(2*float64(s[0]*s[1]*s[2])*float64(bench.N)/bench.Elapsed().Seconds()/1e12, "TFLOP/s")
			b.Free(x, y)
			b.Unload(w)
		})
	}
}

// statistics are those that a profile records.
func statistics(n int) *engine.Tap {
	return &engine.Tap{Prompt: n - 64, Far: []int{n * 3 / 10, 614}, Windows: []int{8, 32, 64}, VarianceWindow: 32, Recent: []int{16, 64, 256, 1024},
		Answer: []int{n - 64, n - 32}, KeysEvery: 16, Masses: []float64{.9, .95, .99}, Map: 128}
}

// Milliseconds of one layer's attention of Llama-3-8B.
func BenchmarkAttention(bench *testing.B) {
	b := benchmarked(bench)
	c := llama(1)
	spec := engine.AttentionSpec{Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim}
	streaming := spec
	for range c.KVHeads {
		streaming.Masks = append(streaming.Masks, engine.Mask{Sink: 128, Recent: 256})
	}
	for _, n := range []int{2048, 8192, 32768} {
		q, k, v, out := b.New(n, c.QueryWidth()), b.New(n, c.KVWidth()), b.New(n, c.KVWidth()), b.New(n, c.QueryWidth())
		dq, dk, dv := b.New(n, c.QueryWidth()), b.New(n, c.KVWidth()), b.New(n, c.KVWidth())
		for name, run := range map[string]func(){
			"full":               func() { b.Attention(out, q, k, v, spec, nil) },
			"statistics":         func() { b.Attention(out, q, k, v, spec, statistics(n)) },
			"streaming":          func() { b.Attention(out, q, k, v, streaming, nil) },
			"streaming backward": func() { b.AttentionBackward(dq, dk, dv, out, q, k, v, out, streaming) },
		} {
			bench.Run(fmt.Sprintf("%s/%d", name, n), func(bench *testing.B) {
				for bench.Loop() {
					run()
					b.wait()
				}
			})
		}
		b.Free(q, k, v, out, dq, dk, dv)
	}
}

// A forward pass with and without statistics and a step of distillation of four layers of Llama-3-8B: times eight is the model.
func BenchmarkLayers(bench *testing.B) {
	b := benchmarked(bench)
	ctx, c := context.Background(), llama(4)
	m, err := engine.New(c, flat{c: c}, b)
	if err != nil {
		bench.Fatal(err)
	}
	defer m.Close()
	gates := make([][]float64, c.Layers)
	for l := range gates {
		gates[l] = make([]float64, c.KVHeads)
	}
	for _, n := range []int{2048, 8192, 32768} {
		tokens := make([]int32, n)
		for i := range tokens {
			tokens[i] = int32(i * 7 % c.Vocab)
		}
		run := func(name string, f func() error) {
			bench.Run(fmt.Sprintf("%s/%d", name, n), func(bench *testing.B) {
				for bench.Loop() {
					if err := f(); err != nil {
						bench.Fatal(err)
					}
					b.wait()
				}
				_, peak := b.Memory()
				bench.ReportMetric(float64(peak)/(1<<30), "peak-GiB")
			})
		}
		run("prefill", func() error { return m.Forward(ctx, &engine.Sequence{Tokens: tokens}) })
		run("statistics", func() error {
			return m.Forward(ctx, &engine.Sequence{Tokens: tokens, Tap: func(int) *engine.Tap { return statistics(n) }})
		})
		teacher, err := m.Teach(ctx, tokens)
		if err != nil {
			bench.Fatal(err)
		}
		run("distillation step", func() error {
			s, err := m.Study(ctx, tokens, teacher, gates, engine.Mask{Sink: 128, Recent: 256}, []int{n - 1}, 1<<40)
			if err != nil {
				return err
			}
			defer s.Free()
			_, err = s.Backward(ctx, 1)
			return err
		})
		teacher.Free()
	}
}
