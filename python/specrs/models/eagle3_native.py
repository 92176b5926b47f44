"""The forward pass of an EAGLE-3 head on a CPU as one call of `specrs-cpu`. Its states are fp32 whatever the dtype.

As in `dense_native`, a row's sums have one order, whatever the other rows and the threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specrs.core import CpuDecoder, CpuPool, CpuWeights
from specrs.models.dense_native import (
    NativeKVCache,
    array,
    layer_arrays,
    native_cache,
    native_of,
    pass_arrays,
    stored_parts,
)
from specrs.models.eagle3_head import Eagle3Head, Eagle3Weights
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache


class NativeEagle3Head(Eagle3Head):
    """A head without torch in its passes; `Eagle3Head` is its reference."""

    def __init__(
        self,
        weights: Eagle3Weights,
        native: CpuWeights | None = None,
        pool: CpuPool | None = None,
        bf16_rows: bool = False,
    ) -> None:
        """`weights` as `eagle3.load_eagle3` lays them out for a native target; they must not be written while this
        lives. Without a pool passes run on the caller's thread. With `bf16_rows` they round rows to bf16 before every
        product.

        Raises:
            InvalidBufferError: a tensor that cannot be read where it is, by name; a matrix that is not bf16 with
                `bf16_rows`.
        """
        super().__init__(weights)
        self._native = _borrow(weights) if native is None else native
        self.decoder = CpuDecoder(self._native, CpuPool(1) if pool is None else pool, bf16_rows=bf16_rows)

    def on_pool(self, pool: CpuPool, *, bf16_rows: bool = False) -> NativeEagle3Head:
        """The same weights on the threads of `pool`, with work space of its own."""
        return NativeEagle3Head(self.weights, self._native, pool, bf16_rows)

    def allocate_cache(self, num_blocks: int, block_size: int) -> NativeKVCache:
        """See `Eagle3Head`."""
        cache = super().allocate_cache(num_blocks, block_size)
        return NativeKVCache(cache.layers, block_size, native_cache(cache))

    def fuse(self, entries: Tensor) -> Tensor:
        """See `Eagle3Head`; fp32."""
        out = torch.empty((len(entries), self.hidden_size), dtype=torch.float32)
        self.decoder.fuse(entries.float().contiguous().numpy(), out.numpy())
        return out

    def forward(
        self, inputs: PassInputs, hidden: Tensor, kv_cache: KVCache, k_start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Eagle3Head`; states are fp32.

        Raises:
            InvalidBufferError: a token, position, slot, block or start that is none; nothing is written then.
        """
        rows, size = len(inputs.input_ids), self.hidden_size
        final = torch.empty((rows, size), dtype=torch.float32)
        recurrent = torch.empty((rows, 1, size), dtype=torch.float32)
        self.decoder.forward(
            *pass_arrays(inputs),
            native_of(kv_cache),
            final.numpy(),
            [1],
            recurrent.numpy(),
            hidden.float().contiguous().numpy(),
            None if k_start is None else k_start.contiguous().numpy(),
        )
        return recurrent[:, 0], final

    def compute_logits(self, final: Tensor) -> Tensor:
        """See `Eagle3Head`; fp32."""
        logits = torch.empty((len(final), self.vocab_size), dtype=torch.float32)
        self.decoder.logits(final.contiguous().numpy(), logits.numpy())
        return logits


def _borrow(weights: Eagle3Weights) -> CpuWeights:
    c = weights.config.layer
    return CpuWeights(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        embedding=array(weights.embedding),
        layers=[layer_arrays(weights.layer, c)],
        final_norm=array(weights.final_norm),
        lm_head=stored_parts(weights.lm_head),
        frequencies=weights.rotary[c.head_dim // 2 :].numpy(),
        head={
            "hidden_layers": list(weights.config.aux_layer_ids),
            "fc": stored_parts(weights.fc),
            "fc_norm": None if weights.fc_norm is None else array(weights.fc_norm.flatten()),
            "fc_norm_each": weights.config.fc_norm,
            "hidden_norm": array(weights.hidden_norm),
            "norm_before_residual": weights.config.norm_before_residual,
            "norm_output": weights.config.norm_output,
            "target_ids": weights.target_ids.tolist(),
        },
    )
