//go:build linux

package cuda

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/fakecuda"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// A training step that does not fit the GPU's memory moves teachers and activations to the host, and comes to the same bits. What does
// not fit even so is an error, after which less works.
func TestSpill(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("memory of that size is simulated")
	}
	ctx, cfg := context.Background(), enginetest.Tiny()
	cfg.Layers = 8
	gates := make([][]float64, cfg.Layers)
	for l := range gates {
		gates[l] = []float64{.3, .6}
	}
	lengths := []int{40, 23, 40}
	// step is two steps over three samples whose teachers are kept; the second finds them wherever they are.
	step := func(b *Backend, stash int64) (all []float64, err error) {
		m, err := engine.New(cfg, enginetest.Weights{Config: cfg, Seed: 4}, b)
		if err != nil {
			return nil, err
		}
		defer m.Close()
		var tokens [][]int32
		for i, n := range lengths {
			tokens = append(tokens, enginetest.Tokens(cfg, n, uint64(i)))
		}
		teachers, err := m.TeachAll(ctx, tokens...)
		if err != nil {
			return nil, err
		}
		defer func() {
			for _, x := range teachers {
				x.Free()
			}
		}()
		for range 2 {
			var lessons []engine.Lesson
			for i, x := range tokens {
				lessons = append(lessons, engine.Lesson{Tokens: x, Teacher: teachers[i], Rows: []int{3, len(x) - 1}})
			}
			students, err := m.StudyAll(ctx, lessons, gates, engine.Mask{Sink: 1, Recent: 4}, stash)
			if err != nil {
				return nil, err
			}
			grads, err := engine.BackwardAll(ctx, students)
			for i, s := range students {
				if err == nil {
					all = append(append(all, s.Loss), slices.Concat(grads[i]...)...)
				}
				s.Free()
			}
			if err != nil {
				return nil, err
			}
		}
		return all, nil
	}
	for _, stash := range []int64{0, math.MaxInt64} {
		roomy, _ := simulated(t, fakecuda.Options{}, Options{Precision: "bf16", Staging: 4096, Segment: -1})
		want, err := step(roomy, stash)
		if err != nil {
			t.Fatal(err)
		}
		_, peak := roomy.Memory()
		weights := roomy.WeightBytes(parameters(cfg))
		if _, most, _ := roomy.Spilled(); most != 0 {
			t.Errorf("%d bytes moved to the host without need", most)
		}
		for _, c := range []struct{ percent, segment int64 }{{90, -1}, {60, -1}, {70, 32 << 10}} {
			t.Run(fmt.Sprintf("stash %d, %d %% of the memory beside weights, segments of %d", stash, c.percent, c.segment), func(t *testing.T) {
				b, _ := simulated(t, fakecuda.Options{Memory: weights + (peak-weights)*c.percent/100}, Options{Precision: "bf16", Staging: 4096, Segment: c.segment})
				got, err := step(b, stash)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, want) {
					t.Errorf("results depend on where tensors are: they differ by %g", enginetest.Distance(got, want))
				}
				inUse, most, moved := b.Spilled()
				if inUse != 0 || most == 0 || moved < most {
					t.Errorf("%d bytes on the host at the end, %d at most, %d moved", inUse, most, moved)
				}
				t.Logf("of %d bytes beside the weights %d were on the host at most, %d moved there", peak-weights, most, moved)
			})
		}
		t.Run(fmt.Sprintf("stash %d, too little", stash), func(t *testing.T) {
			b, _ := simulated(t, fakecuda.Options{Memory: weights + (peak-weights)/20}, Options{Precision: "bf16", Staging: 4096, Segment: -1})
			var full *OutOfMemoryError
			if _, err := step(b, stash); !errors.As(err, &full) {
				t.Errorf("got %v, want an OutOfMemoryError", err)
			}
		})
	}
}

// Parked tensors can be read, sliced and freed at any time, wherever they are.
func TestPark(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("memory of that size is simulated")
	}
	b, _ := simulated(t, fakecuda.Options{Memory: 5 * 4000}, Options{Precision: "f32", Staging: 4096, Segment: -1, Parameters: 1})
	fill := func(x float64) engine.Tensor {
		y := b.New(10, 100)
		v := make([]float64, 1000)
		for i := range v {
			v[i] = x + float64(i)
		}
		b.Upload(y, v)
		return y
	}
	check := func(y engine.Tensor, x float64) {
		t.Helper()
		row := make([]float64, 100)
		b.Download(row, b.Slice(y, 7, 8))
		if row[0] != x+700 || row[99] != x+799 {
			t.Errorf("row 7 is %g to %g, want %g on", row[0], row[99], x+700)
		}
	}
	var all []engine.Tensor
	for i := range 12 {
		y := fill(float64(1000 * i))
		b.Park(y, b.Slice(y, 2, 3)) // a view, and a second time
		all = append(all, y)
	}
	inUse, _, moved := b.Spilled()
	if inUse < 7*4000 || inUse != moved {
		t.Errorf("%d bytes on the host, %d moved", inUse, moved)
	}
	for round := range 2 {
		for i, y := range all {
			check(y, float64(1000*i))
			b.Park(y)
		}
		if _, _, again := b.Spilled(); again > 12*4000 {
			t.Errorf("round %d: %d bytes moved to the host, more than there are", round, again)
		}
	}
	b.Free(all[0], all[5], all[11])
	check(all[1], 1000)
	check(all[10], 10000)
	b.Free(all[1:5]...)
	b.Free(all[6:11]...)
	if inUse, _, _ := b.Spilled(); inUse != 0 {
		t.Errorf("%d bytes on the host after all were freed", inUse)
	}
	if inUse, _ := b.Memory(); inUse != 0 {
		t.Errorf("%d bytes in use after all were freed", inUse)
	}
}
