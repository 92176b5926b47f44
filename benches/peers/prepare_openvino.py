"""Converts a checkpoint and its tokenizer to OpenVINO's IR by optimum-intel. Runs in the environment of OpenVINO.

    python -m peers.prepare_openvino MODEL OUT [int4]

Weights are not compressed, or with `int4` to OpenVINO's INT4 by groups of 128 inputs (64 if 128 does not divide them).
The pipeline does not start without a tokenizer, though prompts are ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from transformers import AutoTokenizer


def convert(model: Path, out: Path, *, int4: bool) -> None:
    """Convert the checkpoint `model` to OpenVINO's format in the folder `out`, with `int4` to 4-bit weights."""
    size = json.loads((model / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    quantized = OVWeightQuantizationConfig(bits=4, sym=True, group_size=64 if size % 128 else 128) if int4 else None
    options = {"quantization_config": quantized} if int4 else {"load_in_8bit": False}
    OVModelForCausalLM.from_pretrained(model, export=True, compile=False, **options).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(out)
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    openvino.save_model(encoder, out / "openvino_tokenizer.xml")
    openvino.save_model(decoder, out / "openvino_detokenizer.xml")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), int4=sys.argv[3:] == ["int4"])
