package cpu

import "golang.org/x/sys/unix"

// physicalMemory is the memory of the machine in bytes.
func physicalMemory() int64 {
	if n, err := unix.SysctlUint64("hw.memsize"); err == nil {
		return int64(n)
	}
	return 8 << 30
}

// mapFloats says that there is no memory outside the heap.
func mapFloats(int) (f []float32, raw []byte) { return nil, nil }

func unmapFloats([]byte) {}
