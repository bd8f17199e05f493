// Package fakecuda is libcuda and libcublas written in Go, for tests. It is reached through C function pointers, so the real
// binding runs against it: names, calling convention, order and width of arguments, packing of launch parameters. Kernels run in
// an interpreter of the PTX that ships (package ptxsim).
//
// Everything asynchronous is deferred until something waits for it, in the order of its stream, so that a missing
// synchronisation shows: host memory is read and written when a copy is executed, not when it is queued. Pinned memory
// and device memory start as NaN. Calls from a thread without a context, host memory that is not pinned, the default stream,
// and errors of kernels are refused as the driver would or more strictly.
//
// It exists on Linux only.
package fakecuda
