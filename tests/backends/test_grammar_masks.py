"""Packed masks of the sequences that have a grammar: in the right rows, without words of other sequences. Drafts are
read as late as possible."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from specrs.backends.cuda.sampling.grammar import StepGrammar
from specrs.backends.cuda.sampling.logprobs import reporting_bytes
from specrs.structured.matcher import GrammarMatcher

VOCAB, WIDTH = 70, 3
CPU = torch.device("cpu")


def grammar(has_grammar: list[bool]) -> StepGrammar:
    """Return masks in which row i of sequence s allows id 10 s + i alone. Words of sequences without grammar are
    nonsense."""
    words = np.full((len(has_grammar), WIDTH, StepGrammar.words(VOCAB)), 0x5A5A5A5A, dtype=np.int32)
    made = StepGrammar([None] * len(has_grammar), has_grammar, words)
    for s, own in enumerate(has_grammar):
        assert not own or (words[s] == -1).all(), "all are allowed before a matcher says so"
        if own:
            words[s] = 0
            for i in range(WIDTH):
                token = 10 * s + i
                words[s, i, token // 32] = np.int32(1 << token % 32) if token % 32 < 31 else np.int32(-(2**31))
    return made


def allowed(words: torch.Tensor) -> list[int]:
    return [token for token in range(VOCAB) if int(words[token // 32]) >> token % 32 & 1]


@given(has_grammar=st.lists(st.booleans(), min_size=1, max_size=5), data=st.data())
def test_masks_are_those_of_their_rows(has_grammar: list[bool], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, WIDTH), min_size=len(has_grammar), max_size=len(has_grammar)))
    sequences = torch.tensor([s for s, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64)
    offsets = torch.tensor([i for length in lengths for i in range(length)], dtype=torch.int64)
    masks = grammar(has_grammar).masks(sequences, offsets, CPU)
    wanted = [[10 * s + i] for s, own in enumerate(has_grammar) if own for i in range(lengths[s])]
    assert [allowed(words) for words in masks] == wanted


class Counting:
    """A matcher that allows only the id that is the number of accepted tokens."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def fill_mask(self, out: NDArray[np.int32]) -> None:
        out[:] = 0
        out[0] = 1 << len(self.accepted)

    def accept(self, token: int) -> bool:
        self.accepted.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self.accepted[len(self.accepted) - count :]


def test_drafts_are_read_when_a_mask_is_asked_for() -> None:
    """Check that drafts are read when a mask is asked for, not before: by then the next pass is enqueued, so the device
    does not wait for the host."""
    matcher = Counting()
    words = np.zeros((2, WIDTH, StepGrammar.words(VOCAB)), dtype=np.int32)
    made = StepGrammar([None, cast("GrammarMatcher", matcher)], [False, True], words)

    def mask(offset: int) -> list[list[int]]:
        return [allowed(own) for own in made.masks(torch.arange(2), torch.full((2,), offset), CPU)]

    assert mask(0) == [[0]]
    made.observe(torch.tensor([5, 7]), torch.tensor([True, True]))
    assert matcher.accepted == []
    assert mask(1) == [[1]]
    assert matcher.accepted == [7]
    made.observe(torch.tensor([5, 8]), torch.tensor([True, True]))
    assert mask(2) == [[2]]
    made.finish()
    assert matcher.accepted == []


def test_drafts_in_the_record_follow_each_other() -> None:
    matcher: Any = Counting()
    words = np.zeros((1, WIDTH, StepGrammar.words(VOCAB)), dtype=np.int32)
    made = StepGrammar([matcher], [True], words)
    for token, live in ((5, True), (6, False)):
        made.observe(torch.tensor([token]), torch.tensor([live]))
    masks = made.masks(torch.zeros(WIDTH, dtype=torch.int64), torch.arange(WIDTH), CPU)
    assert [allowed(own) for own in masks] == [[0], [1], list(range(VOCAB))]


@pytest.mark.parametrize("rows", [1, 256 * 6])
def test_the_memory_is_bounded(rows: int) -> None:
    """Check that the memory for masks is bounded. 256 requests with five drafts at a vocabulary of 151,936 once took 5
    to 6 GB."""
    assert reporting_bytes(rows, 151_936) < 1.3e9
