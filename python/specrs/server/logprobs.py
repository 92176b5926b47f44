"""Log probabilities in the forms of OpenAI's two endpoints, and vLLM's of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specrs.outputs import Logprob

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write; vLLM's value."""

TokenText = Callable[[int], str]
"""The text of a token by itself."""


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob] | None],
    token_text: TokenText,
    offset: int,
    *,
    top: bool,
) -> dict[str, Any]:
    """The `logprobs` of a completion. `entries[i]` is told of `token_ids[i]`, None where nothing predicts it.

    `offset`: characters before the first token. `top`: with the most likely tokens at each position; the token itself
    is among them. Offsets count the texts of single tokens.
    """
    texts, offsets = [], []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        text = token_text(token_id)
        texts.append(text)
        offsets.append(offset)
        offset += len(text)
        if entry is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(_finite(entry[token_id].logprob))
        likely: dict[str, float] = {}
        for other, logprob in entry.items():
            # tokens that are part of a character share the text that stands for it; the first is the likelier
            likely.setdefault(token_text(other), _finite(logprob.logprob))
        tops.append(likely)
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": texts,
        "top_logprobs": tops if top else None,
    }


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]], token_text: TokenText, top: int
) -> dict[str, Any]:
    """The `logprobs` of a chat message, with the `top` most likely tokens at each position."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        likely = sorted((other for other in entry.items()), key=lambda item: item[1].rank or 0)
        content.append(
            {
                **_token(token_text(token_id), entry[token_id]),
                "top_logprobs": [
                    _token(token_text(other), logprob)
                    for other, logprob in likely
                    if top == -1 or (logprob.rank or 0) <= top
                ],
            }
        )
    return {"content": content}


def prompt_logprobs(entries: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token, ids to log probability, rank and text."""
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": _finite(item.logprob), "rank": item.rank, "decoded_token": item.decoded_token}
            for token_id, item in entry.items()
        }
        for entry in entries
    ]


def _token(text: str, logprob: Logprob) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob.logprob), "bytes": list(text.encode(errors="replace"))}


def _finite(value: float) -> float:
    return max(value, LEAST)
