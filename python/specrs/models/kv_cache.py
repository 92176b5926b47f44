"""KV cache of a torch model. Knows no requests; the scheduler assigns blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specrs.models.config import ModelConfig
from specrs.models.kv_blocks import KVBlocks
from specrs.models.kv_dtypes import kv_block_bytes, kv_layer_shapes, kv_shape, with_sources
from specrs.models.kv_groups import KVGroups
from specrs.models.torch_states import LayerStates


@dataclass(frozen=True, slots=True)
class KVCache(KVBlocks[Tensor]):
    """Keys and values of every layer in blocks of `block_size` positions.

    Slot s is block `s // block_size`, offset `s % block_size`. The last block is scratch: slot -1 writes into it (see
    `paged_attention.write_kv`), and nothing reads it. K and V of a block are adjacent, so one index finds both.
    """

    layers: list[Tensor]
    """For each layer with attention `[num_blocks + 1, 2, kv_heads, block_size, head_dim]`, contiguous; dimension 1 is
    K, V. Layers of different KV groups may be the same tensor, as are layers that share keys and values."""
    block_size: int
    states: LayerStates | None = None
    """States of the requests, for models whose layers have some. None: all layers have attention."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        groups: KVGroups | None = None,
    ) -> "KVCache":
        """Return a zeroed cache of `num_blocks` blocks and a scratch block. With `groups`, a block may serve any KV
        group.

        On a CPU, NumPy asks for zeroed pages, which the system maps at their first write. torch.zeros would write them
        all, at 2 s and 1 GiB of memory for each GiB.
        """
        if config.varied:
            shapes = kv_layer_shapes(config, num_blocks + 1, block_size)
            own = [None if shape is None else _zeros(shape, dtype, device) for shape in shapes]
            return cls(with_sources(config, own), block_size)
        layers = list(_zeros(kv_shape(config, num_blocks + 1, block_size, groups), dtype, device).unbind(0))
        states = None if config.states is None else LayerStates()
        return cls(layers if groups is None else [layers[place] for place in groups.places], block_size, states)

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[tuple[int, int]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVCache":
        """Return a zeroed cache of `num_blocks` blocks and a scratch block, for layers of different shapes: `(kv_heads,
        head_dim)` of each."""
        shapes = [(num_blocks + 1, 2, kv_heads, block_size, head_dim) for kv_heads, head_dim in layers]
        return cls([_zeros(shape, dtype, device) for shape in shapes], block_size)

    @staticmethod
    def bytes_per_block(
        config: ModelConfig, block_size: int, dtype: torch.dtype, groups: KVGroups | None = None
    ) -> int:
        """Return the bytes of K and V in one block: of all layers, or of the layers of one KV group."""
        return kv_block_bytes(config, block_size, dtype.itemsize, groups)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "cpu":
        pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(pages).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)
