"""Writes internal/tokenizer/testdata: the ids that the official tokenizers library gives to tricky and random strings.

Run: python scripts/fixtures_tokenizer.py OUT NAME=tokenizer.json ... smollm2=model.gguf   (needs tokenizers, gguf)

For each name: OUT/NAME.cases.json.gz with the strings, their ids, and the texts decoded again; and, with --reduce,
OUT/NAME.json.gz, a tokenizer.json of the same kind with only the tokens and merges that the strings need, whose ids
the cases are then of. Real tokenizer.json files are too large to commit; run without --reduce to compare with those.
"""

import argparse
import gzip
import json
import pathlib
import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TRICKY = [
    "", " ", "  ", "\n", "\n\n\n", "\t x", "a", " a", "a ", "hello world", "Hello, World!", "  leading and trailing  ", "don't I'LL we've 'S",
    "1234567890 3.14 1,000,000", "x²+y³=½ ⅷ ٣٤٥", "naïve café résumé", "e\u0301 vs é, Å vs A\u030a", "日本語のテキスト。全角スペース　です", "Привет, мир!",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽", "עברית العربية हिन्दी ไทย", "\u200b\u200d\ufeff\u00a0|\u2028|", "\x00\x01\x1f\x7f", "\r\n\r\n  \r x",
    "def f(x):\n    return x**2  # comment\n\n\tif x:\n", "{\"key\": [1, 2.5e-10, null]}", "https://example.org/a?b=c&d=%20#e", "<s> </s> <unk> <|im_start|>user\nhi<|im_end|>\n",
    "<|begin_of_text|><|start_header_id|>x<|end_header_id|><|eot_id|>", "<|endoftext|> <think> </think> <0x0A> <start_of_turn>", "<|im_start|", "a<|im_end|>b <|im_end|> c",
    "ﬁ ﬂ Ⅷ ㎏ ①", "ÀÉÎÕÜ ß ſ", "....!!!???", "«quotes» “curly” ‘single’", "supercalifragilisticexpialidocious" * 3, " " * 40 + "x" + "\n" * 20, "▁ ▁▁a▁b", "Ġ Ċ ÄĨ",
]
ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz     ", "ABCxyz019 .,;:!?'\"-_()\n\t", "àéîõüßñçøæ ÀÉÎ", "日本語中文字한국어カタカナ 。、", "абвгд АБВ", "😀👍🏽🎉\u200d\ufe0f❤",
    "\u0301\u0308a e o \u00a0\u2003", "0123456789 .,", "<|>/_imstarend ", "".join(map(chr, range(32, 127))),
]


def strings(count, seed):
    rng = random.Random(seed)
    out = list(TRICKY)
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 4)):
            letters = rng.choice(ALPHABETS)
            parts.append("".join(rng.choice(letters) for _ in range(rng.randint(1, 24))))
        if rng.random() < 0.1:
            parts.append("".join(chr(c) for c in (rng.randint(0, 0x1FFFF) for _ in range(6)) if not 0xD800 <= c < 0xE000))
        out.append("".join(parts))
    return out


def from_gguf(path):
    """The tokenizer of a GGUF with pre = smollm, as SmolLM2's tokenizer.json has it."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    get = lambda name: fields[name].contents()
    tokens, types, merges = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type"), get("tokenizer.ggml.merges")
    assert get("tokenizer.ggml.pre") == "smollm"
    t = Tokenizer(models.BPE({s: i for i, s in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s, kind in zip(tokens, types) if kind == 3])
    return json.loads(t.to_str())


def reduce(spec, texts):
    """Keeps the tokens that the texts use, the symbols and merges that build them, and every added token."""
    full = Tokenizer.from_str(json.dumps(spec))
    by_id = {i: s for s, i in spec["model"]["vocab"].items()}
    pairs = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in spec["model"]["merges"]]
    maker = {}
    for rank, (a, b) in enumerate(pairs):
        maker.setdefault(a + b, []).append(rank)
    added = spec["added_tokens"]
    keep = {s for s in spec["model"]["vocab"] if len(s) == 1 and ord(s) < 512 or s.startswith("<0x") and len(s) == 6}
    queue = [by_id[i] for text in texts for i in full.encode(text, add_special_tokens=False).ids if i in by_id]
    while queue:
        s = queue.pop()
        if s in keep:
            continue
        keep.add(s)
        for rank in maker.get(s, []):
            queue.extend(pairs[rank])
    unk = spec["model"].get("unk_token")
    if unk:
        keep.add(unk)
    mine = {a["content"] for a in added if a["special"]} | {a["content"] for a in added if any(a["content"] in t for t in TRICKY)}
    spec["added_tokens"] = [a for a in added if a["content"] in mine]
    keep |= {a["content"] for a in spec["added_tokens"] if a["content"] in spec["model"]["vocab"]}
    spec["model"]["vocab"] = {s: i for s, i in spec["model"]["vocab"].items() if s in keep}
    ids = {s: n for n, s in enumerate(spec["model"]["vocab"])}
    for a in spec["added_tokens"]:
        ids.setdefault(a["content"], len(ids))
    spec["model"]["vocab"] = {s: ids[s] for s in spec["model"]["vocab"]}
    for a in spec["added_tokens"]:
        a["id"] = ids[a["content"]]
    spec["added_tokens"].sort(key=lambda a: a["id"])
    spec["model"]["merges"] = [[a, b] for a, b in pairs if a in keep and b in keep and a + b in keep]
    if spec.get("post_processor"):
        for p in [spec["post_processor"], *spec["post_processor"].get("processors", [])]:
            for name, token in p.get("special_tokens", {}).items():
                token["ids"] = [ids[t] for t in token["tokens"]]
    return spec


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--reduce", action="store_true")
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def write(name, value):
        raw = json.dumps(value, ensure_ascii=True).encode()
        (args.out / name).write_bytes(gzip.compress(raw, 9, mtime=0))

    for source in args.sources:
        name, path = source.split("=", 1)
        is_gguf = path.endswith(".gguf")
        spec = from_gguf(path) if is_gguf else json.loads(pathlib.Path(path).read_text())
        texts = strings(args.count, name)
        if args.reduce and not is_gguf:
            spec = reduce(spec, texts)
            write(f"{name}.json.gz", spec)
        t = Tokenizer.from_str(json.dumps(spec))
        cases = []
        for text in texts:
            ids = t.encode(text, add_special_tokens=False).ids
            cases.append({"text": text, "ids": ids, "decoded": t.decode(ids, skip_special_tokens=False), "special": t.encode(text).ids})
        write(f"{name}.cases.json.gz", cases)
        print(name, len(cases), "cases")


main()
