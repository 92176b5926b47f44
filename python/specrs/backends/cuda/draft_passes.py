"""Protocol of a drafter's passes on a GPU, and the values that they are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specrs.backends.cuda.buffers import Buffers, DraftSizes
from specrs.backends.cuda.hidden_rows import HiddenInputs, HiddenRows
from specrs.drafters.base import DraftLimits
from specrs.models.base import TorchModel
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Reduced:
    """Part of the target's vocabulary from which a drafter proposes. The drafter has S ids of its own for these
    tokens."""

    target_ids: Tensor
    """[S] int64, ascending"""
    source: Tensor
    """[V] int64, the drafter's id of each target id; -1 if it has none."""

    @classmethod
    def of(cls, target_ids: Tensor, vocab_size: int) -> Reduced:
        """Return the part of `vocab_size` target ids that ascending `target_ids` select."""
        source = torch.full((vocab_size,), -1, dtype=torch.int64, device=target_ids.device)
        source[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
        return cls(target_ids, source)


@dataclass(frozen=True, slots=True)
class HiddenSource:
    """Hidden states of the target that are stored for a drafter."""

    rows: HiddenRows
    layers: tuple[int, ...]
    """Target layers at whose entry the drafter reads hidden states."""
    entries: Tensor
    """[max_rows, L, hidden], the buffer into which passes of the target write hidden states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Sizes and buffers that the passes of a drafter are allocated with."""

    limits: DraftLimits
    num_blocks: int
    target: TorchModel
    """The target, with the buffers of its passes."""
    kv_cache: KVCache
    """KV cache of the target."""
    max_rows: int
    """Maximum number of rows of a pass."""
    first_pass_rows: int
    """Maximum number of rows that the drafter's first pass has for each sequence."""
    width: int
    """Number of positions per row whose hidden states are kept."""


class DraftPasses(Protocol):
    """A drafter's passes, which a CUDA graph can hold: they allocate nothing and wait for nothing.

    A row of logits is over the target's ids, or over those of `reduced`.
    """

    kv_cache: KVCache
    num_passes: int
    """Number of forward passes so far. The engine resets it to 0."""
    sizes: DraftSizes
    """Sizes of the buffers that the passes need."""
    reduced: Reduced | None
    """Target ids that the drafter proposes. None if it proposes all of them, or the first ones."""
    hidden: HiddenSource | None
    """Hidden states of the target that the drafter reads. None if it catches up from tokens alone."""

    @property
    def sliding_window(self) -> int | None:
        """Number of last positions that the drafter attends to. None if it attends to all."""

    def known(self, ids: Tensor, out: Tensor) -> Tensor:
        """Return the drafter's ids for target ids `ids` `[N]`: `ids` itself, or `out`, which is written."""

    def forward(self, b: Buffers, i: int, inputs: PassInputs) -> Tensor:
        """Return the final states `[N, hidden]` of pass i over B sequences.

        Writes the KV of these positions, and the states that pass i + 1 reads.
        """

    def compute_argmax(self, hidden: Tensor, ids: Tensor, top: Tensor) -> None:
        """Write the most probable token of each row of `hidden` and its logit into `ids` and `top`, both `[N]`."""

    def compute_logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write logits into those columns of `out` `[N, ids]` whose ids are in the drafter's vocabulary."""

    def catch_up(self, inputs: PassInputs, hidden: HiddenInputs | None = None) -> None:
        """Run a pass over tokens that the drafter has not seen, given in its own ids.

        Writes its KV. Does not change `num_passes`.
        """
