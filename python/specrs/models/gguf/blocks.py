"""Types of GGML whose numbers are a code times a scale: their blocks as codes and scales. Other types become numbers by
the package `gguf`, which is these types' reference, too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specrs.models.quantization.grouped import Grouped


def _halves(scales: Tensor) -> Tensor:
    """fp16 numbers from their bytes `[.., 2]`: float32 `[..]`."""
    return scales.contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Of bytes `[.., n]` the lower halves, then the upper ones: int8 `[.., 2 n]`."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).to(torch.int8)


def q8_0(blocks: Tensor) -> Grouped:
    """32 numbers in 34 bytes: an fp16 scale, int8 codes."""
    of = blocks.view(len(blocks), -1, 34)
    return Grouped(of[..., 2:].contiguous().view(torch.int8).view(len(blocks), -1), _halves(of[..., :2]))


def q4_0(blocks: Tensor) -> Grouped:
    """32 numbers in 18 bytes: an fp16 scale, codes plus 8, of which byte i has those of numbers i and 16 + i."""
    of = blocks.view(len(blocks), -1, 18)
    return Grouped((_nibbles(of[..., 2:]) - 8).view(len(blocks), -1), _halves(of[..., :2]))


def q6_k(blocks: Tensor) -> Grouped:
    """256 numbers in 210 bytes: 128 bytes of lower halves, 64 of two upper bits, 16 int8 scales, an fp16 scale of them.

    A half of 128 numbers is four runs of 32: bytes 0 to 31 and 32 to 63 hold the lower halves of runs 0 and 1 below
    those of runs 2 and 3; byte i of 32 has the upper bits of number i of each run.
    """
    of = blocks.view(len(blocks), -1, 210)
    low = of[..., :128].reshape(*of.shape[:2], 2, 2, 32)
    low = torch.cat((low & 15, low >> 4), dim=-2)
    high = of[..., 128:192].reshape(*of.shape[:2], 2, 1, 32)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2)
    values = (low | high << 4).to(torch.int8) - 32
    scales = of[..., 192:208].contiguous().view(torch.int8).float() * _halves(of[..., 208:]).unsqueeze(-1)
    return Grouped(values.view(len(blocks), -1), scales.view(len(blocks), -1))


GROUPED: dict[str, Callable[[Tensor], Grouped]] = {"Q8_0": q8_0, "Q4_0": q4_0, "Q6_K": q6_k}
"""By GGML's name."""
