"""Sampling parameters written as the definitions say: one row, float64, loops and sorts. Uses no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Request:
    """Parameters of one request, under the names of `SamplingParams`, with words and ids as token ids."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


def keep_top_k(x: Row, k: int) -> NDArray[np.bool_]:
    """Return a mask of the k largest logits and of all that equal the smallest of them. With k = 0 it keeps all."""
    return np.ones(len(x), dtype=bool) if k == 0 else x >= sorted(x, reverse=True)[min(k, len(x)) - 1]


def keep_top_p(x: Row, p: float, probs: Row) -> NDArray[np.bool_]:
    """Keep the largest logits whose `probs` sum up to at least p of the total, and all logits that equal the smallest
    kept one."""
    if p >= 1.0:
        return np.ones(len(x), dtype=bool)
    total = math.fsum(probs)
    for value in sorted(set(x), reverse=True):
        if math.fsum(probs[x >= value]) >= p * total:
            return x >= value
    raise AssertionError("the whole vocabulary holds less than its share")


def softmax(x: Row) -> Row:
    """Return the softmax in float64, with an exact sum."""
    w = np.exp(x - x.max())
    return np.asarray(w / math.fsum(w))


def adjust(logits: Row, request: Request, prompt: Sequence[int], output: Sequence[int]) -> Row:
    """Apply masks, bias and penalties for the token that follows prompt and output."""
    x = np.array(logits, dtype=np.float64)
    if request.allowed_token_ids is not None:
        for token in range(len(x)):
            if token not in request.allowed_token_ids:
                x[token] = -np.inf
    context = [*prompt, *output]
    for *prefix, last in request.bad_words:
        if context[len(context) - len(prefix) :] == prefix and len(prefix) <= len(context):
            x[last] = -np.inf
    if len(output) < request.min_tokens:
        for token in request.stop_token_ids:
            x[token] = -np.inf
    for token, bias in request.logit_bias:
        x[token] += bias
    for token in set(context):
        x[token] = x[token] / request.repetition_penalty if x[token] > 0 else x[token] * request.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= request.frequency_penalty * count
        x[token] -= request.presence_penalty
    return x


def distribution(logits: Row, request: Request, prompt: Sequence[int], output: Sequence[int]) -> Row:
    """Return the distribution of the token that follows prompt and output, `[V]`; it sums to 1."""
    x = adjust(logits, request, prompt, output)
    if request.temperature == 0.0:
        point = np.zeros(len(x))
        point[int(np.argmax(x))] = 1.0
        return point
    x = x / request.temperature
    p = softmax(x)
    x = np.where(p < request.min_p * p.max(), -np.inf, x)
    x = np.where(keep_top_k(x, request.top_k), x, -np.inf)
    x = np.where(keep_top_p(x, request.top_p, softmax(x)), x, -np.inf)
    return softmax(x)
