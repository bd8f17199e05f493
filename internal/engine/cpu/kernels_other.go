//go:build !amd64

package cpu

// tiers lists the kernel sets that this processor can run, best first.
func tiers() []*kernels { return []*kernels{goKernels()} }
