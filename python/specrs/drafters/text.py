"""Texts of one tokenizer as ids of another, for a draft model that drafts by text. Reads no files and runs no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TAIL = 16
"""Tokens of the target before the drafts that are read again with them: whether the text is cut there as it was."""
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
