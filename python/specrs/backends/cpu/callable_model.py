"""Adapters through which the Rust core's CPU steps call models that torch computes. Choose no tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.drafters.eagle3.head import Eagle3Head
from specrs.drafters.mtp.head import MtpHead
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.lora import AdapterRows, LoRAAdapter

Returned = tuple[NDArray[np.float32] | None, NDArray[np.float32] | None, NDArray[np.bool_] | None]
"""Logits of the wanted rows `[W, ids]`, hidden states `[N, layers, hidden]`, and whether each row is finite `[N]`. A
part that was not asked for is None."""
FindAdapters = Callable[[Sequence[int]], list[tuple[LoRAAdapter, list[int]]]]
"""Function that returns the LoRA adapters of given state rows, each with the rows that use it."""


class CallableModel:
    """A torch model and its KV cache, as `specrs._core._CallableModel`."""

    target_ids: NDArray[np.int64] | None = None
    aux_hidden_state_layers: Sequence[int] = ()
    aux_hidden_state_size = 0

    def __init__(self, model: Any, kv_cache: KVCache, adapters: FindAdapters | None = None) -> None:
        """Wrap `model`, a `TorchModel` on the CPU. `adapters` is None if no request has a LoRA adapter."""
        self._model = model
        self._kv_cache = kv_cache
        self._adapters = adapters
        self._kept: Tensor | None = None
        self.vocab_size: int = model.vocab_size
        if model.target_ids is not None:
            self.target_ids = model.target_ids.numpy()
        self.num_ids: int = self.vocab_size if self.target_ids is None else len(self.target_ids)
        self.num_layers: int = model.num_layers
        self.hidden_size: int = model.hidden_size

    @torch.inference_mode()
    def forward(
        self,
        inputs: dict[str, Any],
        wanted: NDArray[np.int64],
        keeps: bool,
        layers: list[int],
        head_states: NDArray[np.float32] | None,
    ) -> Returned:
        """Run a pass over N rows, and write their K and V into the cache.

        `wanted` are the rows whose logits are returned or, with `keeps`, whose hidden states are kept for `logits` and
        `hidden`. `layers` are the layers whose inputs are returned as hidden states. Whether rows are finite is
        returned only for a model that `ends_in_window`. `head_states` must be None: only heads read hidden states of a
        target.
        """
        assert head_states is None
        rows = inputs.pop("rows").tolist()
        made = pass_inputs(inputs | {"state_rows": tuple(rows)}, self._adapter_rows(rows, inputs["q_start"]))
        hidden, entries = self._model.forward(made, self._kv_cache, layers)
        finite = hidden.isfinite().all(dim=1).numpy() if self._model.ends_in_window else None
        logits = None
        if len(wanted):
            chosen = hidden[torch.from_numpy(wanted)]
            if keeps:
                self._kept = chosen
            else:
                logits = _floats(self._model.compute_logits(chosen))
        return logits, None if entries is None else _floats(entries), finite

    @torch.inference_mode()
    def logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits `[len(rows), ids]` of hidden states that the last pass with `keeps` kept. `rows` are their
        indices in `wanted`."""
        assert self._kept is not None
        return _floats(self._model.compute_logits(self._kept[torch.from_numpy(rows)]))

    @torch.inference_mode()
    def hidden(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return final hidden states `[len(rows), hidden]` that the last pass with `keeps` kept. `rows` are their
        indices in `wanted`."""
        assert self._kept is not None
        return _floats(self._kept[torch.from_numpy(rows)])

    def restore_states(self, row: int, slot: int) -> None:
        """Give a state row the states of the snapshot in `slot`."""
        states = self._kv_cache.states
        assert states is not None
        states.restore(row, slot)

    def fuse(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Raise NotImplementedError: only a head reads hidden states of a target."""
        raise NotImplementedError

    def _adapter_rows(self, rows: list[int], q_start: NDArray[np.int64]) -> tuple[AdapterRows, ...]:
        if self._adapters is None:
            return ()
        of_row = np.repeat(np.array(rows), np.diff(q_start))
        found = sorted(self._adapters(dict.fromkeys(rows)), key=lambda item: item[0].id)  # type: ignore[arg-type]
        return tuple(AdapterRows(a, torch.from_numpy(np.isin(of_row, held).nonzero()[0])) for a, held in found)


class CallableHead:
    """A torch EAGLE-3 or MTP head and its KV cache, as `specrs._core._CallableModel`."""

    def __init__(self, head: Eagle3Head | MtpHead, kv_cache: KVCache, vocab_size: int) -> None:
        """Wrap `head`. `vocab_size` is the target's."""
        self._head = head
        self._kv_cache = kv_cache
        self.vocab_size = vocab_size
        self.num_ids = head.vocab_size
        self.num_layers = 1
        self.hidden_size = head.hidden_size
        self.target_ids = None if head.vocab_size == vocab_size else head.target_ids.numpy()
        self.aux_hidden_state_layers = list(head.aux_layer_ids)
        self.aux_hidden_state_size = head.target_hidden_size

    @torch.inference_mode()
    def forward(
        self,
        inputs: dict[str, Any],
        wanted: NDArray[np.int64],
        keeps: bool,
        layers: list[int],
        head_states: NDArray[np.float32] | None,
    ) -> Returned:
        """Run a pass over N rows, and write their K and V into the cache.

        `wanted` are the rows whose logits are returned. `keeps` must be false. With `layers`, the states that the
        head's next pass reads are returned too. `head_states` `[N, hidden_size]` has the states that this pass reads in
        addition to the tokens.
        """
        assert head_states is not None
        assert not keeps
        del inputs["rows"]
        made = pass_inputs(inputs)
        hidden = torch.from_numpy(head_states).to(self._head.weights.dtype)
        recurrent, final = self._head.forward(made, hidden, self._kv_cache, made.k_start)
        logits = _floats(self._head.compute_logits(final[torch.from_numpy(wanted)])) if len(wanted) else None
        return logits, _floats(recurrent)[:, None] if layers else None, None

    def logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Raise NotImplementedError: a head keeps no hidden states."""
        raise NotImplementedError

    def hidden(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Raise NotImplementedError: a head keeps no hidden states."""
        raise NotImplementedError

    def restore_states(self, row: int, slot: int) -> None:
        """Raise NotImplementedError: a head has no states."""
        raise NotImplementedError

    @torch.inference_mode()
    def fuse(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the target's hidden states `[N, layers, size]` in the form that `forward` takes as `head_states`,
        `[N, hidden]` float32.

        An EAGLE-3 head projects the states of its layers together. An MTP head takes the state of one layer as it is.
        """
        return _floats(self._head.fuse(torch.from_numpy(states)))


def pass_inputs(arrays: dict[str, Any], adapters: tuple[AdapterRows, ...] = ()) -> PassInputs:
    """Return the inputs of a pass as tensors that share the memory of `arrays`."""
    tensors: dict[str, Any] = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in arrays.items()
    }
    return PassInputs(**tensors, adapters=adapters)


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.float().contiguous().numpy()
    return array
