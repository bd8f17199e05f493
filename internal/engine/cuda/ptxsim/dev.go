package ptxsim

import (
	"fmt"
	"runtime"
	"sort"
	"sync"
	"sync/atomic"
)

type alloc struct {
	base uint64
	data []byte
}

// Device is simulated GPU memory: every allocation stands alone between unmapped gaps.
type Device struct {
	mu     sync.RWMutex
	allocs []*alloc // by base
	next   uint64
	// Used is the bytes allocated, Steps the warp instructions executed.
	Used  int64
	Steps atomic.Uint64
	// Profile makes launches count memory traffic into Stats.
	Profile bool
	Stats   Stats
}

// NewDevice returns a device without memory in use.
func NewDevice() *Device { return NewDeviceAt(0x7f0000000000) }

// NewDeviceAt is NewDevice with memory from an address on: devices side by side have none in common.
func NewDeviceAt(base uint64) *Device { return &Device{next: base} }

// Alloc returns poisoned memory (0xFF: NaN in bf16 and f32).
func (d *Device) Alloc(n int) uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	a := &alloc{d.next, make([]byte, n)}
	for i := range a.data {
		a.data[i] = 0xff
	}
	d.next += (uint64(n)+255)/256*256 + 4096
	d.allocs = append(d.allocs, a)
	d.Used += int64(n)
	return a.base
}

// Free takes back what Alloc returned.
func (d *Device) Free(p uint64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := sort.Search(len(d.allocs), func(i int) bool { return d.allocs[i].base >= p })
	if i == len(d.allocs) || d.allocs[i].base != p {
		return fmt.Errorf("free of %#x, which is not an allocation", p)
	}
	d.Used -= int64(len(d.allocs[i].data))
	d.allocs = append(d.allocs[:i], d.allocs[i+1:]...)
	return nil
}

// Live is the number of allocations.
func (d *Device) Live() int {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return len(d.allocs)
}

func (d *Device) find(p uint64, n int) *alloc {
	d.mu.RLock()
	defer d.mu.RUnlock()
	i := sort.Search(len(d.allocs), func(i int) bool { return d.allocs[i].base > p }) - 1
	if i < 0 || p+uint64(n) > d.allocs[i].base+uint64(len(d.allocs[i].data)) {
		fail("access of %d bytes at %#x is outside every allocation", n, p)
	}
	return d.allocs[i]
}

func (d *Device) mem(p uint64, n int) []byte {
	a := d.find(p, n)
	return a.data[p-a.base : p-a.base+uint64(n)]
}

// Bytes gives host access to device memory.
func (d *Device) Bytes(p uint64, n int) (b []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	return d.mem(p, n), nil
}

// Launch runs a kernel; params is the packed parameter buffer.
func (d *Device) Launch(k *Kernel, grid [3]uint32, threads int, dynShared int, params []byte) error {
	if k.MaxThreads > 0 && threads > k.MaxThreads || threads < 1 || threads > 1024 {
		return fmt.Errorf("%s: block of %d threads", k.Name, threads)
	}
	if len(params) != k.ParamBytes {
		return fmt.Errorf("%s: %d parameter bytes, want %d", k.Name, len(params), k.ParamBytes)
	}
	total := uint64(grid[0]) * uint64(grid[1]) * uint64(grid[2])
	var next atomic.Uint64
	var errOnce sync.Once
	var err error
	var stop atomic.Bool
	var wg sync.WaitGroup
	shared := k.Shared
	if dynShared > 0 {
		shared = (shared+15)/16*16 + dynShared
	}
	for range min(uint64(runtime.GOMAXPROCS(0)), total) {
		wg.Go(func() {
			nw := (threads + 31) / 32
			ws := make([]*warp, nw)
			blk := &block{dev: d, k: k, shared: make([]byte, shared), lastW: make([]uint32, shared/4+1), lastR: make([]uint32, shared/4+1), params: params}
			for i := range ws {
				ws[i] = &warp{r: make([]vreg, k.nreg), p: make([]uint32, k.npred), blk: blk, id: i}
				for _, c := range k.consts {
					for l := range 32 {
						ws[i].r[c.reg][l] = c.val
					}
				}
			}
			for !stop.Load() {
				n := next.Add(1) - 1
				if n >= total {
					break
				}
				blk.ctaid = [3]uint32{uint32(n % uint64(grid[0])), uint32(n / uint64(grid[0]) % uint64(grid[1])), uint32(n / uint64(grid[0]) / uint64(grid[1]))}
				if e := runBlock(blk, ws, grid, threads); e != nil {
					errOnce.Do(func() { err = e })
					stop.Store(true)
				}
			}
			var st uint64
			d.mu.Lock()
			for _, w := range ws {
				st += w.steps
				d.Stats.add(w.stat)
			}
			d.mu.Unlock()
			d.Steps.Add(st)
		})
	}
	wg.Wait()
	return err
}

// runBlock executes one block.
func runBlock(b *block, ws []*warp, grid [3]uint32, threads int) (err error) {
	var cur *warp
	defer func() {
		if r := recover(); r != nil {
			e, ok := r.(simError)
			if !ok {
				panic(r)
			}
			line := 0
			if cur.pc < len(b.k.lines) {
				line = b.k.lines[cur.pc]
			}
			err = fmt.Errorf("%s, PTX line %d, block (%d,%d,%d) warp %d: %s", b.k.Name, line, b.ctaid[0], b.ctaid[1], b.ctaid[2], cur.id, e.msg)
		}
	}()
	for i := range b.shared {
		b.shared[i] = 0xff
	}
	clear(b.lastW)
	clear(b.lastR)
	b.epoch = 1
	for i, w := range ws {
		w.live = full
		if n := threads - i*32; n < 32 {
			w.live = 1<<n - 1
		}
		w.groups = append(w.groups[:0], group{0, w.live, false})
		w.done, w.atBar = false, false
		for r, s := range b.k.specials {
			for l := range 32 {
				v := uint32(0)
				switch s {
				case "%tid.x":
					v = uint32(i*32 + l)
				case "%ntid.x":
					v = uint32(threads)
				case "%ctaid.x":
					v = b.ctaid[0]
				case "%ctaid.y":
					v = b.ctaid[1]
				case "%ctaid.z":
					v = b.ctaid[2]
				case "%nctaid.x":
					v = grid[0]
				case "%nctaid.y":
					v = grid[1]
				case "%laneid":
					v = uint32(l)
				}
				w.r[r][l] = uint64(v)
			}
		}
	}
	for {
		done := 0
		for _, w := range ws {
			cur = w
			if !w.done && !w.atBar {
				w.run()
			}
			if w.done {
				done++
			}
		}
		if done == len(ws) {
			return nil
		}
		for _, w := range ws {
			w.atBar = false
		}
		b.epoch++
	}
}
