"""What one request may ask for, under vLLM's names and defaults. Values are checked here; nothing is sampled here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrs.errors import (
    InvalidRequestError,
    UnsupportedRequestError,
    check_bool,
    check_int,
    check_number,
    check_text,
    invalid,
    unknown_key,
)

MAX_SPECULATIVE_TOKENS = 16
MAX_STOP_TOKEN_IDS = 64
"""Stop ids of one request in all, the checkpoint's eos ids included: each row of device state holds this many."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_N = 128
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request may ask for. Immutable; `replace` makes a changed copy. Every value is checked at construction.

    Names and defaults are vLLM's. `num_speculative_tokens` is this project's own: how many tokens to draft for this
    request in each iteration, 0 to the engine's number; None is the engine's number.

    Stop ids (`stop_token_ids` and, unless `ignore_eos`, the checkpoint's eos ids) end a request once `min_tokens`
    tokens are out; the id stays in `token_ids`, its text is left out unless `include_stop_str_in_output`. Stop strings
    end it at the token that completes one; the text is cut where the string starts, or after it with
    `include_stop_str_in_output`. At most 64 stop ids (eos included) and 64 stop strings of 1024 characters.
    `max_tokens=None` means as many as the context holds.

    Parameters that are not implemented yet keep their default; another value is refused by name when the request is
    added (`reject_unimplemented`).

    Raises `InvalidRequestError` naming field, value and what is allowed.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    extra_args: Mapping[str, Any] | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        error = InvalidRequestError
        checked: dict[str, object] = {
            "n": check_int(error, "n", self.n, 1, MAX_N),
            "presence_penalty": check_number(error, "presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": check_number(error, "frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": check_number(
                error, "repetition_penalty", self.repetition_penalty, 0.0, open_low=True
            ),
            "temperature": check_number(error, "temperature", self.temperature, 0.0),
            "top_p": check_number(error, "top_p", self.top_p, 0.0, 1.0, open_low=True),
            # -1 is the older spelling of "all tokens"
            "top_k": max(0, check_int(error, "top_k", self.top_k, -1)),
            "min_p": check_number(error, "min_p", self.min_p, 0.0, 1.0),
            "seed": _optional_int("seed", self.seed, -_INT64_MAX - 1, _INT64_MAX),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "max_tokens": _optional_int("max_tokens", self.max_tokens, 1),
            "min_tokens": check_int(error, "min_tokens", self.min_tokens, 0),
            "logprobs": _optional_int("logprobs", self.logprobs, -1),
            "prompt_logprobs": _optional_int("prompt_logprobs", self.prompt_logprobs, -1),
            "num_speculative_tokens": _optional_int(
                "num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS
            ),
        }
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            check_bool(error, name, getattr(self, name))
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid(error, "min_tokens", self.min_tokens, f"must be at most max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise invalid(error, "stop", self.stop, "needs detokenize=True: stop strings are found in text")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if None."""
        return _stop_strings(self.stop)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with `changes`, checked again."""
        for name in changes:
            if name not in FIELDS:
                raise unknown_key(InvalidRequestError, "SamplingParams", name, FIELDS)
        return dataclasses.replace(self, **changes)


FIELDS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
"""Every field of `SamplingParams` with its default."""


def _optional_int(field: str, value: object, low: int, high: int | None = None) -> int | None:
    return None if value is None else check_int(InvalidRequestError, field, value, low, high, also=", or None")


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence):
        raise invalid(InvalidRequestError, "stop", value, "must be a string, a list of strings, or None")
    if len(value) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop: {len(value)} strings, allowed are at most {MAX_STOP_STRINGS}")
    strings = tuple(check_text(InvalidRequestError, f"stop[{i}]", item) for i, item in enumerate(value))
    for i, item in enumerate(strings):
        if len(item) > MAX_STOP_STRING_LENGTH:
            raise InvalidRequestError(
                f"stop[{i}]: {len(item)} characters, allowed are at most {MAX_STOP_STRING_LENGTH}"
            )
    return strings


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
        raise invalid(InvalidRequestError, "stop_token_ids", value, "must be a list of token ids, or None")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"stop_token_ids: {len(value)} ids, allowed are at most {MAX_STOP_TOKEN_IDS}")
    return tuple(check_int(InvalidRequestError, f"stop_token_ids[{i}]", item, 0) for i, item in enumerate(value))


def _nothing(value: object) -> bool:
    return value is None or (isinstance(value, (Mapping, Sequence)) and len(value) == 0)


_NOT_YET: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda v: v == 1, "1"),
    "presence_penalty": (lambda v: v == 0.0, "0.0"),
    "frequency_penalty": (lambda v: v == 0.0, "0.0"),
    "repetition_penalty": (lambda v: v == 1.0, "1.0"),
    "temperature": (lambda v: v == 0.0, "0.0 (greedy)"),
    "top_p": (lambda v: v == 1.0, "1.0"),
    "top_k": (lambda v: v == 0, "0 or -1 (all tokens)"),
    "min_p": (lambda v: v == 0.0, "0.0"),
    "logprobs": (lambda v: v is None, "None"),
    "prompt_logprobs": (lambda v: v is None, "None"),
    "spaces_between_special_tokens": (lambda v: v is True, "True"),
    "structured_outputs": (_nothing, "None"),
    "logit_bias": (_nothing, "None"),
    "allowed_token_ids": (_nothing, "None"),
    "bad_words": (_nothing, "None"),
    "extra_args": (_nothing, "None"),
}


def reject_unimplemented(params: SamplingParams) -> None:
    """Refuse, by name, values that are valid but that this version does not implement.

    Raises `UnsupportedRequestError`. The table shrinks as sampling arrives; nothing else knows what is missing.
    """
    for name, (implemented, allowed) in _NOT_YET.items():
        value = getattr(params, name)
        if not implemented(value):
            raise invalid(UnsupportedRequestError, name, value, f"not implemented yet; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What an engine can take, for `validate_request`.

    `vocab_size`: ids a prompt may hold are `[0, vocab_size)`; the smaller one of target and draft, which may be padded
    differently. `num_speculative_tokens`: the engine's K, 0 without a draft. `eos_token_ids`: of the checkpoint.
    """

    max_model_len: int
    vocab_size: int
    num_speculative_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """What a valid request comes to: `limit` tokens (prompt and output) at most, K drafts, and its stop ids, sorted."""

    limit: int
    num_speculative_tokens: int
    stop_token_ids: tuple[int, ...]


def validate_request(prompt_token_ids: Sequence[int], params: SamplingParams, limits: RequestLimits) -> RequestBounds:
    """Check a request against an engine, and return the bounds that follow. Changes nothing.

    Raises `InvalidRequestError` (or its subclass `UnsupportedRequestError`) naming field, value and what is allowed.
    """
    error = InvalidRequestError
    reject_unimplemented(params)
    _check_token_ids("prompt_token_ids", prompt_token_ids, limits.vocab_size)
    length, longest = len(prompt_token_ids), limits.max_model_len - 1
    if length == 0:
        raise invalid(error, "prompt", [], "must have at least one token")
    if length > longest:
        raise error(
            f"prompt: {length} tokens, allowed are at most {longest} "
            f"(max_model_len={limits.max_model_len} less one token to generate)"
        )
    if params.stop_token_ids:
        _check_token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else limits.eos_token_ids)}
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise error(
            f"stop_token_ids: {len(stop_ids)} ids with the checkpoint's eos ids, "
            f"allowed are at most {MAX_STOP_TOKEN_IDS} in all"
        )
    drafts = params.num_speculative_tokens
    if drafts is not None and drafts > limits.num_speculative_tokens:
        raise invalid(
            error,
            "num_speculative_tokens",
            drafts,
            f"must be at most {limits.num_speculative_tokens}, the engine's number",
        )
    return RequestBounds(
        limit=min(limits.max_model_len, length + (params.max_tokens or limits.max_model_len)),
        num_speculative_tokens=limits.num_speculative_tokens if drafts is None else drafts,
        stop_token_ids=tuple(sorted(stop_ids)),
    )


def _check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Every id an integer in `[0, vocab_size)`; a bad one is named with its index. A bool is not an id."""
    if {*map(type, ids)} <= {int} and (len(ids) == 0 or (min(ids) >= 0 and max(ids) < vocab_size)):
        return
    for i, item in enumerate(ids):
        check_int(InvalidRequestError, f"{field}[{i}]", item, 0, vocab_size - 1, also=", an id of the vocabulary")
