"""A draft model that proposes all tokens in one pass, because it was fine-tuned with mask tokens (PARD)."""

from __future__ import annotations

from dataclasses import dataclass

from specrs.core import CachedDrafter
from specrs.drafters.base import Declared, DraftLimits, Loading
from specrs.drafters.draft_model import DraftModelOptions, LoadedDraftModel, bundled
from specrs.drafters.method import ModelMethod
from specrs.errors import InvalidConfigError, invalid
from specrs.models.config import MASK_TOKEN_FIELDS
from specrs.models.errors import OF_DRAFT, about
from specrs.models.loader import load_mask_token_id
from specrs.options import Switch, option


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(DraftModelOptions):
    """Options of a draft model, and the option that lets it draft in parallel."""

    parallel_drafting: bool = option(
        False,
        Switch(),
        "all drafts come from one pass",
        details="The draft model was fine-tuned with mask tokens for this (PARD). Its config.json names the mask token "
        "as `mask_token_id`, `pard_token` or `ptd_token_id`.",
    )


@dataclass(frozen=True)
class LoadedParallel(LoadedDraftModel):
    """A draft model that drafts in parallel. `LoadedDrafter` documents the members."""

    mask_token_id: int
    """Token id that the model is fed in place of drafts."""

    def max_draft_lag(self, limits: DraftLimits) -> int:
        """Return the maximum number of positions that the model's pass feeds, besides mask tokens.

        The model is fed no drafts. If all drafts were accepted, its KV lacks them and the token after them.
        """
        return limits.num_speculative_tokens + 1

    def declare(self, limits: DraftLimits) -> Declared:
        return CachedDrafter(
            max_model_len=limits.shared_len,
            max_draft_lag=self.max_draft_lag(limits),
            mask_token_id=self.mask_token_id,
            cost_ratio=self.cost_ratio(limits),
        )


def load(loading: Loading) -> LoadedParallel:
    """Load a draft model that has a mask token. Raises `InvalidConfigError` or a subclass if a file is missing, wrong
    or not supported."""
    with about(*OF_DRAFT):
        mask = load_mask_token_id(loading.path, revision=loading.revision)
        if mask is None:
            fields = ", ".join(MASK_TOKEN_FIELDS)
            reason = f"has no mask token in config.json, which parallel_drafting needs ({fields})"
            raise invalid(InvalidConfigError, "speculative_config.model", loading.path, reason)
        return LoadedParallel(loading.load_model(), mask)


PARALLEL = ModelMethod(
    name="draft_model",
    options=ParallelOptions,
    what="a draft",
    bundled=bundled,
    load=load,
    serves=lambda speculative: bool(speculative.parallel_drafting),
)
