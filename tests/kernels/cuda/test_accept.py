"""Acceptance by equality, and acceptance at given rates."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from specrs.core import PURPOSE_ACCEPT, PURPOSE_GUMBEL
from specrs.kernels.cuda import rules
from specrs.kernels.cuda.accept import AtRates, accept_prefix, accept_prefix_reference
from specrs.kernels.cuda.sampling_structs import Accepted, Drafted, RowParams
from specrs.verify.coupled import verify_coupled
from specrs.verify.processing import greedy_as_point_mass
from sweep import sweep
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


def check(accepted: Tensor, tokens: Tensor, expected_accepted: Tensor, expected_tokens: Tensor) -> None:
    assert accepted.tolist() == expected_accepted.tolist()
    for b, m in enumerate(accepted.tolist()):
        assert tokens[b, : m + 1].tolist() == expected_tokens[b, : m + 1].tolist()


@sweep(40)
@given(
    num_drafts=st.lists(st.integers(0, 5), min_size=1, max_size=6), spare=st.integers(0, 2), seed=st.integers(0, 999)
)
def test_the_longest_prefix(num_drafts: list[int], spare: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_start, drafted, k = ragged_sequences(num_drafts, spare)
    ids = torch.randint(0, 2, (int(q_start[-1]),), generator=generator)
    drafts = torch.randint(0, 2, (len(num_drafts), k), generator=generator)
    expected = accept_prefix_reference(ids, q_start, drafts, drafted)
    drafts[torch.arange(k) >= drafted[:, None]] = POISON
    buffer = torch.full((len(num_drafts), k + 3), POISON)
    buffer[:, :k] = drafts
    accepted, tokens = torch.full((len(num_drafts),), POISON), torch.full((len(num_drafts), k + 1), POISON)
    rules.verify_greedy(ids, Drafted(q_start, buffer[:, :k], drafted), Accepted(accepted, tokens))
    check(accepted, tokens, *expected)


def test_sequences_that_are_not_asked_for_stay() -> None:
    ids, drafts = torch.tensor([4, 5, 4, 5]), torch.tensor([[4], [4]])
    accepted, tokens = torch.full((2,), POISON), torch.full((2, 2), POISON)
    drafted = Drafted(torch.tensor([0, 2, 4]), drafts, torch.tensor([1, 1]))
    accept_prefix(ids, drafted, Accepted(accepted, tokens, only=torch.tensor([0, 1])))
    assert accepted.tolist() == [POISON, 1]
    assert tokens.tolist() == [[POISON, POISON], [4, 5]]


def test_padded_sequences_own_no_rows() -> None:
    ids = torch.tensor([4, 5])
    accepted, tokens = torch.full((3,), POISON), torch.full((3, 2), POISON)
    drafts = torch.tensor([[4], [POISON], [POISON]])
    drafted = Drafted(torch.tensor([0, 2, 2, 2]), drafts, torch.tensor([1, 0, 0]))
    rules.verify_greedy(ids, drafted, Accepted(accepted, tokens))
    assert accepted.tolist() == [1, 0, 0]
    assert tokens[0].tolist() == [4, 5]
    assert ((tokens >= 0) & (tokens < 6)).all()


def test_acceptance_at_rates() -> None:
    rates = torch.tensor([0.8, 0.6, 0.6, 0.0, 0.0])
    n = torch.arange(0, 2000, 10)
    row, seeds = torch.zeros(200, dtype=torch.int64), torch.tensor([11, 0])
    drafts = torch.full((200, 5), 3)
    accepted, tokens = torch.full((200,), POISON), torch.full((200, 6), POISON)
    drafted = torch.where(n % 40 == 0, 1, 5)
    rules.verify_synthetic(
        torch.full((1200,), 9),
        Drafted(torch.arange(0, 1201, 6), drafts, drafted),
        AtRates(rates, seeds, row, n),
        Accepted(accepted, tokens),
    )
    u = noise_at(seeds[:1], n[:, None] + torch.arange(5), PURPOSE_ACCEPT, 1, gumbel=False)[:, :, 0].double()
    conditional = torch.tensor([0.8, 0.75, 1.0, 0.0, 0.0])
    stands = (u < conditional) & (torch.arange(5) < drafted[:, None])
    assert accepted.tolist() == stands.long().cumprod(dim=1).sum(dim=1).tolist()
    for b, m in enumerate(accepted.tolist()):
        assert tokens[b, : m + 1].tolist() == [3] * m + [9]
    full = accepted[drafted == 5]
    assert abs((full >= 3).float().mean() - 0.6) < 4.5 * (0.24 / len(full)) ** 0.5


@settings(max_examples=6, deadline=None)
@given(
    num_drafts=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    v=st.sampled_from([3, 257]),
    seed=st.integers(0, 999),
)
def test_coupled_is_the_reference(num_drafts: list[int], temperature: float, v: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_start, drafted, k = ragged_sequences(num_drafts, 0)
    batch, total = len(num_drafts), int(q_start[-1])
    params, _ = parameters([{"temperature": temperature}])
    row = torch.zeros(batch, dtype=torch.int64)
    sequence = torch.arange(batch).repeat_interleave(drafted + 1)
    n = torch.randint(2, 1000, (batch,), generator=generator)
    positions = n[sequence] + torch.arange(total) - q_start[sequence]
    seeds = torch.tensor([77, 0])
    logits = torch.randn(total, v, generator=generator) * 4
    own = params.select(row[sequence])
    processed = greedy_as_point_mass(logits / own.temperature, own.greedy)
    noise = noise_at(seeds[row[sequence]], positions, PURPOSE_GUMBEL, v)
    # The kernel's noise may differ in the last bits.
    assume(temperature == 0 or gaps(processed + noise).min() > CLEAR)
    # Drafts that agree with the draws but for the last column.
    index = torch.minimum(q_start[:-1, None] + torch.arange(k), q_start[1:, None] - 1)
    drafts = (processed + noise).argmax(dim=1)[index]
    drafts[:, k - 1 :] = torch.randint(0, v, (batch, min(k, 1)), generator=generator)
    accepted, tokens = torch.full((batch,), POISON), torch.full((batch, k + 1), POISON)
    rules.verify_coupled(
        wide(logits),
        row[sequence],
        RowParams(params.values, seeds),
        torch.full((total,), -torch.inf),
        positions,
        Drafted(q_start, drafts, drafted),
        Accepted(accepted, tokens),
        poisoned_scratch(total, v),
    )
    check(accepted, tokens, *verify_coupled(processed, noise, q_start, drafts, drafted))
