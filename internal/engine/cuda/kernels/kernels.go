// Package kernels holds the CUDA kernels as PTX, compiled from the .cu files of this folder. The driver translates PTX
// for the GPU at hand, compute capability 8.0 or newer.
package kernels

import _ "embed"

//go:generate bash build.sh

//go:embed elementwise.ptx
var elementwise string

//go:embed attention.ptx
var attention string

//go:embed paged.ptx
var paged string

//go:embed flash.ptx
var flash string

// Modules returns the PTX of every source file.
func Modules() []string { return []string{elementwise, attention, paged, flash} }
