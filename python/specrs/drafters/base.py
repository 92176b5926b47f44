"""What a drafter declares, and what the runner calls of it. Implements none.

The scheduler is built from the same declaration (`specrs.core.CachedDrafter`, `HiddenDrafter`, `NgramProposer`,
`SuffixDrafter`), and the runner calls the protocol and names no class. What an iteration leaves for verification is the
same for all: drafts behind the committed tokens of row state, and q where it is no point mass.

| | `DraftModel` | `ParallelDraftModel` | `HeadDrafter` | `HostDrafter` |
| --- | --- | --- | --- | --- |
| `max_draft_lag` | 2 | K + 1 | K + 2 or more; behind it, it starts anew | None: it has no KV |
| `num_unfed_drafts` | 1 | 0 | 1 | None: it has no KV |
| `keeps_draft_kv` | yes | no | no | no |
| `token_offset` | 0 | 0 | 1 | |
| `hidden_layers` | () | () | (2, n/2, n - 3) or its config's | () |
| `proposal` | full | full, a row for each position | full, written out from its own ids | a point mass |
| drafts appear | a pass each | one pass for all | a pass each | in the record, written by `plan` |

On a CPU the core drafts by passes itself: `drafters.cpu`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from specrs.core import DRAFTER_DEVICE

if TYPE_CHECKING:
    from torch import Tensor

    from specrs.models.base import TorchModel
    from specrs.models.inputs import PassInputs
    from specrs.models.kv_cache import KVCache


DRAFT_MODEL_LAG = 2
"""Positions that a draft model's first pass feeds at most. After all drafts were accepted, KV is missing for the last
draft and for the token after it."""


class Proposal(StrEnum):
    """What q is, the distribution that a draft was drawn from."""

    FULL = "full"
    """A row `[V]` for each draft: kept for `rejection`."""
    POINT_MASS = "point_mass"
    """1 at the draft and 0 elsewhere: nothing to keep. `rejection` then accepts d with probability p(d), and draws from
    norm(max(0, p - q)) = p without d otherwise. That is what drawing x from p and accepting while x = d does, so both
    rules draw the target's token in every row, with the noise of its position: the text is that of K = 0."""


class HiddenInputs(NamedTuple):
    """What a pass over the target's hidden states reads beside its `PassInputs` of N rows of B requests."""

    states: Tensor
    """[N, L, the target's hidden size], its entries of each row's position."""
    k_start: Tensor
    """[B] int64, the first position that a request's rows attend."""


class Proposed(NamedTuple):
    """What a drafting pass leaves of B entries."""

    logits: Tensor
    """[B, V] over the target's ids."""
    left: Tensor | None = None
    """[B, hidden], what the next pass reads besides the token; None where that is nothing."""


class DrafterCounts(Protocol):
    """The counter of passes that every drafter has, on any device, for an engine's statistics."""

    num_passes: int
    """Forward passes so far; the engine sets it to 0."""


class Drafter(DrafterCounts, Protocol):
    """Limits and kind of a drafter, which the CUDA runner and the scheduler of a GPU are built for."""

    @property
    def max_draft_lag(self) -> int | None:
        """Positions that its KV may lag behind n and still draft; None without KV. Its first pass feeds so many, less
        `token_offset`. One that reads hidden states drafts behind any lag: it starts anew."""

    @property
    def num_unfed_drafts(self) -> int | None:
        """Of a row's K drafts, how many at the end no pass feeds; None without KV or where that of drafts never counts.

        An iteration from n to n' tokens leaves its KV valid on [0, min(n' - 1, n + K - this)): neither the last token
        nor those drafts were fed. Where it does not keep drafts' KV, on [0, n - this).
        """

    @property
    def keeps_draft_kv(self) -> bool:
        """Whether what it writes for a draft is its KV if the draft stands."""

    @property
    def max_model_len(self) -> int | None:
        """Positions that it can take; None where it needs none."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Target layers at whose entry it reads hidden states."""

    @property
    def proposal(self) -> Proposal:
        """Kind of q, the distribution that the drafts are drawn from."""

    @property
    def on_host(self) -> bool:
        """Whether `plan` writes its drafts into the record: no passes, no KV, one launch in flight."""


class DeviceDrafter(Drafter, Protocol):
    """A drafter with KV of its own that drafts by passes, one token a pass."""

    kv_cache: KVCache
    vocab_size: int

    @property
    def mask_token_id(self) -> int | None:
        """What one pass for all drafts feeds in their place; None: it drafts by a pass for each."""

    def propose_all(self, inputs: PassInputs, num_drafts: int) -> Tensor:
        """The one pass of a drafter with a mask token: B requests of as many rows each, which end with the last
        committed token and `num_drafts` - 1 mask tokens; logits of these rows `[B, num_drafts, V]`. Mutates its KV."""

    @property
    def hidden_size(self) -> int:
        """Of the target's hidden states that it reads; 0 where it reads none."""

    @property
    def token_offset(self) -> int:
        """Position p is fed the token at p + this: 0, or 1 where the target's hidden state of p is fed beside it."""

    def propose(self, inputs: PassInputs, hidden: HiddenInputs | None, *, last_of: int) -> Proposed:
        """Pass 1; what every `last_of`-th row leaves. Mutates its KV. `hidden`: None unless it has `hidden_layers`."""

    def step(self, inputs: PassInputs, left: Tensor | None) -> Proposed:
        """Return what a pass of one row for each request leaves, after a pass that `left` this. Mutates its KV."""

    def feed(self, inputs: PassInputs, hidden: HiddenInputs | None = None) -> Tensor:
        """A catch-up pass; hidden states `[N, hidden]`. Mutates its KV."""


class ModelDrafter(DeviceDrafter, Protocol):
    """One whose passes are those of a whole model."""

    model: TorchModel

    def known_ids(self, inputs: PassInputs) -> PassInputs:
        """The same pass with ids held to its own vocabulary."""


def device_drafter(drafter: Drafter | None) -> DeviceDrafter:
    """The drafter as one that drafts by passes; a launch asks no other for any."""
    assert drafter is not None
    assert not drafter.on_host
    return cast("DeviceDrafter", drafter)


def model_drafter(drafter: Drafter | None) -> ModelDrafter:
    """The drafter as one by a whole model, where the caller knows that it is no head."""
    return cast("ModelDrafter", device_drafter(drafter))


def host_drafts(sections: Mapping[str, Tensor], max_num_seqs: int) -> Tensor:
    """`draft_token` of a record's sections as `[R, K]` int64: row i for entry i, `entry_k` of its columns."""
    return sections["draft_token"].view(max_num_seqs, -1)


def drafted_on_host(sections: Mapping[str, Tensor], num_decode: int) -> Tensor:
    """Which decode entries have their drafts in the record, `[num_decode]` bool."""
    return sections["entry_drafter"][:num_decode] != DRAFTER_DEVICE
