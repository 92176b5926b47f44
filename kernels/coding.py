"""Layout of a quantized matrix in codes and scales. Plain numbers: needs neither torch nor Triton."""

from __future__ import annotations

from typing import NamedTuple

LEAST_GROUP = 16
"""Groups are multiples of this number of inputs, or all inputs of an output."""
SUPER_BLOCK = 256
"""Number of inputs whose groups share an fp16 scale and an fp16 minimum, with `minima="blocks"`."""


class Coding(NamedTuple):
    """Layout of a quantized matrix `[out, in]` in codes and scales."""

    kind: str
    """Kind of codes: fp8 (e4m3), int8, int4, or mxfp4 (e2m1, with a power of two as scale)."""
    group: int
    """Number of inputs that share a scale: a multiple of 16, or all inputs of an output."""
    outputs: int = 1
    """Number of consecutive outputs that share a scale."""
    zeros: bool = False
    """For INT4: True if the words of scales also hold zero points. False: every zero point is 8, or 0 with minima."""
    minima: str = ""
    """How a minimum of each group is stored, which is subtracted from code times scale. Empty: there are none. For int8
    and int4 with scales for each output.

    `pairs`: a word has the scale of a group, and above it the minimum, both fp16. `blocks`: each 256 inputs have a word
    with an fp16 scale and an fp16 minimum. Words after it have two signed bytes for each group, by which these are
    multiplied, the scale's first.
    """

    @property
    def block(self) -> int:
        """Number of inputs to which consecutive words of scales belong."""
        return SUPER_BLOCK if self.minima == "blocks" else self.group

    @property
    def words(self) -> int:
        """Number of words of scales for `block` inputs of an output."""
        return 1 + SUPER_BLOCK // self.group // 2 if self.minima == "blocks" else 1

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return 4 if self.kind in ("int4", "mxfp4") else 8

    def unit(self, size: int) -> int | None:
        """Return the number of inputs whose codes are stored together, for a matrix of `size` inputs. None if no kernel
        reads such a matrix.

        Words hold the codes of at least 16 inputs, all of one group, which a product reads at once.
        """
        each, group = 16 // self.bits, self.group
        if self.minima and (size % self.block or size <= group):
            return None
        fits = (u for u in (128, 64, 32) if size % u == 0 and (group % u == 0 or u % group == 0))
        return next((u for u in fits if u >= 16 * each and group % (u // each) == 0), None)
