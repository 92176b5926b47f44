"""States of layers in the place of keys and values on a CUDA device, by row of the batch, and the rows of a pass by
request. What the layers compute is in `delta_states` and `conv_states`.

A pass allocates nothing, waits for nothing and has no shape that depends on data. Every row of the batch has its states
for the engine's life. A request that begins at position 0 begins with states of zeros, so nothing is ever cleared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from specrs.backends.ring import Header
from specrs.core import HEADER_FIELDS
from specrs.kernels.cuda.delta_runs import delta_runs
from specrs.models.inputs import PassInputs

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class NetStates(Generic[W]):
    """States of R rows of the batch in all L layers that have some. W is the type of a layer's weights.

    A row has one base, the states after its first `lengths` positions, and a log with the updates of `drafts` drafts
    after them. The next pass replays those that were accepted.
    """

    inputs: Tensor
    """[L, R, kernel - 1 + K, channels]: inputs of the convolution, of the base's last positions and of logged
    drafts."""
    kept_inputs: Tensor
    """[L, N, kernel - 1, channels], in N slots of snapshots: the part of `inputs` that belongs to committed tokens."""
    lengths: Tensor
    """[R + 1] int64, number of positions in the base of each state row; the last element is the padding row's."""
    drafts: Tensor
    """[R + 1] int64, number of drafts in the log of each state row."""
    kept_lengths: Tensor
    """[N] int64, number of positions that the snapshot in each slot covers, or will cover once it is written."""
    num_planned: Tensor
    """[1] int64, number of snapshots that the step may write."""
    planned: Tensor
    """[3, N] int64, state row, length and slot of each snapshot that the step may write."""
    runs: Tensor
    """[2, 5, R] int64, rows of a pass by request, as from `delta_runs`: of verification, and of prompt chunks."""
    indices: Tensor
    """[R] int64: 0, 1, 2, ..."""

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """All tensors with states, logs and snapshots. Elements that no pass has written may be NaN."""
        return self.inputs, self.kept_inputs

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Buffers between the kernels of a layer."""
        return ()

    @property
    def snapshotted(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Pairs of states by row, `[L, R, ...]`, and of the same in slots of snapshots, `[L, N, ...]`."""
        return ((self.inputs[:, :, : self.kept_inputs.shape[2]], self.kept_inputs),)

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts K of a request."""
        return self.inputs.shape[2] - self.kept_inputs.shape[2]

    def begin_step(self, host: Mapping[str, Tensor], device: Mapping[str, Tensor], header: Header) -> None:
        """Restore the snapshots that admitted rows begin with, and read which snapshots the step may write. Does
        nothing without room for snapshots.

        `host` and `device` are the record's sections in host memory and on the states' device. Nothing is read back.
        """
        if not len(self.kept_lengths):
            return
        admitted, count = slice(0, header.num_admitted), slice(0, header.num_snapshots)
        found = zip(host["admit_row"][admitted].tolist(), host["admit_snapshot"][admitted].tolist(), strict=True)
        for row, slot in found:
            if slot >= 0:
                self.restore(row, slot)
        at = HEADER_FIELDS.index("num_snapshots")
        self.num_planned.copy_(device["header"][at : at + 1])
        if header.num_snapshots:
            for own, name in zip(self.planned, ("snapshot_row", "snapshot_len", "snapshot_slot"), strict=True):
                own[count].copy_(device[name][count])
            _, lengths, slots = self.planned[:, count]
            self.kept_lengths.index_copy_(0, slots, lengths)

    def restore(self, row: int, slot: int) -> None:
        """Give a state row the snapshot in `slot`. Its next position is the snapshot's length."""
        for states, kept in self.snapshotted:
            states[:, row].copy_(kept[:, slot])
        self.lengths[row].copy_(self.kept_lengths[slot])
        self.drafts[row].zero_()

    def begin(self, inputs: PassInputs, dependent: bool) -> NetPass[W]:
        """Return the pass of `inputs` through the layers with states. Enqueues kernels that find its rows by request,
        and change `lengths` and `drafts`."""
        rows, chunks, runs = inputs.input_ids.shape[0], inputs.chunks, []
        first, at = rows if chunks is None else chunks.first, (inputs.positions, dependent)
        if chunks is not None:
            # Before the others: the last row of a prompt may be a row of verification.
            where = [self._rows(chunks.device_rows, chunks.q_start), chunks.q_start, self.runs[1]]
            runs.append(NetRun(first, rows, chunks.max_q_len, where, True, *at))
        most = inputs.max_q_len if inputs.prompts else min(inputs.max_q_len, self.num_drafts + 1)
        where = [self._rows(inputs.device_rows, inputs.q_start), inputs.q_start, self.runs[0]]
        runs.append(NetRun(0, first, most, where, inputs.prompts, *at))
        for run in runs:
            own, q_start, found = run.where
            counts = [self.lengths, self.drafts]
            delta_runs(inputs.positions, q_start, own, counts, found, run.first, run.prompts, dependent)
        return NetPass(self, rows, runs)

    def run(self, layer: int, w: W, x: Tensor, out: Tensor, run: NetRun) -> None:
        """Run layer number `layer` of those with states over the rows of `run`, as `NetPass` describes."""
        raise NotImplementedError

    def _rows(self, given: Tensor | None, q_start: Tensor) -> Tensor:
        return self.indices[: q_start.shape[0] - 1] if given is None else given


def common_tensors(
    layers: Sequence[bool],
    kernel: int,
    channels: int,
    *,
    max_seqs: int,
    num_drafts: int,
    num_snapshots: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Return the fields of `NetStates` by name, for convolutions of `channels` channels over `kernel` positions.

    `layers` says which layers have states. There are states of `max_seqs` requests with at most `num_drafts` drafts
    each, and `num_snapshots` slots. `dtype` is that of the convolution's inputs.
    """
    count = sum(layers)

    def floats(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return {
        "inputs": floats(count, max_seqs, kernel - 1 + num_drafts, channels),
        "kept_inputs": floats(count, num_snapshots, kernel - 1, channels),
        "lengths": ints(max_seqs + 1),
        "drafts": ints(max_seqs + 1),
        "kept_lengths": ints(num_snapshots),
        "num_planned": ints(1),
        "planned": ints(3, num_snapshots),
        "runs": ints(2, 5, max_seqs),
        "indices": torch.arange(max_seqs, device=device),
    }


@dataclass(frozen=True, slots=True)
class NetRun:
    """Rows of a pass from `first` to before `end`: those of verification or of prompts."""

    first: int
    end: int
    longest: int
    """Upper bound of the rows of a request."""
    where: list[Tensor]
    """State rows of the requests, first row of each, counted from `first`, and their runs."""
    prompts: bool
    """True if all rows are committed tokens."""
    positions: Tensor
    """Positions of all rows of the pass, `[N]` int64; -1 masks a row."""
    dependent: bool
    """True if kernels are launched dependently."""


@dataclass(frozen=True, slots=True)
class NetPass(Generic[W]):
    """One pass through the layers of a model that have states."""

    states: NetStates[W]
    rows: int
    """Number of rows of the pass."""
    runs: list[NetRun]

    def __call__(self, layer: int, w: W, x: Tensor, out: Tensor) -> None:
        """Run layer number `layer` of those with states. Writes what its output projection reads into `out` `[N,
        inputs]`.

        `x` `[N, outputs]` is what the input projection gives. Mutates the states of the pass's requests.
        """
        for run in self.runs:
            self.states.run(layer, w, x, out, run)
