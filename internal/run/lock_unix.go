//go:build linux || darwin

package run

import (
	"errors"
	"os"
	"syscall"
)

// tryLock takes an exclusive lock that ends with the process, however it ends; held says that another has it.
func tryLock(f *os.File) (held bool, err error) {
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}
