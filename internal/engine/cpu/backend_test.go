package cpu

import (
	"fmt"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// backends returns one backend per tier that this machine has.
func backends(t testing.TB, threads int) []*Backend {
	var bs []*Backend
	for _, k := range tiers() {
		bs = append(bs, newBackend(t, Options{Tier: k.tier, Threads: threads}))
	}
	return append(bs, twinOfMatrixUnit(t, threads, 0))
}

func newBackend(t testing.TB, o Options) *Backend {
	b, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b.(*Backend)
}

// twinOfMatrixUnit is a backend whose matrix unit is plain Go: what leads to the unit is tested where there is none.
func twinOfMatrixUnit(t testing.TB, threads int, limit int64) *Backend {
	b := newBackend(t, Options{Tier: "go", Threads: threads, PackLimit: limit})
	b.split = goSplit()
	return b
}

func TestMatMul(t *testing.T) {
	r := enginetest.Seeded(1)
	shapes := [][3]int{{1, 1, 1}, {1, 33, 7}, {2, 32, 16}, {13, 31, 5}, {14, 32, 64}, {15, 65, 577}, {29, 100, 96}, {200, 40, 30}, {141, 300, 600}, {7, 960, 576}}
	for range 10 {
		shapes = append(shapes, [3]int{1 + r.IntN(60), 1 + r.IntN(120), 1 + r.IntN(700)})
	}
	for _, limit := range []int64{0, -1} {
		units := []*Backend{twinOfMatrixUnit(t, 2, limit)}
		for _, k := range tiers() {
			units = append(units, newBackend(t, Options{Tier: k.tier, Threads: 2, PackLimit: limit}))
		}
		for i, b := range units {
			for _, s := range shapes {
				if i == 0 && s[0]*s[1]*s[2] > 1<<22 {
					continue // the twin is slow
				}
				enginetest.MatMul(t, fmt.Sprintf("product %v, pack limit %d", s, limit), b, 1e-6, r, s[0], s[1], s[2])
			}
			if limit < 0 && b.packed != 0 {
				t.Errorf("%d bytes packed beyond the limit", b.packed)
			}
		}
	}
}

func TestElementwise(t *testing.T) {
	for _, b := range backends(t, 2) {
		r := enginetest.Seeded(2)
		for _, s := range [][3]int{{1, 1, 2}, {1, 2, 8}, {3, 1, 16}, {5, 3, 64}, {33, 2, 80}, {70, 3, 128}} {
			enginetest.Elementwise(t, b, 1e-6, r, s[0], s[1], s[2])
		}
	}
}

func TestEmbed(t *testing.T) {
	for _, b := range backends(t, 2) {
		w := enginetest.Random(enginetest.Seeded(3), 40, 24)
		enginetest.Compare(t, "embed", b, 0, func(b engine.Backend) []engine.Tensor {
			out := b.New(3, 24)
			b.Embed(out, w.Weight(t, b), []int32{39, 0, 7})
			return []engine.Tensor{out}
		})
	}
}

func TestFinite(t *testing.T) {
	for _, b := range backends(t, 3) {
		enginetest.Finite(t, b, 90, 37)
	}
}

func TestNewIsZero(t *testing.T) {
	enginetest.NewIsZero(t, newBackend(t, Options{}))
}

// attentionCases covers edges by hand and the rest at random.
func attentionCases() []enginetest.AttentionCase {
	full := enginetest.Attention
	cases := []enginetest.AttentionCase{
		full(1, 1, 1, 8), full(2, 2, 1, 16), full(27, 3, 1, 64), full(28, 1, 1, 64), full(29, 2, 2, 80), full(100, 4, 2, 96), full(130, 2, 1, 128),
		full(33, 2, 1, 6),
		full(200, 2, 1, 64).Under(50),
		full(300, 4, 2, 32).Under(0, engine.Mask{}, engine.Mask{Sink: 4, Recent: 40}),
		full(300, 4, 2, 32).Under(120, engine.Mask{Sink: 0, Recent: 1}, engine.Mask{Sink: 33, Recent: 64}),
		full(257, 2, 2, 64).Under(40, engine.Mask{Sink: 3, Recent: 200}, engine.Mask{Sink: 128, Recent: 1}),
		full(90, 1, 1, 64).Under(0, engine.Mask{Sink: 1, Recent: 29}),
	}
	return append(cases, enginetest.RandomAttention(enginetest.Seeded(6), 25, 170, 2, 8, 16, 24, 64, 80, 96, 128)...)
}

func TestAttention(t *testing.T) {
	for _, b := range backends(t, 2) {
		for _, c := range attentionCases() {
			for _, start := range []int{0, 1, 77} {
				c = c.After(start)
				enginetest.Compare(t, fmt.Sprintf("attention %v", c), b, 2e-6, c.Forward)
			}
		}
	}
}

func TestAttentionBackward(t *testing.T) {
	for _, b := range backends(t, 2) {
		for _, c := range attentionCases() {
			enginetest.Compare(t, fmt.Sprintf("attention backward %v", c), b, 4e-6, c.Backward)
		}
	}
}

func tapCases() map[string]enginetest.TapCase {
	return enginetest.TapCases(300, 64, 70, engine.Tap{Prompt: 290, Far: []int{1, 29, 100, 400}, Windows: []int{8, 32, 64}, VarianceWindow: 40,
		Recent: []int{64, 1, 16, 64, 1000}, Answer: []int{289, 290, 291, 299}, KeysEvery: 4, Masses: []float64{.5, .9, .99}, Map: 128, Exact: []int{1, 3}})
}

func checkTap(t *testing.T, b *Backend, c enginetest.TapCase) {
	t.Helper()
	q, k, v, _ := c.Inputs()
	c.Compare(t, b, q, k, v, 2e-6, 1e-5)
}

func TestTaps(t *testing.T) {
	for _, b := range backends(t, 2) {
		for name, c := range tapCases() {
			t.Run(b.k.tier+" "+name, func(t *testing.T) {
				checkTap(t, b, c)
			})
		}
	}
}

// Full maps in float64 are the oracle, at the length that profiles are made with by default.
func TestTapsLong(t *testing.T) {
	if testing.Short() {
		t.Skip("full maps of 2,048 tokens take a few seconds")
	}
	tap := engine.Tap{Prompt: 2000, Far: []int{600, 614}, Windows: []int{8, 32, 64}, VarianceWindow: 32, Recent: []int{16, 64, 256, 1024},
		Answer: []int{1999, 2001, 2047}, KeysEvery: 16, Masses: []float64{.9, .95, .99}, Map: 128}
	checkTap(t, backends(t, 2)[0], enginetest.TapCase{AttentionCase: enginetest.Attention(2048, 1, 1, 64), Tap: tap})
}

// Every result must be the same, bit for bit, for any number of threads.
func TestThreadsChangeNothing(t *testing.T) {
	type result struct {
		tensors [][]float64
		taps    []engine.HeadStats
		kv      []engine.KVStats
		gates   []float64
	}
	run := func(b *Backend) (all result) {
		r := enginetest.Seeded(8)
		keep := func(ts ...engine.Tensor) {
			for _, x := range ts {
				all.tensors = append(all.tensors, enginetest.Download(b, x))
			}
		}
		x, w := enginetest.Random(r, 300, 150), enginetest.Random(r, 200, 150)
		y, dx := b.New(300, 200), b.New(300, 150)
		lw := w.Weight(t, b)
		b.MatMul(y, x.On(b), lw, false)
		b.MatMulBackward(dx, y, lw, false)
		keep(y, dx)
		for _, name := range []string{"everything", "short"} {
			c := tapCases()[name]
			q, k, v, dout := c.Inputs()
			tap := c.Tap
			tq, tk, tv := q.On(b), k.On(b), v.On(b)
			out, dq, dk, dv := b.New(c.N, q.Cols), b.New(c.N, q.Cols), b.New(c.N, k.Cols), b.New(c.N, k.Cols)
			b.Attention(out, tq, tk, tv, c.Spec, &tap)
			b.AttentionBackward(dq, dk, dv, dout.On(b), tq, tk, tv, out, c.Spec)
			keep(out, dq, dk, dv)
			all.taps, all.kv = append(all.taps, tap.Heads...), append(all.kv, tap.KV...)
			ds := b.New(c.N, q.Cols)
			all.gates = append(all.gates, b.GatedMergeBackward(ds, dq, out, tq, []float64{.2, .7}, c.Spec.HeadDim)...)
			keep(ds)
		}
		return all
	}

	first := map[string]string{}
	for _, threads := range []int{1, 2, 3, 8} {
		for _, b := range backends(t, threads) {
			got := fmt.Sprintf("%v", run(b))
			if old, ok := first[b.Name()]; ok && got != old {
				t.Errorf("%s: %d threads change the result", b.Name(), threads)
			}
			first[b.Name()] = got
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, o := range []Options{{Tier: "sse9"}, {Precision: "f8"}, {Threads: -1}, {Tier: "go", Precision: "split"}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v accepted", o)
		}
	}
}
