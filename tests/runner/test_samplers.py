"""The Rust core's sampling of fp32 rows against the torch reference: the same cuts, tokens and verdicts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.core import RequestSampling
from specrs.runner.cuda.samplers import CoreSampler, TorchSampler, VerifyEntries
from specrs.runner.cuda.sampling_state import SamplingState
from specrs.verify.params import SamplingRows, Steps
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


def make(params: list[dict[str, Any]]) -> tuple[SamplingRows, Steps, Tensor]:
    """Parameters, steps and seeds of one row of state for each of `params`."""
    rows, steps = SamplingRows.allocate(len(params)), Steps()
    for i, p in enumerate(params):
        steps = steps | rows.write(i, RequestSampling(**p))
    return rows, steps, torch.arange(len(params)) * 0x9E3779B97F4A7C1 - 5


def both(rows: SamplingRows, seeds: Tensor, vocab_size: int) -> tuple[CoreSampler, TorchSampler]:
    return CoreSampler(rows, seeds, vocab_size), TorchSampler(rows, seeds, vocab_size)


@st.composite
def logit_rows(draw: Any) -> Tensor:
    """`[1, V]` with ties, zeros of both signs, neighbouring and huge values, and -inf."""
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
    rows, steps, seeds = make([params])
    core, reference = both(rows, seeds, logits.shape[1])
    row = torch.zeros(1, dtype=torch.int64)
    kept = core.filter(logits, row, steps)
    # A sum within rounding of the target may be cut on either side.
    allowed = []
    for scale in (1 - 1e-6, 1.0, 1 + 1e-6):
        nearby, _, _ = make([params | {"top_p": min(params["top_p"] * scale, 1.0)}])
        allowed.append(TorchSampler(nearby, seeds, logits.shape[1]).filter(logits, row, steps))
    assert any(torch.equal(kept, other) for other in allowed)
    if torch.equal(kept, allowed[1]):
        positions = torch.tensor([data.draw(st.integers(0, 2**40))])
        entries = VerifyEntries(row, row, torch.tensor([0, 1]), positions, row)
        tokens = [s.verify(logits, entries, row[:, None][:, :0], steps, None)[1] for s in (core, reference)]
        # Without q: logits and noise are added element by element, and no sum has an order.
        assert torch.equal(*tokens)


@pytest.mark.parametrize("vocab_size", [211, 2048])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_drafting_and_verification_of_a_mixed_batch(vocab_size: int, rule: str) -> None:
    """Entries of every kind, K_r from 0 to 3, padding rows beyond K_r; 60 iterations.

    Sums of probabilities are in another order here and there, so verdicts could differ at ties within rounding. This
    sample has none: logits that are off by far more than a rounding give the reference the same verdicts.
    """
    g, nudge = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    rows, steps, seeds = make(MIXED)
    core, reference = both(rows, seeds, vocab_size)
    planned = torch.tensor([3, 3, 3, 3, 2, 1, 0])
    q_start = torch.cat((torch.zeros(1, dtype=torch.int64), (planned + 1).cumsum(0)))
    entry = torch.arange(7).repeat_interleave(planned + 1)
    accepted_in_all = 0
    for iteration in range(60):
        of = torch.randperm(7, generator=g)
        n = torch.randint(1, 2**33, (7,), generator=g)
        q = [torch.full((7, 3, vocab_size), math.nan) for _ in range(2)]
        drafts = torch.zeros((7, 3), dtype=torch.int64)
        base = torch.randn((7, 4, vocab_size), generator=g) * 3
        for i in range(3):
            count = int((planned > i).sum())
            drawn = []
            for sampler, probs in zip((core, reference), q, strict=True):
                own = None if rule == "coupled" else probs
                top, tokens = sampler.draft(base[:count, i], of[:count], n[:count] + i, steps, own, i)
                assert torch.equal(top, base[:count, i].amax(dim=-1))
                drawn.append(tokens)
            if rule == "rejection":
                # The reference drafts from a coarse cut: only its draws that both keep can be compared.
                same = (q[0][:count, i] > 0).eq(q[1][:count, i] > 0).all(dim=-1)
                assert torch.equal(drawn[0][same], drawn[1][same])
                off = base[:count, i] * (1 + 4e-6 * torch.randn((count, vocab_size), generator=nudge))
                nudged_drafts = reference.draft(off, of[:count], n[:count] + i, steps, torch.empty_like(q[1]), i)[1]
                assert torch.equal(nudged_drafts[same], drawn[1][same])
                torch.testing.assert_close(q[0][:count, i][same], q[1][:count, i][same], rtol=1e-5, atol=1e-7)
            drafts[:count, i] = drawn[0]
        logits = torch.cat([base[b, : k + 1] for b, k in enumerate(planned.tolist())])
        logits += torch.randn(logits.shape, generator=g)
        num_drafts = torch.minimum(planned, torch.randint(0, 4, (7,), generator=g))
        entries = VerifyEntries(of, entry, q_start, n, num_drafts)
        args = (logits, entries, drafts, steps, None if rule == "coupled" else q[0])
        mine, theirs = core.verify(*args), reference.verify(*args)
        assert torch.equal(mine[0], theirs[0]), iteration
        emitted = torch.arange(4) <= mine[0][:, None]
        assert torch.equal(mine[1][emitted], theirs[1][emitted]), iteration
        assert torch.equal(mine[2], theirs[2])
        nudged = reference.verify(logits * (1 + 4e-6 * torch.randn(logits.shape, generator=nudge)), *args[1:])
        assert torch.equal(nudged[0], theirs[0]), iteration
        assert torch.equal(nudged[1][emitted], theirs[1][emitted]), iteration
        accepted_in_all += int(mine[0].sum())
    assert 60 < accepted_in_all < 60 * int(planned.sum())


def test_nobody_is_disturbed_by_rows_without_a_distribution() -> None:
    rows, steps, seeds = make([{"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1}] * 3)
    core, _ = both(rows, seeds, 64)
    logits = torch.randn((6, 64), generator=torch.Generator().manual_seed(3))
    q = logits.softmax(-1).view(3, 2, 64)[:, :1].contiguous()
    of, q_start = torch.arange(3), torch.tensor([0, 2, 4, 6])
    entries = VerifyEntries(of, of.repeat_interleave(2), q_start, of + 9, torch.ones(3, dtype=torch.int64))
    args = (entries, torch.ones((3, 1), dtype=torch.int64))
    before = core.verify(logits, *args, steps, q)
    for bad in (math.nan, math.inf, -math.inf):
        broken, broken_q = logits.clone(), q.clone()
        broken[2:4], broken_q[1] = bad, math.nan
        broken[2, 3] = math.nan if bad == math.inf else bad
        accepted, tokens, top = core.verify(broken, *args, steps, broken_q)
        assert not top[2].isfinite()
        assert int(accepted[1]) in (0, 1)
        assert ((tokens >= 0) & (tokens < 64)).all()
        assert torch.equal(accepted[[0, 2]], before[0][[0, 2]])
        assert torch.equal(tokens[[0, 2]], before[1][[0, 2]])


def test_fp32_on_a_cpu_goes_to_the_core() -> None:
    for dtype, expected in ((torch.float32, CoreSampler), (torch.float64, TorchSampler)):
        assert type(SamplingState(2, 16, dtype, torch.device("cpu")).sampler) is expected
