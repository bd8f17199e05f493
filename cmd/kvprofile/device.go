package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cpu"
	"github.com/kvprofile/kvprofile/internal/engine/cuda"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// gpu is the number of the GPU that --device names; ok is false for the CPU.
func (s *sharedFlags) gpu() (index int, ok bool) {
	rest, ok := strings.CutPrefix(s.device, "cuda:")
	if !ok {
		return 0, false
	}
	index, err := strconv.Atoi(rest)
	return index, err == nil
}

// checkDevice brings --device into one form.
func (s *sharedFlags) checkDevice() error {
	switch s.device {
	case "auto":
		s.device = "cpu"
	case "cuda":
		s.device = "cuda:0"
	}
	if index, ok := s.gpu(); s.device != "cpu" && (!ok || index < 0 || index > 1023) {
		return usagef("unknown device %q, expected auto, cpu, cuda or cuda:N", s.device)
	}
	return nil
}

// newBackend opens the device that was chosen, for a model of so many weights. The rest is what the work was begun with, "" for what is
// best: kind (cpu or cuda), tier and precision.
func (a *app) newBackend(parameters int64, kind, tier, precision string) (engine.Backend, error) {
	index, onGPU := a.shared.gpu()
	chosen := "cpu"
	if onGPU {
		chosen = "cuda"
	}
	if kind != "" && kind != chosen {
		return nil, fmt.Errorf("begun on %s, not on %s", kind, chosen)
	}
	if !onGPU {
		return cpu.New(cpu.Options{Threads: a.shared.threads, Tier: tier, Precision: precision})
	}
	symbols, err := a.libraries(a.shared.cublas)
	if err != nil {
		return nil, ui.Hint(err, "%s doctor shows what is found on this machine; --device cpu works everywhere", program)
	}
	b, err := cuda.New(cuda.Options{Device: index, Precision: precision, Symbols: symbols, Parameters: parameters})
	if err != nil {
		return nil, ui.Hint(fmt.Errorf("--device %s: %w", a.shared.device, err), "%s doctor shows what is found on this machine; --device cpu works everywhere", program)
	}
	if _, have, _ := tierOf(b); tier != "" && tier != have {
		return nil, errors.Join(fmt.Errorf("begun on a GPU of architecture %s, this one is %s", tier, have), b.Close())
	}
	return b, nil
}
