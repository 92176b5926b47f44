"""Converts a checkpoint to GGUF by llama.cpp's own converter. Runs in the environment of transformers.

    python -m peers.prepare_gguf LLAMA_CPP MODEL OUT.gguf f32|bf16

Two things differ from a plain conversion. A tokenizer that the converter does not know is taken for GPT-2's: prompts
are ids, so that nothing is tokenized. And no text ends: the end of text is a token that is never generated, because
llama.cpp's `ignore_eos` would take tokens out of the choice, and other engines' greedy ids would differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NEVER = ("\u00c0", "<empty_output>")
"""Tokens that a model never generates: the byte C0 in the alphabet of byte-level BPE, which no UTF-8 text has, and a
token reserved and never trained."""


def never_generated(model: Path) -> int:
    """Return the id of a token that the model does not generate.

    Raises LookupError if its vocabulary has none that is known here.
    """
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    for text in NEVER:
        if text in ids:
            return int(ids[text])
    raise LookupError(f"{model}: vocabulary has none of {NEVER}")


def unrecognized(token: str | bytes | bytearray) -> bytes:
    """Return a token in a spelling that llama.cpp does not take for an end of text: `<|im_end|>` becomes
    `<!im_end|>`."""
    text = token.encode() if isinstance(token, str) else bytes(token)
    return text.replace(b"<|", b"<!", 1) if text.startswith(b"<|") else text


def convert(llama_cpp: Path, model: Path, out: Path, dtype: str) -> None:
    """Convert the checkpoint `model` to the GGUF file `out` with llama.cpp's converter."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import convert_hf_to_gguf
    import gguf
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre
    writer = gguf.GGUFWriter
    add_token_list, add_eos = writer.add_token_list, writer.add_eos_token_id
    never = never_generated(model)

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = get_vocab_base_pre
    writer.add_token_list = lambda self, tokens: add_token_list(self, [unrecognized(token) for token in tokens])
    writer.add_eos_token_id = lambda self, _: add_eos(self, never)
    writer.add_pad_token_id = lambda self, _: None
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outfile", str(out), "--outtype", dtype]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
