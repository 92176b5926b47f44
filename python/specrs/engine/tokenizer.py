"""Loads the tokenizer of an engine, and compares it with the draft model's."""

from __future__ import annotations

from specrs.config import EngineConfig
from specrs.models.errors import OF_DRAFT, about
from specrs.models.loader import check_is_model
from specrs.tokenizer import Tokenizer, check_same_tokenizer


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Load the engine's tokenizer, and compare it with the draft model's if there is one. None with
    `skip_tokenizer_init`.

    Checks first that target and draft are models, because a folder without a model has no tokenizer either.

    Raises `CheckpointError` if a model or tokenizer cannot be read, `TokenizerMismatchError` if the two tokenizers
    differ.
    """
    check_is_model(config.target, revision=config.revision)
    if config.skip_tokenizer_init:
        return None
    own = config.tokenizer is not None
    revision = config.tokenizer_revision or (None if own else config.revision)
    fields = "tokenizer" if own else "model", "tokenizer_revision" if config.tokenizer_revision else "revision"
    with about(*fields):
        tokenizer = Tokenizer(config.tokenizer or config.target, revision)
    speculative, draft = config.speculative_config, config.draft
    if speculative is None or speculative.most_speculative_tokens == 0:
        return tokenizer
    method = speculative.model_method
    if method is None or not method.same_tokenizer:
        return tokenizer
    if draft not in (None, config.target):
        with about(*OF_DRAFT):
            check_is_model(str(draft), revision=speculative.revision)
            theirs = Tokenizer(str(draft), speculative.revision)
        check_same_tokenizer(tokenizer, theirs)
    return tokenizer
