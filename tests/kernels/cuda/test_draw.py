"""Draws on the device: the torch reference's tokens, given the same noise."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.core import PURPOSE_DRAFT, PURPOSE_GUMBEL
from specrs.kernels.cuda.draw import draw, draw_reference
from specrs.kernels.cuda.philox import fill_noise
from specrs.kernels.cuda.sampling_structs import RowParams
from specrs.verify.params import SamplingRows
from specrs.verify.processing import greedy_as_point_mass
from sweep import sweep
from torch import Tensor

from kernels.cuda.sampling_cases import CLEAR, gaps, noise_at, parameters, poisoned_scratch, wide


def run(
    logits: Tensor, row_of: Tensor, params: SamplingRows, cut: Tensor, seeds: Tensor, positions: Tensor, purpose: int
) -> Tensor:
    ids = torch.full((len(logits),), -5)
    scratch = poisoned_scratch(len(logits), logits.shape[1])
    draw(wide(logits), row_of, RowParams(params.values, seeds), cut, positions, purpose, ids, scratch)
    return ids


@sweep(15)
@given(
    v=st.sampled_from([1, 2, 16, 257, 1030, 2500]),
    temperatures=st.lists(st.sampled_from([0.0, 0.4, 1.0, 1.6]), min_size=1, max_size=3),
    kept=st.sampled_from([1.0, 0.3, 0.0]),
    purpose=st.sampled_from([PURPOSE_DRAFT, PURPOSE_GUMBEL]),
    seed=st.integers(0, 2**31),
)
def test_the_references_tokens(v: int, temperatures: list[float], kept: float, purpose: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = len(temperatures)
    params, _ = parameters([{"temperature": t} for t in temperatures])
    # State rows in another order than flat rows, and two flat rows of each.
    row_of = torch.randperm(rows, generator=generator).repeat(2)
    seeds = torch.randint(-(2**62), 2**62, (rows + 1,), generator=generator)
    positions = torch.randint(0, 2**33, (2 * rows,), generator=generator)
    logits = (torch.randn(2 * rows, v, generator=generator) * 16).round() / 8
    own = params.select(row_of)
    x = logits / own.temperature
    cut = x.amax(dim=1) if kept == 0 else x.quantile(1 - kept, dim=1)
    cut = torch.where(own.greedy[:, 0], -torch.inf, cut)
    expected = greedy_as_point_mass(x.masked_fill(x < cut[:, None], -torch.inf), own.greedy)
    noise = torch.empty(2 * rows, v)
    fill_noise(seeds[row_of], positions, purpose, noise, True)
    ids = run(logits, row_of, params, cut, seeds, positions, purpose)
    assert ids.tolist() == draw_reference(expected, noise).tolist()


def test_faulty_rows_draw_some_token_and_harm_nobody() -> None:
    params, _ = parameters([{"temperature": 0.7}])
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 40, generator=generator)
    row_of, positions = torch.tensor([0, 0, 0, 0, 1]), torch.arange(5)
    cut = torch.tensor([torch.inf, torch.inf, torch.inf, -torch.inf, -torch.inf])
    seeds = torch.tensor([9, 0])
    clean = run(logits, row_of, params, cut, seeds, positions, PURPOSE_DRAFT)
    logits[0], logits[1, 3], logits[2], logits[4, 7] = torch.nan, torch.inf, -torch.inf, torch.nan
    ids = run(logits, row_of, params, cut, seeds, positions, PURPOSE_DRAFT)
    assert ((ids >= 0) & (ids < 40)).all()
    assert ids[3] == clean[3]


def test_a_row_of_the_core_draws_the_same() -> None:
    """Check that a row with the Rust core's noise draws what the CPU runner draws. The gaps of these draws are far
    wider than 2 ulp."""
    params, _ = parameters([{}])
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(30, 64, generator=generator)
    row_of, positions, seeds = torch.zeros(30, dtype=torch.int64), torch.arange(30), torch.tensor([123, 0])
    ids = run(logits, row_of, params, torch.full((30,), -torch.inf), seeds, positions, PURPOSE_GUMBEL)
    noise = noise_at(seeds[row_of], positions, PURPOSE_GUMBEL, 64)
    assert gaps(logits + noise).min() > CLEAR
    assert ids.tolist() == draw_reference(logits, noise).tolist()
