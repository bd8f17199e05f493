//go:build !linux && !darwin

package run

import (
	"errors"
	"os"
)

// tryLock refuses: a run without a lock could mix two runs' artefacts.
func tryLock(*os.File) (held bool, err error) {
	return false, errors.ErrUnsupported
}
