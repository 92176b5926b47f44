"""Weights of a Gemma 4 assistant in arrays of any library, and facts derived from them. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic

import numpy as np

from specrs.arrays import Array
from specrs.drafters.hidden_state import HeadFacts
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import D, DecoderWeights, T, W
from specrs.models.stored import NativeWeight


@dataclass(frozen=True, slots=True)
class AssistantWeights(Generic[T, W, D]):
    """Weights of an assistant. T is the type of tensors, W of matrices and D of dtypes, as in `DecoderWeights`."""

    decoder: DecoderWeights[T, W, D]
    """The assistant's layers, norm and LM head. The embedding is the target's, `[vocab, target's hidden]`."""
    pre: W
    """Matrix from 2 * target's hidden size to the assistant's. Its input is the target's scaled embedding of the token,
    then a state of the target's size."""
    post: W
    """Matrix from the assistant's hidden size to the target's. Its input is the state after the final norm. Its output
    is the state that the next pass reads."""
    target_ids: T
    """[draft vocab] int64, ascending: the target's id of each draft id."""
    target_layers: int
    """Number of layers of the target."""
    target_hidden_size: int
    """Number of features of a hidden state of the target."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the assistant's layers: `AssistantConfig.layers`."""
        return self.decoder.config

    @property
    def dtype(self) -> D:
        """Dtype of activations."""
        return self.decoder.dtype

    @property
    def cache_dtype(self) -> D | None:
        """Dtype of K and V in the target's cache; None: `dtype`."""
        return self.decoder.cache_dtype


NativeAssistantWeights = AssistantWeights[Array, NativeWeight, np.dtype[Any]]
"""Weights of an assistant for the native pass on a CPU."""


class AssistantFacts(HeadFacts):
    """Facts about an assistant that do not depend on what computes it."""

    weights: AssistantWeights[Any, Any, Any]
    keeps_hits = True
    least_acceptance = 0.4

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Index of the target's hidden states that the assistant reads: those after the final norm."""
        return (self.weights.target_layers + 1,)

    @property
    def hidden_size(self) -> int:
        """Number of features of the assistant's own states, which its LM head reads."""
        return self.weights.config.hidden_size

    @property
    def state_size(self) -> int:
        """Number of features of the states that a pass reads and outputs: the target's hidden size."""
        return self.weights.target_hidden_size

    @property
    def target_hidden_size(self) -> int:
        """Number of features of one hidden state of the target."""
        return self.weights.target_hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of ids that the assistant drafts, Vd. A row has this many logits."""
        return len(self.weights.target_ids)

    @property
    def max_position_embeddings(self) -> int:
        """Maximum number of positions of the assistant."""
        return self.weights.config.max_position_embeddings

    @property
    def num_parameters(self) -> int:
        """Number of weights that a pass over one row reads."""
        layers = replace(self.weights.config, vocab_size=self.vocab_size).num_parameters
        return layers + 3 * self.hidden_size * self.target_hidden_size

    @property
    def advice(self) -> str:
        """Sentences for a warning that few drafts are accepted: what may be wrong, and what to do."""
        text = "The assistant may belong to another target, or the target is fine-tuned or quantized to few bits. "
        if self.vocab_size < self.weights.config.vocab_size:
            text += f"Raise speculative_config.draft_vocab_size={self.vocab_size}, or leave it out. "
        return text + "Otherwise use another speculative_config.method, such as 'suffix'"

    def bytes_per_block(self, block_size: int) -> int:
        """Return 0: an assistant has no KV."""
        return 0
