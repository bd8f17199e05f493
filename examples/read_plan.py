#!/usr/bin/env python3
"""Reads a cache plan and says what each KV head keeps of a prompt: read_plan.py PLAN [TOKENS]. Standard library only."""
import json, math, sys


def load(path, model_sha256=None):
    plan = json.load(open(path, encoding="utf-8"))
    if (plan["format"], plan["version"]) != ("kvprofile.cache-plan", 1):
        raise ValueError("not a cache plan of version 1")
    if unknown := {q["kind"] for q in plan["policies"].values()} - {"full", "streaming", "topk", "fastgen", "h2o"}:
        raise ValueError(f"unknown kinds of policies: {unknown}")
    if model_sha256 and plan["model"]["sha256"] != model_sha256:
        raise ValueError("the plan belongs to another model")
    return plan


def kept(q, n, window):
    """Tokens of a prompt of n that a head holds, at most; window is the layer's own sliding window, 0 for none."""
    least = q.get("sink_tokens", 0) + q.get("observation_window", 0) + 1
    tokens = {"full": n, "topk": q.get("budget_tokens") or max(math.ceil(q.get("budget_ratio", 0) * n), least),
              "fastgen": min(q.get("max_tokens", n), math.ceil(q.get("max_ratio", 1) * n))}.get(
        q["kind"], q.get("sink_tokens", 0) + q.get("heavy_tokens", 0) + q.get("recent_tokens", 0))
    return min(n, tokens, window or n)


if __name__ == "__main__":
    plan, n = load(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    windows = plan["model"].get("sliding_window") or [0] * len(plan["layers"])
    for layer, row in enumerate(plan["layers"]):
        print(layer, *(f"{name}:{kept(plan['policies'][name], n, windows[layer])}" for name in row))
