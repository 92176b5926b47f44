"""MXFP4, as gpt-oss has its experts in: e2m1 codes, a power of two for each 32 inputs. Quantizes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrs.models.quantization.base import Expected, GroupedFormat, Layer, LinearFormat, Scheme, groups_of
from specrs.models.quantization.grouped import FP4, Grouped
from specrs.models.quantization.modules import patterns

GROUP = 32
"""Inputs of a scale (OCP 2023, Microscaling formats, section 5.2)."""
_LARGEST = 127 + 125
"""Of a scale's exponent, so that 6 of it is a number of fp32."""


@dataclass(frozen=True, slots=True)
class MXFP4(GroupedFormat):
    """`blocks` uint8 `[out, in / 32, 16]`, lower halves first; `scales` uint8 `[out, in / 32]`, for 2^(s - 127)."""

    def tensors(self, name: str, out: int, size: int) -> dict[str, Expected]:
        """See `LinearFormat`; like what follows."""
        groups = groups_of(name, "group_size", GROUP, size)
        return {
            "blocks": Expected(((out, groups, GROUP // 2),), ("U8",)),
            "scales": Expected(((out, groups),), ("U8",)),
        }

    def raw(self, layer: Layer) -> Grouped:
        """See `GroupedFormat`."""
        blocks, exponents = layer.read("blocks"), layer.read("scales")
        wrong = exponents > _LARGEST
        if wrong.any():
            allowed = f"must be at most {_LARGEST}: 255 is no number, and with others weights are infinite"
            raise layer.refused("scales", exponents, wrong, allowed)
        codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(len(blocks), -1)
        # The codes are halves.
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
        return Grouped(FP4[codes], scales)


def scheme(raw: Mapping[str, Any]) -> Scheme:
    """The `quantization_config` of `quant_method` mxfp4. Raises CheckpointError by field."""
    listed = patterns("modules_to_not_convert", raw.get("modules_to_not_convert"))
    ignored = [re.compile(".*".join(map(re.escape, item.split("*"))) + r"(\..*)?") for item in listed]
    form = MXFP4()

    def format_of(name: str) -> LinearFormat | None:
        return form if ".experts." in name and not any(item.fullmatch(name) for item in ignored) else None

    return Scheme("mxfp4", format_of)
