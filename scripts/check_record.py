#!/usr/bin/env python3
"""Reads an attention record with DuckDB and pyarrow and recomputes what follows from other columns.

Two readers that share no code with the one that kvprofile uses must agree on every value, and the record with itself:
masses of token classes, needles and sinks from the columns, the sum of every head's attention, maps against columns.

Usage: check_record.py FOLDER        (needs duckdb, numpy and pyarrow)
"""
import json
import math
import sys
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq

dir = Path(sys.argv[1])
problems, checks = [], 0


def check(ok, what):
    global checks
    checks += 1
    if not ok:
        problems.append(what)


def near(a, b, what, tol=2e-5):
    check(abs(a - b) <= tol * max(1, abs(b)), f"{what}: {a} and {b}")


def parts(table):
    return sorted((dir / table).glob("*.parquet"))


meta = None
for table in ("samples", "heads", "columns", "maps"):
    for path in parts(table):
        kv = pq.read_metadata(path).metadata
        check(kv[b"kvprofile.table"].decode() == table, f"{path}: table {kv[b'kvprofile.table']}")
        m = json.loads(kv[b"kvprofile.record"])
        meta = meta or m
        check(m == meta, f"{path}: metadata of another record")
        names = [c["name"] for c in json.loads(kv[b"kvprofile.columns"])]
        check(sorted(names) == sorted(pq.read_schema(path).names), f"{path}: described columns {names}")
grid, model = meta["grid"], meta["model"]
name = lambda x: repr(x).replace(".", "_")

# The same rows from both readers.
for table in ("samples", "heads", "columns"):
    for path in parts(table):
        arrow = pq.read_table(path)
        duck = duckdb.sql(f"select * from read_parquet('{path}')")
        check(duck.columns == arrow.schema.names, f"{path}: columns {duck.columns}")
        values = duck.fetchnumpy()
        for c in arrow.schema.names:
            a, d = arrow[c], values[c]
            if str(a.type).startswith("list"):
                flat = a.combine_chunks().flatten().to_numpy(zero_copy_only=False)
                rows = [np.asarray(x) for x in d]
                lengths = [len(x) for x in a]
                check([len(x) for x in rows] == lengths, f"{path}: {c}: lengths differ")
                both = np.concatenate(rows) if rows else flat
                check(np.array_equal(flat, both), f"{path}: {c}: DuckDB and pyarrow differ")
            else:
                check([x.as_py() for x in a] == [None if np.ma.is_masked(x) else x for x in d.tolist()]
                      or np.ma.isMaskedArray(d) and d.mask.all() and a.null_count == len(a), f"{path}: {c}: DuckDB and pyarrow differ")

samples = duckdb.sql(f"select * from read_parquet('{dir}/samples/*.parquet') order by sample").to_arrow_table().to_pylist()
check([s["sample"] for s in samples] == list(range(meta["dataset"]["samples"])), "samples are not all there")
heads_per_layer, layers = model["heads"], model["layers"]

for s in samples:
    n, tokens = s["prompt"], len(s["tokens"])
    classes = np.array(s["classes"])
    needle = np.zeros(tokens, bool)
    spans = list(zip(s["span_kind"], s["span_start"], s["span_end"], s["span_index"]))
    for kind, lo, hi, _ in spans:
        if kind == "needle":
            needle[lo:hi] = True
    answers = [p - 1 for kind, lo, hi, _ in spans if kind == "answer" for p in range(lo, hi)]
    check(answers == s["answers"], f"sample {s['sample']}: answer rows")
    check(n == min([lo for kind, lo, _, _ in spans if kind == "answer"], default=tokens), f"sample {s['sample']}: prompt")
    where = f"where sample = {s['sample']} order by layer, head"
    heads = duckdb.sql(f"select * from read_parquet('{dir}/heads/*.parquet') {where}").to_arrow_table().to_pylist()
    columns = duckdb.sql(f"select * from read_parquet('{dir}/columns/*.parquet') {where}").to_arrow_table()
    check(len(heads) == layers * heads_per_layer == columns.num_rows, f"sample {s['sample']}: {len(heads)} heads, {columns.num_rows} columns")
    lists = {c: columns[c].combine_chunks() for c in columns.schema.names if str(columns[c].type).startswith("list")}
    for i, h in enumerate(heads):
        at = f"sample {s['sample']} head {h['layer']}:{h['head']} "
        check((h["layer"], h["head"]) == divmod(i, heads_per_layer), at + "order")
        check(h["kv_head"] == h["head"] // (heads_per_layer // model["kv_heads"]), at + "KV head")
        c = {k: v[i].values.to_numpy(zero_copy_only=False).astype(np.float64) for k, v in lists.items()}
        check(all(len(v) == n for k, v in c.items() if k != "answer" and not k.startswith("first_far_")), at + "lengths")
        check(all(len(v) == n // 2 for k, v in c.items() if k.startswith("first_far_")), at + "lengths of halves")
        check(len(c["answer"]) == (tokens if answers else 0), at + "length of answer")
        check(all((v >= 0).all() and np.isfinite(v).all() for v in c.values()), at + "signs")
        near(c["total"].sum() / n, 1, at + "sum of attention")
        near(c["half"].sum() / (n - n // 2), 1, at + "sum of the second half")
        near(h["special"], c["total"][classes[:n] == 1].sum() / n, at + "special")
        near(h["punctuation"], c["total"][classes[:n] == 2].sum() / n, at + "punctuation")
        near(h["needle"], c["total"][needle[:n]].sum() / n, at + "needle")
        for x in grid["sinks"]:
            near(h[f"sink_{x}"], c["total"][:x].sum() / n, at + f"sink_{x}")
        for x in grid["windows"]:
            w = c[f"window_{x}"]
            near(w.sum() / min(x, n), 1, at + f"sum of window_{x}")
            if x <= n - n // 2:
                check((w <= c["half"] + 1e-4).all(), at + f"window_{x} within half")
        last = np.full(n, -1.0)
        for r in reversed(grid["local_ratios"]):  # far falls with the distance
            f = c[f"far_{name(r)}"]
            d = math.ceil(round(r * n, 9))
            check((f <= c["total"] + 1e-4).all() and (f[max(n - d, 0):] == 0).all() and (f >= last - 1e-4).all(), at + f"far_{r}")
            last = f
        for x in grid["recent"]:
            f = np.array(h[f"sink_far_{x}"], dtype=np.float64)
            k = min(max(grid["sinks"]), n)
            check(len(f) == k and (f <= c["total"][:k] + 1e-4).all(), at + f"sink_far_{x}")
            check(-1e-9 <= h[f"recent_{x}"] <= 1 + 1e-9 and h[f"recent_{x}"] + f.sum() / n <= 1 + 1e-4, at + f"recent_{x}")
        keys = [h[f"keys_{name(m)}"] for m in grid["masses"]]
        check(keys == sorted(keys) and 1 <= keys[0] and keys[-1] <= n, at + f"keys {keys}")
        check(0 <= h["entropy"] <= math.log(max(n, 2)) + 1e-6 and h["variance"] >= 0, at + "entropy or variance")
        check(0 < h["value_norm"] <= h["value_norm_max"] * (1 + 1e-9), at + "value norms")
        if answers:
            near(c["answer"].sum() / len(answers), 1, at + "sum of answer rows")
            near(h["answer_needle"], c["answer"][needle].sum() / len(answers), at + "answer_needle")
            check(0 <= h["copy"] <= 1 and abs(h["copy"] * len(answers) - round(h["copy"] * len(answers))) < 1e-9, at + "copy")
        else:
            check(h["answer_needle"] is None and h["copy"] is None, at + "scores without answers")

# Maps: every row of tiles has a mass of 1, every column of tiles the mass of its tokens.
maps = 0
for path in parts("maps"):
    t = pq.read_table(path)
    pooled = t["pooled"].combine_chunks()
    check(str(t["pooled"].type.value_type) == "halffloat", f"{path}: pooled is {t['pooled'].type}")
    exact, totals = {}, {}
    for i, (sample, layer, head, query, size, tile) in enumerate(zip(*(t[c].to_pylist() for c in ("sample", "layer", "head", "query", "size", "tile")))):
        if not totals:
            for l, h, v in duckdb.sql(f"select layer, head, total from read_parquet('{dir}/columns/*.parquet') where sample={sample}").fetchall():
                totals[l, h] = np.array(v)
        if query >= 0:
            row = t["exact"][i].values.to_numpy()
            check(len(row) == query + 1, f"{path}: exact row {query} has {len(row)} values")
            near(row.sum(dtype=np.float64), 1, f"{path}: exact row {query}")
            exact.setdefault((layer, head), []).append(row.astype(np.float64))
            continue
        maps += 1
        m = pooled[i].values.to_numpy().astype(np.float64).reshape(size, size)
        n = samples[sample]["prompt"]
        check(np.abs(m.sum(1) - 1).max() < 5e-3, f"{path}: rows of map {layer}:{head}")
        rows = np.minimum(tile, n - tile * np.arange(size))
        total = totals[layer, head]
        want = np.array([np.sum(total[j * tile : (j + 1) * tile]) for j in range(size)])
        check(np.abs((m * rows[:, None]).sum(0) - want).max() < 2e-3 * n, f"{path}: columns of map {layer}:{head}")
    for (layer, head), rows in exact.items():
        got = np.zeros(len(rows))
        for r in rows:
            got[: len(r)] += r
        check(np.allclose(got, totals[layer, head], rtol=1e-4, atol=1e-5), f"{path}: exact map {layer}:{head} and its columns")

size = sum(p.stat().st_size for t in ("samples", "heads", "columns", "maps") for p in parts(t))
print(f"{len(samples)} samples, {layers} layers of {heads_per_layer} query heads, {maps} pooled maps, {size / 1e6:.1f} MB: {checks} checks, {len(problems)} problems")
for p in problems[:20]:
    print(" ", p)
sys.exit(bool(problems))
