"""KV cache of a native model: NumPy memory, and the Rust core's handle to it. Knows no requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrs.arrays import Array, bits
from specrs.core import CpuKVCache
from specrs.models.config import ModelConfig
from specrs.models.kv_blocks import KVBlocks
from specrs.models.kv_dtypes import CODES, kv_layer_shapes, kv_shape, with_sources
from specrs.models.kv_groups import KVGroups


@dataclass(frozen=True, slots=True)
class NativeKVCache(KVBlocks[Array]):
    """Keys and values of every layer in blocks of `block_size` positions.

    Slot s is block `s // block_size`, offset `s % block_size`. The last block is scratch: slot -1 writes into it, and
    nothing reads it.
    """

    layers: list[Array]
    """For each layer with attention `[num_blocks + 1, 2, kv_heads, block_size, head_dim]`, contiguous; dimension 1 is
    K, V. Layers of different KV groups may be the same array, as are layers
    that share keys and values."""
    block_size: int
    native: CpuKVCache
    """Handle of native passes to this memory, and to the states of requests."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: np.dtype[Any],
        groups: KVGroups | None = None,
    ) -> NativeKVCache:
        """Return a zeroed cache of `num_blocks` blocks and a scratch block. With `groups`, a block may serve any KV
        group.

        The system maps its pages at their first write.
        """
        if config.varied:
            shapes = kv_layer_shapes(config, num_blocks + 1, block_size)
            own = [None if shape is None else _zeros(shape, dtype) for shape in shapes]
            native = native_cache([layer for layer in own if layer is not None])
            return cls(with_sources(config, own), block_size, native)
        shape = kv_shape(config, num_blocks + 1, block_size, groups)
        places = list(_zeros(shape, dtype))
        layers = places if groups is None else [places[place] for place in groups.places]
        return cls(layers, block_size, native_cache(layers, groups))


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.zeros(math.prod(shape) * dtype.itemsize, np.uint8).view(dtype).reshape(shape)


def native_cache(layers: Sequence[Array], groups: KVGroups | None = None) -> CpuKVCache:
    """Return the handle of native passes to the memory of `layers`, which was allocated for `groups`."""
    codes = next((name for name, dtype in CODES.items() if dtype == layers[0].dtype), None)
    if groups is None:
        return CpuKVCache([bits(layer) for layer in layers], codes=codes)
    # The first group has a layer at every place.
    places = [bits(layer) for layer, group in zip(layers, groups.of_layer, strict=True) if group == 0]
    return CpuKVCache(places, list(zip(groups.of_layer, groups.places, strict=True)), codes)
