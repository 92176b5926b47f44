"""Wraps native models so that tests feed them tensors, as torch models. Holds no tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from specrs.core import PackedMatrix
from specrs.drafters.eagle3.native import NativeEagle3Head
from specrs.drafters.mtp.native import NativeMtpHead
from specrs.models.base import HiddenStates
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.native_cache import NativeKVCache
from specrs.models.native_decoder import NativeDecoder
from specrs.models.native_inputs import NativeInputs
from specrs.models.stored import NativeWeight
from specrs.models.torch_arrays import to_torch
from torch import Tensor


def tensors_of(cache: NativeKVCache | KVCache) -> KVCache:
    """Return the memory of a cache as tensors."""
    if isinstance(cache, KVCache):
        return cache
    return KVCache([to_torch(layer) for layer in cache.layers], cache.block_size)


class TensorPasses:
    """A native decoder whose passes take and return tensors. Other attributes are the decoder's."""

    def __init__(self, native: NativeDecoder) -> None:
        self.native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def forward(self, inputs: PassInputs, kv_cache: Any, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        """Run a pass by the native model, as `TorchModel.forward`. Return final hidden states and those at
        `hidden_layers`.

        Raises ValueError if the model has states and `state_rows` are not the first rows in order: native passes take
        no state rows.
        """
        rows = inputs.state_rows
        if self.native.config.states is not None and rows is not None and rows != tuple(range(len(rows))):
            raise ValueError(f"state_rows={rows}: native passes take the first requests in order")
        final, entries = self.native.forward(native_inputs(inputs), kv_cache, hidden_layers)
        return HiddenStates(torch.from_numpy(final), None if entries is None else torch.from_numpy(entries))

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the native model's logits `[N, V]`, or write their first columns into `out`."""
        logits = torch.from_numpy(self.native.compute_logits(hidden.numpy()))
        return logits if out is None else out.copy_(logits[:, : out.shape[1]])

    def compute_argmax(self, hidden: Tensor, ids: Tensor, top: Tensor, num_ids: int | None = None) -> None:
        """Write the ids and logits of each row's largest logit into `ids` and `top`."""
        for into, found in zip((ids, top), self.native.compute_argmax(hidden.numpy(), num_ids), strict=True):
            into.copy_(torch.from_numpy(found))


def native_inputs(inputs: PassInputs) -> NativeInputs:
    """Return inputs as arrays, which share the tensors' memory where it is contiguous. `state_rows` are left out.

    Raises ValueError if there are snapshots, which native passes called from Python do not write.
    """
    if inputs.snapshots:
        raise ValueError(f"snapshots={inputs.snapshots}: native passes called from Python write none")
    return NativeInputs(
        input_ids=_array(inputs.input_ids),
        positions=_array(inputs.positions),
        slots=_array(inputs.slots),
        q_start=_array(inputs.q_start),
        block_table=_array(inputs.block_table),
        k_start=_array(inputs.k_start),
        group_slots=_array(inputs.group_slots),
        group_tables=_array(inputs.group_tables),
        prompts=inputs.prompts,
        adapters=[(given.adapter, given.rows.tolist()) for given in inputs.adapters],
    )


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.contiguous().numpy()


class TensorHead:
    """A native head whose passes take and return tensors. Other attributes are the head's."""

    def __init__(self, native: NativeEagle3Head | NativeMtpHead) -> None:
        self.native = native
        self.target_ids = torch.from_numpy(native.target_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def fuse(self, entries: Tensor) -> Tensor:
        return torch.from_numpy(self.native.fuse(entries.float().numpy()))

    def forward(
        self, inputs: PassInputs, hidden: Tensor, kv_cache: Any, k_start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        fed = native_inputs(inputs)
        if k_start is not None:
            fed = NativeInputs(
                fed.input_ids, fed.positions, fed.slots, fed.q_start, fed.block_table, np.asarray(k_start)
            )
        recurrent, final = self.native.forward(fed, hidden.float().numpy(), kv_cache)
        return torch.from_numpy(recurrent), torch.from_numpy(final)

    def compute_logits(self, final: Tensor) -> Tensor:
        return torch.from_numpy(self.native.compute_logits(final.numpy()))


def numbers_of(weight: NativeWeight) -> Any:
    """Return the parts of a projection, stacked and dequantized, `[out, in]` float64."""
    return np.concatenate(
        [(part.numbers() if isinstance(part, PackedMatrix) else part).astype(np.float64) for part in weight.parts]
    )


def over_tensors(model: Any) -> Any:
    """Return a torch decoder or head as it is, and wrap a native one to take tensors."""
    if isinstance(model, NativeDecoder):
        return TensorPasses(model)
    return TensorHead(model) if isinstance(model, NativeEagle3Head | NativeMtpHead) else model
