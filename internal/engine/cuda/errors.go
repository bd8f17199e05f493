package cuda

import (
	"fmt"
	"strings"
	"unsafe"
)

// NoDriverError says that the machine has no NVIDIA driver.
type NoDriverError struct{ Tried []string }

func (e *NoDriverError) Error() string {
	return "no NVIDIA driver: libcuda.so.1 cannot be loaded (" + strings.Join(e.Tried, "; ") + "); install the driver, or compute on the CPU"
}

// NoCUBLASError says where cuBLAS was looked for.
type NoCUBLASError struct{ Tried []string }

func (e *NoCUBLASError) Error() string {
	return "cuBLAS is not found: it does not come with the driver; install it (pip install nvidia-cublas, or the CUDA toolkit) and name its folder; tried " +
		strings.Join(e.Tried, "; ")
}

// TooOldError says that the driver or the GPU is older than what the kernels need.
type TooOldError struct{ What, Have, Want string }

func (e *TooOldError) Error() string {
	return fmt.Sprintf("%s is %s, at least %s is needed", e.What, e.Have, e.Want)
}

// NoDeviceError says that a GPU of that number does not exist.
type NoDeviceError struct{ Index, Count int }

func (e *NoDeviceError) Error() string {
	return fmt.Sprintf("no GPU %d: the driver shows %d, numbered from 0", e.Index, e.Count)
}

// OutOfMemoryError says what was asked for and what there was, in bytes.
type OutOfMemoryError struct {
	Asked, Free, Total int64 // Free and Total as the driver sees them
	InUse              int64 // by this program's tensors and weights
}

func (e *OutOfMemoryError) Error() string {
	const gib = 1 << 30
	return fmt.Sprintf("GPU out of memory: %.3f GiB asked for, %.3f of %.3f GiB free, %.3f GiB in use by the model and its activations; take shorter samples or a GPU with more memory",
		float64(e.Asked)/gib, float64(e.Free)/gib, float64(e.Total)/gib, float64(e.InUse)/gib)
}

// LostError says that the GPU's context is gone: every later operation fails with it too.
type LostError struct{ Err *CallError }

func (e *LostError) Error() string {
	return "the GPU failed, nothing more can be computed in this process: " + e.Err.Error()
}
func (e *LostError) Unwrap() error { return e.Err }

// CallError is the failure of one call of the driver or of cuBLAS.
type CallError struct {
	Call string // C function
	Name string // CUDA_ERROR_..., CUBLAS_STATUS_...
	Code int32
}

func (e *CallError) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Name, e.Code) }

const codeOutOfMemory = 2

// lost lists the codes after which the driver refuses everything else.
func lost(code int32) bool {
	switch code {
	case 46, // device unavailable
		100, 101, // no device any more
		214, 220, // uncorrectable ECC error, NVLink
		700, 702, 708, 709, 710, 713, 714, 715, 716, 717, 718, 719, // illegal address ... launch failed
		721, 999:
		return true
	}
	return false
}

// check turns a driver's result into an error, and remembers when the GPU is lost.
func (d *device) check(call string, code int32) error {
	if code == 0 {
		return nil
	}
	e := &CallError{Call: call, Name: "unknown error", Code: code}
	var s *byte
	if d.api.errorName.call(uintptr(code), uintptr(unsafe.Pointer(&s))) == 0 && s != nil {
		e.Name = goString(s)
	}
	if lost(code) {
		d.lost = &LostError{e}
		return d.lost
	}
	return e
}

// checkBLAS does the same for cuBLAS.
func (d *device) checkBLAS(call string, code int32) error {
	if code == 0 {
		return nil
	}
	names := map[int32]string{1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR",
		13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR"}
	e := &CallError{Call: call, Name: "CUBLAS_STATUS_" + names[code], Code: code}
	if code == 13 || code == 14 {
		d.lost = &LostError{e}
		return d.lost
	}
	return e
}

// goString copies a C string.
func goString(s *byte) string {
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(s), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(s, n))
}
