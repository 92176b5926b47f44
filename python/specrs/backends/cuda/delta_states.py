"""States of gated delta nets on a CUDA device, and the kernels of their layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.backends.cuda.net_states import NetRun, NetStates, common_tensors
from specrs.errors import UnsupportedModelError, invalid
from specrs.kernels.cuda._delta_layout import slices
from specrs.kernels.cuda.delta_conv import delta_conv
from specrs.kernels.cuda.delta_rule import delta_rule
from specrs.kernels.cuda.gated_norm import gated_norm
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DeltaWeights
from specrs.models.delta_net import DeltaNet

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
class DeltaStates(NetStates[DeltaWeights[Tensor]]):
    """States of gated delta nets, and buffers of one pass at a time. Inputs of convolutions have the model's dtype."""

    sizes: list[int]
    """Sizes of a delta net, as kernels take them."""
    turned: bool
    """True if the output projection reads heads in the order of GGUF files: see `DeltaNet.turned`."""
    eps: float
    """Eps of the norm of outputs."""
    bases: Tensor
    """[L, R, value_heads, key_dim, value_dim] fp32, states after the first `lengths` positions."""
    deltas: Tensor
    """[L, R, K, value_heads * value_dim] fp32, logged updates."""
    decays: Tensor
    """[L, R, K, value_heads, slices] fp32, logged decays."""
    kept_bases: Tensor
    """[L, N, value_heads, key_dim, value_dim] fp32, in N slots of snapshots."""
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
    ) -> DeltaStates:
        """Return states of `max_seqs` requests with at most `num_drafts` drafts each, and slots for `num_snapshots`
        snapshots, for passes of at most `max_rows` rows."""
        net = config.delta
        assert net is not None
        layers = sum(net.layers)
        sizes = [net.key_heads, net.value_heads, net.key_dim, net.value_dim, net.kernel, int(net.by_key_head)]
        # A verification goes through the kernels as a whole.
        rows = min(max_rows, max(PIECE_ROWS, max_seqs * (num_drafts + 1)))

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        common = common_tensors(
            net.layers,
            net.kernel,
            net.conv_dim,
            max_seqs=max_seqs,
            num_drafts=num_drafts,
            num_snapshots=num_snapshots,
            dtype=dtype,
            device=device,
        )
        return cls(
            **common,
            sizes=sizes,
            turned=net.turned,
            eps=config.rms_norm_eps,
            bases=floats(layers, max_seqs, net.value_heads, net.key_dim, net.value_dim),
            deltas=floats(layers, max_seqs, num_drafts, net.inner),
            decays=floats(layers, max_seqs, num_drafts, net.value_heads, slices(sizes)),
            kept_bases=floats(layers, num_snapshots, net.value_heads, net.key_dim, net.value_dim),
            mixed=floats(rows, net.conv_dim),
            gates=floats(rows, 2, net.value_heads),
            replayed=floats(max_seqs, num_drafts, net.key_heads * net.key_dim),
        )

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """All tensors with states, logs and snapshots. Elements that no pass has written may be NaN."""
        return self.inputs, self.bases, self.deltas, self.decays, self.kept_inputs, self.kept_bases

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Buffers between the kernels of a layer."""
        return self.mixed, self.gates, self.replayed

    @property
    def snapshotted(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Pairs of states by row, `[L, R, ...]`, and of the same in slots of snapshots, `[L, N, ...]`."""
        inputs = self.inputs[:, :, : self.kept_inputs.shape[2]]
        return (inputs, self.kept_inputs), (self.bases, self.kept_bases)

    def run(self, layer: int, w: DeltaWeights[Tensor], x: Tensor, out: Tensor, run: NetRun) -> None:
        """Run delta net number `layer` over the rows of `run`, as `NetPass` describes."""
        step = len(self.mixed)
        assert run.prompts or run.end - run.first <= step, f"rows={run.end}: there is room for {step}"
        for low in range(0, run.end - run.first, step):
            self._run(layer, w, x, out, run, low, min(low + step, run.end - run.first))

    def _run(
        self, layer: int, w: DeltaWeights[Tensor], x: Tensor, out: Tensor, run: NetRun, low: int, high: int
    ) -> None:
        """Run the rows `low` to before `high` of `run`."""
        piece = [run.first, low, high, min(run.longest, high - low)]
        memory = [self.inputs[layer], self.bases[layer], self.deltas[layer], self.decays[layer], self.mixed]
        memory += [self.kept_inputs[layer], self.kept_bases[layer]]
        weights, made = [w.conv, w.a_log, w.dt_bias], [self.mixed, self.gates, self.replayed]
        delta_conv(x, weights, run.where, memory[0], made, self.sizes, piece, run.dependent)
        prepared, planned = [self.gates, self.replayed], [self.num_planned, *self.planned]
        delta_rule(x, run.where, prepared, memory, planned, self.sizes, piece, run.dependent)
        rows = [run.first + low, run.first + high]
        operands = [x, self.mixed, w.norm, run.positions]
        gated_norm(operands, out, self.sizes, self.turned, rows, self.eps, run.dependent)
