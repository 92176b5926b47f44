"""K and V as 8-bit floating-point codes times a scale, as a quantized cache stores them. Reads and writes no cache."""

from __future__ import annotations

import torch
from torch import Tensor

FRACTIONS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
"""For each dtype of codes, the number of bits of its fraction."""


def fraction_of(dtype: torch.dtype) -> int:
    """Return the number of fraction bits of a code; 0 if `dtype` stores the numbers themselves, which have no scale."""
    return FRACTIONS.get(dtype, 0)


def encode(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return `x / scale` as codes of `dtype`: rounded to the nearest, ties to the even code, and limited to the largest
    finite one. NaN stays NaN.

    The division is in fp32, or float64 for float64.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    most = torch.finfo(dtype).max
    return (x.to(wide) / scale).clamp_(-most, most).to(dtype)
