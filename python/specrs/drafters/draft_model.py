"""A draft model as drafter, token by token or in parallel: its passes and its KV cache. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from specrs.drafters.base import DRAFT_MODEL_LAG, HiddenInputs, Proposal, Proposed
from specrs.models.base import TorchModel
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache


@dataclass(slots=True)
class ModelPasses:
    """The passes of a small model that shares the target's tokenizer and block table.

    Vocabularies may be padded to different sizes: they agree on the tokenizer's ids, and a padding id of the larger
    one must neither be proposed nor looked up in the smaller one's embedding.
    """

    token_offset: ClassVar[int] = 0
    hidden_layers: ClassVar[tuple[int, ...]] = ()
    hidden_size: ClassVar[int] = 0
    proposal: ClassVar[Proposal] = Proposal.FULL
    on_host: ClassVar[bool] = False

    model: TorchModel
    kv_cache: KVCache
    max_model_len: int  # positions that the draft may hold
    vocab_size: int  # the target's
    num_passes: int = 0

    def propose(self, inputs: PassInputs, hidden: HiddenInputs | None, *, last_of: int) -> Proposed:
        """One draft pass; logits of every `last_of`-th row over the target's ids, `[B, vocab_size]`: -inf for those
        that the draft does not know. Mutates the draft's KV cache."""
        return Proposed(self._logits(self.feed(inputs, hidden)[last_of - 1 :: last_of]))

    def propose_all(self, inputs: PassInputs, num_drafts: int) -> Tensor:
        """One draft pass over as many rows of each of B requests; logits of the last `num_drafts` rows of each,
        `[B, num_drafts, vocab_size]`, as from `propose`. Mutates the draft's KV cache."""
        hidden = self.feed(inputs)
        last = hidden.view(len(inputs.block_table), -1, hidden.shape[1])[:, -num_drafts:]
        return self._logits(last.reshape(-1, hidden.shape[1])).view(len(last), num_drafts, -1)

    def step(self, inputs: PassInputs, left: Tensor | None) -> Proposed:
        """Return the logits of a pass of one row for each request, as from `propose`. Mutates the draft's KV cache."""
        assert left is None
        return Proposed(self._logits(self.feed(inputs)))

    def feed(self, inputs: PassInputs, hidden: HiddenInputs | None = None) -> Tensor:
        """One draft pass without the LM head (catch-up chunks); hidden states `[N, hidden]`. Mutates the KV cache."""
        assert hidden is None
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


@dataclass(slots=True)
class DraftModel(ModelPasses):
    """Proposes tokens with a small model, a pass for each."""

    max_draft_lag: ClassVar[int] = DRAFT_MODEL_LAG  # pass 1 feeds n-2 and n-1
    num_unfed_drafts: ClassVar[int] = 1  # pass i feeds draft i - 1
    keeps_draft_kv: ClassVar[bool] = True
    mask_token_id: ClassVar[None] = None


@dataclass(slots=True, kw_only=True)
class ParallelDraftModel(ModelPasses):
    """Proposes K tokens in one pass of a small model that was fine-tuned for it (PARD: An et al. 2025).

    The pass feeds the committed tokens that it has not seen and K - 1 mask tokens at the positions of drafts 1 to
    K - 1; the row of token n - 1 and those of the masks give one draft each. A draft is drawn from what its row says,
    without the drafts before it: q is a product, and `rejection` has a row of it for each position. The KV of masks is
    written over when true tokens are fed there, before anything else reads it.
    """

    num_unfed_drafts: ClassVar[int] = 0
    keeps_draft_kv: ClassVar[bool] = False

    max_draft_lag: int  # K + 1: after a full acceptance it lacks the last token fed, K drafts and the one behind them
    mask_token_id: int
