package cpu

// peakLoop returns a loop of independent FMAs and its floating-point operations per turn.
func peakLoop(k *kernels) (loop func(turns int), perTurn float64) {
	if k.tier == "avx512" {
		return peakAVX512, 24 * 16 * 2
	}
	return peakAVX2, 10 * 8 * 2
}
