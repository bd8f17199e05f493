//go:build linux

package cuda

import (
	"context"
	"fmt"
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
		flop, bytes = traffic(w)
		rate = fusedRate
		c.fused += flop
	}
	c.bytes += bytes
	c.launches++
	c.seconds += max(flop/rate, bytes/memoryRate) + perLaunch
}

// traffic is the bytes that a kernel reads and writes, each once, but scores twice where a kernel goes through them twice; of the fused
// kernel also its products.
func traffic(w fakecuda.Work) (flop, bytes float64) {
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
		for i := 0.; i < n; i += 64 { // tiles of 64 x 64, of full attention; streaming is counted by flashStreaming
			seen := min(keys, start+i+64)
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

// The time model of docs/gpu.md, from the launches and products that the code makes for one layer, times the layers.
func TestTimeModel(t *testing.T) {
	ctx := context.Background()
	small := llama(1)
	big := small
	big.Heads, big.Hidden, big.Intermediate = 64, 8192, 28672
	lengths := []int{8192}
	if testing.Verbose() {
		lengths = append(lengths, 32768, 131072)
	}
	var total cost
	fake := fakecuda.New(fakecuda.Options{Memory: 139 << 30, Trace: func(w fakecuda.Work) { total.add(w) }})
	b, err := New(Options{Precision: "bf16", Symbols: resolver(fake), Segment: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for _, c := range []struct {
		name   string
		cfg    engine.Config
		layers float64
	}{{"8B", small, 32}, {"70B", big, 80}} {
		m, err := engine.New(c.cfg, flat{c.cfg}, b)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range lengths {
			tokens := make([]int32, n)
			measure := func(what string, f func() error) cost {
				total = cost{}
				if err := f(); err != nil {
					t.Fatal(err)
				}
				got := total
				_, peak := b.Memory()
				t.Logf("%s %s at %d tokens, a layer: %.3g FLOP by cuBLAS, %.3g fused, %.3g bytes, %d launches, %.3g s; all layers %.3g s; %.1f GiB at once",
					c.name, what, n, got.half+got.single, got.fused, got.bytes, got.launches, got.seconds, got.seconds*c.layers, float64(peak)/(1<<30))
				return got
			}
			plain := measure("forward", func() error { return m.Forward(ctx, &engine.Sequence{Tokens: tokens}) })
			measure("forward with statistics", func() error {
				return m.Forward(ctx, &engine.Sequence{Tokens: tokens, Tap: func(int) *engine.Tap { return statistics(n) }})
			})
			// What the products with weights take is known.
			cfg := c.cfg
			weights := cfg.Hidden*(2*cfg.QueryWidth()+2*cfg.KVWidth()) + 3*cfg.Hidden*cfg.Intermediate
			if want := 2 * float64(n) * float64(weights); math.Abs(plain.half-want) > 1e-6*want {
				t.Errorf("%s: %g FLOP in products with weights, want %g", c.name, plain.half, want)
			}
			if causal := 2 * float64(n) * float64(n) * float64(cfg.QueryWidth()); plain.fused < causal || plain.fused > 1.1*causal {
				t.Errorf("%s: %g FLOP in attention, %g are needed", c.name, plain.fused, causal)
			}
			teacher, err := m.Teach(ctx, tokens)
			if err != nil {
				t.Fatal(err)
			}
			gates := [][]float64{make([]float64, cfg.KVHeads)}
			step := measure("student, forward and backward", func() error {
				s, err := m.Study(ctx, tokens, teacher, gates, engine.Mask{Sink: 128, Recent: 256}, []int{n - 1}, 1<<50)
				if err != nil {
					return err
				}
				defer s.Free()
				_, err = s.Backward(ctx, 1)
				return err
			})
			teacher.Free()
			if step.seconds <= 0 {
				t.Error("the student takes no time")
			}
			t.Log(fmt.Sprintf("%s at %d tokens: teacher %.1f GiB, stash %.1f GiB for all layers", c.name, n,
				c.layers*float64(cfg.TeacherBytes(n))/(1<<30), c.layers*float64(cfg.StashBytes(n))/(1<<30)))
		}
		m.Close()
	}
}
