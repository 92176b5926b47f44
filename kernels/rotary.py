"""Rotary position embedding in plain torch, in the half-split layout of transformers. Keeps no table of positions."""

import math

import torch
from torch import Tensor


def inverse_frequencies(
    head_dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 0,
) -> Tensor:
    """Return the frequencies f_i = theta^(-2i / head_dim), `[head_dim / 2]` fp32 (Su et al. 2021, section 3.2.2).

    With `original_max_position_embeddings` = L > 0 they are scaled as in Llama 3.1, by their wavelength w = 2 pi / f:

        f                                         w < L / high_freq_factor
        f / factor                                w > L / low_freq_factor
        (1 - s) f / factor + s f                  between, s = (L / w - low) / (high - low)
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    f = 1.0 / (theta**exponents)
    if not original_max_position_embeddings:
        return f
    length = original_max_position_embeddings
    wavelength = 2 * math.pi / f
    scaled = torch.where(wavelength > length / low_freq_factor, f / factor, f)
    s = (length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (wavelength <= length / low_freq_factor) & (wavelength >= length / high_freq_factor)
    return torch.where(between, (1 - s) * scaled / factor + s * scaled, scaled)


def yarn_frequencies(
    head_dim: int, theta: float, factor: float, ramp: tuple[float, float], length: int, *, truncate: bool
) -> Tensor:
    """Return the frequencies of YaRN, `[head_dim / 2]` fp32 (Peng et al. 2023, section 3.2).

    Frequencies that turn more than `ramp[0]` times within `length` positions are kept, those that turn less than
    `ramp[1]` times divided by `factor`, and between there is a straight line over their indices, whose ends are whole
    numbers with `truncate`.
    """

    def index(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(ramp[0]), index(ramp[1])
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    wavelengths = theta ** (torch.arange(0, head_dim, 2).to(torch.float32) / head_dim)
    width = 0.001 if low == high else high - low
    divided = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - divided
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


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

    Both lines are one: x cos + roll(x, D/2) sin', where sin' is the sine of the signed frequencies, negative in the
    first half.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, signed_sin)
