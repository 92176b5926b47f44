"""Protocols of models: `Model` for the engine, `TorchModel` for runners that compute by torch. Implements none.

`Model` has the facts that every model states, in plain numbers. `TorchModel` adds passes over torch tensors. The native
decoder of a CPU has passes of its own, which the Rust core runs: see `dense_native`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from specrs.models.kv_groups import KVGroups

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specrs.models.inputs import PassInputs
    from specrs.models.kv_cache import KVCache


class HiddenStates(NamedTuple):
    """What a pass over N rows leaves; views that the next pass may overwrite."""

    final: Tensor
    """[N, hidden] of the model's dtype, after the final norm: what `compute_logits` takes."""
    entries: Tensor | None
    """[N, L, hidden], the residual stream where it enters each layer asked for, in that order; None where L = 0."""


class Model(Protocol):
    """Weights on one device. Read-only, so it may serve several caches at once."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of activations, and of the KV cache unless that has codes."""

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`: where its weights are."""

    @property
    def vocab_size(self) -> int:
        """Ids that it knows, and logits of a row."""

    @property
    def num_layers(self) -> int:
        """Layers; `hidden_layers` of a pass are from 0 to this less one."""

    @property
    def max_position_embeddings(self) -> int:
        """Positions that it was made for."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""

    @property
    def num_parameters(self) -> int:
        """Weights that a pass reads: what its cost is compared by."""

    @property
    def states_dtype(self) -> np.dtype[Any]:
        """Type of the hidden states that a pass leaves."""
        return self.dtype

    @property
    def attention_ratio(self) -> float:
        """Multiplications of attending to one position, of those of a token's products: how prompts get slower with
        their length. Here that of a model of 135 M parameters."""
        return 1 / 4096

    @property
    def sliding_window(self) -> int | None:
        """The last positions that its layers attend, where each has a window: the largest; None: some attend all."""
        return None

    @property
    def ends_in_window(self) -> bool:
        """Whether its last layer may not attend all positions: then the last row of a chunk may be finite where K or V
        of a position before it are not."""
        return True

    @property
    def kv_groups(self) -> KVGroups | None:
        """The groups that its passes look for KV by; None: all layers are in one."""
        return None

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of KV of one block: of all layers, or of those of a group."""

    def allocate_cache(self, num_blocks: int, block_size: int) -> Any:
        """Return a zeroed cache of its own kind: `KVCache` of torch's models, `NativeKVCache` of native ones."""


class TorchModel(Model, Protocol):
    """A model whose passes take and return torch tensors.

    Passes run under `torch.inference_mode()`. `compute_argmax` has a body here, for models that have nothing faster.
    """

    @property
    def device(self) -> torch.device:
        """Where its weights are."""

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """See `Model`."""

    def with_buffers(self, max_rows: int, max_seqs: int, num_hidden_layers: int = 0) -> TorchModel:
        """Return the same model with persistent buffers for one pass at a time, which a CUDA graph can hold.

        Its passes have at most `max_rows` rows and `num_hidden_layers` hidden layers, and argmaxes of at most 17 rows
        of each of `max_seqs` requests. Itself where it needs none.
        """

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        """Feed N rows. Writes K and V of every row with a slot into `kv_cache` and changes nothing else.

        Rows at position -1 give finite values that mean nothing. `hidden_layers` are the layers whose entries are
        returned with the final states (EAGLE-3 reads three: Li et al. 2025).
        """

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of final hidden states `[L, hidden]`: fp32, float64 for float64 models.

        Written into `out` `[L, ids]` where given, which may have fewer columns than the vocabulary: the first ids.
        """

    def compute_argmax(self, hidden: Tensor, ids: Tensor, top: Tensor, num_ids: int | None = None) -> None:
        """Write the most probable token of each row of `hidden` `[L, hidden]` and its logit: `[L]` int64 and `[L]`.

        The lowest id in a tie; the logit is NaN if the row has a NaN. `num_ids` looks at the first ids only.
        """
        import torch

        torch.max(self.compute_logits(hidden)[:, :num_ids], dim=1, out=(top, ids))
