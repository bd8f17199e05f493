#!/usr/bin/env python3
"""Makes internal/eval/testdata/stats.json: bounds, tests and predictions as SciPy computes them.

Needs numpy and scipy. Usage: python3 scripts/fixtures_stats.py > internal/eval/testdata/stats.json
"""
import json

import numpy as np
from scipy import special, stats

rng = np.random.default_rng(20250601)

lower = []
for m in (1, 2, 3, 5, 10, 20, 58, 59, 60, 148, 149, 400, 5000, 100000):
    for k in sorted({0, 1, 2, m // 10, m // 2, m - m // 20, m - 2, m - 1, m}):
        if 0 <= k <= m:
            bound = stats.binomtest(k, m).proportion_ci(confidence_level=0.90, method="exact").low
            lower.append({"k": k, "m": m, "lower95": float(bound)})

mcnemar = []
for a, b in [(0, 0), (1, 0), (0, 1), (5, 0), (0, 5), (3, 3), (8, 2), (2, 8), (12, 5), (40, 25), (25, 40), (300, 240), (1000, 1100), (60, 0)]:
    n = a + b
    if n == 0:
        mcnemar.append({"only_a": a, "only_b": b, "greater": 1.0, "two_sided": 1.0})
        continue
    mcnemar.append({"only_a": a, "only_b": b, "greater": float(stats.binomtest(a, n, 0.5, alternative="greater").pvalue),
                    "two_sided": float(stats.binomtest(a, n, 0.5).pvalue)})

flips = []
for n, shift, step in [(2, 0.5, 0), (4, 0.0, 0), (8, 0.6, 0), (10, -0.4, 0), (12, 0.3, 0.5), (14, 0.2, 0.25), (14, -1.0, 0), (60, 0.25, 0), (400, -0.08, 0)]:
    d = rng.normal(shift, 1, n)
    if step:  # many equal sizes: ties
        d = np.round(d / step) * step
    d = [float(x) for x in d]
    exact = n <= 14
    p = {}
    for side in ("greater", "less"):
        r = stats.permutation_test((np.array(d),), lambda x, axis: np.sum(x, axis=axis), permutation_type="samples", vectorized=True,
                                   alternative=side, n_resamples=np.inf if exact else 200000, rng=np.random.default_rng(7))
        p[side] = float(r.pvalue)
    flips.append({"differences": d, "exact": exact, **p})

logits = []
for n, scale, shift in [(2, 1, 0), (17, 3, 0), (50, 8, 40), (50, 0.01, -3), (50, 60, 500), (200, 5, 1000)]:
    p = np.round(rng.normal(shift, scale, n), 3)
    q = np.round(p + rng.normal(0, 0.3 * scale, n), 3)
    gold = int(rng.integers(n))
    logits.append({"full": p.tolist(), "planned": q.tolist(), "gold": gold, "logprob": float(special.log_softmax(p)[gold]),
                   "rank": int(stats.rankdata(-p, method="min")[gold]),
                   "kl": float(np.sum(special.rel_entr(special.softmax(p), special.softmax(q))))})

print(json.dumps({"lower": lower, "mcnemar": mcnemar, "sign_flip": flips, "logits": logits}, indent=1))
