#!/usr/bin/env python3
"""Loads exports with the packages that they are for, and compares what these do with the plan.

    check_exports.py --kvprofile BINARY --model internal/model/testdata/llama [--duo REPO] [--snapkv REPO] [--headkv REPO]

Needs torch, transformers and kvpress; REPO are checkouts of mit-han-lab/duo-attention, FasterDecoding/SnapKV and
FYYFU/HeadKV, whose own code then reads the files. A part whose checkout is not given is left out.
"""

import argparse
import importlib.metadata
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

N = 600  # tokens of the prompts here


def plan(config, layers, policies):
    """A plan whose totals are those of one prompt. The policies are full, streaming (evict always) and topk (static)."""
    block, size = 16, 16 * 2 * config.head_dim * 2

    def blocks(q, n):
        if q["kind"] == "streaming":
            sinks = min(n, q["sink_tokens"])
            return -(-sinks // block) + -(-min(n - sinks, q["recent_tokens"]) // block)
        return -(-min(n, q.get("budget_tokens", n)) // block)

    def tokens(q, n):
        return min(n, q["sink_tokens"] + q["recent_tokens"] if q["kind"] == "streaming" else q.get("budget_tokens", n))

    full, peak, before = -(-N // block), 0, 0
    for row in layers:
        peak = max(peak, before + sum(blocks(policies[p], N) if policies[p]["kind"] == "streaming" else full for p in row))
        before += sum(blocks(policies[p], N) for p in row)
    heads = [policies[p] for row in layers for p in row]
    return {
        "format": "kvprofile.cache-plan", "version": 1, "tool": {"name": "check_exports", "version": "1"},
        "model": {"name": "tiny", "architecture": "llama", "n_layers": config.num_hidden_layers, "n_heads": config.num_attention_heads,
                  "n_kv_heads": config.num_key_value_heads, "head_dim": config.head_dim, "max_position": config.max_position_embeddings,
                  "rope": {"theta": 10000, "scaling": None}, "sha256": {"config": "a" * 64, "weights": "b" * 64}},
        "cache": {"dtype": "bf16", "granularity": "kv_head", "block_size": block, "group_rule": "min", "prefill": "dense"},
        "ties": {"heads": "lower_layer_then_kv_head", "tokens": "lower_position"},
        "policies": policies, "layers": layers,
        "totals": [{"prompt_tokens": N, "generated_tokens": 0, "kept_tokens": sum(tokens(q, N) for q in heads),
                    "kept_blocks": sum(blocks(q, N) for q in heads), "kept_bytes": size * sum(blocks(q, N) for q in heads),
                    "peak_prefill_bytes": size * peak, "full_bytes": size * full * len(heads)}
                   | ({"worst_case": True} if any(q["kind"] == "fastgen" for q in heads) else {})],
    }


STREAM = {"kind": "streaming", "sink_tokens": 16, "recent_tokens": 64, "evict": "always", "decode": "rolling", "positions": "original"}


def topk(budget):
    return {"kind": "topk", "budget_tokens": budget, "observation_window": 32, "pool": {"kind": "max", "kernel": 7}, "aggregate": "mean",
            "sink_tokens": 0, "evict": "prefill_end", "decode": "static", "positions": "original"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvprofile", required=True)
    parser.add_argument("--model", required=True)
    for repo in "duo", "snapkv", "headkv":
        parser.add_argument("--" + repo)
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM, DynamicCache
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    config = model.config
    heads = plan(config, [["full", "stream"], ["stream", "stream"]], {"full": {"kind": "full"}, "stream": STREAM})
    budgets = plan(config, [["b200", "b200"], ["b120", "b300"]], {"b200": topk(200), "b120": topk(120), "b300": topk(300)})
    work = pathlib.Path(tempfile.mkdtemp())
    done = []

    def export(p, to):
        path = work / "plan.json"
        path.write_text(json.dumps(p))
        folder = work / to
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([args.kvprofile, "export", path, "--to", to, "-o", folder, "-q", "--json"], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.PIPE)
        return folder

    def same(what, got, want):
        if got != want:
            sys.exit(f"{what}: {got}, want {want}")

    streams = [[name == "stream" for name in row] for row in heads["layers"]]
    ids = torch.randint(3, config.vocab_size, (1, N), generator=torch.Generator().manual_seed(1))

    # kvpress: what DuoAttentionPress masks, and how many tokens the ratios leave.
    from kvpress_press import duo_press, layer_press
    folder = export(heads, "kvpress")
    press = duo_press(folder)
    with torch.no_grad(), press(model):
        model(ids, past_key_values=DynamicCache())
    for l, layer in enumerate(model.model.layers):
        _, head, position = layer.self_attn.masked_key_indices
        masked = {(int(h), int(p)) for h, p in zip(head, position)}
        same(f"kvpress: masked in layer {l}", masked, {(k, p) for k in range(2) if streams[l][k] for p in range(16, N - 64)})
        layer.self_attn.masked_key_indices = None
    folder = export(budgets, "kvpress")
    cache = DynamicCache()
    with torch.no_grad(), layer_press(folder)(model):
        model(ids, past_key_values=cache)
    same("kvpress: tokens per layer", [cache.layers[l].keys.shape[2] for l in range(2)], [200, 300])
    done.append("kvpress " + importlib.metadata.version("kvpress"))

    if args.duo:
        sys.path.insert(0, args.duo)
        from duo_attn.utils import load_attn_pattern, sparsify_attention_heads
        folder = export(heads, "duo")
        gates, sink, recent = load_attn_pattern(str(folder))
        for seed in range(20):  # it breaks ties by noise
            numpy.random.seed(seed)
            full, sparsity = sparsify_attention_heads(gates.copy(), sparsity=json.loads((folder / "config.json").read_text())["sparsity"])
            same("DuoAttention: streaming heads", (full == 0).tolist(), streams)
        same("DuoAttention: sizes", (sink, recent, sparsity), (16, 64, 0.75))
        done.append("duo-attention")

    query, key = torch.randn(1, 4, N, 12), torch.randn(1, 4, N, 12)  # heads repeated as both tools do
    if args.snapkv:
        sys.path.insert(0, str(pathlib.Path(args.snapkv) / "snapkv" / "monkeypatch"))
        from snapkv_utils import SnapKVCluster
        c = json.loads((export(budgets, "snapkv") / "snapkv.json").read_text())
        lengths = []
        for l in range(2):  # as pred_snap.py puts the lists on the layers
            cluster = SnapKVCluster(window_size=c["window_sizes"][l], max_capacity_prompt=c["max_capacity_prompts"][l], kernel_size=c["kernel_sizes"][l],
                                    pooling=c["pooling"])
            lengths.append(cluster.update_kv(key, query, key, None, 2)[0].shape[2])
        same("SnapKV: tokens per layer", lengths, [200, 300])
        done.append("SnapKV")
        sys.path.pop(0)
        del sys.modules["snapkv_utils"]

    if args.headkv:
        # Its code names two files of scores by model: ours takes the place of one in a copy.
        folder = export(budgets, "headkv")
        c = json.loads((folder / "headkv.json").read_text())
        copy = work / "HeadKV"
        shutil.copytree(pathlib.Path(args.headkv) / "headkv", copy / "headkv")
        scores = copy / "Important_Head" / "head_score" / "Meta-Llama-3-8B-Instruct_retrieval_heads.json"
        scores.parent.mkdir(parents=True)
        shutil.copy(folder / "head_scores.json", scores)
        sys.path.insert(0, str(copy / "headkv"))
        from snapkv_utils import ReasonSnapKVCluster
        for l in range(2):
            cluster = ReasonSnapKVCluster(window_size=c["window_size"], kernel_size=c["kernel_size"], pooling=c["pooling"], base_capacity=c["base_capacity"],
                                          head_choice="copy", beta=c["beta"], temp=c["temp"], layer_idx=l, num_hidden_layers=2, num_attention_heads=4, model="llama")
            same("HeadKV: capacities", cluster.head_capacity.tolist(), c["head_capacity"])
            cluster.update_kv(key, query, key)
            same(f"HeadKV: tokens per query head of layer {l}", cluster.head_lens.tolist(), [[200] * 4, [120, 120, 300, 300]][l])
        done.append("HeadKV")

    shutil.rmtree(work)
    print("right with", ", ".join(done), "on torch", torch.__version__, "and transformers", importlib.metadata.version("transformers"))


if __name__ == "__main__":
    main()
