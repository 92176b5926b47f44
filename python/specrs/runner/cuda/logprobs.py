"""Log probabilities that a launch reports beside its tokens. Chooses no tokens and formats no outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from specrs.core import LOGPROBS_ALL, LOGPROBS_NONE
from specrs.runner.cuda.row_state import RowState
from specrs.runner.cuda.sampling_state import EntrySampling, SamplingState
from specrs.runner.cuda.slots import TensorSlot
from specrs.runner.ring import Header
from specrs.transfer import to_host
from specrs.verify.logprobs import LogprobsMode, logprob_values, token_logprobs
from specrs.verify.token_logprobs import TokenLogprobs

_ROWS_AT_ONCE = 256
"""Rows whose logits or log probabilities exist at once: with keys and ranks some 40 bytes a token of the vocabulary,
1.6 GB for 151,936 of them, which 1,536 rows of a launch would take six times."""


def entry_logprobs(
    mode: str, entries: Sequence[int], logits: Tensor, adjusted: Tensor, tokens: Tensor, sampling: EntrySampling
) -> dict[int, TokenLogprobs]:
    """By entry of the launch, the values of its W columns of tokens; columns that were not emitted mean nothing.

    Args:
        entries: the launch's entry of each of the B entries that were verified.
        logits: raw, `[N, V]`.
        adjusted: after masks and penalties, `[N, V]`.
        tokens: `[B, W]` int64.
        sampling: with `num_logprobs`.

    Returns:
        Values in host memory; those of a GPU are there when the launch's results are.
    """
    assert sampling.num_logprobs is not None
    width, flat = tokens.shape[1], sampling.it.flat
    index, wanted, parts = flat.index.flatten(), tokens.flatten(), []
    for first in range(0, len(index), _ROWS_AT_ONCE):
        rows, own = index[first : first + _ROWS_AT_ONCE], wanted[first : first + _ROWS_AT_ONCE]
        raw = logits[rows]
        processed = raw if mode.startswith("raw") else sampling.filter(adjusted[rows], flat.entry[rows])
        values = logprob_values(cast(LogprobsMode, mode), raw, processed)
        parts.append(token_logprobs(values, own, sampling.num_logprobs))
    found = _to_host(_joined(parts))
    return {entry: _narrow(found, i * width, width) for i, entry in enumerate(entries)}


def prompt_logprobs(
    slot: TensorSlot,
    header: Header,
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    state: RowState,
    sampling: SamplingState,
) -> None:
    """Raw log probabilities of the prompt tokens that this launch's chunks predict; writes `slot.prompt_logprobs`.

    The row fed at position p gives the value of the prompt's token p + 1. `compute_logits` is the target's LM head.
    """
    chunks = slice(header.num_decode, header.num_decode + header.num_prefill)
    starts = slot.views["prefill_q_start"].tolist()
    for chunk, row in enumerate(slot.views["entry_row"][chunks].tolist()):
        own = sampling.row(row)
        if own.prompt_logprobs == LOGPROBS_NONE:
            continue
        first = int(slot.views["chunk_start"][chunk])
        count = min(starts[chunk + 1] - starts[chunk], own.prompt_len - 1 - first)
        for at in range(0, count, _ROWS_AT_ONCE):
            rows = min(_ROWS_AT_ONCE, count - at)
            logits = compute_logits(hidden[starts[chunk] + at : starts[chunk] + at + rows])
            tokens = state.tokens[row, first + at + 1 : first + at + 1 + rows]
            width = sampling.vocab_size if own.prompt_logprobs == LOGPROBS_ALL else own.prompt_logprobs
            slot.prompt_logprobs.append(
                (own.request_id, first + at + 1, _to_host(token_logprobs(torch.log_softmax(logits, -1), tokens, width)))
            )


def _joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    columns = ([getattr(part, field.name) for part in parts] for field in dataclasses.fields(TokenLogprobs))
    return TokenLogprobs(*(torch.cat(column) for column in columns))


def _to_host(found: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(*(to_host(t) for t in (found.value, found.rank, found.top_ids, found.top_values)))


def _narrow(found: TokenLogprobs, start: int, length: int) -> TokenLogprobs:
    return TokenLogprobs(
        *(t.narrow(0, start, length) for t in (found.value, found.rank, found.top_ids, found.top_values))
    )
