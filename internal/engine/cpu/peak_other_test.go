//go:build !amd64

package cpu

// peakLoop returns a loop of floating-point operations and their number per turn.
func peakLoop(*kernels) (loop func(turns int), perTurn float64) {
	return func(turns int) {
		x := make([]float32, 64)
		for range turns {
			scaleGo(x, x, 0.5)
		}
	}, 64
}
