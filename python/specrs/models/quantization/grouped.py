"""Codes times scales, by group: the common form of INT4 and INT8 formats. Knows no file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.kernels.coded_weight import LEAST_GROUP, CodedWeight, Coding
from specrs.kernels.linear import Codes

INT4_UNIT, INT8_UNIT = 32, 16
"""Inputs that a group of the native pass is a multiple of."""
FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the numbers of e2m1, by their codes."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix `[out, in]`: weight [o, i] is `values[o, i] * scales[o, group of i]`."""

    values: Tensor
    """int8 or int16 `[out, in]`: codes less their zero points."""
    scales: Tensor
    """float32 `[out, groups]`"""
    group_of: Tensor | None = None
    """int64 `[in]`: each input's group; None: groups of the same number of inputs, one behind the other."""

    def spread(self) -> Tensor:
        """The scales by input, `[out, in]`."""
        if self.group_of is not None:
            return self.scales[:, self.group_of]
        return self.scales.repeat_interleave(self.values.shape[1] // self.scales.shape[1], dim=1)

    def numbers(self) -> Tensor:
        """`[out, in]` float32, each product rounded once."""
        return self.values.float() * self.spread()

    def codes(self) -> Codes | None:
        """The same numbers as the native pass reads them; None where no layout of its holds them."""
        (out, size), groups = self.values.shape, self.scales.shape[1]
        group = size // groups
        if self.group_of is not None:
            return None
        low, high = (int(bound) for bound in self.values.aminmax())
        rounded = self.scales.bfloat16()
        scales = rounded if torch.equal(rounded.float(), self.scales) else self.scales.contiguous()
        if low >= -8 and high <= 7 and group % INT4_UNIT == 0:
            halves = (self.values + 8).to(torch.uint8).view(out, size // 32, 2, 16)
            return Codes((halves[:, :, 0] | halves[:, :, 1] << 4).view(out, size // 2), scales)
        if low >= -128 and high <= 127 and (groups == 1 or group % INT8_UNIT == 0):
            return Codes(self.values.to(torch.int8).contiguous(), scales)
        return None

    def coded(self) -> CodedWeight | None:
        """The same numbers as the kernels of a GPU read them; None where no layout of theirs holds them."""
        (out, size), groups = self.values.shape, self.scales.shape[1]
        group = size // groups
        if self.group_of is not None or group % LEAST_GROUP:
            return None
        bounds = self.values.view(out, groups, group).aminmax(dim=2)
        low, high, scales = int(bounds.min.min()), int(bounds.max.max()), self.scales.contiguous()
        # A zero point is found, not read: the least that leaves no code below 0.
        zeros = -bounds.min.to(torch.int32).clamp(max=0)
        room = not bool((scales.view(torch.int32) & 15).any())
        symmetric = low >= -8 and high <= 7
        zeroed = room and low >= -15 and int((bounds.max + zeros).max()) <= 15
        coding = Coding("int4", group, zeros=not symmetric)
        if (symmetric or zeroed) and coding.unit(size):
            if symmetric:
                zeros = torch.full_like(zeros, 8)
            else:
                scales = (scales.view(torch.int32) | zeros).view(torch.float32)
            return CodedWeight.of((self.values + zeros.repeat_interleave(group, 1)).to(torch.uint8), scales, coding)
        coding = Coding("int8", group)
        if low >= -128 and high <= 127 and coding.unit(size):
            return CodedWeight.of(self.values.to(torch.int8).view(torch.uint8), scales, coding)
        return None


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The unsigned codes of `bits` bits in int32 words, lowest first, along `dim`: uint8."""
    each = 32 // bits
    words = packed.movedim(dim, -1).contiguous().view(torch.uint8)
    if bits == 4:
        words = torch.stack((words & 15, words >> 4), dim=-1).flatten(-2)
    return words.reshape(*words.shape[:-1], packed.shape[dim] * each).movedim(-1, dim)
