"""Layout of a KV cache in blocks, for arrays of any library. Allocates no memory."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

A = TypeVar("A")


class KVBlocks(Generic[A]):
    """Keys and values of every layer in blocks. A is the type of arrays, NumPy's or torch's."""

    __slots__ = ()

    layers: list[A]
    """For each layer K and V, `[num_blocks + 1, 2, kv_heads, block_size, head_dim]`. The last block is scratch."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks without the scratch block."""
        first: Any = self.layers[0]
        return len(first) - 1

    @property
    def k(self) -> list[A]:
        """Keys of each layer, `[num_blocks + 1, kv_heads, block_size, head_dim]`, a strided view."""
        return self._part(0)

    @property
    def v(self) -> list[A]:
        """Values of each layer, `[num_blocks + 1, kv_heads, block_size, head_dim]`, a strided view."""
        return self._part(1)

    def _part(self, index: int) -> list[A]:
        layers: list[Any] = self.layers
        return [layer[:, index] for layer in layers]
