"""The `rejection` rule against exact enumeration, and checks that the comparison sees the classic mistakes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.verify.coupled import verify_coupled
from specrs.verify.processing import greedy_as_point_mass
from specrs.verify.rejection import append_token, count_accepted, draw_after, row_index, verify_rejection
from specrs.verify.sample import draw_draft
from sweep import some
from torch import Tensor

from verify.enumeration import (
    NODES,
    OUTPUT,
    PATHS,
    PROMPT,
    STREAMS,
    VOCAB,
    Noise,
    Verify,
    by_rejection,
    decode_pairs,
    make_noise,
    process,
    raw_logits,
    sigma,
    world,
)
from verify.reference import Request, distribution

LIMIT = 4.5

REQUESTS = {
    "plain": Request(),
    "temperature": Request(temperature=0.6),
    "top_k": Request(top_k=4),
    "top_p": Request(top_p=0.8),
    "min_p": Request(min_p=0.1),
    "repetition_penalty": Request(repetition_penalty=1.6),
    "presence_penalty": Request(presence_penalty=1.2),
    "frequency_penalty": Request(frequency_penalty=0.9),
    "logit_bias": Request(logit_bias=((3, 2.0), (7, -3.0))),
    "bad_words": Request(bad_words=((4,), (2, 9), (7, 2, 1), (6, 6))),
    "allowed_token_ids": Request(allowed_token_ids=(0, 2, 3, 7, 8, 12, 15)),
    "min_tokens": Request(min_tokens=4, stop_token_ids=(0, 12)),
    "greedy": Request(temperature=0.0, frequency_penalty=0.9),
    "together": Request(
        temperature=1.3,
        top_k=9,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias=((3, 1.0),),
        bad_words=((4,), (2, 9)),
        allowed_token_ids=tuple(range(14)),
        min_tokens=4,
        stop_token_ids=(0,),
    ),
}


@pytest.fixture(scope="module")
def noise() -> tuple[Noise, Noise]:
    return make_noise(10), make_noise(11)


def as_point_mass(
    p: Tensor, q_start: Tensor, q: Tensor, drafts: Tensor, num_drafts: Tensor, _: Tensor, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Verify by the rule's formula with q = 1 at each draft, whatever it was drawn from."""
    mass = torch.nn.functional.one_hot(drafts, VOCAB).to(q.dtype)
    return verify_rejection(p, q_start, mass, drafts, num_drafts, noise.accept[:, : drafts.shape[1]], noise.last)


def by_own_draws(
    p: Tensor, q_start: Tensor, _q: Tensor, drafts: Tensor, num_drafts: Tensor, _: Tensor, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Verify as specrs does if q is a point mass: the target's own draw in every row, with the noise of that row."""
    words = torch.rand(p.shape, generator=torch.Generator().manual_seed(len(p)), dtype=torch.float64)
    return verify_coupled(p.log(), words.log_().neg_().log_().neg_().float(), q_start, drafts, num_drafts)


@pytest.mark.parametrize(
    ("name", "verify", "draft"),
    some(
        3,
        ["plain", "top_k", "frequency_penalty", "bad_words", "greedy", "together"],
        [as_point_mass, by_own_draws],
        ["unrelated", "negative"],
    ),
)
def test_a_point_mass_as_q(name: str, draft: str, verify: Verify, noise: tuple[Noise, Noise]) -> None:
    """Check that a point mass as q keeps the distribution, by the rule's formula and by the target's own draws. A draft
    is accepted with its probability under p."""
    w = world(REQUESTS[name], draft)
    counts, accepted = decode_pairs(w, noise, verify)
    assert sigma(counts, w.pairs) < LIMIT
    # First iterations at K = 1: over all first drafts of the draft's distribution.
    stands = float((w.draft[0].softmax(-1).double() * w.target[0].softmax(-1).double()).sum())
    first = accepted[1].astype(np.float64)
    assert sigma(first[:2], np.array([1 - stands, stands])) < LIMIT


@pytest.mark.parametrize(("name", "draft"), some(2, REQUESTS, ["unrelated", "equal", "negative"]))
def test_pairs_of_tokens_have_the_target_distribution(name: str, draft: str, noise: tuple[Noise, Noise]) -> None:
    w = world(REQUESTS[name], draft)
    counts, accepted = decode_pairs(w, noise)
    assert counts.sum() == STREAMS
    assert sigma(counts, w.pairs) < LIMIT
    assert sigma(counts.sum(axis=1), w.pairs.sum(axis=1)) < LIMIT
    if draft == "equal":
        assert (accepted == np.diag(accepted.sum(axis=1))).all()
    overlap = np.minimum(*(x[0].softmax(dim=-1).double().numpy() for x in (w.target, w.draft))).sum()
    drafted = accepted[1:].sum()
    deviation = math.sqrt(overlap * max(0.0, 1 - overlap) / drafted)
    assert abs(accepted[1:, 1:].sum() / drafted - overlap) <= LIMIT * deviation + 1e-6


@pytest.mark.parametrize("draft", ["unrelated", "negative"])
def test_noise_shared_between_draft_and_last_draw_is_seen(draft: str, noise: tuple[Noise, Noise]) -> None:
    """Check that shared noise is noticed, the bug of vLLM #47386: the token after m drafts is drawn with the noise that
    drew d_{m+1}."""

    def shared(
        p: Tensor, q_start: Tensor, q: Tensor, drafts: Tensor, num_drafts: Tensor, _: Tensor, n: Noise
    ) -> tuple[Tensor, Tensor]:
        m = count_accepted(p, q_start, q, drafts, num_drafts, n.accept[:, : drafts.shape[1]])
        reused = n.draft[torch.arange(len(m)), m.clamp(max=1)]
        last = torch.where((m < num_drafts)[:, None], reused, n.last)
        return m, append_token(drafts, m, draw_after(p, q_start, q, num_drafts, m, last))

    w = world(Request(), draft)
    assert sigma(decode_pairs(w, noise, shared)[0], w.pairs) > 20
    assert sigma(decode_pairs(w, noise)[0], w.pairs) < LIMIT


@pytest.mark.parametrize("draft", ["unrelated", "negative"])
def test_q_that_was_not_drawn_from_is_seen(draft: str, noise: tuple[Noise, Noise]) -> None:
    """Check that a wrong q is noticed: recomputed at another temperature, or one-hot in the residual only, while
    acceptance uses the true one."""

    def recomputed(
        p: Tensor, q_start: Tensor, q: Tensor, drafts: Tensor, num_drafts: Tensor, nodes: Tensor, n: Noise
    ) -> tuple[Tensor, Tensor]:
        return by_rejection(p, q_start, (w.draft / 1.2).softmax(dim=-1)[nodes], drafts, num_drafts, nodes, n)

    def half_one_hot(
        p: Tensor, q_start: Tensor, q: Tensor, drafts: Tensor, num_drafts: Tensor, _: Tensor, n: Noise
    ) -> tuple[Tensor, Tensor]:
        m = count_accepted(p, q_start, q, drafts, num_drafts, n.accept[:, : drafts.shape[1]])
        one_hot = torch.nn.functional.one_hot(drafts, VOCAB).to(q.dtype)
        return m, append_token(drafts, m, draw_after(p, q_start, one_hot, num_drafts, m, n.last))

    w = world(Request(), draft)
    assert sigma(decode_pairs(w, noise, recomputed)[0], w.pairs) > 10
    assert sigma(decode_pairs(w, noise, half_one_hot)[0], w.pairs) > 10


def test_one_hot_q_loses_acceptance_and_nothing_else(noise: tuple[Noise, Noise]) -> None:
    """Check that a one-hot q in both places is right for any draft that used other noise: the draft is then a given
    token. It only loses acceptance."""

    def one_hot(
        p: Tensor, q_start: Tensor, q: Tensor, drafts: Tensor, num_drafts: Tensor, nodes: Tensor, n: Noise
    ) -> tuple[Tensor, Tensor]:
        point = torch.nn.functional.one_hot(drafts, VOCAB).to(q.dtype)
        return by_rejection(p, q_start, point, drafts, num_drafts, nodes, n)

    w = world(Request(), "unrelated")
    counts, accepted = decode_pairs(w, noise, one_hot)
    assert sigma(counts, w.pairs) < LIMIT
    assert accepted[1, 1] < 0.6 * decode_pairs(w, noise)[1][1, 1]


@given(st.lists(st.floats(2.0**-100, 1.0, width=32), min_size=1, max_size=50))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_equal_distributions_always_accept(probs: list[float]) -> None:
    """Check that equal distributions always accept, also for the largest uniform, whatever rounding does to u * q."""
    p = torch.tensor(probs, dtype=torch.float32)[:, None]
    b = len(probs)
    zeros, ones = torch.zeros((b, 1), dtype=torch.int64), torch.ones(b, dtype=torch.int64)
    p_rows = p.repeat_interleave(2, dim=0)
    uniforms = torch.full((b, 1), 1 - 2.0**-24)
    accepted = count_accepted(p_rows, torch.arange(0, 2 * b + 1, 2), p[:, :, None], zeros, ones, uniforms)
    assert accepted.tolist() == [1] * b


def test_a_token_that_the_target_excludes_is_never_accepted() -> None:
    """Check that a token which the target excludes is never accepted, even if q has underflowed to 0 as well, so that u
    * q == p."""
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    zero, one = torch.zeros((1, 1), dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for q in (0.0, 1e-30, 1.0):
        drawn_from = torch.tensor([[[q, 1 - q]]])
        accepted = count_accepted(p, torch.tensor([0, 2]), drawn_from, zero, one, torch.full((1, 1), 2.0**-24))
        assert accepted.tolist() == [0]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    """Check that greedy rows emit the argmax, whatever the drafts, the noise and the sampled rows of the batch are."""
    g = torch.Generator().manual_seed(12)
    b, k = 600, 3
    greedy = torch.arange(b) % 3 == 0
    draft_logits, target_logits = torch.randn((b, k, VOCAB), generator=g), torch.randn((b, k + 1, VOCAB), generator=g)
    target_logits[:, :k] += 4 * draft_logits
    point = greedy_as_point_mass(draft_logits.flatten(0, 1), greedy[:, None].repeat_interleave(k, 0))
    drafts, q = (t.unflatten(0, (b, k)) for t in draw_draft(point, -torch.rand(point.shape, generator=g).log()))
    p = greedy_as_point_mass(target_logits.flatten(0, 1), greedy[:, None].repeat_interleave(k + 1, 0)).softmax(dim=-1)
    accepted, tokens = verify_rejection(
        p,
        torch.arange(0, b * (k + 1) + 1, k + 1),
        q,
        drafts,
        torch.arange(b) % (k + 1),
        torch.rand((b, k), generator=g).clamp(2**-24, 1 - 2**-24),
        torch.randn((b, VOCAB), generator=g),
    )
    argmax = target_logits.argmax(dim=-1)
    emitted = torch.arange(k + 1) <= accepted[:, None]
    assert (tokens == argmax)[emitted & greedy[:, None]].all()
    assert not (tokens == argmax)[emitted & ~greedy[:, None]].all()
    agree = (drafts == argmax[:, :k]) & (torch.arange(k) < (torch.arange(b) % (k + 1))[:, None])
    expected = agree.long().cumprod(dim=1).sum(dim=1)
    assert torch.equal(accepted[greedy], expected[greedy])
    assert set(accepted[greedy].tolist()) == {0, 1, 2, 3}


def test_an_empty_residual_falls_back_to_p() -> None:
    """Check that an empty residual falls back to p: with p <= q everywhere, as rounding can cause, the token comes from
    p."""
    p = torch.tensor([[0.25, 0.0, 0.5]])
    q = torch.tensor([[[0.25, 0.25, 0.5]]])
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for noise, token in (([0.0, 9.0, 0.0], 2), ([1.0, 9.0, 0.0], 0)):
        assert draw_after(p, torch.tensor([0, 1]), q, one, zero, torch.tensor([noise])).tolist() == [token]


def test_rows_without_drafts_draw_from_p() -> None:
    p = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    accepted, tokens = verify_rejection(
        p,
        torch.arange(3),
        torch.zeros((2, 0, 2)),
        torch.zeros((2, 0), dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros((2, 0)),
        torch.tensor([[0.0, 1.0], [0.0, -1.0]]),
    )
    assert accepted.tolist() == [0, 0]
    assert tokens.tolist() == [[0], [1]]


def test_columns_past_a_sequence_stay_on_its_last_row() -> None:
    assert row_index(torch.tensor([0, 3, 4, 6]), 3).tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 5]]


@pytest.mark.parametrize("name", REQUESTS)
def test_every_context_is_processed_with_its_own_drafts(name: str) -> None:
    """Check the table behind the enumeration, row by row against loops; the coarse cut keeps no less than the exact
    one."""
    raw, request = raw_logits(0), REQUESTS[name]
    probs, coarse = process(raw, request).softmax(dim=-1), process(raw, request, coarse=True) != -torch.inf
    for node in range(0, NODES, 7):
        exact = distribution(raw[node].double().numpy(), request, PROMPT, [*OUTPUT, *PATHS[node]])
        np.testing.assert_allclose(probs[node].double().numpy(), exact, rtol=1e-5, atol=1e-7)
        assert (coarse[node] | (probs[node] == 0)).all()
