#!/usr/bin/env python3
"""Makes internal/eval/testdata/kvpress.json.gz: what NVIDIA's kvpress keeps of SmolLM2-135M-Instruct's KV cache, and what it then answers.

Everything that is compared comes from kvpress' own code (BasePress.forward_hook of each press, run on keys, values and hidden states of a dense
prefill by transformers in float32), except H2O, which kvpress does not have: the class below states it with kvpress' base class.

    python3 -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress==0.5.5 transformers==5.2.0 gguf
    /tmp/kvpress/bin/python scripts/fixtures_kvpress.py SmolLM2-135M-Instruct.Q4_1.gguf

It builds its prompts by `go run ./cmd/kvprofile datasets build` (or takes them: --dataset). About 15 minutes on one core.

The file is gzip'd JSON (no time stamp, so that the same run gives the same bytes):

  versions  of kvpress, transformers, torch
  model     SHA-256 of the GGUF file; transformers dequantises it to float32
  dataset   the command's flags, and the content hash in the Parquet file
  prompts   id (row of the dataset), tokens (before the first answer), expected
  full      answers with the full cache
  methods   name, press (kvpress class), parameters, ratio (share REMOVED, as kvpress has it), answers, kept
    answers  per prompt, or null: tokens (greedy, 20, the end of the turn ignored), gaps (per step, logit of the first less the second choice);
             logprob, the mean log-probability of the tokens that the full cache writes, each after those before it
    kept     [prompt, layer, kv head, number kept, cut, margin, set]: cut is the lowest kept score (of the tokens outside the observation window),
             margin is cut less the highest dropped score, both null for presses without scores; set is the base64 of a bitmap, bit i % 8 of
             byte i / 8 for position i. Of prompt p those layers l are here with (l + p) % 5 == 0, of the first 12 prompts (6 of each length).
    budgets  [prompt][layer]: number kept, where layers differ
"""
import argparse
import base64
import gzip
import hashlib
import json
import os
import subprocess
import tempfile

import kvpress
import numpy as np
import pyarrow.parquet as pq
import torch
import transformers
from importlib.metadata import version
from transformers import AutoModelForCausalLM, DynamicCache

NEW = 20
FLAGS = ["--task", "needles", "--lengths", "512,768", "--depths", "0.1,0.5,0.9", "--repeats", "4", "--seed", "42"]
RATIOS = (0.5, 0.75, 0.88)


class H2OPress(kvpress.ObservedAttentionPress):
    """H2O at the end of prefill: half of what is kept are the last tokens, the others those with the largest sum of attention received from all
    queries, mean over the group. ObservedAttentionPress divides by the number of queries that can see a key (which favours late keys); H2O
    (Zhang et al. 2023) does not."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        n = keys.shape[2]
        scores = attentions.sum(2).view(1, keys.shape[1], -1, n).mean(2)
        recent = recent_of(n, self.compression_ratio)
        scores[..., n - recent:] = scores.max() + 1
        return scores


def recent_of(n, ratio):
    return kvpress.utils.compute_n_kept(n, ratio) // 2


class DuoPress(kvpress.DuoAttentionPress):
    """DuoAttentionPress with gates given in place of downloaded ones."""

    def __init__(self, gates, sink, recent, streaming):
        super().__init__(head_compression_ratio=streaming)
        self.given = (sink, recent, gates)

    def load_attention_pattern(self, model):
        return self.given


def methods(layers, kv_heads):
    out = []

    def add(name, press, ratio, eager=False, **parameters):
        kind = {"H2OPress": "H2O, not of kvpress", "DuoPress": "DuoAttentionPress", "KeyRerotationPress": "KeyRerotationPress(StreamingLLMPress)"}
        name_of_class = type(press).__name__
        out.append({"name": name, "press": press, "class": kind.get(name_of_class, name_of_class), "ratio": ratio, "parameters": parameters,
                    "eager": eager})

    for window in (64, 32):
        for r in RATIOS:
            add(f"snapkv-w{window}", kvpress.SnapKVPress(r, window, 5), r, window=window, kernel=5)
    for window, beta, r in ((64, 20, 0.5), (64, 20, 0.75), (8, 20, 0.5), (8, 10, 0.75), (8, 5, 0.88)):
        add(f"pyramidkv-w{window}-beta{beta}", kvpress.PyramidKVPress(r, window, 5, beta), r, window=window, kernel=5, beta=beta)
    for r in RATIOS:
        add("streamingllm", kvpress.StreamingLLMPress(r, 4), r, sink=4)
        add("streamingllm-rerotated", kvpress.KeyRerotationPress(kvpress.StreamingLLMPress(r, 4)), r, sink=4)
        add("observed", kvpress.ObservedAttentionPress(r), r, True)
        add("h2o", H2OPress(r), r, True)
    # Distinct gates, since numpy's argsort (not stable) decides between equal ones.
    gates = np.random.default_rng(20250101).permutation(layers * kv_heads).reshape(layers, kv_heads) / (layers * kv_heads)
    for sink, recent, streaming in ((16, 64, 0.5), (64, 256, 0.75), (4, 28, 0.9)):
        add("duoattention", DuoPress(gates, sink, recent, streaming), streaming, sink=sink, recent=recent, gates=gates.round(6).tolist())
    return out


@torch.no_grad()
def prefill(model, ids, attention):
    """Runs a dense prefill; gives each attention layer's (module, hook arguments, output), the dense cache, and the last row's logits."""
    model.set_attn_implementation(attention)
    seen, hooks, cache = [], [], DynamicCache()
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(lambda m, a, k, o: seen.append((m, k, o)), with_kwargs=True))
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
    for h in hooks:
        h.remove()
    return seen, cache, logits


@torch.no_grad()
def compress(press, seen, dense):
    """Runs the press' own hook on copies of the dense cache whose values are positions, so that the kept indices can be read off; gives per layer
    the kept positions [kv heads][kept] in the cache's order, the cache, and the masked entries of presses that mask."""
    cache, kept, masked = DynamicCache(), [], []
    for layer, (module, kwargs, output) in enumerate(seen):
        k, v = dense.layers[layer].keys, dense.layers[layer].values
        n = k.shape[2]
        module.masked_key_indices = None
        cache.update(k.clone(), torch.arange(n, dtype=v.dtype).view(1, 1, n, 1).expand_as(v).clone(), layer)
        press.forward_hook(module, [], {**kwargs, "past_key_values": cache}, output)
        index = cache.layers[layer].values[0, :, :, 0].long()
        cache.layers[layer].values = v.gather(2, index[None, :, :, None].expand(1, -1, -1, v.shape[3])).contiguous()
        mask = module.masked_key_indices
        module.masked_key_indices = None
        masked.append(mask)
        heads = [sorted(row.tolist()) for row in index]
        if mask is not None:
            gone = [set() for _ in heads]
            for h, s in zip(mask[1].tolist(), mask[2].tolist()):
                gone[h].add(s)
            heads = [[p for p in row if p not in gone[h]] for h, row in enumerate(heads)]
        kept.append(heads)
    return cache, kept, masked


@torch.no_grad()
def answer(model, cache, masked, position, logits, gold=None):
    """Greedy continuation, as kvpress' pipeline decodes: the cache is shorter, positions go on from the given one. Beside it, in a second row of the
    batch, the model reads the gold tokens (none: those it writes)."""
    model.set_attn_implementation("sdpa")
    own = DynamicCache()
    for layer, x in enumerate(cache.layers):
        own.update(x.keys.repeat(2, 1, 1, 1), x.values.repeat(2, 1, 1, 1), layer)
    for layer, mask in zip(model.model.layers, masked):
        layer.self_attn.masked_key_indices = mask and (torch.cat((mask[0], mask[0] + 1)), mask[1].repeat(2), mask[2].repeat(2))
    tokens, gaps, mean = [], [], 0.0
    logits = logits.expand(2, -1)
    for i in range(NEW):
        if i:
            ids = torch.tensor([[tokens[-1]], [(gold or tokens)[i - 1]]])
            logits = model(ids, past_key_values=own, position_ids=torch.full((2, 1), position + i - 1)).logits[:, -1]
        top = logits[0].topk(2).values
        tokens.append(int(logits[0].argmax()))
        gaps.append(float(f"{float(top[0] - top[1]):.3g}"))
        mean += float(logits[1].double().log_softmax(-1)[(gold or tokens)[i]]) / NEW
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return {"tokens": tokens, "gaps": gaps, "logprob": short(mean)}


@torch.no_grad()
def margins(press, seen, dense, layer, heads, window):
    """Per KV head: the lowest kept and the highest dropped score, the observation window (kept always) aside."""
    module, kwargs, output = seen[layer]
    k, v = dense.layers[layer].keys, dense.layers[layer].values
    scores = press.score(module, kwargs["hidden_states"], k, v, output[1], kwargs)[0].double()
    n = scores.shape[1]
    out = []
    for h, kept in enumerate(heads):
        inside = [float(scores[h, p]) for p in kept if p < n - window]
        outside = [float(scores[h, p]) for p in sorted(set(range(n)) - set(kept))]
        cut = min(inside) if inside else None
        out.append((cut, cut - max(outside) if inside and outside else None))
    return out


@torch.no_grad()
def plain(model, m, ids, gold):
    """The answer as a user of kvpress gets it: a prefill of its own, within the press' context manager."""
    model.set_attn_implementation("eager" if m["eager"] else "sdpa")
    cache = DynamicCache()
    with m["press"](model):
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
    masked = [layer.self_attn.masked_key_indices for layer in model.model.layers]
    position = cache.get_seq_length() if m["name"] == "streamingllm-rerotated" else ids.shape[1]
    return answer(model, cache, masked, position, logits, gold)


def bitmap(n, kept):
    b = np.zeros(n, np.uint8)
    b[kept] = 1
    return base64.b64encode(np.packbits(b, bitorder="little").tobytes()).decode()


def short(x):
    return None if x is None else float(f"{x:.6g}")


def main():
    arg = argparse.ArgumentParser()
    arg.add_argument("model")
    arg.add_argument("--dataset", help="Parquet file made with " + " ".join(FLAGS))
    arg.add_argument("-o", default="internal/eval/testdata/kvpress.json.gz")
    arg.add_argument("--prompts", type=int, help="only so many of them (for a trial)")
    arg.add_argument("--check", action="store_true", help="on the first prompt, run each press in its own context manager too")
    args = arg.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as tmp:
        path = args.dataset
        if path is None:
            path = os.path.join(tmp, "needles.parquet")
            subprocess.run(["go", "run", "./cmd/kvprofile", "datasets", "build", args.model, *FLAGS, "-q", "-o", path], check=True, stdout=2)
        table = pq.read_table(path)
    rows = table.to_pylist()
    prompts = []
    for r in rows:
        end = min(s["start"] for s in r["spans"] if s["kind"] == "answer")
        prompts.append({"id": r["id"], "target": r["target_tokens"], "tokens": r["tokens"][:end], "expected": r["expected"]})
    lengths = sorted({p["target"] for p in prompts})
    # Lengths take turns, and within a length the depths do.
    by_length = {t: [p for p in prompts if p["target"] == t] for t in lengths}
    depths = 3
    for t, ps in by_length.items():
        repeats = len(ps) // depths
        by_length[t] = [ps[d * repeats + r] for r in range(repeats) for d in range(depths)]
    prompts = [p for group in zip(*by_length.values()) for p in group]
    if args.prompts:
        prompts = prompts[: args.prompts]

    folder, file = os.path.split(os.path.abspath(args.model))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, attn_implementation="sdpa").eval()
    layers, kv_heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    full = []
    todo = methods(layers, kv_heads)
    for m in todo:
        m["press"].post_init_from_model(model)
        m["answers"], m["kept"], m["budgets"] = [], [], []

    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt["tokens"]])
        n = ids.shape[1]
        for attention in ("sdpa", "eager"):
            seen, dense, logits = prefill(model, ids, attention)
            if attention == "sdpa":
                full.append(answer(model, dense, [None] * layers, n, logits))
            for m in todo:
                if m["eager"] != (attention == "eager"):
                    continue
                press, window = m["press"], m["parameters"].get("window", 0)
                if window and kvpress.utils.compute_n_kept(n, m["ratio"]) <= window:
                    # Nothing outside the window is kept, and torch.topk chooses within it, where all scores are equal.
                    m["answers"].append(None)
                    m["budgets"].append(None)
                    continue
                model.set_attn_implementation(attention)
                cache, kept, masked = compress(press, seen, dense)
                sizes = [len(heads[0]) for heads in kept]
                if m["name"] == "h2o":
                    window = recent_of(n, m["ratio"])
                if number < 12:
                    for layer in range(layers):
                        if (layer + number) % 5:
                            continue
                        if isinstance(press, kvpress.ScorerPress) and not isinstance(press, kvpress.StreamingLLMPress):
                            cuts = margins(press, seen, dense, layer, kept[layer], window)
                        else:
                            cuts = [(None, None)] * kv_heads
                        for h in range(kv_heads):
                            m["kept"].append([number, layer, h, len(kept[layer][h]), short(cuts[h][0]), short(cuts[h][1]), bitmap(n, kept[layer][h])])
                m["budgets"].append(sizes)
                position = sizes[0] if m["name"] == "streamingllm-rerotated" else n
                m["answers"].append(answer(model, cache, masked, position, logits, full[-1]["tokens"]))
                if args.check and number == 0:
                    assert m["answers"][0]["tokens"] == plain(model, m, ids, full[-1]["tokens"])["tokens"], m["name"]
            del seen, dense
        print(f"{number + 1}/{len(prompts)}", flush=True)

    out = {
        "versions": {"kvpress": version("kvpress"), "transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "model": {"file": file, "sha256": hashlib.sha256(open(args.model, "rb").read()).hexdigest(), "dtype": "float32"},
        "dataset": {"flags": FLAGS, "content_sha256": (table.schema.metadata or {}).get(b"kvprofile.content_hash", b"").decode()},
        "prompts": [{"id": p["id"], "expected": p["expected"], "tokens": p["tokens"]} for p in prompts],
        "full": full,
        "methods": [],
    }
    for m in todo:
        press = m["press"]
        entry = {"name": m["name"], "press": m["class"], "ratio": m["ratio"], "parameters": m["parameters"], "answers": m["answers"],
                 "kept": m["kept"]}
        if isinstance(press, kvpress.PyramidKVPress):
            entry["budgets"] = m["budgets"]
        out["methods"].append(entry)
    data = json.dumps(out, separators=(",", ":")).encode()
    with open(args.o, "wb") as f:
        f.write(gzip.compress(data, 9, mtime=0))
    print(args.o, len(data), os.path.getsize(args.o))


if __name__ == "__main__":
    main()
