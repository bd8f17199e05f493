//go:build linux

package cuda

import (
	"context"
	"math"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/fakecuda"
)

// cost is what work takes: floating-point operations by where they run, bytes of device memory, launches, and by the model of docs/gpu.md
// the seconds.
type cost struct {
	half, single, fused, bytes float64
	launches                   int
	seconds                    float64
	streaming                  bool // attention is, with 128 first and 256 last tokens
}

// The machine of the model, an H200: rates of products in bfloat16 by cuBLAS, of those in the fused kernel, of float32, and of memory.
const (
	halfRate   = 700e12
	fusedRate  = 380e12
	singleRate = 45e12
	memoryRate = 0.8 * 4.3e12
	perLaunch  = 3e-6
)

func (c *cost) add(w fakecuda.Work) {
	var flop, rate, bytes float64
	if w.Kernel == "" {
		m, n, k, z := float64(w.M), float64(w.N), float64(w.K), float64(max(1, w.Batch))
		flop, rate, bytes = 2*m*n*k*z, singleRate, z*(4*(m*k+k*n)+4*m*n)
		if w.Half {
			rate, bytes = halfRate, z*(2*(m*k+k*n)+4*m*n)
			c.half += flop
		} else {
			c.single += flop
		}
		if w.Accumulate {
			bytes += 4 * m * n * z
		}
	} else {
		flop, bytes = traffic(w, c.streaming)
		rate = fusedRate
		c.fused += flop
	}
	c.bytes += bytes
	c.launches++
	c.seconds += max(flop/rate, bytes/memoryRate) + perLaunch
}

// traffic is the bytes that a kernel reads and writes, each once, but scores twice where a kernel goes through them twice; of the fused
// kernel also its products.
func traffic(w fakecuda.Work, streaming bool) (flop, bytes float64) {
	rows, arg := float64(w.Grid[0]), func(i int) float64 { return float64(int32(w.Params[i])) }
	all := float64(w.Grid[0]) * float64(w.Grid[1])
	last := float64(w.Params[len(w.Params)-1])
	switch w.Kernel {
	case "kv_embed_bf16":
		return 0, rows * 6 * arg(3)
	case "kv_embed_f32":
		return 0, rows * 8 * arg(3)
	case "kv_add_bias":
		return 0, rows * 8 * arg(2)
	case "kv_to_bf16":
		return 0, 6 * last
	case "kv_rmsnorm":
		return 0, rows * 8 * arg(3)
	case "kv_rmsnorm_back":
		return 0, rows * 16 * arg(4)
	case "kv_split", "kv_join":
		return 0, rows * 8 * (arg(4) + arg(5) + arg(6))
	case "kv_rope":
		return 0, rows * 16 * arg(3) * arg(4)
	case "kv_merge":
		return 0, rows * 12 * arg(4)
	case "kv_merge_back":
		return 0, all * 16 * arg(7)
	case "kv_swiglu":
		return 0, rows * 12 * arg(2)
	case "kv_swiglu_back":
		return 0, rows * 20 * arg(3)
	case "kv_finite":
		return 0, rows * 4 * arg(2)
	case "kv_norms":
		return 0, rows * 4 * arg(2) * arg(3)
	case "kv_squared_error":
		return 0, rows * 12 * arg(6)
	case "kv_pack_bf16":
		return 0, all * 6 * arg(6)
	case "kv_pack_f32":
		return 0, all * 8 * arg(6)
	case "kv_unpack":
		return 0, all * 8 * arg(5)
	case "kv_softmax": // two readings; what is written depends on the precision
		written := 4.
		if w.Params[1] != 0 {
			written = 2 + 4*arg(2)
		}
		return 0, rows * (8 + written) * arg(4)
	case "kv_softmax_tap":
		written := 4.
		if w.Params[1] != 0 {
			written = 6
		}
		return 0, rows * (8 + written) * arg(9)
	case "kv_softmax_back":
		return 0, rows * 18 * arg(4)
	case "kv_columns":
		return 0, float64(w.Grid[1]) * 4 * arg(14) * arg(13)
	case "kv_map", "kv_columns_of":
		return 0, 0
	case "kv_moments":
		return 0, float64(w.Grid[1]) * 4 * (arg(4) - arg(3)) * arg(7)
	case "kv_holders": // the row stays in the second level cache
		return 0, all * 4 * arg(7)
	case "kv_flash_columns_64", "kv_flash_columns_128", "kv_flash_tap_64", "kv_flash_tap_128":
		d, at, factor := headDim(w.Kernel), 5, 4.
		if strings.HasPrefix(w.Kernel, "kv_flash_columns") {
			at, factor = 7, 2
		}
		n, heads, kvHeads := arg(at), arg(at+1), arg(at+2)
		tiles := math.Ceil(n / 64)
		return factor * d * 64 * 64 * tiles * (tiles + 1) / 2 * heads, 6*n*heads*d + 4*n*kvHeads*d
	case "kv_flash_64", "kv_flash_128":
		d := headDim(w.Kernel)
		n, keys, start, heads, kvHeads, window := arg(5), arg(6), arg(7), arg(8), arg(9), arg(10)
		pairs := 0.
		for i := 0.; i < n; i += 64 { // tiles of 64 x 64
			seen := min(keys, start+i+64)
			if streaming {
				seen = min(seen, 128+256+2*64)
			}
			if window > 0 {
				seen = min(seen, window+64)
			}
			pairs += 64 * math.Ceil(seen/64) * 64
		}
		return 4 * d * pairs * heads, 6*n*heads*d + 4*keys*kvHeads*d
	}
	panic("no rule for " + w.Kernel)
}

func headDim(kernel string) float64 {
	if strings.HasSuffix(kernel, "128") {
		return 128
	}
	return 64
}

// The time model of docs/gpu.md, from the launches and products that the code makes for two layers less those for one. With -v it goes up to
// 131,072 tokens and prints the table.
func TestTimeModel(t *testing.T) {
	small := llama(0)
	big := small
	big.Heads, big.Hidden, big.Intermediate = 64, 8192, 28672
	lengths := []int{8192}
	if testing.Verbose() {
		lengths = append(lengths, 32768, 131072)
	}
	t.Log("| model | tokens | forward, s | with statistics, s | distillation step, s | memory beside the weights: forward, GiB | step, GiB |")
	for _, c := range []struct {
		name   string
		cfg    engine.Config
		layers int
	}{{"8B", small, 32}, {"70B", big, 80}} {
		for _, n := range lengths {
			cfg := c.cfg
			cfg.Layers = c.layers
			// Activations that do not fit beside the teacher's and the weights are computed again.
			kept := cfg.StashBytes(n)
			again := cfg.TeacherBytes(n)+kept > 100<<30
			if again {
				kept = kept/int64(c.layers) + 4*int64(n)*int64(c.layers*cfg.Hidden)
			}
			one, two := modelled(t, c.cfg, 1, n, again), modelled(t, c.cfg, 2, n, again)
			all := func(x func(r *record) float64) float64 { return x(&one) + float64(c.layers-1)*(x(&two)-x(&one)) }
			forward := all(func(r *record) float64 { return r.forward.seconds })
			step := forward + all(func(r *record) float64 { return r.step.seconds })
			const gib = 1 << 30
			t.Logf("| %s | %d | %.2f | %.2f | %.2f | %.1f | %.1f |", c.name, n, forward, all(func(r *record) float64 { return r.statistics.seconds }), step,
				float64(one.peak)/gib, float64(one.peak+cfg.TeacherBytes(n)+kept)/gib)
			// What the products need is known.
			layer := float64(cfg.Hidden*(2*cfg.QueryWidth()+2*cfg.KVWidth()) + 3*cfg.Hidden*cfg.Intermediate)
			if got, want := two.forward.half-one.forward.half, 2*float64(n)*layer; math.Abs(got-want) > 1e-6*want {
				t.Errorf("%s: %g FLOP a layer in products with weights, want %g", c.name, got, want)
			}
			if got, causal := two.forward.fused-one.forward.fused, 2*float64(n)*float64(n)*float64(cfg.QueryWidth()); got < causal || got > 1.1*causal {
				t.Errorf("%s: %g FLOP a layer in attention, %g are needed", c.name, got, causal)
			}
			// The gradient of a layer's products with weights is as much as they are; attention is streaming, and computed thrice.
			if got, products := two.step.half-one.step.half, 4*float64(n)*layer; !again && (got < products || got > 1.15*products) {
				t.Errorf("%s: %g FLOP a layer in a step, %g are in products with weights", c.name, got, products)
			}
		}
	}
}

// record is what a model of a few layers takes.
type record struct {
	forward, statistics, step cost
	peak                      int64 // of a forward pass beside the weights, bytes
}

// modelled runs a model without computing anything.
func modelled(t *testing.T, cfg engine.Config, layers, n int, again bool) (r record) {
	ctx := context.Background()
	cfg.Layers = layers
	var now cost
	fake := machine(t, fakecuda.Options{Memory: 1 << 42, Trace: func(w fakecuda.Work) { now.add(w) }})
	b, err := New(Options{Precision: "bf16", Symbols: resolver(fake), Segment: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	m, err := engine.New(cfg, flat{cfg, true}, b)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	weights, _ := b.Memory()
	tokens := make([]int32, n)
	measure := func(to *cost, streaming bool, f func() error) {
		t.Helper()
		now = cost{streaming: streaming}
		if err := f(); err != nil {
			t.Fatal(err)
		}
		*to = now
	}
	measure(&r.forward, false, func() error { return m.Forward(ctx, &engine.Sequence{Tokens: tokens}) })
	_, peak := b.Memory()
	r.peak = peak - weights
	measure(&r.statistics, false, func() error {
		return m.Forward(ctx, &engine.Sequence{Tokens: tokens, Tap: func(int) *engine.Tap { return statistics(n) }})
	})
	teacher, err := m.Teach(ctx, tokens)
	if err != nil {
		t.Fatal(err)
	}
	defer teacher.Free()
	gates := make([][]float64, layers)
	for l := range gates {
		gates[l] = make([]float64, cfg.KVHeads)
	}
	limit := int64(math.MaxInt64)
	if again {
		limit = 0
	}
	measure(&r.step, true, func() error {
		s, err := m.Study(ctx, tokens, teacher, gates, engine.Mask{Sink: 128, Recent: 256}, []int{n - 1}, limit)
		if err != nil {
			return err
		}
		defer s.Free()
		_, err = s.Backward(ctx, 1)
		return err
	})
	return r
}
