"""Passes of native models over tensors, so that tests feed them and torch's models alike. Holds no tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from specrs.models import tensor_passes
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.native_cache import NativeKVCache
from specrs.models.native_inputs import NativeInputs
from specrs.models.stored import Codes, NativeWeight
from specrs.models.torch_arrays import to_torch
from torch import Tensor


def tensors_of(cache: NativeKVCache | KVCache) -> KVCache:
    """The memory of a cache, as tensors."""
    if isinstance(cache, KVCache):
        return cache
    return KVCache([to_torch(layer) for layer in cache.layers], cache.block_size)


class TensorHead:
    """A native head whose passes take and return tensors. All else is the head's."""

    def __init__(self, native: NativeEagle3Head) -> None:
        self.native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def fuse(self, entries: Tensor) -> Tensor:
        return torch.from_numpy(self.native.fuse(entries.float().numpy()))

    def forward(
        self, inputs: PassInputs, hidden: Tensor, kv_cache: Any, k_start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        fed = tensor_passes.native_inputs(inputs)
        if k_start is not None:
            fed = NativeInputs(
                fed.input_ids, fed.positions, fed.slots, fed.q_start, fed.block_table, np.asarray(k_start)
            )
        recurrent, final = self.native.forward(fed, hidden.float().numpy(), kv_cache)
        return torch.from_numpy(recurrent), torch.from_numpy(final)

    def compute_logits(self, final: Tensor) -> Tensor:
        return torch.from_numpy(self.native.compute_logits(final.numpy()))


def numbers_of(weight: NativeWeight) -> Any:
    """The parts of a projection above each other as numbers, `[out, in]` float64."""
    return np.concatenate(
        [(part.numbers() if isinstance(part, Codes) else part).astype(np.float64) for part in weight.parts]
    )


def over_tensors(model: Any) -> Any:
    """A decoder or head, or if it is native what feeds it tensors."""
    return TensorHead(model) if isinstance(model, NativeEagle3Head) else tensor_passes.over_tensors(model)
