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

// What the rows of a tapped attention tell, for rows below prompt: rowstats[head, query, 0] = entropy in nats, [1 + x] = mass on the
// widths[x] latest keys, x < nwidths <= 4, and lse[head, query], the logarithm to base 2 of the sum of 2^score.
struct RowTap {
  float *lse, *rowstats;
  const int *widths;
  int nwidths, prompt;
};

// out[n, heads * D] of q[n, heads * D], k, v[keys, kvheads * D]; query r stands at position start + r. masks has sink and recent of every
// KV head (recent 0: everything). window 0: none. Scores are times c, in units of log2.
template <int D, bool TAP>
KV_DEV void flash(float *out, const bf16 *q, const bf16 *k, const bf16 *v, const int *masks, int n, int keys, int start, int heads, int kvheads, int window,
                  float c, RowTap tap) {
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
  u32 query[TAP ? 1 : D / 16][4]; // with statistics they are read again every step: registers are few
  float xs[2] = {0.f, 0.f}, near_by[2][4];
  int widths[4], widest = 0;
  if (TAP) {
    for (int y = 0; y < 4; y++) {
      widths[y] = y < tap.nwidths ? tap.widths[y] : 0;
      widest = most(widest, widths[y]);
      near_by[0][y] = near_by[1][y] = 0.f;
    }
  }
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
    if (!TAP && first) {
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
    for (int x = 0; x < D / 16; x++) {
      if (TAP) load_matrices(query[0], piece<D>(tq, warp * 16 + (lane & 15), x * 2 + (lane >> 4)));
#pragma unroll
      for (int y = 0; y < 4; y++) {
        u32 b[4];
        load_matrices(b, piece<D>(sk, y * 16 + (lane & 7) + ((lane >> 4) << 3), x * 2 + ((lane >> 3) & 1)));
        mma(s[2 * y], query[TAP ? 0 : x], b);
        mma(s[2 * y + 1], query[TAP ? 0 : x], b + 2);
      }
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
      if (TAP) {
        xs[r] *= shrink;
        for (int y = 0; y < 4; y++) near_by[r][y] *= shrink;
      }
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
          if (TAP) {
            xs[r] += p * (p > 0.f ? s[x][r * 2 + e] : 0.f);
            const int back = i - (t * TILE + x * 8 + pair + e);
            if ((t + 1) * TILE > i0 - widest) // the same for the whole block
              for (int y = 0; y < 4; y++)
                if (back < widths[y]) near_by[r][y] += p;
          }
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
    const float sum = quad_sum(z[r]), inv = 1.f / sum;
    if (TAP) {
      const float lse = m[r] + lg2(sum), x = quad_sum(xs[r]) * inv;
      float told[4];
      for (int y = 0; y < 4; y++) told[y] = quad_sum(near_by[r][y]) * inv;
      if (row < tap.prompt && pair == 0) {
        tap.lse[(u64)head * n + row] = lse;
        float *to = tap.rowstats + ((u64)head * n + row) * (1 + tap.nwidths);
        to[0] = (lse - x) * LN2;
        for (int y = 0; y < 4; y++)
          if (y < tap.nwidths) to[1 + y] = told[y];
      }
    }
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

// Column sums of the probabilities of rows below prompt, given the rows' lse. A block takes 64 keys of one head against all queries that see
// them, 64 a step; sums are in the order of the rows. Sum x counts rows i >= start[x], and i - key >= start[x] where bykey[x] is set.
// sums[x, head, key]. With mapwidth >= 64, parts[head, i / mapwidth, block, 0 or 1] is the sum over a map row's queries and over the block's
// keys left and right of the next multiple of mapwidth.
template <int D>
KV_DEV void flash_columns(float *sums, float *parts, const bf16 *q, const bf16 *k, const float *lse, const int *list, int nsums, int n, int heads, int kvheads,
                          int window, int prompt, int mapwidth, int maprows, float c) {
  extern __attribute__((shared, aligned(16))) bf16 memory[];
  KV_SHARED(float, corner, 8);
  bf16 *tk = memory, *tq = memory + TILE * D; // queries twice
  const int head = by(), kv = head / (heads / kvheads), key0 = bx() * TILE;
  const int lane = tid() & 31, warp = tid() >> 5, g = lane >> 2, pair = (lane & 3) * 2;
  q += head * D;
  const float *l = lse + (u64)head * n;
  const int end = window > 0 ? least(prompt, key0 + TILE - 1 + window) : prompt;
  const int split = mapwidth > 0 ? (key0 / mapwidth + 1) * mapwidth : 0;
  int from[4][2];
  float total[4][2], cell[2] = {0.f, 0.f};
#pragma unroll
  for (int x = 0; x < 4; x++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int j = key0 + warp * 16 + g + r * 8;
      from[x][r] = x < nsums ? list[2 * x] + (list[2 * x + 1] ? j : 0) : 0x7fffffff;
      total[x][r] = 0.f;
    }
  load_tile<D>(tk, k + kv * D, key0, n, kvheads * D);
  load_tile<D>(tq, q, key0, n, heads * D);
  copy_commit();
  int stage = 0;
  for (int i0 = key0; i0 < end; i0 += TILE, stage ^= 1) {
    if (i0 + TILE < end) load_tile<D>(tq + (stage ^ 1) * TILE * D, q, i0 + TILE, n, heads * D);
    copy_commit();
    copy_wait(1);
    kv_sync();
    bf16 *sq = tq + stage * TILE * D;
    float s[8][4];
#pragma unroll
    for (int x = 0; x < 8; x++)
      for (int e = 0; e < 4; e++) s[x][e] = 0.f;
#pragma unroll
    for (int x = 0; x < D / 16; x++) {
      u32 a[4];
      load_matrices(a, piece<D>(tk, warp * 16 + (lane & 15), x * 2 + (lane >> 4)));
#pragma unroll
      for (int y = 0; y < 4; y++) {
        u32 b[4];
        load_matrices(b, piece<D>(sq, y * 16 + (lane & 7) + ((lane >> 4) << 3), x * 2 + ((lane >> 3) & 1)));
        mma(s[2 * y], a, b);
        mma(s[2 * y + 1], a, b + 2);
      }
    }
    // The first row of the next map row; there is at most one in a step.
    const int turn = mapwidth > 0 ? (i0 / mapwidth + 1) * mapwidth : 0x7fffffff;
    float later[2] = {0.f, 0.f};
#pragma unroll
    for (int x = 0; x < 8; x++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = i0 + x * 8 + pair + e;
        const float base = i < end ? l[i] : 0.f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int j = key0 + warp * 16 + g + r * 8;
          const bool seen = j <= i && i < end && (window == 0 || i - j < window);
          const float p = seen ? ex2(s[x][r * 2 + e] * c - base) : 0.f;
#pragma unroll
          for (int y = 0; y < 4; y++)
            if (i >= from[y][r]) total[y][r] += p;
          if (i < turn) cell[r] += p;
          else later[r] += p;
        }
      }
    if (mapwidth > 0 && (turn <= i0 + TILE || i0 + TILE >= end)) { // the same for the whole block
      // A step may hold the end of one map row and all there is of the last.
      for (int again = 0; again < 2; again++) {
        float left = 0.f, right = 0.f;
        for (int r = 0; r < 2; r++) {
          const int j = key0 + warp * 16 + g + r * 8;
          if (j < split) left += cell[r];
          else right += cell[r];
          cell[r] = later[r];
          later[r] = 0.f;
        }
        left = warp_sum(left);
        right = warp_sum(right);
        if (again) kv_sync(); // what stands there has been read
        if (lane == 0) {
          corner[warp * 2] = left;
          corner[warp * 2 + 1] = right;
        }
        kv_sync();
        const int row = i0 / mapwidth + again;
        if (tid() < 2) parts[(((u64)head * maprows + row) * nbx() + bx()) * 2 + tid()] = corner[tid()] + corner[2 + tid()] + corner[4 + tid()] + corner[6 + tid()];
        if (turn >= end || i0 + TILE < end) break;
      }
    }
    kv_sync(); // before the other stage is overwritten
  }
#pragma unroll
  for (int x = 0; x < 4; x++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int j = key0 + warp * 16 + g + r * 8;
      const float sum = quad_sum(total[x][r]);
      if (x < nsums && pair == 0 && j < n) sums[((u64)x * heads + head) * n + j] = sum;
    }
}

#define FLASH(D)                                                                                                                                       \
  KV_KERNEL __attribute__((launch_bounds(128))) void kv_flash_##D(float *out, const bf16 *q, const bf16 *k, const bf16 *v, const int *masks, int n, int keys, \
                                                                  int start, int heads, int kvheads, int window, float c) {                            \
    flash<D, false>(out, q, k, v, masks, n, keys, start, heads, kvheads, window, c, RowTap{0, 0, 0, 0, 0});                                            \
  }                                                                                                                                                    \
  KV_KERNEL __attribute__((launch_bounds(128))) void kv_flash_tap_##D(float *out, const bf16 *q, const bf16 *k, const bf16 *v, const int *masks, int n,     \
                                                                      int heads, int kvheads, int window, float c, float *lse, float *rowstats,        \
                                                                      const int *widths, int nwidths, int prompt) {                                    \
    flash<D, true>(out, q, k, v, masks, n, n, 0, heads, kvheads, window, c, RowTap{lse, rowstats, widths, nwidths, prompt});                           \
  }                                                                                                                                                    \
  KV_KERNEL __attribute__((launch_bounds(128))) void kv_flash_columns_##D(float *sums, float *parts, const bf16 *q, const bf16 *k, const float *lse,        \
                                                                          const int *list, int nsums, int n, int heads, int kvheads, int window,       \
                                                                          int prompt, int mapwidth, int maprows, float c) {                            \
    flash_columns<D>(sums, parts, q, k, lse, list, nsums, n, heads, kvheads, window, prompt, mapwidth, maprows, c);                                    \
  }
FLASH(64)
FLASH(128)
