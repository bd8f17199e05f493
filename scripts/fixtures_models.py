"""Writes internal/model/testdata: tiny random checkpoints and what transformers computes with them, and the same for
SmolLM2 when its GGUF is given.

Run: python scripts/fixtures_models.py [SmolLM2.gguf]   (needs torch, transformers, safetensors, gguf)

Each NAME/ is a Hugging Face folder; NAME.json holds, for one prompt, in float32 (or the dtype that it names):
  tokens, and per layer (0 is the embedding, the last is after the final norm) the norm of all hidden states and the
  hidden states of the rows in "rows", and the logits of the last row. Attention is "eager".
smollm2.json holds prompts of 1, 17, 300 and 2,048 tokens with less of each, and greedy continuations.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

ROOT = pathlib.Path(__file__).parent.parent / "internal/model/testdata"
BASE = dict(vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="eager", bos_token_id=1, eos_token_id=2)
torch.set_num_threads(1)


def checkpoints():
    yield "llama", LlamaForCausalLM, LlamaConfig(**{**BASE, "tie_word_embeddings": True, "vocab_size": 264, "max_position_embeddings": 4096}), "float64", {}
    yield "llama3", LlamaForCausalLM, LlamaConfig(**BASE, rope_theta=500000.0, rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)), "float32", {}
    yield "linear", LlamaForCausalLM, LlamaConfig(**BASE, rope_scaling=dict(rope_type="linear", factor=4.0)), "float32", {}
    yield "yarn", LlamaForCausalLM, LlamaConfig(**BASE, rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)), "float32", {}
    yield "mistral", MistralForCausalLM, MistralConfig(**BASE, sliding_window=20), "float32", dict(max_shard_size="80KB")
    yield "qwen2", Qwen2ForCausalLM, Qwen2Config(**BASE), "float32", {}
    yield "qwen3", Qwen3ForCausalLM, Qwen3Config(**{**BASE, "head_dim": 24}), "float32", {}
    yield "bf16", LlamaForCausalLM, LlamaConfig(**BASE), "float32", dict(dtype=torch.bfloat16)


def byte_tokenizer(folder):
    """A tokenizer of single bytes and a ChatML template, so that one tiny checkpoint can run every stage."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({s: i for i, s in enumerate(special + letters)}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    t.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": template}, indent=1) + "\n")


@torch.no_grad()
def run(model, tokens, rows, layers=None, top=None):
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    hidden = [h[0].double().numpy() for h in out.hidden_states]
    logits = out.logits[0, -1].double().numpy()
    result = {"tokens": tokens, "rows": rows, "norms": [float(np.linalg.norm(h)) for h in hidden],
              "hidden": {str(i): [[round(float(v), 7) for v in h[r]] for r in rows] for i, h in enumerate(hidden) if layers is None or i in layers}}
    if top:
        order = np.argsort(-logits, kind="stable")[:top]
        result["top"] = [[int(i), round(float(logits[i]), 6)] for i in order]
    else:
        result["logits"] = [round(float(v), 7) for v in logits]
    return result


def tiny():
    for name, cls, config, compute, how in checkpoints():
        torch.manual_seed(sum(map(ord, name)))
        model = cls(config)
        with torch.no_grad():
            for key, p in model.named_parameters():
                # Large enough that attention is far from uniform, and that every bias and norm matters.
                p.copy_(1 + 0.3 * torch.randn_like(p) if key.endswith("norm.weight") else torch.randn_like(p) * (0.3 if p.dim() == 1 else 2.0 / p.shape[-1] ** 0.5))
        if "dtype" in how:
            model = model.to(how["dtype"])
        folder = ROOT / name
        model.save_pretrained(folder, **{k: v for k, v in how.items() if k != "dtype"})
        (folder / "generation_config.json").unlink(missing_ok=True)
        for file in folder.iterdir():
            file.chmod(0o644)
        if name == "llama":
            byte_tokenizer(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=getattr(torch, compute)).eval()
        rng = np.random.default_rng(7)
        result = run(model, rng.integers(3, 96, 96).tolist(), [0, 50, 95])
        (ROOT / f"{name}.json").write_text(json.dumps({"compute": compute, **result}) + "\n")
        print(name, result["norms"])


def smollm2(path):
    import gguf
    from gguf.quants import dequantize

    reader = gguf.GGUFReader(path)
    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
                         max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True, attn_implementation="eager")
    model = LlamaForCausalLM(config).eval()
    state = {}
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    for t in reader.tensors:
        w = torch.from_numpy(np.array(dequantize(t.data, t.tensor_type), np.float32)).reshape(*reversed(t.shape.tolist()))
        part = t.name.split(".")
        if part[0] == "blk":
            if part[2] in ("attn_q", "attn_k"):  # undo the interleaving of the two halves of each head
                heads = w.shape[0] // 64
                w = w.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(w.shape)
            state[f"model.layers.{part[1]}.{names[part[2]]}.weight"] = w
        else:
            state[{"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part[0]]] = w
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    torch.set_num_threads(2)
    rng = np.random.default_rng(11)
    prompts = []
    for n in (1, 17, 300, 2048):
        tokens = rng.integers(20, 49152, n).tolist()
        last = n - 1
        r = run(model, tokens, sorted({0, n // 2, last}), layers={0, 1, 15, 30}, top=10)
        r["hidden"] = {k: [row[::9] for row in v] for k, v in r["hidden"].items()}  # every ninth value
        if n <= 300:
            out = model.generate(torch.tensor([tokens]), max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)
            r["greedy"] = out[0, n:].tolist()
        prompts.append(r)
        print("smollm2", n, r["norms"][-1], r["top"][:2], r.get("greedy"))
    (ROOT / "smollm2.json").write_text(json.dumps(prompts) + "\n")


ROOT.mkdir(parents=True, exist_ok=True)
tiny()
if len(sys.argv) > 1:
    smollm2(sys.argv[1])
