"""Draft models and heads on a CPU: what the iteration in Rust needs of them, and a counter of passes. Computes
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from specrs.drafters.other_tokenizer.text import Bridge
    from specrs.drafters.other_tokenizer.vocabulary import SharedVocabulary


@dataclass(slots=True, kw_only=True)
class CpuDrafter:
    """A draft model or head on a CPU, whose drafts `specrs.core.CpuIteration` draws.

    Its declaration to the scheduler is a `CachedDrafter`, `HiddenDrafter`, `SharedKVDrafter` or `TextDrafter`.
    """

    on_host: ClassVar[bool] = False

    model: Any
    """The draft model (`Model`) or the head."""
    kv_cache: Any
    """KV cache of the drafter; None for an assistant, which has none."""
    shared: SharedVocabulary | None = None
    """Tokens that the tokenizers of draft model and target share, if the two differ and the model drafts tokens;
    otherwise None."""
    bridge: Bridge | None = None
    """Translator between the draft model's and the target's token ids, for a draft model that drafts text; otherwise
    None."""
    text_limits: tuple[int, int, int] | None = None
    """(maximum context, maximum tokens fed per step, tokens of a KV block) of a draft model that drafts text; otherwise
    None."""
    hidden_layers: tuple[int, ...] = ()
    """Target layers at whose entry the drafter reads hidden states; () for a draft model."""
    num_passes: int = 0
    """Number of forward passes so far. The engine resets it to 0."""
