"""The KV cache of one model: its memory, type and scales. Knows no request; blocks are the scheduler's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specrs.errors import CheckpointError, UnsupportedConfigError, invalid
from specrs.kernels.kv_codes import KVScales
from specrs.models.config import ModelConfig
from specrs.models.kv_groups import KVGroups
from specrs.models.tensors import Tensors

CODES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Values of `kv_cache_dtype` that mean codes."""
SCALE_NAMES = ("{x}_scale", "attn.{x}_scale", "{x}_proj.{x}_scale", "qkv_proj.{x}_scale", "{x}_proj.output_scale")
"""Names that quantizers give the scale of x, k or v, behind `self_attn.`"""


def resolve_cache_dtype(field: str, kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """The type of K and V in the cache of a model of `dtype`. Raises UnsupportedConfigError naming `field` for numbers
    of another type than the model's."""
    name = str(dtype).removeprefix("torch.")
    if kv_cache_dtype in ("auto", name):
        return dtype
    if kv_cache_dtype not in CODES:
        reason = f"not implemented for a model computed in {name}; allowed: 'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2'"
        raise invalid(UnsupportedConfigError, field, kv_cache_dtype, reason)
    return CODES[kv_cache_dtype]


def read_kv_scales(checkpoint: Tensors, attention: str) -> KVScales:
    """The scales of the layer whose tensors' names begin with `attention`: 1 where there are none, and where there is
    one it is both, as older quantizers wrote it. Raises CheckpointError for what is no scale of a whole tensor."""
    found: list[float | None] = []
    for x in "kv":
        names = (attention + pattern.format(x=x) for pattern in SCALE_NAMES)
        name = next((name for name in names if name in checkpoint), None)
        if name is None:
            found.append(None)
            continue
        tensor = checkpoint.read(name, torch.float32, torch.device("cpu"))
        if tensor.numel() != 1:
            shape = tuple(tensor.shape)
            raise CheckpointError(f"{checkpoint.folder}: {name} has shape {shape}, allowed is one scale of a layer")
        value = tensor.item()
        if not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{checkpoint.folder}: {name}={value:g}: must be finite and greater than 0")
        found.append(value)
    k, v = found
    return KVScales(k or v or 1.0, v or k or 1.0)


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
        num_layers = config.num_layers if groups is None else groups.layers_per_block
        shape = (num_layers, num_blocks + 1, 2, config.num_kv_heads, block_size, config.head_dim)
        layers = list(_zeros(shape, dtype, device).unbind(0))
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
        num_layers = config.num_layers if groups is None else groups.layers_per_block
        return 2 * num_layers * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize

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
