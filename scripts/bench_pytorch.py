"""Times PyTorch on the work that internal/engine/cpu's benchmarks do, on this machine and in float32.

    python scripts/bench_pytorch.py [--threads 2] [--only prefill]

A decoder of SmolLM2-135M's shape with random weights runs forward over a prompt, and one step of DuoAttention's
distillation (gated student forward, backward to the gates; the teacher's results are given). "eager" writes attention as
matmul, softmax, matmul; "sdpa" calls scaled_dot_product_attention. "eager+stats" also takes column sums, the entropy and
the last 32 rows' variance from the maps, which sdpa cannot. Figures are the best of several runs, in seconds.
Compare with: go test -run xxx -bench Model ./internal/engine/cpu
"""

import argparse
import math
import os
import time

for name in [n for n in os.environ if n.startswith(("OPENBLAS_", "OMP_", "MKL_"))]:
    del os.environ[name]  # limits and core types set for other programs

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

LAYERS, D, HEADS, KV, HD, FF, VOCAB = 30, 576, 9, 3, 64, 1536, 49152


def best(f, runs):
    f()
    times = []
    for _ in range(runs):
        t = time.perf_counter()
        f()
        times.append(time.perf_counter() - t)
    return min(times)


def weights():
    torch.manual_seed(1)

    def w(n, k):
        return torch.randn(n, k) / math.sqrt(k)

    return [
        {"qkv": w((HEADS + 2 * KV) * HD, D), "o": w(D, HEADS * HD), "gu": w(2 * FF, D), "down": w(D, FF)}
        for _ in range(LAYERS)
    ]


def norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def rope_tables(n):
    freq = 100000.0 ** (-torch.arange(0, HD, 2).float() / HD)
    angle = torch.arange(n).float()[:, None] * freq
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rope(x, table):
    cos, sin = table
    half = torch.cat([-x[..., HD // 2 :], x[..., : HD // 2]], -1)
    return x * cos + half * sin


def attention(q, k, v, mask, kind, stats):
    """q [H,S,d], k and v [K,S,d]; mask None is causal, else True where a query sees a key."""
    if kind == "sdpa":
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, enable_gqa=True)[0]
    group = HEADS // KV
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(HD)
    if mask is None:
        n = q.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril()
    p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    if stats is not None:
        stats.append((p.sum(1), -(p * (p + 1e-30).log()).sum(-1).mean(-1), p[:, -32:].var(1, correction=0).sum(-1)))
    return p @ v


def project(x, w, table):
    n = x.shape[0]
    q, k, v = (norm(x) @ w["qkv"].T).split([HEADS * HD, KV * HD, KV * HD], -1)
    q, k, v = (t.view(n, -1, HD).transpose(0, 1) for t in (q, k, v))
    return rope(q, table), rope(k, table), v


def mlp(x, w):
    gate, up = (norm(x) @ w["gu"].T).chunk(2, -1)
    return x + (F.silu(gate) * up) @ w["down"].T


def forward(x, layers, kind, stats=None):
    table = rope_tables(x.shape[0])
    with torch.no_grad():
        for w in layers:
            a = attention(*project(x, w, table), None, kind, stats)
            x = mlp(x + a.transpose(0, 1).reshape(x.shape[0], -1) @ w["o"].T, w)
    return x


def distill(x, layers, kind, teacher, gates):
    n = x.shape[0]
    table = rope_tables(n)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    mask = (j <= i) & ((j < 128) | (i - j < 256))
    for w, full, g in zip(layers, teacher, gates):
        a = attention(*project(x, w, table), mask, kind, None)
        g = g.repeat_interleave(HEADS // KV)[:, None, None]
        a = g * full + (1 - g) * a
        x = mlp(x + a.transpose(0, 1).reshape(n, -1) @ w["o"].T, w)
    loss = norm(x)[-16:].pow(2).mean()
    return torch.autograd.grad(loss, gates)


def cases():
    """Yields (name, function, floating-point operations or 0)."""
    for m, n, k in [(2048, 576, 576), (2048, 3072, 576), (2048, 576, 1536), (512, 4096, 4096)]:
        a, b = torch.randn(m, k), torch.randn(n, k)
        yield f"linear {m}x{n}x{k}", lambda a=a, b=b: F.linear(a, b), 2 * m * n * k
    layers = weights()
    for n in (1024, 2048):
        x = torch.randn(n, D)
        for kind in ("eager", "sdpa"):
            yield f"prefill {n} {kind}", lambda x=x, kind=kind: forward(x, layers, kind), 0
        yield f"prefill {n} eager+stats", lambda x=x: forward(x, layers, "eager", []), 0
    x, teacher = torch.randn(1024, D), [torch.randn(HEADS, 1024, HD) for _ in layers]
    gates = [torch.rand(KV, requires_grad=True) for _ in layers]
    for kind in ("eager", "sdpa"):
        yield f"distillation 1024 {kind}", lambda kind=kind: distill(x, layers, kind, teacher, gates), 0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--only", default="", help="run the cases whose name holds this")
    p.add_argument("--runs", type=int, default=5)
    o = p.parse_args()
    torch.set_num_threads(o.threads)
    print(f"torch {torch.__version__}, {o.threads} threads, float32")
    for name, f, flop in cases():
        if o.only in name:
            t = best(f, o.runs)
            print(f"{name}: {flop / t * 1e-9:.0f} GFLOP/s" if flop else f"{name}: {t:.2f} s", flush=True)


if __name__ == "__main__":
    main()
