"""Passes of the drafters on a GPU: a table with a row for each type of loaded drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specrs.backends.cuda.draft_passes import DraftPasses, Room
from specrs.backends.cuda.drafters.assistant import AssistantPasses
from specrs.backends.cuda.drafters.head import HeadPasses
from specrs.backends.cuda.drafters.model import ModelPasses
from specrs.backends.cuda.drafters.shared_tokens import SharedTokenPasses
from specrs.drafters.assistant import LoadedAssistant
from specrs.drafters.base import LoadedDrafter
from specrs.drafters.draft_model import LoadedDraftModel
from specrs.drafters.hidden_state import LoadedHead
from specrs.drafters.other_tokenizer import LoadedSharedTokens
from specrs.drafters.parallel import LoadedParallel

PASSES: Mapping[type, Callable[[Any, Room], DraftPasses]] = {
    LoadedDraftModel: ModelPasses.make,
    LoadedParallel: ModelPasses.make,
    LoadedSharedTokens: SharedTokenPasses.make,
    LoadedHead: HeadPasses.make,
    LoadedAssistant: AssistantPasses.make,
}
"""For each type of loaded drafter, the function that makes its passes, with their own KV cache if they have KV."""


def make_passes(drafter: LoadedDrafter, room: Room) -> DraftPasses:
    """Return the passes of `drafter` on a GPU. `room` has the sizes and buffers that they are allocated with."""
    return PASSES[type(drafter)](drafter, room)
