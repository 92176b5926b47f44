"""States of gated short convolutions on a CUDA device, and the kernels of their layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.backends.cuda.net_states import NetRun, NetStates, common_tensors
from specrs.kernels.cuda.short_conv import keep_conv_inputs, short_conv
from specrs.models.short_conv import ShortConv


@dataclass(frozen=True, slots=True)
class ConvStates(NetStates[Tensor]):
    """States of gated short convolutions. Inputs of convolutions, products of B and x, are in fp32. A layer's weights
    are those of its convolution, `[kernel, channels]` fp32."""

    @classmethod
    def allocate(
        cls, conv: ShortConv, *, max_seqs: int, num_drafts: int, num_snapshots: int = 0, device: torch.device
    ) -> ConvStates:
        """Return states of `max_seqs` requests with at most `num_drafts` drafts each, and slots for `num_snapshots`
        snapshots."""
        common = common_tensors(
            conv.layers,
            conv.kernel,
            conv.channels,
            max_seqs=max_seqs,
            num_drafts=num_drafts,
            num_snapshots=num_snapshots,
            dtype=torch.float32,
            device=device,
        )
        return cls(**common)

    def run(self, layer: int, w: Tensor, x: Tensor, out: Tensor, run: NetRun) -> None:
        """Run short convolution number `layer` over the rows of `run`, as `NetPass` describes."""
        inputs, kept, planned = self.inputs[layer], self.kept_inputs[layer], [self.num_planned, *self.planned]
        if run.end > run.first:
            short_conv(x, w, run.where, inputs, out, run.first, run.longest, run.dependent)
            keep_conv_inputs(x, run.where, [inputs, kept], planned, run.first, run.dependent)
