"""Presses of kvpress from a folder that `kvprofile export PLAN --to kvpress -o FOLDER` wrote.

    with duo_press("FOLDER")(model):
        model.generate(...)

Needs kvpress (seen to work with 0.5.5). DuoAttentionPress knows the patterns of six models by name and loads them from
the network; here it gets those of the folder.
"""

import json
from pathlib import Path

import numpy
from kvpress import DuoAttentionPress, PerLayerCompressionPress, SnapKVPress


def duo_press(folder):
    """Full and streaming heads, as the plan has them."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    scores = numpy.loadtxt(folder / "full_attention_heads.tsv", delimiter="\t", ndmin=2)

    class PlanPress(DuoAttentionPress):
        @staticmethod
        def load_attention_pattern(model):
            return config["sink_size"], config["recent_size"], scores

    return PlanPress(head_compression_ratio=json.loads((folder / "kvpress.json").read_text())["head_compression_ratio"])


def layer_press(folder):
    """In place of that: a share of the tokens per layer, chosen by SnapKV's votes, for prompts of the length in the file."""
    c = json.loads((Path(folder) / "kvpress.json").read_text())
    press = SnapKVPress(window_size=c["press"]["window_size"], kernel_size=c["press"]["kernel_size"])
    return PerLayerCompressionPress(press=press, compression_ratios=c["compression_ratios"])
