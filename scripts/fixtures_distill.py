#!/usr/bin/env python3
"""Makes distill/testdata: what a plain PyTorch float64 program computes for DuoAttention's training.

Written from the paper (Xiao et al. 2024, section 2.2) with autograd only; it shares nothing with the Go code. Run from
the root of the repository with torch installed:

    python scripts/fixtures_distill.py

For each small random model: tokens, labelled rows, loss and gradient of all gates at random gates in (.1,.9) without
regularisation; then the gates after 50 steps of the whole recipe (torch.optim.Adam, schedule, regularisation, clamp);
and the data-light score.
"""
import json
import math
import pathlib

import numpy as np
import torch

OUT = pathlib.Path("distill/testdata")
torch.set_default_dtype(torch.float64)


class Toy:
    """A decoder-only transformer with random weights. Weights are float32 numbers, all sums are float64."""

    def __init__(self, name, seed, layers, heads, kv_heads, dim, hidden, mlp, vocab, theta, eps, bias, norm):
        self.name, self.L, self.H, self.K, self.d, self.D, self.F, self.V = name, layers, heads, kv_heads, dim, hidden, mlp, vocab
        self.theta, self.eps, self.bias, self.norm = theta, eps, bias, norm
        self.w = {}
        g = np.random.default_rng(seed)

        def add(key, shape, scale, around=0.0):
            self.w[key] = (around + scale * g.standard_normal(shape)).astype(np.float32)

        add("model.embed_tokens.weight", (vocab, hidden), 1.0)
        for l in range(layers):
            p = f"model.layers.{l}."
            add(p + "input_layernorm.weight", (hidden,), 0.2, 1.0)
            for n, rows in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
                add(p + f"self_attn.{n}_proj.weight", (rows, hidden), 1.2 / math.sqrt(hidden))
                if bias:
                    add(p + f"self_attn.{n}_proj.bias", (rows,), 0.3)
            if norm:
                add(p + "self_attn.q_norm.weight", (dim,), 0.2, 1.0)
                add(p + "self_attn.k_norm.weight", (dim,), 0.2, 1.0)
            # Heads matter unequally, so that the regularisation wins over some and loses to others.
            weight = np.repeat(10 ** g.uniform(-1.6, -0.3, kv_heads), heads // kv_heads * dim)
            add(p + "self_attn.o_proj.weight", (hidden, heads * dim), weight / math.sqrt(heads * dim))
            add(p + "post_attention_layernorm.weight", (hidden,), 0.2, 1.0)
            add(p + "mlp.gate_proj.weight", (mlp, hidden), 1.0 / math.sqrt(hidden))
            add(p + "mlp.up_proj.weight", (mlp, hidden), 1.0 / math.sqrt(hidden))
            add(p + "mlp.down_proj.weight", (hidden, mlp), 1.0 / math.sqrt(mlp))
        add("model.norm.weight", (hidden,), 0.2, 1.0)
        self.t = {k: torch.tensor(v.astype(np.float64)) for k, v in self.w.items()}

    def rms(self, x, w):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * w

    def rotate(self, x):  # [S,heads,d]
        S, half = x.shape[0], self.d // 2
        # Angles and their cosines are rounded to float32, as transformers computes them.
        freq = np.array([self.theta ** (-2.0 * j / self.d) for j in range(half)]).astype(np.float32)
        angle = np.arange(S, dtype=np.float32)[:, None] * freq[None, :]
        cos = torch.tensor(np.cos(angle.astype(np.float64)).astype(np.float32).astype(np.float64))
        sin = torch.tensor(np.sin(angle.astype(np.float64)).astype(np.float32).astype(np.float64))
        cos, sin = cos[:, None, :], sin[:, None, :]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def qkv(self, l, h):
        p = f"model.layers.{l}.self_attn."
        out = []
        for n, heads in (("q", self.H), ("k", self.K), ("v", self.K)):
            y = h @ self.t[p + f"{n}_proj.weight"].T
            if self.bias:
                y = y + self.t[p + f"{n}_proj.bias"]
            y = y.view(-1, heads, self.d)
            if self.norm and n != "v":
                y = self.rms(y, self.t[p + f"{n}_norm.weight"])
            out.append(y)
        return out

    def attend(self, q, k, v, visible):
        group = self.H // self.K
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        s = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(self.d)
        s = s.masked_fill(~visible, float("-inf"))
        return torch.einsum("hij,jhd->ihd", s.softmax(-1), v)

    def run(self, tokens, gates=None, teacher=None, sink=0, recent=0):
        """Without gates: the teacher; returns its attention outputs and final hidden states. With gates: the student."""
        S = len(tokens)
        i, j = torch.arange(S)[:, None], torch.arange(S)[None, :]
        visible = j <= i
        if gates is not None:
            visible = visible & ((j < sink) | (i - j < recent))
        x, attention = self.t["model.embed_tokens.weight"][torch.tensor(tokens)], []
        for l in range(self.L):
            p = f"model.layers.{l}."
            q, k, v = self.qkv(l, self.rms(x, self.t[p + "input_layernorm.weight"]))
            a = self.attend(self.rotate(q), self.rotate(k), v, visible)
            attention.append(a)
            if gates is not None:
                g = gates[l].repeat_interleave(self.H // self.K)[None, :, None]
                a = g * teacher[0][l] + (1 - g) * a
            x = x + a.reshape(S, -1) @ self.t[p + "self_attn.o_proj.weight"].T
            h = self.rms(x, self.t[p + "post_attention_layernorm.weight"])
            gate, up = h @ self.t[p + "mlp.gate_proj.weight"].T, h @ self.t[p + "mlp.up_proj.weight"].T
            x = x + (torch.nn.functional.silu(gate) * up) @ self.t[p + "mlp.down_proj.weight"].T
        return attention, self.rms(x, self.t["model.norm.weight"])

    def loss(self, tokens, first, gates, sink, recent):
        with torch.no_grad():
            teacher = self.run(tokens)
        _, hidden = self.run(tokens, gates, teacher, sink, recent)
        return (hidden - teacher[1])[first:].pow(2).mean()

    def data_light(self, texts, positions=500):
        """Mean query and key before RoPE, tiled; area under the last query's cumulative attention; mean over group, texts."""
        score = torch.zeros(self.L, self.K)
        for tokens in texts:
            x, found = self.t["model.embed_tokens.weight"][torch.tensor(tokens)], []
            S = len(tokens)
            visible = torch.arange(S)[None, :] <= torch.arange(S)[:, None]
            for l in range(self.L):
                p = f"model.layers.{l}."
                q, k, v = self.qkv(l, self.rms(x, self.t[p + "input_layernorm.weight"]))
                tq = self.rotate(q.mean(0, keepdim=True).repeat(positions, 1, 1))[-1]
                tk = self.rotate(k.mean(0, keepdim=True).repeat(positions, 1, 1)).repeat_interleave(self.H // self.K, dim=1)
                w = (torch.einsum("hd,jhd->hj", tq, tk) / math.sqrt(self.d)).softmax(-1)
                found.append(w.cumsum(-1).mean(-1).view(self.K, -1).mean(-1))
                a = self.attend(self.rotate(q), self.rotate(k), v, visible)
                x = x + a.reshape(S, -1) @ self.t[p + "self_attn.o_proj.weight"].T
                h = self.rms(x, self.t[p + "post_attention_layernorm.weight"])
                x = x + (torch.nn.functional.silu(h @ self.t[p + "mlp.gate_proj.weight"].T) * (h @ self.t[p + "mlp.up_proj.weight"].T)) @ self.t[p + "mlp.down_proj.weight"].T
            score += torch.stack(found) / len(texts)
        return score


def rate(s, n, peak):
    return peak * min(1, max((s + 1) / (n / 5), 0.1), max((n - s) / (n / 5), 0.1))


def make(toy, sink, recent, seed, peak):
    g = np.random.default_rng(seed)
    samples = []
    for length, tail in ((48, 12), (64, 20), (96, 31)):
        samples.append({"tokens": g.integers(0, toy.V, length).tolist(), "first_labelled": length - tail})
    gates = torch.tensor(g.uniform(0.1, 0.9, (toy.L, toy.K)), requires_grad=True)
    at_random = []
    for s in samples:
        loss = toy.loss(s["tokens"], s["first_labelled"], gates, sink, recent)
        (grad,) = torch.autograd.grad(loss, gates)
        at_random.append({"loss": loss.item(), "gradient": grad.tolist()})

    # The whole recipe, a sample at a time in this order, from gates of 1.
    steps, weight = 50, 0.05
    order = g.integers(0, len(samples), steps).tolist()
    p = torch.ones(toy.L, toy.K, requires_grad=True)
    adam = torch.optim.Adam([p], lr=peak, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step, i in enumerate(order):
        for group in adam.param_groups:
            group["lr"] = rate(step, steps, peak)
        loss = toy.loss(samples[i]["tokens"], samples[i]["first_labelled"], p, sink, recent)
        adam.zero_grad()
        # On [0,1] this is weight * mean |gate|, with the slope from the right at 0.
        (loss + weight * p.mean()).backward()
        adam.step()
        with torch.no_grad():
            p.clamp_(0, 1)
        losses.append(loss.item())
    print(toy.name, "after training:", np.round(p.detach().numpy(), 3).tolist())

    save(toy)
    (OUT / f"{toy.name}.json").write_text(json.dumps({
        "config": {"layers": toy.L, "heads": toy.H, "kv_heads": toy.K, "head_dim": toy.d, "hidden": toy.D, "intermediate": toy.F,
                   "vocab": toy.V, "theta": toy.theta, "eps": toy.eps, "bias": toy.bias, "norm": toy.norm},
        "sink": sink, "recent": recent, "samples": samples,
        "gates": gates.tolist(), "at_random": at_random,
        "training": {"steps": steps, "peak": peak, "regularisation": weight, "order": order, "losses": losses, "gates": p.tolist()},
        "data_light": toy.data_light([s["tokens"] for s in samples]).tolist(),
    }) + "\n")


def save(toy):
    """One flat file: the float32 numbers of all tensors one after another; the JSON beside it is enough to cut it."""
    with open(OUT / f"{toy.name}.f32", "wb") as f:
        for v in toy.w.values():
            f.write(v.astype("<f4").tobytes())
    (OUT / f"{toy.name}.tensors.json").write_text(json.dumps({k: list(v.shape) for k, v in toy.w.items()}) + "\n")


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    # At a peak of .02 every gate only falls; at .06 many are held, many reach 0.
    make(Toy("llama", 1, 3, 4, 2, 8, 24, 32, 40, 10000.0, 1e-5, False, False), 4, 8, 11, 0.02)
    make(Toy("qwen", 2, 4, 6, 3, 4, 20, 28, 40, 1000000.0, 1e-6, True, True), 2, 6, 12, 0.06)
