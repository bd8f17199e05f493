//go:build linux

package cuda

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/fakecuda"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// parameters counts the matrices' values of a configuration.
func parameters(c engine.Config) int64 {
	layer := c.Hidden*(2*c.QueryWidth()+2*c.KVWidth()) + 3*c.Hidden*c.Intermediate
	return int64(c.Layers*layer + 2*c.Vocab*c.Hidden)
}

// A model of which little fits gives the same bits as one that fits, forward and backward, and with other results never comes away: every
// wait counts.
func TestStreamedWeights(t *testing.T) {
	ctx, cfg := context.Background(), enginetest.Tiny()
	cfg.Layers = 7
	n := parameters(cfg)
	run := func(t *testing.T, b *Backend) (all []float64) {
		m := enginetest.NewModel(t, cfg, 4, b)
		defer m.Close()
		tokens := enginetest.Tokens(cfg, 20, 1)
		for range 2 {
			a := &engine.Sequence{Tokens: tokens, LogitRows: []int{19}}
			c := &engine.Sequence{Tokens: tokens[:9], LogitRows: []int{8}}
			if err := m.Forward(ctx, a, c); err != nil {
				t.Fatal(err)
			}
			all = append(append(all, a.Logits[0]...), c.Logits[0]...)
		}
		teacher, err := m.Teach(ctx, tokens)
		if err != nil {
			t.Fatal(err)
		}
		defer teacher.Free()
		gates := make([][]float64, cfg.Layers)
		for l := range gates {
			gates[l] = []float64{.3, .6}
		}
		s, err := m.Study(ctx, tokens, teacher, gates, engine.Mask{Sink: 1, Recent: 4}, []int{3, 19}, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Free()
		g, err := s.Backward(ctx, 1)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range g {
			all = append(all, x...)
		}
		return all
	}
	resident, _ := simulated(t, fakecuda.Options{}, Options{Precision: "bf16", Staging: 1 << 16})
	want := run(t, resident)
	if resident.Streamed() != 0 {
		t.Errorf("%d bytes streamed without need", resident.Streamed())
	}
	for _, share := range []int64{2, 4, 50} {
		for _, segment := range []int64{-1, 1 << 20} {
			t.Run(fmt.Sprintf("1 of %d, segments of %d", share, segment), func(t *testing.T) {
				b, _ := simulated(t, fakecuda.Options{}, Options{Precision: "bf16", Staging: 4096, Segment: segment, Parameters: n, Weights: 2 * n / share})
				if got := run(t, b); !slices.Equal(got, want) {
					t.Errorf("results depend on where weights are: they differ by %g", enginetest.Distance(got, want))
				}
			})
		}
	}
	fake := machine(t, fakecuda.Options{Ignore: "cuStreamWaitEvent"})
	b, err := New(Options{Precision: "bf16", Staging: 4096, Parameters: n, Weights: n, Symbols: resolver(fake)})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	m := enginetest.NewModel(t, cfg, 4, b)
	if b.Streamed() == 0 {
		t.Error("nothing is streamed")
	}
	if err := m.Forward(ctx, &engine.Sequence{Tokens: []int32{1, 2}, LogitRows: []int{1}}); err == nil {
		t.Error("results are finite although nobody waits for the weights")
	}
}

// However many sequences go through together, streamed weights are copied once.
func TestStreamedOncePerPass(t *testing.T) {
	ctx, cfg := context.Background(), enginetest.Tiny()
	cfg.Layers = 10
	n := parameters(cfg)
	b, fake := simulated(t, fakecuda.Options{}, Options{Precision: "bf16", Staging: 4096, Parameters: n, Weights: n}) // half of it
	m := enginetest.NewModel(t, cfg, 4, b)
	defer m.Close()
	pass := func(sequences int) int64 {
		var batch []*engine.Sequence
		for i := range sequences {
			batch = append(batch, &engine.Sequence{Tokens: enginetest.Tokens(cfg, 3, uint64(i))})
		}
		before := fake.Copied()
		if err := m.Forward(ctx, batch...); err != nil {
			t.Fatal(err)
		}
		return fake.Copied() - before
	}
	pass(1) // learns the order
	one := pass(1)
	eight := pass(8)
	if one < b.Streamed()/2 || one > b.Streamed()+b.Streamed()/4 {
		t.Errorf("a pass copies %d bytes, %d are streamed", one, b.Streamed())
	}
	if eight > one+one/4 {
		t.Errorf("eight sequences copy %d bytes, one copies %d", eight, one)
	}
	if inUse, _ := b.Memory(); b.Streamed() < n/3 || inUse > n+200<<10 {
		t.Errorf("%d bytes in use, %d of %d streamed", inUse, b.Streamed(), 2*n)
	}
}

// Large weights are expanded by several goroutines, in pieces that end anywhere.
func TestExpand(t *testing.T) {
	r := enginetest.Seeded(3)
	const cols = 96
	var parts []engine.Matrix
	var values []float64
	for _, rows := range []int{1500, 1, 2300} {
		m := enginetest.Random(r, rows, cols)
		parts, values = append(parts, m.Stored()), append(values, m.V...)
	}
	for _, kind := range []number{f32, bf16} {
		fill := expand(parts, kind)
		const lo = 4 * 1001
		got := make([]byte, len(values)*kind.bytes()-2*lo)
		fill(got, lo)
		want := make([]byte, len(got))
		expandPiece(want, lo, parts, kind)
		if !slices.Equal(got, want) {
			t.Errorf("kind %d: several goroutines write something else than one", kind)
		}
		first := values[lo/kind.bytes()]
		if kind == f32 && math.Float32frombits(binary.LittleEndian.Uint32(got)) != float32(first) || kind == bf16 && binary.LittleEndian.Uint16(got) != toBF16(float32(first)) {
			t.Errorf("kind %d: the first value is not %g", kind, first)
		}
	}
}
