"""Frequencies of rotary position embedding, in NumPy. Rotates nothing and needs no torch.

Everything here is float32, one operation after the other, as in transformers. So the results have transformers' bits if
the powers do. `rounded_powers` rounds each power once. torch's powers are sometimes one unit in the last place off;
`rotary.torch_powers` returns those.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from specrs.arrays import FLOAT32, FLOAT64, Array

Powers = Callable[[int, float], Array]
"""Function that returns theta^(2i / dim) for a dimension and theta, `[dim / 2]` float32."""


@np.errstate(all="ignore")
def rounded_powers(dim: int, theta: float) -> Array:
    """Return theta^(2i / dim), `[dim / 2]` float32, computed in float64 and rounded once."""
    exponents = np.arange(0, dim, 2).astype(FLOAT32) / np.float32(dim)
    return (np.float64(np.float32(theta)) ** exponents.astype(FLOAT64)).astype(FLOAT32)


@np.errstate(all="ignore")  # an odd configuration makes infinite or tiny numbers, as it does in transformers
def inverse_frequencies(
    head_dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 0,
    powers: Powers = rounded_powers,
) -> Array:
    """Return the frequencies f_i = theta^(-2i / head_dim), `[head_dim / 2]` float32 (Su et al. 2021, section 3.2.2).

    With `original_max_position_embeddings` = L > 0 they are scaled as in Llama 3.1, by their wavelength w = 2 pi / f:

        f                                         w < L / high_freq_factor
        f / factor                                w > L / low_freq_factor
        (1 - s) f / factor + s f                  between, s = (L / w - low) / (high - low)
    """
    f = np.float32(1) / powers(head_dim, theta)
    if not original_max_position_embeddings:
        return f
    length = original_max_position_embeddings
    # A number divided by an array is the number times the array's reciprocal, as torch computes it.
    wavelength = np.float32(1) / f * np.float32(2 * math.pi)
    scaled = np.where(wavelength > length / low_freq_factor, f / np.float32(factor), f)
    s = np.float32(1) / wavelength * np.float32(length)
    s = (s - np.float32(low_freq_factor)) / np.float32(high_freq_factor - low_freq_factor)
    between = (wavelength <= length / low_freq_factor) & (wavelength >= length / high_freq_factor)
    return np.where(between, (np.float32(1) - s) * scaled / np.float32(factor) + s * scaled, scaled)


@np.errstate(all="ignore")
def yarn_frequencies(
    head_dim: int,
    theta: float,
    factor: float,
    ramp: tuple[float, float],
    length: int,
    *,
    truncate: bool,
    powers: Powers = rounded_powers,
) -> Array:
    """Return the frequencies of YaRN, `[head_dim / 2]` float32 (Peng et al. 2023, section 3.2).

    Frequencies that turn more than `ramp[0]` times within `length` positions are kept. Those that turn less than
    `ramp[1]` times are divided by `factor`. In between, a straight line over the indices blends the two; with
    `truncate`, its ends are rounded to whole numbers.
    """

    def index(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(ramp[0]), index(ramp[1])
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    wavelengths = powers(head_dim, theta)
    width = np.float32(0.001 if low == high else high - low)
    divided = ((np.arange(head_dim // 2).astype(FLOAT32) - np.float32(low)) / width).clip(0, 1)
    kept = np.float32(1) - divided
    one = np.float32(1)
    return one / (np.float32(factor) * wavelengths) * (one - kept) + one / wavelengths * kept


def signed_frequencies(f: Array) -> Array:
    """Return `[-f, f]`, `[head_dim]`: the frequencies of both halves, signed as the first half's sine needs it."""
    return np.concatenate((-f, f))
