"""Passes over the rows of some requests through one layer with states. Holds no tests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from specrs.backends.cuda.net_states import NetStates
from specrs.models.inputs import ChunkRows, PassInputs
from torch import Tensor

ROWS = 3
"""Number of state rows."""


@dataclass
class Fed:
    """The rows of one request in a pass."""

    row: int
    x: Tensor
    """[n, outputs], outputs of the input projection."""
    first: int
    """Position of the first of the rows."""
    masked: int = 0
    """Number of masked rows after the request's rows."""


def plan(states: NetStates[Any], snapshots: list[tuple[int, int, int]]) -> None:
    """Make the next passes write snapshots. `snapshots`: row, length and slot of each."""
    states.num_planned.fill_(len(snapshots))
    for i, snapshot in enumerate(snapshots):
        states.planned[:, i] = torch.tensor(snapshot)
        states.kept_lengths[snapshot[2]] = snapshot[1]


def feed(
    states: NetStates[Any], w: Any, decoding: list[Fed], chunks: list[Fed], out: Tensor, *, prompts: bool = False
) -> Tensor:
    """Return the outputs `[N, inner]` of a pass over `decoding` and prompt `chunks`, of the dtype and width of the
    empty tensor `out`. Rows of `decoding` after the first are drafts unless `prompts`."""
    for scratch in states.buffers:
        scratch.fill_(torch.nan)
    states.runs.fill_(-1)
    x, positions, starts = [], [], []
    for fed in (decoding, chunks):
        starts.append([0])
        for own in fed:
            x += [own.x, torch.full((own.masked, own.x.shape[1]), torch.nan)]
            positions += [*range(own.first, own.first + len(own.x)), *[-1] * own.masked]
            starts[-1].append(starts[-1][-1] + len(own.x) + own.masked)
    rows, first = torch.cat(x).to(out.dtype), starts[0][-1]
    of_rows = [torch.tensor([own.row for own in fed], dtype=torch.int64) for fed in (decoding, chunks)]
    q_start, none = [torch.tensor(start) for start in starts], torch.zeros((1, 1), dtype=torch.int64)
    longest = [max((b - a for a, b in itertools.pairwise(start)), default=0) for start in starts]
    after = ChunkRows(first, q_start[1], none, None, longest[1], len(decoding), of_rows[1]) if chunks else None
    at = torch.tensor(positions)
    inputs = PassInputs(
        at, at, at, q_start[0], none, longest[0], 99, prompts=prompts, chunks=after, device_rows=of_rows[0]
    )
    strided = torch.cat((rows, torch.full((len(rows), 3), torch.nan)), 1).to(out.dtype)[:, :-3]
    out = out.new_full((len(rows), out.shape[1]), torch.nan)
    states.begin(inputs, dependent=False)(0, w, strided, out)
    assert not out[at < 0].any()
    return out
