//go:build !linux

package cpu

import "errors"

// requestTiles has nothing to ask where the system is not known to save the tiles.
func requestTiles() error { return errors.ErrUnsupported }
