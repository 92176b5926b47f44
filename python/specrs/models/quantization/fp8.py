"""FP8 weights (e4m3): one scale for the matrix, for each output, or for each block. Numbers are made once, at load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specrs.kernels.coded_weight import CodedWeight, Coding
from specrs.models.errors import malformed, unsupported
from specrs.models.quantization.base import FLOATS, Expected, Layer, LinearFormat, Scheme, bits_of
from specrs.models.quantization.modules import is_in, patterns
from specrs.models.tensors import LM_HEAD

E4M3, E8M0 = "F8_E4M3", "F8_E8M0"


@dataclass(frozen=True, slots=True)
class Float8(LinearFormat):
    """`weight` e4m3 times `scale`, which multiplies whatever it is called."""

    scale: str = "weight_scale"
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block; None: see `channel`."""
    channel: bool = False
    """A scale for each output, else one for all."""

    def tensors(self, name: str, out: int, size: int) -> dict[str, Expected]:
        """See `LinearFormat`; like what follows."""
        shapes: tuple[tuple[int, ...], ...] = ((), (1,))
        if self.block is not None:
            shapes = ((-(-out // self.block[0]), -(-size // self.block[1])),)
        elif self.channel:
            shapes = ((out, 1), (out,))
        return {"weight": Expected(((out, size),), (E4M3,)), self.scale: Expected(shapes, (*FLOATS, E8M0))}

    def numbers(self, layer: Layer) -> Tensor:
        """See `LinearFormat`."""
        scales, weight = layer.scales(self.scale, zero=False), layer.read("weight").float()
        if self.block is None:
            return weight * scales.view(-1, 1)
        # A block may be larger than the matrix: what is spread is no larger.
        rows, columns = (min(n, m) for n, m in zip(self.block, layer.shape, strict=True))
        spread = scales.repeat_interleave(rows, 0)[: layer.shape[0]].repeat_interleave(columns, 1)
        return weight * spread[:, : layer.shape[1]]

    def coded(self, layer: Layer) -> CodedWeight | None:
        """See `LinearFormat`."""
        (out, size), weight = layer.shape, layer.read("weight").contiguous()
        scales = layer.scales(self.scale, zero=False)
        invalid = weight.float().isnan()
        if bool(invalid.any()):
            raise layer.refused("weight", weight.float(), invalid, "weights must be finite")
        if self.block is None:
            return _coded(weight, scales.reshape(-1, 1).expand(out, 1), Coding("fp8", size))
        return _coded(weight, scales, Coding("fp8", min(self.block[1], size), self.block[0]))

    def coded_bits(self, size: int) -> int | None:
        """See `LinearFormat`."""
        return bits_of(("fp8",), 0 if self.block is None else self.block[1], size)


def _coded(weight: Tensor, scales: Tensor, coding: Coding) -> CodedWeight | None:
    held = coding.unit(weight.shape[1]) is not None
    return CodedWeight.of(weight.view(torch.uint8), scales, coding) if held else None


def scheme(raw: Mapping[str, Any]) -> Scheme:
    """The `quantization_config` of `quant_method` fp8. Raises UnsupportedModelError or CheckpointError by field."""
    at = "quantization_config."
    if raw.get("fmt") not in (None, "e4m3"):
        raise unsupported(at + "fmt", raw["fmt"], "'e4m3'")
    if raw.get("activation_scheme") not in (None, "dynamic", "static"):
        raise unsupported(at + "activation_scheme", raw["activation_scheme"], "'dynamic' or 'static'")
    block = block_of(at + "weight_block_size", raw.get("weight_block_size"))
    form = Float8("weight_scale_inv", block) if block else Float8()
    names = [name for name in ("modules_to_not_convert", "ignored_layers") if raw.get(name) is not None]
    ignored = [module for name in names for module in patterns(name, raw[name])]

    def format_of(name: str) -> LinearFormat | None:
        return None if f"{name}.weight" == LM_HEAD or is_in(name, ignored) else form

    return Scheme("fp8", format_of, unused=(".input_scale", ".k_scale", ".v_scale"))


def block_of(field: str, value: object) -> tuple[int, int] | None:
    """Outputs and inputs of a block. Raises CheckpointError for what is no block."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise malformed(field, value, "two integers of at least 1: outputs and inputs of a block")
    return value[0], value[1]


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` `[out, in]` in FP8 and the scale of each output `[out, 1]` fp32. The largest of an output is 448, e4m3's
    largest."""
    w = weight.float()
    scales = w.abs().amax(1, keepdim=True) / 448
    scales = torch.where(scales > 0, scales, 1.0)
    return (w / scales).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def coded_by_output(weight: Tensor, scales: Tensor) -> CodedWeight | None:
    """What `quantized` gives, as the kernels of a GPU read it; None where they cannot."""
    return _coded(weight, scales, Coding("fp8", weight.shape[1]))
