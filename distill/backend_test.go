package distill

import (
	"context"
	"math"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine/cpu"
	"github.com/kvprofile/kvprofile/internal/engine/devices"
)

// In float32 and on every tier of kernels, loss and gradients at random gates stay within 1e-4 of PyTorch's float64, and
// the gates after 50 steps within 1e-3.
func TestFastBackendEqualsPyTorch(t *testing.T) {
	for _, tier := range []string{"avx512", "avx2", "go"} {
		backend, err := cpu.New(cpu.Options{Tier: tier})
		if err != nil {
			t.Logf("not tested: %v", err)
			continue
		}
		for _, name := range fixtures {
			f := loadFixture(t, name)
			m, ds := f.model(t, backend), f.dataset()
			opt := f.options(1)
			opt.TeacherLimit = 0
			loss := newStudentLoss(devices.Of(m), ds, opt, []int{0, 1, 2})
			var flat []float64
			for _, g := range f.Gates {
				flat = append(flat, g...)
			}
			for i, want := range f.AtRandom {
				loss.step = i
				got, err := loss.forward(context.Background(), flat)
				if err != nil {
					t.Fatal(err)
				}
				grad, err := loss.vjp(context.Background(), flat, 1)
				if err != nil {
					t.Fatal(err)
				}
				dl, dg := math.Abs(got/want.Loss-1), worst(t, square(grad, f.Config.KVHeads), want.Gradient)
				if dl > 1e-4 || dg > 1e-4 {
					t.Errorf("%s, %s, sample %d: loss is off by %g, gradient by %g", backend.Name(), name, i, dl, dg)
				}
				t.Logf("%s, %s, sample %d: loss off by %.1e, gradient by %.1e", backend.Name(), name, i, dl, dg)
			}
			loss.free()
			tr, err := newTrainer(devices.Of(m), ds, f.options(f.Training.Steps), f.Training.Order)
			if err != nil {
				t.Fatal(err)
			}
			g, err := tr.train(context.Background(), nil)
			tr.close()
			if err != nil {
				t.Fatal(err)
			}
			if d := worst(t, g.Values, f.Training.Gates); d > 1e-3 {
				t.Errorf("%s, %s: gates are off by %g after training", backend.Name(), name, d)
			} else {
				t.Logf("%s, %s: gates off by %.1e after training", backend.Name(), name, d)
			}
			m.Close()
		}
		if err := backend.Close(); err != nil {
			t.Error(err)
		}
	}
}
