"""AWQ format: INT4 by group with zero points, packed along the outputs in AWQ's own order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrs.arrays import Array
from specrs.kernels.coding import Coding
from specrs.models.errors import malformed, unsupported
from specrs.models.quantization.base import (
    Expected,
    GroupedFormat,
    Layer,
    LinearFormat,
    Scheme,
    check_zero_scales,
    coding_of,
    groups_of,
)
from specrs.models.quantization.gptq import check_group
from specrs.models.quantization.grouped import Grouped, unpack
from specrs.models.quantization.modules import is_in, patterns
from specrs.models.tensors import LM_HEAD

_AT = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position within an int32 word of the codes of outputs 0 to 7, counted from the lowest bits."""


@dataclass(frozen=True, slots=True)
class AWQ(GroupedFormat):
    """AWQ tensors of a layer: `qweight` int32 `[in, out / 8]`, `qzeros` int32 `[groups, out / 8]`, `scales` `[groups,
    out]`."""

    group: int
    """Inputs per group. -1: all inputs."""

    def tensors(self, name: str, out: int, size: int) -> dict[str, Expected]:
        """Return the tensors that a layer `[out, size]` must have, by suffix of `name`. Raises CheckpointError if the
        sizes do not divide."""
        groups = groups_of(name, "group_size", self.group if self.group > 0 else size, size)
        if out % 8:
            raise malformed("quantization_config.bits", 4, f"such that a multiple of 8 outputs of {name}")
        return {
            "qweight": Expected(((size, out // 8),), ("I32",)),
            "qzeros": Expected(((groups, out // 8),), ("I32",)),
            "scales": Expected(((groups, out),)),
        }

    def raw(self, layer: Layer) -> Grouped:
        """Return the layer's codes less zero points, and its scales. Raises CheckpointError for scales that are not
        allowed."""
        codes, zeros = _columns(layer.read("qweight")), _columns(layer.read("qzeros"))
        values = codes - zeros.repeat(codes.shape[0] // zeros.shape[0], axis=0)
        grouped = Grouped(np.ascontiguousarray(values.T), np.ascontiguousarray(layer.scales("scales").T))
        return check_zero_scales(layer, "scales", grouped, by_group=True)

    def coding(self, size: int) -> Coding | None:
        """Return the layout in which GPU kernels read a layer of `size` inputs. None: they read it dequantized."""
        return coding_of(("int4", "int8"), self.group, size)


def _columns(packed: Array) -> Array:
    """Unpack int32 words `[rows, out / 8]` to codes `[rows, out]`, int8."""
    words = unpack(packed, 4, 1).reshape(*packed.shape, 8)
    codes: Array = words[..., list(_AT)].reshape(len(packed), -1).astype(np.int8)
    return codes


def scheme(raw: Mapping[str, Any]) -> Scheme:
    """Parse a `quantization_config` with `quant_method` awq. Raises UnsupportedModelError or CheckpointError, which
    name the field."""
    at = "quantization_config."
    bits, version = raw.get("bits", 4), str(raw.get("version") or raw.get("format") or "gemm").lower()
    if bits != 4:
        raise unsupported(at + "bits", bits, "4")
    if version != "gemm":
        raise unsupported(at + "version", version, "'gemm'")
    if raw.get("zero_point", True) is not True:
        raise unsupported(at + "zero_point", raw["zero_point"], "true")
    group = raw.get("group_size", 128)
    check_group(group)
    form = AWQ(group)
    ignored = patterns("modules_to_not_convert", raw.get("modules_to_not_convert"))

    def format_of(name: str) -> LinearFormat | None:
        return None if f"{name}.weight" == LM_HEAD or is_in(name, ignored) else form

    return Scheme("awq", format_of)
