"""Protocols and values between the engine and drafters that have a model: how such a drafter is loaded, and what it
offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from specrs.core import CachedDrafter, HiddenDrafter, SharedKVDrafter, TextDrafter
from specrs.models.base import Model

if TYPE_CHECKING:
    from specrs.drafters.cpu import CpuDrafter

Declared = CachedDrafter | HiddenDrafter | SharedKVDrafter | TextDrafter
"""Declaration of a drafter with a model, from which a scheduler is built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Everything that is needed to load a drafter: its source, its target, and the functions that load weights."""

    path: str
    """Folder or hub id of the draft model or head; for a head in the target's checkpoint, the target's."""
    revision: str | None
    options: Any
    """Options of the drafter's method, the engine's `SpeculativeConfig`."""
    target: Model
    target_tokenizer: tuple[str, str | None]
    """Folder or hub id of the target's tokenizer, and its revision."""
    generic_target: bool
    """True if the target runs through transformers' modules."""
    drafts_text: bool
    """True if a draft model with another tokenizer drafts text. Otherwise it drafts tokens that both tokenizers
    have."""
    load_model: Callable[[], Model]
    """Function that loads `path` as a model."""
    load_head: Callable[[Any], Any]
    """Function that loads the EAGLE-3 head of a `HeadFiles`, the MTP head of an `MtpFiles`, or the assistant of an
    `AssistantFiles`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """Sizes of an engine that its drafter depends on."""

    target: Model
    num_speculative_tokens: int
    max_model_len: int
    """Maximum number of tokens of a request."""
    draft_max_model_len: int
    """Maximum number of the draft model's own tokens for a request."""
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int

    @property
    def shared_len(self) -> int:
        """Maximum number of positions that a drafter can have in the target's blocks."""
        return min(self.draft_max_model_len, self.max_model_len)


class DrafterCounts(Protocol):
    """The counter of draft passes that every drafter of a runner has. The engine's statistics read it."""

    num_passes: int
    """Number of forward passes so far. The engine resets it to 0."""


class DraftCheck(Protocol):
    """Check of a drafter's results in an engine's first steps, which may log a warning about the drafter."""

    def settled(self, results: Mapping[str, NDArray[np.int64]], num_decode: int) -> bool:
        """Count the results of a step with `num_decode` decoding sequences. Return True if the check needs no more
        steps."""


class LoadedDrafter(Protocol):
    """A drafter with its weights. The weights are never written to, so several engines may share the drafter."""

    @property
    def model(self) -> Any:
        """The draft model or the head. A head has those members of `Model` that the engine uses."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Target layers at whose entry the drafter reads hidden states, as in `HeadFacts.aux_layer_ids`; () for a draft
        model."""

    @property
    def has_own_blocks(self) -> bool:
        """True if no KV of the drafter is in the target's blocks."""

    def with_model(self, model: Any) -> Self:
        """Return the same drafter with passes of `model`, which has the same weights."""

    def declare(self, limits: DraftLimits) -> Declared:
        """Return the drafter's declaration, from which the scheduler is built."""

    def hidden_row_size(self, limits: DraftLimits) -> int:
        """Return the number of hidden state values of the target that are kept for the drafter per row."""

    def on_cpu(self, limits: DraftLimits, num_blocks: int) -> CpuDrafter:
        """Return the drafter for a CPU, with a KV cache of `num_blocks` blocks. A draft model that reads and writes
        text has a number of blocks of its own.

        Raises `InvalidConfigError` if these need more than `DEFAULT_CPU_KV_CACHE_BYTES`.
        """

    def check(self, path: str) -> DraftCheck | None:
        """Return a check of the drafter's first drafts; None if there is none. `path` is the user's name for the
        drafter."""
