"""Argmax of rows: ties, tiles, faulty rows, padding of the buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.kernels.cuda import sampling_scratch
from specrs.kernels.cuda.argmax import argmax, argmax_reference
from specrs.kernels.cuda.sampling_scratch import SamplingScratch, tile_of
from torch import Tensor

from kernels.cuda.sampling_cases import poisoned_scratch


def run(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids, top = torch.full((len(logits),), -7), torch.full((len(logits),), torch.nan)
    argmax(logits, ids, top, poisoned_scratch(len(logits), logits.shape[1]))
    return ids, top


@settings(max_examples=20, deadline=None)
@given(
    v=st.sampled_from([1, 2, 16, 257, 1024, 1025, 2500]),
    rows=st.integers(1, 3),
    levels=st.sampled_from([1, 3, 50, 10**6]),
    seed=st.integers(0, 2**31),
)
def test_lowest_of_equal_ids(v: int, rows: int, levels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few levels give many ties, within a tile and across tiles; the row stride is wider than a row.
    buffer = torch.full((rows, v + 5), torch.nan)
    buffer[:, :v] = torch.randint(-levels, levels, (rows, v), generator=generator) / 7
    logits = buffer[:, :v]
    ids, top = run(logits)
    expected_ids, expected_top = torch.empty_like(ids), torch.empty_like(top)
    argmax_reference(logits, expected_ids, expected_top)
    assert ids.tolist() == expected_ids.tolist()
    assert top.tolist() == expected_top.tolist()


@pytest.mark.parametrize("at", [0, 1500, 2499])
def test_a_faulty_row_shows_in_its_top_alone(at: int) -> None:
    logits = torch.linspace(-1, 1, 2500).repeat(4, 1)
    logits[0, at] = torch.nan
    logits[1, at] = torch.inf
    logits[2] = -torch.inf
    ids, top = run(logits)
    assert top[0].isnan()
    assert top[1] == torch.inf
    assert ids[1] == at
    assert top[2] == -torch.inf
    assert ids[2] == 0
    assert ids[3] == 2499
    assert top[3] == 1
    assert 0 <= ids[0] < 2500


def test_a_row_of_nothing_but_nan() -> None:
    ids, top = run(torch.full((1, 1030), torch.nan))
    assert top.isnan()
    assert 0 <= ids[0] < 1030


def test_tiles_grow_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tile_of(1, 151_936) == tile_of(6, 151_936) == 1024
    assert tile_of(64, 151_936) == 16_384
    assert tile_of(1536, 151_936) == 16_384, "one row is shared by several programs, however many rows there are"
    assert tile_of(1000, 50) == 1024
    monkeypatch.setattr(sampling_scratch, "_PROGRAMS", 2)
    assert tile_of(1, 5000) == 4096
    logits = torch.zeros(1, 5000)
    for ids in ([3000], [4999], [1024, 4500], [4095, 4096], [100, 1124], [0, 3072]):
        logits.zero_()[0, ids] = 1.0
        assert run(logits)[0].tolist() == ids[:1]


def test_scratch_counts_its_bytes() -> None:
    scratch = SamplingScratch.allocate(2, 3, 5000, torch.device("cpu"))
    assert scratch.ids.shape == (3,)
    assert scratch.tile_sum.shape == (3, 5)
    assert scratch.num_bytes == 3 * (2 * 5 * 8 + 5 * 8 + 3 * 2048 * 8 + 9 * 6 * 8 + 8 + 5000 * 4)
