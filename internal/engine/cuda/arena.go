package cuda

import "slices"

// pointer is an address in the GPU's memory.
type pointer = uint64

// arena hands out device memory. It takes segments from the driver, whose own allocation stops the GPU, and keeps what is
// given back for the next. Within a segment free ranges are merged with their neighbours; the smallest that fits is taken.
type arena struct {
	segments []*segment
	// grain is the size that segments are rounded up to. 0: a segment is one piece, and goes back to the driver when it is freed.
	grain int64
	take  func(n int64) (pointer, error)
	give  func(p pointer) error
	// press is asked to put something back when memory is full; false when it has nothing. nil without such a thing.
	press func() (bool, error)

	inUse, peak, reserved int64 // bytes handed out, the most ever, bytes taken from the driver
}

type segment struct {
	base   pointer
	size   int64
	pieces []piece // in order of address, covering the segment
}

type piece struct {
	offset, size int64
	used         bool
}

// alignment of everything handed out, bytes.
const alignment = 256

// get returns n bytes of any content.
func (a *arena) get(n int64) (pointer, error) {
	for {
		p, err := a.find(n)
		if err == nil || a.press == nil || !isFull(err) {
			return p, err
		}
		some, failed := a.press()
		if failed != nil {
			return 0, failed
		}
		if !some {
			return 0, err
		}
	}
}

// find is get without pressing.
func (a *arena) find(n int64) (pointer, error) {
	exact := n
	n = (max(n, 1) + alignment - 1) / alignment * alignment
	if a.grain == 0 {
		n = max(exact, 1)
	}
	var best *segment
	at := -1
	for _, s := range a.segments {
		for i, p := range s.pieces {
			if !p.used && p.size >= n && (best == nil || p.size < best.pieces[at].size) {
				best, at = s, i
			}
		}
	}
	if best == nil {
		size := n
		if a.grain > 0 {
			size = (n + a.grain - 1) / a.grain * a.grain
		}
		base, err := a.take(size)
		if err != nil && a.trim() > 0 {
			base, err = a.take(size)
		}
		if err != nil && size > n {
			size = n
			base, err = a.take(size)
		}
		if err != nil {
			return 0, err
		}
		a.reserved += size
		best, at = &segment{base: base, size: size, pieces: []piece{{0, size, false}}}, 0
		a.segments = append(a.segments, best)
	}
	p := best.pieces[at]
	best.pieces[at] = piece{p.offset, n, true}
	if p.size > n {
		best.pieces = slices.Insert(best.pieces, at+1, piece{p.offset + n, p.size - n, false})
	}
	a.inUse += n
	a.peak = max(a.peak, a.inUse)
	return best.base + uint64(p.offset), nil
}

// put takes back what get returned. Work that was queued on the stream before may still use it: whoever gets it next queues
// behind that work.
func (a *arena) put(p pointer) error {
	for i, s := range a.segments {
		if p < s.base || p >= s.base+uint64(s.size) {
			continue
		}
		at, ok := slices.BinarySearchFunc(s.pieces, int64(p-s.base), func(x piece, o int64) int { return int(x.offset - o) })
		if !ok || !s.pieces[at].used {
			break
		}
		a.inUse -= s.pieces[at].size
		s.pieces[at].used = false
		if at+1 < len(s.pieces) && !s.pieces[at+1].used {
			s.pieces[at].size += s.pieces[at+1].size
			s.pieces = slices.Delete(s.pieces, at+1, at+2)
		}
		if at > 0 && !s.pieces[at-1].used {
			s.pieces[at-1].size += s.pieces[at].size
			s.pieces = slices.Delete(s.pieces, at, at+1)
		}
		if a.grain == 0 {
			a.segments = slices.Delete(a.segments, i, i+1)
			a.reserved -= s.size
			return a.give(s.base)
		}
		return nil
	}
	panic("memory freed that the arena has not handed out")
}

// trim gives segments that nobody uses back to the driver, and returns their bytes.
func (a *arena) trim() (freed int64) {
	a.segments = slices.DeleteFunc(a.segments, func(s *segment) bool {
		if len(s.pieces) > 1 || s.pieces[0].used || a.give(s.base) != nil {
			return false
		}
		freed += s.size
		return true
	})
	a.reserved -= freed
	return freed
}

// close gives everything back.
func (a *arena) close() (err error) {
	for _, s := range a.segments {
		if e := a.give(s.base); err == nil {
			err = e
		}
	}
	a.segments, a.inUse, a.reserved = nil, 0, 0
	return err
}
