"""A draft model of another tokenizer as drafter, by text: it writes in its own tokens, which are read as the target's.
Reads no files and knows no requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from specrs.drafters.base import Proposal
from specrs.models.base import TorchModel
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TAIL = 16
"""Tokens of the target before the drafts that are read again with them: whether the text is cut there as it was."""
_CHUNK = 512
"""The most tokens of a text that one pass feeds."""
_NEAR = 16
"""A text that lacks no more of its KV drafts in any launch, and others are fed as much in any: that many positions
beside each other cost about what one does."""
_BROKEN = "\ufffd"
"""What a decoder writes for a character that is not whole."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's two directions, and the ids at the ends of texts."""

    backend: Tokenizer
    bos: int | None  # what it puts before a text, if anything
    eos: tuple[int, ...]  # the one that ends a chat first

    def read(self, text: str) -> list[int]:
        """Ids of `text` and nothing else."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def write(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens by their names."""
        return self.backend.decode(list(ids), skip_special_tokens=False)


class Bridge(NamedTuple):
    """Texts of the target's tokens as the draft's, and back."""

    target: Vocabulary
    draft: Vocabulary

    def own_ids(self, ids: Sequence[int]) -> list[int]:
        """What the draft is fed of the target's `ids`; [] where they end inside a character, or have no text."""
        text = self.target.write(ids[ids[0] == self.target.bos :])
        own = [] if text.endswith(_BROKEN) else self.draft.read(text)
        return [self.draft.bos, *own] if own and self.draft.bos is not None else own

    def target_ids(self, before: Sequence[int], own: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """What the draft's tokens `drafted` behind `own` are for the target, whose own ids `before` end there too."""
        end = next((i for i, token in enumerate(drafted) if token in self.draft.eos), len(drafted))
        text, whole = self.draft.write(own), self.draft.write([*own, *drafted[:end]])
        if not whole.startswith(text):
            return []
        added, tail = whole[len(text) :].rstrip(_BROKEN), list(before[-_TAIL:])
        ids = self.target.read(self.target.write(tail) + added)
        found = ids[len(tail) :] if ids[: len(tail)] == tail else self.target.read(added)
        return found + list(self.target.eos[:1] if end < len(drafted) else ())


@dataclass(slots=True)
class TextDraftModel:
    """Proposes what a small model of another tokenizer writes next: SLEM, string-level exact match (Timor et al. 2025).

    The target draws every token and a draft stands where it is that token, so greedy and `coupled` text is as it was,
    however the draft's text is cut. Each row has KV of its own for the draft's ids of its text, `[rows * C, block]` of
    its own cache; what of them is still the beginning of the text is gone on from, whosever of the same cache salt it
    was.
    """

    max_draft_lag: ClassVar[None] = None
    num_unfed_drafts: ClassVar[None] = None
    keeps_draft_kv: ClassVar[bool] = False
    hidden_layers: ClassVar[tuple[int, ...]] = ()
    proposal: ClassVar[Proposal] = Proposal.POINT_MASS
    on_host: ClassVar[bool] = False

    model: TorchModel
    kv_cache: KVCache  # C blocks for each row
    context: int  # of its own tokens
    vocab_size: int  # the target's
    bridge: Bridge
    max_fed: int  # of its tokens in one launch, about; a text that lacks more is fed piece by piece before it drafts
    num_passes: int = 0
    _fed: dict[int, list[int]] = field(default_factory=dict)  # by row: whose KV is valid
    _salts: dict[int, int] = field(default_factory=dict)  # by row: of the request admitted last

    @property
    def max_model_len(self) -> None:
        """None: how long a text is in its own tokens, it sees when it reads it."""
        return

    def admit(self, rows: Sequence[int], salts: Sequence[int]) -> None:
        """Other requests have these rows; what is kept of a row is not theirs where their `admit_salt` is another."""
        for row, salt in zip(rows, salts, strict=True):
            if self._salts.get(row) != salt:
                self._fed.pop(row, None)
            self._salts[row] = salt

    def write(self, texts: Sequence[tuple[int, list[int], int]]) -> list[list[int] | None]:
        """Of each (row, the target's ids, k) up to k drafts, as the target's ids; None where k is 0, or too much of the
        text has no KV yet. Mutates its KV."""
        plans = []
        for row, ids, k in texts:
            own = self.bridge.own_ids(ids) if k else []
            # A tokenizer may have ids that the model has no embedding of.
            fits = bool(own) and len(own) + k <= self.context and max(own) < self.model.vocab_size
            plans.append((row, own, k if fits else 0))
        drafted: list[list[int]] = [[] for _ in plans]
        live = [i for i, (_, _, k) in enumerate(plans) if k]
        for i in live:
            row, own, _ = plans[i]
            fed = self._fed.get(row, [])
            same = next((j for j, (a, b) in enumerate(zip(fed, own, strict=False)) if a != b), min(len(fed), len(own)))
            self._fed[row] = own[: min(same, len(own) - 1)]
        ends = self._ends({i: plans[i][:2] for i in live})
        while live:
            chunks = []
            for i in live:
                row, own, _ = plans[i]
                start = len(self._fed[row])
                chunks.append((row, start, (own[: ends[i]] + drafted[i])[start : start + _CHUNK]))
            best = self._feed(chunks)
            for i, (row, _, fed), token in zip(live, chunks, best, strict=True):
                self._fed[row] = self._fed[row] + fed
                if ends[i] == len(plans[i][1]) and len(self._fed[row]) == ends[i] + len(drafted[i]):
                    drafted[i].append(token)
            live = [i for i in live if self._goes_on(plans[i], ends[i], len(drafted[i]))]
        found: list[list[int] | None] = []
        for i, ((_, ids, k), (_, own, _), tokens) in enumerate(zip(texts, plans, drafted, strict=True)):
            if not k or ends.get(i, len(own)) < len(own):
                found.append(None)
                continue
            read = self.bridge.target_ids(ids, own, tokens) if tokens else []
            known = next((j for j, token in enumerate(read) if token >= self.vocab_size), len(read))
            found.append(read[: min(k, known)])
        return found

    def _goes_on(self, plan: tuple[int, list[int], int], end: int, drafted: int) -> bool:
        row, own, k = plan
        return drafted < k if end == len(own) else len(self._fed[row]) < end

    def _ends(self, texts: Mapping[int, tuple[int, list[int]]]) -> dict[int, int]:
        """How far each text (row, ids) is fed in this launch: those that lack least to their ends, the others by
        pieces, so that no launch takes longer than the prompt chunks of one may."""
        ends, room = {}, self.max_fed
        for i, (row, own) in sorted(texts.items(), key=lambda item: len(item[1][1]) - len(self._fed[item[1][0]])):
            start = len(self._fed[row])
            ends[i] = min(len(own), start + max(room, _NEAR))
            room -= ends[i] - start
        return ends

    def _feed(self, chunks: Sequence[tuple[int, int, list[int]]]) -> list[int]:
        """One pass over (row, first position, ids); the most likely id behind each."""
        self.num_passes += 1
        size = self.kv_cache.block_size
        blocks = -(-self.context // size)
        rows = torch.tensor([row for row, _, _ in chunks])
        lengths = [len(ids) for _, _, ids in chunks]
        ends = [start + len(ids) for _, start, ids in chunks]
        table = rows[:, None] * blocks + torch.arange(-(-max(ends) // size))
        positions = torch.cat([torch.arange(start, start + len(ids)) for _, start, ids in chunks])
        of_row = torch.arange(len(chunks)).repeat_interleave(torch.tensor(lengths))
        inputs = PassInputs(
            input_ids=torch.tensor([token for _, _, ids in chunks for token in ids]),
            positions=positions,
            slots=table[of_row, positions // size] * size + positions % size,
            q_start=torch.tensor([0, *accumulate(lengths)]),
            block_table=table,
            max_q_len=max(lengths),
            max_context=max(ends),
        )
        final = self.model.forward(inputs, self.kv_cache).final
        best: list[int] = self.model.compute_logits(final[inputs.q_start[1:] - 1]).argmax(dim=-1).tolist()
        return best
