package cpu

import "sync"

// arena hands out float32 memory that the caller gives back. Large pieces lie outside the garbage-collected heap where
// the system offers it: a collector that lets the heap double between its runs would otherwise double gigabytes of
// weights and activations, and huge pages make walking through them faster.
type arena struct {
	mu     sync.Mutex
	mapped map[*float32][]byte
}

// large is the size in floats from which memory is mapped: 1 MiB.
const large = 1 << 18

// get returns n zeros.
func (a *arena) get(n int) []float32 {
	if n >= large {
		if f, raw := mapFloats(n); raw != nil {
			a.mu.Lock()
			defer a.mu.Unlock()
			if a.mapped == nil {
				a.mapped = map[*float32][]byte{}
			}
			a.mapped[&f[0]] = raw
			return f
		}
	}
	return make([]float32, n)
}

// put takes back what get gave; f may have been shortened, but must begin where it began.
func (a *arena) put(f []float32) {
	if cap(f) < large {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	p := &f[:1][0]
	if raw, ok := a.mapped[p]; ok {
		delete(a.mapped, p)
		unmapFloats(raw)
	}
}

// close gives everything back.
func (a *arena) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, raw := range a.mapped {
		unmapFloats(raw)
	}
	a.mapped = nil
}
