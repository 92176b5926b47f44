"""A small model with the target's tokenizer that drafts one token per pass."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Self

from specrs.core import CachedDrafter
from specrs.drafters.assistant.files import is_assistant
from specrs.drafters.base import Declared, DraftLimits, Loading
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.method import WHERE, CheckpointOptions, ModelMethod, wrong
from specrs.drafters.vocabulary import DraftVocabularyOptions, draft_ids
from specrs.errors import UnsupportedConfigError, invalid
from specrs.model_values import CACHE_DTYPE, QUANTIZATION
from specrs.models.base import Model
from specrs.models.errors import OF_DRAFT, about
from specrs.options import option

logger = logging.getLogger("specrs")

DRAFT_MODEL_LAG = 2
"""Maximum number of positions that a draft model's first pass feeds. If all drafts were accepted, KV is missing for the
last draft and for the token after it."""


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(DraftVocabularyOptions, CheckpointOptions):
    """Options of `method="draft_model"`."""

    quantization: str | None = option(None, QUANTIZATION, "type of the draft's weights", default_is="its checkpoint's")
    kv_cache_dtype: str | None = option(None, CACHE_DTYPE, "type of the draft's KV cache", default_is="the engine's")


@dataclass(frozen=True)
class LoadedDraftModel:
    """A draft model with its weights. `LoadedDrafter` documents the members."""

    model: Any

    hidden_layers = ()
    has_own_blocks = False

    def with_model(self, model: Any) -> Self:
        return replace(self, model=model)

    def cost_ratio(self, limits: DraftLimits) -> float:
        """Return the cost of a draft token in target tokens, by numbers of parameters. Catch-up takes this much of the
        token budget."""
        return float(self.model.num_parameters / limits.target.num_parameters)

    def declare(self, limits: DraftLimits) -> Declared:
        return CachedDrafter(
            max_model_len=limits.shared_len, max_draft_lag=DRAFT_MODEL_LAG, cost_ratio=self.cost_ratio(limits)
        )

    def hidden_row_size(self, limits: DraftLimits) -> int:
        return 0

    def on_cpu(self, limits: DraftLimits, num_blocks: int) -> CpuDrafter:
        return CpuDrafter(model=self.model, kv_cache=self.model.allocate_cache(num_blocks, limits.block_size))

    def check(self, path: str) -> None:
        return None


def bundled() -> str:
    """Return the folder of the bundled target's draft model."""
    from specrs.pair import DRAFT

    return str(DRAFT)


def load(loading: Loading) -> LoadedDraftModel:
    """Load a draft model. Raises `InvalidConfigError` or a subclass if a file is missing, wrong or not supported."""
    with about(*OF_DRAFT):
        if is_assistant(loading.path, loading.revision):
            reason = f"{loading.path} is an assistant, which reads the target's KV; use 'mtp'"
            raise wrong("method", "draft_model", reason)
        return LoadedDraftModel(_with_draft_ids(loading.load_model(), loading))


def _with_draft_ids(model: Model, loading: Loading) -> Model:
    """Return the draft model with logits of those ids only that the options choose; `model` itself if they choose none.
    Raises `UnsupportedConfigError` if they choose ids for a model that runs through transformers' modules."""
    size, counts = loading.options.draft_vocab_size, loading.options.draft_vocab_counts
    if size is None:
        return model
    ids = draft_ids(size, counts, min(loading.target.vocab_size, model.vocab_size))
    chosen = model.with_ids(ids)
    if chosen is None:
        reason = "not implemented for a draft that runs through transformers' modules; leave draft_vocab_size out"
        raise invalid(UnsupportedConfigError, WHERE + "draft_vocab_size", size, reason)
    logger.info("%s drafts %d of %d ids", loading.path, len(ids), loading.target.vocab_size)
    return chosen


DRAFT_MODEL = ModelMethod(name="draft_model", options=DraftModelOptions, what="a draft", bundled=bundled, load=load)
