"""Masks, bias, penalties and filters against loops, and against transformers' processors where it has the parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.core import RequestSampling
from specrs.verify.params import SamplingRows, Steps
from specrs.verify.processing import Constraints, adjust_logits, constrain, filter_logits, process_logits
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
)

from verify.reference import Request, adjust, distribution
from verify.rows import BIASES, LENGTH, STOPS, WORDS, constraints, ids, sampling_rows, token_counts, union

VOCAB = 24

ALONE = {
    "temperature": Request(temperature=0.6),
    "greedy": Request(temperature=0.0, top_k=3, top_p=0.5, min_p=0.9),
    "top_k": Request(top_k=5),
    "top_p": Request(top_p=0.7),
    "min_p": Request(min_p=0.2),
    "repetition_penalty": Request(repetition_penalty=1.7),
    "presence_penalty": Request(presence_penalty=1.1),
    "frequency_penalty": Request(frequency_penalty=-0.6),
    "logit_bias": Request(logit_bias=((3, 2.5), (0, -1.0))),
    "bad_words": Request(bad_words=((4,), (1, 2), (0, 2, 7), (9, 9, 9, 5))),
    "allowed_token_ids": Request(allowed_token_ids=(0, 3, 4, 9, 11)),
    "min_tokens": Request(min_tokens=3, stop_token_ids=(0, 7)),
}
TOGETHER = Request(
    temperature=0.8,
    top_k=12,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=0.8,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((2, 1.5), (5, -100.0)),
    bad_words=((3,), (1, 2)),
    allowed_token_ids=(*range(0, VOCAB, 2), 1, 3, 5),
    min_tokens=4,
    stop_token_ids=(0,),
)

tokens = st.integers(0, VOCAB - 1)


@st.composite
def requests(draw: Any) -> Request:
    """Draw any mixture of parameters that leaves a token allowed."""
    return Request(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.4])),
        top_k=draw(st.sampled_from([0, 1, 4, VOCAB])),
        top_p=draw(st.sampled_from([1.0, 0.35, 0.9])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, -1.5, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.2, 2.0])),
        logit_bias=tuple(draw(st.dictionaries(tokens, st.floats(-20, 20), max_size=BIASES)).items()),
        bad_words=tuple(
            draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=LENGTH).map(tuple), max_size=WORDS))
        ),
        allowed_token_ids=draw(st.one_of(st.none(), st.sets(tokens, min_size=1).map(lambda s: tuple(s | {23})))),
        min_tokens=draw(st.integers(0, 6)),
        stop_token_ids=tuple(draw(st.sets(st.integers(0, VOCAB - 2), max_size=STOPS))),
    )


histories = st.lists(st.integers(0, 6), max_size=8)  # few ids, so that words and counts occur


@given(
    st.lists(st.tuples(requests(), histories.map(lambda h: [1, *h]), histories), min_size=1, max_size=5),
    st.integers(0, 99),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_mixture_equals_loops(batch: list[tuple[Request, list[int], list[int]]], seed: int) -> None:
    asked, prompts, outputs = map(list, zip(*batch, strict=True))
    logits = torch.randn((len(batch), VOCAB), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    before = logits.clone()
    rows, steps = sampling_rows(asked, torch.float64)
    contexts = [[*p, *o] for p, o in zip(prompts, outputs, strict=True)]
    masks = constraints(asked, VOCAB, contexts, [len(o) for o in outputs], torch.float64)
    counts = token_counts(prompts, outputs, VOCAB)

    adjusted = adjust_logits(logits, rows, union(steps), constraints=masks, counts=counts)
    processed = process_logits(logits, rows, union(steps), constraints=masks, counts=counts)
    for i, request in enumerate(asked):
        expected = adjust(logits[i].numpy(), request, prompts[i], outputs[i])
        np.testing.assert_allclose(adjusted[i].numpy(), expected, rtol=1e-12, atol=1e-12)
        expected = distribution(logits[i].numpy(), request, prompts[i], outputs[i])
        np.testing.assert_allclose(processed[i].softmax(dim=-1).numpy(), expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("name", ALONE)
def test_each_parameter_alone_changes_the_distribution_as_loops_do(name: str) -> None:
    request, prompt, output = ALONE[name], [5, 1, 9], [4, 4, 9, 0][: 2 if name == "min_tokens" else 4]
    if name == "bad_words":
        output = [6, 1]
    g = torch.Generator().manual_seed(4)
    logits = torch.randn((50, VOCAB), generator=g) * 2
    rows, steps = sampling_rows([request] * 50)
    masks = constraints([request] * 50, VOCAB, [[*prompt, *output]] * 50, [len(output)] * 50)
    counts = token_counts([prompt] * 50, [output] * 50, VOCAB)
    probs = process_logits(logits, rows, union(steps), constraints=masks, counts=counts).softmax(dim=-1)
    for i in range(50):
        expected = distribution(logits[i].numpy(), request, prompt, output)
        np.testing.assert_allclose(probs[i].numpy(), expected, rtol=2e-5, atol=1e-7)
        assert np.abs(expected - distribution(logits[i].numpy(), Request(), prompt, output)).max() > 1e-4


def test_a_row_does_not_depend_on_its_batch_nor_on_steps_of_others() -> None:
    asked = [*ALONE.values(), TOGETHER, Request()]
    n = len(asked)
    g = torch.Generator().manual_seed(5)
    logits = torch.randn((n, VOCAB), generator=g) * 3
    logits[:, 3] = -0.0
    outputs = [torch.randint(0, 5, (i % 5,), generator=g).tolist() for i in range(n)]
    contexts = [[1, *o] for o in outputs]
    rows, steps = sampling_rows(asked)
    masks = constraints(asked, VOCAB, contexts, [len(o) for o in outputs])
    counts = token_counts([[1]] * n, outputs, VOCAB)
    whole = process_logits(logits, rows, union(steps), constraints=masks, counts=counts)
    for i in range(n):
        one = [asked[i]]
        alone = process_logits(
            logits[i : i + 1],
            rows.select(torch.tensor([i])),
            steps[i],
            constraints=constraints(one, VOCAB, [contexts[i]], [len(outputs[i])]),
            counts=token_counts([[1]], outputs[i : i + 1], VOCAB),
        )
        assert torch.equal(whole[i : i + 1], alone), asked[i]
    assert torch.equal(whole[-1], logits[-1])


def test_arguments_are_left_alone() -> None:
    logits = torch.zeros((1, 4))
    constrain(logits, Constraints(bias_ids=ids([2])[None], bias=torch.ones((1, 1))))
    rows, steps = sampling_rows([Request(temperature=0.5, top_k=1, min_p=0.5)])
    process_logits(logits, rows, union(steps), coarse=True)
    assert torch.equal(logits, torch.zeros((1, 4)))


def test_the_coarse_cut_is_for_drafting_only() -> None:
    """Check that the coarse cut is for drafting only: the second logit is within a cell of the largest, so the exact
    cut removes it and the coarse one keeps it."""
    rows, steps = sampling_rows([Request(top_k=1)])
    logits = torch.tensor([[1.0, 0.99, -3.0]])
    assert (process_logits(logits, rows, union(steps)) > -torch.inf).tolist() == [[True, False, False]]
    assert (process_logits(logits, rows, union(steps), coarse=True) > -torch.inf).tolist() == [[True, True, False]]


def test_nothing_asked_for_does_nothing() -> None:
    logits = torch.randn((2, VOCAB), generator=torch.Generator().manual_seed(6))
    rows, steps = sampling_rows([Request()] * 2)
    assert process_logits(logits, rows, union(steps)) is logits


def test_a_greedy_row_draws_the_first_argmax_of_penalised_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.9], [1.0, 3.0, 3.0, 2.9]])
    rows, steps = sampling_rows([Request(temperature=0.0, frequency_penalty=0.5), Request()])
    counts = token_counts([[], []], [[1, 2], []], 4)
    out = process_logits(logits, rows, union(steps), counts=counts)
    inf = torch.inf
    assert torch.equal(out[0], torch.tensor([-inf, -inf, -inf, 0.0]))
    assert torch.equal(out[1], logits[1])
    tie = process_logits(logits, *sampling_rows([Request(temperature=0.0)] * 2)[:1], Steps(greedy=True))
    assert tie.softmax(dim=-1).tolist() == [[0.0, 1.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_transformers(dtype: torch.dtype) -> None:
    """Check masks, bias and penalties to the bit against transformers: the same formula in the same precision."""
    g = torch.Generator().manual_seed(7)
    vocab, n = 97, 20
    logits = (torch.randn((n, vocab), generator=g) * 3).to(dtype)
    prompt, output = torch.randint(0, vocab, (n, 6), generator=g), torch.randint(0, vocab, (n, 9), generator=g)
    context = torch.cat((prompt, output), dim=1)

    def ours(request: Request) -> torch.Tensor:
        rows, steps = sampling_rows([request] * n, dtype)
        masks = constraints([request] * n, vocab, context.tolist(), [9] * n, dtype)
        counts = token_counts(prompt.tolist(), output.tolist(), vocab)
        return process_logits(logits, rows, union(steps), constraints=masks, counts=counts)

    for penalty in (0.4, 1.0, 1.3, 2.0):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(context, logits)
        assert torch.equal(ours(Request(repetition_penalty=penalty)), expected)
    for temperature in (0.1, 0.7, 1.0, 1.9):
        assert torch.equal(
            ours(Request(temperature=temperature)), TemperatureLogitsWarper(temperature)(context, logits)
        )

    last = context[:, -1].tolist()
    words = ((5,), (last[0], 8), (last[1], 9), (*context[2, -3:].tolist(), 10))
    banned = NoBadWordsLogitsProcessor([list(w) for w in words])(context, logits)
    assert (banned[:4, [8, 9, 10]] == -torch.inf).any()
    assert torch.equal(ours(Request(bad_words=words)), banned)

    bias = ((5, 1.25), (17, -3.5), (0, 0.75))
    expected = SequenceBiasLogitsProcessor({(i,): v for i, v in bias})(context, logits)
    assert torch.equal(ours(Request(logit_bias=bias)), expected)

    for minimum in (9, 10):
        expected = MinNewTokensLengthLogitsProcessor(6, minimum, [3, 41])(context, logits)
        assert torch.equal(ours(Request(min_tokens=minimum, stop_token_ids=(3, 41))), expected)


@pytest.mark.parametrize(
    ("given_constraints", "message"),
    [
        (Constraints(bad_words=torch.full((1, 1, 2), -1)), "context: None, must be the tokens before each row"),
        (Constraints(stop_ids=torch.zeros((1, 1), dtype=torch.int64)), "stops_forbidden: None, must mark the rows"),
        (Constraints(bias_ids=torch.zeros((1, 1), dtype=torch.int64)), "bias: None, must hold a bias for each"),
    ],
)
def test_half_given_constraints_are_rejected(given_constraints: Constraints, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        constrain(torch.zeros((1, 4)), given_constraints)


def test_penalties_without_counts_are_rejected() -> None:
    rows, steps = sampling_rows([Request(presence_penalty=1.0)])
    with pytest.raises(ValueError, match="counts: None, must be the token counts of the rows"):
        process_logits(torch.zeros((1, 4)), rows, union(steps))


def test_write_stores_off_as_values_that_change_nothing() -> None:
    rows = SamplingRows.allocate(3)
    assert rows.write(0, RequestSampling()) == Steps(random=True)
    assert rows.write(1, RequestSampling(temperature=1e-6, top_k=5, top_p=0.5, min_p=0.5)) == Steps(greedy=True)
    assert rows.write(2, RequestSampling(top_p=1.0 - 1e-12, top_k=10**6)) == Steps(random=True, top_k=True)
    off = SamplingRows.allocate(1)
    for name in ("temperature", "top_k", "top_p", "log_min_p"):
        assert getattr(rows, name)[0] == getattr(off, name) == getattr(rows, name)[1], name
    assert rows.greedy[:, 0].tolist() == [False, True, False]
    assert rows.top_p[2] == torch.inf
    tiny = sampling_rows([Request(top_p=1e-300)])[0]
    assert filter_logits(torch.tensor([[1.0, 2.0]]), tiny, Steps(top_p=True)).tolist() == [[-torch.inf, 2.0]]
    assert [int(x) for x in rows.select(ids([2, 2, 0])).greedy] == [0, 0, 0]
    assert rows.select(ids([2, 0, 2])).top_k[:, 0].tolist() == [1e6, torch.inf, 1e6]
