"""FP8 format (e4m3): one scale for the matrix, for each output, or for each block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specrs.arrays import FLOAT8_E4M3, FLOAT32, Array, converted
from specrs.kernels.coding import Coding
from specrs.models.errors import malformed, unsupported
from specrs.models.quantization.base import FLOATS, Expected, Layer, LinearFormat, Scheme, coding_of
from specrs.models.quantization.grouped import Scaled8
from specrs.models.quantization.modules import is_in, patterns
from specrs.models.tensors import LM_HEAD

E4M3, E8M0 = "F8_E4M3", "F8_E8M0"
BLOCK_SCALE = "weight_scale_inv"
"""Suffix of the tensor with a scale for each block, and in some checkpoints of the one with a matrix's scale."""


@dataclass(frozen=True, slots=True)
class Float8(LinearFormat):
    """`weight` e4m3 times the tensor named `scale`, which is a factor even if its name says inverse."""

    scale: str = "weight_scale"
    """Suffix of the tensor with scales."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block. None: see `channel`."""
    channel: bool = False
    """Without blocks: True if each output has a scale, False if the matrix has one."""

    def of_layer(self, has: Callable[[str], bool]) -> LinearFormat:
        """Return the format with the name of scales that the layer has: transformers writes the scale of a whole matrix
        as `weight_scale_inv`, too, vLLM as `weight_scale`."""
        return replace(self, scale=BLOCK_SCALE) if has(BLOCK_SCALE) else self

    def tensors(self, name: str, out: int, size: int) -> dict[str, Expected]:
        """Return the tensors that a layer `[out, size]` must have, by suffix. Blocks at the edges may be cut off."""
        shapes: tuple[tuple[int, ...], ...] = ((), (1,))
        if self.block is not None:
            shapes = ((-(-out // self.block[0]), -(-size // self.block[1])),)
        elif self.channel:
            shapes = ((out, 1), (out,))
        return {"weight": Expected(((out, size),), (E4M3,)), self.scale: Expected(shapes, (*FLOATS, E8M0))}

    def numbers(self, layer: Layer) -> Array:
        """Return the dequantized matrix, `[out, in]` float32. Raises CheckpointError for scales that are not
        allowed."""
        scales, weight = layer.scales(self.scale, zero=False), converted(layer.read("weight"), FLOAT32)
        with np.errstate(all="ignore"):  # the caller reports weights that are not finite
            if self.block is None:
                made: Array = weight * scales.reshape(-1, 1)
                return made
            # A block may be larger than the matrix. Do not repeat scales beyond it.
            rows, columns = (min(n, m) for n, m in zip(self.block, layer.shape, strict=True))
            spread = scales.repeat(rows, axis=0)[: layer.shape[0]].repeat(columns, axis=1)
            return weight * spread[:, : layer.shape[1]]

    def raw(self, layer: Layer) -> Scaled8:
        """Return the FP8 values and scales. Raises CheckpointError for NaN weights and for scales that are not
        allowed."""
        (out, size), weight = layer.shape, np.ascontiguousarray(layer.read("weight"))
        scales = layer.scales(self.scale, zero=False)
        invalid = np.isnan(weight)
        if invalid.any():
            raise layer.refused("weight", converted(weight, FLOAT32), invalid, "weights must be finite")
        if self.block is None:
            return Scaled8(weight, np.resize(scales, (out, 1)), size)
        return Scaled8(weight, scales, min(self.block[1], size), self.block[0])

    def coding(self, size: int) -> Coding | None:
        """Return the layout in which GPU kernels read a layer of `size` inputs. None: they read it dequantized."""
        outputs, group = (1, 0) if self.block is None else self.block
        return coding_of(("fp8",), group, size, outputs)


def scheme(raw: Mapping[str, Any]) -> Scheme:
    """Parse a `quantization_config` with `quant_method` fp8. Raises UnsupportedModelError or CheckpointError, which
    name the field."""
    at = "quantization_config."
    if raw.get("fmt") not in (None, "e4m3"):
        raise unsupported(at + "fmt", raw["fmt"], "'e4m3'")
    if raw.get("activation_scheme") not in (None, "dynamic", "static"):
        raise unsupported(at + "activation_scheme", raw["activation_scheme"], "'dynamic' or 'static'")
    block = block_of(at + "weight_block_size", raw.get("weight_block_size"))
    form = Float8(BLOCK_SCALE, block) if block else Float8()
    names = [name for name in ("modules_to_not_convert", "ignored_layers") if raw.get(name) is not None]
    ignored = [module for name in names for module in patterns(name, raw[name])]

    def format_of(name: str) -> LinearFormat | None:
        return None if f"{name}.weight" == LM_HEAD or is_in(name, ignored) else form

    return Scheme("fp8", format_of, unused=(".input_scale", ".activation_scale", ".k_scale", ".v_scale"))


def block_of(field: str, value: object) -> tuple[int, int] | None:
    """Return the outputs and inputs of a block, None for None. Raises CheckpointError for other values, which names
    `field`."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise malformed(field, value, "two integers of at least 1: outputs and inputs of a block")
    return value[0], value[1]


def quantized(weight: Array) -> tuple[Array, Array]:
    """Return `weight` `[out, in]` in FP8 and the scale of each output, `[out, 1]` float32.

    The largest magnitude of an output becomes 448, the largest number of e4m3.
    """
    w = converted(weight, FLOAT32)
    scales = np.abs(w).max(axis=1, keepdims=True) / np.float32(448)
    scales = np.where(scales > 0, scales, np.float32(1))
    return converted((w / scales).clip(-448, 448), FLOAT8_E4M3), scales
