// Package dtype decodes the number formats that model files store: plain floats and the block formats of GGUF.
package dtype

import (
	"encoding/binary"
	"fmt"
	"math"
)

// DType is a storage format. The zero value is none.
type DType int

const (
	F32 DType = iota + 1
	F16
	BF16
	Q4_0
	Q4_1
	Q5_0
	Q5_1
	Q8_0
	Q4_K
	Q5_K
	Q6_K
)

// format says how a type is laid out. A block holds len values in bytes bytes.
type format struct {
	name       string
	len, bytes int
	decode     func(dst []float32, block []byte)
}

var formats = [...]format{
	F32:  {"F32", 1, 4, func(dst []float32, b []byte) { dst[0] = math.Float32frombits(binary.LittleEndian.Uint32(b)) }},
	F16:  {"F16", 1, 2, func(dst []float32, b []byte) { dst[0] = half(b) }},
	BF16: {"BF16", 1, 2, func(dst []float32, b []byte) { dst[0] = bfloat(b) }},
	Q4_0: {"Q4_0", 32, 18, q4_0},
	Q4_1: {"Q4_1", 32, 20, q4_1},
	Q5_0: {"Q5_0", 32, 22, q5_0},
	Q5_1: {"Q5_1", 32, 24, q5_1},
	Q8_0: {"Q8_0", 32, 34, q8_0},
	Q4_K: {"Q4_K", 256, 144, q4_K},
	Q5_K: {"Q5_K", 256, 176, q5_K},
	Q6_K: {"Q6_K", 256, 210, q6_K},
}

// Valid reports whether d is one of the formats above.
func (d DType) Valid() bool { return d > 0 && int(d) < len(formats) }

// String is the name that GGUF and safetensors use.
func (d DType) String() string {
	if !d.Valid() {
		return fmt.Sprintf("DType(%d)", int(d))
	}
	return formats[d].name
}

// BlockLen is the number of values in a block, BlockBytes its size.
func (d DType) BlockLen() int   { return formats[d].len }
func (d DType) BlockBytes() int { return formats[d].bytes }

// Decode writes len(dst) values of src to dst; len(dst) must be a multiple of BlockLen, and src hold as many blocks.
func (d DType) Decode(dst []float32, src []byte) {
	f := &formats[d]
	src = src[:len(dst)/f.len*f.bytes]
	switch d { // one value a block: a call a value would cost more than the work
	case F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case F16:
		for i := range dst {
			dst[i] = half(src[2*i:])
		}
	case BF16:
		for i := range dst {
			dst[i] = bfloat(src[2*i:])
		}
	default:
		for len(dst) > 0 {
			f.decode(dst[:f.len], src[:f.bytes])
			dst, src = dst[f.len:], src[f.bytes:]
		}
	}
}

func bfloat(b []byte) float32 {
	return math.Float32frombits(uint32(binary.LittleEndian.Uint16(b)) << 16)
}

// The decoders below round every product (the outer float32), so that no compiler fuses it with the sum after it:
// values are the same on every machine.

// half decodes IEEE 754 binary16.
func half(b []byte) float32 {
	h := uint32(binary.LittleEndian.Uint16(b))
	sign, exp, mant := h>>15<<31, h>>10&31, h&1023
	switch exp {
	case 0: // zero and subnormals: mant * 2^-24
		f := float32(mant) * (1.0 / (1 << 24))
		return math.Float32frombits(math.Float32bits(f) | sign)
	case 31:
		return math.Float32frombits(sign | 0xff<<23 | mant<<13)
	}
	return math.Float32frombits(sign | (exp+112)<<23 | mant<<13)
}

func q4_0(dst []float32, b []byte) {
	d := half(b)
	for i, q := range b[2:18] {
		dst[i] = d * float32(int(q&15)-8)
		dst[i+16] = d * float32(int(q>>4)-8)
	}
}

func q4_1(dst []float32, b []byte) {
	d, m := half(b), half(b[2:])
	for i, q := range b[4:20] {
		dst[i] = float32(d*float32(q&15)) + m
		dst[i+16] = float32(d*float32(q>>4)) + m
	}
}

func q5_0(dst []float32, b []byte) {
	d, high := half(b), binary.LittleEndian.Uint32(b[2:])
	for i, q := range b[6:22] {
		dst[i] = d * float32(int(uint32(q&15)|high>>i&1<<4)-16)
		dst[i+16] = d * float32(int(uint32(q>>4)|high>>(i+16)&1<<4)-16)
	}
}

func q5_1(dst []float32, b []byte) {
	d, m, high := half(b), half(b[2:]), binary.LittleEndian.Uint32(b[4:])
	for i, q := range b[8:24] {
		dst[i] = float32(d*float32(uint32(q&15)|high>>i&1<<4)) + m
		dst[i+16] = float32(d*float32(uint32(q>>4)|high>>(i+16)&1<<4)) + m
	}
}

func q8_0(dst []float32, b []byte) {
	d := half(b)
	for i, q := range b[2:34] {
		dst[i] = d * float32(int8(q))
	}
}

// scaleMin unpacks the j-th of eight 6-bit scales and minima of a K block.
func scaleMin(sc []byte, j int) (scale, minimum float32) {
	if j < 4 {
		return float32(sc[j] & 63), float32(sc[j+4] & 63)
	}
	return float32(sc[j+4]&15 | sc[j-4]>>6<<4), float32(sc[j+4]>>4 | sc[j]>>6<<4)
}

func q4_K(dst []float32, b []byte) {
	d, dm, sc, q := half(b), half(b[2:]), b[4:16], b[16:144]
	for j := range 4 {
		s1, m1 := scaleMin(sc, 2*j)
		s2, m2 := scaleMin(sc, 2*j+1)
		d1, n1, d2, n2 := d*s1, dm*m1, d*s2, dm*m2
		for l, v := range q[32*j : 32*j+32] {
			dst[64*j+l] = float32(d1*float32(v&15)) - n1
			dst[64*j+32+l] = float32(d2*float32(v>>4)) - n2
		}
	}
}

func q5_K(dst []float32, b []byte) {
	d, dm, sc, high, q := half(b), half(b[2:]), b[4:16], b[16:48], b[48:176]
	for j := range 4 {
		s1, m1 := scaleMin(sc, 2*j)
		s2, m2 := scaleMin(sc, 2*j+1)
		d1, n1, d2, n2 := d*s1, dm*m1, d*s2, dm*m2
		for l, v := range q[32*j : 32*j+32] {
			dst[64*j+l] = float32(d1*float32(v&15|high[l]>>(2*j)&1<<4)) - n1
			dst[64*j+32+l] = float32(d2*float32(v>>4|high[l]>>(2*j+1)&1<<4)) - n2
		}
	}
}

func q6_K(dst []float32, b []byte) {
	ql, qh, sc, d := b[:128], b[128:192], b[192:208], half(b[208:])
	for range 2 {
		for l := range 32 {
			s := sc[l/16:]
			h := qh[l]
			dst[l] = d * float32(int8(s[0])) * float32(int(ql[l]&15|h&3<<4)-32)
			dst[l+32] = d * float32(int8(s[2])) * float32(int(ql[l+32]&15|h>>2&3<<4)-32)
			dst[l+64] = d * float32(int8(s[4])) * float32(int(ql[l]>>4|h>>4&3<<4)-32)
			dst[l+96] = d * float32(int8(s[6])) * float32(int(ql[l+32]>>4|h>>6<<4)-32)
		}
		dst, ql, qh, sc = dst[128:], ql[64:], qh[32:], sc[8:]
	}
}
