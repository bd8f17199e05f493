#!/usr/bin/env python3
"""Makes pyramid/testdata/arithmetic.json: PyramidKV's schedule in exact fractions, rounded by largest remainders.

Written from the formula (Cai et al. 2024, section 3.2, and its reference implementation's bounds), not from the Go code:
floats play no part here. Usage: python3 scripts/fixtures_pyramid.py > pyramid/testdata/arithmetic.json
"""
import json
from fractions import Fraction as F


def schedule(layers, length, total, window, beta):
    b = min(max(F(total, layers) - window, 0), length - window)
    if layers == 1:
        return [b + window]
    low = b / beta
    high = 2 * b - low
    if high >= length - window:
        high = F(length - window)
        low = 2 * b - high
    return [high - l * (high - low) / (layers - 1) + window for l in range(layers)]


def rounded(shares):
    floors = [int(s) for s in shares]
    left = sum(shares) - sum(floors)
    assert left.denominator == 1
    order = sorted(range(len(shares)), key=lambda l: (floors[l] - shares[l], l))
    for l in order[: int(left)]:
        floors[l] += 1
    return floors


cases = []
for layers, length, average, window, beta in [
    (32, 4096, 128, 8, 20), (80, 4096, 128, 8, 20), (32, 8192, 2048, 8, 20), (30, 2048, 512, 8, 20), (30, 2048, 1500, 8, 20),
    (28, 32768, 1024, 32, 14), (2, 100, 50, 8, 20), (3, 1000, 11, 8, 20), (1, 512, 100, 8, 20), (61, 131072, 777, 16, 10), (36, 600, 599, 8, 20),
]:
    for extra in (0, 1, layers // 2):
        total = layers * average + extra
        if total > layers * length:
            continue
        shares = schedule(layers, length, total, window, beta)
        assert sum(shares) == total
        cases.append({"layers": layers, "length": length, "total": total, "window": window, "beta": beta,
                      "budgets": rounded(shares)})
print(json.dumps(cases, separators=(",", ":")))
