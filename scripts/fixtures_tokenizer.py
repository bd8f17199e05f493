"""Writes internal/tokenizer/testdata: the ids that the official tokenizers library gives to tricky and random strings.

Run: python scripts/fixtures_tokenizer.py OUT NAME=tokenizer.json ... smollm2=model.gguf   (needs tokenizers, gguf,
sentencepiece)

For each name: OUT/NAME.cases.json.gz with the strings, their ids, the texts decoded again, and what random ids decode
to; and OUT/NAME.json.gz with the tokenizer itself. With --reduce the latter has only the tokens and merges that the
strings need, and the ids are those of the reduced tokenizer: real tokenizer.json files are too large to commit. Run
without --reduce, with a large --count, to compare with whole ones (KVPROFILE_TOKENIZER_CASES=OUT go test).

A tokenizer named llama2 is also written as a vocabulary with scores, OUT/scored.json.gz, with the ids that the
sentencepiece library gives for it. OUT/variants.json.gz has small tokenizers with pipelines of every supported part.
"""

import argparse
import gzip
import json
import pathlib
import random
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

TRICKY = [
    "", " ", "  ", "\n", "\n\n\n", "\t x", "a", " a", "a ", "hello world", "Hello, World!", "  leading and trailing  ", "don't I'LL we've 'S",
    "1234567890 3.14 1,000,000", "x²+y³=½ ⅷ ٣٤٥", "naïve café résumé", "e\u0301 vs é, Å vs A\u030a", "日本語のテキスト。全角スペース　です", "Привет, мир!",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽", "עברית العربية हिन्दी ไทย", "\u200b\u200d\ufeff\u00a0|\u2028|", "\x00\x01\x1f\x7f", "\r\n\r\n  \r x",
    "def f(x):\n    return x**2  # comment\n\n\tif x:\n", "{\"key\": [1, 2.5e-10, null]}", "https://example.org/a?b=c&d=%20#e", "<s> </s> <unk> <|im_start|>user\nhi<|im_end|>\n",
    "<|begin_of_text|><|start_header_id|>x<|end_header_id|><|eot_id|>", "<|endoftext|> <think> </think> <0x0A> <start_of_turn>", "<|im_start|", "a<|im_end|>b <|im_end|> c",
    "ﬁ ﬂ Ⅷ ㎏ ①", "ÀÉÎÕÜ ß ſ", "....!!!???", "«quotes» “curly” ‘single’", "supercalifragilisticexpialidocious" * 3, " " * 40 + "x" + "\n" * 20, "▁ ▁▁a▁b", "Ġ Ċ ÄĨ",
    "'ſ 'S 'ſa \u212a'RE 'Re'lL", "a\u0085b\u2029 \u3000 \r \n \t\n x", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "a  b   c    d     e", "\n\n \n  \n   a",
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
            # Characters that Python's version of Unicode knows: newer ones are of other classes for other versions.
            parts.append("".join(chr(c) for c in (rng.randint(0, 0x1FFFF) for _ in range(9)) if unicodedata.category(chr(c)) not in ("Cn", "Cs")))
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


def scored(spec, order, texts):
    """The vocabulary of a SentencePiece-style tokenizer.json with scores, as its sentencepiece model and a GGUF have it,
    and the ids that the sentencepiece library gives. order has the tokens that merges make, the first first."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as pb

    rank = {t: n for n, t in enumerate(order)}
    vocab = spec["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    assert [vocab[t] for t in tokens] == list(range(len(tokens)))
    model = pb.ModelProto()
    model.trainer_spec.model_type = pb.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    types, scores = [], []
    for t in tokens:
        kind = 2 if t == "<unk>" else 3 if t in ("<s>", "</s>") else 6 if t.startswith("<0x") else 1
        types.append(kind)
        # As in Llama 2: stretches of spaces share the worst score.
        scores.append(0.0 if kind != 1 else -1e9 if set(t) == {"▁"} and len(t) > 1 else -float(rank.get(t, len(rank))))
        piece = model.pieces.add()
        piece.piece, piece.score, piece.type = t, scores[-1], kind
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    cases = []
    for text in texts:
        # The library does not look for control tokens in text, and drops NUL.
        if "\x00" not in text and not any(t in text for t in ("<s>", "</s>", "<unk>")):
            ids = sp.encode(text)
            cases.append({"text": text, "ids": ids, "special": [1, *ids], "decoded": sp.decode(ids)})
    return {"tokens": tokens, "scores": scores, "types": types, "cases": cases}


def variants(count):
    """Small tokenizers, each with the ids of random strings over few letters."""
    rng = random.Random("variants")
    letters = "aabbc  12.\n▁Éé\u0301ﬁ日"

    def strings():
        marks = ["<x>", "<y>", "<z>", "ab", "É"]
        return ["".join(rng.choice(marks) if rng.random() < 0.08 else rng.choice(letters) for _ in range(rng.randint(0, 16))) for _ in range(count)]

    def model(symbols, merges, **options):
        vocab = {}
        for t in [*symbols, *(a + b for a, b in merges)]:
            vocab.setdefault(t, len(vocab))
        return models.BPE(vocab, merges, **options)

    merges = [("a", "b"), ("b", "c"), ("a", "a"), ("▁", "a"), ("ab", "c"), ("▁", "▁"), ("1", "2"), ("▁a", "b"), ("aa", "b"), ("a", "ab"), ("a", "bc"), ("▁▁", "▁▁")]
    plain = ["<unk>", *" abc12.▁\nÉé"]
    byte_symbols = [f"<0x{i:02X}>" for i in range(256)]
    level = sorted(pre_tokenizers.ByteLevel.alphabet())
    level_merges = [("a", "b"), ("Ġ", "a"), ("b", "c"), ("ab", "c"), ("a", "a"), ("1", "2"), ("Ã", "©"), ("Ġ", "Ġ"), ("Ġa", "b"), ("a", "bc"), ("aa", "b")]
    S, P, N, D = pre_tokenizers.Sequence, pre_tokenizers, normalizers, decoders
    made = {}
    for behaviour in ("isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            made[f"split {behaviour} {invert}"] = (plain, merges, {}, None, P.Split(Regex("a+|[0-9]"), behaviour, invert), None)
        made[f"split string {behaviour}"] = (plain, merges, {}, None, P.Split("a", behaviour), None)
    for scheme in ("always", "first", "never"):
        for split in (True, False):
            made[f"metaspace {scheme} {split}"] = (plain, merges, {}, None, P.Metaspace(prepend_scheme=scheme, split=split), D.Metaspace(prepend_scheme=scheme, split=split))
    made["digits"] = (plain, merges, {}, None, P.Digits(individual_digits=False), D.Fuse())
    made["digits, metaspace"] = (plain, merges, {}, None, S([P.Digits(individual_digits=True), P.Metaspace(prepend_scheme="first")]), D.Metaspace())
    for prefix in (False, True):
        for regex in (False, True):
            made[f"bytes {prefix} {regex}"] = (level, level_merges, {}, None, P.ByteLevel(add_prefix_space=prefix, use_regex=regex), D.ByteLevel())
    made["digits, bytes"] = (level, level_merges, {}, None, S([P.Digits(individual_digits=True), P.ByteLevel(add_prefix_space=True)]), D.ByteLevel())
    for name, n in {"nfc": N.NFC(), "nfkc": N.NFKC(), "nfd": N.NFD(), "nfkd": N.NFKD(), "lower": N.Lowercase(), "strip": N.Strip(), "left": N.Strip(right=False),
                    "replace": N.Replace("b", "ca"), "regex": N.Replace(Regex("a+"), "b"), "prepend": N.Sequence([N.Prepend("▁"), N.Replace(" ", "▁")])}.items():
        made[f"normalizer {name}"] = (level, level_merges, {}, n, P.ByteLevel(add_prefix_space=False), D.ByteLevel())
    strip = D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)])
    for fuse in (False, True):
        made[f"unknown {fuse}"] = (plain, merges, {"unk_token": "<unk>", "fuse_unk": fuse}, None, None, None)
        made[f"bytes for unknown {fuse}"] = (plain + byte_symbols, merges, {"unk_token": "<unk>", "fuse_unk": fuse, "byte_fallback": True}, None, None, strip)
        made[f"some bytes {fuse}"] = (plain + byte_symbols[:0xE7], merges, {"unk_token": "<unk>", "fuse_unk": fuse, "byte_fallback": True}, None, None, strip)
    made["no unknown"] = (plain, merges, {}, None, None, D.Strip(".", 1, 0))
    made["ignore merges"] = (plain, merges, {"ignore_merges": True}, None, P.Split("a", "merged_with_next"), None)
    out = []
    for name, (symbols, rules, options, normalizer, pre, decoder) in made.items():
        for extra in range(3):
            t = Tokenizer(model(symbols, rules, **options))
            if normalizer:
                t.normalizer = normalizer
            if pre:
                t.pre_tokenizer = pre
            if decoder:
                t.decoder = decoder
            if extra:
                flags = lambda: {k: rng.random() < 0.4 for k in ("lstrip", "rstrip", "single_word", "normalized")}
                t.add_special_tokens([AddedToken("<x>", **flags())])
                t.add_tokens([AddedToken(s, **flags()) for s in ("<y>", "ab", "<z>", "É")[: extra + 1]])
            cases = [case(t, s) for s in strings()]
            if normalizer:
                for c in cases:
                    del c["decoded"]  # some versions of the library give the normalised spelling of added tokens
            ids = [[rng.randrange(t.get_vocab_size()) for _ in range(rng.randint(1, 9))] for _ in range(8)]
            decoded = [{"ids": i, "decoded": t.decode(i, skip_special_tokens=False)} for i in ids]
            out.append({"name": f"{name} {extra}", "tokenizer": json.loads(t.to_str()), "cases": cases, "decodes": [] if normalizer else decoded})
    return out


def case(t, text):
    ids = t.encode(text, add_special_tokens=False).ids
    return {"text": text, "ids": ids, "decoded": t.decode(ids, skip_special_tokens=False), "special": t.encode(text).ids}


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
        order = list(dict.fromkeys("".join(m.split(" ", 1) if isinstance(m, str) else m) for m in spec["model"]["merges"]))
        if args.reduce and not is_gguf:
            spec = reduce(spec, texts)
        if not is_gguf:
            write(f"{name}.json.gz", spec)
        if name == "llama2":
            write("scored.json.gz", scored(spec, order, texts))
        t = Tokenizer.from_str(json.dumps(spec))
        rng = random.Random(name)
        used = sorted(t.get_vocab().values())
        ids = [[rng.choice(used) for _ in range(rng.randint(1, 12))] for _ in range(args.count // 4)]
        write(f"{name}.cases.json.gz", {
            "cases": [case(t, text) for text in texts],
            "decodes": [{"ids": i, "decoded": t.decode(i, skip_special_tokens=False)} for i in ids],
        })
        print(name, len(texts), "strings")
    write("variants.json.gz", variants(12))


main()
