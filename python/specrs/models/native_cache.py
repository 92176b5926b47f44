"""The KV cache of a native model: numpy pages, and what the Rust core makes of them. Knows no request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrs.arrays import Array, bits
from specrs.core import CpuKVCache
from specrs.models.config import ModelConfig
from specrs.models.kv_dtypes import CODES, kv_shape
from specrs.models.kv_groups import KVGroups


@dataclass(frozen=True, slots=True)
class NativeKVCache:
    """Keys and values of every layer in blocks of `block_size` positions.

    Slot s is block `s // block_size`, offset `s % block_size`. The last block is scratch: slot -1 writes into it, and
    nothing reads it.
    """

    layers: list[Array]
    """Per layer `[num_blocks + 1, 2, kv_heads, block_size, head_dim]`, contiguous; dimension 1 is K, V. Layers of
    different groups may be the same array."""
    block_size: int
    native: CpuKVCache
    """The same memory, as native passes know it."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: np.dtype[Any],
        groups: KVGroups | None = None,
    ) -> NativeKVCache:
        """Return a cache of `num_blocks` blocks and the scratch block, all zero; with `groups` a block is one of any.

        The system maps its pages when they are first written.
        """
        shape = kv_shape(config, num_blocks + 1, block_size, groups)
        places = list(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8).view(dtype).reshape(shape))
        layers = places if groups is None else [places[place] for place in groups.places]
        return cls(layers, block_size, native_cache(layers, groups))

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out; the scratch block is not among them."""
        return len(self.layers[0]) - 1

    @property
    def k(self) -> list[Array]:
        """Per layer `[num_blocks + 1, kv_heads, block_size, head_dim]`, a strided view."""
        return [layer[:, 0] for layer in self.layers]

    @property
    def v(self) -> list[Array]:
        """Per layer `[num_blocks + 1, kv_heads, block_size, head_dim]`, a strided view."""
        return [layer[:, 1] for layer in self.layers]


def native_cache(layers: Sequence[Array], groups: KVGroups | None = None) -> CpuKVCache:
    """Return the memory of `layers` as native passes know it; `groups` are those that it was allocated for."""
    codes = next((name for name, dtype in CODES.items() if dtype == layers[0].dtype), None)
    if groups is None:
        return CpuKVCache([bits(layer) for layer in layers], codes=codes)
    # The first group has a layer at every place.
    places = [bits(layer) for layer, group in zip(layers, groups.of_layer, strict=True) if group == 0]
    return CpuKVCache(places, list(zip(groups.of_layer, groups.places, strict=True)), codes)
