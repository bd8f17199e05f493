// Package devices spreads work over copies of one model on several backends, such as the GPUs of a machine.
//
// Backends of one set compute alike, bit for bit. What is put together from their results is put together in the order of the
// work, never in that of its coming: nothing depends on how many devices there are, or on which was faster.
package devices

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// Set is one model on one or several backends.
type Set struct {
	models []*engine.Model
	labels []string // what errors call the devices
}

// Of is the set of one model.
func Of(m *engine.Model) *Set { return &Set{models: []*engine.Model{m}, labels: []string{""}} }

// New loads a model's weights into every backend, into all at once. The backends must have one name, which says how they compute,
// and stay open when the set is closed. A backend with a method Label is called so in errors. Errors are those of engine.New.
func New(cfg engine.Config, weights engine.Weights, backends ...engine.Backend) (*Set, error) {
	if len(backends) == 0 {
		return nil, errors.New("no devices")
	}
	for i, b := range backends {
		if b.Name() != backends[0].Name() {
			return nil, fmt.Errorf("device %d is %s, device 0 is %s: results would depend on which computes what", i, b.Name(), backends[0].Name())
		}
	}
	s := &Set{models: make([]*engine.Model, len(backends))}
	for i, b := range backends {
		label := fmt.Sprintf("device %d of %d", i, len(backends))
		if l, ok := b.(interface{ Label() string }); ok {
			label = l.Label()
		}
		s.labels = append(s.labels, label)
	}
	err := s.Each(context.Background(), func(_ context.Context, device int, _ *engine.Model) (err error) {
		s.models[device], err = engine.New(cfg, weights, backends[device])
		return err
	})
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Len is the number of devices.
func (s *Set) Len() int { return len(s.models) }

// First is the model on the first device, for what needs one only.
func (s *Set) First() *engine.Model { return s.models[0] }

// Close gives the weights back, but of devices that failed: there is nothing to be had. The backends stay open.
func (s *Set) Close() {
	for _, m := range s.models {
		if m != nil {
			_ = guarded(func() error { m.Close(); return nil })
		}
	}
}

// Each runs work on all devices at once, and waits for all. After an error the others' context ends. The error returned is that of the
// first device, in their order, that did not only follow another; where there are several devices it says which one it was.
// A failing device is an error, any other panic of work is raised here.
func (s *Set) Each(ctx context.Context, work func(ctx context.Context, device int, m *engine.Model) error) error {
	n := len(s.models)
	if n == 1 {
		return guarded(func() error { return work(ctx, 0, s.models[0]) })
	}
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	errs, panics := make([]error, n), make([]any, n)
	var wait sync.WaitGroup
	for d := range n {
		wait.Go(func() {
			defer func() {
				if panics[d] = recover(); panics[d] != nil || errs[d] != nil {
					cancel()
				}
			}()
			errs[d] = guarded(func() error { return work(inner, d, s.models[d]) })
		})
	}
	wait.Wait()
	for _, p := range panics {
		if p != nil {
			panic(p)
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	for d, err := range errs {
		if err != nil && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("%s: %w", s.labels[d], err)
		}
	}
	return errors.Join(errs...)
}

// guarded makes the failure of a device an error.
func guarded(f func() error) (err error) {
	defer engine.Catch(&err)
	return f()
}

// Map runs work for 0 to n-1, each on the device that is free first, and hands the results to done in rising order, one at a time. A
// device does not run ahead of what is done by more than twice the number of devices. The first error ends it all; then results
// that were not handed over are dropped.
func Map[T any](ctx context.Context, s *Set, n int, work func(ctx context.Context, m *engine.Model, i int) (T, error), done func(i int, result T) error) error {
	var (
		mu      sync.Mutex
		moved   = sync.NewCond(&mu)
		next    int // to be begun
		handed  int // given to done
		ended   bool
		waiting = map[int]T{}
	)
	take := func() (i int, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		for !ended && next < n && next >= handed+2*s.Len() {
			moved.Wait()
		}
		if ended || next >= n {
			return 0, false
		}
		next++
		return next - 1, true
	}
	give := func(i int, result T) error {
		mu.Lock()
		defer mu.Unlock()
		defer moved.Broadcast()
		waiting[i] = result
		for !ended {
			r, ok := waiting[handed]
			if !ok {
				break
			}
			delete(waiting, handed)
			if err := done(handed, r); err != nil {
				return err
			}
			handed++
		}
		return nil
	}
	return s.Each(ctx, func(ctx context.Context, _ int, m *engine.Model) error {
		whole := false
		defer func() {
			if !whole { // an error or a panic: nobody shall wait for this device
				mu.Lock()
				ended = true
				mu.Unlock()
				moved.Broadcast()
			}
		}()
		for {
			i, ok := take()
			if !ok {
				whole = true
				return nil
			}
			err := ctx.Err()
			if err != nil {
				return err
			}
			result, err := work(ctx, m, i)
			if err != nil {
				return err
			}
			if err := give(i, result); err != nil {
				return err
			}
		}
	})
}
