"""Weights of an MTP head in arrays of any library, and facts derived from them. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic

import numpy as np

from specrs.arrays import Array
from specrs.drafters.hidden_state import HeadFacts
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import D, DecoderWeights, T, W
from specrs.models.kv_dtypes import kv_block_bytes
from specrs.models.stored import NativeWeight


@dataclass(frozen=True, slots=True)
class MtpWeights(Generic[T, W, D]):
    """Weights of a head. T is the type of tensors, W of matrices and D of dtypes, as in `DecoderWeights`."""

    decoder: DecoderWeights[T, W, D]
    """The head's layer as a decoder of one layer, with the head's own final norm. Embedding and LM head are the
    target's; the LM head may have only the rows of the drafted ids."""
    fc: W
    """Matrix from 2 * hidden to hidden. Reads the normed embedding, then the normed hidden state."""
    embedding_norm: T
    """[hidden], norm of the embedding before `fc`."""
    hidden_norm: T
    """[hidden], norm of the hidden state before `fc`."""
    target_ids: T
    """[draft vocab] int64, ascending: the target's id of each draft id."""
    target_layers: int
    """Number of layers of the target."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the head's layer, as a model of one layer with the target's vocabulary."""
        return self.decoder.config

    @property
    def dtype(self) -> D:
        """Dtype of activations."""
        return self.decoder.dtype

    @property
    def cache_dtype(self) -> D | None:
        """Dtype of K and V in the cache; None: `dtype`."""
        return self.decoder.cache_dtype


NativeMtpWeights = MtpWeights[Array, NativeWeight, np.dtype[Any]]
"""Weights of a head for the native pass on a CPU."""


class MtpFacts(HeadFacts):
    """Facts about an MTP head that do not depend on what computes it."""

    weights: MtpWeights[Any, Any, Any]
    keeps_hits = True
    least_acceptance = 0.4

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The target's hidden states that the head reads: those after the final norm."""
        return (self.weights.target_layers + 1,)

    @property
    def hidden_size(self) -> int:
        """Number of features of the head's states, and of the target's."""
        return self.weights.config.hidden_size

    @property
    def target_hidden_size(self) -> int:
        """Number of features of one hidden state of the target."""
        return self.hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of ids that the head drafts, Vd. A row has this many logits."""
        return len(self.weights.target_ids)

    @property
    def max_position_embeddings(self) -> int:
        """Maximum number of positions: the target's."""
        return self.weights.config.max_position_embeddings

    @property
    def num_parameters(self) -> int:
        """Number of weights that a pass over one row reads."""
        of_layer = replace(self.weights.config, vocab_size=self.vocab_size).num_parameters
        return of_layer + 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size

    @property
    def advice(self) -> str:
        """Sentences for a warning that few drafts are accepted: what may be wrong, and what to do."""
        text = "The head may belong to another version of the model: fine-tuning often leaves it as it was. "
        if self.vocab_size < self.weights.config.vocab_size:
            text += f"Raise speculative_config.draft_vocab_size={self.vocab_size}, or leave it out. "
        return text + "Otherwise use another speculative_config.method, such as 'suffix'"

    def bytes_per_block(self, block_size: int) -> int:
        """Return the number of bytes of KV of one block."""
        return kv_block_bytes(self.weights.config, block_size, self.cache_dtype.itemsize)
