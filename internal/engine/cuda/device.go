package cuda

import (
	"fmt"
	"runtime"
	"unsafe"

	"github.com/kvprofile/kvprofile/internal/engine/cuda/kernels"
)

// device is one GPU. All its calls are made on one goroutine that is locked to its thread, because the driver keeps the
// current context per thread. Methods that call the driver must run there: within do.
type device struct {
	api    *api
	work   chan func()
	lost   *LostError
	index  int
	handle int32

	context, stream, blas uintptr
	modules               []uintptr
	functions             map[string]uintptr
	granted               map[uintptr]int // dynamic shared memory of kernels that need much
	memory                arena
	up                    ring
	down                  []byte // pinned

	// Parameters of a launch: the driver copies them during the call. One slot more ends the list with nil.
	values [maxParameters]uint64
	params [maxParameters + 1]unsafe.Pointer
}

const maxParameters = 32

// ring is pinned host memory in two halves: while the GPU reads one, the other is filled.
type ring struct {
	memory []byte
	half   int // the half being filled
	pos    int // next free byte in it
	events [2]uintptr
	used   [2]bool // the half's event has been recorded
}

// What the kernels need.
const (
	minDriver     = 11000 // CUDA 11.0, driver 450: PTX 7.0
	minCapability = 80
)

// Info describes a GPU.
type Info struct {
	Index      int
	Name       string
	Capability string // "9.0"
	Memory     int64  // bytes
	Processors int    // multiprocessors
}

// Attributes of cuDeviceGetAttribute.
const (
	attrProcessors = 16
	attrMajor      = 75
	attrMinor      = 76
)

// Devices lists the GPUs that the driver shows, and the version of CUDA that it supports ("12.8").
func Devices(symbols Symbols) (gpus []Info, version string, err error) {
	a, err := bind(symbols)
	if err != nil {
		return nil, "", err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	d := &device{api: a}
	n, v, err := d.start()
	if err != nil {
		return nil, "", err
	}
	for i := range n {
		info, err := d.describe(i)
		if err != nil {
			return nil, "", err
		}
		gpus = append(gpus, info)
	}
	return gpus, fmt.Sprintf("%d.%d", v/1000, v%1000/10), nil
}

// start initialises the driver and returns the number of GPUs and the driver's version.
func (d *device) start() (count, version int, err error) {
	if err := d.check("cuInit", d.api.init.call(0)); err != nil {
		return 0, 0, err
	}
	var v, n int32
	if err := d.check("cuDriverGetVersion", d.api.driverVersion.call(uintptr(unsafe.Pointer(&v)))); err != nil {
		return 0, 0, err
	}
	if v < minDriver {
		return 0, 0, &TooOldError{"the CUDA version of the driver", fmt.Sprintf("%d.%d", v/1000, v%1000/10), "11.0 (driver 450)"}
	}
	err = d.check("cuDeviceGetCount", d.api.deviceCount.call(uintptr(unsafe.Pointer(&n))))
	return int(n), int(v), err
}

// describe asks for a GPU's properties, and leaves its handle in d.
func (d *device) describe(index int) (Info, error) {
	info := Info{Index: index}
	if err := d.check("cuDeviceGet", d.api.deviceGet.call(uintptr(unsafe.Pointer(&d.handle)), uintptr(index))); err != nil {
		return info, err
	}
	name := make([]byte, 256)
	if err := d.check("cuDeviceGetName", d.api.deviceName.call(uintptr(unsafe.Pointer(&name[0])), uintptr(len(name)-1), uintptr(d.handle))); err != nil {
		return info, err
	}
	info.Name = goString(&name[0])
	var total uintptr
	if err := d.check("cuDeviceTotalMem", d.api.deviceMemory.call(uintptr(unsafe.Pointer(&total)), uintptr(d.handle))); err != nil {
		return info, err
	}
	info.Memory = int64(total)
	var values [3]int32
	for i, attr := range []uintptr{attrMajor, attrMinor, attrProcessors} {
		if err := d.check("cuDeviceGetAttribute", d.api.deviceAttribute.call(uintptr(unsafe.Pointer(&values[i])), attr, uintptr(d.handle))); err != nil {
			return info, err
		}
	}
	info.Capability, info.Processors = fmt.Sprintf("%d.%d", values[0], values[1]), int(values[2])
	if values[0]*10+values[1] < minCapability {
		return info, &TooOldError{fmt.Sprintf("the compute capability of GPU %d (%s)", index, info.Name), info.Capability, "8.0 (Ampere)"}
	}
	return info, nil
}

// openDevice starts the goroutine of a GPU and sets everything up on it. staging is the size of pinned memory, grain of segments.
func openDevice(symbols Symbols, index int, grain int64, staging int) (*device, Info, error) {
	a, err := bind(symbols)
	if err != nil {
		return nil, Info{}, err
	}
	d := &device{api: a, work: make(chan func()), index: index, functions: map[string]uintptr{}, granted: map[uintptr]int{}}
	d.memory = arena{grain: grain, take: d.take, give: d.give}
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		for f := range d.work {
			f()
		}
	}()
	var info Info
	err = d.do(func() (err error) {
		info, err = d.setUp(staging)
		return err
	})
	if err != nil {
		if e := d.close(); e != nil {
			err = fmt.Errorf("%w; and then %w", err, e)
		}
		return nil, info, err
	}
	return d, info, nil
}

func (d *device) setUp(staging int) (Info, error) {
	count, _, err := d.start()
	if err != nil {
		return Info{}, err
	}
	if d.index < 0 || d.index >= count {
		return Info{}, &NoDeviceError{d.index, count}
	}
	info, err := d.describe(d.index)
	if err != nil {
		return info, err
	}
	if err := d.check("cuDevicePrimaryCtxRetain", d.api.contextRetain.call(uintptr(unsafe.Pointer(&d.context)), uintptr(d.handle))); err != nil {
		d.context = 0
		return info, err
	}
	steps := []func() error{
		func() error { return d.check("cuCtxSetCurrent", d.api.contextSet.call(d.context)) },
		func() error {
			return d.check("cuStreamCreate", d.api.streamCreate.call(uintptr(unsafe.Pointer(&d.stream)), 1))
		}, // non-blocking
		func() error {
			return d.checkBLAS("cublasCreate", d.api.blasCreate.call(uintptr(unsafe.Pointer(&d.blas))))
		},
		func() error { return d.checkBLAS("cublasSetStream", d.api.blasStream.call(d.blas, d.stream)) },
		// Partial sums of a product stay in float32 (CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION), and float32 is no TF32.
		func() error { return d.checkBLAS("cublasSetMathMode", d.api.blasMathMode.call(d.blas, 16)) },
		func() error { return d.pin(&d.up.memory, 2*staging) },
		func() error { return d.pin(&d.down, staging) },
		d.loadModules,
	}
	for i := range d.up.events {
		steps = append(steps, func() error { return d.newEvent(&d.up.events[i]) })
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return info, err
		}
	}
	return info, nil
}

func (d *device) loadModules() error {
	for _, ptx := range kernels.Modules() {
		text := append([]byte(ptx), 0)
		var m uintptr
		if err := d.check("cuModuleLoadData", d.api.moduleLoad.call(uintptr(unsafe.Pointer(&m)), uintptr(unsafe.Pointer(&text[0])))); err != nil {
			return err
		}
		d.modules = append(d.modules, m)
	}
	return nil
}

// function finds a kernel by its name.
func (d *device) function(name string) (uintptr, error) {
	if f, ok := d.functions[name]; ok {
		return f, nil
	}
	text := append([]byte(name), 0)
	var f uintptr
	var err error
	for _, m := range d.modules {
		if err = d.check("cuModuleGetFunction "+name, d.api.moduleFunction.call(uintptr(unsafe.Pointer(&f)), m, uintptr(unsafe.Pointer(&text[0])))); err == nil {
			d.functions[name] = f
			return f, nil
		}
	}
	return 0, err
}

// do runs f on the device's goroutine. A panic there is raised here.
func (d *device) do(f func() error) error {
	type result struct {
		err   error
		panic any
	}
	done := make(chan result, 1)
	d.work <- func() {
		var r result
		defer func() {
			r.panic = recover()
			done <- r
		}()
		if d.lost != nil {
			r.err = d.lost
			return
		}
		r.err = f()
	}
	r := <-done
	if r.panic != nil {
		panic(r.panic)
	}
	return r.err
}

// close gives everything back and ends the goroutine. Of a lost GPU nothing can be given back.
func (d *device) close() error {
	err := d.do(func() (err error) {
		note := func(e error) {
			if err == nil {
				err = e
			}
		}
		if d.context == 0 {
			return nil
		}
		if d.stream != 0 {
			note(d.sync())
		}
		if d.blas != 0 {
			note(d.checkBLAS("cublasDestroy", d.api.blasDestroy.call(d.blas)))
		}
		note(d.memory.close())
		for _, m := range d.modules {
			note(d.check("cuModuleUnload", d.api.moduleUnload.call(m)))
		}
		for _, m := range [][]byte{d.up.memory, d.down} {
			if m != nil {
				note(d.check("cuMemFreeHost", d.api.hostFree.call(uintptr(unsafe.Pointer(&m[0])))))
			}
		}
		for _, e := range d.up.events {
			if e != 0 {
				note(d.check("cuEventDestroy", d.api.eventDestroy.call(e)))
			}
		}
		if d.stream != 0 {
			note(d.check("cuStreamDestroy", d.api.streamDestroy.call(d.stream)))
		}
		note(d.check("cuDevicePrimaryCtxRelease", d.api.contextRelease.call(uintptr(d.handle))))
		return err
	})
	close(d.work)
	return err
}

// take gets memory of the driver for the arena.
func (d *device) take(n int64) (pointer, error) {
	var p pointer
	code := d.api.memAlloc.call(uintptr(unsafe.Pointer(&p)), uintptr(n))
	if code == codeOutOfMemory {
		e := &OutOfMemoryError{Asked: n, InUse: d.memory.inUse}
		var free, total uintptr
		if err := d.check("cuMemGetInfo", d.api.memInfo.call(uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&total)))); err != nil {
			return 0, err
		}
		e.Free, e.Total = int64(free), int64(total)
		return 0, e
	}
	return p, d.check("cuMemAlloc", code)
}

// freeMemory is what the driver has left, bytes.
func (d *device) freeMemory() (int64, error) {
	var free, all uintptr
	err := d.check("cuMemGetInfo", d.api.memInfo.call(uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&all))))
	return int64(free), err
}

func (d *device) give(p pointer) error { return d.check("cuMemFree", d.api.memFree.call(uintptr(p))) }

// pin allocates host memory that the GPU can reach.
func (d *device) pin(to *[]byte, n int) error {
	var p *byte
	if err := d.check("cuMemHostAlloc", d.api.hostAlloc.call(uintptr(unsafe.Pointer(&p)), uintptr(n), 0)); err != nil {
		return err
	}
	*to = unsafe.Slice(p, n)
	return nil
}

// newEvent makes an event.
func (d *device) newEvent(to *uintptr) error {
	const noTiming = 2
	return d.check("cuEventCreate", d.api.eventCreate.call(uintptr(unsafe.Pointer(to)), noTiming))
}

// sync waits until everything queued is done; errors of queued work show here.
func (d *device) sync() error {
	return d.check("cuStreamSynchronize", d.api.streamSync.call(d.stream))
}

// stage returns n pinned bytes that stay untouched until the GPU has read what is queued from them.
func (d *device) stage(n int) ([]byte, error) {
	r := &d.up
	size := len(r.memory) / 2
	if n > size {
		panic(fmt.Sprintf("%d bytes staged at once, at most %d", n, size))
	}
	if r.pos+n > size {
		if err := d.check("cuEventRecord", d.api.eventRecord.call(r.events[r.half], d.stream)); err != nil {
			return nil, err
		}
		r.used[r.half] = true
		r.half, r.pos = 1-r.half, 0
		if r.used[r.half] {
			if err := d.check("cuEventSynchronize", d.api.eventSync.call(r.events[r.half])); err != nil {
				return nil, err
			}
		}
	}
	at := r.half*size + r.pos
	r.pos += (n + 15) / 16 * 16
	return r.memory[at : at+n : at+n], nil
}

// upload queues a copy of n bytes to the device; fill writes bytes [lo, lo+len(dst)) of the source to dst. unit divides the
// pieces' sizes.
func (d *device) upload(to pointer, n, unit int, fill func(dst []byte, lo int)) error {
	piece := min(n, len(d.up.memory)/2/4/unit*unit) // a quarter of a half
	for lo := 0; lo < n; lo += piece {
		m := min(piece, n-lo)
		buf, err := d.stage(m)
		if err != nil {
			return err
		}
		fill(buf, lo)
		if err := d.check("cuMemcpyHtoDAsync", d.api.copyIn.call(uintptr(to)+uintptr(lo), uintptr(unsafe.Pointer(&buf[0])), uintptr(m), d.stream)); err != nil {
			return err
		}
	}
	return nil
}

// download waits for everything queued and hands bytes [lo, lo+len(src)) of the n at p to drain, piece by piece.
func (d *device) download(p pointer, n, unit int, drain func(src []byte, lo int)) error {
	piece := min(n, len(d.down)/unit*unit)
	for lo := 0; lo < n; lo += piece {
		m := min(piece, n-lo)
		if err := d.check("cuMemcpyDtoHAsync", d.api.copyOut.call(uintptr(unsafe.Pointer(&d.down[0])), uintptr(p)+uintptr(lo), uintptr(m), d.stream)); err != nil {
			return err
		}
		if err := d.sync(); err != nil {
			return err
		}
		drain(d.down[:m], lo)
	}
	return nil
}

// copyOver queues a copy within the device.
func (d *device) copyOver(to, from pointer, n int) error {
	return d.check("cuMemcpyDtoDAsync", d.api.copyOver.call(uintptr(to), uintptr(from), uintptr(n), d.stream))
}

// fill queues the setting of n bytes.
func (d *device) fill(p pointer, value byte, n int) error {
	return d.check("cuMemsetD8Async", d.api.set8.call(uintptr(p), uintptr(value), uintptr(n), d.stream))
}

// grid is the number of blocks in each direction.
type grid struct{ x, y, z int }

// launch queues a kernel. Arguments are pointer (uint64), int (a C int), or float32.
func (d *device) launch(name string, g grid, threads int, args ...any) error {
	return d.launchShared(name, g, threads, 0, args...)
}

// launchShared is launch with so many bytes of dynamic shared memory.
func (d *device) launchShared(name string, g grid, threads, shared int, args ...any) error {
	f, err := d.function(name)
	if err != nil {
		return err
	}
	if shared > d.granted[f] && shared > 47<<10 { // more than 48 KiB, with what a kernel has of its own, must be asked for
		const maxDynamicShared = 8
		if err := d.check("cuFuncSetAttribute", d.api.functionAttribute.call(f, maxDynamicShared, uintptr(shared))); err != nil {
			return err
		}
		d.granted[f] = shared
	}
	for i, a := range args {
		switch v := a.(type) {
		case uint64:
			d.values[i] = v
		case int:
			d.values[i] = uint64(uint32(int32(v)))
		case float32:
			*(*float32)(unsafe.Pointer(&d.values[i])) = v
		default:
			panic(fmt.Sprintf("argument %d of %s is a %T", i, name, a))
		}
		d.params[i] = unsafe.Pointer(&d.values[i])
	}
	d.params[len(args)] = nil
	return d.check("cuLaunchKernel "+name, d.api.launch.call(f, uintptr(g.x), uintptr(max(1, g.y)), uintptr(max(1, g.z)), uintptr(threads), 1, 1, uintptr(shared), d.stream,
		uintptr(unsafe.Pointer(&d.params[0])), 0))
}

// number is the type of a product's operand, by its code in cuBLAS.
type number uintptr

const (
	f32  number = 0
	bf16 number = 14
)

func (t number) bytes() int {
	if t == bf16 {
		return 2
	}
	return 4
}

// operand is a matrix of a product, as it lies in memory: row-major with ld values from row to row, batch matrices stride
// values apart.
type operand struct {
	at     pointer
	kind   number
	ld     int
	stride int
}

// shifted moves the operand by n values.
func (o operand) shifted(n int) operand {
	o.at += uint64(n * o.kind.bytes())
	return o
}

// product is c[m,n] (+)= alpha * a * b, in float32, for batch matrices side by side. a is [m,k], or [k,m] where ta is set;
// b is [k,n], or [n,k] where tb is set.
type product struct {
	m, n, k    int
	a, b, c    operand
	ta, tb     bool
	alpha      float32
	accumulate bool
	batch      int // 0 means 1
}

// multiply queues a product. cuBLAS is column-major: it is asked for transpose(c) = transpose(b) * transpose(a).
func (d *device) multiply(p product) error {
	const compute32F = 68
	beta := float32(0)
	if p.accumulate {
		beta = 1
	}
	flag := func(t bool) uintptr {
		if t {
			return 1
		}
		return 0
	}
	scalars := &[2]float32{p.alpha, beta} // read during the call
	algorithm := ^uintptr(0)              // -1: cuBLAS chooses
	if p.batch > 1 {
		return d.checkBLAS("cublasGemmStridedBatchedEx", d.api.gemmStrided.call(d.blas, flag(p.tb), flag(p.ta), uintptr(p.n), uintptr(p.m), uintptr(p.k),
			uintptr(unsafe.Pointer(&scalars[0])), uintptr(p.b.at), uintptr(p.b.kind), uintptr(p.b.ld), uintptr(p.b.stride),
			uintptr(p.a.at), uintptr(p.a.kind), uintptr(p.a.ld), uintptr(p.a.stride), uintptr(unsafe.Pointer(&scalars[1])),
			uintptr(p.c.at), uintptr(p.c.kind), uintptr(p.c.ld), uintptr(p.c.stride), uintptr(p.batch), compute32F, algorithm))
	}
	return d.checkBLAS("cublasGemmEx", d.api.gemm.call(d.blas, flag(p.tb), flag(p.ta), uintptr(p.n), uintptr(p.m), uintptr(p.k),
		uintptr(unsafe.Pointer(&scalars[0])), uintptr(p.b.at), uintptr(p.b.kind), uintptr(p.b.ld), uintptr(p.a.at), uintptr(p.a.kind), uintptr(p.a.ld),
		uintptr(unsafe.Pointer(&scalars[1])), uintptr(p.c.at), uintptr(p.c.kind), uintptr(p.c.ld), compute32F, algorithm))
}
