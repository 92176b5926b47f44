"""Part of the vocabulary that a drafter drafts: its options, and the choice of ids. Loads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specrs.arrays import Array
from specrs.drafters.method import WHERE, MethodOptions, wrong
from specrs.errors import CheckpointError, invalid, short
from specrs.models.checkpoint import read_json
from specrs.options import Integer, Text, option


@dataclass(frozen=True, kw_only=True)
class DraftVocabularyOptions(MethodOptions):
    """Options of a drafter whose LM head may have fewer ids than the target's."""

    draft_vocab_size: int | None = option(
        None,
        Integer(1),
        "number of token ids that a draft model or MTP head drafts",
        default_is="all",
        details="They are the first ids, or the most frequent ones of `draft_vocab_counts`. Fewer ids make a draft "
        "cheaper, because the LM head is most of its cost in small models. The text stays the same.",
    )
    draft_vocab_counts: str | None = option(
        None,
        Text(),
        "JSON file with the count of each token id, by which `draft_vocab_size` ids are chosen",
        default_is="the first ids are chosen",
        details="`specrs.token_counts` counts the ids of a target's outputs.",
    )

    def check_rules(self) -> None:
        """Raise `InvalidConfigError` for `draft_vocab_counts` without `draft_vocab_size`."""
        if self.draft_vocab_counts is not None and self.draft_vocab_size is None:
            reason = "needs draft_vocab_size, the number of ids to choose; set it"
            raise wrong("draft_vocab_counts", self.draft_vocab_counts, reason)


def draft_ids(size: int | None, counts: str | None, vocab_size: int) -> Array:
    """Return the ids that a drafter drafts, `[size]` int64, ascending.

    They are the first `size` ids, or the most frequent ones of the JSON file `counts`, an object with the count of each
    token id. Of ids with the same count, the lower one comes first. Ids that the file lacks count 0. With `size` None,
    all `vocab_size` ids that target and drafter have are returned.

    Raises InvalidConfigError for a wrong size, CheckpointError for a wrong file.
    """
    if size is not None and size > vocab_size:
        raise wrong("draft_vocab_size", size, f"must be at most {vocab_size}, the number of ids that can be drafted")
    if size is None or counts is None:
        return np.arange(vocab_size if size is None else size)
    return np.sort(np.argsort(-_counts_of_ids(counts, vocab_size), kind="stable")[:size])


def _counts_of_ids(file: str, vocab_size: int) -> Array:
    """Return the counts in `file`, `[vocab_size]` float64. Raises CheckpointError for a wrong file."""

    def error(reason: str) -> CheckpointError:
        remedy = "write a JSON file with the count of each of the target's token ids, as specrs.token_counts makes it"
        return invalid(CheckpointError, WHERE + "draft_vocab_counts", file, f"{reason}; {remedy}")

    if not Path(file).exists():
        raise error("there is no such file")
    try:
        content = read_json(Path(file))
    except CheckpointError as fault:
        raise error(str(fault)) from fault
    found = np.zeros(vocab_size, np.float64)
    for key, count in content.items():
        if not key.isdecimal() or int(key) >= vocab_size:
            raise error(f"{short(key)} must be a token id from 0 to {vocab_size - 1}")
        if type(count) not in (int, float) or not 0 <= count < np.inf:
            raise error(f"{key}: {short(count)} must be a number of at least 0")
        found[int(key)] = count
    return found
