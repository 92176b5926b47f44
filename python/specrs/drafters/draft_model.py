"""A draft model as drafter: its passes and its KV cache. Chooses no tokens and knows no requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from specrs.drafters.base import Proposal
from specrs.models.base import Model
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache


@dataclass(slots=True)
class DraftModel:
    """Proposes tokens with a small model that shares the target's tokenizer and block table.

    Vocabularies may be padded to different sizes: they agree on the tokenizer's ids, and a padding id of the larger
    one must neither be proposed nor looked up in the smaller one's embedding.
    """

    max_draft_lag: ClassVar[int] = 2  # pass 1 feeds n-2 and n-1: KV of n-2 is missing after a full acceptance
    num_unfed_drafts: ClassVar[int] = 1  # pass i feeds draft i - 1
    hidden_layers: ClassVar[tuple[int, ...]] = ()
    proposal: ClassVar[Proposal] = Proposal.FULL
    on_host: ClassVar[bool] = False

    model: Model
    kv_cache: KVCache
    max_model_len: int  # positions that the draft may hold
    vocab_size: int  # the target's
    num_passes: int = 0

    def propose(self, inputs: PassInputs, *, last_of: int) -> Tensor:
        """One draft pass; logits of every `last_of`-th row over the target's ids, `[B, vocab_size]`: -inf for those
        that the draft does not know. Mutates the draft's KV cache."""
        return self._logits(self.feed(inputs)[last_of - 1 :: last_of])

    def plan_steps(self, positions: Tensor, slots: Tensor, block_table: Tensor) -> list[Any]:
        """Plans for `step` of S passes of one row per request, see `Model.plan_steps`."""
        return self.model.plan_steps(positions, slots, block_table, self.kv_cache)

    def step(self, input_ids: Tensor, plan: Any) -> Tensor:
        """One draft pass over a row per request; logits as from `propose`. Mutates the draft's KV cache."""
        self.num_passes += 1
        return self._logits(self.model.forward_planned(self._known(input_ids), plan, self.kv_cache))

    def feed(self, inputs: PassInputs) -> Tensor:
        """One draft pass without the LM head (catch-up chunks); hidden states `[N, hidden]`. Mutates the KV cache."""
        self.num_passes += 1
        return self.model.forward(self.known_ids(inputs), self.kv_cache).final

    def known_ids(self, inputs: PassInputs) -> PassInputs:
        """The same pass with ids held to the draft's own vocabulary."""
        ids = self._known(inputs.input_ids)
        return inputs if ids is inputs.input_ids else replace(inputs, input_ids=ids)

    def _known(self, ids: Tensor) -> Tensor:
        known = self.model.vocab_size
        return ids if known >= self.vocab_size else ids.clamp(max=known - 1)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.compute_logits(hidden)
        missing = self.vocab_size - logits.shape[1]
        return pad(logits, (0, missing), value=-torch.inf) if missing else logits
