"""Thresholds on the device: they keep the same tokens as the torch reference, with the same log sum of exponentials, in
any batch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.kernels.cuda import sampling_scratch
from specrs.kernels.cuda.sampling_cut import sampling_cut, sampling_cut_reference
from specrs.kernels.cuda.sampling_structs import Cut as CutTensors
from specrs.kernels.cuda.sampling_structs import Filters
from specrs.verify.params import SamplingRows, Steps
from sweep import sweep
from torch import Tensor

from kernels.cuda.sampling_cases import POISON, parameters, poisoned_scratch, wide

TOLERANCE = 3e-6
"""Relative tolerance of a sum of weights: the documented one at these sizes, which covers the reference's fp32
softmax."""


@dataclass(frozen=True)
class Cut:
    """Results of `sampling_cut`."""

    cut: Tensor
    lse: Tensor
    top: Tensor
    ids: Tensor

    def kept(self, x: Tensor) -> Tensor:
        return x >= self.cut[:, None]


def run(logits: Tensor, row_of: Tensor, params: SamplingRows, steps: Steps, *, coarse: bool) -> Cut:
    n = len(logits)
    out = Cut(
        torch.full((n,), torch.nan),
        torch.full((n,), torch.nan, dtype=torch.float64),
        torch.full((n,), torch.nan),
        torch.full((n,), -5),
    )
    scratch = poisoned_scratch(n, logits.shape[1])
    sampling_cut(
        wide(logits),
        row_of,
        params.values,
        CutTensors(out.cut, out.lse, out.top),
        scratch,
        coarse=coarse,
        filters=Filters(steps.top_k, steps.top_p, steps.min_p),
    )
    out.ids.copy_(scratch.ids)
    return out


ALL = Steps(top_k=True, top_p=True, min_p=True)
"""All filters, as in a captured graph, which has to serve any row."""


def near_the_target(x: Tensor, kept: Tensor, top_p: float, eligible: Tensor) -> bool:
    """Return whether top_p's threshold depends on rounding: a cumulative sum lies within the tolerance of the
    target."""
    weights = (x.double() - x.double().max()).exp().where(eligible, 0.0)
    with_last = weights.where(kept, 0.0).sum()
    without = weights.where(kept & (x > x[kept].min()), 0.0).sum()
    target = top_p * weights.sum()
    return bool(((torch.stack((with_last, without)) - target).abs() < TOLERANCE * weights.sum()).any())


def check(logits: Tensor, settings_of_rows: list[dict[str, float]], *, coarse: bool, all_filters: bool = False) -> None:
    params, steps = parameters(settings_of_rows)
    # The last flat row is padding.
    row_of = torch.arange(len(logits)).clamp(max=len(settings_of_rows))
    got = run(logits, row_of, params, ALL if all_filters else steps, coarse=coarse)
    own = params.select(row_of)
    flags = {"top_k": steps.top_k, "top_p": steps.top_p, "min_p": steps.min_p}
    expected, lse = sampling_cut_reference(logits, own, coarse=coarse, **flags)
    loose, _ = sampling_cut_reference(logits, own, coarse=coarse, **(flags | {"top_p": False}))
    x = logits / own.temperature
    assert got.ids.tolist() == logits.argmax(dim=1).tolist()
    assert got.top.tolist() == logits.amax(dim=1).tolist()
    for i in range(len(logits)):
        if own.greedy[i]:
            assert got.cut[i] == -torch.inf
            assert got.lse[i] == 0
            continue
        mine, theirs = got.kept(x)[i] & (x[i] > -torch.inf), expected[i] > -torch.inf
        top_p = float(own.top_p[i])
        if not torch.equal(mine, theirs):
            assert top_p < 1
            assert near_the_target(x[i], theirs, top_p, loose[i] > -torch.inf), f"row {i}: {settings_of_rows[i]}"
        else:
            assert got.lse[i] == pytest.approx(lse[i].item(), abs=1e-6, rel=1e-7)


ROW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 0, 1, 3, 20, 300, 10**6]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-6, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    }
)


@sweep(24)
@given(
    rows=st.lists(ROW, min_size=1, max_size=3),
    v=st.sampled_from([1, 2, 16, 257, 1030]),
    shape=st.sampled_from(["normal", "levels", "tiny", "huge", "flat", "around a value"]),
    forbidden=st.booleans(),
    coarse=st.booleans(),
    all_filters=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_keeps_what_the_reference_keeps(
    rows: list[dict[str, float]], v: int, shape: str, forbidden: bool, coarse: bool, all_filters: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(rows) + 1, v, generator=generator)
    logits = {
        "normal": noise * 3,
        "levels": (noise * 32).round() / 32,  # ties, and gaps exactly at edges of the grid
        "tiny": noise * 1e-20,  # one cell of step 0, most of all keys
        "huge": noise * 1e6,
        "flat": torch.zeros_like(noise),
        "around a value": 20 + noise * 1e-4,
    }[shape]
    if forbidden and v > 2:
        logits = logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.7, -torch.inf)
        logits[:, v // 2] = 1.0
    check(logits, rows, coarse=coarse, all_filters=all_filters)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("flags", [{}, {"top_p": 0.9}, {"top_k": 30}, {"min_p": 0.02}, {"top_k": 5, "top_p": 0.98}])
def test_each_filter_alone_over_several_tiles(flags: dict[str, float], coarse: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    check(torch.randn(2, 2500, generator=generator) * 3, [{"temperature": 0.7, **flags}], coarse=coarse)


def test_a_gap_at_the_edge_of_the_coarse_cut_is_outside() -> None:
    logits = 2 - torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]) / 32
    params, steps = parameters([{"top_k": 3}])
    got = run(logits, torch.tensor([0]), params, steps, coarse=True)
    assert got.kept(logits)[0].tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("coarse", [False, True])
def test_a_row_without_filters_does_not_search(coarse: bool) -> None:
    """Check that a row without filters does not search. Its neighbour has every filter, so every step is launched."""
    logits = torch.randn(2, 2500, generator=torch.Generator().manual_seed(6)) * 3
    params, steps = parameters([{"top_p": 0.9, "top_k": 50}, {"temperature": 0.7}])
    scratch = poisoned_scratch(2, 2500)
    out = CutTensors(torch.empty(2), torch.empty(2, dtype=torch.float64), torch.empty(2))
    filters = Filters(steps.top_k, steps.top_p, steps.min_p)
    sampling_cut(logits, torch.arange(2), params.values, out, scratch, coarse=coarse, filters=filters)
    if coarse:
        assert scratch.cells[0, 0].count_nonzero() > 10
        assert scratch.cells[0, 1].nonzero().tolist() == [[0]], "all weights are in one cell"
    else:
        shifts = (scratch.steps[:, 1:8, 1] != POISON).sum(dim=1).tolist()
        assert shifts == [6, 0], "three steps of each filter start from what the one before found"


def test_neighbours_and_tiles_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 2500, generator=generator) * 3
    params, steps = parameters([{"top_p": 0.9, "top_k": 50}, {"temperature": 0.5, "min_p": 0.1}, {}])
    together = run(logits, torch.tensor([0, 1, 2, 3]), params, steps, coarse=False)
    monkeypatch.setattr(sampling_scratch, "_PROGRAMS", 1)
    for i in range(3):
        alone = run(logits[i : i + 1], torch.tensor([i]), params, steps, coarse=False)
        assert alone.cut[0] == together.cut[i]
        assert alone.lse[0] == together.lse[i]


def test_faulty_rows_keep_nothing_and_harm_nobody() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 40, generator=generator)
    params, steps = parameters([{"temperature": 0.7, "top_p": 0.8, "top_k": 9, "min_p": 0.01}])
    row_of = torch.tensor([0, 0, 0, 0, 0, 1])
    clean = run(logits, row_of, params, steps, coarse=False)
    logits[0, 3] = torch.nan
    logits[1, 4] = torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[5, 1] = torch.nan
    for coarse in (False, True):
        got = run(logits, row_of, params, steps, coarse=coarse)
        assert not got.top[[0, 1, 2, 3, 5]].isfinite().any()
        assert got.top[[0, 3, 5]].isnan().all()
        assert got.cut.tolist()[:4] == [torch.inf] * 4
        assert ((got.ids >= 0) & (got.ids < 40)).all()
        if not coarse:
            assert got.cut[4] == clean.cut[4]
            assert got.lse[4] == clean.lse[4]


def test_coarse_keeps_what_exact_keeps_and_little_more() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, 900, generator=generator) * 3
    params, steps = parameters([{"top_p": 0.85}])
    row_of = torch.zeros(8, dtype=torch.int64)
    exact = run(logits, row_of, params, steps, coarse=False).cut
    coarse = run(logits, row_of, params, steps, coarse=True).cut
    assert ((coarse <= exact) & (coarse >= exact - 2 / 32)).all()
    assert (coarse < exact).any()


def test_tokens_at_the_edge_of_a_cell() -> None:
    """Check tokens at the edge of a cell: their gaps round across an edge of the grid, but the range of keys searched
    must hold a cell's own tokens alone."""
    edge = torch.tensor(-0.46875)  # 47 cells below 1
    above = edge + 2.0**-25 * torch.tensor([4.0, 1.0])
    assert (1 - above).tolist() == [1.46875 - 2.0**-23, 1.46875]
    logits = torch.cat((above, torch.tensor([-0.6, 1.0]), edge[None], torch.tensor([-0.5]))).repeat(2, 1)
    params, steps = parameters([{"top_k": k} for k in (3, 4)])
    got = run(logits, torch.tensor([0, 1]), params, steps, coarse=False)
    assert got.cut.tolist() == [above[1].item(), edge.item()]
