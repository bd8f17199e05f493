//go:build !linux && !darwin

package model

import "os"

// mapping is a file in memory: this system has no mmap that we use.
type mapping struct{ data []byte }

func openMapping(path string) (mapping, error) {
	data, err := os.ReadFile(path)
	return mapping{data}, err
}

func (mapping) close() error { return nil }
