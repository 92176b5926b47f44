"""Forward pass of a head on a CPU as one call of `specrs-cpu`, for every head that reads the target's hidden states.

States are fp32, whatever the dtype of the weights. As in `native_decoder`, the order of a row's sums does not depend on
other rows or the number of threads. Steps of an engine run such passes inside the Rust core.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import numpy as np

from specrs.arrays import FLOAT32, Array
from specrs.core import CpuDecoder, CpuPool, CpuWeights
from specrs.drafters.hidden_state import HeadFacts
from specrs.instruction_sets import start_pool
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import NumpyHeld
from specrs.models.native_cache import NativeKVCache
from specrs.models.native_decoder import pass_arrays
from specrs.models.native_inputs import NativeInputs


class NativeHead(NumpyHeld, HeadFacts):
    """A head that runs without torch. Subclasses hand over their weights and prepare the target's hidden states."""

    decoder: CpuDecoder

    def __init__(
        self, weights: Any, native: CpuWeights | None = None, pool: CpuPool | None = None, activations: str = "auto"
    ) -> None:
        """Use `weights`, laid out by the CPU backend for a native target. They must not be written while this object
        lives. Without a pool, passes run on the caller's thread. Products round rows as `activations` of `CpuDecoder`
        says.

        Raises:
            InvalidBufferError: an array has a layout that cannot be read in place; or with `bf16`, a matrix is not
                bf16.
        """
        self.weights = weights
        self._native = self._borrow() if native is None else native
        self.decoder = CpuDecoder(self._native, start_pool(1) if pool is None else pool, activations=activations)

    def on_pool(self, pool: CpuPool, *, activations: str = "auto", prompt_tiles: bool = False) -> Self:
        """Return a head with the same weights that runs on the threads of `pool`, with its own work space."""
        return type(self)(self.weights, self._native, pool, activations)

    @property
    def target_ids(self) -> Array:
        """For each of the head's own ids, the target's id, `[Vd]` int64, ascending."""
        ids: Array = self.weights.target_ids
        return ids

    @property
    @abstractmethod
    def _layer(self) -> ModelConfig:
        """Configuration of the head's layer."""

    @abstractmethod
    def _borrow(self) -> CpuWeights:
        """Return the weights as the core reads them, without a copy."""

    @abstractmethod
    def fuse(self, entries: Array) -> Array:
        """Return the target's hidden states `[N, L, target's hidden]` float32 as `forward` reads them, `[N, H]`."""

    def allocate_cache(self, num_blocks: int, block_size: int) -> NativeKVCache | None:
        """Allocate K and V for `num_blocks` blocks of `block_size` positions, of `cache_dtype`. None for a head that
        has none."""
        return NativeKVCache.allocate(self._layer, num_blocks, block_size, self.cache_dtype)

    def forward(self, inputs: NativeInputs, hidden: Array, kv_cache: NativeKVCache) -> tuple[Array, Array]:
        """Feed N rows and return (recurrent, final), each `[N, H]` float32. Writes K and V of every row with a slot.

        `inputs.input_ids` are the tokens after the rows' positions: t_{i+1} at position i. `hidden` `[N, H]` is `fuse`
        of the target's states there, or `recurrent` of the previous pass. `final` is the input of `compute_logits`.

        Raises:
            InvalidBufferError: a token, position, slot, block or start is out of range; nothing is written then.
        """
        rows = len(inputs.input_ids)
        final, recurrent = np.empty((rows, self.hidden_size), FLOAT32), np.empty((rows, 1, self.state_size), FLOAT32)
        self.decoder.forward(
            *pass_arrays(inputs),
            kv_cache.native,
            final,
            [1],
            recurrent,
            np.ascontiguousarray(hidden),
            inputs.k_start,
        )
        return recurrent[:, 0], final

    def compute_logits(self, final: Array) -> Array:
        """Return logits over the head's own ids, `[N, Vd]` float32."""
        logits = np.empty((len(final), self.vocab_size), FLOAT32)
        self.decoder.logits(np.ascontiguousarray(final), logits)
        return logits
