"""Translates token ids between the tokenizers of target and draft model by way of text. Reads no files and runs no
model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TAIL = 16
"""Number of target tokens before the drafts that are tokenized again together with the drafts. The result shows whether
the text before the drafts still has the same tokens."""
_BROKEN = "\ufffd"
"""Replacement character that decoders write for an incomplete character."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer that turns text into ids and back, with the ids that begin and end texts."""

    backend: Tokenizer
    bos: int | None  # what it puts before a text, if anything
    eos: tuple[int, ...]  # the one that ends a chat first

    def read(self, text: str) -> list[int]:
        """Return the token ids of `text`, without special tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def write(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Special tokens appear by name."""
        return self.backend.decode(list(ids), skip_special_tokens=False)


class Bridge(NamedTuple):
    """Translator between token ids of the target and token ids of the draft model."""

    target: Vocabulary
    draft: Vocabulary

    def own_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the draft model's ids for the text of the target's `ids`, with its BOS first. [] if `ids` end inside a
        character or have no text."""
        text = self.target.write(ids[ids[0] == self.target.bos :])
        own = [] if text.endswith(_BROKEN) else self.draft.read(text)
        return [self.draft.bos, *own] if own and self.draft.bos is not None else own

    def target_ids(self, before: Sequence[int], own: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """Return the target's ids for the drafts `drafted`, which the draft model generated after its ids `own`.

        `before` are the target's ids of the same text as `own`. The drafts end at the draft model's first eos, which
        becomes the target's. [] if the text of `own` changes when drafts follow it.
        """
        end = next((i for i, token in enumerate(drafted) if token in self.draft.eos), len(drafted))
        text, whole = self.draft.write(own), self.draft.write([*own, *drafted[:end]])
        if not whole.startswith(text):
            return []
        added, tail = whole[len(text) :].rstrip(_BROKEN), list(before[-_TAIL:])
        ids = self.target.read(self.target.write(tail) + added)
        found = ids[len(tail) :] if ids[: len(tail)] == tail else self.target.read(added)
        return found + list(self.target.eos[:1] if end < len(drafted) else ())
