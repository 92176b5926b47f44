"""Checks arguments of transformers' `generate` for a callable `custom_generate`: rejects unsupported ones, and handles
streamers.

Runs no model.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specrs.errors import UnsupportedRequestError, invalid

if TYPE_CHECKING:
    from specrs.engine.request import Request

_IGNORED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "streamer")
"""Arguments that are used here, that `check_arguments` checks, or that change no token."""


def check_arguments(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> None:
    """Raise UnsupportedRequestError for arguments that would change the text and are not implemented.

    `input_ids` is `[B, L]` int64; `model_kwargs` are those that `generate` hands to a decoding loop.
    """
    for name, value in model_kwargs.items():
        if name == "inputs_embeds" and value is not None:
            raise invalid(UnsupportedRequestError, name, _shape(value), "not implemented; pass input_ids instead")
        if name not in _IGNORED and value is not None:
            raise invalid(UnsupportedRequestError, name, _shape(value), "not implemented; leave it out")
    if of_generate("assistant_model") is not None:
        raise invalid(
            UnsupportedRequestError, "assistant_model", "a model", "not implemented; pass draft_model instead"
        )
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        held = f"{cache.get_seq_length()} tokens"
        raise invalid(UnsupportedRequestError, "past_key_values", held, "not implemented; leave it out")
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if positions is not None:
        mask = torch.ones_like(input_ids) if mask is None else mask
        wrong = (positions != mask.long().cumsum(-1) - 1) & mask.bool()
        if bool(wrong.any()):
            allowed = "not implemented; leave it out: positions count the tokens that attention_mask lets through"
            raise invalid(UnsupportedRequestError, "position_ids", _shape(positions), allowed)


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def of_generate(name: str) -> Any:
    """Return the argument `name` of the running call of transformers' `generate`; None if no call is running.

    transformers drops `streamer` and `assistant_model` before it calls `custom_generate`. A dropped
    `TextIteratorStreamer` would never end, so they are looked up in the stack frame of `generate`.
    """
    frame, code = sys._getframe(1), _code_of_generate()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get(name)


@functools.cache
def _code_of_generate() -> CodeType:
    from transformers.generation.utils import GenerationMixin

    code: CodeType = inspect.unwrap(GenerationMixin.generate).__code__
    return code


class TokenStream:
    """Passes new tokens to a streamer of transformers, as its own loop does: for each position a tensor `[B]` int64 on
    the CPU, as soon as every request has a token there or has ended. Requests that have ended get `pad`."""

    def __init__(self, streamer: Any, requests: Sequence[Request], pad: int) -> None:
        """`streamer` has `put` and `end`, as transformers' `BaseStreamer`; None streams nothing."""
        self._streamer, self._requests, self._pad = streamer, requests, pad
        self._sent = 0

    def advance(self) -> None:
        """Pass the tokens of all new complete positions to the streamer."""
        if self._streamer is None:
            return
        outputs = [request.output_token_ids for request in self._requests]
        open_ = [len(ids) for ids, request in zip(outputs, self._requests, strict=True) if not request.finished]
        for position in range(self._sent, min(open_, default=max(map(len, outputs)))):
            column = [ids[position] if position < len(ids) else self._pad for ids in outputs]
            self._streamer.put(torch.tensor(column))
            self._sent = position + 1

    def end(self) -> None:
        """Tell the streamer that all requests have ended."""
        if self._streamer is not None:
            self._streamer.end()
