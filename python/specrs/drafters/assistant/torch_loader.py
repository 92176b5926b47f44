"""Loader of Gemma 4's assistants as torch tensors, for passes on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrs.arrays import Array
from specrs.drafters.assistant.reader import AssistantFiles, AssistantReader
from specrs.drafters.assistant.weights import AssistantFacts, AssistantWeights
from specrs.kernels.linear import Weight, dense_weight
from specrs.models.torch_arrays import TORCH_DTYPES
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import TorchReader
from specrs.models.torch_tensors import TorchArrays
from specrs.models.torch_weights import TorchHeld, TorchWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAssistantWeights(AssistantWeights[Tensor, Weight, torch.dtype]):
    """Weights of an assistant on one device."""

    decoder: TorchWeights

    @property
    def device(self) -> torch.device:
        """Device that holds the weights."""
        return self.decoder.device


class TorchAssistant(TorchHeld, AssistantFacts):
    """An assistant as torch tensors. Computes nothing: torch has no pass of its own for it."""

    weights: TorchAssistantWeights

    def __init__(self, weights: TorchAssistantWeights) -> None:
        self.weights = weights

    @property
    def target_ids(self) -> Tensor:
        """For each of the assistant's own ids, the target's id, `[Vd]` int64, ascending."""
        return self.weights.target_ids


def load_torch_assistant(
    files: AssistantFiles, target: TorchDecoder, cache_dtype: np.dtype[Any] | None
) -> TorchAssistant:
    """Return the assistant of `files` for `target`, on the target's device and in its dtype.

    `cache_dtype` is the dtype of K and V in the target's cache; None: the target's dtype. Raises CheckpointError for
    tensors that are missing, unknown or misshapen.
    """
    made = TorchAssistantReader(files, target).load(None if cache_dtype is None else TORCH_DTYPES[cache_dtype])
    decoder = {field.name: getattr(made.decoder, field.name) for field in fields(made.decoder)}
    own = {field.name: getattr(made, field.name) for field in fields(made)}
    return TorchAssistant(TorchAssistantWeights(**own | {"decoder": TorchWeights(**decoder, device=target.device)}))


class TorchAssistantReader(TorchReader, AssistantReader[Tensor, Weight, torch.dtype]):
    """Fuses the tensors of an assistant for torch."""

    def __init__(self, files: AssistantFiles, target: TorchDecoder) -> None:
        super().__init__(TorchArrays(files.tensors), target.weights.dtype, target.device)
        self.files, self.target = files, target

    def lm_head(self, name: str, ids: Array, *, first: bool) -> Weight:
        """Return the rows `ids` of the LM head, the tensor `name`. A copy, unless they are all rows."""
        rows = self.matrix(name)
        return dense_weight(rows if len(ids) == len(rows) else rows[self.place(ids)])
