#!/usr/bin/env python3
"""Checks cache plans with nothing of this project's Go code: their form against the JSON Schema, and the hash that
their evidence names against their content.

    validate_plan.py PLAN.json ...          one line per violation, exit status 3 when there is one
    validate_plan.py --selftest DIR         the files of DIR/valid and DIR/invalid (plan/testdata) against what is
                                            recorded beside them: digests in valid/SHA256, pointers in invalid/*.want
    validate_plan.py --digest PLAN.json ... the plans' digests

Needs the package jsonschema (4.x)."""
import argparse
import hashlib
import json
import pathlib
import re
import sys

from jsonschema import Draft202012Validator

SCHEMA = pathlib.Path(__file__).resolve().parent.parent / "schema" / "cache-plan-v1.schema.json"


class Float(float):
    """A number with a fraction or an exponent, and its text: Python writes some of them otherwise than JSON's users do."""

    def __new__(cls, text):
        self = super().__new__(cls, text)
        self.text = text
        return self


def unique(pairs):
    keys = [k for k, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("an object has the same key twice")
    return dict(pairs)


def read(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(text, object_pairs_hook=unique, parse_float=Float)


def canonical(v):
    """The canonical form of RFC 8785 of a document whose numbers are written as it says already."""
    if isinstance(v, dict):
        return "{" + ",".join(json.dumps(k, ensure_ascii=False) + ":" + canonical(v[k]) for k in sorted(v)) + "}"
    if isinstance(v, list):
        return "[" + ",".join(map(canonical, v)) + "]"
    if isinstance(v, Float):
        return v.text
    return json.dumps(v, ensure_ascii=False)


def digest(doc):
    rest = {k: v for k, v in doc.items() if k not in ("evidence", "warnings")}
    return hashlib.sha256(canonical(rest).encode()).hexdigest()


def escape(token):
    return str(token).replace("~", "~0").replace("/", "~1")


def pointer(path):
    return "".join("/" + escape(t) for t in path)


def leaves(error):
    """Errors without a further cause, as (pointer, reason); a surplus member is named by the pointer."""
    if error.context:
        for cause in error.context:
            yield from leaves(cause)
        return
    at = pointer(error.absolute_path)
    if error.validator == "additionalProperties" and error.validator_value is False:
        patterns = error.schema.get("patternProperties", {})
        for name in sorted(set(error.instance) - set(error.schema.get("properties", {}))):
            if not any(re.search(p, name) for p in patterns):
                yield at + "/" + escape(name), "name is not allowed here"
    else:
        yield at, error.message


def violations(validator, doc):
    return sorted({leaf for error in validator.iter_errors(doc) for leaf in leaves(error)})


def check(validator, path):
    try:
        doc = read(path)
    except (ValueError, RecursionError) as error:
        return [("", str(error))]
    found = violations(validator, doc)
    named = doc.get("evidence", {}).get("plan_sha256") if not found else None
    if named not in (None, digest(doc)):
        found.append(("/evidence/plan_sha256", f"is {named}, the plan is {digest(doc)}"))
    return found


def selftest(validator, folder):
    wrong = 0

    def report(path, text):
        nonlocal wrong
        wrong += 1
        print(f"{path}: {text}")

    valid, invalid = sorted(folder.glob("valid/*.json")), sorted(folder.glob("invalid/*.json"))
    recorded = dict(reversed(line.split()) for line in (folder / "valid/SHA256").read_text().splitlines())
    for path in valid:
        for at, reason in check(validator, path):
            report(path, f"{at or '/'}: {reason}")
        if recorded.get(path.name) != digest(read(path)):
            report(path, f"digest is {digest(read(path))}, recorded is {recorded.get(path.name)}")
    compared = 0
    for path in invalid:
        lines = [line.split(" ", 1) for line in path.with_suffix(".want").read_text().splitlines()]
        want = sorted({rest.split(": ")[0].removesuffix("/") for source, rest in lines if source == "schema"})
        if any(source == "error" for source, _ in lines):
            continue  # not a document of this version: there is nothing to compare
        got = sorted({at for at, _ in violations(validator, read(path))})
        compared += 1
        if got != want:
            report(path, f"schema violations at {got}, recorded are {want}")
    print(f"{len(valid)} valid and {compared} of {len(invalid)} invalid plans compared, {wrong} differences")
    return 3 if wrong or not valid or not compared else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    parser.add_argument("--selftest", action="store_true")
    parser.add_argument("--digest", action="store_true")
    args = parser.parse_args()
    schema = json.loads(SCHEMA.read_text())
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    if args.selftest:
        return max(selftest(validator, path) for path in args.paths)
    status = 0
    for path in args.paths:
        if args.digest:
            print(digest(read(path)), "", path)
            continue
        for at, reason in check(validator, path):
            status = 3
            print(f"{path}: {at or '/'}: {reason}")
    return status


if __name__ == "__main__":
    sys.exit(main())
