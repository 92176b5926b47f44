"""The tokens that a target and a draft model of another tokenizer share. Reads no files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """Tokens that both tokenizers know, and what the draft is fed for the others."""

    pairs: tuple[tuple[int, int], ...]
    """(the target's id, the draft's id); each id is in at most one of them."""
    unknown: int
    """The draft's id for tokens that it does not know."""
    vocab_size: int
    """Ids of the target."""
