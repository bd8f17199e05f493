package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/internal/engine/cpu"
	"github.com/kvprofile/kvprofile/internal/engine/cuda"
	"github.com/kvprofile/kvprofile/internal/engine/selfcheck"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// diagnosis is the result of kvprofile doctor.
type diagnosis struct {
	CPU     string             `json:"cpu"`
	Driver  string             `json:"cuda_driver,omitempty"` // CUDA version that the driver supports
	Problem string             `json:"cuda_problem,omitempty"`
	GPUs    []gpuReport        `json:"gpus,omitempty"`
	Backend string             `json:"checked,omitempty"`
	Checks  []selfcheck.Result `json:"checks,omitempty"`
}

type gpuReport struct {
	Device     string `json:"device"`
	Name       string `json:"name"`
	Capability string `json:"compute_capability"`
	Memory     int64  `json:"memory_bytes"`
}

func (a *app) doctorCommand() *cobra.Command {
	precision := "f32"
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Show the devices, and check that one computes what it should",
		Long: `doctor shows the processor's kernels, the NVIDIA driver, cuBLAS and GPUs as far as they are there, and runs every
operation on the chosen device and on the CPU in plain float32. It ends with code 3 when an operation is wrong.`,
		Example: "  kvprofile doctor\n  kvprofile doctor --device cuda:0",
		Args:    exactly(0, "no arguments"),
		RunE: func(*cobra.Command, []string) error {
			d, wrong, err := a.examine(precision)
			if err != nil {
				return err
			}
			if a.ui.JSON() {
				err = a.ui.PrintJSON(d)
			} else {
				err = a.printDiagnosis(d)
			}
			if err == nil && wrong > 0 {
				err = &findingsError{fmt.Sprintf("%d operations of %s are wrong", wrong, d.Backend)}
			}
			return err
		},
	}
	c.Flags().StringVar(&precision, "precision", precision, "precision of products to check: f32, or what the device has beside it (bf16, split)")
	return c
}

// examine looks at the machine and checks the chosen device.
func (a *app) examine(precision string) (d diagnosis, wrong int, err error) {
	plain, err := cpu.New(cpu.Options{Threads: a.shared.threads, Tier: "go"})
	if err != nil {
		return d, 0, err
	}
	defer plain.Close()
	best, err := cpu.New(cpu.Options{Threads: a.shared.threads})
	if err != nil {
		return d, 0, err
	}
	d.CPU = best.Name()
	best.Close()
	if symbols, err := a.libraries(a.shared.cublas); err != nil {
		d.Problem = err.Error()
	} else if gpus, version, err := cuda.Devices(symbols); err != nil {
		d.Problem = err.Error()
	} else {
		d.Driver = version
		for _, g := range gpus {
			d.GPUs = append(d.GPUs, gpuReport{fmt.Sprintf("cuda:%d", g.Index), g.Name, g.Capability, g.Memory})
		}
	}
	b, err := a.newBackend(0, precision)
	if err != nil {
		return d, 0, err
	}
	defer b.Close()
	d.Backend = b.Name()
	rounded := 2e-5
	if precision == "bf16" {
		rounded = 2e-2
	}
	d.Checks, err = selfcheck.Run(b, plain, selfcheck.Size{Rows: 96, Heads: 8, KVHeads: 2, HeadDim: 64}, 2e-5, rounded)
	for _, r := range d.Checks {
		if !r.OK() {
			wrong++
		}
	}
	return d, wrong, err
}

func (a *app) printDiagnosis(d diagnosis) error {
	if err := a.ui.Printf("%s\n", d.CPU); err != nil {
		return err
	}
	if d.Problem != "" {
		a.ui.Note("no GPU: %s", d.Problem)
	}
	for _, g := range d.GPUs {
		if err := a.ui.Printf("%s %s, compute capability %s, %s, driver for CUDA %s\n", g.Device, g.Name, g.Capability, ui.Bytes(g.Memory), d.Driver); err != nil {
			return err
		}
	}
	t := ui.Table{Header: []string{"operation of " + d.Backend, "error", "bound", ""}}
	for _, r := range d.Checks {
		verdict := "ok"
		if !r.OK() {
			verdict = "WRONG"
		}
		t.Add(r.Operation, fmt.Sprintf("%.1e", r.Error), fmt.Sprintf("%.0e", r.Bound), verdict)
	}
	return t.Render(a.ui.Out())
}
