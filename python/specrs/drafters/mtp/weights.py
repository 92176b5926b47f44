"""Weights of an MTP head in arrays of any library, and facts derived from them. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specrs.arrays import Array
from specrs.drafters.final_state import FinalStateFacts, FinalStateWeights
from specrs.models.decoder_weights import D, T, W
from specrs.models.kv_dtypes import kv_block_bytes
from specrs.models.stored import NativeWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpWeights(FinalStateWeights[T, W, D]):
    """Weights of an MTP head. Its decoder has one layer and the target's LM head, or the rows of that for the drafted
    ids."""

    fc: W
    """Matrix from 2 * hidden to hidden. Reads the normed embedding, then the normed hidden state."""
    embedding_norm: T
    """[hidden], norm of the embedding before `fc`."""
    hidden_norm: T
    """[hidden], norm of the hidden state before `fc`."""


NativeMtpWeights = MtpWeights[Array, NativeWeight, np.dtype[Any]]
"""Weights of a head for the native pass on a CPU."""


class MtpFacts(FinalStateFacts):
    """Facts about an MTP head that do not depend on what computes it."""

    weights: MtpWeights[Any, Any, Any]
    misfit = "The head may belong to another version of the model: fine-tuning often leaves it as it was."

    @property
    def target_hidden_size(self) -> int:
        """Number of features of one hidden state of the target."""
        return self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of weights that a pass over one row reads."""
        of_layer = replace(self.weights.config, vocab_size=self.vocab_size).num_parameters
        return of_layer + 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size

    def bytes_per_block(self, block_size: int) -> int:
        """Return the number of bytes of KV of one block."""
        return kv_block_bytes(self.weights.config, block_size, self.cache_dtype.itemsize)
