"""Small sentencepiece vocabularies, trained by the library, also as metadata of GGUF files. Holds no tests."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterable
from typing import Any

import sentencepiece

USER_DEFINED = ("<|user|>", "<tool>")
"""Symbols that a vocabulary of `train` has besides its control symbols `<s>` and `</s>`."""


def corpus() -> list[str]:
    """Return lines of words, code and runs of blanks, the same each time."""
    rng = random.Random(0)
    words = re.split(" ", "the cat sat mat on def return for in range import self abab banana naïve 日本 日 é")
    lines = [" ".join(rng.choices(words, k=rng.randrange(3, 12))) for _ in range(300)]
    lines += ["    " * rng.randrange(4) + f"{rng.choice(words)}({rng.choice(words)}):" for _ in range(300)]
    return lines + ["".join(rng.choices("ab ", k=rng.randrange(5, 50))) for _ in range(200)]


def train(lines: Iterable[str], **settings: Any) -> sentencepiece.SentencePieceProcessor:
    """Train a BPE vocabulary on `lines` as Llama's was trained. `settings` override the trainer's."""
    made = io.BytesIO()
    given = {
        "vocab_size": 600,
        "hard_vocab_limit": False,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "user_defined_symbols": list(USER_DEFINED),
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=made, **given | settings)
    return sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())


def metadata_of(spm: sentencepiece.SentencePieceProcessor, **fields: Any) -> dict[str, Any]:
    """Return metadata as llama.cpp's converter writes it. `fields` replace `tokenizer.ggml.` ones; None leaves one
    out."""
    ids = range(spm.get_piece_size())
    kinds = [
        3 if spm.is_control(i) else 2 if spm.is_unknown(i) else 6 if spm.is_byte(i) else 5 if spm.is_unused(i) else 1
        for i in ids
    ]
    for symbol in USER_DEFINED:
        if not spm.is_unknown(spm.piece_to_id(symbol)):
            kinds[spm.piece_to_id(symbol)] = 4
    made = {
        "model": "llama",
        "tokens": [spm.id_to_piece(i) for i in ids],
        "scores": [spm.get_score(i) for i in ids],
        "token_type": kinds,
        "bos_token_id": spm.bos_id(),
        "eos_token_id": spm.eos_id(),
        "unknown_token_id": spm.unk_id(),
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (made | fields).items()}
