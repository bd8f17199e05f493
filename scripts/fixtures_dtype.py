"""Writes internal/dtype/testdata/blocks.json: random blocks of every format and their values by the PyPI package gguf.

Run: python scripts/fixtures_dtype.py   (needs numpy, gguf)
"""

import json
import pathlib

import gguf
import numpy as np
from gguf.quants import dequantize

SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
rng = np.random.default_rng(1)
out = {}
for name in ["F32", "F16", "BF16", *SCALES]:
    kind = gguf.GGMLQuantizationType[name]
    length, size = gguf.GGML_QUANT_SIZES[kind]
    if name in SCALES:
        blocks = rng.integers(0, 256, (3, size), dtype=np.uint8)
        for offset in SCALES[name]:  # finite scales, one of them subnormal
            blocks[:, offset : offset + 2] = np.array([0.37, -1.9e-3, 3e-6], np.float16).view(np.uint8).reshape(3, 2)
        values = dequantize(blocks, kind)
    else:
        # Every sign and exponent but infinities and NaN.
        bits = rng.integers(0, 1 << 16, 64, dtype=np.uint16)
        if name == "F16":
            bits = bits[(bits >> 10 & 31) != 31]
            values = bits.view(np.float16).astype(np.float32)
        elif name == "BF16":
            bits = bits[(bits >> 7 & 255) != 255]
            values = (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            values = bits.astype(np.float32) * np.float32(-0.1)
            bits = values
        blocks = bits
    out[name] = {"blocks": blocks.tobytes().hex(), "values": np.ascontiguousarray(values, np.float32).tobytes().hex()}
path = pathlib.Path(__file__).parent.parent / "internal/dtype/testdata/blocks.json"
path.write_text(json.dumps(out, indent=1) + "\n")
