"""K and V as floats of 8 bits times a scale, as a cache of such codes holds them. Reads and writes no cache."""

from __future__ import annotations

import torch
from torch import Tensor

FRACTIONS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
"""Types of codes, and bits of their fractions."""


def fraction_of(dtype: torch.dtype) -> int:
    """Bits of a code's fraction; 0: `dtype` holds the numbers themselves, which have no scale."""
    return FRACTIONS.get(dtype, 0)


def encode(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """`x / scale` as codes of `dtype`: to the nearest, of two the even one, at most the largest finite one; NaN stays.

    Divided in fp32, float64 for float64.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    most = torch.finfo(dtype).max
    return (x.to(wide) / scale).clamp_(-most, most).to(dtype)
