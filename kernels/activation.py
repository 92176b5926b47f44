"""The gated activation of the MLP, in plain torch. No projection."""

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """Return `silu(g) * u`, `[..., I]`, of the halves g and u of `x` = `[..., 2 I]` (Shazeer 2020, eq. 6)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor) -> Tensor:
    """Return `gelu(g) * u`, `[..., I]`, of the halves g and u of `x` = `[..., 2 I]`. GELU is its approximation with
    tanh (Hendrycks and Gimpel 2016, section 2)."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Return `g sigmoid(alpha g) (u + 1)`, `[..., I]`, of the halves of `x` = `[..., 2 I]`: g, at most `limit`, and u,
    from -limit to limit (OpenAI 2025, gpt-oss)."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return up.clamp(-limit, limit).add_(1).mul_(torch.sigmoid(gate * alpha).mul_(gate))
