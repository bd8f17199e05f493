//go:build linux

package cuda

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/fakecuda"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/kernels"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// results are the values that operations come to.
type results struct {
	b   *Backend
	all []float64
}

func (r *results) keep(ts ...engine.Tensor) {
	for _, x := range ts {
		r.all = append(r.all, enginetest.Download(r.b, x)...)
	}
}

func (r *results) lists(lists ...[]float32) {
	for _, list := range lists {
		for _, f := range list {
			r.all = append(r.all, float64(f))
		}
	}
}

// run returns what operations come to. A failure of the GPU is an error.
func run(t testing.TB, b *Backend, operations ...func(t testing.TB, b *Backend, r *results)) (all []float64, err error) {
	defer func() {
		if f, ok := recover().(*engine.Failure); ok {
			err = f.Err
		}
	}()
	r := &results{b: b}
	for _, f := range operations {
		f(t, b, r)
	}
	return r.all, nil
}

// fusedKernels runs what the fused kernels do where products are in bfloat16, with enough keys for several steps.
func fusedKernels(t testing.TB, b *Backend, r *results) {
	for _, d := range []int{64, 128} {
		wide := enginetest.Attention(200, 1, 1, d)
		fq, fk, fv, _ := wide.Inputs()
		fo := b.New(wide.N, d)
		b.Attention(fo, fq.On(b), fk.On(b), fv.On(b), wide.Spec, nil)
		r.keep(fo)
		tap := engine.Tap{Prompt: 195, Far: []int{9}, Recent: []int{30}, Map: 3}
		b.Attention(fo, fq.On(b), fk.On(b), fv.On(b), wide.Spec, &tap)
		r.keep(fo)
		r.lists(tap.Heads[0].Total, tap.Heads[0].Far[0], tap.Heads[0].Map)
		r.all = append(r.all, tap.Heads[0].Entropy, tap.Heads[0].Recent[0])
		if b.half {
			columns, cells := mapColumns(b, d, 200, 65)
			r.all = append(append(r.all, columns...), cells...)
		}
	}
}

// plainKernels runs operations that between them launch every other kernel, with blocks of several warps.
func plainKernels(t testing.TB, b *Backend, kept *results) {
	keep := kept.keep
	r := enginetest.Seeded(11)
	const n, heads, d = 9, 2, 80
	const w = heads * d
	x, y, gain := enginetest.Random(r, n, w), enginetest.Random(r, n, w), enginetest.Random(r, 1, w).Weight(t, b)
	tx, ty, out, back := x.On(b), y.On(b), b.New(n, w), b.New(n, w)
	b.RMSNorm(out, tx, gain, 1e-5)
	b.RMSNormBackward(back, ty, tx, gain, 1e-5)
	b.AddBias(back, gain)
	keep(out, back)
	kept.all = append(kept.all, b.SquaredError(out, tx, ty, []int{1, 5}), float64(b.Finite(out)))
	gates := []float64{.2, .9}
	b.GatedMerge(out, tx, ty, gates, d)
	keep(out)
	kept.all = append(kept.all, b.GatedMergeBackward(out, back, tx, ty, gates, d)...)
	m := enginetest.Random(r, 10, w).Weight(t, b)
	b.Embed(back, m, []int32{3, 1, 4, 1, 5, 9, 2, 6, 5})
	b.SwiGLU(b.New(n, d), back)
	b.SwiGLUBackward(out, b.New(n, d), back)
	keep(back, out)
	q, k, v := b.New(n, d), b.New(n, d/2), b.New(n, d/2)
	b.Split(q, k, v, tx)
	b.SplitBackward(out, q, k, v)
	table := &engine.Rotary{HeadDim: d}
	table.Cos, table.Sin = narrow(enginetest.Normal(r, n*d/2, 1)), narrow(enginetest.Normal(r, n*d/2, 1))
	b.RoPE(out, table, 0, false)
	keep(out)

	c := enginetest.Attention(70, 2, 1, 16)
	mq, mk, mv, md := c.Inputs()
	tap := engine.Tap{Prompt: 60, Far: []int{4}, Windows: []int{8}, VarianceWindow: 9, Recent: []int{4, 12}, Answer: []int{61, 63}, KeysEvery: 20,
		Masses: []float64{.5}, Map: 1}
	ao, dq, dk, dv := b.New(c.N, mq.Cols), b.New(c.N, mq.Cols), b.New(c.N, mk.Cols), b.New(c.N, mk.Cols)
	tq, tk, tv, td := mq.On(b), mk.On(b), mv.On(b), md.On(b)
	b.Attention(ao, tq, tk, tv, c.Spec, &tap)
	keep(ao)
	for _, h := range tap.Heads {
		kept.lists(h.Total, h.Far[0], h.Window[0], h.Answer, h.Map)
		kept.all = append(append(append(kept.all, h.Recent...), h.Keys...), h.Entropy, h.Variance, float64(h.Top[0]))
	}
	c = c.Under(0, engine.Mask{Sink: 3, Recent: 40})
	b.Attention(ao, tq, tk, tv, c.Spec, nil)
	b.AttentionBackward(dq, dk, dv, td, tq, tk, tv, ao, c.Spec)
	keep(ao, dq, dk, dv)
	paged := enginetest.PagedCase{Heads: 4, KVHeads: 2, HeadDim: 64, Block: 4, Rows: 2, Longest: longestCache, Rotate: true}
	keep(paged.Attend(b, 1)...)
	keep(enginetest.StoreAndMovePages(b)...)
}

// mapColumns runs the kernel of column sums alone, where map rows may have any width of 64 or more, with all lse 3: the sums of one head, and
// the map's cells, [row, column].
func mapColumns(b *Backend, d, n, mapWidth int) (columns, cells []float64) {
	q, k := mapOperands(d, n)
	tq, tk := q.On(b), k.On(b)
	blocks, rows := (n+flashRows-1)/flashRows, (n+mapWidth-1)/mapWidth
	cells = make([]float64, rows*rows)
	b.op(func(tmp *temporaries) error {
		var at [6]pointer
		var err error
		for i, f := range []func() (pointer, error){
			func() (pointer, error) { return b.rounded(tmp, b.read(tq), n*d) },
			func() (pointer, error) { return b.rounded(tmp, b.read(tk), n*d) },
			func() (pointer, error) { return tmp.floats(slices.Repeat([]float32{3}, n)) },
			func() (pointer, error) { return tmp.ints([]int32{0, 0}) },
			func() (pointer, error) { return tmp.get(4 * n) },
			func() (pointer, error) { return tmp.floats(make([]float32, rows*blocks*2)) },
		} {
			if at[i], err = f(); err != nil {
				return err
			}
		}
		if err := b.dev.launchShared(fmt.Sprintf("kv_flash_columns_%d", d), grid{x: blocks, y: 1}, 128, 3*flashRows*d*2, at[4], at[5], at[0], at[1], at[2], at[3], 1,
			n, 1, 1, 0, n, mapWidth, rows, scoreScale(d)); err != nil {
			return err
		}
		sums, parts := make([]float32, n), make([]float32, rows*blocks*2)
		if err := errors.Join(b.getFloats(at[4], sums), b.getFloats(at[5], parts)); err != nil {
			return err
		}
		for _, v := range sums {
			columns = append(columns, float64(v))
		}
		for i, v := range parts {
			row, block := i/2/blocks, i/2%blocks
			if c := block*flashRows/mapWidth + i%2; c < rows {
				cells[row*rows+c] += float64(v)
			}
		}
		return nil
	})
	b.Free(tq, tk)
	return columns, cells
}

// mapOperands are queries and keys of small integers, exact in bfloat16.
func mapOperands(d, n int) (q, k enginetest.Matrix) {
	r := enginetest.Seeded(12)
	for _, m := range []*enginetest.Matrix{&q, &k} {
		*m = enginetest.Matrix{Rows: n, Cols: d, V: make([]float64, n*d)}
		for i := range m.V {
			m.V[i] = float64(r.IntN(5) - 2)
		}
	}
	return q, k
}

// The last step of a block may hold the end of one map row and all of the next.
func TestMapColumns(t *testing.T) {
	b := newBackend(t, "bf16")
	for _, c := range [][3]int{{64, 200, 65}, {128, 200, 65}, {64, 200, 97}, {64, 130, 64}, {64, 128, 64}, {64, 70, 300}} {
		d, n, width := c[0], c[1], c[2]
		columns, cells := mapColumns(b, d, n, width)
		q, k := mapOperands(d, n)
		rows := (n + width - 1) / width
		wantColumns, wantCells := make([]float64, n), make([]float64, rows*rows)
		for i := range n {
			for j := range i + 1 {
				var s float64
				for x := range d {
					s += q.V[i*d+x] * k.V[j*d+x]
				}
				p := math.Exp2(s*float64(scoreScale(d)) - 3)
				wantColumns[j] += p
				wantCells[i/width*rows+j/width] += p
			}
		}
		enginetest.Within(t, fmt.Sprint("columns of ", c), columns, wantColumns, 1e-5)
		enginetest.Within(t, fmt.Sprint("cells of ", c), cells, wantCells, 1e-5)
	}
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
		if _, err := run(t, b, plainKernels, fusedKernels); err != nil {
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
	fake := machine(t, fakecuda.Options{})
	attempt := func(precision string, operations func(testing.TB, *Backend, *results), rewrite func(string) string) ([]float64, error) {
		fake.Reset(fakecuda.Options{Rewrite: rewrite})
		b, err := New(Options{Precision: precision, Symbols: resolver(fake), Staging: 1 << 16})
		if err != nil {
			t.Fatal(err)
		}
		got, err := run(t, b, operations)
		if e := b.Close(); (e == nil) != (err == nil) {
			t.Errorf("closing a GPU that ended with %v: %v", err, e)
		}
		return got, err
	}
	reported, seen, mutants := 0, 0, 0
	for _, ptx := range kernels.Modules() {
		precision, operations := "f32", plainKernels
		if strings.Contains(ptx, "cp.async") {
			precision, operations = "bf16", fusedKernels
		}
		want, err := attempt(precision, operations, nil)
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
				got, err := attempt(precision, operations, func(text string) string {
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
	fake := machine(t, fakecuda.Options{})
	run := func(ignore string) []float64 {
		fake.Reset(fakecuda.Options{Ignore: ignore})
		b, err := New(Options{Precision: "f32", Symbols: resolver(fake), Staging: 4096})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		x := b.New(10, 1000)
		b.Upload(x, enginetest.Normal(enginetest.Seeded(1), 10000, 1)) // more than the staging memory
		return enginetest.Download(b, x)
	}
	want := enginetest.Normal(enginetest.Seeded(1), 10000, 1)
	if got := run(""); !slices.Equal(got, want) {
		t.Fatal("values do not come back")
	}
	for _, call := range []string{"cuStreamSynchronize", "cuEventSynchronize"} {
		if slices.Equal(run(call), want) {
			t.Errorf("results are right without %s", call)
		}
	}
}
