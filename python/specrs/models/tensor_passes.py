"""Passes of a native model over tensors, for launches that run op by op next to native models: with drafts of another
tokenizer, and where torch computes the target alone. Copies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specrs.models.base import HiddenStates, TorchModel
from specrs.models.dense_native import NativeDense
from specrs.models.inputs import PassInputs
from specrs.models.native_inputs import NativeInputs


class TensorPasses:
    """A native decoder whose passes take and return tensors. All else is the decoder's."""

    def __init__(self, native: NativeDense) -> None:
        self.native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def forward(self, inputs: PassInputs, kv_cache: Any, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        """See `TorchModel`; like what follows."""
        final, entries = self.native.forward(native_inputs(inputs), kv_cache, hidden_layers)
        return HiddenStates(torch.from_numpy(final), None if entries is None else torch.from_numpy(entries))

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `TorchModel`."""
        logits = torch.from_numpy(self.native.compute_logits(hidden.numpy()))
        return logits if out is None else out.copy_(logits[:, : out.shape[1]])

    def compute_argmax(self, hidden: Tensor, ids: Tensor, top: Tensor, num_ids: int | None = None) -> None:
        """See `TorchModel`."""
        for into, found in zip((ids, top), self.native.compute_argmax(hidden.numpy(), num_ids), strict=True):
            into.copy_(torch.from_numpy(found))

    plan_steps = TorchModel.plan_steps
    forward_planned = TorchModel.forward_planned


def native_inputs(inputs: PassInputs) -> NativeInputs:
    """Return the same inputs as arrays, which share their memory where it is contiguous."""
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


def over_tensors(model: Any) -> Any:
    """Return `model`, or if it is native what feeds it tensors."""
    return TensorPasses(model) if isinstance(model, NativeDense) else model


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.contiguous().numpy()
