package cuda

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"unsafe"

	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
)

// Weights that do not fit the GPU together are streamed. A weight is resident, or it is copied to the GPU when it is needed, by a
// goroutine of its own, on a stream of its own: while the GPU computes with one layer, the next is on its way. What is
// streamed stays on the GPU until room is needed for another; the one that came first goes first. The order in which
// weights are needed is learned as it happens, so that forward and backward passes both find their next weights there.

// weight is a matrix [rows, cols], in the precision of products; a vector is float32 and always resident.
type weight struct {
	rows, cols int
	kind       number
	parts      []engine.Matrix // of a streamed weight: its data must live until Unload
	at         pointer         // 0 while it is not on the GPU

	// Of a streamed weight.
	loading chan error // nil, or tells once when all copies are queued
	ready   uintptr    // event: the copies are done
	fresh   bool       // not used since it came
	after   *weight    // what came next the last time
}

func (w *weight) Rows() int    { return w.rows }
func (w *weight) Cols() int    { return w.cols }
func (w *weight) bytes() int64 { return int64(w.rows) * int64(w.cols) * int64(w.kind.bytes()) }

// weights says where weights are.
type weights struct {
	limit, total int64 // bytes that all may take on the GPU, and of all; equal when everything is resident
	loaded, held int64 // bytes of matrices loaded so far, and of the resident ones among them

	cached  []*weight // streamed weights on the GPU or on their way, in the order of their coming
	inCache int64     // their bytes
	unused  int64     // bytes of the fresh ones
	last    *weight   // the one that was first used last

	jobs    chan *weight
	stopped chan struct{}
	stream  uintptr
	free    uintptr // event: the GPU is done with memory that is going to be overwritten
	pinned  [2][]byte
	events  [2]uintptr // the copy out of pinned[i] is done
	busy    [2]bool
}

// ahead is the number of weights that are on their way at once: those of a layer.
const ahead = 4

// limitWeights decides whether weights of so many bytes are streamed.
func (b *Backend) limitWeights(limit, total int64, staging int) error {
	w := &b.weights
	return b.dev.do(func() error {
		d := b.dev
		if limit == 0 {
			free, err := d.freeMemory()
			if err != nil {
				return err
			}
			limit = free / 4 * 3
		}
		if total <= limit {
			return nil
		}
		if err := d.check("cuStreamCreate", d.api.streamCreate.call(uintptr(unsafe.Pointer(&w.stream)), 1)); err != nil {
			return err
		}
		for _, e := range []*uintptr{&w.free, &w.events[0], &w.events[1]} {
			if err := d.newEvent(e); err != nil {
				return err
			}
		}
		for i := range w.pinned {
			if err := d.pin(&w.pinned[i], staging); err != nil {
				return err
			}
		}
		w.limit, w.total = limit, total
		w.jobs, w.stopped = make(chan *weight, 1<<16), make(chan struct{})
		go func() {
			defer close(w.stopped)
			for x := range w.jobs {
				x.loading <- b.bring(x)
			}
		}()
		return nil
	})
}

// stop ends the goroutine that brings weights.
func (w *weights) stop() {
	if w.jobs != nil {
		close(w.jobs)
		<-w.stopped
		w.jobs = nil
	}
}

// WeightLimit is the most memory in bytes that weights take on the GPU.
func (b *Backend) WeightLimit() int64 {
	if b.weights.jobs == nil {
		return math.MaxInt64
	}
	return b.weights.limit
}

// Streamed reports how many bytes of weights are copied to the GPU each time.
func (b *Backend) Streamed() int64 { return b.weights.loaded - b.weights.held }

// resident decides whether a matrix of n bytes stays on the GPU, for which three quarters of the limit are there. The first ones do, which
// are the embedding and the output matrix; later ones are spread evenly, so that there is always something to compute while others
// are on their way.
func (w *weights) resident(n int64) bool {
	w.loaded += n
	if w.jobs != nil {
		all := 0.75 * float64(w.limit)
		first := all / 4
		spread := first + (all-first)*(float64(w.loaded)-first)/(float64(w.total)-first)
		if held := float64(w.held + n); held > first && held > min(spread, all) {
			return false
		}
	}
	w.held += n
	return true
}

// room is the memory for streamed weights, bytes.
func (w *weights) room() int64 { return w.limit / 4 }

// Load takes over a weight. Resident weights are expanded and copied to the GPU, and their data is not needed afterwards; that of
// streamed ones must live until Unload.
func (b *Backend) Load(parts ...engine.Matrix) (engine.Weight, error) {
	w := &weight{cols: parts[0].Cols}
	for _, p := range parts {
		if err := p.Check(); err != nil {
			return nil, err
		}
		if p.Cols != w.cols {
			return nil, fmt.Errorf("tensor %s has %d columns, %s has %d", p.Name, p.Cols, parts[0].Name, w.cols)
		}
		w.rows += p.Rows
	}
	if b.half && w.rows > 1 {
		w.kind = bf16
	}
	if w.rows > 1 && !b.weights.resident(w.bytes()) {
		w.parts = slices.Clone(parts)
		if err := b.dev.do(func() error { return b.dev.newEvent(&w.ready) }); err != nil {
			return nil, err
		}
		return w, nil
	}
	err := b.dev.do(func() (err error) {
		if w.at, err = b.dev.memory.get(w.bytes()); err != nil {
			return err
		}
		return b.dev.upload(w.at, int(w.bytes()), w.kind.bytes(), expand(parts, w.kind))
	})
	if err != nil {
		return nil, err
	}
	return w, nil
}

// expand returns a function that writes bytes [lo, lo+len(dst)) of stacked parts, in another format, to dst. It works on all cores: formats
// of few bits take longer to expand than to copy.
func expand(parts []engine.Matrix, kind number) func(dst []byte, lo int) {
	const share = 1 << 18 // bytes that are worth a goroutine
	size := kind.bytes()
	return func(dst []byte, lo int) {
		workers := min(runtime.GOMAXPROCS(0), 1+len(dst)/share)
		each := (len(dst)/size + workers - 1) / workers * size
		var wait sync.WaitGroup
		for at := 0; at < len(dst); at += each {
			wait.Go(func() { expandPiece(dst[at:min(at+each, len(dst))], lo+at, parts, kind) })
		}
		wait.Wait()
	}
}

// expandPiece is expand for one goroutine.
func expandPiece(dst []byte, lo int, parts []engine.Matrix, kind number) {
	size, cols := kind.bytes(), parts[0].Cols
	row, have := make([]float32, cols), -1 // the row that stands in row, counted from the first part's first
	for i := 0; i < len(dst); {
		at := (lo + i) / size
		r, c, first := at/cols, at%cols, 0
		p := &parts[0]
		for x := 1; r-first >= p.Rows; x++ {
			first += p.Rows
			p = &parts[x]
		}
		if kind == bf16 && p.DType == dtype.BF16 && p.RowMap == nil {
			i += copy(dst[i:], p.Data[(at-first*cols)*size:p.Rows*cols*size])
			continue
		}
		if r != have {
			p.DecodeRow(row, r-first)
			have = r
		}
		n := min(cols-c, (len(dst)-i)/size)
		if kind == bf16 {
			for x, f := range row[c : c+n] {
				binary.LittleEndian.PutUint16(dst[i+2*x:], toBF16(f))
			}
		} else {
			putFloats(dst[i:i+4*n], row[c:])
		}
		i += n * size
	}
}

func (b *Backend) Unload(x engine.Weight) {
	w := x.(*weight)
	if w.parts == nil {
		b.give(func() error { return b.dev.memory.put(w.at) })
		if w.rows > 1 {
			b.weights.loaded, b.weights.held = b.weights.loaded-w.bytes(), b.weights.held-w.bytes()
		}
		*w = weight{}
		return
	}
	if w.at != 0 {
		b.evict(w)
	}
	b.weights.loaded -= w.bytes()
	b.give(func() error {
		e := w.ready
		w.parts, w.ready = nil, 0
		return b.dev.check("cuEventDestroy", b.dev.api.eventDestroy.call(e))
	})
	if b.weights.last == w {
		b.weights.last = nil
	}
}

// acquire returns a weight that is on the GPU when the work that is queued next runs. On the caller's goroutine.
func (b *Backend) acquire(x engine.Weight) *weight {
	w := x.(*weight)
	if w.parts == nil {
		return w
	}
	s := &b.weights
	if w.at == 0 {
		b.request(w, nil)
	}
	b.arrived(w)
	if w.fresh {
		w.fresh = false
		s.unused -= w.bytes()
		b.must(func() error {
			return b.dev.check("cuStreamWaitEvent", b.dev.api.streamWait.call(b.dev.stream, w.ready, 0))
		})
		if s.last != nil {
			s.last.after = w
		}
		s.last = w
		for next, i := w.after, 0; next != nil && i < ahead; next, i = next.after, i+1 {
			if next.parts == nil {
				break // unloaded
			}
			if next.at != 0 {
				continue
			}
			// Half of the room is for what has been used: the next sequence of a batch uses it again.
			if s.unused+next.bytes() > s.room()/2 || !b.request(next, w) {
				break
			}
		}
	}
	return w
}

// arrived waits until all copies of a weight are queued.
func (b *Backend) arrived(w *weight) {
	if w.loading == nil {
		return
	}
	err := <-w.loading
	w.loading = nil
	if err != nil {
		panic(&engine.Failure{Err: err})
	}
}

// request makes room for a weight and has it brought, unless keep would have to go for it.
func (b *Backend) request(w, keep *weight) bool {
	s := &b.weights
	for len(s.cached) > 0 && s.inCache+w.bytes() > s.room() {
		if s.cached[0] == keep {
			return false
		}
		b.evict(s.cached[0])
	}
	b.must(func() (err error) {
		d := b.dev
		if w.at, err = d.memory.get(w.bytes()); err != nil {
			return err
		}
		// The memory may be what queued work still reads.
		if err := d.check("cuEventRecord", d.api.eventRecord.call(s.free, d.stream)); err != nil {
			return err
		}
		return d.check("cuStreamWaitEvent", d.api.streamWait.call(s.stream, s.free, 0))
	})
	s.cached = append(s.cached, w)
	s.inCache, s.unused = s.inCache+w.bytes(), s.unused+w.bytes()
	w.loading, w.fresh = make(chan error, 1), true
	s.jobs <- w
	return true
}

// evict gives a weight's memory back.
func (b *Backend) evict(w *weight) {
	b.arrived(w)
	s := &b.weights
	s.cached = slices.DeleteFunc(s.cached, func(x *weight) bool { return x == w })
	s.inCache -= w.bytes()
	if w.fresh {
		s.unused -= w.bytes()
	}
	b.must(func() error {
		d, p := b.dev, w.at
		w.at = 0
		if w.fresh { // nobody has waited for its copies: whoever gets the memory next must
			w.fresh = false
			if err := d.check("cuStreamWaitEvent", d.api.streamWait.call(d.stream, w.ready, 0)); err != nil {
				return err
			}
		}
		return d.memory.put(p)
	})
}

// bring copies a weight to the GPU, piece by piece through two pinned buffers. On the goroutine for that.
func (b *Backend) bring(w *weight) error {
	s, d := &b.weights, b.dev
	fill, size, n := expand(w.parts, w.kind), w.kind.bytes(), int(w.bytes())
	piece := len(s.pinned[0]) / size * size
	for lo, i := 0, 0; lo < n; lo, i = lo+piece, 1-i {
		if s.busy[i] {
			if err := d.do(func() error { return d.check("cuEventSynchronize", d.api.eventSync.call(s.events[i])) }); err != nil {
				return err
			}
		}
		buf := s.pinned[i][:min(piece, n-lo)]
		fill(buf, lo)
		s.busy[i] = true
		err := d.do(func() error {
			if err := d.check("cuMemcpyHtoDAsync", d.api.copyIn.call(uintptr(w.at)+uintptr(lo), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)), s.stream)); err != nil {
				return err
			}
			return d.check("cuEventRecord", d.api.eventRecord.call(s.events[i], s.stream))
		})
		if err != nil {
			return err
		}
	}
	return d.do(func() error { return d.check("cuEventRecord", d.api.eventRecord.call(w.ready, s.stream)) })
}

// releaseOn gives back what streaming needs. On the GPU's goroutine.
func (w *weights) releaseOn(d *device) error {
	if w.stream == 0 {
		return nil
	}
	var first error
	note := func(err error) {
		if first == nil {
			first = err
		}
	}
	note(d.check("cuStreamSynchronize", d.api.streamSync.call(w.stream)))
	for _, m := range w.pinned {
		if m != nil {
			note(d.check("cuMemFreeHost", d.api.hostFree.call(uintptr(unsafe.Pointer(&m[0])))))
		}
	}
	for _, e := range []uintptr{w.free, w.events[0], w.events[1]} {
		if e != 0 {
			note(d.check("cuEventDestroy", d.api.eventDestroy.call(e)))
		}
	}
	note(d.check("cuStreamDestroy", d.api.streamDestroy.call(w.stream)))
	w.stream = 0
	return first
}
