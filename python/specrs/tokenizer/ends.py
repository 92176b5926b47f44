"""Finds the token ids that end a text."""

from __future__ import annotations

from collections.abc import Sequence

from specrs.tokenizer.text import Tokenizer


def end_ids(checkpoint: Sequence[int], tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text: those of the `checkpoint`'s configuration, then the tokenizer's own end token, as
    in vLLM.

    An end token of the tokenizer at or above `vocab_size`, which the model cannot emit, is left out.
    """
    own = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(dict.fromkeys([*checkpoint, *([own] if type(own) is int and 0 <= own < vocab_size else [])]))
