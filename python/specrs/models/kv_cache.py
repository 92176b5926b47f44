"""The KV cache of one model of torch's: its memory. Knows no request; blocks are the scheduler's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specrs.models.config import ModelConfig
from specrs.models.kv_dtypes import kv_block_bytes, kv_shape
from specrs.models.kv_groups import KVGroups


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer in blocks of `block_size` positions.

    Slot s is block `s // block_size`, offset `s % block_size`. The last block is scratch: slot -1 writes into it (see
    `paged_attention.write_kv`) and is never read. K and V of a block lie side by side, so that one index names both.
    """

    layers: list[Tensor]
    """Per layer `[num_blocks + 1, 2, kv_heads, block_size, head_dim]`, contiguous; dimension 1 is K, V. Layers of
    different groups may be the same tensor."""
    block_size: int

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
        """A cache of `num_blocks` blocks and the scratch block, all zero; with `groups` a block is one of any group.

        On a CPU the memory is mapped page by page when first written: numpy asks for zeroed pages where torch.zeros
        writes them, 2 s and 1 GiB for each GiB.
        """
        layers = list(_zeros(kv_shape(config, num_blocks + 1, block_size, groups), dtype, device).unbind(0))
        return cls(layers if groups is None else [layers[place] for place in groups.places], block_size)

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[tuple[int, int]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVCache":
        """The same for layers of different shapes: `(kv_heads, head_dim)` of each."""
        shapes = [(num_blocks + 1, 2, kv_heads, block_size, head_dim) for kv_heads, head_dim in layers]
        return cls([_zeros(shape, dtype, device) for shape in shapes], block_size)

    @staticmethod
    def bytes_per_block(
        config: ModelConfig, block_size: int, dtype: torch.dtype, groups: KVGroups | None = None
    ) -> int:
        """Bytes of one block over all layers, or those of a group, K and V."""
        return kv_block_bytes(config, block_size, dtype.itemsize, groups)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out; the scratch block is not among them."""
        return self.layers[0].shape[0] - 1

    @property
    def k(self) -> list[Tensor]:
        """Per layer `[num_blocks + 1, kv_heads, block_size, head_dim]`, a strided view."""
        return [layer[:, 0] for layer in self.layers]

    @property
    def v(self) -> list[Tensor]:
        """Per layer `[num_blocks + 1, kv_heads, block_size, head_dim]`, a strided view."""
        return [layer[:, 1] for layer in self.layers]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "cpu":
        pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(pages).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)
