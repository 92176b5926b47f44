"""Loads an engine with its tokenizer, as `LLM` and `AsyncLLM` do."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from specrs.config import EngineConfig
from specrs.engine.heap import trim_heap
from specrs.engine.tokenizer import load_tokenizer
from specrs.errors import CheckpointError, UnsupportedRequestError
from specrs.models.sentence_transformers import pools_last_token
from specrs.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specrs.engine.engine import Engine  # and numpy


def load_engine(config: EngineConfig) -> tuple[Engine, Tokenizer | None]:
    """Load the tokenizer of `config` and then its models. Return the engine and the tokenizer, which is None with
    `skip_tokenizer_init`.

    Raises what `load_tokenizer` and `build_engine` raise.
    """
    # first, because it is quick and may reject; weights may take minutes
    tokenizer = load_tokenizer(config)
    from specrs.engine.build import build_engine

    engine = build_engine(config)
    if tokenizer is not None and engine.limits.has_lm_head and not _is_embedding_model(config):
        make_decoder(tokenizer)
    trim_heap()
    return engine, tokenizer


def make_decoder(tokenizer: Tokenizer) -> None:
    """Make the decoder of `tokenizer`. Otherwise the first request makes it while the C library still holds the memory
    that loading freed.

    A tokenizer without a decoder is no error here: requests that want text raise it.
    """
    with contextlib.suppress(CheckpointError):
        _ = tokenizer.decoder


def _is_embedding_model(config: EngineConfig) -> bool:
    """Return whether the checkpoint's files say that the target is an embedding model, whose requests want no text."""
    with contextlib.suppress(CheckpointError, UnsupportedRequestError):
        return pools_last_token(config.target, config.revision)
    return False
