package cpu

import (
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// physicalMemory is the memory of the machine, or of the control group that the process runs in, in bytes.
func physicalMemory() int64 {
	total := int64(8) << 30
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		total = int64(info.Totalram) * int64(info.Unit)
	}
	if text, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil {
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
			total = min(total, n)
		}
	}
	return total
}

// mapFloats maps n zeros, in huge pages where the system has them to spare; nil when it refuses.
func mapFloats(n int) (f []float32, raw []byte) {
	const huge = 2 << 20
	raw, err := unix.Mmap(-1, 0, 4*n+huge, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil
	}
	// From the first boundary of a huge page on; the rest of the mapping is never touched.
	skip := int(-uintptr(unsafe.Pointer(&raw[0])) & (huge - 1))
	_ = unix.Madvise(raw[skip:], unix.MADV_HUGEPAGE) // advice: without it the memory is as good, if slower
	return unsafe.Slice((*float32)(unsafe.Pointer(&raw[skip])), n), raw
}

// unmapFloats gives back what mapFloats mapped.
func unmapFloats(raw []byte) {
	if err := unix.Munmap(raw); err != nil {
		panic(err) // raw is not what Mmap returned
	}
}
