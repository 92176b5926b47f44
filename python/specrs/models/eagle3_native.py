"""The forward pass of an EAGLE-3 head on a CPU as one call of `specrs-cpu`. Its states are fp32 whatever the dtype.

As in `dense_native`, a row's sums have one order, whatever the other rows and the threads; and steps of an engine run
such passes in the Rust core.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specrs.arrays import FLOAT32, Array, bits
from specrs.core import CpuDecoder, CpuPool, CpuWeights
from specrs.models.dense_native import layer_arrays, pass_arrays, stored_parts
from specrs.models.eagle3_weights import Eagle3Facts, NativeHeadWeights
from specrs.models.native_cache import NativeKVCache
from specrs.models.native_inputs import NativeInputs


class NativeEagle3Head(Eagle3Facts):
    """A head without torch; `eagle3_head.Eagle3Head` is its reference."""

    weights: NativeHeadWeights

    def __init__(
        self,
        weights: NativeHeadWeights,
        native: CpuWeights | None = None,
        pool: CpuPool | None = None,
        bf16_rows: bool = False,
    ) -> None:
        """`weights` as `eagle3.load_eagle3` lays them out for a native target; they must not be written while this
        lives. Without a pool passes run on the caller's thread. With `bf16_rows` they round rows to bf16 before every
        product.

        Raises:
            InvalidBufferError: an array that cannot be read where it is, by name; a matrix that is not bf16 with
                `bf16_rows`.
        """
        self.weights = weights
        self._native = _borrow(weights) if native is None else native
        self.decoder = CpuDecoder(self._native, CpuPool(1) if pool is None else pool, bf16_rows=bf16_rows)

    def on_pool(self, pool: CpuPool, *, bf16_rows: bool = False) -> NativeEagle3Head:
        """Return the same weights on the threads of `pool`, with work space of its own."""
        return NativeEagle3Head(self.weights, self._native, pool, bf16_rows)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the KV cache unless that has codes."""
        return self.weights.dtype

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """See `Eagle3Facts`."""
        return self.weights.dtype if self.weights.cache_dtype is None else self.weights.cache_dtype

    @property
    def target_ids(self) -> Array:
        """The target's id of each of its own, `[Vd]` int64, ascending."""
        return self.weights.target_ids

    def allocate_cache(self, num_blocks: int, block_size: int) -> NativeKVCache:
        """See `Eagle3Facts`."""
        return NativeKVCache.allocate(self.weights.config.layer, num_blocks, block_size, self.cache_dtype)

    def fuse(self, entries: Array) -> Array:
        """Return the target's hidden states `[N, L, target's hidden]` float32 as one of its own, `[N, H]`."""
        out = np.empty((len(entries), self.hidden_size), FLOAT32)
        self.decoder.fuse(np.ascontiguousarray(entries), out)
        return out

    def forward(self, inputs: NativeInputs, hidden: Array, kv_cache: NativeKVCache) -> tuple[Array, Array]:
        """Feed N rows: (recurrent, final), each `[N, H]` float32. Writes K and V of every row with a slot.

        `inputs.input_ids` are the tokens after the rows' positions, t_{i+1} at position i; `hidden` `[N, H]` is `fuse`
        of the target's states there, or `recurrent` of the pass before. `final` is what `compute_logits` takes.

        Raises:
            InvalidBufferError: a token, position, slot, block or start that is none; nothing is written then.
        """
        rows, size = len(inputs.input_ids), self.hidden_size
        final, recurrent = np.empty((rows, size), FLOAT32), np.empty((rows, 1, size), FLOAT32)
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
        """Return logits over its own ids, `[N, Vd]` float32."""
        logits = np.empty((len(final), self.vocab_size), FLOAT32)
        self.decoder.logits(np.ascontiguousarray(final), logits)
        return logits


def _borrow(weights: NativeHeadWeights) -> CpuWeights:
    c = weights.config.layer
    return CpuWeights(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        embedding=bits(weights.embedding),
        layers=[layer_arrays(weights.layer, c)],
        final_norm=bits(weights.final_norm),
        lm_head=stored_parts(weights.lm_head),
        frequencies=weights.rotary[c.head_dim // 2 :],
        head={
            "hidden_layers": list(weights.config.aux_layer_ids),
            "fc": stored_parts(weights.fc),
            "fc_norm": None if weights.fc_norm is None else weights.fc_norm.reshape(-1),
            "fc_norm_each": weights.config.fc_norm,
            "hidden_norm": weights.hidden_norm,
            "norm_before_residual": weights.config.norm_before_residual,
            "norm_output": weights.config.norm_output,
            "target_ids": weights.target_ids.tolist(),
        },
    )
