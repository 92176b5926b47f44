"""Inputs of the sampling kernels' tests: poisoned scratch, rows of parameters, logits."""

from __future__ import annotations

import torch
from specrs.core import RequestSampling
from specrs.kernels.cuda.philox import fill_noise_reference
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.verify.params import SamplingRows, Steps
from torch import Tensor

POISON = -(2**40)
CLEAR = 1e-5
"""Gap between two scores, or in an acceptance test, that rounding cannot close: logits and noise below 32 in fp32, two
logarithms of 2 ulp each, and probabilities relative to sums of V exponentials."""


def poisoned_scratch(rows: int, vocab_size: int, num_seqs: int = 1) -> SamplingScratch:
    """Return scratch filled with NaN and with ids outside every vocabulary."""
    scratch = SamplingScratch.allocate(rows, num_seqs, vocab_size, torch.device("cpu"))
    scratch.tile_value.fill_(torch.nan)
    scratch.tile_id.fill_(-(2**30))
    for tensor in (scratch.tile_sum, scratch.cells, scratch.steps, scratch.ids):
        tensor.fill_(POISON)
    return scratch


def parameters(rows: list[dict[str, float]]) -> tuple[SamplingRows, Steps]:
    """Return rows of `SamplingRows.write` arguments with a greedy padding row after them, and the filter steps that
    they need."""
    params = SamplingRows.allocate(len(rows) + 1)
    steps = Steps()
    for i, row in enumerate(rows):
        steps = steps | params.write(i, RequestSampling(**row))  # type: ignore[arg-type]
    return params, steps


def wide(logits: Tensor) -> Tensor:
    """Copy `logits` into a buffer with a wider row stride and NaN between rows."""
    buffer = torch.full((logits.shape[0], logits.shape[1] + 3), torch.nan)
    buffer[:, : logits.shape[1]] = logits
    return buffer[:, : logits.shape[1]]


def noise_at(seeds: Tensor, positions: Tensor, purpose: int, vocab_size: int, *, gumbel: bool = True) -> Tensor:
    """Return the Rust core's noise for positions `[...]`, `[..., V]`. `seeds` has the shape of `positions`."""
    out = torch.empty((*positions.shape, vocab_size))
    flat = seeds.expand_as(positions).contiguous().view(-1), positions.contiguous().view(-1)
    fill_noise_reference(*flat, purpose, out.view(-1, vocab_size), gumbel)
    return out


def gaps(scores: Tensor) -> Tensor:
    """Return the difference between the two largest scores of each row `[N, V]`, `[N]` float64; V >= 2."""
    top = scores.double().topk(2, dim=1).values
    return top[:, 0] - top[:, 1]


def ragged_sequences(num_drafts: list[int], spare: int) -> tuple[Tensor, Tensor, int]:
    """Return `(q_start [B + 1], num_drafts [B], K)` of ragged sequences. Each has `spare` rows more than it needs, as
    after the device's guards."""
    drafted = torch.tensor(num_drafts)
    q_start = torch.zeros(len(num_drafts) + 1, dtype=torch.int64)
    torch.cumsum(drafted + 1 + spare, 0, out=q_start[1:])
    return q_start, drafted, max(num_drafts)
