"""Check a dataset with two Parquet readers that kvprofile has no part in.

    python scripts/check_dataset.py needles.parquet

Reads the file with pyarrow and with DuckDB, compares what they read, checks the
schema, the spans and the lengths, and computes the content hash anew from the
description in docs/datasets.md. Needs pyarrow and duckdb. Exits 1 on any fault.
"""

import hashlib
import struct
import sys

import duckdb
import pyarrow.parquet as pq

COLUMNS = {
    "id": "int64",
    "task": "string",
    "tokens": "list<element: int32 not null> not null",
    "spans": "list<element: struct<kind: string not null, index: int64 not null, "
    "start: int64 not null, end: int64 not null> not null>",
    "target_tokens": "int64",
    "depths": "list<element: double not null>",
    "asked_depths": "list<element: double not null>",
    "seed": "uint64",
    "haystack": "string",
    "expected": "list<element: string not null>",
}


def content_hash(rows):
    h = hashlib.sha256()

    def num(v):
        h.update(struct.pack("<q", v))

    def text(s):
        b = s.encode()
        num(len(b))
        h.update(b)

    def floats(v):
        num(len(v))
        h.update(struct.pack(f"<{len(v)}d", *v))

    num(len(rows))
    for r in rows:
        num(r["id"])
        text(r["task"])
        num(len(r["tokens"]))
        h.update(struct.pack(f"<{len(r['tokens'])}i", *r["tokens"]))
        num(len(r["spans"]))
        for s in r["spans"]:
            text(s["kind"])
            num(s["index"])
            num(s["start"])
            num(s["end"])
        num(r["target_tokens"])
        floats(r["depths"])
        floats(r["asked_depths"])
        h.update(struct.pack("<Q", r["seed"]))
        text(r["haystack"])
        num(len(r["expected"]))
        for e in r["expected"]:
            text(e)
    return h.hexdigest()


def main(path):
    table = pq.read_table(path)
    meta = {k.decode(): v.decode() for k, v in pq.read_metadata(path).metadata.items() if k.startswith(b"kvprofile.")}
    faults = []

    def check(ok, what):
        if not ok:
            faults.append(what)

    check(meta.get("kvprofile.format") == "kvprofile.dataset", f"format is {meta.get('kvprofile.format')}")
    check(table.schema.names == list(COLUMNS), f"columns are {table.schema.names}")
    for name, kind in COLUMNS.items():
        got = str(table.schema.field(name).type)
        check(got.replace(" not null", "") == kind.replace(" not null", ""), f"{name} is {got}, expected {kind}")

    rows = table.to_pylist()
    for i, r in enumerate(rows):
        check(r["id"] == i, f"row {i} has id {r['id']}")
        check(len(r["tokens"]) == r["target_tokens"], f"row {i}: {len(r['tokens'])} tokens, target {r['target_tokens']}")
        at = 0
        for s in r["spans"]:
            check(s["start"] == at and s["end"] > at, f"row {i}: span {s} does not follow {at}")
            at = s["end"]
        check(at == len(r["tokens"]), f"row {i}: spans end at {at}")
        kinds = [s["kind"] for s in r["spans"]]
        check(kinds.count("needle") == len(r["expected"]), f"row {i}: {kinds.count('needle')} needle spans")
        # Every needle has a question of its own, or one question asks for all.
        for kind in ("question", "answer"):
            check(kinds.count(kind) in (len(r["expected"]), min(1, len(r["expected"]))), f"row {i}: {kinds.count(kind)} {kind} spans")

    got = content_hash(rows)
    check(got == meta["kvprofile.content_hash"], f"content hash {got}, file says {meta['kvprofile.content_hash']}")

    cur = duckdb.execute("select * from read_parquet(?) order by id", [path])
    names = [d[0] for d in cur.description]
    duck = [dict(zip(names, r)) for r in cur.fetchall()]
    check(duck == rows, "DuckDB reads other values than pyarrow")
    total = duckdb.execute("select count(*), sum(len(tokens)) from read_parquet(?)", [path]).fetchone()
    spans = duckdb.execute(
        'select sum(s."end" - s.start) from (select unnest(spans) as s from read_parquet(?))', [path]
    ).fetchone()
    check(total[0] == len(rows), f"DuckDB counts {total[0]} rows")
    check(total[1] == spans[0], f"DuckDB counts {total[1]} tokens, {spans[0]} in spans")

    print(f"{path}: {len(rows)} samples, {total[1]} tokens, {meta['kvprofile.task']} for {meta['kvprofile.purpose']}, hash {got[:16]}")
    for f in faults:
        print("fault:", f)
    return 1 if faults else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(max(main(p) for p in sys.argv[1:]))
