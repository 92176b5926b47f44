"""Weights of an EAGLE-3 head (Li et al. 2025), in arrays of any library, and facts derived from them. Computes
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from specrs.arrays import Array
from specrs.drafters.eagle3.config import Eagle3Config
from specrs.drafters.hidden_state import HeadFacts
from specrs.models.decoder_weights import D, LayerWeights, T, W
from specrs.models.kv_dtypes import kv_block_bytes
from specrs.models.stored import NativeWeight


@dataclass(frozen=True, slots=True)
class HeadWeights(Generic[T, W, D]):
    """Weights of a head, or one rank's part of them. T is the type of tensors, W of matrices and D of dtypes, as in
    `DecoderWeights`."""

    config: Eagle3Config
    """Configuration of the head. Its layer has the numbers of heads and features that are on this rank."""
    dtype: D
    """Dtype of activations."""
    embedding: T
    """[target's vocab, hidden]. It may share the target's memory, and then has its dtype."""
    fc: W
    """Matrix from L * target's hidden to hidden."""
    fc_norm: T | None
    """[L, target's hidden], a norm for each of the L hidden states; or [L * target's hidden], one norm for all; None:
    no norm."""
    hidden_norm: T
    """[hidden], norm of the hidden state at the layer's input."""
    layer: LayerWeights[T, W]
    """The layer. Its `qkv` is a matrix from 2 * hidden to (heads + 2 * kv_heads) * head_dim."""
    final_norm: T
    """[hidden], norm before the LM head."""
    lm_head: W
    """Matrix from hidden to the draft vocabulary."""
    rotary: T
    """[head_dim] float32, signed frequencies of RoPE."""
    target_ids: T
    """[draft vocab] int64, the target's id of each draft id."""
    max_position_embeddings: int
    cache_dtype: D | None = None
    """Dtype of K and V in the cache; None: `dtype`."""


NativeHeadWeights = HeadWeights[Array, NativeWeight, np.dtype[Any]]
"""Weights of a head for the native pass on a CPU."""


class Eagle3Facts(HeadFacts):
    """Facts about an EAGLE-3 head that do not depend on what computes it."""

    weights: HeadWeights[Any, Any, Any]
    least_acceptance = 0.15

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Target layers at whose entry the head reads hidden states, ascending."""
        return self.weights.config.aux_layer_ids

    @property
    def target_hidden_size(self) -> int:
        """Number of features of one hidden state of the target."""
        return self.weights.config.target_hidden_size

    @property
    def advice(self) -> str:
        """Sentences for a warning that few drafts are accepted: what may be wrong, and what to do."""
        ids = list(self.aux_layer_ids)
        return (
            f"It reads hidden states where they enter layers {ids}, counted from 0; where its ids mean the output of a "
            f"layer, set speculative_config.aux_hidden_state_layer_ids={[layer + 1 for layer in ids]}, and where it "
            "was trained with another base than its config.json says, speculative_config.rope_theta"
        )

    @property
    def hidden_size(self) -> int:
        """Number of features of the head's states, H."""
        return self.weights.config.layer.hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of ids that the head drafts, Vd. A row has this many logits."""
        return self.weights.config.draft_vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Maximum number of positions: the target's. The head sets no limit, because its RoPE angles are computed and
        not looked up."""
        return self.weights.max_position_embeddings

    @property
    def num_parameters(self) -> int:
        """Number of weights that a pass reads."""
        w = self.weights
        matrices = (w.fc, w.layer.qkv, w.layer.o, w.layer.gate_up, w.layer.down, w.lm_head)
        return sum(int(m.shape[0] * m.shape[1]) for m in matrices) + 4 * self.hidden_size

    def bytes_per_block(self, block_size: int) -> int:
        """Return the number of bytes of KV of one block."""
        return kv_block_bytes(self.weights.config.layer, block_size, self.cache_dtype.itemsize)
