// Decoding over pages of keys and values. A lane is what one query row has of one KV head's cache; lane l of K KV heads is KV head
// l % K of row l / K. The slots that lanes see are cut into chunks; blocks work on one chunk, and sums over chunks are in
// their order.
#include "kvcuda.h"

// dst[to[x], :] = src[from[x] * ld + offset ...], d values each; to or from null: x itself. Block x, one row.
KV_KERNEL void kv_copy_rows(float *dst, const float *src, const int *to, const int *from, int ld, int offset, int d) {
  const u64 x = bx(), t = to ? to[x] : x, f = from ? from[x] : x;
  for (int j = tid(); j < d; j += ntid()) dst[t * d + j] = src[f * ld + offset + j];
}

// Value j of a head, rotated to a position; negative positions leave it as it is.
KV_DEV float rotated(const float *x, int j, int half, int position, const float *cos, const float *sin) {
  if (position < 0) return x[j];
  const int i = j < half ? j : j - half;
  const float c = cos[(u64)position * half + i], s = sin[(u64)position * half + i], u = x[i], v = x[i + half];
  return j < half ? u * c - v * s : v * c + u * s;
}

// Lane blockIdx.x writes its key, rotated to position[lane], and its value to row at[lane] of the pages.
KV_KERNEL void kv_page_write(float *keys, float *values, const float *k, const float *v, const int *at, const int *position,
                             const float *cos, const float *sin, int d) {
  const u64 l = bx(), to = (u64)at[l] * d;
  for (int j = tid(); j < d; j += ntid()) {
    keys[to + j] = rotated(k + l * d, j, d / 2, position[l], cos, sin);
    values[to + j] = v[l * d + j];
  }
}

// The queries of lane blockIdx.x, query head blockIdx.y of its group, rotated to position[lane] and times c.
KV_KERNEL void kv_page_query(float *dst, const float *q, const int *position, const float *cos, const float *sin, int d, float c) {
  const u64 l = bx(), o = (l * nby() + by()) * d;
  for (int j = tid(); j < d; j += ntid()) dst[o + j] = rotated(q + o, j, d / 2, position[l], cos, sin) * c;
}

// Chunk x covers slots [slot[x], slot[x] + count[x]) of lane lane[x], of which at[x] visible slots come before. Of lane l: its page table
// begins at tables + table[l], its positions to rotate to at positions + rotate[l] (none where that is negative), its scores at
// scores + first[l], one row of width[l] per query head.
struct Chunk {
  int lane, slot, count, at;
};
KV_DEV Chunk chunk(const int *chunks) {
  const int *c = chunks + 4 * (u64)bx();
  return Chunk{c[0], c[1], c[2], c[3]};
}

// scores[query head, visible slot] = query * key. A warp takes one slot at a time.
KV_KERNEL void kv_page_scores(float *scores, const float *keys, const float *q, const int *chunks, const int *tables, const int *positions,
                              const int *table, const int *rotate, const int *first, const int *width, const float *cos, const float *sin,
                              int block, int group, int d) {
  const Chunk c = chunk(chunks);
  const int *pages = tables + table[c.lane], turn = rotate[c.lane], lane = tid() & 31, half = d / 2, w = width[c.lane];
  const float *query = q + (u64)c.lane * group * d;
  float *out = scores + first[c.lane] + c.at;
  for (int i = tid() >> 5; i < c.count; i += ntid() >> 5) {
    const int slot = c.slot + i, position = turn < 0 ? -1 : positions[turn + slot];
    const float *key = keys + ((u64)pages[slot / block] * block + slot % block) * d;
    for (int g = 0; g < group; g++) {
      float s = 0.f;
      for (int j = lane; j < half; j += 32) {
        float u = key[j], v = key[j + half];
        if (position >= 0) {
          const float co = cos[(u64)position * half + j], si = sin[(u64)position * half + j], r = u * co - v * si;
          v = v * co + u * si;
          u = r;
        }
        s += u * query[g * d + j] + v * query[g * d + half + j];
      }
      s = warp_sum(s);
      if (lane == 0) out[(u64)g * w + i] = s;
    }
  }
}

// Scores, in units of log2, become probabilities. Block: lane blockIdx.x, query head blockIdx.y.
KV_KERNEL void kv_page_softmax(float *scores, const int *first, const int *width) {
  KV_SHARED(float, red, 32);
  const int n = width[bx()];
  float *row = scores + first[bx()] + (u64)by() * n;
  float m = -INF, z = 0.f;
  for (int c = tid(); c < n; c += ntid()) m = larger(m, row[c]);
  m = block_max(m, red);
  for (int c = tid(); c < n; c += ntid()) z += ex2(row[c] - m);
  z = 1.f / again_sum(z, red);
  for (int c = tid(); c < n; c += ntid()) row[c] = ex2(row[c] - m) * z;
}

// partial[chunk, query head, d] = probabilities * values. Four query heads at once.
KV_KERNEL void kv_page_apply(float *partial, const float *scores, const float *values, const int *chunks, const int *tables, const int *table,
                             const int *first, const int *width, int block, int group, int d) {
  const Chunk c = chunk(chunks);
  const int *pages = tables + table[c.lane], w = width[c.lane];
  const float *p = scores + first[c.lane] + c.at;
  for (int g = 0; g < group; g += 4) {
    const float *p0 = p + (u64)g * w, *p1 = p + (u64)least(g + 1, group - 1) * w, *p2 = p + (u64)least(g + 2, group - 1) * w,
                *p3 = p + (u64)least(g + 3, group - 1) * w;
    for (int j = tid(); j < d; j += ntid()) {
      float a0 = 0.f, a1 = 0.f, a2 = 0.f, a3 = 0.f;
      for (int i = 0; i < c.count; i++) {
        const int slot = c.slot + i;
        const float v = values[((u64)pages[slot / block] * block + slot % block) * d + j];
        a0 += p0[i] * v;
        a1 += p1[i] * v;
        a2 += p2[i] * v;
        a3 += p3[i] * v;
      }
      float *out = partial + ((u64)bx() * group + g) * d + j;
      out[0] = a0;
      if (g + 1 < group) out[d] = a1;
      if (g + 2 < group) out[2 * d] = a2;
      if (g + 3 < group) out[3 * d] = a3;
    }
  }
}

// out = sum over the lane's chunks, which are chunks [from[lane], from[lane + 1]). Block: lane blockIdx.x, query head blockIdx.y.
KV_KERNEL void kv_page_sum(float *out, const float *partial, const int *from, int d) {
  const u64 group = nby();
  const int lo = from[bx()], hi = from[bx() + 1];
  for (int j = tid(); j < d; j += ntid()) {
    float s = 0.f;
    for (int c = lo; c < hi; c++) s += partial[((u64)c * group + by()) * d + j];
    out[((u64)bx() * group + by()) * d + j] = s;
  }
}
