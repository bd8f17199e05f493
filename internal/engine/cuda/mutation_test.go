//go:build linux

package cuda

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/fakecuda"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/kernels"
)

// everyKernel runs operations that between them launch every kernel, with blocks of several warps, and returns their results.
// A failure of the GPU is an error.
func everyKernel(t testing.TB, b *Backend) (all []float64, err error) {
	defer func() {
		if f, ok := recover().(*engine.Failure); ok {
			err = f.Err
		}
	}()
	keep := func(ts ...engine.Tensor) {
		for _, x := range ts {
			all = append(all, download(b, x)...)
		}
	}
	r := seeded(11)
	const n, heads, d = 9, 2, 80
	const w = heads * d
	x, y, gain := random(r, n, w), random(r, n, w), random(r, 1, w).weight(t, b)
	tx, ty, out, back := x.on(b), y.on(b), b.New(n, w), b.New(n, w)
	b.RMSNorm(out, tx, gain, 1e-5)
	b.RMSNormBackward(back, ty, tx, gain, 1e-5)
	b.AddBias(back, gain)
	keep(out, back)
	all = append(all, b.SquaredError(out, tx, ty, []int{1, 5}), float64(b.Finite(out)))
	gates := []float64{.2, .9}
	b.GatedMerge(out, tx, ty, gates, d)
	keep(out)
	all = append(all, b.GatedMergeBackward(out, back, tx, ty, gates, d)...)
	m := random(r, 10, w).weight(t, b)
	b.Embed(back, m, []int32{3, 1, 4, 1, 5, 9, 2, 6, 5})
	b.SwiGLU(b.New(n, d), back)
	b.SwiGLUBackward(out, b.New(n, d), back)
	keep(back, out)
	q, k, v := b.New(n, d), b.New(n, d/2), b.New(n, d/2)
	b.Split(q, k, v, tx)
	b.SplitBackward(out, q, k, v)
	table := &engine.Rotary{HeadDim: d}
	table.Cos, table.Sin = narrow(normal(r, n*d/2, 1)), narrow(normal(r, n*d/2, 1))
	b.RoPE(out, table, 0, false)
	keep(out)

	spec := engine.AttentionSpec{Heads: 2, KVHeads: 1, HeadDim: 16}
	c := attentionCase{70, spec}
	mq, mk, mv, md := c.inputs(c.n)
	tap := engine.Tap{Prompt: 60, Far: []int{4}, Windows: []int{8}, VarianceWindow: 9, Recent: []int{4, 12}, Answer: []int{61, 63}, KeysEvery: 20,
		Masses: []float64{.5}, Map: 1}
	ao, dq, dk, dv := b.New(c.n, mq.cols), b.New(c.n, mq.cols), b.New(c.n, mk.cols), b.New(c.n, mk.cols)
	tq, tk, tv, td := mq.on(b), mk.on(b), mv.on(b), md.on(b)
	b.Attention(ao, tq, tk, tv, spec, &tap)
	keep(ao)
	for _, h := range tap.Heads {
		for _, list := range [][]float32{h.Total, h.Far[0], h.Window[0], h.Answer, h.Map} {
			for _, f := range list {
				all = append(all, float64(f))
			}
		}
		all = append(append(append(all, h.Recent...), h.Keys...), h.Entropy, h.Variance, float64(h.Top[0]))
	}
	for _, d := range []int{64, 128} { // enough keys for several steps
		wide := attentionCase{200, engine.AttentionSpec{Heads: 1, KVHeads: 1, HeadDim: d}}
		fq, fk, fv, _ := wide.inputs(wide.n)
		fo := b.New(wide.n, d)
		b.Attention(fo, fq.on(b), fk.on(b), fv.on(b), wide.spec, nil)
		keep(fo)
	}
	spec.Masks = []engine.Mask{{Sink: 3, Recent: 40}}
	b.Attention(ao, tq, tk, tv, spec, nil)
	b.AttentionBackward(dq, dk, dv, td, tq, tk, tv, ao, spec)
	keep(ao, dq, dk, dv)
	paged := pagedCase{heads: 4, kvHeads: 2, d: 64, block: 4, rows: 2, rotate: true}
	keep(paged.attend(b, 1)...)
	pages := &engine.Pages{Keys: b.New(20, 24), Values: b.New(20, 24), Block: 4}
	kv := random(r, 31, 3*24).on(b)
	b.StorePages(pages, []int32{3, 0, 4}, []int32{4, -1, 0, 29, 7, -1, 8, 30, 11}, kv, kv, 1)
	b.MovePages(pages, []int{0, 1, 12, 13}, []int{1, 0, 2, 12})
	keep(pages.Keys)
	return all, nil
}

// entries lists the kernels of a module, with the first and last line of each.
func entries(ptx string) (all []struct {
	name   string
	lo, hi int
}) {
	for i, line := range strings.Split(ptx, "\n") {
		if _, rest, ok := strings.Cut(line, ".entry "); ok {
			all = append(all, struct {
				name   string
				lo, hi int
			}{strings.TrimRight(rest, "("), i, i})
		}
		if len(all) > 0 {
			all[len(all)-1].hi = i
		}
	}
	return all
}

// The mutants below start from something that works and that uses every kernel there is.
func TestEveryKernelRuns(t *testing.T) {
	launched := map[string]bool{}
	for _, precision := range []string{"f32", "bf16"} {
		b, fake := simulated(t, fakecuda.Options{}, Options{Precision: precision, Segment: -1, Staging: 1 << 16})
		if _, err := everyKernel(t, b); err != nil {
			t.Fatal(err, fake.Err())
		}
		for _, ptx := range kernels.Modules() {
			for _, k := range entries(ptx) {
				if fake.Calls("launch "+k.name) > 0 {
					launched[k.name] = true
				}
			}
		}
	}
	for _, ptx := range kernels.Modules() {
		for _, k := range entries(ptx) {
			if !launched[k.name] {
				t.Errorf("kernel %s is never launched: this test or the kernel is out of date", k.name)
			}
		}
	}
}

// Deleting any one barrier of any kernel, or any one wait for an asynchronous copy, must be noticed: reported, or seen in the results.
func TestBarriersAreNeeded(t *testing.T) {
	fake := fakecuda.New(fakecuda.Options{})
	run := func(precision string, rewrite func(string) string) ([]float64, error) {
		fake.Reset(fakecuda.Options{Rewrite: rewrite})
		b, err := New(Options{Precision: precision, Symbols: resolver(fake), Staging: 1 << 16})
		if err != nil {
			t.Fatal(err)
		}
		results, err := everyKernel(t, b)
		if e := b.Close(); (e == nil) != (err == nil) {
			t.Errorf("closing a GPU that ended with %v: %v", err, e)
		}
		return results, err
	}
	reported, seen, mutants := 0, 0, 0
	for _, ptx := range kernels.Modules() {
		precision := "f32"
		if strings.Contains(ptx, "cp.async") {
			precision = "bf16"
		}
		want, err := run(precision, nil)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(ptx, "\n")
		for _, k := range entries(ptx) {
			for i := k.lo; i <= k.hi; i++ {
				if !strings.Contains(lines[i], "bar.sync") && !strings.Contains(lines[i], "wait_group") {
					continue
				}
				mutants++
				mutant := slices.Clone(lines)
				mutant[i] = ""
				got, err := run(precision, func(text string) string {
					if text == ptx {
						return strings.Join(mutant, "\n")
					}
					return text
				})
				switch {
				case err != nil && strings.Contains(fmt.Sprint(fake.Err()), k.name):
					reported++
				case err == nil && fmt.Sprint(got) != fmt.Sprint(want):
					seen++
				default:
					t.Errorf("%s without line %d, %q: got %v", k.name, i+1, lines[i], err)
				}
			}
		}
	}
	t.Logf("%d mutants: %d reported, %d seen in results", mutants, reported, seen)
}

// Without one of the waits results must be wrong: everything the simulated driver does is late.
func TestWaitsAreNeeded(t *testing.T) {
	fake := fakecuda.New(fakecuda.Options{})
	run := func(ignore string) []float64 {
		fake.Reset(fakecuda.Options{Ignore: ignore})
		b, err := New(Options{Precision: "f32", Symbols: resolver(fake), Staging: 4096})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		x := b.New(10, 1000)
		b.Upload(x, normal(seeded(1), 10000, 1)) // more than the staging memory
		return download(b, x)
	}
	want := normal(seeded(1), 10000, 1)
	if got := run(""); !slices.Equal(got, want) {
		t.Fatal("values do not come back")
	}
	for _, call := range []string{"cuStreamSynchronize", "cuEventSynchronize"} {
		if slices.Equal(run(call), want) {
			t.Errorf("results are right without %s", call)
		}
	}
}
