package main

import (
	"fmt"
	"os"
	"strings"
)

// The AMX kernels are written as bytes: avo and Go's assembler do not know the instructions. The tiles are used as
// follows: 0 to 3 hold a 32 x 32 block of the result, 4 and 5 two blocks of 16 rows of A, 6 and 7 two blocks of 16
// columns of B.

// general-purpose registers by their number in an encoding.
var number = map[string]int{"AX": 0, "BX": 3, "SI": 6, "DI": 7, "R8": 8, "R9": 9, "R11": 11, "R12": 12}

// vex encodes an instruction of map 0F38 with a three-byte VEX prefix, W 0 and 128 bits. vvvv, x and b are the register
// bits that the prefix holds.
func vex(pp, vvvv, x, b, opcode, modrm int, rest ...int) string {
	code := []int{0xc4, 1<<7 | (^x&1)<<6 | (^b&1)<<5 | 2, (^vvvv&15)<<3 | pp, opcode, modrm}
	var out []string
	for _, c := range append(code, rest...) {
		out = append(out, fmt.Sprintf("BYTE $0x%02x", c))
	}
	return strings.Join(out, "; ")
}

// tileMemory encodes TILELOADD (pp 3) or TILESTORED (pp 2) with rows at base + index*row + disp.
func tileMemory(pp, tile int, base, index string, disp int) string {
	b, i := number[base], number[index]
	return vex(pp, 0, i>>3, b>>3, 0x4b, 2<<6|tile<<3|4, (i&7)<<3|b&7, disp&255, disp>>8&255, disp>>16&255, disp>>24&255)
}

type amxFile struct{ strings.Builder }

func (f *amxFile) op(format string, args ...any) { fmt.Fprintf(f, "\t"+format+"\n", args...) }

func (f *amxFile) load(tile int, base, index string, disp int) {
	f.op("%s // TILELOADD %d(%s)(%s*1), tmm%d", tileMemory(3, tile, base, index, disp), disp, base, index, tile)
}

func (f *amxFile) store(tile int, base, index string, disp int) {
	f.op("%s // TILESTORED tmm%d, %d(%s)(%s*1)", tileMemory(2, tile, base, index, disp), tile, disp, base, index)
}

// multiply adds the four products of A's and B's blocks.
func (f *amxFile) multiply() {
	for _, t := range [][3]int{{0, 4, 6}, {1, 4, 7}, {2, 5, 6}, {3, 5, 7}} {
		f.op("%s // TDPBF16PS tmm%d, tmm%d, tmm%d", vex(2, t[2], 0, 0, 0x5c, 0xc0|t[0]<<3|t[1]), t[2], t[1], t[0])
	}
}

// panel writes the kernel of a panel of 32 columns. partsB is 1 when B is exactly bfloat16, or 3 when it is split as A is.
func (f *amxFile) panel(name string, partsB int) {
	fmt.Fprintf(f, "// func %s(cfg *byte, nk int, mt int, a *uint16, b *uint16, c *float32, ldc int, acc int)\n", name)
	fmt.Fprintf(f, "TEXT ·%s(SB), NOSPLIT, $0-64\n", name)
	f.op("MOVQ cfg+0(FP), AX")
	f.op("%s // LDTILECFG (AX)", vex(0, 0, 0, 0, 0x49, number["AX"]))
	for _, p := range [][2]string{{"nk+8", "BX"}, {"mt+16", "DX"}, {"a+24", "SI"}, {"c+40", "R8"}, {"ldc+48", "R9"}, {"acc+56", "R10"}} {
		f.op("MOVQ %s(FP), %s", p[0], p[1])
	}
	f.op("SHLQ $2, R9")
	f.op("MOVQ $64, R11")
	fmt.Fprintf(f, "%s_strip:\n", name)
	f.op("MOVQ b+32(FP), DI")
	f.op("MOVQ BX, CX")
	f.op("MOVQ R9, R12")
	f.op("SHLQ $4, R12")
	f.op("ADDQ R8, R12 // 16 rows further")
	f.op("TESTQ R10, R10")
	f.op("JZ %s_zero", name)
	f.load(0, "R8", "R9", 0)
	f.load(1, "R8", "R9", 64)
	f.load(2, "R12", "R9", 0)
	f.load(3, "R12", "R9", 64)
	f.op("JMP %s_k", name)
	fmt.Fprintf(f, "%s_zero:\n", name)
	for t := range 4 {
		f.op("%s // TILEZERO tmm%d", vex(3, 0, 0, 0, 0x49, 0xc0|t<<3), t)
	}
	fmt.Fprintf(f, "%s_k:\n", name)
	a := func(part int) { f.load(4, "SI", "R11", 2048*part); f.load(5, "SI", "R11", 2048*part+1024) }
	b := func(part int) { f.load(6, "DI", "R11", 2048*part); f.load(7, "DI", "R11", 2048*part+1024) }
	// The small products first. Part 0 is the leading one.
	if partsB == 1 {
		b(0)
		for part := 2; part >= 0; part-- {
			a(part)
			f.multiply()
		}
	} else {
		a(2)
		b(0)
		f.multiply()
		a(1)
		f.multiply()
		b(1)
		f.multiply()
		a(0)
		f.multiply()
		b(2)
		f.multiply()
		b(0)
		f.multiply()
	}
	f.op("ADDQ $6144, SI")
	f.op("ADDQ $%d, DI", 2048*partsB)
	f.op("DECQ CX")
	f.op("JNZ %s_k", name)
	f.store(0, "R8", "R9", 0)
	f.store(1, "R8", "R9", 64)
	f.store(2, "R12", "R9", 0)
	f.store(3, "R12", "R9", 64)
	f.op("MOVQ R9, R13")
	f.op("SHLQ $5, R13")
	f.op("ADDQ R13, R8")
	f.op("DECQ DX")
	f.op("JNZ %s_strip", name)
	f.op("%s // TILERELEASE", vex(0, 0, 0, 0, 0x49, 0xc0))
	f.op("RET\n")
}

// split writes the kernel that splits rows of A into three bfloat16 parts, each rounded to nearest even.
func (f *amxFile) split(name string) {
	fmt.Fprintf(f, "// func %s(nk int, rows int, src *float32, lda int, dst *uint16, kstep int)\n", name)
	fmt.Fprintf(f, "TEXT ·%s(SB), NOSPLIT, $0-48\n", name)
	for _, p := range [][2]string{{"nk+0", "BX"}, {"rows+8", "DX"}, {"src+16", "SI"}, {"lda+24", "R9"}, {"dst+32", "DI"}, {"kstep+40", "R10"}} {
		f.op("MOVQ %s(FP), %s", p[0], p[1])
	}
	f.op("SHLQ $2, R9")
	for _, c := range [][2]string{{"0x7fff", "Z16"}, {"1", "Z17"}, {"0xffff0000", "Z18"}} {
		f.op("MOVL $%s, AX", c[0])
		f.op("VPBROADCASTD AX, %s", c[1])
	}
	fmt.Fprintf(f, "%s_row:\n", name)
	f.op("MOVQ SI, R8")
	f.op("MOVQ DI, R11")
	f.op("MOVQ BX, CX")
	fmt.Fprintf(f, "%s_k:\n", name)
	f.op("VMOVUPS (R8), Z0")
	f.op("VMOVUPS 64(R8), Z1")
	for part := range 3 {
		for z := range 2 {
			f.op("VPSRLD $16, Z%d, Z%d", z, 4+z)
			f.op("VPANDD Z17, Z%d, Z%d", 4+z, 4+z)
			f.op("VPADDD Z16, Z%d, Z%d", 4+z, 4+z)
			f.op("VPADDD Z%d, Z%d, Z%d", z, 4+z, 4+z)
			f.op("VPANDD Z18, Z%d, Z%d", 4+z, 4+z)
			if part < 2 {
				f.op("VSUBPS Z%d, Z%d, Z%d", 4+z, z, z)
			}
			f.op("VPSRLD $16, Z%d, Z%d", 4+z, 4+z)
			f.op("VPMOVDW Z%d, %d(R11)", 4+z, 2048*part+32*z)
		}
	}
	f.op("ADDQ $128, R8")
	f.op("ADDQ R10, R11")
	f.op("DECQ CX")
	f.op("JNZ %s_k", name)
	f.op("ADDQ R9, SI")
	f.op("ADDQ $64, DI")
	f.op("DECQ DX")
	f.op("JNZ %s_row", name)
	f.op("VZEROUPPER")
	f.op("RET\n")
}

// writeAMX writes the file of AMX kernels.
func writeAMX(path string) error {
	var f amxFile
	f.WriteString("// Code generated by asmgen. DO NOT EDIT.\n\n#include \"textflag.h\"\n\n")
	f.panel("amxExact", 1)
	f.panel("amxSplit", 3)
	f.split("splitRows512")
	return os.WriteFile(path, []byte(strings.TrimRight(f.String(), "\n")+"\n"), 0o644)
}
