//go:build linux

package cuda

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/fakecuda"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
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

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 7)) }

func normal(r *rand.Rand, n int, scale float64) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(float32(r.NormFloat64() * scale))
	}
	return x
}

// matrix is a host matrix that both backends get.
type matrix struct {
	rows, cols int
	v          []float64
}

func random(r *rand.Rand, rows, cols int) matrix {
	return matrix{rows, cols, normal(r, rows*cols, 1)}
}

func (m matrix) on(b engine.Backend) engine.Tensor {
	t := b.New(m.rows, m.cols)
	b.Upload(t, m.v)
	return t
}

func (m matrix) weight(t testing.TB, b engine.Backend) engine.Weight {
	w, err := b.Load(m.stored())
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func (m matrix) stored() engine.Matrix {
	data := make([]byte, 0, 4*len(m.v))
	for _, v := range m.v {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(v)))
	}
	return engine.Matrix{Name: "w", Rows: m.rows, Cols: m.cols, DType: dtype.F32, Data: data}
}

func download(b engine.Backend, t engine.Tensor) []float64 {
	x := make([]float64, t.Rows()*t.Cols())
	b.Download(x, t)
	return x
}

// distance is the norm of the difference over the norm of want.
func distance(got, want []float64) float64 {
	var d, n float64
	for i, w := range want {
		d += (got[i] - w) * (got[i] - w)
		n += w * w
	}
	if n == 0 {
		return math.Sqrt(d)
	}
	return math.Sqrt(d / n)
}

func within(t *testing.T, what string, got, want []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %d values, want %d", what, len(got), len(want))
		return
	}
	if d := distance(got, want); !(d <= tolerance) {
		t.Errorf("%s: relative error %.3g, want at most %g", what, d, tolerance)
	}
}

// compare runs an operation on a backend and on the float64 reference and compares all tensors that it returns.
func compare(t *testing.T, what string, b *Backend, tolerance float64, f func(b engine.Backend) []engine.Tensor) {
	t.Helper()
	oracle := ref.New[float64]()
	got, want := f(b), f(oracle)
	for i := range want {
		within(t, fmt.Sprintf("%s, %s, result %d", b.Name(), what, i), download(b, got[i]), download(oracle, want[i]), tolerance)
	}
	b.Free(got...)
}

// both runs a test in each precision.
func both(t *testing.T, f func(t *testing.T, b *Backend)) {
	for _, precision := range []string{"f32", "bf16"} {
		t.Run(precision, func(t *testing.T) { f(t, newBackend(t, precision)) })
	}
}

func TestMatMul(t *testing.T) {
	both(t, func(t *testing.T, b *Backend) {
		r := seeded(1)
		for _, s := range [][3]int{{1, 1, 1}, {1, 33, 7}, {2, 32, 16}, {13, 31, 5}, {15, 65, 77}, {29, 100, 96}} {
			x, w, y, dx := random(r, s[0], s[2]), random(r, s[1], s[2]), random(r, s[0], s[1]), random(r, s[0], s[2])
			compare(t, fmt.Sprintf("product %v", s), b, bound(b, 1e-6), func(b engine.Backend) []engine.Tensor {
				cut := s[1] / 3
				parts := []engine.Matrix{w.stored()}
				if cut > 0 { // stacked from two parts
					parts = []engine.Matrix{matrix{cut, s[2], w.v[:cut*s[2]]}.stored(), matrix{s[1] - cut, s[2], w.v[cut*s[2]:]}.stored()}
				}
				lw, err := b.Load(parts...)
				if err != nil {
					t.Fatal(err)
				}
				fresh, sum, gf, gs := b.New(s[0], s[1]), y.on(b), b.New(s[0], s[2]), dx.on(b)
				tx, ty := x.on(b), y.on(b)
				b.MatMul(fresh, tx, lw, false)
				b.MatMul(sum, tx, lw, true)
				b.MatMulBackward(gf, ty, lw, false)
				b.MatMulBackward(gs, ty, lw, true)
				b.Unload(lw)
				return []engine.Tensor{fresh, sum, gf, gs}
			})
		}
	})
}

// Weights arrive as they are stored, whatever their format, rounded to bfloat16 where products are in that.
func TestLoad(t *testing.T) {
	both(t, func(t *testing.T, b *Backend) {
		r := seeded(2)
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
				if !slices.Equal(download(b, got), want) {
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
	r := seeded(2)
	for _, s := range [][3]int{{1, 1, 2}, {1, 2, 8}, {3, 1, 16}, {5, 3, 64}, {9, 3, 80}, {2, 5, 128}} {
		n, heads, d := s[0], s[1], s[2]
		w := heads * d
		what := func(op string) string { return fmt.Sprintf("%s %v", op, s) }
		x, y, u, gain := random(r, n, w), random(r, n, w), random(r, n, w), random(r, 1, w)
		compare(t, what("norm"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
			out, dx, same := b.New(n, w), u.on(b), x.on(b)
			b.RMSNorm(out, x.on(b), gain.weight(t, b), 1e-5)
			b.RMSNorm(same, same, gain.weight(t, b), 1e-5)
			b.RMSNormBackward(dx, y.on(b), x.on(b), gain.weight(t, b), 1e-5)
			return []engine.Tensor{out, same, dx}
		})
		gu, dgu := random(r, n, 2*w), random(r, n, w)
		for i := range gu.v {
			gu.v[i] *= 20
		}
		compare(t, what("swiglu"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
			out, back := b.New(n, w), b.New(n, 2*w)
			b.SwiGLU(out, gu.on(b))
			b.SwiGLUBackward(back, dgu.on(b), gu.on(b))
			return []engine.Tensor{out, back}
		})
		compare(t, what("bias, copy"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
			biased, copied := x.on(b), b.New(n, w)
			b.AddBias(biased, gain.weight(t, b))
			b.Copy(copied, biased)
			return []engine.Tensor{biased, copied}
		})
		table := &engine.Rotary{HeadDim: d}
		for i := range (n + 3) * d / 2 {
			sin, cos := math.Sincos(float64(i))
			table.Cos, table.Sin = append(table.Cos, float32(1.1*cos)), append(table.Sin, float32(1.1*sin))
		}
		compare(t, what("rope"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
			turned, back := x.on(b), x.on(b)
			b.RoPE(turned, table, 3, false)
			b.RoPE(back, table, 2, true)
			return []engine.Tensor{turned, back}
		})
		gates := normal(r, heads, .3)
		gradient := map[string][]float64{}
		compare(t, what("merge"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
			out, ds := b.New(n, w), b.New(n, w)
			b.GatedMerge(out, x.on(b), y.on(b), gates, d)
			gradient[b.Name()] = b.GatedMergeBackward(ds, u.on(b), x.on(b), y.on(b), gates, d)
			return []engine.Tensor{out, ds}
		})
		within(t, what("gate gradient"), gradient[b.Name()], gradient["ref f64"], 2e-6)
		rows := []int{0, n - 1, 0}
		losses := map[string]float64{}
		compare(t, what("squared error"), b, 1e-6, func(b engine.Backend) []engine.Tensor {
			da := u.on(b)
			losses[b.Name()] = b.SquaredError(da, x.on(b), y.on(b), rows)
			return []engine.Tensor{da}
		})
		within(t, what("loss"), []float64{losses[b.Name()]}, []float64{losses["ref f64"]}, 1e-6)
		compare(t, what("split"), b, 0, func(b engine.Backend) []engine.Tensor {
			q, k, v, back := b.New(n, w), b.New(n, d), b.New(n, d), b.New(n, w+2*d)
			b.Split(q, k, v, random(seeded(9), n, w+2*d).on(b))
			b.SplitBackward(back, q, k, v)
			return []engine.Tensor{q, k, v, back}
		})
	}
}

func TestFinite(t *testing.T) {
	b := newBackend(t, "f32")
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		for _, at := range []int{0, 36, 37, 37*20 - 1} {
			m := random(seeded(4), 20, 37)
			if row := b.Finite(m.on(b)); row != -1 {
				t.Fatalf("%s: finite values reported at row %d", b.Name(), row)
			}
			m.v[at], m.v[len(m.v)-1] = bad, bad
			if row := b.Finite(m.on(b)); row != at/37 {
				t.Errorf("%s: %g of row %d reported at row %d", b.Name(), bad, at/37, row)
			}
		}
	}
}

// Memory that is used again must read as zeros, through views too.
func TestNewIsZero(t *testing.T) {
	b, _ := simulated(t, fakecuda.Options{}, Options{Precision: "f32", Staging: 1 << 16})
	for i := range 5 {
		m := random(seeded(5), 20, 10)
		b.Free(m.on(b))
		x := b.New(20, 9+i%2)
		if i%2 == 1 {
			b.Copy(b.Slice(x, 3, 4), b.New(1, x.Cols()))
		}
		for _, v := range download(b, b.Reshape(x, 1, 20*x.Cols())) {
			if v != 0 {
				t.Fatal("a new tensor is not zero")
			}
		}
		b.Free(x)
	}
}

// attentionCase is one attention problem.
type attentionCase struct {
	n    int
	spec engine.AttentionSpec
}

func (c attentionCase) String() string { return fmt.Sprintf("n %d %+v", c.n, c.spec) }

// attentionCases covers edges by hand and the rest at random.
func attentionCases() []attentionCase {
	s := func(h, kv, d int) engine.AttentionSpec {
		return engine.AttentionSpec{Heads: h, KVHeads: kv, HeadDim: d}
	}
	masks := func(a engine.AttentionSpec, window int, ms ...engine.Mask) engine.AttentionSpec {
		a.Window, a.Masks = window, ms
		return a
	}
	cases := []attentionCase{
		{1, s(1, 1, 8)}, {2, s(2, 1, 16)}, {27, s(3, 1, 64)}, {29, s(2, 2, 80)}, {70, s(4, 2, 96)}, {33, s(2, 1, 6)},
		{100, masks(s(2, 1, 64), 25)}, {90, masks(s(4, 2, 32), 0, engine.Mask{}, engine.Mask{Sink: 4, Recent: 20})},
		{80, masks(s(4, 2, 32), 60, engine.Mask{Sink: 0, Recent: 1}, engine.Mask{Sink: 33, Recent: 24})},
		{70, masks(s(2, 2, 64), 20, engine.Mask{Sink: 3, Recent: 100}, engine.Mask{Sink: 128, Recent: 1})},
		{90, masks(s(1, 1, 64), 0, engine.Mask{Sink: 1, Recent: 29})},
		{140, s(2, 1, 128)}, {64, s(1, 1, 128)}, {300, masks(s(2, 2, 64), 0, engine.Mask{Sink: 4, Recent: 20}, engine.Mask{Sink: 70, Recent: 1})},
		{200, masks(s(2, 1, 128), 130, engine.Mask{Sink: 100, Recent: 30})}, {200, masks(s(2, 1, 64), 90)}, {130, masks(s(2, 2, 128), 0, engine.Mask{}, engine.Mask{Sink: 200, Recent: 3})},
		{90, masks(s(4, 2, 16), 0, engine.Mask{Sink: 5, Recent: 11}, engine.Mask{Sink: 5, Recent: 11})},
	}
	r := seeded(6)
	for range 10 {
		kv, group, d := 1+r.IntN(3), 1+r.IntN(3), []int{2, 8, 16, 24, 64}[r.IntN(5)]
		c := attentionCase{1 + r.IntN(60), s(kv*group, kv, d)}
		if r.IntN(3) == 0 {
			c.spec.Window = 1 + r.IntN(40)
		}
		if r.IntN(2) == 0 {
			for range kv {
				c.spec.Masks = append(c.spec.Masks, engine.Mask{Sink: r.IntN(30), Recent: r.IntN(40)})
			}
		}
		cases = append(cases, c)
	}
	return cases
}

func (c attentionCase) inputs(keys int) (q, k, v, dout matrix) {
	r := seeded(uint64(c.n))
	d := c.spec.HeadDim
	q, k = random(r, c.n, c.spec.Heads*d), random(r, keys, c.spec.KVHeads*d)
	for i := range q.v {
		q.v[i] *= 1.5
	}
	return q, k, random(r, keys, c.spec.KVHeads*d), random(r, c.n, c.spec.Heads*d)
}

// shortTiles makes tiles of a few rows, so that small problems have many.
func shortTiles(b *Backend, spec *engine.AttentionSpec, keys, rows int) {
	b.scratch = int64(rows * (keys + 8) * spec.Heads * 12)
}

func TestAttention(t *testing.T) {
	both(t, func(t *testing.T, b *Backend) {
		for i, c := range attentionCases() {
			for _, start := range []int{0, 37} {
				spec := c.spec
				spec.Start = start
				q, k, v, _ := c.inputs(start + c.n)
				shortTiles(b, &spec, k.rows, 7+5*(i%4))
				compare(t, fmt.Sprintf("attention %v start %d", c, start), b, bound(b, 2e-6), func(b engine.Backend) []engine.Tensor {
					out := b.New(c.n, q.cols)
					b.Attention(out, q.on(b), k.on(b), v.on(b), spec, nil)
					return []engine.Tensor{out}
				})
			}
		}
	})
}

func TestAttentionBackward(t *testing.T) {
	both(t, func(t *testing.T, b *Backend) {
		for i, c := range attentionCases() {
			q, k, v, dout := c.inputs(c.n)
			shortTiles(b, &c.spec, k.rows, 7+5*(i%4))
			compare(t, fmt.Sprintf("attention backward %v", c), b, bound(b, 4e-6), func(b engine.Backend) []engine.Tensor {
				out, dq, dk, dv := b.New(c.n, q.cols), b.New(c.n, q.cols), b.New(c.n, k.cols), b.New(c.n, k.cols)
				tq, tk, tv := q.on(b), k.on(b), v.on(b)
				b.Attention(out, tq, tk, tv, c.spec, nil)
				b.AttentionBackward(dq, dk, dv, dout.on(b), tq, tk, tv, out, c.spec)
				return []engine.Tensor{dq, dk, dv}
			})
		}
	})
}

// The work of streaming attention grows with the length, not with its square.
func TestStreamingIsLinear(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("operations are counted in simulation")
	}
	b, fake := simulated(t, fakecuda.Options{}, Options{Precision: "f32", Staging: 1 << 16})
	spec := engine.AttentionSpec{Heads: 2, KVHeads: 1, HeadDim: 16, Masks: []engine.Mask{{Sink: 4, Recent: 16}}}
	cost := func(n int) (instructions, flop float64) {
		c := attentionCase{n, spec}
		q, k, v, dout := c.inputs(n)
		shortTiles(b, &spec, 20+tileRows, 16)
		i0, f0 := fake.Work()
		out, dq, dk, dv := b.New(n, q.cols), b.New(n, q.cols), b.New(n, k.cols), b.New(n, k.cols)
		tq, tk, tv := q.on(b), k.on(b), v.on(b)
		b.Attention(out, tq, tk, tv, spec, nil)
		b.AttentionBackward(dq, dk, dv, dout.on(b), tq, tk, tv, out, spec)
		download(b, dk)
		i1, f1 := fake.Work()
		return float64(i1 - i0), float64(f1 - f0)
	}
	i1, f1 := cost(200)
	i2, f2 := cost(400)
	if i2 > 2.2*i1 || f2 > 2.2*f1 {
		t.Errorf("twice the length takes %.2f times the instructions and %.2f times the arithmetic", i2/i1, f2/f1)
	}
}

// tapCases are attention problems with the statistics wanted of them.
func tapCases() map[string]struct {
	attentionCase
	tap engine.Tap
} {
	type kase = struct {
		attentionCase
		tap engine.Tap
	}
	full := engine.AttentionSpec{Heads: 4, KVHeads: 2, HeadDim: 32}
	window := full
	window.Window = 30
	masked := full
	masked.Masks = []engine.Mask{{Sink: 4, Recent: 40}, {}}
	everything := engine.Tap{Prompt: 110, Far: []int{1, 19, 50, 400}, Windows: []int{8, 32, 64}, VarianceWindow: 40, Recent: []int{24, 1, 16, 24, 1000},
		Answer: []int{109, 110, 111, 119}, KeysEvery: 4, Masses: []float64{.5, .9, .99}, Map: 16, Exact: []int{1, 3}}
	short := everything
	short.Prompt, short.Answer, short.Map = 20, []int{20, 27}, 7
	plain := engine.Tap{Prompt: 1}
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
	d64, d128 := engine.AttentionSpec{Heads: 3, KVHeads: 1, HeadDim: 64}, engine.AttentionSpec{Heads: 2, KVHeads: 2, HeadDim: 128}
	windowed := d64
	windowed.Window = 90
	return map[string]kase{
		"everything":     {attentionCase{120, full}, everything},
		"sliding window": {attentionCase{120, window}, everything},
		"masked heads":   {attentionCase{120, masked}, everything},
		"fused 64":       {attentionCase{300, d64}, fused},
		"fused 128":      {attentionCase{300, d128}, fused},
		"fused window":   {attentionCase{300, windowed}, fused},
		"fused, no map":  {attentionCase{200, d64}, noMap},
		"fused, whole":   {attentionCase{300, d64}, whole},
		"fused, aligned": {attentionCase{300, d128}, aligned},
		"fused, few":     {attentionCase{20, d64}, few},
		"fused, block":   {attentionCase{64, d128}, block},
		"fused, blocks":  {attentionCase{128, d64}, block},
		"short":          {attentionCase{28, full}, short},
		"one token":      {attentionCase{1, full}, plain},
	}
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
					q, k, v, _ := c.inputs(c.n)
					shortTiles(b, &c.spec, k.rows, rows)
					checkTap(t, b, c.attentionCase, c.tap, q, k, v)
				})
			}
		}
	})
}

func checkTap(t *testing.T, b *Backend, c attentionCase, tap engine.Tap, q, k, v matrix) {
	if b.half { // the statistics are of the products' rounded operands: the oracle gets those
		for _, m := range []matrix{q, k} {
			for i, x := range m.v {
				m.v[i] = float64(math.Float32frombits(uint32(toBF16(float32(x))) << 16))
			}
		}
	}
	oracle := ref.New[float64]()
	want, got := tap, tap
	var out [2]engine.Tensor
	for i, side := range []struct {
		b   engine.Backend
		tap *engine.Tap
	}{{oracle, &want}, {b, &got}} {
		out[i] = side.b.New(c.n, q.cols)
		side.b.Attention(out[i], q.on(side.b), k.on(side.b), v.on(side.b), c.spec, side.tap)
	}
	within(t, "output", download(b, out[1]), download(oracle, out[0]), bound(b, 2e-6))
	const tolerance = 1e-5
	list := func(what string, got, want []float32) {
		t.Helper()
		g, w := make([]float64, len(got)), make([]float64, len(want))
		for i, v := range got {
			g[i] = float64(v)
		}
		for i, v := range want {
			w[i] = float64(v)
		}
		if len(g) != len(w) {
			t.Errorf("%s has %d values, want %d", what, len(g), len(w))
			return
		}
		within(t, what, g, w, tolerance)
		// No single value may hide behind large ones either.
		for i := range w {
			if !(math.Abs(g[i]-w[i]) <= tolerance*(1e-3+w[i])) {
				t.Errorf("%s[%d] is %g, want %g", what, i, g[i], w[i])
				return
			}
		}
	}
	for h, w := range want.Heads {
		g := got.Heads[h]
		at := func(s string, x int) string { return fmt.Sprintf("head %d %s %d", h, s, x) }
		list(at("total", 0), g.Total, w.Total)
		for x := range w.Far {
			list(at("far", x), g.Far[x], w.Far[x])
		}
		for x := range w.Window {
			list(at("window", x), g.Window[x], w.Window[x])
		}
		list(at("answer", 0), g.Answer, w.Answer)
		list(at("map", 0), g.Map, w.Map)
		list(at("exact", 0), g.Exact, w.Exact)
		within(t, at("recent", 0), g.Recent, w.Recent, tolerance)
		within(t, at("entropy", 0), []float64{g.Entropy}, []float64{w.Entropy}, tolerance)
		within(t, at("variance", 0), []float64{g.Variance}, []float64{w.Variance}, tolerance)
		if !slices.Equal(g.Top, w.Top) {
			t.Errorf("%s is %v, want %v", at("top", 0), g.Top, w.Top)
		}
		if g.MapSize != w.MapSize || g.MapTile != w.MapTile || len(g.Keys) != len(w.Keys) {
			t.Errorf("%s: %d x %d, %d keys; want %d x %d, %d", at("map", 0), g.MapSize, g.MapTile, len(g.Keys), w.MapSize, w.MapTile, len(w.Keys))
			continue
		}
		for x := range w.Keys {
			// A share that is met to within rounding may take one key more or less in a row.
			rows := tap.Prompt / tap.KeysEvery
			if math.Abs(g.Keys[x]-w.Keys[x])*float64(rows) > 1.5 {
				t.Errorf("%s is %g, want %g over %d rows", at("keys", x), g.Keys[x], w.Keys[x], rows)
			}
		}
	}
	for kv, w := range want.KV {
		g := got.KV[kv]
		within(t, "value norms", []float64{g.ValueNorm, g.ValueNormMax}, []float64{w.ValueNorm, w.ValueNormMax}, 1e-6)
	}
}
