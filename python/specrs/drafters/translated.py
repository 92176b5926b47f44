"""A draft model of another tokenizer as drafter, by the tokens that it shares with the target. Reads no files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from specrs.drafters.draft_model import DraftModel
from specrs.drafters.vocabulary import SharedVocabulary
from specrs.models.inputs import PassInputs


@dataclass(frozen=True, slots=True)
class SharedIds:
    """A `SharedVocabulary` of S tokens in tensors of the draft's device. Immutable."""

    target_ids: Tensor  # [S] int64
    draft_ids: Tensor  # [S] int64, of the same tokens
    fed_ids: Tensor  # [V] int64, the draft's id of each of the target's, `unknown` for what it does not know

    @classmethod
    def of(cls, shared: SharedVocabulary, device: torch.device) -> Self:
        """Return the tensors of `shared` on `device`."""
        both = torch.tensor(shared.pairs, dtype=torch.int64, device=device).view(-1, 2)
        fed = torch.full((shared.vocab_size,), shared.unknown, dtype=torch.int64, device=device)
        fed[both[:, 0]] = both[:, 1]
        return cls(both[:, 0].contiguous(), both[:, 1].contiguous(), fed)


@dataclass(slots=True, kw_only=True)
class TranslatedDraftModel(DraftModel):
    """Proposes tokens of the shared part of two vocabularies: TLI, token-level intersection (Timor et al. 2025).

    The draft is fed its own ids of the text's tokens, one for one, so positions and KV slots are the target's. Its
    distribution is held to the shared tokens and normalised where it is drawn from. That is q, so every rule stays
    lossless.
    """

    shared: SharedIds

    def known_ids(self, inputs: PassInputs) -> PassInputs:
        """Return `inputs` with the target's token ids replaced by the draft model's."""
        return replace(inputs, input_ids=self._known(inputs.input_ids))

    def _known(self, ids: Tensor) -> Tensor:
        return self.shared.fed_ids[ids]

    def _logits(self, hidden: Tensor) -> Tensor:
        own = self.model.compute_logits(hidden)
        logits = own.new_full((len(own), self.vocab_size), -torch.inf)
        logits[:, self.shared.target_ids] = own[:, self.shared.draft_ids]
        return logits
