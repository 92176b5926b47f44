"""Draft models and heads on a CPU: what the iteration runs, and how often it ran. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from specrs.drafters.text import Bridge
from specrs.drafters.vocabulary import SharedVocabulary


@dataclass(slots=True, kw_only=True)
class CpuDrafter:
    """A model, or an EAGLE-3 head, whose drafts `specrs.core.CpuIteration` draws.

    The scheduler knows what it declares: `CachedDrafter`, `HiddenDrafter` or `TextDrafter`.
    """

    on_host: ClassVar[bool] = False

    model: Any
    """A `Model`, or an EAGLE-3 head."""
    kv_cache: Any
    shared: SharedVocabulary | None = None
    """With a tokenizer of its own: the tokens that it shares with the target."""
    bridge: Bridge | None = None
    """With a tokenizer of its own that goes by text: reads and writes the target's texts."""
    text_limits: tuple[int, int, int] | None = None
    """With a `bridge`: its context, the tokens that it is fed in a step, and the tokens of a block of its KV."""
    num_passes: int = 0
    """Forward passes so far; the engine sets it to 0."""
