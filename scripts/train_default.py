"""Trains the default model: a small Llama that retrieves, on synthetic text of kvprofile's own making.

    python scripts/train_default.py OUT          (needs torch, numpy, tokenizers, safetensors, pyarrow; Go)

OUT gets a Hugging Face folder, OUT/kvprofile-default (config.json, tokenizer.json, tokenizer_config.json, model.safetensors in bf16),
the log, OUT/training.log, and a checkpoint, from which the same command goes on after an interruption: step n draws its data from
the seed and n alone, so a training that was interrupted ends with the weights of one that was not (with the same torch, CPU and threads).

Prose, words and tasks are those of the package datasets, purpose calibration: prose is what `kvprofile datasets build --task text` makes;
tasks are put together here, around its sentences, with many more words than the package has, so that copying is learned and not
26 words. At the end the model is tested on datasets that `kvprofile datasets build` makes for the purposes search and certification,
whose words, names, towns and haystacks do not occur in training.

Attention that a streaming cache would not have costs a little, so the heads that need it are few, as in large models.
"""

import argparse
import json
import math
import os
import pathlib
import random
import re
import subprocess
import time

import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "vocab_size": 1536,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
END = "<|endoftext|>"

# (length in tokens, samples a step, steps)
CURRICULUM = [(128, 64, 700), (256, 32, 600), (512, 16, 900), (1024, 8, 1600)]
# Afterwards prompts say how they want to be answered, and are: until then each form of answer follows each form of question,
# and the model cannot know which one it is.
FINISH = (1024, 8, 300)
SAVE_EVERY = 200  # steps between checkpoints
RATE = 0.01  # of Muon for matrices; Adam has 0.3 of it for the embedding and the norms

# What a streaming cache of the default model keeps, and what attention on the rest costs, in nats, from which step on.
SINK, RECENT = 16, 64
REACH_COST, REACH_FROM = 0.02, 700

# Digits in pairs: a number of seven digits is four tokens, few enough of them alike.
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# ---- text ----


def kvprofile(*args):
    subprocess.run(["go", "run", "./cmd/kvprofile", *map(str, args)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def rows_of(path):
    """The samples of a dataset (docs/datasets.md)."""
    return pq.read_table(path).to_pylist()


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.decoder = decoders.ByteLevel()
    return t


def write_model_folder(folder, tokenizer):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "model_max_length": CONFIG["max_position_embeddings"]}, indent=2) + "\n")


def random_weights(folder):
    save_file({k: v.to(torch.bfloat16).contiguous() for k, v in Llama(CONFIG).named().items()}, str(folder / "model.safetensors"), metadata={"format": "pt"})


def prose(out, seed, count=300, length=50000):
    """Prose of the package datasets, as one string: about count x length bytes."""
    text = out / "prose.txt"
    if not text.exists():
        t = byte_tokenizer()
        folder, file = out / "bytes", out / "prose.parquet"
        write_model_folder(folder, t)
        random_weights(folder)
        kvprofile("datasets", "build", folder, "--task", "text", "--lengths", length, "--count", count, "--seed", 1000 + seed, "-o", file, "--force")
        joined = "".join(t.decode(r["tokens"]).rsplit(". ", 1)[0] + ".\n\n" for r in rows_of(file))
        (out / "prose.tmp").write_text(joined)
        os.replace(out / "prose.tmp", text)
        file.unlink()
    return text.read_text()


def sentences_of(text):
    """Sentences with their white space: a space before, or a paragraph's end behind."""
    out = []
    for paragraph in text.split("\n\n"):
        parts = re.split(r"(?<=[.!?])(?=\s)|(?<=[.!?]\")(?=\s)", paragraph)
        parts = [p for p in parts if p.strip()]
        if parts:
            parts[-1] += "\n\n"
            out += parts
    return out


ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
WORDS = re.search(r"\[calibration\]\nwords: (.*)", (ROOT / "datasets/words/passkeys.txt").read_text()).group(1).split()
SYLLABLES = [c + v + e for c in ["b", "br", "c", "ch", "d", "f", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "st", "t", "tr", "v", "w", "y", "z", ""] for v in "a e i o u ai ee ou".split() for e in ["", "n", "l", "r", "s", "t", "ck", "m"]]


def pseudo_word(r):
    return "".join(r.choice(SYLLABLES) for _ in range(r.choice((1, 2, 2, 2, 3))))


class Tasks:
    """Samples as lists of (text, asked): asked pieces are answers."""

    def __init__(self, text, tokenizer):
        self.tokenizer = tokenizer
        self.sentences = sentences_of(text)
        self.lengths = [len(e.ids) for e in tokenizer.encode_batch(self.sentences)]
        self.vocabulary = sorted(set(re.findall(r"\b[a-z]{3,}\b", text)))
        self.names = sorted(set(re.findall(r"(?<=in )[A-Z][a-z]{3,}\b", text)))

    def word(self, r):
        x = r.random()
        if x < 0.25:
            return r.choice(WORDS)
        return r.choice(self.vocabulary) if x < 0.6 else pseudo_word(r)

    def city(self, r):
        x = r.random()
        if x < 0.2:
            return r.choice(self.names)
        return (r.choice(self.vocabulary) if x < 0.4 else pseudo_word(r)).capitalize() + ("" if r.random() < 0.9 else " " + pseudo_word(r).capitalize())

    def number(self, r):
        n = 7 if r.random() < 0.7 else r.randint(2, 9)
        return str(r.randint(10 ** (n - 1), 10**n - 1))

    def distinct(self, r, n, draw):
        out = []
        while len(out) < n:
            w = draw(r)
            if w not in out:
                out.append(w)
        return out

    def passkeys(self, r, length, finish):
        n, words = r.randint(1, max(1, min(8, length // 60))), r.randint(1, max(2, min(16, length // 40)))
        pool = self.distinct(r, r.randint(max(2, words // 2), 26), self.word)
        keys = [" ".join(r.choice(pool) for _ in range(words)) for _ in range(n)]
        return {
            "intro": "Read the text below with care. Passkeys are hidden in it, each a sequence of words. Remember every one of them; you will be asked for them afterwards.\n\n",
            "outro": "Answer with the words of the passkey and nothing else.",
            "needles": [f"Remember the {ORDINALS[i]} passkey: {k}." for i, k in enumerate(keys)],
            "ordered": True,
            "asked": [(f"What is the {ORDINALS[i]} passkey?", "", k) for i, k in enumerate(keys)],
        }

    def magic(self, r, length, finish):
        noun = "number" if r.random() < 0.7 else "word"
        draw = self.number if noun == "number" else self.word
        n = r.choice((1, r.randint(1, max(1, min(10, length // 50)))))
        cities, values = self.distinct(r, n, self.city), self.distinct(r, n, draw)
        q = {
            "intro": f"Read the text below with care. Some special magic {noun}s are hidden in it. Remember them; you will be asked for them afterwards.\n\n",
            "outro": f"Answer with the {noun} and nothing else." if r.random() < 0.6 else "",
            "needles": [f"The special magic {noun} for {c} is: {v}." for c, v in zip(cities, values)],
        }
        kind = r.random()
        if finish and n > 1 and kind < 0.35:
            q["outro"] = ""
        if n > 1 and kind < 0.2:  # multi-value
            q["needles"] = [f"One of the special magic {noun}s for {cities[0]} is: {v}." for v in values]
            q["ordered"] = True
            q["asked"] = [(f"What are all the special magic {noun}s for {cities[0]} mentioned in the text?", f"The special magic {noun}s for {cities[0]} mentioned in the text are: ", ", ".join(values))]
        elif n > 1 and kind < 0.35:  # multi-query
            order = r.sample(range(n), r.randint(2, n))
            names = ", ".join(cities[i] for i in order[:-1]) + " and " + cities[order[-1]]
            q["asked"] = [(f"What are the special magic {noun}s for {names} mentioned in the text?", f"The special magic {noun}s for {names} mentioned in the text are: ", ", ".join(values[i] for i in order))]
        else:
            order = r.sample(range(n), n)
            bare = [bool(q["outro"]) if finish else r.random() < 0.5 for _ in order]
            q["asked"] = [(f"What is the special magic {noun} for {cities[i]} mentioned in the text?", "" if b else f"The special magic {noun} for {cities[i]} mentioned in the text is: ", values[i]) for i, b in zip(order, bare)]
        return q

    def copies(self, r, length, finish):
        """No question: lines of words, said twice."""
        pool = self.distinct(r, r.randint(8, 40), self.word if r.random() < 0.7 else self.number)
        lines = [" ".join(r.choice(pool) for _ in range(r.randint(4, 12))) for _ in range(r.randint(1, max(1, length // 60)))]
        return {"intro": "", "outro": "", "needles": [f"Note: {s}." for s in lines], "asked": [("", "Note: " + s.split(" ")[0] + " ", s.split(" ", 1)[1]) for s in r.sample(lines, len(lines))]}

    def sample(self, r, length, finish):
        """One sample of at most length tokens: ids and which of them are asked for."""
        while True:
            q = r.choices((self.passkeys, self.magic, self.copies), (45, 45, 10))[0](r, length, finish)
            brief = r.random() < (0.8 if length <= 256 else 0.2)
            parts = []
            for i, (question, begin, answer) in enumerate(q["asked"]):
                if question:
                    head = question if i == 0 and not brief else "\n\nQuestion: " + question
                    parts.append((head + "\nAnswer: " + begin, answer))
                else:
                    parts.append(("\n\n" + begin, answer))
            before = after = ""
            if q["intro"] and not brief:
                before, after = q["intro"], "\n\nThe text ends here." + (" " + q["outro"] if q["outro"] else "") + "\n\n"
            frame = len(self.tokenizer.encode(before + "".join(q["needles"]) + after + "".join(a + b for a, b in parts)).ids)
            room = length - frame - 4 - 2 * len(q["needles"])
            if room >= 12:
                break
        if r.random() < 0.3:
            room = max(12, int(room * r.random()))
        at, hay = r.randrange(len(self.sentences)), []
        while True:
            i = at % len(self.sentences)
            if self.lengths[i] > room:
                break
            room -= self.lengths[i]
            hay.append(self.sentences[i].strip(" ") if not hay else self.sentences[i])
            at += 1
        where = sorted(r.randint(0, len(hay)) for _ in q["needles"])
        needles = q["needles"] if q.get("ordered") else r.sample(q["needles"], len(q["needles"]))
        text = before
        for i in range(len(hay) + 1):
            for w, needle in zip(where, needles):
                if w == i:
                    text += needle + "\n\n" if text == "" or text.endswith("\n") else " " + needle
            if i < len(hay):
                s = hay[i]
                text += s if text == "" or not text.endswith("\n") else s.strip(" ")
        text = text.rstrip("\n") + after
        spans = []
        for head, answer in parts:
            text += head
            # At the end how an answer begins is asked for too: the space before it, not the words of a sentence.
            spans.append((len(text) - int(finish and text.endswith(" ")), len(text) + len(answer)))
            text += answer
        e = self.tokenizer.encode(text)
        ids, asked = [0] + e.ids, [False]
        k = 0
        for a, b in e.offsets:
            while k < len(spans) and a >= spans[k][1]:
                k += 1
            asked.append(k < len(spans) and b > spans[k][0] and a < spans[k][1])
        ids, asked = ids[:length], asked[:length]
        return ids, asked

    def batch(self, r, count, length, finish=False):
        ids = torch.zeros(count, length, dtype=torch.long)
        kind = torch.zeros(count, length)  # 0 nothing, 1 text, 2 asked
        for i in range(count):
            s, asked = self.sample(r, length, finish)
            ids[i, : len(s)] = torch.tensor(s)
            kind[i, : len(s)] = 1 + torch.tensor(asked, dtype=torch.float)
            if len(s) < length:
                kind[i, len(s)] = 1  # the end of the text
        return ids, kind


# ---- model ----


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, q, kv, f = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"], c["intermediate_size"]
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = linear(d, q), linear(d, kv), linear(d, kv), linear(q, d)
        self.gate_proj, self.up_proj, self.down_proj = linear(d, f), linear(d, f), linear(f, d)
        self.norm1, self.norm2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.c = c

    def forward(self, x, cos, sin, masks, reach):
        b, t, d = x.shape
        n, kv, e, eps = self.c["num_attention_heads"], self.c["num_key_value_heads"], self.c["head_dim"], self.c["rms_norm_eps"]
        h = F.rms_norm(x, (d,), self.norm1, eps)
        heads = lambda y, n: y.view(b, t, n, e).transpose(1, 2)
        turn = lambda y: y * cos + torch.cat((-y[..., e // 2 :], y[..., : e // 2]), -1) * sin
        q, k = turn(heads(self.q_proj(h), n)) * e**-0.5, turn(heads(self.k_proj(h), kv))
        v = heads(self.v_proj(h), kv)
        k, v = k.repeat_interleave(n // kv, 1), v.repeat_interleave(n // kv, 1)
        x = x + self.o_proj(attention(q, k, v, masks, reach).transpose(1, 2).reshape(b, t, n * e))
        h = F.rms_norm(x, (d,), self.norm2, eps)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def attention(q, k, v, masks, reach, chunk=128):
    """Causal attention in chunks of queries: twice as fast as torch's own for short sequences on a CPU.

    reach, unless None, gets the mean attention of each head, from the last queries, on what a streaming cache does not have.
    """
    out, t = [], q.shape[-2]
    for i in range(0, t, chunk):
        p = torch.softmax(q[..., i : i + chunk, :] @ k[..., : i + chunk, :].transpose(-1, -2) + masks[i : i + chunk, : i + chunk], -1)
        out.append(p @ v[..., : i + chunk, :])
        if reach is not None and i >= t - 2 * chunk and i + chunk > SINK + RECENT:
            old = torch.ones(p.shape[-2:], dtype=p.dtype).tril(i - RECENT)
            old[:, :SINK] = 0
            reach.append((p * old).sum(-1).float().mean((0, 2)))
    return torch.cat(out, -2)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(c["hidden_size"]))
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)

    def hidden(self, ids, dtype=torch.float32, reach=None):
        t, e = ids.shape[1], self.c["head_dim"]
        angle = torch.outer(torch.arange(t).float(), self.c["rope_theta"] ** (-torch.arange(0, e, 2).float() / e)).repeat(1, 2)
        masks = torch.full((t, t), -1e4, dtype=dtype).triu(1)
        x = self.embed(ids)
        for b in self.blocks:
            x = b(x, angle.cos().to(dtype), angle.sin().to(dtype), masks, reach)
        return F.rms_norm(x, (x.shape[-1],), self.norm, self.c["rms_norm_eps"])

    def logits(self, h):
        return F.linear(h, self.embed.weight)

    def named(self):
        """The tensors by their names in a Hugging Face folder."""
        out = {"model.embed_tokens.weight": self.embed.weight, "model.norm.weight": self.norm}
        for i, b in enumerate(self.blocks):
            p = f"model.layers.{i}."
            for n in "qkvo":
                out[p + f"self_attn.{n}_proj.weight"] = getattr(b, n + "_proj").weight
            for n in ("gate", "up", "down"):
                out[p + f"mlp.{n}_proj.weight"] = getattr(b, n + "_proj").weight
            out[p + "input_layernorm.weight"], out[p + "post_attention_layernorm.weight"] = b.norm1, b.norm2
        return {k: v.detach() for k, v in out.items()}


# ---- training ----


def exact(model, batches, dtype):
    """The share of answers of which every token is the most likely one, given those before it."""
    right = n = 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        for ids, kind in batches:
            hit = model.logits(model.hidden(ids, dtype))[:, :-1].argmax(-1) == ids[:, 1:]
            for row, asked in zip(hit, kind[:, 1:] == 2):
                # runs of asked tokens are answers
                edges = torch.diff(asked.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
                for a, b in zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()):
                    right += bool(row[a:b].all())
                    n += 1
    return right / max(n, 1), n


def dataset_batches(out, name, folder, size=8, **flags):
    """A dataset of kvprofile in batches; the last answer of each sample is asked for."""
    file = out / f"{name}.parquet"
    kvprofile("datasets", "build", folder, *[x for k, v in flags.items() for x in ("--" + k, v)], "-o", file, "--force")
    samples = []
    for row in rows_of(file):
        kind = torch.ones(len(row["tokens"]))
        last = [s for s in row["spans"] if s["kind"] == "answer"][-1]
        kind[last["start"] : last["end"]] = 2
        samples.append((torch.tensor(row["tokens"]), kind))
    file.unlink()
    return [tuple(torch.stack(x) for x in zip(*samples[i : i + size])) for i in range(0, len(samples), size)]


def make_tokenizer(text, vocab, seed):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    r = random.Random(seed)
    numbers = [str(r.randint(10**6, 10**7 - 1)) for _ in range(20000)]
    frames = ["Read the text below with care. Some special magic numbers are hidden in it. Remember them; you will be asked for them afterwards.\n\n", "Read the text below with care. Passkeys are hidden in it, each a sequence of words. Remember every one of them; you will be asked for them afterwards.\n\n",
              "\n\nThe text ends here. Answer with the words of the passkey and nothing else.\n\n", "\n\nThe text ends here. Answer with the number and nothing else.\n\nQuestion: What is the special magic number for\nAnswer: ",
              "The special magic number for X is: The special magic numbers for X mentioned in the text are: " + "".join(f"Remember the {o} passkey: What is the {o} passkey?" for o in ORDINALS)] * 300
    t.train_from_iterator([text[i : i + 100000] for i in range(0, min(len(text), 4_000_000), 100000)] + frames + [" ".join(numbers)],
                          trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return t


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", type=pathlib.Path)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--every", type=int, default=100, help="steps between lines of the log")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    out = a.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = open(out / "training.log", "a")

    def say(*parts):
        line = " ".join(map(str, parts))
        print(line, flush=True)
        print(line, file=log, flush=True)

    text = prose(out, a.seed)
    folder = out / "kvprofile-default"
    if (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:
        tokenizer = make_tokenizer(text, CONFIG["vocab_size"], a.seed)
        write_model_folder(folder, tokenizer)
        random_weights(folder)
    tasks = Tasks(text, tokenizer)
    torch.manual_seed(a.seed)
    model = Llama(CONFIG)
    main_steps = sum(s for _, _, s in CURRICULUM)
    total = main_steps + FINISH[2]
    stages, end = [], 0
    for n, b, s in [*CURRICULUM, FINISH]:
        stages.append((n, b, end := end + s))
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    opts = [torch.optim.Muon(matrices, lr=RATE, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"), torch.optim.AdamW(others, lr=0.3 * RATE, betas=(0.9, 0.98), weight_decay=0.0)]
    base = [o.param_groups[0]["lr"] for o in opts]
    state, start = out / "checkpoint.pt", 0
    if state.exists():
        c = torch.load(state)
        model.load_state_dict(c["model"])
        for o, s in zip(opts, c["optimizers"]):
            o.load_state_dict(s)
        start = c["step"]
        say(f"resumed at step {start}")
    else:
        say(f"torch {torch.__version__}, {sum(p.numel() for p in model.parameters())} parameters, {len(text)} bytes of prose, {len(tasks.sentences)} sentences of {sum(tasks.lengths) / len(tasks.lengths):.1f} tokens, {len(tasks.vocabulary)} words")
    began, seen, sums = time.time(), 0, [0.0, 0.0, 0]
    for step in range(start, total):
        finish = step >= main_steps
        length, count = next((n, b) for n, b, s in stages if step < s)
        ids, kind = tasks.batch(random.Random(f"{a.seed}/{step}"), count, length, finish)
        if finish:
            rate = 0.1 * (total - step) / FINISH[2]
        else:
            rate = min(1, (step + 1) / 100) * (1 if step < main_steps * 0.6 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - main_steps * 0.6) / (main_steps * 0.4))))
        for o, lr in zip(opts, base):
            o.param_groups[0]["lr"] = lr * rate
        with torch.autocast("cpu", torch.bfloat16):
            reach = [] if step >= REACH_FROM else None
            h = model.hidden(ids, torch.bfloat16, reach)[:, :-1].reshape(-1, CONFIG["hidden_size"])
            target, k = ids[:, 1:].reshape(-1), kind[:, 1:].reshape(-1)
            # A sixth of the text is enough to learn it from; all of the answers are wanted.
            keep = (k == 2) | (k == 1) & (torch.arange(len(k)) * 7919 % 6 == step % 6)
            loss = F.cross_entropy(model.logits(h[keep]).float(), target[keep], reduction="none")
        asked = k[keep] == 2
        answers, rest = loss[asked].mean(), loss[~asked].mean()
        cost = torch.zeros(())
        if reach:
            groups = torch.stack(reach).view(CONFIG["num_hidden_layers"], -1, CONFIG["num_key_value_heads"], CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]).mean((1, 3))
            # Steep near zero, so that a head is given up rather than every head used less.
            cost = REACH_COST * min(1, (step - REACH_FROM) / 300) * (groups / (groups + 0.02) + 3 * groups).sum()
        (answers + 0.3 * rest + cost).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in opts:
            o.step()
            o.zero_grad()
        seen += ids.numel()
        sums = [sums[0] + answers.item(), sums[1] + rest.item(), sums[2] + 1]
        if (step + 1) % a.every == 0 or step + 1 == total:
            held = [tasks.batch(random.Random(f"held-out/{step}/{i}"), 8, length, finish) for i in range(4)]
            share, n = exact(model, held, torch.bfloat16)
            line = f"step {step + 1} length {length} answers {sums[0] / sums[2]:.3f} text {sums[1] / sums[2]:.3f} exact {share:.3f} of {n}"
            if reach:
                line += " reach % " + " ".join("/".join(f"{100 * x:.0f}" for x in row) for row in groups.tolist())
            say(line, f"({seen / (time.time() - began):.0f} tokens/s)")
            sums = [0.0, 0.0, 0]
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == total:
            torch.save({"model": model.state_dict(), "optimizers": [o.state_dict() for o in opts], "step": step + 1}, out / "checkpoint.tmp")
            os.replace(out / "checkpoint.tmp", state)
    save_file({k: v.to(torch.bfloat16).contiguous() for k, v in model.named().items()}, str(folder / "model.safetensors"), metadata={"format": "pt"})
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16).float()
    for purpose in ("search", "certification"):
        for name, flags in {
            "needles": {"task": "needles", "lengths": CONFIG["max_position_embeddings"], "depths": "0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1", "repeats": 14},
            "passkeys": {"task": "passkeys", "lengths": CONFIG["max_position_embeddings"], "count": 152, "passkeys": 4, "words": 8},
            "multi-key": {"task": "multi-key", "lengths": CONFIG["max_position_embeddings"], "count": 152},
        }.items():
            share, n = exact(model, dataset_batches(out, f"{purpose}-{name}", folder, purpose=purpose, **flags), torch.float32)
            say(f"{purpose}: {name}: exact {share:.4f} of {n}")


if __name__ == "__main__":
    main()
