// Operations on rows. Matrices are row-major; one block works on one row (blockIdx.x) where nothing else is said.
#include "kvcuda.h"

#define EACH(i, n) for (u64 i = (u64)bx() * ntid() + tid(); i < (n); i += (u64)nbx() * ntid())
#define COLUMNS(j, n) for (int j = tid(); j < (n); j += ntid())

template <typename W> KV_DEV void embed(float *dst, const W *w, const int *ids, int d) {
  float *y = dst + (u64)bx() * d;
  const W *x = w + (u64)ids[bx()] * d;
  COLUMNS(j, d) y[j] = wide(x[j]);
}
KV_KERNEL void kv_embed_f32(float *dst, const float *w, const int *ids, int d) { embed(dst, w, ids, d); }
KV_KERNEL void kv_embed_bf16(float *dst, const bf16 *w, const int *ids, int d) { embed(dst, w, ids, d); }

KV_KERNEL void kv_add_bias(float *x, const float *b, int n) {
  float *row = x + (u64)bx() * n;
  COLUMNS(j, n) row[j] += b[j];
}
KV_KERNEL void kv_to_bf16(bf16 *dst, const float *x, u64 n) {
  EACH(i, n) dst[i] = narrow(x[i]);
}

// y = x / sqrt(mean(x^2) + eps) * w; y may be x.
KV_KERNEL void kv_rmsnorm(float *y, const float *x, const float *w, int n, float eps) {
  KV_SHARED(float, red, 32);
  const u64 o = (u64)bx() * n;
  float s = 0.f;
  COLUMNS(j, n) s += x[o + j] * x[o + j];
  const float r = rsqrt(block_sum(s, red) / (float)n + eps);
  COLUMNS(j, n) y[o + j] = x[o + j] * r * w[j];
}
// dx += r * dy * w - x * r^3 * mean(dy * w * x), with r = 1 / sqrt(mean(x^2) + eps).
KV_KERNEL void kv_rmsnorm_back(float *dx, const float *dy, const float *x, const float *w, int n, float eps) {
  KV_SHARED(float, red, 32);
  const u64 o = (u64)bx() * n;
  float s = 0.f, t = 0.f;
  COLUMNS(j, n) {
    float v = x[o + j];
    s += v * v;
    t += dy[o + j] * w[j] * v;
  }
  const float r = rsqrt(block_sum(s, red) / (float)n + eps);
  const float c = again_sum(t, red) * r * r * r / (float)n;
  COLUMNS(j, n) dx[o + j] += r * dy[o + j] * w[j] - x[o + j] * c;
}

KV_KERNEL void kv_split(float *q, float *k, float *v, const float *qkv, int nq, int nk, int nv) {
  const u64 r = bx();
  const float *x = qkv + r * (nq + nk + nv);
  COLUMNS(j, nq) q[r * nq + j] = x[j];
  COLUMNS(j, nk) k[r * nk + j] = x[nq + j];
  COLUMNS(j, nv) v[r * nv + j] = x[nq + nk + j];
}
KV_KERNEL void kv_join(float *qkv, const float *q, const float *k, const float *v, int nq, int nk, int nv) {
  const u64 r = bx();
  float *x = qkv + r * (nq + nk + nv);
  COLUMNS(j, nq) x[j] = q[r * nq + j];
  COLUMNS(j, nk) x[nq + j] = k[r * nk + j];
  COLUMNS(j, nv) x[nq + nk + j] = v[r * nv + j];
}

// Rotates pairs (j, j + half) of every head of a row; cos and sin are rows of half values, of this launch's first position.
KV_KERNEL void kv_rope(float *x, const float *cos, const float *sin, int heads, int half, float sign) {
  const u64 r = bx();
  COLUMNS(i, heads * half) {
    int h = i / half, j = i - h * half;
    float *p = x + (r * heads + h) * 2 * half + j;
    float c = cos[r * half + j], s = sign * sin[r * half + j], u = p[0], v = p[half];
    p[0] = u * c - v * s;
    p[half] = v * c + u * s;
  }
}

// out = g * full + (1 - g) * stream; a row is K blocks of width values, each with its own gate.
KV_KERNEL void kv_merge(float *out, const float *full, const float *stream, const float *gates, int n, int width) {
  const u64 o = (u64)bx() * n;
  COLUMNS(j, n) {
    float g = gates[j / width];
    out[o + j] = g * full[o + j] + (1.f - g) * stream[o + j];
  }
}
// dstream = (1 - g) * dout; partial[row, gate] = sum of dout * (full - stream). blockIdx.y is the gate.
KV_KERNEL void kv_merge_back(float *dstream, const float *dout, const float *full, const float *stream, const float *gates,
                             float *partial, int n, int width) {
  KV_SHARED(float, red, 32);
  const u64 o = (u64)bx() * n + by() * width;
  const float c = 1.f - gates[by()];
  float s = 0.f;
  COLUMNS(j, width) {
    float g = dout[o + j];
    s += g * (full[o + j] - stream[o + j]);
    dstream[o + j] = c * g;
  }
  s = block_sum(s, red);
  if (tid() == 0) partial[(u64)bx() * (n / width) + by()] = s;
}

KV_DEV float sigmoid(float x) { return 1.f / (1.f + ex2(-x * LOG2E)); }
KV_KERNEL void kv_swiglu(float *y, const float *gu, int n) {
  const u64 r = bx();
  const float *gate = gu + r * 2 * n, *up = gate + n;
  COLUMNS(j, n) y[r * n + j] = gate[j] * sigmoid(gate[j]) * up[j];
}
KV_KERNEL void kv_swiglu_back(float *dgu, const float *dy, const float *gu, int n) {
  const u64 r = bx();
  const float *gate = gu + r * 2 * n, *up = gate + n;
  float *dgate = dgu + r * 2 * n, *dup = dgate + n;
  COLUMNS(j, n) {
    float g = gate[j], s = sigmoid(g), d = dy[r * n + j];
    dgate[j] = d * up[j] * s * (1.f + g * (1.f - s));
    dup[j] = d * g * s;
  }
}

// partial[x] = sum of (a - b)^2 of row rows[x], da[row] = scale[x] * (a - b). One block per listed row.
KV_KERNEL void kv_squared_error(float *da, float *partial, const float *a, const float *b, const int *rows, const float *scale, int n) {
  KV_SHARED(float, red, 32);
  const u64 o = (u64)rows[bx()] * n;
  const float c = scale[bx()];
  float s = 0.f;
  COLUMNS(j, n) {
    float e = a[o + j] - b[o + j];
    s += e * e;
    da[o + j] = c * e;
  }
  s = block_sum(s, red);
  if (tid() == 0) partial[bx()] = s;
}

// first = the smallest row with a NaN or an infinity, if any is smaller than what stands there.
KV_KERNEL void kv_finite(int *first, const float *x, int n) {
  const u64 o = (u64)bx() * n;
  bool bad = false;
  COLUMNS(j, n) bad |= (bits(x[o + j]) & 0x7f800000u) == 0x7f800000u;
  if (bad) atomic_min(first, (int)bx());
}

// norms[row, head] = Euclidean norm of a head's values. One warp per head (blockIdx.y).
KV_KERNEL void kv_norms(float *norms, const float *x, int heads, int d) {
  const u64 o = ((u64)bx() * heads + by()) * d;
  float s = 0.f;
  COLUMNS(j, d) s += x[o + j] * x[o + j];
  s = warp_sum(s);
  if (tid() == 0) norms[(u64)bx() * heads + by()] = root(s);
}
