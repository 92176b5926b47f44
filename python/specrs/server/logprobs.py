"""Formats log probabilities: of outputs as OpenAI's two endpoints do, and of prompts as vLLM does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specrs.outputs import Logprob

LEAST = -9999.0
"""Value of a log probability of minus infinity, which JSON cannot express. vLLM uses the same value."""

TokenText = Callable[[int], str]
"""Function that returns the text of a single token."""
TokenBytes = Callable[[int], bytes]
"""Function that returns the bytes of a token, which may be a part of a character."""


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob] | None],
    token_text: TokenText,
    offsets: Sequence[int],
    *,
    top: bool,
) -> dict[str, Any]:
    """Return the `logprobs` object of a completion.

    `entries[i]` has the log probabilities at `token_ids[i]`; None if nothing predicts that token. `offsets[i]` is where
    the token begins in the choice's text, in characters. With `top`, the object also has the most likely tokens at each
    position, with the token itself among them.
    """
    texts = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        texts.append(token_text(token_id))
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
        "text_offset": list(offsets),
        "token_logprobs": values,
        "tokens": texts,
        "top_logprobs": tops if top else None,
    }


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob]],
    token_text: TokenText,
    token_bytes: TokenBytes,
    top: int,
) -> dict[str, Any]:
    """Return the `logprobs` object of a chat message, with the `top` most likely tokens at each position."""

    def told(token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": token_text(token_id),
            "logprob": _finite(logprob.logprob),
            "bytes": list(token_bytes(token_id)),
        }

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        likely = sorted((other for other in entry.items()), key=lambda item: item[1].rank or 0)
        content.append(
            {
                **told(token_id, entry[token_id]),
                "top_logprobs": [
                    told(other, logprob) for other, logprob in likely if top == -1 or (logprob.rank or 0) <= top
                ],
            }
        )
    return {"content": content}


def prompt_logprobs(entries: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each prompt token, a dictionary from token ids to log probability, rank and
    text."""
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": _finite(item.logprob), "rank": item.rank, "decoded_token": item.decoded_token}
            for token_id, item in entry.items()
        }
        for entry in entries
    ]


def _finite(value: float) -> float:
    return max(value, LEAST)
