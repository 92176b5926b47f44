"""Passes of a draft model with the target's tokenizer on a GPU: one for each draft, or one for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from specrs.backends.cuda.buffers import Buffers, DraftSizes
from specrs.backends.cuda.decoder import CudaDecoder, with_buffers
from specrs.backends.cuda.draft_passes import HiddenSource, Reduced, Room
from specrs.backends.cuda.hidden_rows import HiddenInputs
from specrs.core import CachedDrafter
from specrs.drafters.draft_model import LoadedDraftModel
from specrs.models.base import TorchModel
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.torch_arrays import TORCH_DTYPES


@dataclass(slots=True, kw_only=True)
class ModelPasses:
    """Passes of a draft model. `DraftPasses` documents the members.

    The vocabularies of draft model and target may be padded to different sizes. They agree on the tokenizer's ids. A
    padding id of the larger one must neither be proposed nor looked up in the smaller one's embedding.
    """

    model: TorchModel
    kv_cache: KVCache
    vocab_size: int
    """Number of the target's token ids."""
    sizes: DraftSizes
    num_passes: int = 0
    reduced: Reduced | None = None
    hidden: HiddenSource | None = None

    @classmethod
    def make(cls, drafter: LoadedDraftModel, room: Room) -> Self:
        """Return the passes of `drafter`."""
        return cls.of(drafter, drafter.model, room)

    @classmethod
    def of(cls, drafter: LoadedDraftModel, model: Any, room: Room, **members: Any) -> Self:
        """Return passes of `model`, which has the weights of `drafter`. `members` are those of a subclass."""
        limits, ids = room.limits, drafter.model.target_ids
        model = with_buffers(model, room.max_rows, limits.max_num_seqs)
        if isinstance(model, CudaDecoder):
            model = model.for_draft()
        sizes, declared = DraftSizes(TORCH_DTYPES[limits.target.dtype], room.first_pass_rows), drafter.declare(limits)
        if isinstance(declared, CachedDrafter) and declared.mask_token_id is not None:
            width = cast("CudaDecoder", model).config.hidden_size
            sizes = DraftSizes(TORCH_DTYPES[model.dtype], room.first_pass_rows, in_parallel=True, hidden_size=width)
        if ids is not None:
            sizes = replace(sizes, num_ids=len(ids))
            members["reduced"] = Reduced.of(ids, limits.target.vocab_size)
        return cls(
            model=model,
            kv_cache=drafter.model.allocate_cache(room.num_blocks, limits.block_size),
            vocab_size=limits.target.vocab_size,
            sizes=sizes,
            **members,
        )

    @property
    def sliding_window(self) -> int | None:
        return self.model.sliding_window

    def known(self, ids: Tensor, out: Tensor) -> Tensor:
        last = self.model.vocab_size - 1
        return ids if last + 1 >= self.vocab_size else torch.clamp(ids, max=last, out=out)

    def forward(self, b: Buffers, i: int, inputs: PassInputs) -> Tensor:
        return self.model.forward(inputs, self.kv_cache).final

    def compute_argmax(self, hidden: Tensor, ids: Tensor, top: Tensor) -> None:
        known = min(self.model.vocab_size, self.vocab_size) if self.reduced is None else None
        self.model.compute_argmax(hidden, ids, top, known)

    def compute_logits(self, hidden: Tensor, out: Tensor) -> None:
        self.model.compute_logits(hidden, out[:, : self.model.vocab_size] if self.reduced is None else out)

    def catch_up(self, inputs: PassInputs, hidden: HiddenInputs | None = None) -> None:
        assert hidden is None
        self.model.forward(inputs, self.kv_cache)
