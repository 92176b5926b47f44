"""Log probabilities that a step reports with its tokens. Chooses no tokens and formats no outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from specrs.backends.cuda.row_state import RowState
from specrs.backends.cuda.sampling.sampling_state import SamplingState, SequenceSampling
from specrs.backends.cuda.slots import TensorSlot
from specrs.backends.ring import Header
from specrs.core import LOGPROBS_ALL, LOGPROBS_NONE
from specrs.transfer import to_host
from specrs.verify.logprobs import LogprobsMode, logprob_values, token_logprobs
from specrs.verify.token_logprobs import TokenLogprobs

_ROWS_AT_ONCE = 256
"""Maximum number of rows whose logits or log probabilities exist at the same time. They take about 40 bytes per row and
token of the vocabulary: 1.6 GB for 151,936 tokens, where 1,536 rows would take six times that."""


def sequence_logprobs(
    mode: str, sequences: Sequence[int], logits: Tensor, adjusted: Tensor, tokens: Tensor, sampling: SequenceSampling
) -> dict[int, TokenLogprobs]:
    """Return the log probabilities of each sequence's W tokens, by its index in the step. Columns that were not emitted
    are meaningless.

    Args:
        mode: value of the option `logprobs_mode`.
        sequences: index in the step of each of the B sequences that were verified.
        logits: raw logits, `[N, V]`.
        adjusted: logits after masks and penalties, `[N, V]`.
        tokens: `[B, W]` int64.
        sampling: adjustments of the sequences; its `num_logprobs` says how many values each wants.

    Returns:
        Values in host memory. On a GPU they are complete when the step's results are.
    """
    assert sampling.num_logprobs is not None
    width, flat = tokens.shape[1], sampling.it.flat
    index, wanted, parts = flat.index.flatten(), tokens.flatten(), []
    for first in range(0, len(index), _ROWS_AT_ONCE):
        rows, own = index[first : first + _ROWS_AT_ONCE], wanted[first : first + _ROWS_AT_ONCE]
        raw = logits[rows]
        processed = raw if mode.startswith("raw") else sampling.filter(adjusted[rows], flat.sequence[rows])
        values = logprob_values(cast(LogprobsMode, mode), raw, processed)
        parts.append(token_logprobs(values, own, sampling.num_logprobs))
    found = _to_host(_joined(parts))
    return {sequence: _narrow(found, i * width, width) for i, sequence in enumerate(sequences)}


def prompt_logprobs(
    slot: TensorSlot,
    header: Header,
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    state: RowState,
    sampling: SamplingState,
) -> None:
    """Append raw log probabilities of the prompt tokens that this step's chunks predict to `slot.prompt_logprobs`.

    The row at position p predicts the prompt's token p + 1. `compute_logits` is the target's LM head.
    """
    chunks = slice(header.num_decode, header.num_decode + header.num_prefill)
    starts = slot.views["prefill_q_start"].tolist()
    for chunk, row in enumerate(slot.views["seq_row"][chunks].tolist()):
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
