"""Packed masks of the sequences that have a grammar: the right rows, in parts, and no words of other sequences."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cuda.sampling.grammar import PackedMasks, StepGrammar
from specrs.backends.cuda.sampling.sampling_state import adjusting_bytes
from specrs.core import RequestSampling
from specrs.verify.history import TokenCounts
from specrs.verify.params import SamplingRows, Steps
from specrs.verify.processing import Constraints, adjust_logits

VOCAB, WIDTH = 70, 3
CPU = torch.device("cpu")


def grammar(has_grammar: list[bool]) -> StepGrammar:
    """Row i of sequence s allows id 10 s + i alone; words of sequences without grammar are nonsense."""
    words = np.full((len(has_grammar), WIDTH, StepGrammar.words(VOCAB)), 0x5A5A5A5A, dtype=np.int32)
    made = StepGrammar([None] * len(has_grammar), has_grammar, words, VOCAB)
    for s, own in enumerate(has_grammar):
        assert not own or (words[s] == -1).all(), "all are allowed before a matcher says so"
        if own:
            words[s] = 0
            for i in range(WIDTH):
                token = 10 * s + i
                words[s, i, token // 32] = np.int32(1 << token % 32) if token % 32 < 31 else np.int32(-(2**31))
    return made


def check(masks: PackedMasks, has_grammar: list[bool], sequences: torch.Tensor, offsets: torch.Tensor) -> None:
    """Every part has the masks of its rows."""
    assert len(masks.words) == sum(has_grammar[s] for s in sequences.tolist()), "no words of others"
    for first in range(len(sequences)):
        for last in range(first + 1, len(sequences) + 1):
            forbidden = masks.forbidden(slice(first, last))
            assert forbidden.shape == (last - first, VOCAB)
            for row, s, i in zip(forbidden, sequences[first:last].tolist(), offsets[first:last].tolist(), strict=True):
                allowed = (~row).nonzero().flatten().tolist()
                assert allowed == ([10 * s + i] if has_grammar[s] else list(range(VOCAB)))


@given(has_grammar=st.lists(st.booleans(), min_size=1, max_size=5), data=st.data())
def test_masks_are_those_of_their_rows(has_grammar: list[bool], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, WIDTH), min_size=len(has_grammar), max_size=len(has_grammar)))
    sequences = torch.tensor([s for s, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64)
    offsets = torch.tensor([i for length in lengths for i in range(length)], dtype=torch.int64)
    check(grammar(has_grammar).masks(sequences, offsets, CPU), has_grammar, sequences, offsets)


def test_a_mask_of_the_wrong_row_is_seen() -> None:
    has_grammar, sequences = [False, True, True], torch.tensor([0, 1, 1, 2])
    offsets = torch.tensor([0, 0, 1, 0])
    masks = grammar(has_grammar).masks(sequences, offsets, CPU)
    check(masks, has_grammar, sequences, offsets)
    for wrong in (
        dataclasses.replace(masks, rows=masks.rows - 1),
        dataclasses.replace(masks, words=masks.words.roll(1, 0)),
    ):
        with pytest.raises(AssertionError):
            check(wrong, has_grammar, sequences, offsets)


def test_the_memory_is_bounded() -> None:
    """256 requests with five drafts of a vocabulary of 151,936 took 5 to 6 GB, which nothing had counted."""
    assert adjusting_bytes(256 * 6, 151_936) < 2.3e9
    assert adjusting_bytes(8, 151_936) == 8 * 36 * 151_936


def test_ids_that_a_draft_lacks_stay_out() -> None:
    """Their logits are -inf, and no mask, bias or penalty makes them anything else."""
    logits = torch.randn(2, 8)
    logits[:, 5:] = -torch.inf
    rows = SamplingRows.allocate(2, dtype=torch.float32, device=CPU)
    asked = RequestSampling(repetition_penalty=1.7, frequency_penalty=-2.0, presence_penalty=-2.0, temperature=0.0)
    for row in range(2):
        rows.write(row, asked)
    counts = TokenCounts(torch.full((2, 8), 3, dtype=torch.int32), torch.ones(2, 8, dtype=torch.bool))
    ids, bias = torch.arange(8).expand(2, 8), torch.full((2, 8), 100.0)
    made = adjust_logits(
        logits,
        rows,
        Steps.of(asked.columns("float32")[1]),
        constraints=Constraints(bias_ids=ids, bias=bias),
        counts=counts,
    )
    assert made[:, 5:].eq(-torch.inf).all()
    assert made[:, :5].isfinite().all()
    assert not made[:, :5].equal(logits[:, :5])
