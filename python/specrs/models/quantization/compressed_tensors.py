"""compressed-tensors format: FP8, INT8, packed INT4 and INT8, and NVIDIA's FP4, by groups of layers.

Its checkpoints may ask for quantized activations too. Activations stay unquantized here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrs.arrays import Array
from specrs.errors import CheckpointError
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
from specrs.models.quantization.fp8 import E4M3, Float8, block_of
from specrs.models.quantization.grouped import FP4, Grouped, unpack
from specrs.models.quantization.modules import is_in, patterns

_FIELD = "quantization_config."
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized", "dense")
"""Values of `format` that are read."""


@dataclass(frozen=True, slots=True)
class Int8(GroupedFormat):
    """`weight` int8 times `weight_scale`: one scale for the matrix, for each output, or for each group of an output's
    inputs."""

    group: int | None
    """Inputs per group. 0: all inputs of an output. None: one scale for the matrix."""
    symmetric: bool
    """False if there are zero points, in `weight_zero_point`."""

    def tensors(self, name: str, out: int, size: int) -> dict[str, Expected]:
        """Return the tensors that a layer `[out, size]` must have, by suffix of `name`. Raises CheckpointError if a
        group does not divide the number of inputs."""
        shapes: tuple[tuple[int, ...], ...] = ((1,), ())
        if self.group is not None:
            groups = groups_of(name, "group_size", self.group or size, size)
            shapes = ((out, groups), (out,)) if groups == 1 else ((out, groups),)
        made = {"weight": Expected(((out, size),), ("I8",)), "weight_scale": Expected(shapes)}
        return made if self.symmetric else made | {"weight_zero_point": Expected(shapes, ("I8", "I32", "I64"))}

    def raw(self, layer: Layer) -> Grouped:
        """Return the layer's codes less zero points, and its scales. Raises CheckpointError for scales that are not
        allowed."""
        values, scales = layer.read("weight"), _by_output(layer.scales("weight_scale"), layer.shape[0])
        if not self.symmetric:
            zeros = _by_output(layer.read("weight_zero_point"), layer.shape[0]).astype(np.int16)
            values = values - zeros.repeat(layer.shape[1] // zeros.shape[1], axis=1)
        return check_zero_scales(layer, "weight_scale", Grouped(values, scales))

    def coding(self, size: int) -> Coding | None:
        """Return the layout in which GPU kernels read a layer of `size` inputs. None: they read it dequantized.
        They read one with zero points dequantized, because its codes may not fit 8 bits."""
        return coding_of(("int8",), self.group or 0, size) if self.symmetric else None


def _by_output(array: Array, out: int) -> Array:
    """Return scales or zero points of any allowed shape as `[out, groups]`."""
    spread = np.full(out, array.reshape(-1)[0]) if array.size == 1 else array
    return np.ascontiguousarray(spread.reshape(out, -1))


@dataclass(frozen=True, slots=True)
class PackedInt(GroupedFormat):
    """`weight_packed` int32 `[out, in * bits / 32]`, lowest bits first. A code is stored plus 2^(bits - 1)."""

    bits: int
    """Bits of a code: 4 or 8."""
    group: int
    """Inputs per group. 0: all inputs of an output."""
    symmetric: bool
    """False if there are zero points, in `weight_zero_point`."""
    ordered: bool
    """True if `weight_g_idx` may say to which group each input belongs."""

    def tensors(self, name: str, out: int, size: int) -> dict[str, Expected]:
        """Return the tensors that a layer `[out, size]` must have, by suffix of `name`. Raises CheckpointError if a
        group does not divide the number of inputs."""
        words = -(-size * self.bits // 32)
        groups = groups_of(name, "group_size", self.group or size, size)
        made = {
            "weight_packed": Expected(((out, words),), ("I32",)),
            "weight_scale": Expected(((out, groups), (out,)) if groups == 1 else ((out, groups),)),
            "weight_shape": Expected(((2,),), ("I64", "I32")),
        }
        if not self.symmetric:
            made["weight_zero_point"] = Expected(((-(-out * self.bits // 32), groups),), ("I32",))
        if self.ordered:
            made["weight_g_idx"] = Expected(((size,),), ("I32", "I64"), required=False)
        return made

    def raw(self, layer: Layer) -> Grouped:
        """Return the layer's codes less zero points, and its scales. Raises CheckpointError for scales, shapes or
        groups that are not allowed."""
        (out, size), half = layer.shape, 1 << self.bits - 1
        shape = layer.read("weight_shape")
        if shape.tolist() != [out, size]:
            raise CheckpointError(f"{layer.folder}: {layer.name}.weight_shape={shape.tolist()}: must be {[out, size]}")
        codes = unpack(layer.read("weight_packed"), self.bits, 1)[:, :size].astype(np.int16) - half
        scales = _by_output(layer.scales("weight_scale"), out)
        groups = scales.shape[1]
        group_of = np.arange(size) // (size // groups)
        ordered = False
        if self.ordered and layer.has("weight_g_idx"):
            found = layer.read("weight_g_idx").astype(np.int64)
            wrong = (found < 0) | (found >= groups)
            if wrong.any():
                raise layer.refused("weight_g_idx", found, wrong, f"must be a group from 0 to {groups - 1}")
            ordered = not np.array_equal(found, group_of)
            group_of = found
        if not self.symmetric:
            zeros = unpack(layer.read("weight_zero_point"), self.bits, 0)[:out].astype(np.int16) - half
            codes = codes - zeros[:, group_of]
        return check_zero_scales(layer, "weight_scale", Grouped(codes, scales, group_of if ordered else None))

    def coding(self, size: int) -> Coding | None:
        """Return the layout in which GPU kernels read a layer of `size` inputs. None: they may have to read
        it dequantized."""
        held = (self.symmetric or self.bits == 4) and not self.ordered
        return coding_of(("int4", "int8")[self.bits == 8 :], self.group, size) if held else None


@dataclass(frozen=True, slots=True)
class NVFP4(GroupedFormat):
    """`weight_packed` uint8 `[out, in / 2]`, two e2m1 numbers per byte, lower half first. `weight_scale` e4m3 has a
    scale for 16 inputs, which is divided by `weight_global_scale`."""

    def tensors(self, name: str, out: int, size: int) -> dict[str, Expected]:
        """Return the tensors that a layer `[out, size]` must have, by suffix of `name`. Raises CheckpointError if a
        group does not divide the number of inputs."""
        return {
            "weight_packed": Expected(((out, size // 2),), ("U8",)),
            "weight_scale": Expected(((out, groups_of(name, "group_size", 16, size)),), (E4M3,)),
            "weight_global_scale": Expected(((1,), ()), ("F32",)),
        }

    def raw(self, layer: Layer) -> Grouped:
        """Return twice the e2m1 numbers as int8 codes, and half the scales. Raises CheckpointError for scales that are
        not allowed."""
        packed = layer.read("weight_packed")
        codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)
        scales = layer.scales("weight_scale") / layer.scales("weight_global_scale", zero=False).reshape(1) / 2
        # Scales of 0 are allowed, because e4m3 rounds the scale of a group of small numbers to 0.
        return Grouped(FP4[codes], scales)

    def coding(self, size: int) -> Coding | None:
        """Return the layout in which GPU kernels read a layer of `size` inputs. None: they read it dequantized."""
        return coding_of(("int8",), 16, size)


def scheme(raw: Mapping[str, Any]) -> Scheme:
    """Parse a `quantization_config` with `quant_method` compressed-tensors. Raises UnsupportedModelError or
    CheckpointError, which name the field."""
    status = raw.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise unsupported(_FIELD + "quantization_status", status, "'compressed'")
    for field in ("transform_config", "sparsity_config"):
        value = raw.get(field)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise unsupported(_FIELD + field, value, "null")
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise malformed(_FIELD + "config_groups", groups, "an object of objects with targets and weights")
    ignored = patterns("ignore", raw.get("ignore"))
    made: list[tuple[tuple[str, ...], LinearFormat | None]] = []
    for key, group in groups.items():
        targets = patterns(f"config_groups.{key}.targets", group.get("targets"))
        made.append((targets, _format(f"{_FIELD}config_groups.{key}.", group, raw.get("format"))))

    def format_of(name: str) -> LinearFormat | None:
        if is_in(name, ignored) or "Linear" in ignored:
            return None
        named = [form for targets, form in made if is_in(name, targets)]
        return next(iter(named or [form for targets, form in made if "Linear" in targets]), None)

    unused = (".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale")
    return Scheme("compressed-tensors", format_of, unused)


def _format(at: str, group: Mapping[str, Any], overall: object) -> LinearFormat | None:
    """Return the format of a group of layers; None: they are not quantized. `at` is the group's path in errors,
    `overall` the file's `format`."""
    weights, form = group.get("weights"), group.get("format") or overall or "dense"
    if form not in FORMATS:
        raise unsupported(at + "format" if group.get("format") else _FIELD + "format", form, ", ".join(FORMATS))
    if group.get("output_activations") is not None:
        raise unsupported(at + "output_activations", group["output_activations"], "null")
    if weights is None or form == "dense":
        return None
    if not isinstance(weights, Mapping):
        raise malformed(at + "weights", weights, "an object, or null")
    at += "weights."
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    size = weights.get("group_size")
    if strategy is None:  # as in the compressed-tensors library
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if weights.get("dynamic"):
        raise unsupported(at + "dynamic", weights["dynamic"], "false")
    symmetric = weights.get("symmetric", True)
    if strategy in ("group", "tensor_group") and (type(size) is not int or size < 1):
        raise malformed(at + "group_size", size, "an integer of at least 1")
    if (kind, bits) == ("float", 8) and form in ("float-quantized", "naive-quantized"):
        if not symmetric or strategy not in ("tensor", "channel", "block"):
            raise unsupported(at + "strategy", strategy, "'tensor', 'channel' or 'block', symmetric")
        block = block_of(at + "block_structure", weights.get("block_structure")) if strategy == "block" else None
        if strategy == "block" and block is None:
            raise malformed(at + "block_structure", None, "two integers of at least 1: outputs and inputs of a block")
        return Float8(block=block, channel=strategy == "channel")
    if (kind, bits) == ("float", 4) and form == "nvfp4-pack-quantized":
        if size != 16:
            raise unsupported(at + "group_size", size, "16")
        return NVFP4()
    groups = {"channel": 0, "group": size}
    if (kind, bits) == ("int", 8) and form in ("int-quantized", "naive-quantized"):
        if strategy != "tensor" and strategy not in groups:
            raise unsupported(at + "strategy", strategy, "'tensor', 'channel' or 'group'")
        return Int8(groups.get(strategy), symmetric)
    if kind == "int" and bits in (4, 8) and form == "pack-quantized":
        if strategy not in groups:
            raise unsupported(at + "strategy", strategy, "'channel' or 'group'")
        return PackedInt(bits, groups[strategy] or 0, symmetric, bool(weights.get("actorder")))
    allowed = "float of 8, int of 8, packed int of 4 or 8 bits, or FP4 of NVIDIA, each in a format of its own"
    raise unsupported(at + "num_bits", f"{bits} of type {kind!r} in format {form!r}", allowed)
