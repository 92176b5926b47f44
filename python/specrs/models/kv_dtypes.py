"""Dtypes, scales and sizes of K and V in a KV cache. Allocates none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np

from specrs.arrays import FLOAT8_E4M3, FLOAT8_E5M2, FLOAT32
from specrs.errors import CheckpointError, UnsupportedConfigError, invalid
from specrs.kernels.kv_scales import KVScales
from specrs.models.config import ModelConfig
from specrs.models.kv_groups import KVGroups
from specrs.models.tensors import Readable

A = TypeVar("A")
CODES: dict[str, np.dtype[Any]] = {"fp8_e4m3": FLOAT8_E4M3, "fp8_e5m2": FLOAT8_E5M2}
"""FP8 dtypes of a quantized KV cache, by the value of `kv_cache_dtype`."""
SCALE_NAMES = ("{x}_scale", "attn.{x}_scale", "{x}_proj.{x}_scale", "qkv_proj.{x}_scale", "{x}_proj.output_scale")
"""Names that quantizers give the scale of K or V (x is k or v), after `self_attn.`"""


def resolve_cache_dtype(field: str, kv_cache_dtype: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of K and V in the cache of a model of `dtype`. Raises UnsupportedConfigError, which names
    `field`, for a dtype that is neither the model's nor FP8."""
    name = str(dtype)
    if kv_cache_dtype in ("auto", name):
        return dtype
    if kv_cache_dtype not in CODES:
        reason = f"not implemented for a model computed in {name}; allowed: 'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2'"
        raise invalid(UnsupportedConfigError, field, kv_cache_dtype, reason)
    return CODES[kv_cache_dtype]


def read_kv_scales(checkpoint: Readable, attention: str) -> KVScales:
    """Return the KV scales of the layer whose attention tensors have names that begin with `attention`.

    A scale that is missing equals the other one, as older quantizers stored only one; both are 1 if both are missing.
    Raises CheckpointError for a scale that is not one positive number.
    """
    found: list[float | None] = []
    for x in "kv":
        names = (attention + pattern.format(x=x) for pattern in SCALE_NAMES)
        name = next((name for name in names if name in checkpoint), None)
        if name is None:
            found.append(None)
            continue
        array = checkpoint.read(name, FLOAT32)
        if array.size != 1:
            raise CheckpointError(
                f"{checkpoint.folder}: {name} has shape {array.shape}; must be one scale for the layer"
            )
        value = array.item()
        if not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{checkpoint.folder}: {name}={value:g}: must be finite and greater than 0")
        found.append(value)
    k, v = found
    return KVScales(k or v or 1.0, v or k or 1.0)


def kv_shape(
    config: ModelConfig, num_blocks: int, block_size: int, groups: KVGroups | None = None
) -> tuple[int, int, int, int, int, int]:
    """Return the shape of a whole KV cache: `[layers, num_blocks, 2, kv_heads, block_size, head_dim]`. Only layers with
    attention count.

    With `groups`, a block holds the layers of one KV group, so `layers` is the size of a group. If layers differ in
    heads or head size, use `kv_layer_shapes` instead.
    """
    assert not config.varied
    num_layers = len(config.attention_layers) if groups is None else groups.layers_per_block
    return num_layers, num_blocks, 2, config.num_kv_heads, block_size, config.head_dim


def kv_block_bytes(config: ModelConfig, block_size: int, itemsize: int, groups: KVGroups | None = None) -> int:
    """Return the bytes of one block, with `itemsize` bytes per element of K and V. The block holds all layers, or with
    `groups` the layers of one KV group."""
    if config.varied:
        return sum(math.prod(shape) for shape in kv_layer_shapes(config, 1, block_size) if shape is not None) * itemsize
    return math.prod(kv_shape(config, 1, block_size, groups)) * itemsize


def kv_layer_shapes(
    config: ModelConfig, num_blocks: int, block_size: int
) -> list[tuple[int, int, int, int, int] | None]:
    """Return the shape of each layer's cache in a model whose layers differ: `[num_blocks, 2, kv_heads, block_size,
    head_dim]`. None: the layer reads the cache of its `source`."""
    return [
        None if sizes.source is not None else (num_blocks, 2, sizes.num_kv_heads, block_size, sizes.head_dim)
        for sizes in config.varied
    ]


def with_sources(config: ModelConfig, own: Sequence[A | None]) -> list[A]:
    """Return the cache of every layer, given those of layers that have one of their own."""
    made: list[A] = []
    for sizes, layer in zip(config.varied, own, strict=True):
        made.append(made[sizes.source] if layer is None and sizes.source is not None else cast("A", layer))
    return made
