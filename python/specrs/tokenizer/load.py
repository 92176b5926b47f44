"""Loads the tokenizer of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specrs.tokenizer.pairs import check_same_tokenizer
from specrs.tokenizer.text import Tokenizer

if TYPE_CHECKING:
    from specrs.config import EngineConfig


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The engine's tokenizer, compared with the draft's where there is one; None with `skip_tokenizer_init`.

    Checks first that target and draft are models, because a folder without a model has no tokenizer either.

    Raises `CheckpointError` if one cannot be read, `TokenizerMismatchError` if the two differ.
    """
    from specrs.models.errors import OF_DRAFT, about
    from specrs.models.loader import check_is_model

    check_is_model(config.target, revision=config.revision)
    if config.skip_tokenizer_init:
        return None
    own = config.tokenizer is not None
    revision = config.tokenizer_revision or (None if own else config.revision)
    fields = "tokenizer" if own else "model", "tokenizer_revision" if config.tokenizer_revision else "revision"
    with about(*fields):
        tokenizer = Tokenizer(config.tokenizer or config.target, revision)
    speculative, draft = config.speculative_config, config.draft
    if speculative is None or speculative.most_speculative_tokens == 0 or speculative.use_heterogeneous_vocab:
        return tokenizer
    if speculative.reads_hidden:  # a head comes without a tokenizer; its ids are checked against the target's
        return tokenizer
    if draft not in (None, config.target):
        with about(*OF_DRAFT):
            check_is_model(str(draft), revision=speculative.revision)
            theirs = Tokenizer(str(draft), speculative.revision)
        check_same_tokenizer(tokenizer, theirs)
    return tokenizer


def end_ids(checkpoint: Sequence[int], tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text: those of the `checkpoint`'s configuration, then the tokenizer's own end, as in vLLM.

    An id of the tokenizer at or above `vocab_size`, which the model cannot emit, is left out.
    """
    own = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(dict.fromkeys([*checkpoint, *([own] if type(own) is int and 0 <= own < vocab_size else [])]))
