"""Log probabilities that a step reports with its tokens. Chooses no tokens and formats no outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

from torch import Tensor

from specrs.backends.cuda.row_state import RowState
from specrs.backends.cuda.sampling.sampling_state import SamplingState, SequenceSampling
from specrs.backends.cuda.slots import TensorSlot
from specrs.backends.ring import Header
from specrs.core import LOGPROBS_ALL, LOGPROBS_NONE
from specrs.transfer import to_host
from specrs.verify.logprobs import LogprobsMode, logprob_values, token_logprobs
from specrs.verify.token_logprobs import TokenLogprobs

RANKED_ROWS = 32
"""Number of rows whose tokens are ranked at the same time."""
_BYTES_PER_RANKED = 64
"""Bytes that ranking takes for each row and token of the vocabulary, if all tokens are reported."""
_PROMPT_ROWS = 256
"""Number of rows of a prompt whose logits exist at the same time."""


def reporting_bytes(rows: int, vocab_size: int) -> int:
    """Return the bytes that log probabilities of a step take on the device. `rows` are the flat rows of verification;
    raw logits of those that a penalty changes are kept until they are reported."""
    return vocab_size * (4 * max(rows, _PROMPT_ROWS) + _BYTES_PER_RANKED * RANKED_ROWS)


def sequence_logprobs(
    mode: str, logits: Tensor, tokens: Tensor, sampling: SequenceSampling
) -> Iterator[tuple[int, TokenLogprobs]]:
    """Yield `(sequence, log probabilities of its W tokens)` for the sequences that want any. Columns that were not
    emitted are meaningless. Other sequences cost nothing.

    Args:
        mode: value of the option `logprobs_mode`.
        logits: `[N, V]`. Raw logits if `mode` is raw, else those after masks and penalties.
        tokens: `[B, W]` int64.
        sampling: adjustments of the sequences; its `logprobs` says how many values each wants.

    Values are in host memory. On a GPU they are complete when the step's results are.
    """
    width, flat = tokens.shape[1], sampling.it.flat
    for part, num_top in _parts(sampling.logprobs, max(1, RANKED_ROWS // width)):
        index = flat.index[part[0] : part[-1] + 1].flatten()
        own = tokens[part[0] : part[-1] + 1].flatten()
        raw = logits[index]
        processed = raw if mode.startswith("raw") else sampling.filter(raw, flat.sequence[index])
        found = _to_host(token_logprobs(logprob_values(cast(LogprobsMode, mode), raw, processed), own, num_top))
        for i, sequence in enumerate(part):
            yield sequence, _narrow(found, i * width, width)


def _parts(wanted: Mapping[int, int], most: int) -> Iterator[tuple[range, int]]:
    """Yield ranges of at most `most` neighbouring sequences that want log probabilities, each with the largest number
    of top tokens of its sequences."""
    sequences = sorted(wanted)
    first = 0
    for i, sequence in enumerate(sequences):
        after = sequences[i + 1] if i + 1 < len(sequences) else None
        if after != sequence + 1 or i + 1 - first == most:
            part = range(sequences[first], sequence + 1)
            yield part, max(wanted[one] for one in part)
            first = i + 1


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
        width = sampling.vocab_size if own.prompt_logprobs == LOGPROBS_ALL else own.prompt_logprobs
        for at in range(0, count, _PROMPT_ROWS):
            rows = min(_PROMPT_ROWS, count - at)
            logits = compute_logits(hidden[starts[chunk] + at : starts[chunk] + at + rows])
            for i in range(0, rows, RANKED_ROWS):
                position = first + at + i + 1
                part = logits[i : i + RANKED_ROWS]
                tokens = state.tokens[row, position : position + len(part)]
                values = token_logprobs(part.log_softmax(dim=-1), tokens, width)
                slot.prompt_logprobs.append((own.request_id, position, _to_host(values)))


def _to_host(found: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(*(to_host(t) for t in (found.value, found.rank, found.top_ids, found.top_values)))


def _narrow(found: TokenLogprobs, start: int, length: int) -> TokenLogprobs:
    return TokenLogprobs(
        *(t.narrow(0, start, length) for t in (found.value, found.rank, found.top_ids, found.top_values))
    )
