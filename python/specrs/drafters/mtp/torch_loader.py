"""Builds an MTP head that torch computes from its tensors."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrs.arrays import Array
from specrs.drafters.mtp.head import MtpHead, TorchMtpWeights
from specrs.drafters.mtp.reader import MtpFiles, MtpReader
from specrs.kernels.linear import DenseWeight, Weight, dense_weight
from specrs.models.shards import Shard, ShardedTensors
from specrs.models.torch_arrays import TORCH_DTYPES
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import TorchReader
from specrs.models.torch_tensors import TorchArrays
from specrs.models.torch_weights import TorchWeights
from specrs.parallel.ranks import Ranks


def load_torch_mtp(
    files: MtpFiles, target: TorchDecoder, cache_dtype: np.dtype[Any] | None, ranks: Ranks | None = None
) -> MtpHead:
    """Return the head of `files` for `target`, on the target's device and in its dtype.

    With `ranks`, return this rank's part of the head. `cache_dtype` is the dtype of K and V in its cache; None: the
    head's dtype. Raises CheckpointError for tensors that are missing, unknown or misshapen.
    """
    made = TorchMtpReader(files, target, ranks).load(None if cache_dtype is None else TORCH_DTYPES[cache_dtype])
    decoder = {field.name: getattr(made.decoder, field.name) for field in fields(made.decoder)}
    of_head = {field.name: getattr(made, field.name) for field in fields(made)}
    return MtpHead(TorchMtpWeights(**of_head | {"decoder": TorchWeights(**decoder, device=target.device)}), ranks)


class TorchMtpReader(TorchReader, MtpReader[Tensor, Weight, torch.dtype]):
    """Fuses and packs the tensors of a head, or of one rank's part of it, for torch."""

    target: TorchDecoder

    def __init__(self, files: MtpFiles, target: TorchDecoder, ranks: Ranks | None) -> None:
        shard = None if ranks is None else Shard(ranks.rank, ranks.size)
        tensors = files.tensors if shard is None else ShardedTensors(files.tensors, files.config, shard)
        super().__init__(TorchArrays(tensors), target.weights.dtype, target.device)
        self.files, self.target, self.is_part = files, target, shard is not None
        self.held = files.config if shard is None else shard.of_config(files.config)

    def embedding(self) -> Tensor:
        """Return the target's embedding, or this rank's part of it."""
        return self.target.weights.embedding if self.is_part else self.target.whole_embedding()

    def lm_head(self, ids: Array, *, first: bool) -> Weight:
        """Return the rows `ids` of the target's LM head; a view of it if they are its first ones and it is not
        quantized. A part of a head has all ids, and returns this rank's part of the LM head."""
        if self.is_part:
            return self.target.weights.lm_head
        shared = self.target.whole_lm_head()
        if len(ids) == shared.shape[0]:
            return shared
        rows = shared.weight if isinstance(shared, DenseWeight) else shared.dequantized()
        return dense_weight(rows[: len(ids)] if first else rows[torch.from_numpy(ids).to(rows.device)])
