"""Converts prompts, in the forms that users write, to token ids. Knows no engine and checks no limits."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

from specrs.errors import InvalidRequestError, UnsupportedRequestError, check_int, invalid_request, short, unknown_key
from specrs.tokenizer import Tokenizer


class PromptDict(TypedDict, total=False):
    """A prompt with options: `prompt` (text) or `prompt_token_ids`, and a `cache_salt`.

    If both text and ids are given, the ids count. Requests share cached prefixes only if they have the same salt.
    """

    prompt: str
    prompt_token_ids: Sequence[int]
    cache_salt: str


PromptType: TypeAlias = str | PromptDict | Sequence[int]
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_ALLOWED = 'must be a string, {"prompt": ...}, {"prompt_token_ids": [...]}, or a list of token ids'


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt: its ids, and its text if it was given as text."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str = ""


def is_one_prompt(prompts: object) -> bool:
    """Return True if `prompts` is one prompt rather than a list of them. A list of ids is one prompt; an empty list is
    none. Raises `InvalidRequestError` for anything but a string, dictionary or sequence."""
    if isinstance(prompts, (str, Mapping)):
        return True
    if not isinstance(prompts, Sequence):
        raise invalid_request("prompts", prompts, f"{_ALLOWED}, or a list of these")
    return len(prompts) > 0 and all(isinstance(item, numbers.Integral) for item in prompts)


def read_prompt(prompt: PromptType, tokenizer: Tokenizer | None, max_tokens: int | None = None) -> Prompt:
    """Tokenize one prompt. Raises `InvalidRequestError` if it has no known form, and for text that is far longer than
    `max_tokens`."""
    if isinstance(prompt, str):
        return Prompt(_encode(prompt, tokenizer, max_tokens), prompt)
    if isinstance(prompt, Mapping):
        for key in prompt:
            if key not in _KEYS:
                raise unknown_key(InvalidRequestError, "prompt", key, _KEYS)
        salt = prompt.get("cache_salt", "")
        if not isinstance(salt, str):
            raise invalid_request("prompt['cache_salt']", salt, "must be a string")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is None and text is None:
            raise invalid_request("prompt", dict(prompt), _ALLOWED)
        if ids is None:
            return Prompt(_encode(text, tokenizer, max_tokens), text, salt)
        if text is not None and not isinstance(text, str):
            raise invalid_request("prompt['prompt']", text, "must be a string")
        return Prompt(_token_ids(ids), text, salt)
    if isinstance(prompt, Sequence):
        return Prompt(_token_ids(prompt))
    raise invalid_request("prompt", prompt, _ALLOWED)


def prompt_text(prompt: object) -> str | None:
    """Return the text of a prompt that may be bad, for the output that reports it; None if it has no text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _encode(text: object, tokenizer: Tokenizer | None, max_tokens: int | None) -> list[int]:
    if not isinstance(text, str):
        raise invalid_request("prompt", text, _ALLOWED)
    if tokenizer is None:
        raise UnsupportedRequestError(
            f"prompt={short(text)}: text needs a tokenizer; with skip_tokenizer_init=True pass token ids"
        )
    return tokenizer.encode(text, max_tokens=max_tokens)


def _token_ids(ids: object) -> list[int]:
    # arrays and tensors bring their own conversion
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise invalid_request("prompt_token_ids", ids, "must be a list of token ids")
    if {*map(type, values)} <= {int}:
        return list(values)
    return [check_int(InvalidRequestError, f"prompt_token_ids[{i}]", value, 0) for i, value in enumerate(values)]
