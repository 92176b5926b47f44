"""Weights, facts and native passes of heads that read the target's state after its final norm: MTP heads and
assistants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from specrs.arrays import Array
from specrs.drafters.hidden_state import HeadFacts
from specrs.drafters.native_head import NativeHead
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import D, DecoderWeights, T, W


@dataclass(frozen=True, slots=True)
class FinalStateWeights(Generic[T, W, D]):
    """Weights of a head, without those that combine its inputs. T is the type of tensors, W of matrices and D of
    dtypes, as in `DecoderWeights`."""

    decoder: DecoderWeights[T, W, D]
    """The head's layers as a decoder, with the head's own final norm. The embedding is the target's."""
    target_ids: T
    """[draft vocab] int64, ascending: the target's id of each draft id."""
    target_layers: int
    """Number of layers of the target."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the head's layers."""
        return self.decoder.config

    @property
    def dtype(self) -> D:
        """Dtype of activations."""
        return self.decoder.dtype

    @property
    def cache_dtype(self) -> D | None:
        """Dtype of K and V in the cache that the head reads; None: `dtype`."""
        return self.decoder.cache_dtype


class FinalStateFacts(HeadFacts):
    """Facts about a head that do not depend on what computes it."""

    weights: FinalStateWeights[Any, Any, Any]
    keeps_hits = True
    least_acceptance = 0.4

    misfit: str
    """Sentence of `advice`: why the head may not fit its target."""

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Index of the target's hidden states that the head reads: those after the final norm."""
        return (self.weights.target_layers + 1,)

    @property
    def hidden_size(self) -> int:
        """Number of features of the head's own states, which its LM head reads."""
        return self.weights.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of ids that the head drafts, Vd. A row has this many logits."""
        return len(self.weights.target_ids)

    @property
    def max_position_embeddings(self) -> int:
        """Maximum number of positions of the head."""
        return self.weights.config.max_position_embeddings

    @property
    def advice(self) -> str:
        """Sentences for a warning that few drafts are accepted: what may be wrong, and what to do."""
        text = f"{self.misfit} "
        if self.vocab_size < self.weights.config.vocab_size:
            text += f"Raise speculative_config.draft_vocab_size={self.vocab_size}, or leave it out. "
        return text + "Otherwise use another speculative_config.method, such as 'suffix'"


class NativeFinalStateHead(NativeHead):
    """Native passes of a head that combines embedding and state itself, so that the target's state is its input as it
    is."""

    @property
    def _layer(self) -> ModelConfig:
        layers: ModelConfig = self.weights.config
        return layers

    def fuse(self, entries: Array) -> Array:
        """Return the target's hidden states `[N, 1, H]` float32 in the form that `forward` reads, `[N, H]`."""
        return np.ascontiguousarray(entries[:, 0])
