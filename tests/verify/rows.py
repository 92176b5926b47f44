"""Builds the tensors that `specrs.verify` takes from requests, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch
from specrs.core import RequestSampling
from specrs.verify.history import TokenCounts, context_rows, count_tokens, pack_bad_words
from specrs.verify.params import SamplingRows, Steps
from specrs.verify.processing import Constraints
from torch import Tensor

from verify.reference import Request

WORDS, LENGTH, STOPS, BIASES = 4, 4, 3, 5


def sampling_rows(requests: Sequence[Request], dtype: torch.dtype = torch.float32) -> tuple[SamplingRows, list[Steps]]:
    """Return one row of parameters per request, and the filter steps each needs."""
    rows = SamplingRows.allocate(len(requests), dtype=dtype)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    steps = [
        rows.write(i, RequestSampling(**{name: getattr(r, name) for name in names})) for i, r in enumerate(requests)
    ]
    return rows, steps


def union(steps: Sequence[Steps]) -> Steps:
    """Return the filter steps that a batch needs."""
    return reduce(or_, steps, Steps())


def constraints(
    requests: Sequence[Request],
    vocab_size: int,
    contexts: Sequence[Sequence[int]],
    num_outputs: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Constraints:
    """Return constraints with all fields, also if no request uses them. Contexts are prompt and output."""
    n = len(requests)
    forbidden = torch.zeros((n, vocab_size), dtype=torch.bool)
    stop_ids = torch.full((n, STOPS), -1)
    bias_ids, bias = torch.zeros((n, BIASES), dtype=torch.int64), torch.zeros((n, BIASES), dtype=dtype)
    tokens = torch.zeros((n, max(map(len, contexts)) + 1), dtype=torch.int64)
    for i, request in enumerate(requests):
        if request.allowed_token_ids is not None:
            forbidden[i] = True
            forbidden[i, list(request.allowed_token_ids)] = False
        stop_ids[i, : len(request.stop_token_ids)] = torch.tensor(request.stop_token_ids, dtype=torch.int64)
        for j, (token, value) in enumerate(request.logit_bias):
            bias_ids[i, j], bias[i, j] = token, value
        tokens[i, : len(contexts[i])] = torch.tensor(list(contexts[i]), dtype=torch.int64)
    return Constraints(
        forbidden=forbidden,
        bad_words=torch.stack([pack_bad_words(r.bad_words, WORDS, LENGTH) for r in requests]),
        context=context_rows(tokens, torch.arange(n), torch.tensor([len(c) for c in contexts]), LENGTH - 1),
        stop_ids=stop_ids,
        stops_forbidden=torch.tensor([m < r.min_tokens for m, r in zip(num_outputs, requests, strict=True)]),
        bias_ids=bias_ids,
        bias=bias,
    )


def token_counts(prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], vocab_size: int) -> TokenCounts:
    """Return token counts, one row per history."""
    texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    width = max(1, *map(len, texts))
    history = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    return count_tokens(history, ids([len(text) for text in texts]), ids([len(p) for p in prompts]), vocab_size)


def ids(tokens: Sequence[int]) -> Tensor:
    """Return ids as `[n]` int64, also for none."""
    return torch.tensor(list(tokens), dtype=torch.int64)
