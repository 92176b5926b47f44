"""The tokens that a target and a draft model of another tokenizer share. Reads no files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """Tokens that the tokenizers of target and draft model share, and a substitute for the others."""

    pairs: tuple[tuple[int, int], ...]
    """(target's id, draft model's id) of each shared token. Each id occurs at most once."""
    unknown: int
    """The draft model's id that stands for tokens that it does not have."""
    vocab_size: int
    """Number of the target's token ids."""
