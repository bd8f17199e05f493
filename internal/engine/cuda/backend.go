// Package cuda is the engine.Backend for NVIDIA GPUs. It calls the driver and cuBLAS without cgo; kernels are PTX that the driver
// translates (package kernels). docs/gpu.md says what it needs and how it is tested without a GPU.
//
// Tensors are float32 in the GPU's memory. Products with weights and attention are float32 or, in precision bf16, products of
// bfloat16 operands with sums in float32; everything else is float32 always.
//
// The same program on the same GPU gives the same bits: no operation sums in an order that is left to chance.
package cuda

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// Options choose the GPU and how it computes.
type Options struct {
	// Device is the number of the GPU, from 0.
	Device int
	// Precision of matrix products: "f32", "bf16" or "auto". "" means auto, which is bf16.
	Precision string
	// Symbols resolves the driver's and cuBLAS's functions; see Libraries.
	Symbols Symbols
	// Segment is the size in bytes by which memory is taken from the driver; 0 means 64 MiB. Negative: every tensor is an allocation
	// of its own and goes back at once, which is slow and shows defects of the backend.
	Segment int64
	// Staging is the size in bytes of the pinned memory through which values come and go; 0 means 16 MiB.
	Staging int
	// Parameters is the number of weights that are going to be loaded, 0 if unknown. With Weights it says how many are streamed.
	Parameters int64
	// Weights is the most memory in bytes that weights may take; 0 means three quarters of what is free. When all weights are more,
	// some stay and the others are copied to the GPU each time that they are needed, while it computes with earlier ones.
	Weights int64
	// Scratch is the memory in bytes that the scores of attention may take; 0 means 1 GiB.
	Scratch int64
}

// Backend implements engine.Backend. Operations panic with *engine.Failure when the GPU fails.
type Backend struct {
	dev     *device
	info    Info
	half    bool // bfloat16 products
	scratch int64
	rotary  map[*engine.Rotary]*rotary
	weights weights
	spill   spill
}

var (
	_ engine.Backend = (*Backend)(nil)
	_ engine.Parker  = (*Backend)(nil)
)

// New opens a GPU. Errors: NoDriverError, NoCUBLASError (from Libraries), NoDeviceError, TooOldError, OutOfMemoryError, CallError.
func New(o Options) (*Backend, error) {
	b := &Backend{scratch: o.Scratch, rotary: map[*engine.Rotary]*rotary{}}
	switch o.Precision {
	case "", "auto", "bf16":
		b.half = true
	case "f32":
	default:
		return nil, fmt.Errorf("precision %q is not known to the CUDA backend, want auto, f32 or bf16", o.Precision)
	}
	if b.scratch == 0 {
		b.scratch = 1 << 30
	}
	grain := o.Segment
	switch {
	case grain == 0:
		grain = 64 << 20
	case grain < 0:
		grain = 0
	}
	staging := o.Staging
	if staging <= 0 {
		staging = 16 << 20
	}
	var err error
	staging = max(staging, 4096)
	if b.dev, b.info, err = openDevice(o.Symbols, o.Device, grain, staging); err != nil {
		return nil, err
	}
	b.dev.memory.press = b.makeRoom
	if err := b.limitWeights(o.Weights, b.WeightBytes(o.Parameters), staging); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

// Name says device, architecture and precision: "cuda sm_90 bf16".
func (b *Backend) Name() string {
	precision := "f32"
	if b.half {
		precision = "bf16"
	}
	return "cuda sm_" + strings.ReplaceAll(b.info.Capability, ".", "") + " " + precision
}

// Label names the GPU as --device does: "cuda:0".
func (b *Backend) Label() string { return fmt.Sprintf("cuda:%d", b.info.Index) }

// Info describes the GPU.
func (b *Backend) Info() Info { return b.info }

// WeightBytes is the memory that weights of so many values take.
func (b *Backend) WeightBytes(values int64) int64 {
	if b.half {
		return 2 * values
	}
	return 4 * values
}

// Memory returns the bytes of device memory in use by tensors and weights, and the most that ever were.
func (b *Backend) Memory() (inUse, peak int64) {
	b.must(func() error {
		inUse, peak = b.dev.memory.inUse, b.dev.memory.peak
		return nil
	})
	return inUse, peak
}

// FreeMemory is the free memory of the GPU in bytes, with what the backend has taken and not handed out.
func (b *Backend) FreeMemory() (free int64) {
	b.must(func() (err error) {
		free, err = b.dev.freeMemory()
		free += b.dev.memory.reserved - b.dev.memory.inUse
		return err
	})
	return free
}

// Close gives all memory back, that of tensors and weights too.
func (b *Backend) Close() error {
	b.weights.stop()
	return errors.Join(b.dev.do(func() error { return b.weights.releaseOn(b.dev) }), b.dev.close())
}

// must runs f on the GPU's goroutine.
func (b *Backend) must(f func() error) {
	if err := b.dev.do(f); err != nil {
		panic(&engine.Failure{Err: err})
	}
}

// give runs f, which gives something back, on the GPU's goroutine. A lost GPU has nothing to give: whoever worked with it knows.
func (b *Backend) give(f func() error) {
	err := b.dev.do(f)
	var gone *LostError
	if err != nil && !errors.As(err, &gone) {
		panic(&engine.Failure{Err: err})
	}
}

// storage is the memory behind a tensor and its views. Memory of a new tensor is cleared when someone reads it: most
// operations write all of their result.
type storage struct {
	at     pointer // 0 while a parked tensor is on the host alone
	count  int     // values; 0 once freed
	stale  bool    // to be read as zeros
	parked bool    // not needed for a while
	host   []byte  // copy on the host, nil without
}

// Tensor is a row-major matrix of float32 in the GPU's memory.
type Tensor struct {
	rows, cols int
	offset     int // values from the start of the storage
	mem        *storage
}

func (t *Tensor) Rows() int { return t.rows }
func (t *Tensor) Cols() int { return t.cols }

// New makes a zeroed tensor.
func (b *Backend) New(rows, cols int) engine.Tensor {
	t := &Tensor{rows, cols, 0, &storage{count: rows * cols, stale: true}}
	b.must(func() (err error) {
		t.mem.at, err = b.dev.memory.get(4 * int64(rows*cols))
		return err
	})
	return t
}

// Free returns tensors for reuse. What was queued before still runs with them.
func (b *Backend) Free(ts ...engine.Tensor) {
	b.give(func() error {
		for _, t := range ts {
			m := t.(*Tensor).mem
			if m.count == 0 {
				continue
			}
			m.count = 0
			if m.parked {
				b.unpark(m)
			}
			b.spill.forget(m)
			if m.at == 0 {
				continue
			}
			if err := b.dev.memory.put(m.at); err != nil {
				return err
			}
		}
		return nil
	})
}

func (b *Backend) Slice(t engine.Tensor, lo, hi int) engine.Tensor {
	x := t.(*Tensor)
	if lo < 0 || hi < lo || hi > x.rows {
		panic(fmt.Sprintf("rows %d to %d of %d", lo, hi, x.rows))
	}
	return &Tensor{hi - lo, x.cols, x.offset + lo*x.cols, x.mem}
}

func (b *Backend) Reshape(t engine.Tensor, rows, cols int) engine.Tensor {
	x := t.(*Tensor)
	if rows*cols != x.rows*x.cols {
		panic(fmt.Sprintf("reshape %d x %d to %d x %d", x.rows, x.cols, rows, cols))
	}
	return &Tensor{rows, cols, x.offset, x.mem}
}

// read returns a tensor's address for reading, or for changing a part. On the GPU's goroutine, as all below.
func (b *Backend) read(t engine.Tensor) pointer {
	x := t.(*Tensor)
	if x.mem.count == 0 {
		panic("a tensor is used after it was freed")
	}
	if x.mem.parked {
		if err := b.bringBack(x.mem); err != nil {
			panic(&engine.Failure{Err: err})
		}
	}
	if x.mem.stale {
		x.mem.stale = false
		if err := b.dev.fill(x.mem.at, 0, 4*x.mem.count); err != nil {
			panic(&engine.Failure{Err: err})
		}
	}
	return x.mem.at + 4*uint64(x.offset)
}

// write returns the address of a tensor that is going to be written whole.
func (b *Backend) write(t engine.Tensor) pointer {
	x := t.(*Tensor)
	if x.rows*x.cols == x.mem.count {
		x.mem.stale = false
	}
	return b.read(t)
}

// temporary memory is given back when the operation has been queued.
type temporaries struct {
	b  *Backend
	at []pointer
}

func (t *temporaries) get(bytes int) (pointer, error) {
	p, err := t.b.dev.memory.get(int64(bytes))
	if err == nil {
		t.at = append(t.at, p)
	}
	return p, err
}

// floats and ints upload a few values.
func (t *temporaries) floats(v []float32) (pointer, error) {
	p, err := t.get(4 * len(v))
	if err != nil {
		return 0, err
	}
	return p, t.b.dev.upload(p, 4*len(v), 4, func(dst []byte, lo int) { putFloats(dst, v[lo/4:]) })
}

func (t *temporaries) ints(v []int32) (pointer, error) {
	p, err := t.get(4 * len(v))
	if err != nil {
		return 0, err
	}
	return p, t.b.dev.upload(p, 4*len(v), 4, func(dst []byte, lo int) { putInts(dst, v[lo/4:]) })
}

// op runs an operation on the GPU's goroutine, with memory that lasts as long.
func (b *Backend) op(f func(tmp *temporaries) error) {
	b.must(func() error {
		tmp := &temporaries{b: b}
		err := f(tmp)
		for _, p := range tmp.at {
			if e := b.dev.memory.put(p); err == nil {
				err = e
			}
		}
		return err
	})
}
