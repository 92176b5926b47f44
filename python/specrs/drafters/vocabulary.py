"""A draft model of another tokenizer as drafter, by the tokens that it shares with the target. Reads no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from specrs.drafters.draft_model import DraftModel
from specrs.models.inputs import PassInputs


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """S tokens that both know, and what the draft is fed for each id of the target. Immutable."""

    target_ids: Tensor  # [S] int64
    draft_ids: Tensor  # [S] int64, of the same tokens
    fed_ids: Tensor  # [V] int64, the draft's ids, `unknown` for what it does not know

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]], unknown: int, vocab_size: int, device: torch.device) -> Self:
        """From pairs (target's id, draft's id), each id in at most one of them; `vocab_size`: ids of the target."""
        both = torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2)
        fed = torch.full((vocab_size,), unknown, dtype=torch.int64, device=device)
        fed[both[:, 0]] = both[:, 1]
        return cls(both[:, 0].contiguous(), both[:, 1].contiguous(), fed)


@dataclass(slots=True, kw_only=True)
class TranslatedDraftModel(DraftModel):
    """Proposes tokens of the shared part of two vocabularies: TLI, token-level intersection (Timor et al. 2025).

    The draft is fed its own ids of the text's tokens, one for one, so positions and KV slots are the target's. Its
    distribution is held to the shared tokens and normalised where it is drawn from. That is q, so every rule stays
    lossless.
    """

    shared: SharedVocabulary

    def known_ids(self, inputs: PassInputs) -> PassInputs:
        """The same pass in the draft's ids."""
        return replace(inputs, input_ids=self._known(inputs.input_ids))

    def _known(self, ids: Tensor) -> Tensor:
        return self.shared.fed_ids[ids]

    def _logits(self, hidden: Tensor) -> Tensor:
        own = self.model.compute_logits(hidden)
        logits = own.new_full((len(own), self.vocab_size), -torch.inf)
        logits[:, self.shared.target_ids] = own[:, self.shared.draft_ids]
        return logits
