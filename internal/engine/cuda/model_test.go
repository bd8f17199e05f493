//go:build linux

package cuda

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/fakecuda"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// A whole model agrees with float64, and gives back what it took.
func TestModel(t *testing.T) {
	rows := []int{40, 52, 59}
	both(t, func(t *testing.T, b *Backend) {
		for name, cfg := range enginetest.Variants() {
			t.Run(name, func(t *testing.T) {
				before, _ := b.Memory()
				values, gradient := 1e-5, 1e-4
				if b.half { // bfloat16 has 8 bits
					values, gradient = 6e-2, 1e-1
				}
				want := enginetest.RunModel(t, cfg, ref.New[float64](), rows...)
				enginetest.RunModel(t, cfg, b, rows...).Within(t, b.Name(), want, values, gradient)
				after, _ := b.Memory()
				if table := int64(2048 * cfg.HeadDim / 2 * 4 * 2); after > before+table+4096 && before > 0 || before == 0 && after > table+4096 {
					t.Errorf("%d bytes in use before, %d after: tensors or weights were not given back", before, after)
				}
			})
		}
	})
}

// The same work twice gives the same bits, whether memory is fresh or used again.
func TestSameBits(t *testing.T) {
	cfg := enginetest.Tiny()
	run := func(segment int64) (all []float64) {
		b, _ := simulated(t, fakecuda.Options{}, Options{Precision: "bf16", Segment: segment, Staging: 1 << 16})
		m := enginetest.NewModel(t, cfg, 4, b)
		defer m.Close()
		for range 2 {
			s := &engine.Sequence{Tokens: enginetest.Tokens(cfg, 40, 3), LogitRows: []int{39}}
			if err := m.Forward(context.Background(), s); err != nil {
				t.Fatal(err)
			}
			all = append(all, s.Logits[0]...)
		}
		return all
	}
	fresh, reused := run(-1), run(1<<20)
	if !slices.Equal(fresh, reused) || !slices.Equal(fresh[:len(fresh)/2], fresh[len(fresh)/2:]) {
		t.Error("bits depend on what the memory was used for before")
	}
}

// A GPU that runs full or breaks in the middle ends the pass with an error that says so, and does not hang.
func TestFailures(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("failures are simulated")
	}
	cfg := enginetest.Tiny()
	ctx := context.Background()
	open := func(memory int64) (*engine.Model, *Backend, *fakecuda.Driver) {
		fake := machine(t, fakecuda.Options{Memory: memory})
		b, err := New(Options{Precision: "f32", Symbols: resolver(fake), Segment: -1, Staging: 1 << 16})
		if err != nil {
			t.Fatal(err)
		}
		return enginetest.NewModel(t, cfg, 4, b), b, fake
	}

	m, b, fake := open(600 << 10)
	err := m.Forward(ctx, &engine.Sequence{Tokens: enginetest.Tokens(cfg, 500, 1)})
	var full *OutOfMemoryError
	if !errors.As(err, &full) {
		t.Fatalf("got %v, want an OutOfMemoryError", err)
	}
	if full.Asked <= full.Free || full.Total != 600<<10 || full.InUse <= 0 || full.Free <= 0 {
		t.Errorf("%+v makes no sense", *full)
	}
	t.Log(err)
	if err := m.Forward(ctx, &engine.Sequence{Tokens: enginetest.Tokens(cfg, 2, 1)}); err != nil {
		t.Errorf("nothing works any more after the memory was full once: %v", err)
	}
	if _, err := b.Load(engine.Matrix{Name: "large", Rows: 1000, Cols: 1000, DType: 1, Data: make([]byte, 4000000)}); !errors.As(err, &full) {
		t.Errorf("loading: got %v, want an OutOfMemoryError", err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if err := errors.Join(fake.Err(), fake.Leaks()); err != nil {
		t.Error(err)
	}

	m, b, fake = open(1 << 30)
	fake.Break(0, 20)
	teacher, err := m.Teach(ctx, enginetest.Tokens(cfg, 10, 1))
	var lost *LostError
	if !errors.As(err, &lost) || teacher != nil {
		t.Fatalf("got %v, want a LostError", err)
	}
	t.Log(err)
	if err := m.Forward(ctx, &engine.Sequence{Tokens: []int32{1}}); !errors.As(err, &lost) {
		t.Errorf("afterwards: got %v, want the same LostError", err)
	}
	if err := b.Close(); !errors.As(err, &lost) {
		t.Errorf("closing: got %v, want the same LostError", err)
	}
}

func TestNewRefuses(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("machines are simulated")
	}
	open := func(of fakecuda.Options, o Options) error {
		fake := machine(t, of)
		o.Symbols = resolver(fake)
		b, err := New(o)
		if err == nil {
			b.Close()
		}
		if leaks := fake.Leaks(); leaks != nil {
			t.Error(leaks)
		}
		return err
	}
	var old *TooOldError
	var none *NoDeviceError
	var full *CallError
	if err := open(fakecuda.Options{Driver: 10020}, Options{}); !errors.As(err, &old) {
		t.Errorf("an old driver: %v", err)
	}
	if err := open(fakecuda.Options{Capability: 75}, Options{}); !errors.As(err, &old) {
		t.Errorf("an old GPU: %v", err)
	}
	for _, index := range []int{-1, 1} {
		if err := open(fakecuda.Options{}, Options{Device: index}); !errors.As(err, &none) || none.Count != 1 {
			t.Errorf("GPU %d of 1: %v", index, err)
		}
	}
	if err := open(fakecuda.Options{Count: 2}, Options{Device: 1}); err != nil {
		t.Errorf("the second GPU of two: %v", err)
	}
	if err := open(fakecuda.Options{}, Options{Precision: "fp8"}); err == nil {
		t.Error("precision fp8 is accepted")
	}
	missing := func(_ Library, name string) (uintptr, error) {
		if name == "cublasGemmStridedBatchedEx" {
			return 0, errors.New("undefined symbol")
		}
		return 1, nil
	}
	if _, err := New(Options{Symbols: missing}); err == nil || errors.As(err, &full) {
		t.Errorf("a library without a function: %v", err)
	}
}

func TestDevices(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("machines are simulated")
	}
	gpus, version, err := Devices(resolver(machine(t, fakecuda.Options{Count: 2, Memory: 5 << 30})))
	want := []Info{{0, "simulated GPU", "9.0", 5 << 30, 132}, {1, "simulated GPU", "9.0", 5 << 30, 132}}
	if err != nil || version != "12.8" || !slices.Equal(gpus, want) {
		t.Errorf("got %+v, %s, %v", gpus, version, err)
	}
}

// Without the libraries the errors say what was looked for.
func TestLibraries(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("the libraries are there")
	}
	_, err := Libraries("/nonexistent")
	var driver *NoDriverError
	var blas *NoCUBLASError
	switch {
	case errors.As(err, &driver):
		if len(driver.Tried) == 0 {
			t.Error("the error does not say what was tried")
		}
	case errors.As(err, &blas):
		if len(blas.Tried) < 2 {
			t.Error("the error does not say what was tried")
		}
	default:
		t.Errorf("got %v", err)
	}
	if files := cublasFiles("/some/where"); files[0] != "/some/where" || files[1] != "/some/where/libcublas.so.13" {
		t.Errorf("a chosen folder is looked into as %v", files)
	}
}
