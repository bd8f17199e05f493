// Attention by tiles of scores. A tile is `rows` consecutive queries of some query heads, one after the other: packed row
// r is query r % rows of head r / rows. A row of scores has ld values, of which width are used: keys [a, a+na), then keys
// from b on. Scores are in units of log2: q.k / sqrt(d) * log2(e).
#include "kvcuda.h"

KV_DEV int key_of(int c, int a, int na, int b) { return c < na ? a + c : b + c - na; }

// dst[head, query, d] = x[row0 + query * step, (head0 + head) * d ...]. blockIdx is (query, head).
template <typename T> KV_DEV void pack(T *dst, const float *x, int row0, int step, int head0, int width, int d) {
  const float *from = x + (u64)(row0 + bx() * step) * width + (head0 + by()) * d;
  T *to = dst + ((u64)by() * nbx() + bx()) * d;
  for (int j = tid(); j < d; j += ntid()) put(to + j, from[j]);
}
KV_KERNEL void kv_pack_f32(float *dst, const float *x, int row0, int step, int head0, int width, int d) { pack(dst, x, row0, step, head0, width, d); }
KV_KERNEL void kv_pack_bf16(bf16 *dst, const float *x, int row0, int step, int head0, int width, int d) { pack(dst, x, row0, step, head0, width, d); }
KV_KERNEL void kv_unpack(float *x, const float *src, int row0, int head0, int width, int d, float c) {
  float *to = x + (u64)(row0 + bx()) * width + (head0 + by()) * d;
  const float *from = src + ((u64)by() * nbx() + bx()) * d;
  for (int j = tid(); j < d; j += ntid()) to[j] = from[j] * c;
}

// Running maximum m and sum z of 2^(x - m) of a thread, and of the block.
KV_DEV void online(float &m, float &z, float x) {
  if (x > m) {
    z = z * ex2(m - x) + 1.f;
    m = x;
  } else {
    z += ex2(x - m);
  }
}
KV_DEV float combine(float &m, float z, float *red) {
  const float mine = m;
  m = block_max(mine, red);
  return again_sum(mine > -INF ? z * ex2(mine - m) : 0.f, red);
}

// s becomes the softmax of its rows, zero where the query does not see; p16, when not null, gets the same rounded, and
// then s is written only if both is set. Query position: i0 + packed row % rows.
KV_KERNEL void kv_softmax(float *s, bf16 *p16, int both, int ld, int width, int rows, int i0, int a, int na, int b, int window, int sink, int recent) {
  KV_SHARED(float, red, 32);
  float *row = s + (u64)bx() * ld;
  const int i = i0 + (int)(bx() % (u32)rows);
  const int lo = window > 0 ? most(0, i - window + 1) : 0, near = recent > 0 ? i - recent : -1;
  float m = -INF, z = 0.f;
  for (int c = tid(); c < width; c += ntid()) {
    int j = key_of(c, a, na, b);
    if (j <= i && j >= lo && (j > near || j < sink)) online(m, z, row[c]);
  }
  z = combine(m, z, red);
  const float inv = 1.f / z;
  for (int c = tid(); c < width; c += ntid()) {
    int j = key_of(c, a, na, b);
    float p = 0.f;
    if (j <= i && j >= lo && (j > near || j < sink)) p = ex2(row[c] - m) * inv;
    if (p16) p16[(u64)bx() * ld + c] = narrow(p);
    if (!p16 || both) row[c] = p;
  }
}

// ds = p * (dp - sum(p * dp)) per row, into dp or, when it is not null, rounded into d16.
KV_KERNEL void kv_softmax_back(float *dp, bf16 *d16, const float *p, int ld, int width) {
  KV_SHARED(float, red, 32);
  const u64 o = (u64)bx() * ld;
  float t = 0.f;
  for (int c = tid(); c < width; c += ntid()) t += p[o + c] * dp[o + c];
  t = block_sum(t, red);
  for (int c = tid(); c < width; c += ntid()) {
    float d = p[o + c] * (dp[o + c] - t);
    if (d16) d16[o + c] = narrow(d);
    else dp[o + c] = d;
  }
}

// kv_softmax without masks, of queries step apart, but with what a row tells: keys [first, first + width) are the columns.
//   rowstats[head, query, 0] = entropy in nats, [1 + x] = mass on the widths[x] latest keys (widths ascend)
//   top[head, answers]: for a row with answer[query] >= 0, the key of the largest score, the lowest on a tie
// Rows from `prompt` on have no rowstats. head0 is the tile's first head, n the number of queries in all.
KV_KERNEL void kv_softmax_tap(float *s, bf16 *p16, float *rowstats, int *top, const int *widths, const int *answer, int nwidths, int answers,
                              int ld, int width, int rows, int i0, int step, int first, int window, int prompt, int head0, int n) {
  KV_SHARED(float, red, 32);
  KV_SHARED(int, redi, 32);
  float *row = s + (u64)bx() * ld;
  bf16 *row16 = p16 ? p16 + (u64)bx() * ld : 0;
  const int i = i0 + (int)(bx() % (u32)rows) * step, head = head0 + (int)(bx() / (u32)rows);
  const int lo = window > 0 ? most(0, i - window + 1) : 0;
  const int from = lo - first, end = i + 1 - first; // visible columns
  float m = -INF, z = 0.f;
  for (int c = from + tid(); c < end; c += ntid()) online(m, z, row[c]);
  z = combine(m, z, red);
  const float inv = 1.f / z;
  if (answers > 0) {
    int a = answer[i];
    if (a >= 0) { // the same for the whole block
      int best = 0x7fffffff;
      for (int c = from + tid(); c < end; c += ntid())
        if (row[c] == m) best = least(best, c);
      best = block_min(best, redi);
      if (tid() == 0) top[(u64)head * answers + a] = best == 0x7fffffff ? lo : first + best;
    }
  }
  float e = 0.f, mass = 0.f;
  float *out = rowstats + ((u64)head * n + i) * (1 + nwidths);
  int hi = end;
  for (int x = 0; x <= nwidths; x++) {
    int cut = x < nwidths ? most(from, end - widths[x]) : from;
    float part = 0.f;
    for (int c = cut + tid(); c < hi; c += ntid()) {
      float d = row[c] - m, p = ex2(d) * inv;
      part += p;
      e += p * d;
      row[c] = p;
      if (row16) row16[c] = narrow(p);
    }
    hi = cut;
    if (x < nwidths) {
      mass += again_sum(part, red);
      if (tid() == 0 && i < prompt) out[1 + x] = mass;
    }
  }
  e = again_sum(e, red);
  if (tid() == 0 && i < prompt) out[0] = LN2 * (lg2(z) - e);
  for (int c = tid(); c < width; c += ntid())
    if (c < from || c >= end) {
      row[c] = 0.f;
      if (row16) row16[c] = 0;
    }
}

// Column sums of a tile of probabilities. A thread has one column of one head (blockIdx.y); sums are in the order of the rows.
// Sum x counts rows i with start[x] <= i < prompt, and i - key >= start[x] where bykey[x] is set. At most 4 sums.
// With mapwidth, mapcols[head, i / mapwidth - i0 / mapwidth, column] is the sum over that map row.
KV_KERNEL void kv_columns(float *sums, float *mapcols, const float *p, int nsums, int s0, int s1, int s2, int s3, int k0, int k1, int k2, int k3,
                          int ld, int width, int rows, int i0, int first, int prompt, int head0, int n, int heads, int mapwidth, int maprows) {
  const int c = (int)(bx() * ntid() + tid());
  if (c >= width) return;
  const int j = first + c;
  const float *x = p + (u64)by() * rows * ld + c;
  // Rows from which each sum counts.
  const int f0 = nsums > 0 ? s0 + (k0 ? j : 0) : 0x7fffffff, f1 = nsums > 1 ? s1 + (k1 ? j : 0) : 0x7fffffff;
  const int f2 = nsums > 2 ? s2 + (k2 ? j : 0) : 0x7fffffff, f3 = nsums > 3 ? s3 + (k3 ? j : 0) : 0x7fffffff;
  float a0 = 0.f, a1 = 0.f, a2 = 0.f, a3 = 0.f, cell = 0.f;
  const int end = least(rows, prompt - i0);
  int left = mapwidth > 0 ? mapwidth - i0 % mapwidth : 0x7fffffff;
  float *cells = mapcols + (u64)by() * maprows * width + c;
  for (int r = 0; r < end; r++) {
    const float v = x[(u64)r * ld];
    const int i = i0 + r;
    if (i >= f0) a0 += v;
    if (i >= f1) a1 += v;
    if (i >= f2) a2 += v;
    if (i >= f3) a3 += v;
    cell += v;
    if (--left == 0) {
      *cells = cell;
      cells += width;
      cell = 0.f;
      left = mapwidth;
    }
  }
  if (mapwidth > 0 && left < mapwidth) *cells = cell;
  float *out = sums + (u64)(head0 + by()) * n + j;
  const u64 step = (u64)heads * n;
  if (nsums > 0) out[0] += a0;
  if (nsums > 1) out[step] += a1;
  if (nsums > 2) out[2 * step] += a2;
  if (nsums > 3) out[3 * step] += a3;
}

// map[head, row0 + blockIdx.y, blockIdx.x] += sum of mapcols over the keys of the map's column. blockIdx.z is the head.
KV_KERNEL void kv_map(float *map, const float *mapcols, int first, int width, int maprows, int row0, int tiles, int tile, int head0) {
  KV_SHARED(float, red, 32);
  const int lo = most(0, (int)bx() * tile - first), hi = least(width, (int)(bx() + 1) * tile - first);
  const float *x = mapcols + ((u64)bz() * maprows + by()) * width;
  float s = 0.f;
  for (int c = lo + (int)tid(); c < hi; c += ntid()) s += x[c];
  s = block_sum(s, red);
  if (tid() == 0 && lo < hi) map[((u64)(head0 + bz()) * tiles + row0 + by()) * tiles + bx()] += s;
}

// sums[head, key] += p of the listed rows of the tile.
KV_KERNEL void kv_columns_of(float *sums, const float *p, const int *list, int count, int ld, int width, int rows, int first, int head0, int n) {
  const int c = (int)(bx() * ntid() + tid());
  if (c >= width) return;
  float s = 0.f;
  for (int x = 0; x < count; x++) s += p[((u64)by() * rows + list[x]) * ld + c];
  sums[(u64)(head0 + by()) * n + first + c] += s;
}

// Mean and sum of squared deviations per key over rows [from, to) of the tile; seen rows came before. Keys left of the
// tile's first are zero in its rows, and so are keys that it does not reach: all n keys are updated.
KV_KERNEL void kv_moments(float *mean, float *m2, const float *p, int from, int to, int seen, int ld, int width, int rows, int first, int head0, int n) {
  const int j = (int)(bx() * ntid() + tid());
  if (j >= n) return;
  const int c = j - first;
  const float *x = p + (u64)by() * rows * ld + c;
  const u64 o = (u64)(head0 + by()) * n + j;
  float mu = mean[o], q = m2[o];
  for (int r = from; r < to; r++) {
    const float v = c >= 0 && c < width ? x[(u64)r * ld] : 0.f, d = v - mu;
    mu += d / (float)(++seen);
    q += d * (v - mu);
  }
  mean[o] = mu;
  m2[o] = q;
}

// counts[head, sample, x] = the smallest number of keys that hold the share shares[x] of a row. blockIdx is (sample, head);
// sample x is row row0 + x * every of the tile. Positive floats are ordered as their bits are, so the smallest value that is
// needed is found by bisection: what is above lo holds the share, what is above hi does not.
KV_DEV float above(const float *p, int n, float v, int *count, float *red) {
  float s = 0.f, k = 0.f;
  for (int c = tid(); c < n; c += ntid())
    if (p[c] > v) {
      s += p[c];
      k += 1.f; // exact below 2^24
    }
  *count = (int)again_sum(k, red);
  return again_sum(s, red);
}
KV_KERNEL void kv_holders(int *counts, const float *p, const float *shares, int nshares, int row0, int every, int ld, int width, int rows, int sample0, int samples,
                          int head0) {
  KV_SHARED(float, red, 32);
  const float *row = p + ((u64)by() * rows + row0 + bx() * every) * ld;
  int *out = counts + ((u64)(head0 + by()) * samples + sample0 + bx()) * nshares;
  float total = 0.f;
  for (int c = tid(); c < width; c += ntid()) total += row[c];
  total = block_sum(total, red);
  for (int x = 0; x < nshares; x++) {
    const float want = shares[x] * total;
    // All values up to this one, were there as many as can be, would hold less than what may be left out.
    const float low = 0.99f * (1.f - shares[x]) * total / (float)width;
    u32 lo = bits(low), hi = bits(1.f);
    int at, n = 0;
    above(row, width, low, &at, red);
    float held = 0.f;
    while (hi - lo > 1 && at - n > 1) {
      const u32 mid = lo + (hi - lo) / 2;
      int k;
      const float mass = above(row, width, from_bits(mid), &k, red);
      if (mass >= want) {
        lo = mid;
        at = k;
      } else {
        hi = mid;
        held = mass;
        n = k;
      }
    }
    if (hi - lo <= 1) { // all that are left have the value of hi's bits
      const float v = from_bits(hi), q = (want - held) / v;
      int more = (int)q;
      if ((float)more < q) more++;
      n += least(most(1, more), at - n);
    } else {
      n = at;
    }
    if (tid() == 0) out[x] = n;
  }
}
