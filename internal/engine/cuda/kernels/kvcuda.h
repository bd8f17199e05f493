// What the kernels need of CUDA, without its toolkit: clang's builtins and a little inline PTX.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u16 bf16;

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define INF __builtin_inff()

#define KV_DEV static __attribute__((device)) __attribute__((always_inline)) inline
#define KV_KERNEL extern "C" __attribute__((global))
#define KV_SHARED(T, name, n) __attribute__((shared)) T name[n]

KV_DEV u32 tid() { return __nvvm_read_ptx_sreg_tid_x(); }
KV_DEV u32 ntid() { return __nvvm_read_ptx_sreg_ntid_x(); }
KV_DEV u32 bx() { return __nvvm_read_ptx_sreg_ctaid_x(); }
KV_DEV u32 by() { return __nvvm_read_ptx_sreg_ctaid_y(); }
KV_DEV u32 bz() { return __nvvm_read_ptx_sreg_ctaid_z(); }
KV_DEV u32 nbx() { return __nvvm_read_ptx_sreg_nctaid_x(); }
KV_DEV u32 nby() { return __nvvm_read_ptx_sreg_nctaid_y(); }
#define kv_sync() __syncthreads()

KV_DEV float shfl_xor(float v, int m) { return __nvvm_shfl_sync_bfly_f32(0xffffffffu, v, m, 31); }
KV_DEV int shfl_xor_i(int v, int m) { return __nvvm_shfl_sync_bfly_i32(0xffffffffu, v, m, 31); }
KV_DEV void atomic_min(int *p, int v) { __nvvm_atom_min_gen_i(p, v); }

// Relative errors: 2^-22 of ex2, 2^-22.9 of rsqrt; absolute 2^-22 of lg2.
KV_DEV float ex2(float x) { return __nvvm_ex2_approx_ftz_f(x); }
KV_DEV float lg2(float x) { return __nvvm_lg2_approx_ftz_f(x); }
KV_DEV float rsqrt(float x) { return __nvvm_rsqrt_approx_ftz_f(x); }
KV_DEV float root(float x) { return __nvvm_sqrt_rn_ftz_f(x); }
KV_DEV float larger(float a, float b) { return __nvvm_fmax_f(a, b); }
KV_DEV int least(int a, int b) { return a < b ? a : b; }
KV_DEV int most(int a, int b) { return a > b ? a : b; }

KV_DEV u32 bits(float x) { return __builtin_bit_cast(u32, x); }
KV_DEV float from_bits(u32 x) { return __builtin_bit_cast(float, x); }
KV_DEV float wide(bf16 x) { return from_bits((u32)x << 16); }
KV_DEV float wide(float x) { return x; }
KV_DEV bf16 narrow(float x) {
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
KV_DEV void put(float *p, float x) { *p = x; }
KV_DEV void put(bf16 *p, float x) { *p = narrow(x); }

KV_DEV float warp_sum(float v) {
  for (int m = 16; m; m >>= 1) v += shfl_xor(v, m);
  return v;
}
KV_DEV float warp_max(float v) {
  for (int m = 16; m; m >>= 1) v = larger(v, shfl_xor(v, m));
  return v;
}
KV_DEV int warp_min(int v) {
  for (int m = 16; m; m >>= 1) v = least(v, shfl_xor_i(v, m));
  return v;
}
// Reductions over the block, whose threads are whole warps. red is shared memory of 32 values that nobody has used before
// (the block_ functions), or not since the last barrier but by a reduction (the again_ functions). Every thread gets the result.
#define REDUCTION(T, op, none)                       \
  KV_DEV T block_##op(T v, T *red) {                 \
    u32 w = tid() >> 5, l = tid() & 31;              \
    v = warp_##op(v);                                \
    if (l == 0) red[w] = v;                          \
    kv_sync();                                       \
    return warp_##op(l < ntid() >> 5 ? red[l] : none); \
  }                                                  \
  KV_DEV T again_##op(T v, T *red) {                 \
    kv_sync();                                       \
    return block_##op(v, red);                       \
  }
REDUCTION(float, sum, 0.f)
REDUCTION(float, max, -INF)
REDUCTION(int, min, 0x7fffffff)
