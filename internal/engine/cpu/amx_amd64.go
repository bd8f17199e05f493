package cpu

import "golang.org/x/sys/cpu"

//go:noescape
func amxExact(cfg *byte, nk int, mt int, a *uint16, b *uint16, c *float32, ldc int, acc int)

//go:noescape
func amxSplit(cfg *byte, nk int, mt int, a *uint16, b *uint16, c *float32, ldc int, acc int)

// splitRows needs AVX-512 only. kstep is in bytes.
//
//go:noescape
func splitRows512(nk int, rows int, src *float32, lda int, dst *uint16, kstep int)

// amxKernels are the kernels of Intel's matrix unit. The tiles are set up, used and released within one call, which the
// scheduler cannot interrupt; a call takes some 20 microseconds at most, so that the garbage collector does not wait.
func amxKernels() *splitKernels {
	cfg := make([]byte, 64)
	cfg[0] = 1 // palette
	for t := range 8 {
		cfg[16+2*t], cfg[48+t] = 64, 16 // 16 rows of 64 bytes
	}
	return &splitKernels{
		panel: func(parts, steps, strips int, a, b []uint16, c []float32, ldc int, acc bool) {
			add := 0
			if acc {
				add = 1
			}
			if parts == 1 {
				amxExact(&cfg[0], steps, strips, &a[0], &b[0], &c[0], ldc, add)
			} else {
				amxSplit(&cfg[0], steps, strips, &a[0], &b[0], &c[0], ldc, add)
			}
		},
		rows: splitRowsAVX512,
	}
}

func splitRowsAVX512(steps, rows int, src []float32, lda int, dst []uint16) {
	splitRows512(steps, rows, &src[0], lda, &dst[0], 3*tilePair*2)
}

// amxTier returns the AMX tier, or why the processor's AMX cannot be used; both are empty where there is none.
func amxTier() (k *kernels, refusal string) {
	if !cpu.X86.HasAMXTile || !cpu.X86.HasAMXBF16 {
		return nil, ""
	}
	if err := requestTiles(); err != nil {
		return nil, "amx refused by the system"
	}
	k = avx512Kernels()
	k.tier, k.split = "amx", amxKernels()
	if !k.split.selfTest() {
		return nil, "amx failed its self-test"
	}
	return k, ""
}
