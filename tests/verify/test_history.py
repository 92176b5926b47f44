"""Token counts and contexts against lists of tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.verify.history import OUTSIDE, context_rows, count_tokens, pack_bad_words

from verify.rows import ids

VOCAB = 7
texts = st.lists(st.integers(0, VOCAB - 1), max_size=10)


def counted(text: list[int]) -> list[int]:
    return [Counter(text)[token] for token in range(VOCAB)]


@given(st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_counts_are_those_of_the_text_written_so_far(batch: list[tuple[list[int], ...]], data: st.DataObject) -> None:
    width = 31
    history = torch.tensor([(p + o + d + [5] * width)[:width] for p, o, d in batch])  # later tokens are ignored
    upto = [data.draw(st.integers(0, len(draft))) for _, _, draft in batch]
    positions = [len(p) + len(o) + i for (p, o, _), i in zip(batch, upto, strict=True)]
    counts = count_tokens(history, ids(positions), ids([len(p) for p, _, _ in batch]), VOCAB)
    for i, (prompt, output, draft) in enumerate(batch):
        assert counts.output[i].tolist() == counted(output + draft[: upto[i]])
        assert counts.prompt[i].tolist() == [token in prompt for token in range(VOCAB)]


def test_every_verification_row_counts_the_drafts_before_it() -> None:
    history = ids([2, 4, 4, 4, 5, 4]).expand(4, 6)  # one prompt token, two of output, three drafts
    rows = count_tokens(history, ids([3, 4, 5, 6]), ids([1] * 4), VOCAB)
    assert rows.output[:, 4].tolist() == [2, 3, 3, 4]
    assert rows.output[:, 5].tolist() == [0, 0, 1, 1]
    assert rows.prompt[:, 2].all()
    assert not rows.output[:, 2].any()


def test_contexts_end_before_the_position() -> None:
    tokens = ids(range(20)).view(2, 10)
    rows = context_rows(tokens, ids([1, 1, 0, 0]), ids([10, 4, 2, 0]), 3)
    assert rows.tolist() == [[17, 18, 19], [11, 12, 13], [OUTSIDE, 0, 1], [OUTSIDE] * 3]


def test_bad_words_are_packed_to_the_right() -> None:
    assert pack_bad_words([[5], [1, 2, 3]], 3, 3).tolist() == [[-1, -1, 5], [1, 2, 3], [-1, -1, -1]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([[1], [2], [3]], r"bad_words: 3 sequences; must be at most 2"),
        ([[1], []], r"bad_words\[1\]: 0 tokens; must be from 1 to 3"),
        ([[1, 2, 3, 4]], r"bad_words\[0\]: 4 tokens; must be from 1 to 3"),
    ],
)
def test_words_that_do_not_fit_are_rejected(words: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_bad_words(words, 2, 3)
