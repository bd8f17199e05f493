//go:build linux

package fakecuda

import (
	"encoding/binary"
	"fmt"
	"math"
	"sync"
	"syscall"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/kvprofile/kvprofile/internal/engine/cuda/ptxsim"
)

// Options describe the machine that is simulated.
type Options struct {
	Memory     int64 // bytes of each GPU; 0 means 1 GiB
	Driver     int   // CUDA version of the driver; 0 means 12080
	Capability int   // 10 * major + minor; 0 means 90
	Count      int   // number of GPUs; 0 means 1

	// Rewrite, when not nil, changes PTX before it is taken: a test breaks a kernel and expects that to be seen.
	Rewrite func(ptx string) string
	// Ignore names a function that does nothing, for the same purpose.
	Ignore string
	// Trace, when not nil, is told of kernels and products in place of their execution, and large memory is not there: models of any
	// size go through, and nothing is computed.
	Trace func(Work)
}

// Work is one launch of a kernel, or one product where Kernel is "".
type Work struct {
	Kernel string
	Grid   [3]uint32
	Params []uint64 // as they lie in the parameter buffer, each widened

	M, N, K, Batch int // c[m,n] of column-major a[m,k] and b[k,n]
	Half           bool
	Accumulate     bool
}

// virtual is where large memory lies that is not there, and large its size in bytes.
const (
	virtual = 1 << 44
	large   = 64 << 10
)

// defaults fills in what is not given.
func (o Options) defaults() Options {
	set := func(to *int, value int) {
		if *to == 0 {
			*to = value
		}
	}
	if o.Memory == 0 {
		o.Memory = 1 << 30
	}
	set(&o.Driver, 12080)
	set(&o.Capability, 90)
	set(&o.Count, 1)
	return o
}

// Results of the driver and of cuBLAS.
const (
	okay             = 0
	invalidValue     = 1
	outOfMemory      = 2
	invalidDevice    = 101
	invalidContext   = 201
	invalidPTX       = 218
	notFound         = 500
	illegalAddress   = 700
	blasInvalidValue = 7
	blasExecution    = 13
	blasNotSupported = 15
)

// Driver is one simulated machine.
type Driver struct {
	mu      sync.Mutex
	options Options
	gpus    []*gpu
	err     error // the first thing that went wrong

	contexts map[int]uintptr  // by thread
	owner    map[uintptr]*gpu // of handles and of pinned memory
	modules  map[uintptr]*ptxsim.Module
	kernels  map[uintptr]*ptxsim.Kernel
	granted  map[uintptr]int32 // dynamic shared memory
	streams  map[uintptr]*stream
	events   map[uintptr]*event
	blas     map[uintptr]uintptr // stream of each handle
	pinned   map[uintptr][]byte
	handles  uintptr
	counts   map[string]int
	gemmFLOP int64
	copied   int64            // to the GPU, bytes
	absent   map[uint64]int64 // sizes of large memory that is not there
	next     uint64
	symbols  map[string]uintptr
	names    map[int32][]byte
}

// gpu is one of the machine's.
type gpu struct {
	device   *ptxsim.Device
	sticky   int32 // after a failed kernel every call fails
	breakAt  int   // fail when so many launches have been executed
	launched int
	retained int
}

// stream is work of one GPU that has not been done yet.
type stream struct {
	on    *gpu
	queue []task
}

type task struct {
	what string
	run  func(on *gpu) error
}

// event is done when its stream has come to it.
type event struct {
	stream *stream
	done   bool
}

// New makes a machine. Each takes some of the process's callbacks, of which there are 2,000: about 40 machines.
func New(o Options) *Driver {
	f := &Driver{symbols: map[string]uintptr{}, names: map[int32][]byte{}}
	f.Reset(o)
	for code, name := range map[int32]string{invalidValue: "CUDA_ERROR_INVALID_VALUE", outOfMemory: "CUDA_ERROR_OUT_OF_MEMORY", invalidDevice: "CUDA_ERROR_INVALID_DEVICE",
		invalidContext: "CUDA_ERROR_INVALID_CONTEXT", invalidPTX: "CUDA_ERROR_INVALID_PTX", notFound: "CUDA_ERROR_NOT_FOUND", illegalAddress: "CUDA_ERROR_ILLEGAL_ADDRESS"} {
		f.names[code] = append([]byte(name), 0)
	}
	for name, fn := range f.functions() {
		f.symbols[name] = purego.NewCallback(fn)
	}
	return f
}

// Reset makes a new machine of this one, which must not be in use: callbacks are few.
func (f *Driver) Reset(o Options) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.pinned {
		if err := syscall.Munmap(m); err != nil {
			panic(err) // it was mapped here
		}
	}
	f.options, f.gpus, f.err, f.gemmFLOP, f.copied = o.defaults(), nil, nil, 0, 0
	for i := range f.options.Count {
		f.gpus = append(f.gpus, &gpu{device: ptxsim.NewDeviceAt(0x7f0000000000 + uint64(i)<<40)})
	}
	f.owner = map[uintptr]*gpu{}
	f.granted, f.absent, f.next = map[uintptr]int32{}, map[uint64]int64{}, virtual
	f.contexts, f.modules, f.kernels, f.streams = map[int]uintptr{}, map[uintptr]*ptxsim.Module{}, map[uintptr]*ptxsim.Kernel{}, map[uintptr]*stream{}
	f.events, f.blas, f.pinned, f.counts = map[uintptr]*event{}, map[uintptr]uintptr{}, map[uintptr][]byte{}, map[string]int{}
}

// Symbol returns the address of a C function.
func (f *Driver) Symbol(name string) (uintptr, error) {
	if p, ok := f.symbols[name]; ok {
		return p, nil
	}
	return 0, fmt.Errorf("undefined symbol: %s", name)
}

// Err is the first thing that went wrong, in words.
func (f *Driver) Err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// Calls counts the calls of a function, "launch KERNEL" the executed launches of a kernel.
func (f *Driver) Calls(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts[name]
}

// Copied returns the bytes that were copied to the GPU so far.
func (f *Driver) Copied() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.copied
}

// Work returns the warp instructions executed and the floating-point operations of matrix products so far.
func (f *Driver) Work() (instructions uint64, flop int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, g := range f.gpus {
		instructions += g.device.Steps.Load()
	}
	return instructions, f.gemmFLOP
}

// Leaks says what has not been given back. Of a GPU that failed nothing can be.
func (f *Driver) Leaks() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	allocations, contexts, queued := 0, 0, 0
	var bytes int64
	for _, g := range f.gpus {
		if g.sticky == 0 {
			allocations, bytes, contexts = allocations+g.device.Live(), bytes+g.device.Used, contexts+g.retained
		}
	}
	for _, s := range f.streams {
		if s.on.sticky == 0 {
			queued += len(s.queue)
		}
	}
	modules, streams, events, blas, pinned := left(f, f.modules), left(f, f.streams), left(f, f.events), left(f, f.blas), left(f, f.pinned)
	if allocations+contexts+modules+streams+events+blas+pinned+queued > 0 {
		return fmt.Errorf("left behind: %d allocations (%d bytes), %d contexts, %d modules, %d streams with %d tasks, %d events, %d cuBLAS handles, %d pinned buffers",
			allocations, bytes, contexts, modules, streams, queued, events, blas, pinned)
	}
	return nil
}

// left counts what belongs to GPUs that did not fail.
func left[T any](f *Driver, have map[uintptr]T) (n int) {
	for h := range have {
		if f.owner[h].sticky == 0 {
			n++
		}
	}
	return n
}

// Break makes a GPU's n-th launch from now fail, as when it falls off the bus.
func (f *Driver) Break(index, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gpus[index].breakAt = f.gpus[index].launched + n
}

// fail remembers why a call fails.
func (f *Driver) fail(code int32, format string, args ...any) int32 {
	if f.err == nil {
		f.err = fmt.Errorf(format, args...)
	}
	return code
}

// enter counts a call, and insists on a context on the calling thread. The caller holds the lock.
func (f *Driver) enter(name string) int32 {
	f.counts[name]++
	g := f.here()
	if g == nil {
		return f.fail(invalidContext, "%s: no context on this thread", name)
	}
	return g.sticky
}

// here is the GPU of the calling thread's context, nil without one.
func (f *Driver) here() *gpu {
	c := f.contexts[syscall.Gettid()]
	if c == 0 {
		return nil
	}
	return f.gpus[c-firstContext]
}

// firstContext is the handle of the first GPU's context.
const firstContext = 0x100

func (f *Driver) handle() uintptr {
	f.handles++
	h := 0x1000 + f.handles
	f.owner[h] = f.here()
	return h
}

// queue defers a task.
func (f *Driver) queue(name string, at uintptr, run func(on *gpu) error) int32 {
	if code := f.enter(name); code != okay {
		return code
	}
	s := f.streams[at]
	if s == nil {
		return f.fail(invalidValue, "%s: no stream %#x", name, at)
	}
	if s.on != f.here() {
		return f.fail(invalidContext, "%s: a stream of another GPU than the thread's", name)
	}
	s.queue = append(s.queue, task{name, run})
	return okay
}

// drain executes a stream, until the condition holds where one is given.
func (f *Driver) drain(s *stream, until func() bool) int32 {
	for len(s.queue) > 0 && (until == nil || !until()) {
		t := s.queue[0]
		s.queue = s.queue[1:]
		if err := t.run(s.on); err != nil {
			s.on.sticky = illegalAddress
			return f.fail(illegalAddress, "%s: %w", t.what, err)
		}
	}
	return s.on.sticky
}

// drainAll executes everything of the thread's GPU, as calls do that stop it.
func (f *Driver) drainAll() int32 {
	for _, s := range f.streams {
		if s.on != f.here() {
			continue
		}
		if code := f.drain(s, nil); code != okay {
			return code
		}
	}
	return f.here().sticky
}

// memory returns a GPU's memory, nothing of what is not there.
func (f *Driver) memory(on *gpu, p uint64, n int) ([]byte, error) {
	if f.options.Trace != nil && p >= virtual && p < f.next {
		return nil, nil
	}
	return on.device.Bytes(p, n)
}

// hostMemory returns pinned memory.
func (f *Driver) hostMemory(p unsafe.Pointer, n uintptr) ([]byte, error) {
	for base, m := range f.pinned {
		if uintptr(p) >= base && uintptr(p)+n <= base+uintptr(len(m)) {
			return m[uintptr(p)-base:][:n], nil
		}
	}
	return nil, fmt.Errorf("host memory at %p, %d bytes, is not pinned", p, n)
}

// goString copies a C string.
func goString(s *byte) string {
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(s), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(s, n))
}

// functions are the C functions by name.
func (f *Driver) functions() map[string]any {
	// locked runs a call under the lock.
	locked := func(g func() int32) int32 {
		f.mu.Lock()
		defer f.mu.Unlock()
		return g()
	}
	// inside is locked with a context.
	inside := func(name string, g func() int32) int32 {
		return locked(func() int32 {
			if code := f.enter(name); code != okay || name == f.options.Ignore {
				return code
			}
			return g()
		})
	}
	copied := func(name string, dst, src func(on *gpu) ([]byte, error), at uintptr) int32 {
		return locked(func() int32 {
			return f.queue(name, at, func(on *gpu) error {
				to, err := dst(on)
				if err != nil {
					return err
				}
				from, err := src(on)
				if err != nil {
					return err
				}
				copy(to, from)
				return nil
			})
		})
	}
	device := func(p uint64, n uintptr) func(on *gpu) ([]byte, error) {
		return func(on *gpu) ([]byte, error) { return f.memory(on, p, int(n)) }
	}
	host := func(p unsafe.Pointer, n uintptr) func(on *gpu) ([]byte, error) {
		return func(*gpu) ([]byte, error) { return f.hostMemory(p, n) }
	}
	return map[string]any{
		"cuInit":             func(flags uint32) int32 { return okay },
		"cuDriverGetVersion": func(v *int32) int32 { *v = int32(f.options.Driver); return okay },
		"cuDeviceGetCount":   func(n *int32) int32 { *n = int32(f.options.Count); return okay },
		"cuDeviceGet": func(d *int32, i int32) int32 {
			if i < 0 || int(i) >= f.options.Count {
				return invalidDevice
			}
			*d = i
			return okay
		},
		"cuDeviceGetName": func(b *byte, n, d int32) int32 {
			copy(unsafe.Slice(b, n), "simulated GPU\x00")
			return okay
		},
		"cuDeviceTotalMem_v2": func(n *uintptr, d int32) int32 { *n = uintptr(f.options.Memory); return okay },
		"cuDeviceGetAttribute": func(v *int32, attribute, d int32) int32 {
			switch attribute {
			case 16:
				*v = 132
			case 75:
				*v = int32(f.options.Capability / 10)
			case 76:
				*v = int32(f.options.Capability % 10)
			default:
				return invalidValue
			}
			return okay
		},
		"cuDevicePrimaryCtxRetain": func(c *uintptr, d int32) int32 {
			return locked(func() int32 {
				f.counts["cuDevicePrimaryCtxRetain"]++
				f.gpus[d].retained++
				*c = firstContext + uintptr(d)
				return okay
			})
		},
		"cuDevicePrimaryCtxRelease_v2": func(d int32) int32 {
			return locked(func() int32 { f.gpus[d].retained--; return okay })
		},
		"cuCtxSetCurrent": func(c uintptr) int32 {
			return locked(func() int32 { f.contexts[syscall.Gettid()] = c; return okay })
		},
		"cuMemAlloc_v2": func(p *uint64, n uintptr) int32 {
			return inside("cuMemAlloc", func() int32 {
				if n == 0 {
					return f.fail(invalidValue, "cuMemAlloc of 0 bytes")
				}
				if f.here().device.Used+int64(n) > f.options.Memory {
					return outOfMemory // the caller is expected to live with it
				}
				if f.options.Trace != nil && n > large {
					*p = f.next
					f.absent[*p] = int64(n)
					f.next += uint64(n+4095) / 4096 * 4096
					f.here().device.Used += int64(n)
					return okay
				}
				*p = f.here().device.Alloc(int(n))
				return okay
			})
		},
		"cuMemFree_v2": func(p uint64) int32 {
			return inside("cuMemFree", func() int32 {
				if code := f.drainAll(); code != okay {
					return code
				}
				if n, ok := f.absent[p]; ok {
					f.here().device.Used -= n
					delete(f.absent, p)
					return okay
				}
				if err := f.here().device.Free(p); err != nil {
					return f.fail(invalidValue, "cuMemFree: %w", err)
				}
				return okay
			})
		},
		"cuMemGetInfo_v2": func(free, total *uintptr) int32 {
			return inside("cuMemGetInfo", func() int32 {
				*free, *total = uintptr(f.options.Memory-f.here().device.Used), uintptr(f.options.Memory)
				return okay
			})
		},
		"cuMemHostAlloc": func(p *uintptr, n uintptr, flags uint32) int32 {
			return inside("cuMemHostAlloc", func() int32 {
				m, err := syscall.Mmap(-1, 0, int(n), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
				if err != nil {
					return outOfMemory
				}
				for i := range m {
					m[i] = 0xff
				}
				*p = uintptr(unsafe.Pointer(&m[0]))
				f.pinned[*p], f.owner[*p] = m, f.here()
				return okay
			})
		},
		"cuMemFreeHost": func(p uintptr) int32 {
			return inside("cuMemFreeHost", func() int32 {
				m, ok := f.pinned[p]
				if !ok {
					return f.fail(invalidValue, "cuMemFreeHost of %#x, which is not pinned", p)
				}
				delete(f.pinned, p)
				if code := f.drainAll(); code != okay {
					return code
				}
				if err := syscall.Munmap(m); err != nil {
					return f.fail(invalidValue, "cuMemFreeHost: %w", err)
				}
				return okay
			})
		},
		"cuMemcpyHtoDAsync_v2": func(to uint64, from unsafe.Pointer, n, at uintptr) int32 {
			locked(func() int32 { f.copied += int64(n); return okay })
			return copied("cuMemcpyHtoDAsync", device(to, n), host(from, n), at)
		},
		"cuMemcpyDtoHAsync_v2": func(to unsafe.Pointer, from uint64, n, at uintptr) int32 {
			return copied("cuMemcpyDtoHAsync", host(to, n), device(from, n), at)
		},
		"cuMemcpyDtoDAsync_v2": func(to, from uint64, n, at uintptr) int32 {
			return copied("cuMemcpyDtoDAsync", device(to, n), device(from, n), at)
		},
		"cuMemsetD8Async": func(p uint64, v uint8, n, at uintptr) int32 {
			return locked(func() int32 {
				return f.queue("cuMemsetD8Async", at, func(on *gpu) error {
					b, err := f.memory(on, p, int(n))
					for i := range b {
						b[i] = v
					}
					return err
				})
			})
		},
		"cuModuleLoadData": func(m *uintptr, image *byte) int32 {
			return inside("cuModuleLoadData", func() int32 {
				text := goString(image)
				if f.options.Rewrite != nil {
					text = f.options.Rewrite(text)
				}
				module, err := ptxsim.Parse(text)
				if err != nil {
					return f.fail(invalidPTX, "cuModuleLoadData: %w", err)
				}
				*m = f.handle()
				f.modules[*m] = module
				return okay
			})
		},
		"cuModuleUnload": func(m uintptr) int32 {
			return inside("cuModuleUnload", func() int32 { delete(f.modules, m); return okay })
		},
		"cuModuleGetFunction": func(fn *uintptr, m uintptr, name *byte) int32 {
			return inside("cuModuleGetFunction", func() int32 {
				module := f.modules[m]
				if module == nil {
					return f.fail(invalidValue, "no module %#x", m)
				}
				k := module.Kernels[goString(name)]
				if k == nil {
					return notFound // it may be in another module
				}
				*fn = f.handle()
				f.kernels[*fn] = k
				return okay
			})
		},
		"cuFuncSetAttribute": func(fn uintptr, attribute, value int32) int32 {
			return inside("cuFuncSetAttribute", func() int32 {
				k := f.kernels[fn]
				if k == nil || attribute != 8 || value < 0 || int(value)+k.Shared > 227<<10 {
					return f.fail(invalidValue, "cuFuncSetAttribute %d to %d", attribute, value)
				}
				f.granted[fn] = value
				return okay
			})
		},
		"cuLaunchKernel": func(fn uintptr, gx, gy, gz, bx, by, bz, shared uint32, at uintptr, params *unsafe.Pointer, extra uintptr) int32 {
			return locked(func() int32 { return f.launch(fn, [3]uint32{gx, gy, gz}, [3]uint32{bx, by, bz}, shared, at, params) })
		},
		"cuStreamCreate": func(s *uintptr, flags uint32) int32 {
			return inside("cuStreamCreate", func() int32 {
				*s = f.handle()
				f.streams[*s] = &stream{on: f.here()}
				return okay
			})
		},
		"cuStreamDestroy_v2": func(at uintptr) int32 {
			return inside("cuStreamDestroy", func() int32 { delete(f.streams, at); return okay })
		},
		"cuStreamSynchronize": func(at uintptr) int32 {
			return inside("cuStreamSynchronize", func() int32 {
				s := f.streams[at]
				if s == nil {
					return f.fail(invalidValue, "cuStreamSynchronize: no stream %#x", at)
				}
				return f.drain(s, nil)
			})
		},
		"cuStreamWaitEvent": func(at, e uintptr, flags uint32) int32 {
			return locked(func() int32 {
				ev := f.events[e]
				if ev == nil {
					return f.fail(invalidValue, "cuStreamWaitEvent: no event %#x", e)
				}
				if f.options.Ignore == "cuStreamWaitEvent" {
					return okay
				}
				return f.queue("cuStreamWaitEvent", at, func(*gpu) error {
					if !ev.done {
						f.drain(ev.stream, func() bool { return ev.done })
					}
					return nil
				})
			})
		},
		"cuEventCreate": func(e *uintptr, flags uint32) int32 {
			return inside("cuEventCreate", func() int32 {
				*e = f.handle()
				f.events[*e] = &event{done: true}
				return okay
			})
		},
		"cuEventDestroy_v2": func(e uintptr) int32 {
			return inside("cuEventDestroy", func() int32 { delete(f.events, e); return okay })
		},
		"cuEventRecord": func(e, at uintptr) int32 {
			return locked(func() int32 {
				ev := f.events[e]
				if ev == nil {
					return f.fail(invalidValue, "cuEventRecord: no event %#x", e)
				}
				mark := &event{stream: f.streams[at]} // an event that is recorded again forgets the first time
				f.events[e] = mark
				return f.queue("cuEventRecord", at, func(*gpu) error { mark.done = true; return nil })
			})
		},
		"cuEventSynchronize": func(e uintptr) int32 {
			return inside("cuEventSynchronize", func() int32 {
				ev := f.events[e]
				if ev == nil {
					return f.fail(invalidValue, "cuEventSynchronize: no event %#x", e)
				}
				if ev.done {
					return okay
				}
				return f.drain(ev.stream, func() bool { return ev.done })
			})
		},
		"cuGetErrorName": func(code int32, s *uintptr) int32 {
			name, ok := f.names[code]
			if !ok {
				return invalidValue
			}
			*s = uintptr(unsafe.Pointer(&name[0]))
			return okay
		},
		"cublasCreate_v2": func(h *uintptr) int32 {
			return inside("cublasCreate", func() int32 {
				*h = f.handle()
				f.blas[*h] = 0
				return okay
			})
		},
		"cublasDestroy_v2": func(h uintptr) int32 {
			return inside("cublasDestroy", func() int32 { delete(f.blas, h); return okay })
		},
		"cublasSetStream_v2": func(h, at uintptr) int32 {
			return inside("cublasSetStream", func() int32 { f.blas[h] = at; return okay })
		},
		"cublasSetMathMode": func(h uintptr, mode int32) int32 { return okay },
		"cublasGemmEx": func(h uintptr, ta, tb, m, n, k int32, alpha *float32, a uint64, at, lda int32, b uint64, bt, ldb int32, beta *float32,
			c uint64, ct, ldc int32, compute, algorithm int32) int32 {
			return locked(func() int32 {
				return f.gemm("cublasGemmEx", h, gemm{ta, tb, m, n, k, *alpha, *beta, matrix{a, at, lda, 0}, matrix{b, bt, ldb, 0}, matrix{c, ct, ldc, 0}, 1}, compute)
			})
		},
		"cublasGemmStridedBatchedEx": func(h uintptr, ta, tb, m, n, k int32, alpha *float32, a uint64, at, lda int32, sa int64, b uint64, bt, ldb int32, sb int64,
			beta *float32, c uint64, ct, ldc int32, sc int64, batch, compute, algorithm int32) int32 {
			return locked(func() int32 {
				return f.gemm("cublasGemmStridedBatchedEx", h, gemm{ta, tb, m, n, k, *alpha, *beta, matrix{a, at, lda, sa}, matrix{b, bt, ldb, sb}, matrix{c, ct, ldc, sc}, batch}, compute)
			})
		},
	}
}

func (f *Driver) launch(fn uintptr, grid, block [3]uint32, shared uint32, at uintptr, params *unsafe.Pointer) int32 {
	k := f.kernels[fn]
	if k == nil {
		return f.fail(invalidValue, "cuLaunchKernel: no function %#x", fn)
	}
	threads := block[0] * block[1] * block[2]
	if grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[0] > math.MaxInt32 || grid[1] > 65535 || grid[2] > 65535 || threads == 0 || threads > 1024 ||
		block[1] != 1 || block[2] != 1 || int(shared) > max(48<<10-k.Shared, int(f.granted[fn])) {
		return f.fail(invalidValue, "%s: grid %v, block %v, %d bytes of shared memory", k.Name, grid, block, shared)
	}
	// As the driver does: as many bytes from each pointer as the kernel's parameter has. The list must end with nil.
	list := unsafe.Slice(params, len(k.Params)+1)
	buf := make([]byte, k.ParamBytes)
	for i, p := range k.Params {
		if list[i] == nil {
			return f.fail(invalidValue, "%s: %d arguments, want %d", k.Name, i, len(k.Params))
		}
		copy(buf[p.Off:p.Off+p.Size], unsafe.Slice((*byte)(list[i]), p.Size))
	}
	if list[len(k.Params)] != nil {
		return f.fail(invalidValue, "%s: more than %d arguments", k.Name, len(k.Params))
	}
	return f.queue("cuLaunchKernel", at, func(on *gpu) error {
		f.counts["launch "+k.Name]++
		on.launched++
		if f.options.Trace != nil {
			w := Work{Kernel: k.Name, Grid: grid}
			for _, p := range k.Params {
				var v [8]byte
				copy(v[:], buf[p.Off:p.Off+p.Size])
				w.Params = append(w.Params, binary.LittleEndian.Uint64(v[:]))
			}
			f.options.Trace(w)
			return nil
		}
		if on.launched == on.breakAt {
			return fmt.Errorf("%s: broken on request", k.Name)
		}
		return on.device.Launch(k, grid, int(threads), int(shared), buf)
	})
}
