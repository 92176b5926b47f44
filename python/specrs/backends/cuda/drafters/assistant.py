"""Passes of a Gemma 4 assistant on a GPU. It attends the target's KV, and has none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from specrs.backends.cuda.assistant import CudaAssistant
from specrs.backends.cuda.buffers import Buffers
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.draft_passes import Room
from specrs.backends.cuda.drafters.head import HiddenStatePasses
from specrs.backends.cuda.hidden_rows import HiddenInputs
from specrs.drafters.assistant import LoadedAssistant
from specrs.drafters.assistant.torch_loader import TorchAssistant
from specrs.models.inputs import PassInputs


@dataclass(slots=True, kw_only=True)
class AssistantPasses(HiddenStatePasses):
    """Passes of an assistant. `DraftPasses` documents the members. `kv_cache` has layers of the target's.

    Pass 1 reads the target's hidden state of position n - 2, and pass i the states that pass i - 1 has written. All
    passes stand at position n - 2.
    """

    model: CudaAssistant

    @classmethod
    def make(cls, drafter: LoadedAssistant, room: Room) -> AssistantPasses:
        """Return the passes of `drafter`. A step commits at most K + 1 states, of which the last is read."""
        own, seqs = cast("TorchAssistant", drafter.model), room.limits.max_num_seqs
        model = CudaAssistant(own, max_rows=seqs, max_seqs=seqs)
        cache = model.cache_of(cast("CudaDecoder", room.target).config, room.kv_cache)
        return cls.of(own, model, cache, room, room.limits.num_speculative_tokens + 1)

    def forward(self, b: Buffers, i: int, inputs: PassInputs) -> Tensor:
        batch = inputs.block_table.shape[0]
        positions, left = b.first_positions[:batch], b.left[:batch]
        hidden = self.first_states(b, positions) if i == 1 else left
        return self.model.forward(replace(inputs, positions=positions), hidden, self.kv_cache, left)

    def catch_up(self, inputs: PassInputs, hidden: HiddenInputs | None = None) -> None:
        """Do nothing: an assistant has no KV that could lag."""
