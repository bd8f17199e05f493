package devices_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/devices"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// labelled has a name of its own.
type labelled struct {
	*ref.Backend[float32]
	label string
}

func (b labelled) Label() string { return b.label }

func newSet(t *testing.T, n int) *devices.Set {
	t.Helper()
	var on []engine.Backend
	for i := range n {
		on = append(on, labelled{ref.New[float32](), fmt.Sprintf("unit %d", i)})
	}
	cfg := enginetest.Tiny()
	s, err := devices.New(cfg, enginetest.Weights{Config: cfg, Seed: 5}, on...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// Whatever the number of devices, results come in order and have the bits that one device gives.
func TestMapIsTheSameOnAnyNumberOfDevices(t *testing.T) {
	var want [][]float64
	for _, n := range []int{1, 2, 3, 7} {
		s := newSet(t, n)
		var got [][]float64
		err := devices.Map(context.Background(), s, 9, func(ctx context.Context, m *engine.Model, i int) ([]float64, error) {
			q := &engine.Sequence{Tokens: enginetest.Tokens(m.Config, 3+5*((i*5)%9), uint64(i)), LogitRows: []int{2}}
			err := m.Forward(ctx, q)
			return slices.Concat(q.Logits...), err
		}, func(i int, logits []float64) error {
			if i != len(got) {
				t.Errorf("%d devices: result %d came after %d", n, i, len(got))
			}
			got = append(got, logits)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if want == nil {
			want = got
		}
		if len(got) != 9 || !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("%d devices give other results than one", n)
		}
	}
}

// A device that is slow holds the others up only when they are far ahead.
func TestMapDoesNotRunFarAhead(t *testing.T) {
	s := newSet(t, 3)
	var begun atomic.Int32
	release := make(chan struct{})
	go func() {
		for begun.Load() < 6 {
			runtime.Gosched()
		}
		time.Sleep(20 * time.Millisecond) // time for a seventh
		if n := begun.Load(); n != 6 {
			t.Errorf("%d begun while none was done, want 6", n)
		}
		close(release)
	}()
	var order []int
	err := devices.Map(context.Background(), s, 40, func(_ context.Context, _ *engine.Model, i int) (int, error) {
		begun.Add(1)
		if i == 0 {
			<-release
		}
		return i * i, nil
	}, func(i, square int) error {
		if square != i*i {
			t.Errorf("result of %d is %d", i, square)
		}
		order = append(order, i)
		return nil
	})
	if err != nil || len(order) != 40 || !slices.IsSorted(order) {
		t.Errorf("order %v, error %v", order, err)
	}
}

// A failure, wherever it comes from, ends all devices: the error says what it was and where, and no goroutine stays.
func TestFailuresEndAllDevices(t *testing.T) {
	before := runtime.NumGoroutine()
	broken := errors.New("broken")
	for _, n := range []int{1, 2, 3} {
		s := newSet(t, n)
		for name, c := range map[string]struct {
			work func(ctx context.Context, i int) error
			done func(i int) error
			want string
		}{
			"work":   {work: func(_ context.Context, i int) error { return pick(i == 4, broken) }},
			"first":  {work: func(_ context.Context, i int) error { return pick(i == 0, broken) }},
			"done":   {done: func(i int) error { return pick(i == 3, broken) }},
			"device": {work: func(_ context.Context, i int) error { return pick(i == 5, panicking(&engine.Failure{Err: broken})) }},
			// All others wait for the context that ends because of it.
			"waiting": {work: func(ctx context.Context, i int) error {
				if i == n-1 {
					return broken
				}
				<-ctx.Done()
				return ctx.Err()
			}},
		} {
			if n == 1 && name == "waiting" {
				continue
			}
			handed := 0
			err := devices.Map(context.Background(), s, 50, func(ctx context.Context, _ *engine.Model, i int) (int, error) {
				if c.work == nil {
					return i, nil
				}
				err := c.work(ctx, i)
				if p, ok := err.(panicError); ok {
					panic(p.value)
				}
				return i, err
			}, func(i, _ int) error {
				handed++
				if c.done == nil {
					return nil
				}
				return c.done(i)
			})
			if !errors.Is(err, broken) || n > 1 && !strings.HasPrefix(err.Error(), "unit ") {
				t.Errorf("%d devices, %s: %v", n, name, err)
			}
			if handed > 6 {
				t.Errorf("%d devices, %s: %d results handed over", n, name, handed)
			}
		}
		ctx, cancel := context.WithCancel(context.Background())
		err := devices.Map(ctx, s, 50, func(ctx context.Context, _ *engine.Model, i int) (int, error) {
			if i == 2 {
				cancel()
			}
			return i, nil
		}, func(int, int) error { return nil })
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%d devices: interrupted: %v", n, err)
		}
		func() {
			defer func() {
				if p := recover(); p != "defect" {
					t.Errorf("%d devices: a panic came as %v", n, p)
				}
			}()
			err := devices.Map(context.Background(), s, 9, func(_ context.Context, _ *engine.Model, i int) (int, error) {
				if i == 1 {
					panic("defect")
				}
				return i, nil
			}, func(int, int) error { return nil })
			t.Errorf("%d devices: a panic was an error: %v", n, err)
		}()
	}
	for wait := 0; runtime.NumGoroutine() > before; wait++ {
		if wait > 1000 {
			t.Fatalf("%d goroutines, before there were %d", runtime.NumGoroutine(), before)
		}
		time.Sleep(time.Millisecond)
	}
}

func pick(c bool, err error) error {
	if c {
		return err
	}
	return nil
}

// panicError asks the work to panic.
type panicError struct{ value any }

func (panicError) Error() string { return "panic" }

func panicking(v any) error { return panicError{v} }

// unloadable counts what is loaded, and fails at one tensor.
type unloadable struct {
	*ref.Backend[float32]
	live   map[engine.Weight]bool
	refuse string
}

func (b unloadable) Load(parts ...engine.Matrix) (engine.Weight, error) {
	if parts[0].Name == b.refuse {
		return nil, errors.New("no room")
	}
	w, err := b.Backend.Load(parts...)
	b.live[w] = true
	return w, err
}

func (b unloadable) Unload(w engine.Weight) {
	delete(b.live, w)
}

func TestSetsThatCannotBe(t *testing.T) {
	cfg := enginetest.Tiny()
	weights := enginetest.Weights{Config: cfg, Seed: 5}
	if _, err := devices.New(cfg, weights); err == nil {
		t.Error("a set of no devices")
	}
	if _, err := devices.New(cfg, weights, ref.New[float32](), engine.Backend(ref.New[float64]())); err == nil || !strings.Contains(err.Error(), "ref f64") {
		t.Errorf("devices that are not alike: %v", err)
	}
	// One device has no room for a weight: what the others have taken goes back.
	one := unloadable{ref.New[float32](), map[engine.Weight]bool{}, ""}
	other := unloadable{ref.New[float32](), map[engine.Weight]bool{}, "model.layers.1.mlp.down_proj.weight"}
	_, err := devices.New(cfg, weights, one, other)
	if err == nil || !strings.Contains(err.Error(), "device 1 of 2: tensor model.layers.1.mlp.down_proj.weight: no room") {
		t.Errorf("a device without room: %v", err)
	}
	if len(one.live) > 0 || len(other.live) == 0 {
		t.Errorf("%d weights left with the other device, %d with the one that failed", len(one.live), len(other.live))
	}
}
