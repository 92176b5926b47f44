"""The LM head with argmax, interpreted: ties, NaN, infinities, with and without stored logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.cuda.linear_product import scratch_sizes
from specrs.kernels.cuda.lm_head import ArgmaxScratch, combine_tiles_kernel, linear_argmax, linear_argmax_reference
from torch import Tensor

from .launch import directly
from .tolerance import assert_near


def run(x: Tensor, weight: Tensor, *, programs: int = 3, keep: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, largest logits and all logits, which are NaN unless `keep`. Checks that counters are zero afterwards;
    scratch begins as NaN."""
    rows, n = x.shape[0], weight.shape[0]
    steps = -(-n // 16) * -(-x.shape[1] // 16)
    config = LinearConfig(16, 16, min(programs, steps), 4, 1)
    sizes = scratch_sizes(config, rows, n=n)
    counters = torch.zeros(sizes[1], dtype=torch.int32)
    ids, top = torch.full((rows,), -7), torch.full((rows,), torch.nan)
    logits = torch.full((rows, n + 2), torch.nan)[:, :n]
    tiles = rows * -(-n // 16)
    scratch = ArgmaxScratch(
        torch.full((tiles,), torch.nan),
        torch.full((tiles,), -3, dtype=torch.int32),
        torch.full((sizes[0],), torch.nan),
        counters,
    )
    out = (ids, top, logits) if keep else (ids, top)
    linear_argmax(x, weight, out, scratch, config.as_list(), False)
    assert not counters.any()
    return ids, top, logits


@settings(max_examples=12, deadline=None)
@given(
    rows=st.sampled_from([1, 3, 17, 90]),
    vocab=st.integers(1, 100),
    hidden=st.integers(1, 40),
    programs=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_argmax_of_its_own_logits(rows: int, vocab: int, hidden: int, programs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype)
    ids, top, logits = run(x, weight, programs=programs)
    exact = torch.empty(rows, vocab, dtype=torch.float64)
    linear_argmax_reference(x, weight, torch.empty_like(ids), torch.empty_like(top), exact)
    assert_near(logits, exact, x.float() @ weight.float().t())
    assert torch.equal(ids, logits.argmax(1))
    assert torch.equal(top, logits.amax(1))
    without = run(x, weight, programs=programs, keep=False)
    assert torch.equal(without[0], ids)
    assert without[2].isnan().all()


@pytest.mark.parametrize("tokens", [(5, 6), (3, 40), (17, 31, 90)])
def test_ties_go_to_the_lowest_id(tokens: tuple[int, ...]) -> None:
    weight = torch.zeros(100, 16)
    weight[list(tokens)] = 1
    ids, top, _ = run(torch.ones(2, 16), weight, keep=False)
    assert ids.tolist() == [min(tokens)] * 2
    assert top.tolist() == [16] * 2


def test_ties_between_rounds_of_the_combination() -> None:
    """Check ties between rounds of the combination: 2,374 tiles take three rounds of 1,024 lanes."""
    count = 2374
    top, ids = torch.zeros(3, count), torch.arange(count, dtype=torch.int32).repeat(3, 1)
    top[0, [700, 1400, 2100]] = 1
    top[1, [1030, 8, 2373]] = 1
    top[2, 2048] = torch.nan
    out_ids, out_top = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    directly(
        lambda *on: combine_tiles_kernel[(3,)](*on, TILES=count, BLOCK=1024, DEPENDENT=False),
        top,
        ids,
        out_ids,
        out_top,
    )
    assert out_ids.tolist() == [700, 8, 2048]
    assert out_top[:2].tolist() == [1, 1]
    assert out_top[2].isnan()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of inf - inf
def test_what_is_not_finite_surfaces_in_its_row() -> None:
    x, weight = torch.ones(4, 8), torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    clean = run(x, weight)
    x[1, 3] = torch.nan
    x[2] = torch.inf * weight[30].sign()
    ids, top, logits = run(x, weight)
    assert top[1].isnan()
    assert 0 <= ids[1] < 50
    assert not top[2].isfinite()
    assert not logits[2].isfinite().all()
    assert torch.equal(ids[[0, 3]], clean[0][[0, 3]])
    assert torch.equal(top[[0, 3]], clean[1][[0, 3]])


def test_minus_infinity_everywhere_is_token_0() -> None:
    ids, top, _ = run(torch.full((1, 1), -torch.inf), torch.ones(40, 1))
    assert ids.tolist() == [0]
    assert top.tolist() == [-torch.inf]
