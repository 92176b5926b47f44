"""The Rust core's sampling of float32 rows against the reference: the same cuts, tokens and verdicts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samplers import CoreSampler, ReferenceSampler
from torch import Tensor

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)
MIXED: list[dict[str, float]] = [
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_p": 1e-6},
    {"temperature": 1.0, "top_k": 10**6, "min_p": 0.3},
]


def seeds_of(params: list[Any]) -> Tensor:
    return torch.arange(len(params)) * 0x9E3779B97F4A7C1 - 5


@st.composite
def logit_rows(draw: Any) -> Tensor:
    """Draw logits `[1, V]` with ties, zeros of both signs, neighbouring and huge values, and -inf."""
    special = [0.0, -0.0, 1.0, 1.0000001192092896, -1.0, 1e-40, 1e30, -math.inf]
    values = draw(st.lists(st.one_of(st.sampled_from(special), st.floats(-20, 20, width=32)), min_size=1, max_size=24))
    values = values * draw(st.integers(1, 3))
    if all(math.isinf(v) for v in values):
        values[0] = 0.0
    return torch.tensor([values])


@given(data=st.data())
@SETTINGS
def test_the_cut_and_the_draw_of_any_row(data: st.DataObject) -> None:
    logits = data.draw(logit_rows())
    params: dict[str, Any] = {
        "temperature": data.draw(st.sampled_from([0.3, 1.0, 1.7])),
        "top_k": data.draw(st.integers(0, logits.shape[1] + 3)),
        "top_p": data.draw(st.one_of(st.just(1.0), st.just(1e-30), st.floats(0.001, 0.999))),
        "min_p": data.draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
    }
    core = CoreSampler([params], seeds_of([params]), logits.shape[1])
    kept = core.filter(logits)
    # A sum within rounding of the target may be cut on either side.
    allowed = []
    for scale in (1 - 1e-6, 1.0, 1 + 1e-6):
        nearby = params | {"top_p": min(params["top_p"] * scale, 1.0)}
        allowed.append(ReferenceSampler([nearby], seeds_of([params]), logits.shape[1]).filter(logits))
    assert any(torch.equal(kept, other) for other in allowed)
    if torch.equal(kept, allowed[1]):
        n, none = torch.tensor([data.draw(st.integers(0, 2**40))]), torch.zeros(1, dtype=torch.int64)
        reference = ReferenceSampler([params], seeds_of([params]), logits.shape[1])
        given = logits, torch.tensor([0, 1]), n, none[:, None][:, :0], none, None
        # Without q: logits and noise are added element by element, and no sum has an order.
        assert torch.equal(core.verify(*given)[1], reference.verify(*given)[1])


@pytest.mark.parametrize("vocab_size", [211, 2048])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_drafting_and_verification_of_a_mixed_batch(vocab_size: int, rule: str) -> None:
    """Check 20 iterations of requests of every kind, with K_r from 0 to 3.

    The implementations sum probabilities in different orders, so decisions could differ at ties within rounding. This
    sample has no such ties: logits changed by far more than rounding give the reference the same decisions.
    """
    g, nudge = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    samplers = [make(MIXED, seeds_of(MIXED), vocab_size) for make in (CoreSampler, ReferenceSampler)]
    core, reference = samplers

    def nudged(logits: Tensor) -> Tensor:
        return logits * (1 + 4e-6 * torch.randn(logits.shape, generator=nudge))

    q_start, accepted_in_all = torch.arange(0, 29, 4), 0
    for iteration in range(20):
        n, base = torch.randint(1, 2**33, (7,), generator=g), torch.randn((7, 4, vocab_size), generator=g) * 3
        drafts, q = torch.zeros((7, 3), dtype=torch.int64), torch.zeros((7, 3, vocab_size))
        for i in range(3):
            drawn = [sampler.draft(base[:, i], n + i, rule) for sampler in samplers]
            assert torch.equal(drawn[0][0], drawn[1][0])
            assert torch.equal(drawn[0][0], reference.draft(nudged(base[:, i]), n + i, rule)[0])
            is_random = torch.tensor([each["temperature"] > 0 for each in MIXED])
            torch.testing.assert_close(drawn[0][1][is_random], drawn[1][1][is_random], rtol=1e-5, atol=1e-7)
            drafts[:, i], q[:, i] = drawn[0]
        logits = (base + torch.randn(base.shape, generator=g)).flatten(0, 1)
        num_drafts = torch.randint(0, 4, (7,), generator=g)
        given = q_start, n, drafts, num_drafts, None if rule == "coupled" else q
        accepted, tokens = core.verify(logits, *given)
        emitted = torch.arange(4) <= accepted[:, None]
        for own in (logits, nudged(logits)):
            expected, theirs = reference.verify(own, *given)
            assert torch.equal(accepted, expected), iteration
            assert torch.equal(tokens[emitted], theirs[emitted]), iteration
        accepted_in_all += int(accepted.sum())
    assert 20 < accepted_in_all < 20 * 10


def test_nobody_is_disturbed_by_rows_without_a_distribution() -> None:
    params = [{"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1}] * 3
    core = CoreSampler(params, seeds_of(params), 64)
    logits = torch.randn((6, 64), generator=torch.Generator().manual_seed(3))
    q = logits.softmax(-1).view(3, 2, 64)[:, :1].contiguous()
    ones = torch.ones(3, dtype=torch.int64)
    given = torch.tensor([0, 2, 4, 6]), torch.arange(3) + 9, ones[:, None], ones
    before = core.verify(logits, *given, q)
    for bad in (math.nan, math.inf, -math.inf):
        broken, broken_q = logits.clone(), q.clone()
        broken[2:4], broken_q[1] = bad, math.nan
        broken[2, 3] = math.nan if bad == math.inf else bad
        accepted, tokens = core.verify(broken, *given, broken_q)
        assert int(accepted[1]) in (0, 1)
        assert ((tokens >= 0) & (tokens < 64)).all()
        assert torch.equal(accepted[[0, 2]], before[0][[0, 2]])
        assert torch.equal(tokens[[0, 2]], before[1][[0, 2]])
