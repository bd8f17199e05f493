// Attention in one kernel, on tensor cores: scores never leave the multiprocessor (Dao et al. 2022, FlashAttention). Operands are
// bfloat16, sums float32. A block of four warps takes 64 queries of one head against 64 keys a step; the next keys and values are on
// their way while it computes. Keys that no query of the block sees are skipped, so streaming attention is linear in the length.
#include "kvcuda.h"

#define TILE 64

KV_DEV u32 shared_address(const void *p) { return (u32)(u64)(__attribute__((address_space(3))) const void *)p; }
KV_DEV void mma(float *d, const u32 *a, const u32 *b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
KV_DEV void load_matrices(u32 *r, const void *p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p))
               : "memory");
}
KV_DEV void load_transposed(u32 *r, const void *p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p))
               : "memory");
}
// Copies 16 bytes, of which bytes are read and the rest is zero.
KV_DEV void copy_async(void *to, const void *from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"((u64)(__attribute__((address_space(1))) const void *)from), "r"(bytes)
               : "memory");
}
#define copy_commit() asm volatile("cp.async.commit_group;" ::: "memory")
#define copy_wait(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")
KV_DEV u32 narrow2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
KV_DEV float quad_sum(float v) {
  v += shfl_xor(v, 1);
  return v + shfl_xor(v, 2);
}
KV_DEV float quad_max(float v) {
  v = larger(v, shfl_xor(v, 1));
  return larger(v, shfl_xor(v, 2));
}

// A tile in shared memory is 64 rows of D values; the 16-byte pieces of a row are permuted so that eight rows' pieces lie in different banks.
template <int D> KV_DEV bf16 *piece(bf16 *tile, int row, int c) { return tile + row * D + ((c ^ (row & 7)) << 3); }
template <int D> KV_DEV void load_tile(bf16 *tile, const bf16 *from, int row0, int rows, int stride) {
  for (int i = tid(); i < TILE * (D / 8); i += 128) {
    const int r = i / (D / 8), c = i % (D / 8), row = row0 + r;
    const bool there = row < rows;
    copy_async(piece<D>(tile, r, c), from + (u64)(there ? row : 0) * stride + c * 8, there ? 16 : 0);
  }
}

// out[n, heads * D] of q[n, heads * D], k, v[keys, kvheads * D]; query r stands at position start + r. masks has sink and recent of every
// KV head (recent 0: everything). window 0: none. Scores are times c, in units of log2.
template <int D>
KV_DEV void flash(float *out, const bf16 *q, const bf16 *k, const bf16 *v, const int *masks, int n, int keys, int start, int heads, int kvheads, int window,
                  float c) {
  extern __attribute__((shared, aligned(16))) bf16 memory[];
  bf16 *tq = memory, *tk = memory + TILE * D, *tv = memory + 3 * TILE * D; // keys and values twice
  const int head = by(), kv = head / (heads / kvheads), row0 = (nbx() - 1 - bx()) * TILE; // long rows first
  const int lane = tid() & 31, warp = tid() >> 5, g = lane >> 2, pair = (lane & 3) * 2;
  const int sink = masks[2 * kv], recent = masks[2 * kv + 1], stride = kvheads * D;
  k += kv * D;
  v += kv * D;
  const int i0 = start + row0, last = least(i0 + TILE, keys), tiles = (last + TILE - 1) / TILE;
  const int lo = window > 0 ? most(0, i0 - window + 1) : 0;
  // Key tiles [lo, sinks) and [near, tiles).
  const int sinks = recent > 0 ? (least(sink, last) + TILE - 1) / TILE : tiles, near = recent > 0 ? most(lo, i0 - recent + 1) / TILE : 0;
  int t = lo / TILE;
  if (t >= sinks && t < near) t = near;
  load_tile<D>(tq, q + head * D, row0, n, heads * D);
  load_tile<D>(tk, k, t * TILE, keys, stride);
  load_tile<D>(tv, v, t * TILE, keys, stride);
  copy_commit();
  u32 query[D / 16][4];
  float acc[D / 8][4], m[2] = {-1e30f, -1e30f}, z[2] = {0.f, 0.f};
#pragma unroll
  for (int x = 0; x < D / 8; x++)
    for (int e = 0; e < 4; e++) acc[x][e] = 0.f;
  bool first = true;
  for (int stage = 0; t < tiles; stage ^= 1) {
    int next = t + 1;
    if (next >= sinks && next < near) next = near;
    if (next < tiles) {
      load_tile<D>(tk + (stage ^ 1) * TILE * D, k, next * TILE, keys, stride);
      load_tile<D>(tv + (stage ^ 1) * TILE * D, v, next * TILE, keys, stride);
    }
    copy_commit();
    copy_wait(1);
    kv_sync();
    if (first) {
#pragma unroll
      for (int x = 0; x < D / 16; x++) load_matrices(query[x], piece<D>(tq, warp * 16 + (lane & 15), x * 2 + (lane >> 4)));
      first = false;
    }
    bf16 *sk = tk + stage * TILE * D, *sv = tv + stage * TILE * D;
    float s[8][4];
#pragma unroll
    for (int x = 0; x < 8; x++)
      for (int e = 0; e < 4; e++) s[x][e] = 0.f;
#pragma unroll
    for (int x = 0; x < D / 16; x++)
#pragma unroll
      for (int y = 0; y < 4; y++) {
        u32 b[4];
        load_matrices(b, piece<D>(sk, y * 16 + (lane & 7) + ((lane >> 4) << 3), x * 2 + ((lane >> 3) & 1)));
        mma(s[2 * y], query[x], b);
        mma(s[2 * y + 1], query[x], b + 2);
      }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = i0 + warp * 16 + g + r * 8;
      const int from = window > 0 ? i - window : -1, close = recent > 0 ? i - recent : -1;
      float top = m[r];
#pragma unroll
      for (int x = 0; x < 8; x++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int j = t * TILE + x * 8 + pair + e;
          const bool seen = j <= i && j < keys && j > from && (j > close || j < sink);
          s[x][r * 2 + e] = seen ? s[x][r * 2 + e] * c : -1e30f;
          top = larger(top, s[x][r * 2 + e]);
        }
      top = quad_max(top);
      const float shrink = ex2(m[r] - top);
      m[r] = top;
      z[r] *= shrink;
#pragma unroll
      for (int x = 0; x < D / 8; x++) {
        acc[x][r * 2] *= shrink;
        acc[x][r * 2 + 1] *= shrink;
      }
#pragma unroll
      for (int x = 0; x < 8; x++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float p = s[x][r * 2 + e] > -1e29f ? ex2(s[x][r * 2 + e] - top) : 0.f;
          z[r] += p;
          s[x][r * 2 + e] = p;
        }
    }
#pragma unroll
    for (int y = 0; y < 4; y++) {
      u32 a[4] = {narrow2(s[2 * y][0], s[2 * y][1]), narrow2(s[2 * y][2], s[2 * y][3]), narrow2(s[2 * y + 1][0], s[2 * y + 1][1]),
                  narrow2(s[2 * y + 1][2], s[2 * y + 1][3])};
#pragma unroll
      for (int x = 0; x < D / 16; x++) {
        u32 b[4];
        load_transposed(b, piece<D>(sv, y * 16 + (lane & 15), x * 2 + (lane >> 4)));
        mma(acc[2 * x], a, b);
        mma(acc[2 * x + 1], a, b + 2);
      }
    }
    kv_sync(); // before the other stage is overwritten
    t = next;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = row0 + warp * 16 + g + r * 8;
    const float inv = 1.f / quad_sum(z[r]);
    if (row < n) {
      float *to = out + ((u64)row * heads + head) * D + pair;
#pragma unroll
      for (int x = 0; x < D / 8; x++) {
        to[x * 8] = acc[x][r * 2] * inv;
        to[x * 8 + 1] = acc[x][r * 2 + 1] * inv;
      }
    }
  }
}

#define FLASH(D)                                                                                                                                       \
  KV_KERNEL __attribute__((launch_bounds(128))) void kv_flash_##D(float *out, const bf16 *q, const bf16 *k, const bf16 *v, const int *masks, int n, int keys, \
                                                                  int start, int heads, int kvheads, int window, float c) {                            \
    flash<D>(out, q, k, v, masks, n, keys, start, heads, kvheads, window, c);                                                                          \
  }
FLASH(64)
FLASH(128)
