"""The weights of an EAGLE-3 head (Li et al. 2025), whatever holds them, and what they say of it. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from specrs.arrays import Array
from specrs.models.dense_weights import D, LayerWeights, T, W
from specrs.models.eagle3_config import Eagle3Config
from specrs.models.kv_dtypes import kv_block_bytes
from specrs.models.stored import NativeWeight


@dataclass(frozen=True, slots=True)
class HeadWeights(Generic[T, W, D]):
    """Weights of a head, or one rank's part of them. T, W and D are those of `DenseWeights`."""

    config: Eagle3Config
    """Its layer with the heads and features that are here."""
    dtype: D
    """Type of activations."""
    embedding: T
    """[target's vocab, hidden], perhaps the target's own memory and dtype."""
    fc: W
    """L * target's hidden -> hidden"""
    fc_norm: T | None
    """[L, target's hidden], a norm for each entry, or [L * target's hidden], one for all."""
    hidden_norm: T
    """[hidden]"""
    layer: LayerWeights[T, W]
    """`qkv`: 2 * hidden -> (heads + 2 * kv_heads) * head_dim"""
    final_norm: T
    """[hidden]"""
    lm_head: W
    """hidden -> draft vocab"""
    rotary: T
    """[head_dim] float32, signed frequencies."""
    target_ids: T
    """[draft vocab] int64"""
    max_position_embeddings: int
    cache_dtype: D | None = None
    """Type of K and V in the cache; None: `dtype`."""


NativeHeadWeights = HeadWeights[Array, NativeWeight, np.dtype[Any]]
"""What the native pass of a CPU reads."""


class Eagle3Facts:
    """What a head is, whatever computes it."""

    weights: HeadWeights[Any, Any, Any]

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """Type of K and V in the cache."""
        raise NotImplementedError

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Target layers at whose entry it reads hidden states, ascending."""
        return self.weights.config.aux_layer_ids

    @property
    def hidden_size(self) -> int:
        """Size of its own states, H."""
        return self.weights.config.layer.hidden_size

    @property
    def vocab_size(self) -> int:
        """Ids that it drafts, Vd: logits of a row."""
        return self.weights.config.draft_vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Positions that it takes: the target's, for its angles are computed and no table of them ends."""
        return self.weights.max_position_embeddings

    @property
    def num_parameters(self) -> int:
        """Weights that a pass reads."""
        w = self.weights
        matrices = (w.fc, w.layer.qkv, w.layer.o, w.layer.gate_up, w.layer.down, w.lm_head)
        return sum(int(m.shape[0] * m.shape[1]) for m in matrices) + 4 * self.hidden_size

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of KV of one block."""
        return kv_block_bytes(self.weights.config.layer, block_size, self.cache_dtype.itemsize)

    def allocate_cache(self, num_blocks: int, block_size: int) -> Any:
        """Return a zeroed cache of its own layout: one layer."""
        raise NotImplementedError
