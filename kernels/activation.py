"""The gated activation of the MLP, in plain torch. No projection."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """Return `silu(g) * u`, `[..., I]`, of the halves g and u of `x` = `[..., 2 I]` (Shazeer 2020, eq. 6)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
