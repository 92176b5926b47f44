"""Facts and declaration of heads that draft from the target's hidden states: EAGLE-3 and MTP heads. Computes
nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from specrs.core import HiddenDrafter
from specrs.drafters.base import Declared, DraftLimits, Loading
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.head_check import HeadCheck
from specrs.drafters.method import WHERE
from specrs.errors import UnsupportedConfigError, invalid
from specrs.models.errors import about

if TYPE_CHECKING:
    from specrs.core import CpuDecoder, CpuPool

IDLE_STEPS = 8
"""Maximum number of consecutive steps without drafts after which a head can still catch up from kept hidden states.
After more steps, its KV starts anew."""


class HeadFacts:
    """Facts about a head that do not depend on what computes it."""

    weights: Any
    decoder: CpuDecoder | None = None
    """The head's passes on a CPU in the Rust core; None: torch computes them."""

    sliding_window: int | None = None
    """Number of last positions that the head attends to; None: all positions."""

    keeps_hits = False
    """True if a prefix hit is kept whole although its last block alone lacks the head's KV."""

    least_acceptance: float
    """Minimum share of first draft tokens that the target accepts if the head fits it."""

    def on_pool(self, pool: CpuPool, *, activations: str = "auto", prompt_tiles: bool = False) -> Self:
        """Return the same weights with passes on the threads of `pool`; itself if torch computes the passes.

        `activations` is that of `CpuDecoder`. Raises `InvalidBufferError` for `bf16` and weights that are not bf16.
        """
        return self

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """Dtype of K and V in the cache."""
        raise NotImplementedError

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Hidden states of the target that the head reads, ascending. Number i is the input of layer i, and the output
        of the last layer for i = number of layers. One more is the state after the final norm."""
        raise NotImplementedError

    @property
    def hidden_size(self) -> int:
        """Number of features of the head's states, H."""
        raise NotImplementedError

    @property
    def state_size(self) -> int:
        """Number of features of the states that a pass is fed and leaves to the next."""
        return self.hidden_size

    @property
    def target_hidden_size(self) -> int:
        """Number of features of one hidden state of the target."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Number of ids that the head drafts, Vd. A row has this many logits."""
        raise NotImplementedError

    @property
    def max_position_embeddings(self) -> int:
        """Maximum number of positions: the target's. The head sets no limit, because its RoPE angles are computed and
        not looked up."""
        raise NotImplementedError

    @property
    def advice(self) -> str:
        """Sentences for a warning that few drafts are accepted: what may be wrong, and what to do."""
        raise NotImplementedError

    def allocate_cache(self, num_blocks: int, block_size: int) -> Any:
        """Return a zeroed KV cache for the head, of one layer."""
        raise NotImplementedError


def load_head(
    loading: Loading, of: tuple[str, ...], open_files: Callable[..., Any], **options: Any
) -> tuple[Any, HeadFacts]:
    """Load a drafter that reads the target's hidden states. Return its opened files, and the drafter.

    `open_files` is called with the path, the target, the revision and `options`. Errors about files name the fields
    `of` that the user set: `OF_TARGET` for a head in the target's checkpoint, else `OF_DRAFT`.

    Raises `UnsupportedConfigError` for a target that transformers' modules compute, because they give no hidden states.
    Raises `InvalidConfigError` or a subclass if a file is missing, wrong or not supported.
    """
    if loading.generic_target:
        reason = "not implemented for a target of model_impl='transformers'; allowed: a method of another kind"
        raise invalid(UnsupportedConfigError, WHERE + "method", loading.options.method, reason)
    with about(*of):
        files = open_files(loading.path, loading.target, revision=loading.revision, **options)
        return files, loading.load_head(files)


def vocabulary_options(loading: Loading) -> dict[str, Any]:
    """Return the arguments `size` and `counts` of `draft_ids` that the user set."""
    return {"size": loading.options.draft_vocab_size, "counts": loading.options.draft_vocab_counts}


@dataclass(frozen=True)
class LoadedHead:
    """A head with its weights. `LoadedDrafter` documents the members."""

    model: HeadFacts

    has_own_blocks = False

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.model.aux_layer_ids

    def with_model(self, model: Any) -> Self:
        return replace(self, model=model)

    def max_draft_lag(self, limits: DraftLimits) -> int:
        """Return the maximum number of positions that the head's KV may lack: those of one verification and of some
        steps without drafts."""
        return limits.num_speculative_tokens + 2 + IDLE_STEPS

    def declare(self, limits: DraftLimits) -> Declared:
        return HiddenDrafter(
            max_model_len=limits.shared_len,
            max_draft_lag=self.max_draft_lag(limits),
            keeps_hits=self.model.keeps_hits,
        )

    def hidden_row_size(self, limits: DraftLimits) -> int:
        return self.max_draft_lag(limits) * len(self.hidden_layers) * self.model.target_hidden_size

    def on_cpu(self, limits: DraftLimits, num_blocks: int) -> CpuDrafter:
        cache = self.model.allocate_cache(num_blocks, limits.block_size)
        return CpuDrafter(model=self.model, kv_cache=cache, hidden_layers=self.hidden_layers)

    def check(self, path: str) -> HeadCheck:
        return HeadCheck(path, self.model.least_acceptance, self.model.advice)
