"""Builds a head that torch computes, or one rank's part of it, from the files of an EAGLE-3 head."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrs.drafters.eagle3.head import Eagle3Head, Eagle3Weights
from specrs.drafters.eagle3.reader import EMBEDDING, LM_HEAD, HeadFiles, HeadReader
from specrs.kernels.linear import DenseWeight, Weight, dense_weight
from specrs.models.shards import Shard, ShardedTensors, check_divides
from specrs.models.torch_arrays import TORCH_DTYPES
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import TorchReader
from specrs.models.torch_tensors import TorchArrays
from specrs.parallel.ranks import Ranks


def load_torch_head(
    files: HeadFiles, target: TorchDecoder, cache_dtype: np.dtype[Any] | None, ranks: Ranks | None
) -> Eagle3Head:
    """Return the EAGLE-3 head of `files` for `target`, which torch computes. The head is on the target's device and in
    its dtype.

    With `ranks`, return this rank's part of the head. `cache_dtype` is the dtype of K and V in its cache; None: the
    head's dtype. Raises CheckpointError for tensors that are missing, unknown or misshapen.
    """
    if ranks is not None:
        field = "speculative_config.draft_tensor_parallel_size"
        check_divides(files.config.layer, files.path, field, ranks.size)
    weights = TorchHeadReader(files, target, ranks).load()
    cached = None if cache_dtype is None else TORCH_DTYPES[cache_dtype]
    return Eagle3Head(replace(weights, cache_dtype=cached), ranks)


class TorchHeadReader(TorchReader, HeadReader[Tensor, Weight, torch.dtype]):
    """Reader of an EAGLE-3 head's tensors for torch, or of one rank's part of them.

    Projections that share an input become one matrix. All weights are dense, none is quantized. Without an embedding of
    its own, or with an equal one, the head uses the target's. Without an LM head of its own, it uses its tied embedding
    or the target's LM head.
    """

    def __init__(self, files: HeadFiles, target: TorchDecoder, ranks: Ranks | None) -> None:
        shard = None if ranks is None else Shard(ranks.rank, ranks.size)
        config, whole = files.config, files.checkpoint
        held = whole if shard is None else ShardedTensors(whole, config.layer, shard)
        super().__init__(TorchArrays(held), target.weights.dtype, target.device)
        self.file, self.config = whole, config
        self.held = config if shard is None else replace(config, layer=shard.of_config(config.layer))
        self.target, self.shared = target, target.weights
        # A whole head of a target in parts shares no memory with it.
        self.parts = target if ranks is None and target.ranks is not None else None

    def load(self) -> Eagle3Weights:
        """Read all tensors onto the target's device. Raises `CheckpointError` if one is missing, unknown or
        misshapen."""
        made = super().load()
        return Eagle3Weights(**{field.name: getattr(made, field.name) for field in fields(made)}, device=self.device)

    def embedding(self) -> Tensor:
        """Return the head's embedding `[V, H]`: the target's own tensor if the file has none or an equal one."""
        shared = self.shared.embedding
        if EMBEDDING not in self.checkpoint:
            return shared if self.parts is None else self.parts.whole_embedding()
        own = self.read(EMBEDDING)
        return shared if own.shape == shared.shape and torch.equal(own.to(shared), shared) else own

    def fc(self, name: str) -> Weight:
        """Read the projection that fuses the target's hidden states, `[H, L * target's hidden]`."""
        return dense_weight(self.read(name))

    def lm_head(self, embedding: Tensor) -> Weight:
        """Return the LM head: the file's; if the file has none, the head's embedding if tied, else the target's."""
        kept = torch.float32 if self.dtype == torch.bfloat16 and self.device.type == "cpu" else self.dtype
        if LM_HEAD in self.checkpoint:
            return dense_weight(self.read(LM_HEAD).to(kept))
        if self.config.layer.tie_word_embeddings and EMBEDDING in self.checkpoint:
            return dense_weight(embedding.to(kept))
        shared = self.shared.lm_head if self.parts is None else self.parts.whole_lm_head()
        same = isinstance(shared, DenseWeight) and self.shared.dtype == self.dtype
        return shared if same else dense_weight(shared.dequantized().to(kept))
