//go:build linux

package cuda

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/fakecuda"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// realDevice is the GPU that the tests run on when KVPROFILE_TEST_CUDA names its number: the same tests then check silicon.
func realDevice(t testing.TB) (index int, ok bool) {
	v, ok := os.LookupEnv("KVPROFILE_TEST_CUDA")
	if !ok {
		return 0, false
	}
	index, err := strconv.Atoi(v)
	if err != nil {
		t.Fatalf("KVPROFILE_TEST_CUDA=%s is no number of a GPU", v)
	}
	return index, true
}

// newBackend opens a simulated GPU, or the real one. A simulated one checks at the end that nothing went wrong and nothing is left.
func newBackend(t testing.TB, precision string) *Backend {
	if index, ok := realDevice(t); ok {
		symbols, err := Libraries(os.Getenv("KVPROFILE_TEST_CUBLAS"))
		if err != nil {
			t.Fatal(err)
		}
		b, err := New(Options{Device: index, Precision: precision, Symbols: symbols})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := b.Close(); err != nil {
				t.Error(err)
			}
		})
		return b
	}
	b, _ := simulated(t, fakecuda.Options{}, Options{Precision: precision, Segment: -1, Staging: 1 << 16})
	return b
}

// machines are simulated machines that nobody uses: each takes callbacks of the process for good, of which there are 2,000.
var machines struct {
	sync.Mutex
	idle []*fakecuda.Driver
}

// machine returns a simulated machine for the length of a test.
func machine(t testing.TB, o fakecuda.Options) *fakecuda.Driver {
	machines.Lock()
	defer machines.Unlock()
	var fake *fakecuda.Driver
	if n := len(machines.idle); n > 0 {
		fake, machines.idle = machines.idle[n-1], machines.idle[:n-1]
		fake.Reset(o)
	} else {
		fake = fakecuda.New(o)
	}
	t.Cleanup(func() {
		machines.Lock()
		defer machines.Unlock()
		machines.idle = append(machines.idle, fake)
	})
	return fake
}

func simulated(t testing.TB, of fakecuda.Options, o Options) (*Backend, *fakecuda.Driver) {
	fake := machine(t, of)
	o.Symbols = resolver(fake)
	b, err := New(o)
	if err != nil {
		t.Fatal(err, fake.Err())
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
		if err := fake.Err(); err != nil {
			t.Error(err)
		}
		if err := fake.Leaks(); err != nil {
			t.Error(err)
		}
	})
	return b, fake
}

func resolver(f *fakecuda.Driver) Symbols {
	return func(_ Library, name string) (uintptr, error) { return f.Symbol(name) }
}

// bound is the relative error that a precision allows where float32 allows f32.
func bound(b *Backend, f32 float64) float64 {
	if b.half {
		return 1e-2
	}
	return f32
}

// both runs a test in each precision.
func both(t *testing.T, f func(t *testing.T, b *Backend)) {
	for _, precision := range []string{"f32", "bf16"} {
		t.Run(precision, func(t *testing.T) { f(t, newBackend(t, precision)) })
	}
}

func TestMatMul(t *testing.T) {
	both(t, func(t *testing.T, b *Backend) {
		r := enginetest.Seeded(1)
		for _, s := range [][3]int{{1, 1, 1}, {1, 33, 7}, {2, 32, 16}, {13, 31, 5}, {15, 65, 77}, {29, 100, 96}} {
			enginetest.MatMul(t, fmt.Sprintf("product %v", s), b, bound(b, 1e-6), r, s[0], s[1], s[2])
		}
	})
}

// Weights arrive as they are stored, whatever their format, rounded to bfloat16 where products are in that.
func TestLoad(t *testing.T) {
	both(t, func(t *testing.T, b *Backend) {
		r := enginetest.Seeded(2)
		for _, d := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16, dtype.Q8_0, dtype.Q4_K} {
			const rows = 6
			cols := 2 * d.BlockLen()
			data := make([]byte, rows*cols/d.BlockLen()*d.BlockBytes())
			for i := range data {
				data[i] = byte(r.IntN(256)) & 0x3f // small and finite in every format
			}
			m := engine.Matrix{Name: "w", Rows: rows, Cols: cols, DType: d, Data: data}
			for _, rowMap := range [][]int32{nil, {5, 0, 3, 2, 1, 4}} {
				m.RowMap = rowMap
				w, err := b.Load(m)
				if err != nil {
					t.Fatal(err)
				}
				got := b.New(rows, cols)
				b.Embed(got, w, []int32{0, 1, 2, 3, 4, 5})
				var want []float64
				row := make([]float32, cols)
				for i := range rows {
					m.DecodeRow(row, i)
					for _, v := range row {
						if b.half {
							v = math.Float32frombits(uint32(toBF16(v)) << 16)
						}
						want = append(want, float64(v))
					}
				}
				if !slices.Equal(enginetest.Download(b, got), want) {
					t.Errorf("%s: %v, row map %v: values differ", b.Name(), d, rowMap)
				}
				b.Unload(w)
			}
		}
		if _, err := b.Load(engine.Matrix{Name: "short", Rows: 2, Cols: 2, DType: dtype.F32}); err == nil {
			t.Error("a matrix without data is accepted")
		}
	})
}

func TestElementwise(t *testing.T) {
	b := newBackend(t, "f32")
	r := enginetest.Seeded(2)
	for _, s := range [][3]int{{1, 1, 2}, {1, 2, 8}, {3, 1, 16}, {5, 3, 64}, {9, 3, 80}, {2, 5, 128}} {
		enginetest.Elementwise(t, b, 1e-6, r, s[0], s[1], s[2])
	}
}

func TestFinite(t *testing.T) {
	enginetest.Finite(t, newBackend(t, "f32"), 20, 37)
}

func TestNewIsZero(t *testing.T) {
	b, _ := simulated(t, fakecuda.Options{}, Options{Precision: "f32", Staging: 1 << 16})
	enginetest.NewIsZero(t, b)
}

// attentionCases covers edges by hand and the rest at random.
func attentionCases() []enginetest.AttentionCase {
	full := enginetest.Attention
	cases := []enginetest.AttentionCase{
		full(1, 1, 1, 8), full(2, 2, 1, 16), full(27, 3, 1, 64), full(29, 2, 2, 80), full(70, 4, 2, 96), full(33, 2, 1, 6),
		full(100, 2, 1, 64).Under(25),
		full(90, 4, 2, 32).Under(0, engine.Mask{}, engine.Mask{Sink: 4, Recent: 20}),
		full(80, 4, 2, 32).Under(60, engine.Mask{Sink: 0, Recent: 1}, engine.Mask{Sink: 33, Recent: 24}),
		full(70, 2, 2, 64).Under(20, engine.Mask{Sink: 3, Recent: 100}, engine.Mask{Sink: 128, Recent: 1}),
		full(90, 1, 1, 64).Under(0, engine.Mask{Sink: 1, Recent: 29}),
		full(140, 2, 1, 128), full(64, 1, 1, 128),
		full(300, 2, 2, 64).Under(0, engine.Mask{Sink: 4, Recent: 20}, engine.Mask{Sink: 70, Recent: 1}),
		full(200, 2, 1, 128).Under(130, engine.Mask{Sink: 100, Recent: 30}),
		full(200, 2, 1, 64).Under(90),
		full(130, 2, 2, 128).Under(0, engine.Mask{}, engine.Mask{Sink: 200, Recent: 3}),
		full(90, 4, 2, 16).Under(0, engine.Mask{Sink: 5, Recent: 11}, engine.Mask{Sink: 5, Recent: 11}),
	}
	return append(cases, enginetest.RandomAttention(enginetest.Seeded(6), 10, 60, 2, 8, 16, 24, 64)...)
}

// shortTiles makes tiles of a few rows, so that small problems have many.
func shortTiles(b *Backend, heads, keys, rows int) { b.scratch = int64(rows * (keys + 8) * heads * 12) }

func TestAttention(t *testing.T) {
	both(t, func(t *testing.T, b *Backend) {
		for i, c := range attentionCases() {
			for _, start := range []int{0, 37} {
				c = c.After(start)
				shortTiles(b, c.Spec.Heads, start+c.N, 7+5*(i%4))
				enginetest.Compare(t, fmt.Sprintf("attention %v", c), b, bound(b, 2e-6), c.Forward)
			}
		}
	})
}

func TestAttentionBackward(t *testing.T) {
	both(t, func(t *testing.T, b *Backend) {
		for i, c := range attentionCases() {
			shortTiles(b, c.Spec.Heads, c.N, 7+5*(i%4))
			enginetest.Compare(t, fmt.Sprintf("attention backward %v", c), b, bound(b, 4e-6), c.Backward)
		}
	})
}

// The work of streaming attention grows with the length, not with its square.
func TestStreamingIsLinear(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("operations are counted in simulation")
	}
	b, fake := simulated(t, fakecuda.Options{}, Options{Precision: "f32", Staging: 1 << 16})
	cost := func(n int) (instructions, flop float64) {
		c := enginetest.Attention(n, 2, 1, 16).Under(0, engine.Mask{Sink: 4, Recent: 16})
		shortTiles(b, c.Spec.Heads, 20+tileRows, 16)
		i0, f0 := fake.Work()
		enginetest.Download(b, c.Backward(b)[1])
		i1, f1 := fake.Work()
		return float64(i1 - i0), float64(f1 - f0)
	}
	i1, f1 := cost(200)
	i2, f2 := cost(400)
	if i2 > 2.2*i1 || f2 > 2.2*f1 {
		t.Errorf("twice the length takes %.2f times the instructions and %.2f times the arithmetic", i2/i1, f2/f1)
	}
}

func tapCases() map[string]enginetest.TapCase {
	everything := engine.Tap{Prompt: 110, Far: []int{1, 19, 50, 400}, Windows: []int{8, 32, 64}, VarianceWindow: 40, Recent: []int{24, 1, 16, 24, 1000},
		Answer: []int{109, 110, 111, 119}, KeysEvery: 4, Masses: []float64{.5, .9, .99}, Map: 16, Exact: []int{1, 3}}
	cases := enginetest.TapCases(120, 32, 30, everything)
	// What the fused kernels do in bfloat16.
	fused := engine.Tap{Prompt: 290, Far: []int{1, 70, 400}, Windows: []int{8, 32, 64}, VarianceWindow: 40, Recent: []int{24, 1, 100, 1000},
		Answer: []int{3, 200, 289, 290, 299}, KeysEvery: 4, Masses: []float64{.5, .9, .99}, Map: 4}
	noMap := fused
	noMap.Map, noMap.Prompt, noMap.Recent, noMap.Answer, noMap.Windows, noMap.VarianceWindow = 0, 192, nil, nil, nil, 0
	whole := fused
	whole.Map, whole.Prompt = 1, 300
	aligned := fused
	aligned.Map, aligned.Prompt = 3, 192
	few := noMap
	few.Prompt, few.Answer, few.VarianceWindow, few.Windows, few.Recent = 17, []int{18}, 5, []int{3}, []int{2}
	block := few
	block.Prompt, block.Map, block.Answer = 64, 1, nil
	d64 := func(n int) enginetest.AttentionCase { return enginetest.Attention(n, 3, 1, 64) }
	d128 := func(n int) enginetest.AttentionCase { return enginetest.Attention(n, 2, 2, 128) }
	for name, c := range map[string]enginetest.TapCase{
		"fused 64":       {AttentionCase: d64(300), Tap: fused},
		"fused 128":      {AttentionCase: d128(300), Tap: fused},
		"fused window":   {AttentionCase: d64(300).Under(90), Tap: fused},
		"fused, no map":  {AttentionCase: d64(200), Tap: noMap},
		"fused, whole":   {AttentionCase: d64(300), Tap: whole},
		"fused, aligned": {AttentionCase: d128(300), Tap: aligned},
		"fused, few":     {AttentionCase: d64(20), Tap: few},
		"fused, block":   {AttentionCase: d128(64), Tap: block},
		"fused, blocks":  {AttentionCase: d64(128), Tap: block},
	} {
		cases[name] = c
	}
	return cases
}

func TestTaps(t *testing.T) {
	both(t, func(t *testing.T, b *Backend) {
		for name, c := range tapCases() {
			for _, rows := range []int{19, tileRows} {
				// The fused kernels are for bfloat16, and have tiles for few rows only.
				if strings.HasPrefix(name, "fused") && (!b.half || rows < tileRows && name != "fused 64") {
					continue
				}
				t.Run(fmt.Sprintf("%s, tiles of %d", name, rows), func(t *testing.T) {
					q, k, v, _ := c.Inputs()
					if b.half { // the statistics are of the products' rounded operands: the oracle gets those
						for _, m := range []enginetest.Matrix{q, k} {
							for i, x := range m.V {
								m.V[i] = float64(math.Float32frombits(uint32(toBF16(float32(x))) << 16))
							}
						}
					}
					shortTiles(b, c.Spec.Heads, c.N, rows)
					c.Compare(t, b, q, k, v, bound(b, 2e-6), 1e-5)
				})
			}
		}
	})
}
