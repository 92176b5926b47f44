"""Rejection on the device: the torch reference's counts and tokens, given the same noise, and its distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.core import PURPOSE_ACCEPT, PURPOSE_DRAFT, PURPOSE_GUMBEL
from specrs.kernels.cuda.draw import draw
from specrs.kernels.cuda.rejection import rejection_reference
from specrs.kernels.cuda.rules import verify_rejection
from specrs.kernels.cuda.sampling_cut import sampling_cut, sampling_cut_reference
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.sampling_structs import Accepted, Cut, Distribution, Drafted, Filters, RowParams
from specrs.verify.params import SamplingRows, Steps
from torch import Tensor

from kernels.cuda.sampling_cases import (
    CLEAR,
    POISON,
    gaps,
    noise_at,
    parameters,
    poisoned_scratch,
    ragged_sequences,
    wide,
)


@dataclass(frozen=True)
class Batch:
    """Sequences of one verification, with the logits of target and draft."""

    logits: Tensor  # [N, V]
    draft_logits: Tensor  # [K, B, V]
    q_start: Tensor
    num_drafts: Tensor
    row: Tensor  # [B]
    n: Tensor  # [B]
    seeds: Tensor
    params: SamplingRows
    steps: Steps

    @property
    def sequence(self) -> Tensor:
        return torch.arange(len(self.n)).repeat_interleave(self.q_start.diff())

    @property
    def scratch(self) -> SamplingScratch:
        return poisoned_scratch(len(self.logits), self.logits.shape[1], len(self.n))

    def cut(self, logits: Tensor, row_of: Tensor, scratch: SamplingScratch, *, coarse: bool) -> tuple[Tensor, Tensor]:
        """Return the kernel's `(cut, lse)`: threshold and log sum of exponentials of each row."""
        n = len(logits)
        cut, lse = torch.full((n,), torch.nan), torch.full((n,), torch.nan, dtype=torch.float64)
        filters = Filters(self.steps.top_k, self.steps.top_p, self.steps.min_p)
        out = Cut(cut, lse, torch.empty(n))
        sampling_cut(logits, row_of, self.params.values, out, scratch, coarse=coarse, filters=filters)
        return cut, lse

    def drafts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(drafts [B, K], cut [K, B], lse [K, B])` as the draft passes leave them."""
        k, batch, v = self.draft_logits.shape
        drawn, cuts = torch.full((k, batch), POISON), torch.full((k, batch + 2), torch.nan)
        lses = torch.full((k, batch + 2), torch.nan, dtype=torch.float64)
        for i in range(k):
            cuts[i, :batch], lses[i, :batch] = self.cut(self.draft_logits[i], self.row, self.scratch, coarse=True)
            draw(
                self.draft_logits[i],
                self.row,
                RowParams(self.params.values, self.seeds),
                cuts[i, :batch],
                self.n + i,
                PURPOSE_DRAFT,
                drawn[i],
                poisoned_scratch(batch, v),
            )
        return drawn.T.contiguous(), cuts[:, :batch], lses[:, :batch]

    def verify(self, drafts: Tensor, cut: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        batch, k = drafts.shape
        accepted, tokens = torch.full((batch,), POISON), torch.full((batch, k + 1), POISON)
        ignored = torch.arange(k) >= self.num_drafts[:, None]
        draft_logits = self.draft_logits.masked_fill(ignored.T[:, :, None], torch.nan)
        scratch = self.scratch
        verify_rejection(
            Distribution(wide(self.logits), *self.cut(self.logits, self.row[self.sequence], scratch, coarse=False)),
            Distribution(draft_logits, cut, lse),
            Drafted(self.q_start, drafts.masked_fill(ignored, POISON), self.num_drafts),
            self.row,
            self.n,
            RowParams(self.params.values, self.seeds),
            Accepted(accepted, tokens),
            scratch,
        )
        return accepted, tokens

    def probabilities(self, logits: Tensor, row_of: Tensor, *, coarse: bool) -> Tensor:
        """Return the torch reference's probabilities, float64; greedy rows are point masses."""
        own = self.params.select(row_of)
        flags = {"top_k": self.steps.top_k, "top_p": self.steps.top_p, "min_p": self.steps.min_p}
        x, _ = sampling_cut_reference(logits, own, coarse=coarse, **flags)
        point = torch.nn.functional.one_hot(logits.argmax(dim=1), logits.shape[1]).double()
        return torch.where(own.greedy, point, x.double().softmax(dim=1))


def make(
    num_drafts: list[int], rows: list[dict[str, float]], v: int, distance: float, seed: int, spare: int = 0
) -> Batch:
    """Make a batch: sequence b uses state row b % R; the draft's logits are the target's plus noise with standard
    deviation `distance`."""
    generator = torch.Generator().manual_seed(seed)
    q_start, drafted, k = ragged_sequences(num_drafts, spare)
    batch = len(num_drafts)
    logits = torch.randn(int(q_start[-1]), v, generator=generator) * 2.5
    index = torch.minimum(q_start[:-1] + torch.arange(k)[:, None], q_start[1:] - 1)
    params, steps = parameters(rows)
    # Each pass at a level of its own, which its lse must take back.
    shift = 4.0 * torch.arange(k)[:, None, None]
    return Batch(
        logits=logits,
        draft_logits=logits[index] + distance * torch.randn(k, batch, v, generator=generator) + shift,
        q_start=q_start,
        num_drafts=drafted,
        row=torch.arange(batch) % len(rows),
        n=torch.randint(2, 2**33, (batch,), generator=generator),
        seeds=torch.randint(-(2**62), 2**62, (len(rows) + 1,), generator=generator),
        params=params,
        steps=steps,
    )


ROW = st.sampled_from(
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 12},
        {"temperature": 0.9, "min_p": 0.05, "top_k": 30, "top_p": 0.95},
    ]
)


@settings(max_examples=8, deadline=None)
@given(
    num_drafts=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    rows=st.lists(ROW, min_size=1, max_size=2),
    v=st.sampled_from([2, 16, 257, 1030]),
    distance=st.sampled_from([0.0, 0.7, 3.0]),
    spare=st.integers(0, 1),
    seed=st.integers(0, 2**31),
)
def test_counts_and_tokens_of_the_reference(
    num_drafts: list[int], rows: list[dict[str, float]], v: int, distance: float, spare: int, seed: int
) -> None:
    check(make(num_drafts, rows, v, distance, seed, spare))


def test_a_draft_falls_against_its_own_pass() -> None:
    accepted = check(make([2] * 10, [{"temperature": 1.0, "top_p": 0.95}], 16, 1.5, 3))
    assert (accepted == 1).sum() >= 2


def check(batch: Batch) -> Tensor:
    """Check the kernel against the reference. Return the numbers of accepted drafts."""
    drafts, cut, lse = batch.drafts()
    accepted, tokens = batch.verify(drafts, cut, lse)
    k, v, num_drafts = drafts.shape[1], batch.logits.shape[1], batch.num_drafts.tolist()

    p = batch.probabilities(batch.logits, batch.row[batch.sequence], coarse=False)
    q = torch.zeros(len(num_drafts), k, v, dtype=torch.float64)
    for i in range(k):
        q[:, i] = batch.probabilities(batch.draft_logits[i], batch.row, coarse=True)
    position = batch.n[:, None] + torch.arange(k + 1)
    seeds = batch.seeds[batch.row, None]
    u = noise_at(seeds, position[:, :k], PURPOSE_ACCEPT, 1, gumbel=False)[:, :, 0].double()
    noise = noise_at(seeds, position, PURPOSE_GUMBEL, v).double()
    expected, wanted = rejection_reference(p, q, batch.q_start, drafts.clamp(min=0), batch.num_drafts, u, noise)
    for b, m in enumerate(accepted.tolist()):
        drafted = num_drafts[b]
        own = p[batch.q_start[b] : batch.q_start[b + 1]]
        margins = [abs(u[b, i] * q[b, i, d] - own[i, d]) for i, d in enumerate(drafts[b, :drafted].tolist())]
        if m != expected[b]:
            # Equal distributions always accept, whatever the rounding; others may be a rounding apart.
            assert min(margins) < 1e-6
            continue
        assert tokens[b, :m].tolist() == drafts[b, :m].tolist()
        if tokens[b, m] != wanted[b, m]:
            left = (own[m] - q[b, m]).clamp(min=0) if m < drafted else own[m]
            score = left.log() + noise[b, m]
            # A probability is off by some 1e-7, which moves the score of a small remainder the more.
            assert left[tokens[b, m]] > 0
            assert score.max() - score[tokens[b, m]] < 1e-5 + 1e-6 / left[tokens[b, m]]
    return accepted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_is_the_target_always_stands(temperature: float) -> None:
    batch = make([3, 2, 0, 1], [{"temperature": temperature}], 64, 0.0, 5)
    accepted, _ = batch.verify(*batch.drafts())
    assert accepted.tolist() == [3, 2, 0, 1]


def test_padding_and_faulty_rows_harm_nobody() -> None:
    batch = make([2, 2, 2], [{"temperature": 0.8, "top_p": 0.9}], 40, 0.5, 6)
    drafts, cut, lse = batch.drafts()
    clean_accepted, clean_tokens = batch.verify(drafts, cut, lse)
    # Sequence 0 becomes padding that owns no row, after the last one; sequence 2's logits are faulty.
    batch.row[0] = 1
    batch.num_drafts[0] = 0
    batch.logits[6:, 3] = torch.nan
    batch.logits[7] = torch.inf
    order = torch.tensor([1, 2, 0])
    moved = Batch(
        logits=batch.logits[3:],
        draft_logits=batch.draft_logits[:, order],
        q_start=torch.tensor([0, 3, 6, 6]),
        num_drafts=batch.num_drafts[order],
        row=batch.row[order],
        n=batch.n[order],
        seeds=batch.seeds,
        params=batch.params,
        steps=batch.steps,
    )
    accepted, tokens = moved.verify(drafts[order], cut[:, order].contiguous(), lse[:, order].contiguous())
    m = int(clean_accepted[1])
    assert accepted[0] == m
    assert tokens[0, : m + 1].tolist() == clean_tokens[1, : m + 1].tolist()
    assert accepted[2] == 0
    assert ((tokens[:, 0] >= 0) & (tokens[:, 0] < 40)).all()
    assert ((accepted >= 0) & (accepted <= 2)).all()


@pytest.mark.parametrize("waste", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_reached_decide_nothing(waste: float) -> None:
    params = [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.0}]
    batch = make([3, 3, 3, 2], params, 40, 1.5, 6)
    drafts, cut, lse = batch.drafts()
    accepted, tokens = batch.verify(drafts, cut, lse)
    wasted = torch.cat(
        [torch.arange(k + 1) > m for k, m in zip(batch.num_drafts.tolist(), accepted.tolist(), strict=True)]
    )
    assert wasted.any()
    batch.logits[wasted] = waste
    again, told = batch.verify(drafts, cut, lse)
    assert again.equal(accepted)
    emitted = torch.arange(4) <= accepted[:, None]
    assert told[emitted].equal(tokens[emitted])


def test_an_empty_residual_draws_from_the_target() -> None:
    """Check that an empty residual draws from the target: p <= q everywhere, because q's lse is made too small, so
    every draft may be rejected."""
    batch = make([1] * 8, [{}], 16, 0.0, 8)
    drafts, cut, lse = batch.drafts()
    accepted, tokens = batch.verify(drafts, cut, lse - 3.0)
    assert (accepted == 0).any()
    noise = noise_at(batch.seeds[batch.row], batch.n, PURPOSE_GUMBEL, 16)
    scores = (batch.logits[batch.q_start[:-1]] + noise)[accepted == 0]
    assert gaps(scores).min() > CLEAR
    assert tokens[accepted == 0, 0].tolist() == scores.argmax(dim=1).tolist()


def test_without_drafts_a_row_is_drawn() -> None:
    batch = make([0, 0, 0], [{"temperature": 0.0}, {"temperature": 0.6, "top_k": 9}], 300, 0.0, 9)
    none = torch.empty(0, 3), torch.empty(0, 3, dtype=torch.float64)
    accepted, tokens = batch.verify(torch.empty(3, 0, dtype=torch.int64), *none)
    noise = noise_at(batch.seeds[batch.row], batch.n, PURPOSE_GUMBEL, 300)
    p = batch.probabilities(batch.logits, batch.row, coarse=False)
    scores = p.log() + noise
    assert gaps(scores).min() > CLEAR
    assert accepted.tolist() == [0, 0, 0]
    assert tokens[:, 0].tolist() == scores.argmax(dim=1).tolist()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_emitted_tokens_are_the_targets(sign: float) -> None:
    """Check the distribution of emitted tokens by chi-square: 20,000 iterations of the reference with the kernel's
    noise, of which the kernel repeats the first 80. The draft is near the target, or its negative."""
    count, sample, v = 20_000, 80, 16
    generator = torch.Generator().manual_seed(12)
    target = torch.randn(v, generator=generator) * 1.5
    draft = sign * target + 0.7 * torch.randn(v, generator=generator)
    n = torch.arange(5, 5 + 3 * count, 3)
    seeds = torch.tensor([2**40 + 3, 0])
    row = torch.zeros(count, dtype=torch.int64)
    drafts = (draft + noise_at(seeds[:1], n, PURPOSE_DRAFT, v)).argmax(dim=1, keepdim=True)
    p, q = target.double().softmax(0), draft.double().softmax(0)
    u = noise_at(seeds[:1, None], n[:, None], PURPOSE_ACCEPT, 1, gumbel=False)[:, :, 0].double()
    noise = noise_at(seeds[:1, None], n[:, None] + torch.arange(2), PURPOSE_GUMBEL, v).double()
    accepted, tokens = rejection_reference(
        p.repeat(2 * count, 1),
        q.repeat(count, 1, 1),
        torch.arange(0, 2 * count + 1, 2),
        drafts,
        torch.ones_like(n),
        u,
        noise,
    )

    # Nothing that the kernel is asked depends on a rounding.
    residual = (p - q).clamp(min=0).log()
    drafted = drafts[:sample, 0]
    assert (u[:sample, 0] * q[drafted] - p[drafted]).abs().min() > CLEAR * q[drafted].min()
    scores = torch.where(accepted[:sample, None] == 0, residual, p.log()) + torch.where(
        accepted[:sample, None] == 0, noise[:sample, 0], noise[:sample, 1]
    )
    assert gaps(scores).min() > CLEAR
    params, steps = parameters([{}])
    batch = Batch(
        logits=target.repeat(2 * sample, 1),
        draft_logits=draft.repeat(1, sample, 1),
        q_start=torch.arange(0, 2 * sample + 1, 2),
        num_drafts=torch.ones(sample, dtype=torch.int64),
        row=row[:sample],
        n=n[:sample],
        seeds=seeds,
        params=params,
        steps=steps,
    )
    own_accepted, own_tokens = torch.full((sample,), POISON), torch.full((sample, 2), POISON)
    verify_rejection(
        Distribution(
            batch.logits,
            torch.full((2 * sample,), -torch.inf),
            target.double().logsumexp(0).expand(2 * sample).contiguous(),
        ),
        Distribution(
            batch.draft_logits,
            torch.full((1, sample), -torch.inf),
            draft.double().logsumexp(0).expand(1, sample).contiguous(),
        ),
        Drafted(batch.q_start, drafts[:sample], batch.num_drafts),
        batch.row,
        batch.n,
        RowParams(params.values, seeds),
        Accepted(own_accepted, own_tokens),
        batch.scratch,
    )
    assert own_accepted.tolist() == accepted[:sample].tolist()
    assert own_tokens[:, 0].tolist() == tokens[:sample, 0].tolist()
    both = own_accepted == 1
    assert own_tokens[both, 1].tolist() == tokens[:sample][both, 1].tolist()

    rate = torch.minimum(p, q).sum().item()
    assert abs(int(accepted.sum()) - count * rate) < 4.5 * math.sqrt(count * rate * (1 - rate))
    for emitted in (tokens[:, 0], tokens[accepted == 1, 1]):
        expected = len(emitted) * p
        chi_square = ((torch.bincount(emitted, minlength=v) - expected) ** 2 / expected).sum().item()
        assert (chi_square - (v - 1)) / math.sqrt(2 * (v - 1)) < 4.5
