"""A head that reads the target's hidden states (EAGLE-3) as drafter: its passes and its KV cache. Chooses no tokens and
knows no requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specrs.core import UNKNOWN_BELOW
from specrs.drafters.base import HiddenInputs, Proposal, Proposed
from specrs.models.eagle3_head import Eagle3Head
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache


@dataclass(slots=True)
class HeadDrafter:
    """Proposes tokens with a head over the target's hidden states, in the target's block table (Li et al. 2025).

    Its logits are over ids of its own; they are written out over the target's, so q is a full row.
    """

    num_unfed_drafts: ClassVar[int] = 1  # nor does it know the state of n - 1
    keeps_draft_kv: ClassVar[bool] = False  # that of drafts is of no true hidden states
    mask_token_id: ClassVar[None] = None
    token_offset: ClassVar[int] = 1  # position p is fed the token at p + 1
    proposal: ClassVar[Proposal] = Proposal.FULL
    on_host: ClassVar[bool] = False

    head: Eagle3Head
    kv_cache: KVCache
    max_model_len: int  # positions that the head may hold
    vocab_size: int  # the target's
    max_draft_lag: int  # at least K + 2, see `specrs.core.HiddenDrafter`
    num_passes: int = 0

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Target layers at whose entry it reads hidden states."""
        return self.head.aux_layer_ids

    @property
    def hidden_size(self) -> int:
        """Of the target's hidden states."""
        return self.head.weights.config.target_hidden_size

    def propose(self, inputs: PassInputs, hidden: HiddenInputs | None, *, last_of: int) -> Proposed:
        """Pass 1, over true hidden states; of every `last_of`-th row the logits over the target's ids, `[B, V]`, and
        what the next pass reads. Mutates its KV cache."""
        recurrent, final = self._pass(inputs, hidden)
        last = slice(last_of - 1, None, last_of)
        return Proposed(self._logits(final[last]), recurrent[last])

    def step(self, inputs: PassInputs, left: Tensor | None) -> Proposed:
        """Return what a pass of one row for each request leaves, on what the pass before `left`. Mutates the KV."""
        assert left is not None
        self.num_passes += 1
        recurrent, final = self.head.forward(inputs, left, self.kv_cache, inputs.k_start)
        return Proposed(self._logits(final), recurrent)

    def feed(self, inputs: PassInputs, hidden: HiddenInputs | None = None) -> Tensor:
        """The pass behind prompt chunks; its final states `[N, hidden]`. Mutates the KV cache."""
        return self._pass(inputs, hidden)[1]

    def _pass(self, inputs: PassInputs, hidden: HiddenInputs | None) -> tuple[Tensor, Tensor]:
        assert hidden is not None
        self.num_passes += 1
        return self.head.forward(inputs, self.head.fuse(hidden.states), self.kv_cache, hidden.k_start)

    def _logits(self, final: Tensor) -> Tensor:
        logits = self.head.compute_logits(final)
        if logits.shape[1] == self.vocab_size:
            return logits
        below = logits.amin(dim=1, keepdim=True) - UNKNOWN_BELOW
        return below.expand(-1, self.vocab_size).index_copy(1, self.head.target_ids, logits)
