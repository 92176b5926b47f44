"""Weights of a Gemma 4 assistant in arrays of any library, and facts derived from them. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specrs.arrays import Array
from specrs.drafters.final_state import FinalStateFacts, FinalStateWeights
from specrs.models.decoder_weights import D, T, W
from specrs.models.stored import NativeWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantWeights(FinalStateWeights[T, W, D]):
    """Weights of an assistant. Its decoder has the target's embedding, `[vocab, target's hidden]`, and an LM head of
    its own."""

    pre: W
    """Matrix from 2 * target's hidden size to the assistant's. Its input is the target's scaled embedding of the token,
    then a state of the target's size."""
    post: W
    """Matrix from the assistant's hidden size to the target's. Its input is the state after the final norm. Its output
    is the state that the next pass reads."""
    target_hidden_size: int
    """Number of features of a hidden state of the target."""


NativeAssistantWeights = AssistantWeights[Array, NativeWeight, np.dtype[Any]]
"""Weights of an assistant for the native pass on a CPU."""


class AssistantFacts(FinalStateFacts):
    """Facts about an assistant that do not depend on what computes it."""

    weights: AssistantWeights[Any, Any, Any]
    misfit = "The assistant may belong to another target, or the target is fine-tuned or quantized to few bits."

    @property
    def state_size(self) -> int:
        """Number of features of the states that a pass reads and outputs: the target's hidden size."""
        return self.weights.target_hidden_size

    @property
    def target_hidden_size(self) -> int:
        """Number of features of one hidden state of the target."""
        return self.weights.target_hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of weights that a pass over one row reads."""
        layers = replace(self.weights.config, vocab_size=self.vocab_size).num_parameters
        return layers + 3 * self.hidden_size * self.target_hidden_size

    def bytes_per_block(self, block_size: int) -> int:
        """Return 0: an assistant has no KV."""
        return 0
