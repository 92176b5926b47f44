"""Rotary position embedding in plain torch, of halves of a head or of neighbouring features, and factors of queries by
position. Keeps no table of positions."""

from typing import Any

import torch
from specrs.arrays import Array
from specrs.kernels import frequencies
from torch import Tensor


def torch_powers(dim: int, theta: float) -> Array:
    """Return theta^(2i / dim), `[dim / 2]` float32, as torch, and therefore transformers, computes it."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    powers: Array = (theta**exponents).numpy()
    return powers


def inverse_frequencies(head_dim: int, theta: float, **scaling: Any) -> Tensor:
    """Return `frequencies.inverse_frequencies` of `torch_powers`, `[head_dim / 2]` fp32."""
    made = frequencies.inverse_frequencies(head_dim, theta, **scaling, powers=torch_powers)
    return torch.from_numpy(made)


def signed_frequencies(f: Tensor) -> Tensor:
    """Return `[-f, f]`, `[head_dim]`: the frequencies of both halves, signed as the first half's sine needs it."""
    return torch.cat((-f, f))


def rotary_cos_sin(
    positions: Tensor, signed: Tensor, dtype: torch.dtype, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin of `positions` `[N]` for `apply_rotary_`, each `[N, 1, head_dim]` of `dtype`, times
    `magnitude` (Peng et al. 2023, section 3.4).

    The angles are products in fp32 whatever `dtype` is, as in transformers. One set serves all layers of a pass.
    """
    angles = positions.to(torch.float32).view(-1, 1, 1) * signed
    cos, sin = angles.cos(), angles.sin_()
    if magnitude != 1:
        cos, sin = cos.mul_(magnitude), sin.mul_(magnitude)
    return cos.to(dtype), sin.to(dtype)


def apply_rotary_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate `x` `[N, heads, head_dim]` in place and return it.

        x_i        <-  x_i cos(a_i) - x_{i+D/2} sin(a_i)         a_i = position * f_i,  i < D/2
        x_{i+D/2}  <-  x_{i+D/2} cos(a_i) + x_i sin(a_i)

    Both lines are one formula: x cos + roll(x, D/2) sin', where sin' is the sine of the signed frequencies, which is
    negative in the first half.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, signed_sin)


def apply_interleaved_rotary_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate neighbouring features of `x` `[N, heads, head_dim]` in place and return it. `cos` and `signed_sin` are as
    in `apply_rotary_`.

        x_{2i}    <-  x_{2i} cos(a_i) - x_{2i+1} sin(a_i)         a_i = position * f_i,  i < D/2
        x_{2i+1}  <-  x_{2i+1} cos(a_i) + x_{2i} sin(a_i)
    """
    half = x.shape[-1] // 2
    pairs = x.view(*x.shape[:-1], half, 2).transpose(-1, -2)
    swapped = pairs.flip(-2)
    pairs.mul_(cos.view(-1, 1, 2, half)).addcmul_(swapped, signed_sin.view(-1, 1, 2, half))
    return x


def query_factors(positions: Tensor, beta: float, length: int, dtype: torch.dtype) -> Tensor:
    """Return `1 + beta ln(1 + floor(position / length))` for `positions` `[N]`, `[N, 1, 1]` of `dtype`. Negative
    positions count as 0.

    Computed in fp32 whatever `dtype` is, as in transformers' `models/ministral3`.
    """
    steps = torch.floor(positions.clamp(min=0) / length)
    return (1 + beta * torch.log(1 + steps)).to(dtype).view(-1, 1, 1)
