package cuda

import (
	"errors"
	"slices"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// Tensors that are parked lie in the GPU's memory as long as there is room. When there is none they are moved to the host's, one after
// another: first those whose copy there still stands, which costs nothing, the one parked longest first; then the one parked last,
// since what a forward pass leaves is needed again in its own order or from its end. Reading one brings it back, and ends its being
// parked; the copy on the host stays valid, for parked tensors are not written again.

// spill is the memory that parked tensors have taken on the host.
type spill struct {
	parked      []*storage // in the order in which they were parked
	spare       [][]byte   // host memory that is free again
	inUse, peak int64      // bytes on the host, and the most ever
	moved       int64      // bytes moved to the host so far
}

// Park implements engine.Parker.
func (b *Backend) Park(ts ...engine.Tensor) {
	for _, t := range ts {
		m := t.(*Tensor).mem
		if m.count == 0 {
			panic("a tensor is parked after it was freed")
		}
		if !m.parked && !m.stale {
			m.parked = true
			b.spill.parked = append(b.spill.parked, m)
		}
	}
}

// Spilled reports the bytes of parked tensors on the host, the most that ever were, and how many were moved there so far.
func (b *Backend) Spilled() (inUse, peak, moved int64) {
	return b.spill.inUse, b.spill.peak, b.spill.moved
}

// makeRoom moves one parked tensor out of the GPU's memory; false when there is none. On the GPU's goroutine, as all below.
func (b *Backend) makeRoom() (bool, error) {
	var victim *storage
	for _, m := range b.spill.parked {
		if m.at != 0 && m.host != nil {
			victim = m
			break
		}
	}
	for i := len(b.spill.parked) - 1; victim == nil && i >= 0; i-- {
		if m := b.spill.parked[i]; m.at != 0 {
			victim = m
		}
	}
	if victim == nil {
		return false, nil
	}
	if victim.host == nil {
		s, n := &b.spill, 4*victim.count
		host := s.take(n)
		if err := b.dev.download(victim.at, n, 4, func(src []byte, lo int) { copy(host[lo:], src) }); err != nil {
			return false, err
		}
		victim.host = host
		s.inUse, s.moved = s.inUse+int64(n), s.moved+int64(n)
		s.peak = max(s.peak, s.inUse)
	}
	at := victim.at
	victim.at = 0
	return true, b.dev.memory.put(at)
}

// bringBack makes a parked tensor one in use.
func (b *Backend) bringBack(m *storage) error {
	b.unpark(m)
	if m.at != 0 {
		return nil
	}
	n := 4 * m.count
	at, err := b.dev.memory.get(int64(n))
	if err != nil {
		return err
	}
	m.at = at
	return b.dev.upload(at, n, 4, func(dst []byte, lo int) { copy(dst, m.host[lo:]) })
}

func (b *Backend) unpark(m *storage) {
	m.parked = false
	b.spill.parked = slices.DeleteFunc(b.spill.parked, func(x *storage) bool { return x == m })
}

// forget gives back a tensor's memory on the host.
func (s *spill) forget(m *storage) {
	if m.host != nil {
		s.inUse -= int64(len(m.host))
		s.spare = append(s.spare, m.host)
		m.host = nil
	}
}

// take returns n bytes of the host's memory.
func (s *spill) take(n int) []byte {
	for i, h := range s.spare {
		if len(h) == n {
			s.spare = slices.Delete(s.spare, i, i+1)
			return h
		}
	}
	s.spare = nil // of other sizes: samples of one length come together, and nothing is kept for those before
	return make([]byte, n)
}

// isFull tells a full memory from other failures.
func isFull(err error) bool {
	var full *OutOfMemoryError
	return errors.As(err, &full)
}
