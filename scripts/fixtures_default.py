"""Writes internal/defaultmodel/testdata/transformers.json: what transformers and the official tokenizers make of the default model.

Run: python scripts/fixtures_default.py   (needs torch, transformers)

For each prompt, in float32: its ids with BOS, the largest logits of its last token, and twelve greedy tokens.
"""

import json
import pathlib
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).parent.parent / "internal/defaultmodel"
torch.set_num_threads(1)


def prompts():
    yield "The"
    yield "Hello, Wörld! 日本語 3.14 and 1,000,000.\n\nAnswer: "
    r = random.Random(1)
    words = "the a old young keeper of lamp river walked to sold under quietly was and never market stone town".split()
    hay = [" ".join(r.choice(words) for _ in range(r.randint(5, 12))).capitalize() + "." for _ in range(62)]
    hay.insert(30, "The special magic number for Rome is: 4072913.")
    hay.insert(60, "The special magic number for Oslo is: 8116354.")
    yield " ".join(hay) + "\n\nThe text ends here.\n\nWhat is the special magic number for Rome mentioned in the text?\nAnswer: The special magic number for Rome mentioned in the text is: "


@torch.no_grad()
def main():
    folder = ROOT / "kvprofile-default"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    out = []
    for text in prompts():
        ids = [tokenizer.bos_token_id] + tokenizer(text, add_special_tokens=False)["input_ids"]
        top = torch.topk(model(torch.tensor([ids])).logits[0, -1].double(), 8)
        # The mask says that BOS is no padding, though both have the id 0.
        greedy = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(ids) :]
        out.append({"text": text, "tokens": ids, "top": [[int(i), round(float(v), 6)] for v, i in zip(*top)], "greedy": greedy.tolist()})
        print(len(ids), "tokens:", repr(tokenizer.decode(greedy)))
    (ROOT / "testdata").mkdir(exist_ok=True)
    (ROOT / "testdata/transformers.json").write_text(json.dumps(out, ensure_ascii=False) + "\n")


main()
