"""Random numbers of the rows of a launch: Philox values by (seed, position, purpose). Keeps no state, draws no
tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.core import philox_gumbel, philox_uniform


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise over a vocabulary of V tokens in the dtype of the logits; a pure function of its arguments."""

    seeds: Tensor  # of every row of state, [R+1] int64
    vocab_size: int
    dtype: torch.dtype

    def gumbel(self, rows: Tensor, positions: Tensor, purpose: int) -> Tensor:
        """Standard Gumbel values `[N, V]` of flat rows: state row and position of each, both `[N]` int64."""
        out = torch.empty((len(rows), self.vocab_size), dtype=torch.float32)
        philox_gumbel(self.seeds[rows].numpy(), positions.contiguous().numpy(), purpose, out.numpy())
        return out.to(self.dtype)

    def uniform(self, rows: Tensor, positions: Tensor, purpose: int) -> Tensor:
        """Uniforms in (0, 1) `[B, K]` at `positions` `[B, K]` int64 of state rows `[B]`."""
        out = torch.empty((positions.numel(), 1), dtype=torch.float32)
        seeds = self.seeds[rows, None].expand_as(positions).contiguous().view(-1)
        philox_uniform(seeds.numpy(), positions.contiguous().view(-1).numpy(), purpose, out.numpy())
        return out.view(positions.shape).to(self.dtype)
