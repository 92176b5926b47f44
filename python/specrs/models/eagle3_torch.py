"""From the files of an EAGLE-3 head to a head that torch computes, or one rank's part of it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrs.kernels.linear import DenseWeight, Weight, dense_weight
from specrs.models.dense import Dense
from specrs.models.dense_weights import DenseFacts
from specrs.models.eagle3_head import Eagle3Head, Eagle3Weights
from specrs.models.eagle3_reader import EMBEDDING, LM_HEAD, HeadFiles, HeadReader
from specrs.models.shards import Shard, ShardedTensors, check_divides
from specrs.models.torch_arrays import TORCH_DTYPES
from specrs.models.torch_loader import TorchReader
from specrs.models.torch_tensors import TorchArrays
from specrs.models.torch_weights import TorchFacts
from specrs.parallel.ranks import Ranks


def load_torch_head(
    files: HeadFiles, target: DenseFacts, cache_dtype: np.dtype[Any] | None, ranks: Ranks | None
) -> Eagle3Head:
    """Return the head of `files` for `target`, which torch computes; see `eagle3.load_eagle3`."""
    assert isinstance(target, TorchFacts)
    if ranks is not None:
        field = "speculative_config.draft_tensor_parallel_size"
        check_divides(files.config.layer, files.path, field, ranks.size)
    weights = TorchHeadReader(files, target, ranks).load()
    cached = None if cache_dtype is None else TORCH_DTYPES[cache_dtype]
    return Eagle3Head(replace(weights, cache_dtype=cached), ranks)


class TorchHeadReader(TorchReader, HeadReader[Tensor, Weight, torch.dtype]):
    """Fuses and packs the tensors of a head for torch."""

    def __init__(self, files: HeadFiles, target: TorchFacts, ranks: Ranks | None) -> None:
        shard = None if ranks is None else Shard(ranks.rank, ranks.size)
        config, whole = files.config, files.checkpoint
        held = whole if shard is None else ShardedTensors(whole, config.layer, shard)
        super().__init__(TorchArrays(held), target.weights.dtype, target.device)
        self.file, self.config = whole, config
        self.held = config if shard is None else replace(config, layer=shard.of_config(config.layer))
        self.target, self.shared = target, target.weights
        # A whole head of a target in parts shares no memory with it.
        self.parts = target if ranks is None and isinstance(target, Dense) and target.ranks is not None else None

    def load(self) -> Eagle3Weights:
        """See `HeadReader`."""
        made = super().load()
        return Eagle3Weights(**{field.name: getattr(made, field.name) for field in fields(made)}, device=self.device)

    def embedding(self) -> Tensor:
        """See `HeadReader`; like what follows."""
        shared = self.shared.embedding
        if EMBEDDING not in self.checkpoint:
            return shared if self.parts is None else self.parts.whole_embedding()
        own = self.read(EMBEDDING)
        return shared if own.shape == shared.shape and torch.equal(own.to(shared), shared) else own

    def fc(self, name: str) -> Weight:
        """See `HeadReader`."""
        return dense_weight(self.read(name))

    def lm_head(self, embedding: Tensor) -> Weight:
        """See `HeadReader`."""
        kept = torch.float32 if self.dtype == torch.bfloat16 and self.device.type == "cpu" else self.dtype
        if LM_HEAD in self.checkpoint:
            return dense_weight(self.read(LM_HEAD).to(kept))
        if self.config.layer.tie_word_embeddings and EMBEDDING in self.checkpoint:
            return dense_weight(embedding.to(kept))
        shared = self.shared.lm_head if self.parts is None else self.parts.whole_lm_head()
        same = isinstance(shared, DenseWeight) and self.shared.dtype == self.dtype
        return shared if same else dense_weight(shared.dequantized().to(kept))
