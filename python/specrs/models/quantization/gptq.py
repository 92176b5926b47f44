"""GPTQ format: INT4 or INT8 by group, packed along the inputs. Groups may be in the order of quantization
(act-order)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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
from specrs.models.quantization.dynamic import overrides
from specrs.models.quantization.grouped import Grouped, unpack
from specrs.models.quantization.modules import is_in, patterns
from specrs.models.tensors import LM_HEAD

logger = logging.getLogger("specrs")
_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""Number to add to stored zero points, by `checkpoint_format`. A file that names none is read as `gptq`."""


@dataclass(frozen=True, slots=True)
class GPTQ(GroupedFormat):
    """GPTQ tensors of a layer: `qweight` int32 `[in * bits / 32, out]`, `qzeros` int32 `[groups, out * bits / 32]`,
    `scales` `[groups, out]`, `g_idx` int32 `[in]`."""

    bits: int
    """Bits of a code: 4 or 8."""
    group: int
    """Inputs per group. -1: all inputs."""
    desc_act: bool
    """True if `g_idx` must say to which group each input belongs (act-order)."""
    layout: str
    """The file's `checkpoint_format`, a key of `_OFFSETS`."""
    sym: bool | None = None
    """True if all zero points are the middle of the codes, 8 or 128. None: the file does not say."""

    def tensors(self, name: str, out: int, size: int) -> dict[str, Expected]:
        """Return the tensors that a layer `[out, size]` must have, by suffix of `name`. Raises CheckpointError if the
        sizes do not divide."""
        each = 32 // self.bits
        groups = groups_of(name, "group_size", self.group if self.group > 0 else size, size)
        for wrong, field in ((size % each, "inputs"), (out % each, "outputs")):
            if wrong:
                raise malformed(
                    "quantization_config.bits", self.bits, f"such that a multiple of {each} {field} of {name}"
                )
        return {
            "qweight": Expected(((size // each, out),), ("I32",)),
            "qzeros": Expected(((groups, out // each),), ("I32",)),
            "scales": Expected(((groups, out),)),
            "g_idx": Expected(((size,),), ("I32",), required=self.desc_act),
        }

    def raw(self, layer: Layer) -> Grouped:
        """Return the layer's codes less zero points, and its scales. Raises CheckpointError for scales or groups that
        are not allowed."""
        scales = np.ascontiguousarray(layer.scales("scales").T)
        groups, size = scales.shape[1], layer.shape[1]
        group_of = None
        each = np.arange(size) // (size // groups)
        if layer.has("g_idx"):
            group_of = layer.read("g_idx").astype(np.int64)
            wrong = (group_of < 0) | (group_of >= groups)
            if wrong.any():
                raise layer.refused("g_idx", group_of, wrong, f"must be a group from 0 to {groups - 1}")
            if np.array_equal(group_of, each):
                group_of = None
        codes = unpack(layer.read("qweight"), self.bits, 0).T.astype(np.int16)
        stored = unpack(layer.read("qzeros"), self.bits, 1).T.astype(np.int16)
        zeros = stored + self._offset(layer.folder, stored)
        values = codes - zeros[:, each if group_of is None else group_of]
        return check_zero_scales(layer, "scales", Grouped(values, scales, group_of), by_group=True)

    def _offset(self, folder: Path, stored: Array) -> int:
        """Return the number to add to the `stored` zero points of a layer.

        With `sym`, all zero points are the middle of the codes, and version 1 of the format stores them less 1. So the
        data shows the version. Data wins over the name in `checkpoint_format`, which many files lack or have wrong.
        """
        named, middle = _OFFSETS[self.layout], 1 << (self.bits - 1)
        low, high = int(stored.min()), int(stored.max())
        if self.sym is False:
            return named
        if low == high and middle - low in _OFFSETS.values():
            if middle - low != named:
                _warn(folder, f"zero points are {low}, so not of checkpoint_format={self.layout!r}, as which it goes")
            return middle - low
        if self.sym:
            reason = f"sym=true, but zero points are from {low} to {high}; they are read as {self.layout!r}"
            _warn(folder, f"{reason}, which is wrong if the file was written in the other version of the format")
        return named

    def coding(self, size: int) -> Coding | None:
        """Return the layout in which GPU kernels read a layer of `size` inputs. None: they read it dequantized."""
        return None if self.desc_act else coding_of(("int4", "int8")[self.bits == 8 :], self.group, size)


@functools.cache
def _warn(folder: Path, reason: str) -> None:
    """Log `reason` once for a folder, not for each of its layers."""
    logger.warning("%s: %s", folder, reason)


def scheme(raw: Mapping[str, Any]) -> Scheme:
    """Parse a `quantization_config` with `quant_method` gptq. Raises UnsupportedModelError or CheckpointError, which
    name the field."""
    form = _format(raw)
    ignored = patterns("modules_to_not_convert", raw.get("modules_to_not_convert"))
    made = [(rule, None if fields is None else _format({**raw, **fields})) for rule, fields in overrides(raw)]

    def format_of(name: str) -> LinearFormat | None:
        if (f"{name}.weight" == LM_HEAD and not raw.get("lm_head")) or is_in(name, ignored):
            return None
        return next((own for rule, own in made if rule.match(name)), form)

    return Scheme("gptq", format_of)


def _format(raw: Mapping[str, Any]) -> GPTQ:
    """Return the format that the fields of `raw` describe."""
    at = "quantization_config."
    bits, group = raw.get("bits"), raw.get("group_size", 128)
    layout = raw.get("checkpoint_format", raw.get("format"))
    if bits not in (4, 8):
        raise unsupported(at + "bits", bits, "4 or 8")
    check_group(group)
    if layout not in (*_OFFSETS, None):
        raise unsupported(at + "checkpoint_format", layout, "'gptq' or 'gptq_v2'")
    if raw.get("pack_dtype", "int32") != "int32":
        raise unsupported(at + "pack_dtype", raw["pack_dtype"], "'int32'")
    if raw.get("sym") not in (None, True, False):
        raise malformed(at + "sym", raw["sym"], "true or false")
    return GPTQ(bits, group, bool(raw.get("desc_act")), layout or "gptq", raw.get("sym"))


def check_group(group: object) -> None:
    """Raise CheckpointError unless `group` is a valid `group_size`."""
    if type(group) is not int or not (group == -1 or group > 0):
        raise malformed("quantization_config.group_size", group, "an integer of at least 1, or -1 for all inputs")
