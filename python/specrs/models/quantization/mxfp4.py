"""MXFP4 format of gpt-oss' experts: e2m1 codes, with a power of two as scale for each 32 inputs. Quantizes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrs.arrays import Array
from specrs.core import PackedMatrix
from specrs.kernels.coding import Coding
from specrs.models.quantization.base import Expected, Layer, LinearFormat, Scheme, coding_of, groups_of
from specrs.models.quantization.grouped import E2M1, LARGEST_EXPONENT
from specrs.models.quantization.modules import patterns

GROUP = 32
"""Inputs that share a scale (OCP 2023, Microscaling formats, section 5.2)."""


@dataclass(frozen=True, slots=True)
class MXFP4(LinearFormat):
    """`blocks` uint8 `[out, in / 32, 16]`, two codes per byte, lower half first. `scales` uint8 `[out, in / 32]`; s
    means 2^(s - 127)."""

    def tensors(self, name: str, out: int, size: int) -> dict[str, Expected]:
        """Return the tensors that a layer `[out, size]` must have, by suffix of `name`. Raises CheckpointError if the
        sizes do not divide."""
        groups = groups_of(name, "group_size", GROUP, size)
        return {
            "blocks": Expected(((out, groups, GROUP // 2),), ("U8",)),
            "scales": Expected(((out, groups),), ("U8",)),
        }

    def raw(self, layer: Layer) -> E2M1:
        """Return the layer's codes and exponents. Raises CheckpointError for scales that are too large."""
        blocks = layer.read("blocks")
        return E2M1(_codes(blocks).reshape(len(blocks), -1), self._exponents(layer))

    def numbers(self, layer: Layer) -> Array:
        """Return the dequantized matrix, `[out, in]` float32. Raises CheckpointError for scales that are too large."""
        return self.raw(layer).grouped().numbers()

    def coding(self, size: int) -> Coding | None:
        """Return the layout in which GPU kernels read a layer of `size` inputs. None: they read it dequantized."""
        return coding_of(("mxfp4", "int8"), GROUP, size)

    def packed(self, layer: Layer) -> PackedMatrix:
        """Return the layer packed for native CPU passes. Raises CheckpointError for scales that are too large."""
        exponents, codes = self._exponents(layer), _codes(layer.read("blocks"))
        # GGML's blocks of the same name: the exponent, then input i in the lower half of byte i, 16 + i in the upper.
        halves = codes[..., :16] | codes[..., 16:] << 4
        blocks = np.concatenate((exponents[..., None], halves), axis=-1)
        return PackedMatrix("MXFP4", blocks.reshape(len(blocks), -1))

    def _exponents(self, layer: Layer) -> Array:
        """Return the stored exponents `[out, in / 32]`. Raises CheckpointError for those that are too large."""
        exponents = layer.read("scales")
        wrong = exponents > LARGEST_EXPONENT
        if wrong.any():
            allowed = f"must be at most {LARGEST_EXPONENT}: 255 is no number, and with others weights are infinite"
            raise layer.refused("scales", exponents, wrong, allowed)
        return exponents


def _codes(blocks: Array) -> Array:
    """Return the codes of `blocks` `[out, in / 32, 16]` in the order of the inputs, uint8 `[out, in / 32, 32]`."""
    codes: Array = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:2], GROUP)
    return codes


def scheme(raw: Mapping[str, Any]) -> Scheme:
    """Parse a `quantization_config` with `quant_method` mxfp4. Raises CheckpointError, which names the field."""
    listed = patterns("modules_to_not_convert", raw.get("modules_to_not_convert"))
    ignored = [re.compile(".*".join(map(re.escape, item.split("*"))) + r"(\..*)?") for item in listed]
    form = MXFP4()

    def format_of(name: str) -> LinearFormat | None:
        return form if ".experts." in name and not any(item.fullmatch(name) for item in ignored) else None

    return Scheme("mxfp4", format_of)
