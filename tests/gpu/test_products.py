"""Products of 65 to 2,048 rows by each provider, in a captured graph, against float64."""

import pytest
import torch
from kernels.cuda.tolerance import assert_near
from specrs.backends.cuda.cublaslt import CublasLt
from specrs.backends.cuda.many_rows import ManyRowsTimer
from specrs.backends.cuda.providers import BUCKETS, CUBLAS, CUBLASLT, OWN
from specrs.kernels.cuda.configs import LinearShape, linear_config
from specrs.kernels.cuda.device import limits_of
from specrs.kernels.cuda.linear_product import DRAFT_ROWS, Product, scratch_sizes
from specrs.kernels.cuda.skinny_linear import skinny_linear

N, K = 1536, 2048


@pytest.fixture
def operands(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x `[2048, K]` and weight `[N, K]`, bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(rows, K, generator=generator, device=device) for rows in (BUCKETS[-1], N))
    return x.bfloat16(), weight.bfloat16()


def test_bits_of_own_products_do_not_depend_on_rows(
    device: torch.device, operands: tuple[torch.Tensor, torch.Tensor]
) -> None:
    (x, weight), limits = operands, limits_of(device)
    config = linear_config(LinearShape(N, K, x.dtype), DRAFT_ROWS, limits)
    partials, counters = scratch_sizes(config, DRAFT_ROWS, n=N)
    scratch = torch.zeros(partials, device=device), torch.zeros(counters, dtype=torch.int32, device=device)
    outs = []
    for rows in (65, 96, 128):
        out = torch.empty(rows, N, device=device, dtype=x.dtype)
        skinny_linear(x[:rows], Product(weight), out, scratch, config.as_list(), limits.capability >= 90)
        outs.append(out)
    assert torch.equal(outs[0], outs[2][:65])
    assert torch.equal(outs[1], outs[2][:96])
    assert_near(outs[2], x[:128].double() @ weight.double().t(), x[:128] @ weight.t())


@pytest.mark.parametrize("rows", [65, 96, 384, 2048])
def test_cublaslt_is_captured(device: torch.device, operands: tuple[torch.Tensor, torch.Tensor], rows: int) -> None:
    """Check that an algorithm for a bucket serves fewer rows, and that a graph computes with what its operands hold at
    a replay. Two products share the workspace."""
    pytest.importorskip("nvmath", reason="pip install 'specrs[cublaslt]'")
    x, weight = operands
    lt, bucket = CublasLt(device), min(size for size in BUCKETS if size >= rows)
    choice = lt.autotune(x[:bucket], weight, torch.empty(bucket, N, device=device, dtype=x.dtype))
    given, out = x[:rows].clone(), torch.empty(2, rows, N, device=device, dtype=x.dtype)
    weights = weight, weight.flip(0).contiguous()

    def launch() -> None:
        for one, held in zip(out, weights, strict=True):
            assert lt.multiply(given, held, one, choice)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch()
    given.neg_()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for one, held in zip(out, weights, strict=True):
        assert_near(one, given.double() @ held.double().t(), given @ held.t())
    again = out.clone()
    graph.replay()
    assert torch.equal(out, again)


@pytest.mark.parametrize("rows", [96, 256])
def test_every_provider_is_timed(device: torch.device, rows: int) -> None:
    lt = CublasLt.load(device)
    seconds = ManyRowsTimer(limits_of(device), device, lt)(LinearShape(N, K, torch.bfloat16), rows)
    expected = {CUBLAS, *([] if lt is None else [CUBLASLT]), *([OWN] if rows <= DRAFT_ROWS else [])}
    assert {choice.provider for choice in seconds} == expected
    assert all(0 < time < 1 for time in seconds.values())
