"""A checkpoint and its tokenizer as OpenVINO's IR, by optimum-intel. Runs in the environment of OpenVINO.

    python -m peers.prepare_openvino MODEL OUT

Weights are not compressed to INT8. The pipeline does not start without a tokenizer, though prompts are ids.
"""

from __future__ import annotations

import sys
from pathlib import Path

import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer


def convert(model: Path, out: Path) -> None:
    """Write the folder `out`."""
    OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(out)
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    openvino.save_model(encoder, out / "openvino_tokenizer.xml")
    openvino.save_model(decoder, out / "openvino_detokenizer.xml")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
