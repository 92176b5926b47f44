"""Protocols of models: `Model` for the engine, `TorchModel` for runners that compute with torch. Implements none.

`Model` has the facts that every model states, in plain numbers. `TorchModel` adds passes over torch tensors. The native
decoder of a CPU has its own passes, which the Rust core runs: see `native_decoder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from specrs.models.kv_groups import KVGroups

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specrs.core import CpuDecoder, CpuPool
    from specrs.models.inputs import PassInputs
    from specrs.models.kv_cache import KVCache


class HiddenStates(NamedTuple):
    """Hidden states of a pass over N rows. The next pass may overwrite this memory."""

    final: Tensor
    """[N, hidden] of the model's dtype, after the final norm: the argument of `compute_logits`."""
    entries: Tensor | None
    """[N, L, hidden]: the residual stream at the input of each of the L requested layers, in the order of the request.
    None for L = 0."""


class Model(Protocol):
    """Weights on one device. Passes do not change them, so one model may serve several caches at once."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of activations, and of the KV cache unless that is quantized to FP8."""

    @property
    def device_name(self) -> str:
        """Device that holds the weights: `cpu`, or `cuda:N`."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids. Rows have as many logits, unless `target_ids` says otherwise."""

    @property
    def target_ids(self) -> Any:
        """Token id of each logit, an int64 array or tensor, ascending. None: logit i is for id i."""
        return None

    def with_ids(self, ids: Any) -> Model | None:
        """Return a model over the same weights with logits of `ids` only, an int64 array, ascending. None: the model
        cannot leave ids out."""
        return None

    @property
    def has_lm_head(self) -> bool:
        """False if the model only embeds: its logits mean nothing."""
        return True

    @property
    def hidden_size(self) -> int:
        """Number of features of a final hidden state."""

    @property
    def num_layers(self) -> int:
        """Number of layers. `hidden_layers` of a pass may name 0 to this number; the number itself means the last
        layer's output. `TorchDecoder` and native decoders also take one more, which means the final states."""

    @property
    def max_position_embeddings(self) -> int:
        """Number of positions that the model was trained for."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a text."""

    @property
    def num_parameters(self) -> int:
        """Number of weights that a pass over one row reads. The engine compares the cost of models by it."""

    @property
    def states_dtype(self) -> np.dtype[Any]:
        """Dtype of the hidden states that a pass returns."""
        return self.dtype

    @property
    def attention_ratio(self) -> float:
        """Multiplications of attention per context position, divided by those of all matrix products of one token.
        Prompts get slower with length by this ratio. The default is the ratio of a model with 135 M parameters."""
        return 1 / 4096

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of states of a running request, and further bytes for each of its drafts. (0, 0) if all layers have
        attention."""
        return 0, 0

    @property
    def sliding_window(self) -> int | None:
        """Largest sliding window in tokens if every layer has one. None if some layer attends to all positions."""
        return None

    @property
    def ends_in_window(self) -> bool:
        """True if the last layer may use a sliding window. A NaN in K or V outside the window does not reach the last
        row of a chunk, so every row has to be checked."""
        return True

    @property
    def kv_groups(self) -> KVGroups | None:
        """KV groups by which passes look up blocks. None: all layers are in one group."""
        return None

    @property
    def kv_group_sizes(self) -> Sequence[int]:
        """Numbers of layers per KV group that `with_kv_groups` accepts. Empty if the passes do not support groups."""
        return ()

    def with_kv_groups(self, size: int) -> Model:
        """Return the model with its layers in KV groups of at most `size` layers, a number from `kv_group_sizes`."""
        return self

    decoder: CpuDecoder | None = None
    """Native passes on a CPU, run by the Rust core. None: torch computes the passes."""

    def on_pool(self, pool: CpuPool, *, activations: str = "auto", prompt_tiles: bool = False) -> Model:
        """Return a model with the same weights whose passes run on the threads of `pool`; `self` if torch computes the
        passes.

        `activations` is what rows are rounded to before products, as `cpu_activations` says. `prompt_tiles` multiplies
        rows of prompts with bf16 weights on AMX tiles.
        Raises `specrs.core.InvalidConfigError` on a machine without tiles, `InvalidBufferError` for `bf16` and
        weights that are not bf16.
        """
        return self

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of K and V in one block: of all layers, or of the layers of one KV group."""

    def allocate_cache(self, num_blocks: int, block_size: int) -> Any:
        """Return a zeroed cache: a `KVCache` for torch models, a `NativeKVCache` for native ones."""


class TorchModel(Model, Protocol):
    """A model whose passes take and return torch tensors.

    Passes run under `torch.inference_mode()`. `compute_argmax` has a default here, for models without a faster way.
    """

    @property
    def device(self) -> torch.device:
        """Device that holds the weights."""

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Return a zeroed cache of `num_blocks` blocks of `block_size` positions, and a scratch block."""

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        """Feed N rows. Writes K and V of every row with a slot into `kv_cache`, and the states of layers that have
        some. Changes nothing else.

        Rows at position -1 are masked: their output is finite but meaningless. `hidden_layers` are the layers whose
        inputs are returned with the final states (EAGLE-3 reads three: Li et al. 2025).
        """

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of final hidden states `[L, hidden]`: fp32, or float64 for float64 models.

        With `out` `[L, ids]`, the logits are written into it. If it has fewer columns than the vocabulary, it gets
        those of the first ids.
        """

    def compute_argmax(self, hidden: Tensor, ids: Tensor, top: Tensor, num_ids: int | None = None) -> None:
        """Write the most probable token of each row of `hidden` `[L, hidden]` into `ids` `[L]` int64, and its logit
        into `top` `[L]`.

        The lowest id wins a tie. The logit is NaN if the row has a NaN. With `num_ids`, only the first ids are
        candidates.
        """
        import torch

        torch.max(self.compute_logits(hidden)[:, :num_ids], dim=1, out=(top, ids))
