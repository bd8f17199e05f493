"""Writes GGUF files with the PyPI package gguf, to read them back with another implementation:

  internal/gguf/testdata/all.gguf, all.json   metadata of every type and a tensor of every format that is read
  internal/model/testdata/NAME.gguf           GGUFs of the tiny checkpoints NAME beside them (fixtures_models.py), as
                                              llama.cpp converts them
  internal/model/testdata/rope_freqs.json     the divisors that llama.cpp's converter writes for published models

Run: python scripts/fixtures_gguf.py   (needs numpy, torch, safetensors, gguf)
"""

import json
import math
import pathlib

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors import safe_open

ROOT = pathlib.Path(__file__).parent.parent / "internal"
Q = gguf.GGMLQuantizationType


def everything():
    folder = ROOT / "gguf/testdata"
    folder.mkdir(parents=True, exist_ok=True)
    w = gguf.GGUFWriter(folder / "all.gguf", "llama")
    w.add_custom_alignment(64)
    w.add_uint8("t.u8", 250)
    w.add_int8("t.i8", -5)
    w.add_uint16("t.u16", 60000)
    w.add_int16("t.i16", -30000)
    w.add_uint32("t.u32", 1 << 31)
    w.add_int32("t.i32", -(1 << 31))
    w.add_uint64("t.u64", (1 << 53) - 1)
    w.add_int64("t.i64", -(1 << 53) + 1)
    w.add_float32("t.f32", 0.1)
    w.add_float64("t.f64", 0.1)
    w.add_bool("t.true", True)
    w.add_bool("t.false", False)
    w.add_string("t.text", "naïve ▁ text")
    w.add_array("t.texts", ["", "a", "ü"])
    w.add_array("t.ints", [-1, 0, 1 << 20])
    w.add_array("t.floats", [0.5, -0.25])
    w.add_array("t.bools", [True, False, True])
    rng = np.random.default_rng(3)
    shapes = {}
    for kind in (Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K):
        length, size = gguf.GGML_QUANT_SIZES[kind]
        rows, blocks = 3, 1 if length == 256 else 2
        raw = rng.integers(0, 256, (rows, blocks * size), dtype=np.uint8)
        w.add_tensor("t." + kind.name, raw, raw_dtype=kind)
        shapes["t." + kind.name] = {"shape": [rows, blocks * length], "data": raw.tobytes().hex()}
    w.add_tensor("t.3d", np.zeros((2, 3, 4), np.float32))
    shapes["t.3d"] = {"shape": [2, 3, 4], "data": "00" * 96}
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    (folder / "all.json").write_text(json.dumps(shapes, indent=1) + "\n")


PARTS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def renamed(name):
    name = name.removeprefix("model.")
    kind = name.rsplit(".", 1)[1]
    fixed = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if name in fixed:
        return fixed[name]
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{PARTS[rest.rsplit('.', 1)[0]]}.{kind}"


def permute(w, heads):
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def rope_freqs(dim, base, factor, low, high, old):
    """LlamaModel.generate_extra_tensors of llama.cpp's convert_hf_to_gguf.py, in its float32 arithmetic."""
    freqs = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    out = []
    for freq in freqs:
        wavelen = 2 * math.pi / freq
        if wavelen < old / high:
            out.append(1)
        elif wavelen > old / low:
            out.append(factor)
        else:
            smooth = (old / wavelen - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(out, dtype=torch.float32).numpy()


def model(name, arch, kind):
    folder = ROOT / "model/testdata" / name
    c = json.loads((folder / "config.json").read_text())
    rope = c.get("rope_parameters") or {}
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    w = gguf.GGUFWriter(folder.with_suffix(".gguf"), arch)
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(rope["rope_theta"])
    dim = c.get("head_dim") or c["hidden_size"] // heads
    w.add_key_length(dim)
    w.add_value_length(dim)
    if arch == "llama":
        w.add_vocab_size(c["vocab_size"])
        w.add_rope_dimension_count(dim)
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(rope["factor"])
    if (folder / "tokenizer.json").exists():
        t = json.loads((folder / "tokenizer.json").read_text())
        extra = json.loads((folder / "tokenizer_config.json").read_text())
        ids = {k: v for k, v in t["model"]["vocab"].items()} | {a["content"]: a["id"] for a in t["added_tokens"]}
        special = {a["id"] for a in t["added_tokens"] if a["special"]}
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("gpt-2")
        tokens = sorted(ids, key=ids.get)
        kinds = [3 if ids[s] in special else 1 for s in tokens]
        while len(tokens) < c["vocab_size"]:  # the converter pads to the embedding
            tokens.append(f"[PAD{len(tokens)}]")
            kinds.append(5)
        w.add_token_list(tokens)
        w.add_token_types(kinds)
        w.add_token_merges([" ".join(m) for m in t["model"]["merges"]])
        w.add_bos_token_id(ids[extra["bos_token"]])
        w.add_eos_token_id(ids[extra["eos_token"]])
        w.add_chat_template(extra["chat_template"])
    if rope["rope_type"] == "llama3":
        w.add_tensor("rope_freqs.weight", rope_freqs(dim, rope["rope_theta"], rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]))
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for key in f.keys():
                x = f.get_tensor(key).float().numpy()
                if arch == "llama" and "q_proj" in key:
                    x = permute(x, heads)
                if arch == "llama" and "k_proj" in key:
                    x = permute(x, kv)
                if x.ndim == 1 or kind == Q.F32:
                    w.add_tensor(renamed(key), x.astype(np.float32))
                else:
                    w.add_tensor(renamed(key), quantize(x, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def published():
    """RoPE of published models: head dimension, theta, factor, low, high, original length."""
    cases = {"Llama-3.1-8B": (128, 500000.0, 8.0, 1.0, 4.0, 8192), "Llama-3.2-1B": (64, 500000.0, 32.0, 1.0, 4.0, 8192), "Llama-3.2-3B": (128, 500000.0, 32.0, 1.0, 4.0, 8192)}
    out = {name: {"head_dim": c[0], "theta": c[1], "factor": c[2], "low": c[3], "high": c[4], "original": c[5], "divisors": [float(v) for v in rope_freqs(*c)]} for name, c in cases.items()}
    (ROOT / "model/testdata/rope_freqs.json").write_text(json.dumps(out) + "\n")


everything()
model("llama", "llama", Q.F32)
model("llama3", "llama", Q.BF16)
model("yarn", "llama", Q.BF16)
model("qwen2", "qwen2", Q.BF16)
model("qwen3", "qwen3", Q.F16)
published()
