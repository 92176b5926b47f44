"""Reads the tensors of a Gemma 4 assistant, for native passes. Builds no model.

Its layers have no k and v projections. `pre_projection` combines the target's embedding of a token and its hidden state
into a state of the assistant. `post_projection` turns a state of the assistant into one of the target's size. The LM
head is `lm_head`, or else `model.embed_tokens`; tokens are embedded by the target's embedding.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from specrs.arrays import Array
from specrs.drafters.assistant.config import AssistantConfig
from specrs.drafters.assistant.weights import AssistantWeights
from specrs.models.checkpoint import Checkpoint
from specrs.models.decoder_weights import D, DecoderFacts, DecoderWeights, T, W
from specrs.models.layer_reader import LayerReader
from specrs.models.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, optional_shapes, tensor_shapes

PRE, POST = "pre_projection", "post_projection"
ORDERED = ("masked_embedding.centroids.weight", "masked_embedding.token_ordering")
"""Tensors with centroids of groups of token ids, and with the ids of each group. They are not read: all ids are
scored."""


@dataclass(frozen=True, slots=True)
class AssistantFiles:
    """Tensors of an assistant, opened for a target. No tensor is read yet."""

    path: str
    """Name of the assistant as the user gave it."""
    config: AssistantConfig
    tensors: Checkpoint
    draft_ids: Array
    """[draft vocab] int64, ascending: the ids that the assistant drafts."""


def assistant_shapes(config: AssistantConfig, state_size: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of an assistant for a target whose states have `state_size` features."""
    h = config.layers.hidden_size
    of_states = {f"{PRE}.weight": (h, 2 * state_size), f"{POST}.weight": (state_size, h)}
    return tensor_shapes(config.layers) | of_states


class AssistantReader(LayerReader[T, W], Generic[T, W, D]):
    """Reader of one assistant's tensors, which it fuses and lays out."""

    files: AssistantFiles
    target: DecoderFacts

    def load(self, cache_dtype: D | None) -> AssistantWeights[T, W, D]:
        """Read all tensors. `cache_dtype` is the dtype of K and V in the target's cache. Raises CheckpointError if a
        tensor is missing, unknown or misshapen."""
        config, shared, ids = self.files.config, self.target.weights, self.files.draft_ids
        c, size = config.layers, self.target.hidden_size
        self.files.tensors.check(assistant_shapes(config, size), optional_shapes(c), ORDERED if config.ordered else ())
        layers = tuple(
            # Codes of an FP8 cache have the scales with which the target writes them.
            replace(self.layer(f"model.layers.{i}.", c, c.sizes_of(i)), kv_scales=shared.layers[source].kv_scales)
            for i, source in enumerate(config.sources)
        )
        head = EMBEDDING if c.tie_word_embeddings and LM_HEAD not in self.files.tensors else LM_HEAD
        decoder: DecoderWeights[T, W, D] = DecoderWeights(
            config=c,
            dtype=shared.dtype,
            embedding=shared.embedding,
            layers=layers,
            final_norm=self.place(self.norm(FINAL_NORM.removesuffix(".weight"), c)),
            lm_head=self.lm_head(head, ids, first=int(ids[-1]) == len(ids) - 1),
            rotary=shared.rotary,
            rotaries=tuple(shared.rotaries[source] for source in config.sources),
            cache_dtype=cache_dtype,
        )
        return AssistantWeights(
            decoder=decoder,
            pre=self.linear([PRE], bias=False),
            post=self.linear([POST], bias=False),
            target_ids=self.place(np.ascontiguousarray(ids)),
            target_layers=self.target.num_layers,
            target_hidden_size=size,
        )

    @abstractmethod
    def lm_head(self, name: str, ids: Array, *, first: bool) -> W:
        """Return the rows `ids` of the LM head, the tensor `name`. With `first`, `ids` are the first rows. A reader may
        then return the whole matrix, if its passes can compute the first rows alone."""
