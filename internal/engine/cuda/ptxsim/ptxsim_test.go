package ptxsim

import (
	"encoding/binary"
	"math"
	"strings"
	"testing"
)

// kernel wraps a body. Parameters: a and b are addresses, n a number.
func kernel(body string) string {
	return `
.version 7.0
.target sm_80
.address_size 64
.visible .entry test(
	.param .u64 a,
	.param .u64 b,
	.param .u32 n
)
{
	.reg .pred 	%p<9>;
	.reg .b16 	%h<9>;
	.reg .b32 	%r<20>;
	.reg .f32 	%f<20>;
	.reg .b64 	%rd<20>;
	.shared .align 4 .b8 red[256];
	ld.param.u64 	%rd1, [a];
	ld.param.u64 	%rd2, [b];
	ld.param.u32 	%r1, [n];
	mov.u32 	%r2, %tid.x;
	mul.wide.u32 	%rd3, %r2, 4;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
` + body + `
	ret;
}
`
}

// run executes a body with threads threads on an array of 64 words in, each its index, and returns 64 words.
func run(t *testing.T, body string, threads int) ([]uint32, error) {
	t.Helper()
	m, err := Parse(kernel(body))
	if err != nil {
		t.Fatal(err)
	}
	d := NewDevice()
	in, out := d.Alloc(256), d.Alloc(256)
	b, err := d.Bytes(in, 256)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 64 {
		binary.LittleEndian.PutUint32(b[4*i:], uint32(i))
	}
	params := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, in), out), 64)
	err = d.Launch(m.Kernels["test"], [3]uint32{1, 1, 1}, threads, 0, params)
	b, _ = d.Bytes(out, 256)
	words := make([]uint32, 64)
	for i := range words {
		words[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return words, err
}

// Values by the PTX manual's definitions, for every lane.
func TestInstructions(t *testing.T) {
	bits := math.Float32bits
	for _, c := range []struct {
		name, body string
		want       func(i uint32) uint32
	}{
		{"copy", "ld.global.u32 %r3, [%rd4];", func(i uint32) uint32 { return i }},
		{"signed product", "ld.global.s32 %r4, [%rd4]; sub.s32 %r5, 5, %r4; mul.lo.s32 %r3, %r5, -3;", func(i uint32) uint32 { return uint32((5 - int32(i)) * -3) }},
		{"wide product of negatives", "ld.global.u32 %r4, [%rd4]; neg.s32 %r5, %r4; mul.wide.s32 %rd6, %r5, 4; shr.s64 %rd7, %rd6, 1; cvt.u32.u64 %r3, %rd7;",
			func(i uint32) uint32 { return -i * 2 }},
		{"signed load extends", "ld.global.u32 %r4, [%rd4]; neg.s32 %r5, %r4; st.global.u32 [%rd5], %r5; ld.global.s32 %rd6, [%rd5]; shr.s64 %rd7, %rd6, 32; cvt.u32.u64 %r3, %rd7;",
			func(i uint32) uint32 {
				if i == 0 {
					return 0
				}
				return 0xffffffff
			}},
		{"division", "ld.global.u32 %r4, [%rd4]; sub.s32 %r5, %r4, 20; div.s32 %r3, %r5, 7;", func(i uint32) uint32 { return uint32((int32(i) - 20) / 7) }},
		{"remainder", "ld.global.u32 %r4, [%rd4]; rem.u32 %r3, %r4, 7;", func(i uint32) uint32 { return i % 7 }},
		{"shift out", "ld.global.u32 %r4, [%rd4]; shl.b32 %r3, %r4, 32;", func(uint32) uint32 { return 0 }},
		{"min of signed", "ld.global.u32 %r4, [%rd4]; sub.s32 %r5, 3, %r4; min.s32 %r3, %r5, 0;", func(i uint32) uint32 { return uint32(min(0, 3-int32(i))) }},
		{"select", "ld.global.u32 %r4, [%rd4]; setp.lt.u32 %p1, %r4, 9; selp.b32 %r3, 1, 2, %p1;", func(i uint32) uint32 {
			if i < 9 {
				return 1
			}
			return 2
		}},
		{"convert", "ld.global.u32 %r4, [%rd4]; cvt.rn.f32.s32 %f1, %r4; mul.f32 %f2, %f1, 0f3F000000; cvt.rzi.ftz.s32.f32 %r3, %f2;", func(i uint32) uint32 { return i / 2 }},
		{"fused product", "ld.global.u32 %r4, [%rd4]; cvt.rn.f32.s32 %f1, %r4; fma.rn.f32 %f2, %f1, %f1, 0f3F800000; mov.b32 %r3, %f2;", func(i uint32) uint32 { return bits(float32(i*i + 1)) }},
		{"bfloat16", "ld.global.u32 %r4, [%rd4]; cvt.rn.f32.s32 %f1, %r4; add.f32 %f2, %f1, 0f43800000; cvt.rn.bf16.f32 %h1, %f2; cvt.u32.u16 %r3, %h1;", func(i uint32) uint32 {
			u := bits(float32(i) + 256)
			return (u + 0x7fff + u>>16&1) >> 16
		}},
		{"exponential", "ld.global.u32 %r4, [%rd4]; cvt.rn.f32.s32 %f1, %r4; ex2.approx.ftz.f32 %f2, %f1; mov.b32 %r3, %f2;", func(i uint32) uint32 { return bits(float32(math.Exp2(float64(i)))) }},
		{"shuffle", "ld.global.u32 %r4, [%rd4]; shfl.sync.bfly.b32 %r3, %r4, 5, 31, -1;", func(i uint32) uint32 { return i ^ 5 }},
		{"divergence", "ld.global.u32 %r4, [%rd4]; and.b32 %r5, %r4, 1; setp.eq.s32 %p1, %r5, 0; mov.u32 %r3, 7; @%p1 bra $even; mov.u32 %r3, 8; $even: add.s32 %r3, %r3, 1;",
			func(i uint32) uint32 { return 8 + i&1 }},
		{"minimum of all", "ld.global.u32 %r4, [%rd4]; sub.s32 %r5, 3, %r4; atom.global.min.s32 %r6, [%rd1], %r5; bar.sync 0; ld.global.u32 %r3, [%rd1];",
			func(uint32) uint32 { return uint32(1<<32 - 60) }},
	} {
		body := strings.ReplaceAll(c.body, "; ", ";\n") + "\nst.global.u32 [%rd5], %r3;"
		body = strings.ReplaceAll(body, "$even: ", "$even:\n")
		got, err := run(t, body, 64)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for i, v := range got {
			if want := c.want(uint32(i)); v != want {
				t.Errorf("%s: lane %d gives %#x, want %#x", c.name, i, v, want)
				break
			}
		}
	}
}

// What a kernel does wrong is reported.
func TestReports(t *testing.T) {
	for _, c := range []struct{ name, body, want string }{
		{"outside", "ld.global.u32 %r3, [%rd4+4];", "outside every allocation"},
		{"before", "ld.global.u32 %r3, [%rd1+-4];", "outside every allocation"},
		{"misaligned", "ld.global.u32 %r3, [%rd1+2];", "misaligned"},
		{"host memory", "mov.u64 %rd6, 4096;\nst.global.u32 [%rd6], %r1;", "outside every allocation"},
		{"shared memory outside", "st.shared.u32 [256], %r1;", "shared memory access"},
		{"race", "shl.b32 %r3, %r2, 2;\ncvt.u64.u32 %rd6, %r3;\nst.shared.u32 [%rd6], %r2;\nxor.b32 %r4, %r3, 128;\ncvt.u64.u32 %rd7, %r4;\nld.shared.u32 %r5, [%rd7];", "race"},
		{"shuffle from a lane that is gone", "setp.lt.u32 %p1, %r2, 16;\n@%p1 bra $go;\nret;\n$go:\nshfl.sync.bfly.b32 %r3, %r2, 16, 31, -1;", "not active"},
		{"barrier for half a warp", "and.b32 %r3, %r2, 1;\nsetp.eq.s32 %p1, %r3, 0;\n@%p1 bra $a;\nbar.sync 0;\nbra.uni $b;\n$a:\nshfl.sync.bfly.b32 %r4, %r2, 2, 31, -1;\n$b:\nmov.u32 %r5, 0;", "deadlock"},
		{"division by zero", "div.s32 %r3, %r1, 0;", "division by zero"},
	} {
		if _, err := run(t, c.body, 64); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
	// The same race with a barrier is none.
	fixed := "shl.b32 %r3, %r2, 2;\ncvt.u64.u32 %rd6, %r3;\nst.shared.u32 [%rd6], %r2;\nbar.sync 0;\nxor.b32 %r4, %r3, 128;\ncvt.u64.u32 %rd7, %r4;\nld.shared.u32 %r5, [%rd7];\nst.global.u32 [%rd5], %r5;"
	got, err := run(t, fixed, 64)
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range got {
		if v != uint32(i)^32 {
			t.Fatalf("thread %d reads %d", i, v)
		}
	}
}

func TestLaunchRefuses(t *testing.T) {
	m, err := Parse(kernel(""))
	if err != nil {
		t.Fatal(err)
	}
	d := NewDevice()
	for _, c := range []struct{ threads, params int }{{0, 20}, {1025, 20}, {32, 16}, {32, 24}} {
		if err := d.Launch(m.Kernels["test"], [3]uint32{1, 1, 1}, c.threads, 0, make([]byte, c.params)); err == nil {
			t.Errorf("%d threads and %d bytes of parameters are accepted", c.threads, c.params)
		}
	}
}

// Text that is no PTX, or PTX that is not understood, is an error and no panic.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"", kernel(""), kernel("frob.f32 %f1, %f2;"), kernel("ld.global.u32 %r3, [%zz];"), kernel("@ bra;"), kernel("add.s32 %r1;"), ".visible .entry x(\n{\n.reg .b32 q;\n}",
		kernel("mov.b64 {%r1}, %rd1;"), kernel("bra $nowhere;"), kernel(".shared nothing;"), kernel("setp.lt.s32 %p1;"), kernel("cvt.u32 %r1;"), kernel("bra;"), kernel("ld %r1;")} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if len(s) > 1<<16 {
			return
		}
		if m, err := Parse(s); err == nil && m == nil {
			t.Error("neither a module nor an error")
		}
	})
}
