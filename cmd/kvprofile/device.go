package main

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cpu"
	"github.com/kvprofile/kvprofile/internal/engine/cuda"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// everyGPU stands for all GPUs of the machine.
const everyGPU = "cuda:all"

// gpus are the numbers of the GPUs that --device names, in its order; none for all of them. ok is false for the CPU.
func (s *sharedFlags) gpus() (indices []int, ok bool) {
	rest, ok := strings.CutPrefix(s.device, "cuda:")
	if !ok || s.device == everyGPU {
		return nil, ok
	}
	for _, text := range strings.Split(rest, ",") {
		index, err := strconv.Atoi(text)
		if err != nil || index < 0 || index > 1023 || slices.Contains(indices, index) {
			return nil, false
		}
		indices = append(indices, index)
	}
	return indices, true
}

// checkDevice brings --device into one form.
func (s *sharedFlags) checkDevice() error {
	switch s.device {
	case "auto":
		s.device = "cpu"
	case "cuda":
		s.device = "cuda:0"
	}
	if _, ok := s.gpus(); s.device != "cpu" && !ok {
		return usagef("unknown device %q, expected auto, cpu, cuda, cuda:N, cuda:N,M,... or cuda:all", s.device)
	}
	return nil
}

// newBackend opens the device that was chosen, the first where there are several, as newBackends does.
func (a *app) newBackend(parameters int64, precision string) (engine.Backend, error) {
	b, err := a.openBackends(1, parameters, "", "", precision)
	if err != nil {
		return nil, err
	}
	return b[0], nil
}

// newBackends opens all devices that were chosen, for a model of so many weights. The rest is what the work was begun with, "" for what
// is best: kind (cpu or cuda), tier and precision.
func (a *app) newBackends(parameters int64, kind, tier, precision string) (backends, error) {
	return a.openBackends(math.MaxInt, parameters, kind, tier, precision)
}

// backends are devices that compute alike.
type backends []engine.Backend

// Close frees everything.
func (bs backends) Close() error {
	var errs []error
	for _, b := range bs {
		errs = append(errs, b.Close())
	}
	return errors.Join(errs...)
}

// openBackends opens at most so many of the devices.
func (a *app) openBackends(most int, parameters int64, kind, tier, precision string) (out backends, err error) {
	indices, onGPU := a.shared.gpus()
	chosen := "cpu"
	if onGPU {
		chosen = "cuda"
	}
	if kind != "" && kind != chosen {
		return nil, fmt.Errorf("begun on %s, not on %s", kind, chosen)
	}
	if !onGPU {
		b, err := cpu.New(cpu.Options{Threads: a.shared.threads, Tier: tier, Precision: precision})
		if err != nil {
			return nil, err
		}
		return backends{b}, nil
	}
	defer func() {
		if err != nil {
			err = errors.Join(ui.Hint(err, "%s doctor shows what is found on this machine; --device cpu works everywhere", program), out.Close())
			out = nil
		}
	}()
	symbols, err := a.libraries(a.shared.cublas)
	if err != nil {
		return nil, err
	}
	if a.shared.device == everyGPU {
		found, _, err := cuda.Devices(symbols)
		if err != nil {
			return nil, fmt.Errorf("--device %s: %w", a.shared.device, err)
		}
		for _, g := range found {
			indices = append(indices, g.Index)
		}
		if len(indices) == 0 {
			return nil, fmt.Errorf("--device %s: the driver shows no GPU", a.shared.device)
		}
	}
	var first cuda.Info
	for i, index := range indices[:min(most, len(indices))] {
		b, err := cuda.New(cuda.Options{Device: index, Precision: precision, Symbols: symbols, Parameters: parameters})
		if err != nil {
			return out, fmt.Errorf("--device cuda:%d: %w", index, err)
		}
		out = append(out, b)
		info := b.Info()
		if i == 0 {
			first = info
		}
		if info.Name != first.Name || info.Capability != first.Capability {
			return out, fmt.Errorf("cuda:%d is a %s, cuda:%d a %s: results would depend on which computes what; name GPUs that are alike", first.Index, first.Name, index, info.Name)
		}
	}
	if _, have, _ := tierOf(out[0]); tier != "" && tier != have {
		return out, fmt.Errorf("begun on a GPU of architecture %s, this one is %s", tier, have)
	}
	return out, nil
}
