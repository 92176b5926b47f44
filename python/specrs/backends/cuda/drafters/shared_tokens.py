"""Passes of a draft model with another tokenizer on a GPU. It drafts the tokens that both vocabularies have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from torch import Tensor

from specrs.backends.cuda.draft_passes import Reduced, Room
from specrs.backends.cuda.drafters.model import ModelPasses
from specrs.backends.cuda.products import stored
from specrs.drafters.other_tokenizer import LoadedSharedTokens
from specrs.kernels.linear import DenseWeight
from specrs.models.torch_decoder import TorchDecoder


@dataclass(slots=True, kw_only=True)
class SharedTokenPasses(ModelPasses):
    """Passes of a draft model that is fed its own ids, one for each id of the target. `DraftPasses` documents the
    members.

    Positions and KV slots are the target's. q is the draft model's distribution over the shared tokens, normalised
    where it is drawn from, so every rule stays lossless (TLI: Timor et al. 2025).
    """

    fed_ids: Tensor
    """[V] int64, the draft model's id of each target id; its unknown token if it has none."""

    @classmethod
    def make(cls, drafter: LoadedSharedTokens, room: Room) -> Self:  # type: ignore[override]
        """Return the passes of `drafter`.

        Copies the rows of the draft model's LM head for which the target has tokens, in the target's order. Logits of
        other tokens are never computed.
        """
        shared, device = drafter.shared, drafter.model.device
        both = torch.tensor(shared.pairs, dtype=torch.int64, device=device).view(-1, 2)
        fed_ids = torch.full((shared.vocab_size,), shared.unknown, dtype=torch.int64, device=device)
        fed_ids[both[:, 0]] = both[:, 1]
        target_ids, order = both[:, 0].sort()
        weights = cast("TorchDecoder", drafter.model).weights
        rows = stored(weights.lm_head).index_select(0, both[order, 1])
        model = TorchDecoder(replace(weights, lm_head=DenseWeight(rows)))
        reduced = Reduced.of(target_ids, shared.vocab_size)
        made = cls.of(drafter, model, room, fed_ids=fed_ids, reduced=reduced)
        made.sizes = replace(made.sizes, num_ids=len(target_ids))
        return made

    def known(self, ids: Tensor, out: Tensor) -> Tensor:
        return torch.index_select(self.fed_ids, 0, ids, out=out)
