"""How a quantized matrix lies in codes and scales. Plain numbers: needs neither torch nor Triton."""

from __future__ import annotations

from typing import NamedTuple

LEAST_GROUP = 16
"""Groups are multiples of so many inputs, or all of an output."""


class Coding(NamedTuple):
    """How a matrix `[out, in]` lies in codes and scales."""

    kind: str
    """fp8 (e4m3), int8 or int4."""
    group: int
    """Inputs that share a scale: a multiple of 16, or all of an output."""
    outputs: int = 1
    """Outputs that share a scale, counted from the first."""
    zeros: bool = False
    """INT4: whether scales have zero points; without, they are 8."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.kind == "int4" else 8

    def unit(self, size: int) -> int | None:
        """Inputs whose codes lie together, of `size` inputs; None: no kernel reads such a matrix.

        A code's place in words is that of at least 16 inputs, which a product takes at a time, all of one group.
        """
        each, group = 16 // self.bits, self.group
        fits = (u for u in (128, 64, 32) if size % u == 0 and (group % u == 0 or u % group == 0))
        return next((u for u in fits if u >= 16 * each and group % (u // each) == 0), None)
