"""Rules for the drafts and the KV of a drafter on a GPU, derived from its declaration to the scheduler.

| | `CachedDrafter` | with a mask token | `HiddenDrafter` | `SharedKVDrafter` | drafts from the host |
| --- | --- | --- | --- | --- | --- |
| `max_draft_lag` | 2 | K + 1 | K + 2 or more; after a longer lag it starts anew | 2, but no KV | no KV |
| `num_unfed_drafts` | 1 | 0 | 1 | no KV | no KV |
| `keeps_draft_kv` | yes | no | no | no | no |
| `token_offset` | 0 | 0 | 1 | 1 | 0 |
| `is_point_mass` | no | no | no | no | yes |
| drafts appear | with a pass each | with one pass | with a pass each | with a pass each | in the record, by `plan` |
"""

from __future__ import annotations

from dataclasses import dataclass

from specrs.core import CachedDrafter, HiddenDrafter, SharedKVDrafter
from specrs.drafters.base import Declared


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRules:
    """Rules for the drafts and the KV of one drafter."""

    max_draft_lag: int = 0
    """Maximum number of last positions that the drafter's KV may lack. Pass 1 feeds this many, less `token_offset`."""
    max_model_len: int | None = None
    """Maximum number of positions of the drafter. None if only the engine limits them."""
    mask_token_id: int | None = None
    """Token that one pass for all drafts feeds in their place. None if each draft has a pass."""
    token_offset: int = 0
    """Offset of the tokens that the drafter is fed: position p gets the token at p + `token_offset`. It is 1 if the
    target's hidden state of p is fed with that token."""
    num_unfed_drafts: int | None = None
    """Number of last drafts that no pass feeds. None without KV.

    A step from n to n' tokens leaves KV valid on [0, min(n' - 1, n + K - num_unfed_drafts)). Neither the last token nor
    those drafts were fed. Without `keeps_draft_kv` it is valid on [0, n - num_unfed_drafts).
    """
    keeps_draft_kv: bool = False
    """True if the KV that is written for a draft stays valid when the draft is accepted."""
    is_point_mass: bool = False
    """True if drafts are not drawn: q, the distribution of a draft, is 1 at the draft and 0 elsewhere.

    `rejection` then accepts d with probability p(d), and otherwise draws from norm(max(0, p - q)) = p without d. To
    draw x from p and accept while x = d does the same. So both rules draw the target's token in every row, with the
    noise of its position, and q need not be kept.
    """

    @classmethod
    def of(cls, declared: Declared) -> DraftRules:
        """Return the rules of a drafter with passes from its declaration."""
        if isinstance(declared, HiddenDrafter):
            # No pass feeds the last draft, and the state of n - 1 is unknown. States of drafts are approximations.
            return cls(
                max_draft_lag=declared.max_draft_lag,
                max_model_len=declared.max_model_len,
                token_offset=1,
                num_unfed_drafts=1,
            )
        if isinstance(declared, SharedKVDrafter):
            # Pass 1 feeds the state of n - 2 with the token at n - 1, and no pass writes KV.
            return cls(max_draft_lag=2, max_model_len=declared.max_model_len, token_offset=1)
        assert isinstance(declared, CachedDrafter)
        # Pass i feeds draft i - 1. Later passes overwrite the KV of masks.
        masked = declared.mask_token_id is not None
        return cls(
            max_draft_lag=declared.max_draft_lag,
            max_model_len=declared.max_model_len,
            mask_token_id=declared.mask_token_id,
            num_unfed_drafts=0 if masked else 1,
            keeps_draft_kv=not masked,
        )


ON_HOST = DraftRules(is_point_mass=True)
"""The rules if all drafts are from the host."""
