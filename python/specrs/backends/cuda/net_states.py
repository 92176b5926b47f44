"""States of gated delta nets on a CUDA device, by row of the batch, and the kernels of their layers.

A pass allocates nothing, waits for nothing and has no shape that depends on data. Every row of the batch has its states
for the engine's life. A request that begins at position 0 begins with states of zeros, so nothing is ever cleared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.backends.ring import Header
from specrs.core import HEADER_FIELDS
from specrs.errors import UnsupportedModelError, invalid
from specrs.kernels.cuda._delta_layout import slices
from specrs.kernels.cuda.delta_conv import delta_conv
from specrs.kernels.cuda.delta_rule import delta_rule
from specrs.kernels.cuda.delta_runs import delta_runs
from specrs.kernels.cuda.gated_norm import gated_norm
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DeltaWeights
from specrs.models.delta_net import DeltaNet
from specrs.models.inputs import PassInputs

PIECE_ROWS = 2048
"""Largest number of prompt rows that go through the kernels of a delta net at once. Between the kernels a row has 4
bytes for each feature of q, k and v."""
MAX_HEAD_DIM = 128
"""Largest number of features of a delta net's heads for which the kernels are compiled and tested."""


def check_net(net: DeltaNet, device: torch.device) -> None:
    """Raise UnsupportedModelError for heads of a delta net whose size the kernels are not compiled for."""
    if device.type != "cuda":
        return
    for field, size in (("linear_key_head_dim", net.key_dim), ("linear_value_head_dim", net.value_dim)):
        if size > MAX_HEAD_DIM:
            reason = f"the GPU kernels serve at most {MAX_HEAD_DIM}; allowed: device='cpu'"
            raise invalid(UnsupportedModelError, field, size, reason)


@dataclass(frozen=True, slots=True)
class NetStates:
    """States of R rows of the batch in all L layers with a delta net, and buffers of one pass at a time.

    A row has one base, the states after its first `lengths` positions, and a log with the updates of `drafts` drafts
    after them. The next pass replays those that were accepted.
    """

    sizes: list[int]
    """Sizes of a delta net, as kernels take them."""
    turned: bool
    """True if the output projection reads heads in the order of GGUF files: see `DeltaNet.turned`."""
    eps: float
    """Eps of the norm of outputs."""
    inputs: Tensor
    """[L, R, kernel - 1 + K, conv_dim] in the model's dtype: inputs of the convolution, of the base's last positions
    and of logged drafts."""
    bases: Tensor
    """[L, R, value_heads, key_dim, value_dim] fp32, states after the first `lengths` positions."""
    deltas: Tensor
    """[L, R, K, value_heads * value_dim] fp32, logged updates."""
    decays: Tensor
    """[L, R, K, value_heads, slices] fp32, logged decays."""
    lengths: Tensor
    """[R + 1] int64, number of positions in the base of each state row; the last element is the padding row's."""
    drafts: Tensor
    """[R + 1] int64, number of drafts in the log of each state row."""
    kept_inputs: Tensor
    """[L, N, kernel - 1, conv_dim] in the model's dtype, in N slots of snapshots: the part of `inputs` that belongs to
    committed tokens."""
    kept_bases: Tensor
    """[L, N, value_heads, key_dim, value_dim] fp32, in N slots of snapshots."""
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
    mixed: Tensor
    """[rows, conv_dim] fp32, between the kernels of a layer."""
    gates: Tensor
    """[rows, 2, value_heads] fp32, between the kernels of a layer."""
    replayed: Tensor
    """[R, K, key_heads * key_dim] fp32, between the kernels of a layer."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        max_rows: int,
        max_seqs: int,
        num_drafts: int,
        num_snapshots: int = 0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> NetStates:
        """Return states of `max_seqs` requests with at most `num_drafts` drafts each, and slots for `num_snapshots`
        snapshots, for passes of at most `max_rows` rows."""
        net = config.delta
        assert net is not None
        layers = sum(net.layers)
        sizes = [net.key_heads, net.value_heads, net.key_dim, net.value_dim, net.kernel, int(net.by_key_head)]
        # A verification goes through the kernels as a whole.
        rows = min(max_rows, max(PIECE_ROWS, max_seqs * (num_drafts + 1)))

        def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            sizes=sizes,
            turned=net.turned,
            eps=config.rms_norm_eps,
            inputs=floats(layers, max_seqs, net.kernel - 1 + num_drafts, net.conv_dim, dtype=dtype),
            bases=floats(layers, max_seqs, net.value_heads, net.key_dim, net.value_dim),
            deltas=floats(layers, max_seqs, num_drafts, net.inner),
            decays=floats(layers, max_seqs, num_drafts, net.value_heads, slices(sizes)),
            lengths=ints(max_seqs + 1),
            drafts=ints(max_seqs + 1),
            kept_inputs=floats(layers, num_snapshots, net.kernel - 1, net.conv_dim, dtype=dtype),
            kept_bases=floats(layers, num_snapshots, net.value_heads, net.key_dim, net.value_dim),
            kept_lengths=ints(num_snapshots),
            num_planned=ints(1),
            planned=ints(3, num_snapshots),
            runs=ints(2, 5, max_seqs),
            indices=torch.arange(max_seqs, device=device),
            mixed=floats(rows, net.conv_dim),
            gates=floats(rows, 2, net.value_heads),
            replayed=floats(max_seqs, num_drafts, net.key_heads * net.key_dim),
        )

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """All tensors with states, logs and snapshots. Elements that no pass has written may be NaN."""
        return self.inputs, self.bases, self.deltas, self.decays, self.kept_inputs, self.kept_bases

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
        self.inputs[:, row, : self.kept_inputs.shape[2]].copy_(self.kept_inputs[:, slot])
        self.bases[:, row].copy_(self.kept_bases[:, slot])
        self.lengths[row].copy_(self.kept_lengths[slot])
        self.drafts[row].zero_()

    def begin(self, inputs: PassInputs, dependent: bool) -> NetPass:
        """Return the pass of `inputs` through the delta nets. Enqueues kernels that find its rows by request, and
        change `lengths` and `drafts`."""
        rows, chunks, parts = inputs.input_ids.shape[0], inputs.chunks, []
        first = rows if chunks is None else chunks.first
        if chunks is not None:
            # Before the others: the last row of a prompt may be a row of verification.
            where = [self._rows(chunks.device_rows, chunks.q_start), chunks.q_start, self.runs[1]]
            parts.append(_Part(first, rows, chunks.max_q_len, where, prompts=True))
        most = inputs.max_q_len if inputs.prompts else min(inputs.max_q_len, self.deltas.shape[2] + 1)
        where = [self._rows(inputs.device_rows, inputs.q_start), inputs.q_start, self.runs[0]]
        parts.append(_Part(0, first, most, where, prompts=inputs.prompts))
        for part in parts:
            own, q_start, runs = part.where
            counts = [self.lengths, self.drafts]
            delta_runs(inputs.positions, q_start, own, counts, runs, part.first, part.prompts, dependent)
        return NetPass(self, inputs.positions, parts, dependent)

    def _rows(self, given: Tensor | None, q_start: Tensor) -> Tensor:
        return self.indices[: q_start.shape[0] - 1] if given is None else given


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a pass from `first` to before `end`: those of verification or of prompts."""

    first: int
    end: int
    longest: int
    """Upper bound of the rows of a request."""
    where: list[Tensor]
    """State rows of the requests, first row of each, counted from `first`, and their runs."""
    prompts: bool
    """True if all rows are committed tokens."""


@dataclass(frozen=True, slots=True)
class NetPass:
    """One pass through the delta nets of a model."""

    states: NetStates
    positions: Tensor
    parts: list[_Part]
    dependent: bool

    def __call__(self, layer: int, w: DeltaWeights[Tensor], x: Tensor, out: Tensor) -> None:
        """Run delta net number `layer`. Writes what its output projection reads into `out` `[N, value_heads *
        value_dim]`.

        `x` `[N, outputs]` is what the input projection gives. Mutates the states of the pass's requests.
        """
        for part in self.parts:
            step = len(self.states.mixed)
            assert part.prompts or part.end - part.first <= step, f"rows={part.end}: there is room for {step}"
            for low in range(0, part.end - part.first, step):
                self._run(layer, w, x, out, part, low, min(low + step, part.end - part.first))

    def _run(
        self, layer: int, w: DeltaWeights[Tensor], x: Tensor, out: Tensor, part: _Part, low: int, high: int
    ) -> None:
        """Run the rows `low` to before `high` of a part."""
        s, dependent = self.states, self.dependent
        piece = [part.first, low, high, min(part.longest, high - low)]
        memory = [s.inputs[layer], s.bases[layer], s.deltas[layer], s.decays[layer], s.mixed]
        memory += [s.kept_inputs[layer], s.kept_bases[layer]]
        weights = [w.conv, w.a_log, w.dt_bias]
        delta_conv(x, weights, part.where, memory[0], [s.mixed, s.gates, s.replayed], s.sizes, piece, dependent)
        prepared, planned = [s.gates, s.replayed], [s.num_planned, *s.planned]
        delta_rule(x, part.where, prepared, memory, planned, s.sizes, piece, dependent)
        rows = [part.first + low, part.first + high]
        gated_norm([x, s.mixed, w.norm, self.positions], out, s.sizes, s.turned, rows, s.eps, dependent)
