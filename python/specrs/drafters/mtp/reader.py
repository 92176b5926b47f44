"""Reads the tensors of an MTP head, for torch or for native passes. Builds no head.

The tensors are in the target's checkpoint, under names that begin with `mtp.`: `fc`, two norms before it, one layer of
the target's kind, and a final norm. Embedding and LM head are the target's.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from specrs.arrays import Array
from specrs.drafters.mtp.weights import MtpWeights
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import D, DecoderFacts, DecoderWeights, T, W
from specrs.models.layer_reader import LayerReader
from specrs.models.tensors import Tensors, tensor_shapes

LAYER, OF_TARGET = "mtp.layers.0.", "model.layers.0."
FC, EMBEDDING_NORM, HIDDEN_NORM = "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
FINAL_NORM = "mtp.norm"


@dataclass(frozen=True, slots=True)
class MtpFiles:
    """Tensors of an MTP head, opened for a target. No tensor is read yet."""

    path: str
    """Name of the target as the user gave it. The target's checkpoint has the head."""
    config: ModelConfig
    """Configuration of the head's layer: see `head_config`."""
    tensors: Tensors
    """Source of the tensors `mtp.*`."""
    draft_ids: Array
    """[draft vocab] int64, ascending: the ids that the head drafts."""


def head_config(target: ModelConfig) -> ModelConfig:
    """Return the configuration of the head's layer as a model of one layer: attention to all positions, and the MLP or
    experts of the target's last layer."""
    experts = target.experts
    if experts is not None:
        experts = replace(experts, layers=experts.layers[-1:])
    return replace(target, num_layers=1, delta=None, windows=(), ropes=target.ropes[-1:], experts=experts)


def mtp_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a head whose layer has the configuration `c`."""
    h = c.hidden_size
    layer = {
        LAYER + name.removeprefix(OF_TARGET): shape
        for name, shape in tensor_shapes(c).items()
        if name.startswith(OF_TARGET)
    }
    norms = {f"{name}.weight": (h,) for name in (EMBEDDING_NORM, HIDDEN_NORM, FINAL_NORM)}
    return {f"{FC}.weight": (h, 2 * h), **norms, **layer}


class MtpReader(LayerReader[T, W], Generic[T, W, D]):
    """Reader of one head's tensors, or of one rank's part of them, which it fuses and lays out."""

    files: MtpFiles
    held: ModelConfig
    """Configuration of the head's layer with the heads and features that this rank holds."""
    target: DecoderFacts

    def load(self, cache_dtype: D | None) -> MtpWeights[T, W, D]:
        """Read all tensors. `cache_dtype` is the dtype of K and V in the cache. Raises CheckpointError if a tensor is
        missing, unknown or misshapen."""
        c, shared, ids = self.held, self.target.weights, self.files.draft_ids
        self.files.tensors.check(mtp_shapes(self.files.config), {})
        decoder: DecoderWeights[T, W, D] = DecoderWeights(
            config=c,
            dtype=shared.dtype,
            embedding=self.embedding(),
            layers=(self.layer(LAYER, c),),
            final_norm=self.place(self.norm(FINAL_NORM, c)),
            lm_head=self.lm_head(ids, first=int(ids[-1]) == len(ids) - 1),
            rotary=shared.rotary,
            rotaries=shared.rotaries[-1:],
            cache_dtype=cache_dtype,
        )
        return MtpWeights(
            decoder=decoder,
            fc=self.linear([FC], bias=False),
            embedding_norm=self.place(self.norm(EMBEDDING_NORM, c)),
            hidden_norm=self.place(self.norm(HIDDEN_NORM, c)),
            target_ids=self.place(np.ascontiguousarray(ids)),
            target_layers=self.target.num_layers,
        )

    def embedding(self) -> T:
        """Return the target's embedding, `[vocab, hidden]`."""
        embedding: T = self.target.weights.embedding
        return embedding

    @abstractmethod
    def lm_head(self, ids: Array, *, first: bool) -> W:
        """Return the rows `ids` of the target's LM head. With `first` they are the first ones, and a reader whose
        passes compute a part of an LM head may return all of it."""
