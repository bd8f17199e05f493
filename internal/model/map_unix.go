//go:build linux || darwin

package model

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// mapping is a file mapped for reading.
type mapping struct{ data []byte }

func openMapping(path string) (mapping, error) {
	f, err := os.Open(path)
	if err != nil {
		return mapping{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return mapping{}, err
	}
	if info.Size() == 0 {
		return mapping{}, fmt.Errorf("%w: %s is empty", ErrCorrupt, path)
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return mapping{}, fmt.Errorf("map %s: %w", path, err)
	}
	return mapping{data}, nil
}

func (m mapping) close() error { return unix.Munmap(m.data) }
