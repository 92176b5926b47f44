"""Masks, biases, bad words and penalties of the sequences of an iteration, laid out for the kernels of
`kernels.cuda.adjust_logits`. Launches none."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specrs.kernels.cuda.adjust_logits import Asked, AskedRows
from specrs.transfer import to_device
from specrs.verify.params import Steps

Views = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class RowMasks:
    """Masks and biases of one request, in host memory until a step needs them."""

    allowed: Tensor | None
    """[ceil(V / 32)] int32, bit i of word j is 1 if `allowed_token_ids` has id 32 j + i. None: all are allowed."""
    bias_ids: list[int]
    bias: list[float]
    bad_words: Sequence[Sequence[int]]

    @classmethod
    def read(cls, host: Views, i: int, vocab_size: int) -> RowMasks:
        """Return the constraints of the request that a record admits as number i."""
        num_allowed, num_biases, num_words = (
            int(host[name][i]) for name in ("admit_num_allowed", "admit_num_biases", "admit_num_bad_words")
        )
        start, end = host["admit_constraint_start"][i : i + 2].tolist()
        sizes = [max(num_allowed, 0), num_biases, num_biases, num_words]
        sizes.append(end - start - sum(sizes))
        allowed, bias_ids, bias, lengths, tokens = host["constraint"][start:end].split_with_sizes(sizes)
        words = [word.tolist() for word in tokens.split_with_sizes(lengths.tolist())] if num_words else []
        packed = pack_ids(allowed, vocab_size) if num_allowed >= 0 else None
        return cls(packed, bias_ids.tolist(), bias.view(torch.float64).tolist(), words)


def pack_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Return `[ceil(V / 32)]` int32, bit i of word j is 1 if `ids` `[N]` int64 has 32 j + i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[ids.numpy()] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class RowSampling:
    """Fields, kept on the host, of the request that was last admitted into a row."""

    request_id: int
    prompt_len: int
    steps: int  # bits of `specrs.core.SAMPLING_STEPS`
    logprobs: int  # number of top tokens, LOGPROBS_ALL or LOGPROBS_NONE
    prompt_logprobs: int
    masks: RowMasks | None = None

    @property
    def adjusts(self) -> bool:
        """True if the request has a mask, a bias or a penalty."""
        steps = Steps.of(self.steps)
        return bool(steps.penalties or steps.constraints or steps.min_tokens or steps.extras)


@dataclass(frozen=True, slots=True)
class AskedPlan:
    """The sequences of an iteration whose logits are adjusted, and their rows."""

    sequences: Sequence[int]
    """Indices of the A sequences that ask for adjustments, ascending."""
    asked: Asked
    verify: AskedRows
    """Constraints of the rows of verification."""
    draft: AskedRows
    """Constraints of the rows of a draft pass, one for each of the A sequences."""
    penalised: bool
    """True if some sequence has a penalty."""
    reads_tokens: bool
    """True if some sequence has a penalty or bad words, which depend on the tokens before a row."""

    @classmethod
    def of(
        cls, planned: Sequence[int], requests: Sequence[RowSampling], vocab_size: int, device: torch.device
    ) -> AskedPlan | None:
        """Return the plan of the sequences with `planned` drafts each, and `requests`. None if none is adjusted."""
        sequences = [i for i, request in enumerate(requests) if request.adjusts]
        if not sequences:
            return None
        own = [requests[i] for i in sequences]
        steps = [Steps.of(request.steps) for request in own]
        asked = _asked(sequences, own, vocab_size, device)
        starts = np.cumsum([0, *(k + 1 for k in planned)])
        has_grammar = [one.extras for one in steps]
        counts = [planned[i] + 1 for i in sequences]
        rows = [int(starts[i]) + j for i in sequences for j in range(planned[i] + 1)]
        return cls(
            sequences=sequences,
            asked=asked,
            verify=_rows(rows, counts, has_grammar, device),
            draft=_rows(sequences, [1] * len(sequences), has_grammar, device),
            penalised=any(one.penalties for one in steps),
            reads_tokens=any(one.penalties or one.constraints for one in steps),
        )

    def drafting(self, count: int) -> AskedRows | None:
        """Return the rows of a draft pass over the first `count` sequences. None if none of them is adjusted."""
        num = sum(sequence < count for sequence in self.sequences)
        if not num:
            return None
        rows = self.draft
        return AskedRows(rows.row[:num], rows.asked[:num], rows.mask[:num], rows.counts[:num])

    def rows_of(self, sequences: Container[int]) -> Tensor | None:
        """Return the flat rows `[N]` int64 of adjusted sequences that are among `sequences`, on the device. None if
        there are none."""
        counts = zip(self.sequences, self.verify.counts, strict=True)
        every = [one in sequences for one, count in counts for _ in range(count)]
        if not any(every):
            return None
        if all(every):
            return self.verify.row
        places = torch.tensor([i for i, own in enumerate(every) if own])
        return self.verify.row[to_device(places, self.verify.row.device)]


def _asked(sequences: Sequence[int], requests: Sequence[RowSampling], vocab_size: int, device: torch.device) -> Asked:
    """Return the adjustments that `requests` ask for, as tensors on the device. `sequences` are the indices of the
    requests' sequences in the iteration."""
    masks = [RowMasks(None, [], [], ()) if request.masks is None else request.masks for request in requests]
    ids = [token for own in masks for token in own.bias_ids]
    words = [word for own in masks for word in own.bad_words]
    starts = len(ids) + 2 * len(words) + np.cumsum([0, *map(len, words)])
    lists = [*ids, *(x for start, word in zip(starts, words, strict=False) for x in (int(start), len(word)))]
    lists += [token for word in words for token in word]
    allowed = [own.allowed for own in masks if own.allowed is not None]
    table, bias, word, mask = [], 0, len(ids), 0
    for sequence, request, own in zip(sequences, requests, masks, strict=True):
        steps, has_mask = Steps.of(request.steps), own.allowed is not None
        places = [mask if has_mask else -1, bias, len(own.bias_ids), word, len(own.bad_words)]
        table.append([sequence, int(steps.penalties), *places, int(steps.min_tokens)])
        bias, word, mask = bias + len(own.bias_ids), word + 2 * len(own.bad_words), mask + has_mask
    biases = [value for own in masks for value in own.bias]
    words_of_mask = -(-vocab_size // 32)
    # Never empty, so that kernels get an address.
    return Asked(
        table=to_device(torch.tensor(table), device),
        lists=to_device(torch.tensor([*lists, 0]), device),
        biases=to_device(torch.tensor([*biases, 0.0], dtype=torch.float32), device),
        allowed=to_device(torch.stack(allowed), device)
        if allowed
        else torch.zeros((1, words_of_mask), dtype=torch.int32, device=device),
    )


def _rows(rows: Sequence[int], counts: Sequence[int], has_grammar: Sequence[bool], device: torch.device) -> AskedRows:
    """Return flat `rows` of A sequences that have `counts` of them, on the device. Grammar masks are numbered by
    row, and only rows of sequences with a grammar have one."""
    asked = [i for i, count in enumerate(counts) for _ in range(count)]
    masked = np.array([has_grammar[i] for i in asked])
    masks = np.where(masked, np.cumsum(masked) - 1, -1)
    both = to_device(torch.stack((torch.tensor(rows), torch.tensor(asked), torch.from_numpy(masks))), device)
    return AskedRows(both[0], both[1], both[2], counts)
