package cuda

import (
	"fmt"
	"path/filepath"
	"strings"
)

// Library names one of the two shared libraries that the backend calls.
type Library string

const (
	Driver Library = "libcuda"   // comes with the NVIDIA driver
	CUBLAS Library = "libcublas" // comes with the CUDA toolkit or the package nvidia-cublas of PyPI
)

// Symbols finds the address of a C function. Production resolves against the real libraries; tests against a driver
// written in Go.
type Symbols func(l Library, name string) (uintptr, error)

// proc is the address of a C function whose arguments are all integers or pointers.
type proc uintptr

// api is the table of C functions.
type api struct {
	init, driverVersion, deviceCount, deviceGet, deviceName, deviceAttribute, deviceMemory proc
	contextRetain, contextRelease, contextSet                                              proc
	memAlloc, memFree, memInfo, hostAlloc, hostFree                                        proc
	copyIn, copyOut, copyOver, set8                                                        proc
	moduleLoad, moduleUnload, moduleFunction, functionAttribute, launch                    proc
	streamCreate, streamDestroy, streamSync, streamWait                                    proc
	eventCreate, eventDestroy, eventRecord, eventSync                                      proc
	errorName                                                                              proc
	blasCreate, blasDestroy, blasStream, blasMathMode, gemm, gemmStrided                   proc
}

// bind fills the table. A name that is missing means that the library is too old.
func bind(symbols Symbols) (*api, error) {
	a := &api{}
	for _, f := range []struct {
		library Library
		name    string
		to      *proc
	}{
		{Driver, "cuInit", &a.init}, {Driver, "cuDriverGetVersion", &a.driverVersion}, {Driver, "cuDeviceGetCount", &a.deviceCount},
		{Driver, "cuDeviceGet", &a.deviceGet}, {Driver, "cuDeviceGetName", &a.deviceName}, {Driver, "cuDeviceGetAttribute", &a.deviceAttribute},
		{Driver, "cuDeviceTotalMem_v2", &a.deviceMemory},
		{Driver, "cuDevicePrimaryCtxRetain", &a.contextRetain}, {Driver, "cuDevicePrimaryCtxRelease_v2", &a.contextRelease},
		{Driver, "cuCtxSetCurrent", &a.contextSet}, {Driver, "cuMemAlloc_v2", &a.memAlloc}, {Driver, "cuMemFree_v2", &a.memFree},
		{Driver, "cuMemGetInfo_v2", &a.memInfo}, {Driver, "cuMemHostAlloc", &a.hostAlloc}, {Driver, "cuMemFreeHost", &a.hostFree},
		{Driver, "cuMemcpyHtoDAsync_v2", &a.copyIn}, {Driver, "cuMemcpyDtoHAsync_v2", &a.copyOut}, {Driver, "cuMemcpyDtoDAsync_v2", &a.copyOver},
		{Driver, "cuMemsetD8Async", &a.set8}, {Driver, "cuModuleLoadData", &a.moduleLoad}, {Driver, "cuModuleUnload", &a.moduleUnload},
		{Driver, "cuModuleGetFunction", &a.moduleFunction}, {Driver, "cuFuncSetAttribute", &a.functionAttribute}, {Driver, "cuLaunchKernel", &a.launch}, {Driver, "cuStreamCreate", &a.streamCreate},
		{Driver, "cuStreamDestroy_v2", &a.streamDestroy}, {Driver, "cuStreamSynchronize", &a.streamSync}, {Driver, "cuStreamWaitEvent", &a.streamWait}, {Driver, "cuEventCreate", &a.eventCreate},
		{Driver, "cuEventDestroy_v2", &a.eventDestroy}, {Driver, "cuEventRecord", &a.eventRecord}, {Driver, "cuEventSynchronize", &a.eventSync},
		{Driver, "cuGetErrorName", &a.errorName},
		{CUBLAS, "cublasCreate_v2", &a.blasCreate}, {CUBLAS, "cublasDestroy_v2", &a.blasDestroy}, {CUBLAS, "cublasSetStream_v2", &a.blasStream},
		{CUBLAS, "cublasSetMathMode", &a.blasMathMode}, {CUBLAS, "cublasGemmEx", &a.gemm}, {CUBLAS, "cublasGemmStridedBatchedEx", &a.gemmStrided},
	} {
		p, err := symbols(f.library, f.name)
		if err != nil {
			return nil, fmt.Errorf("%s has no function %s, a newer one is needed: %w", f.library, f.name, err)
		}
		*f.to = proc(p)
	}
	return a, nil
}

// Libraries loads the real libraries. cublas, when not "", is the file or the folder of libcublas to take.
func Libraries(cublas string) (Symbols, error) {
	driver, tried := load("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1", "libcuda.so")
	if driver == 0 {
		return nil, &NoDriverError{Tried: tried}
	}
	blas, tried := load(cublasFiles(cublas)...)
	if blas == 0 {
		return nil, &NoCUBLASError{Tried: tried}
	}
	return func(l Library, name string) (uintptr, error) {
		if l == CUBLAS {
			return symbol(blas, name)
		}
		return symbol(driver, name)
	}, nil
}

// cublasFiles lists where cuBLAS may be. Python packages are looked for in the virtual environment and in the usual
// folders, so that a machine that runs PyTorch needs nothing more.
func cublasFiles(chosen string) []string {
	names := []string{"libcublas.so.13", "libcublas.so.12", "libcublas.so.11", "libcublas.so"}
	if chosen != "" {
		files := []string{chosen}
		for _, n := range names {
			files = append(files, filepath.Join(chosen, n))
		}
		return files
	}
	files := append([]string(nil), names[:3]...)
	for _, pattern := range []string{
		"/usr/local/cuda*/lib64/libcublas.so.1[123]",
		"/usr/local/cuda*/targets/*/lib/libcublas.so.1[123]",
		"/usr/lib/*/libcublas.so.1[123]",
		"/usr/*/lib/python3*/*-packages/nvidia/*/lib/libcublas.so.1[123]",
		"/usr/lib/python3*/*-packages/nvidia/*/lib/libcublas.so.1[123]",
		"/opt/*/lib/python3*/site-packages/nvidia/*/lib/libcublas.so.1[123]",
	} {
		found, _ := filepath.Glob(pattern) // the patterns are well formed
		for i := len(found) - 1; i >= 0; i-- {
			files = append(files, found[i]) // newest first
		}
	}
	return files
}

// load opens the first library that can be opened, and says what became of the others.
func load(files ...string) (handle uintptr, tried []string) {
	for _, f := range files {
		h, err := open(f)
		if err == nil {
			return h, tried
		}
		message := err.Error()
		if !strings.Contains(message, f) {
			message = f + ": " + message
		}
		tried = append(tried, message)
	}
	return 0, tried
}
