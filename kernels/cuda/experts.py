"""Chooses the experts of each row, sorts the pairs of row and expert, and adds up the experts' outputs. Multiplies
nothing.

A pair is a row and one of its experts: pair `i * k + j` is the j-th of k experts of row i. Only the device knows how
many pairs an expert has. So grids and buffers are large enough for any choice, and nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_BLOCK = 1024
SUM_EPS = tl.constexpr(1e-6)
"""Number added to a sum of sigmoids before shares are divided by it, as `specrs.models.experts.SUM_EPS`."""


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """Return `1 / (1 + e^-x)`. No exponential overflows."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1 + e)


@triton.jit
def route_kernel(  # type: ignore[no-untyped-def]
    logits,
    positions,
    ids,
    shares,
    scales,
    bias,
    factor,
    logits_stride,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_EACH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    free = expert < EXPERTS
    x = tl.load(logits + row * logits_stride + expert, mask=free, other=float("-inf"))
    if SIGMOID:
        weight = _sigmoid(x)
        if bias is not None:
            x = weight + tl.load(bias + expert, mask=free, other=0)
    else:
        top = tl.max(x, 0)
        weight = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        weight /= tl.sum(weight, 0)
    # A row with NaN is sent somewhere, too, to different experts: its own output is NaN.
    x = tl.where(x == x, x, float("-inf"))
    place = tl.arange(0, BLOCK_EACH)
    chosen = tl.zeros([BLOCK_EACH], tl.int32)
    kept = tl.zeros([BLOCK_EACH], tl.float32)
    for j in range(EACH):
        best = tl.max(tl.where(free, x, float("-inf")), 0)
        first = tl.min(tl.where(free & (x == best), expert, BLOCK), 0)
        share = tl.sum(tl.where(expert == first, weight, 0.0), 0)
        chosen = tl.where(place == j, first, chosen)
        kept = tl.where(place == j, share, kept)
        free = free & (expert != first)
    if NORMALIZE:
        kept /= tl.sum(kept, 0) + (SUM_EPS if SIGMOID else 0.0)
    kept *= factor
    if scales is not None:
        kept *= tl.load(scales + chosen, mask=place < EACH, other=0).to(tl.float32)
    chosen = tl.where(tl.load(positions + row) >= 0, chosen, -1)
    tl.store(ids + row * EACH + place, chosen, mask=place < EACH)
    tl.store(shares + row * EACH + place, kept, mask=place < EACH)


@triton.jit(do_not_specialize=["count"])
def sort_pairs_kernel(  # type: ignore[no-untyped-def]
    ids, pairs, starts, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Write the pairs of one expert in their order. Each program has one expert; it counts the pairs of the experts
    before."""
    enter(DEPENDENT)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        chosen = tl.load(ids + first + lane, mask=first + lane < count, other=-1)
        lower += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
    end = tl.sum(lower, 0)
    tl.store(starts + expert, end)
    for first in range(0, count, BLOCK):
        chosen = tl.load(ids + first + lane, mask=first + lane < count, other=-1)
        mine = chosen == expert
        nth = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(pairs + end + nth - 1, first + lane, mask=mine)
        end += tl.sum(mine.to(tl.int32), 0)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, end)


@triton.jit
def add_pairs_kernel(  # type: ignore[no-untyped-def]
    x,
    ids,
    shares,
    rows,
    gate,
    shared,
    out,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + lane
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(EACH):
        pair = row * EACH + j
        # What a pair that no expert has made holds may be NaN: it is not loaded.
        there = column < tl.where(tl.load(ids + pair) >= 0, WIDTH, 0)
        part = tl.load(x + pair * WIDTH + column, mask=there, other=0).to(tl.float32)
        if shares is not None:
            part *= tl.load(shares + pair)
        acc += tl.where(there, part, 0.0)
    if shared is not None:
        width = tl.where(tl.load(ids + row * EACH) >= 0, WIDTH, 0)
        if gate is not None:
            # Every program of a row computes the row's gate, in the same order of sums.
            products = tl.zeros([BLOCK], tl.float32)
            for first in range(0, WIDTH, BLOCK):
                h = tl.load(rows + row * WIDTH + first + lane, mask=first + lane < width, other=0).to(tl.float32)
                g = tl.load(gate + first + lane, mask=first + lane < width, other=0).to(tl.float32)
                products += h * g
        part = tl.load(shared + row * WIDTH + column, mask=column < width, other=0).to(tl.float32)
        if gate is not None:
            part *= _sigmoid(tl.sum(products, 0))
        acc += part
    tl.store(out + row * WIDTH + column, acc.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def weigh_inputs_kernel(  # type: ignore[no-untyped-def]
    x,
    ids,
    shares,
    out,
    x_stride,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < tl.where(tl.load(ids + pair) >= 0, WIDTH, 0)
    value = tl.load(x + pair // EACH * x_stride + column, mask=there, other=0).to(tl.float32)
    tl.store(out + pair * WIDTH + column, (value * tl.load(shares + pair)).to(out.dtype.element_ty), mask=there)


@torch.library.custom_op("specrs::route", mutates_args=("ids", "shares"))
def route(
    logits: Tensor,
    positions: Tensor,
    ids: Tensor,
    shares: Tensor,
    flags: list[bool],
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Choose the k experts with the largest logits of each row, the lowest id in a tie (Fedus et al. 2021, eq. 1).

    Args:
        logits: `[N, E]` fp32, contiguous rows of any stride.
        positions: `[N]` int64; a row at -1 has no experts.
        ids: `[N, k]` int32, written: the experts by descending logit, or sum of sigmoid and bias; -1: none.
        shares: `[N, k]` fp32, written: the softmax over all E logits at each expert, or the sigmoid of its logit;
            perhaps divided by their sum; times `factor`.
        flags: [divide `shares` by their sum; take sigmoids in the place of a softmax; launch dependently (see
            `_dependent_launch`)]. The sum of sigmoids is made `SUM_EPS` larger.
        scales: `[E]`, factors of the shares of each expert, which are multiplied last; None: there are none.
        bias: `[E]` fp32, added to sigmoids for the choice, and not to shares; None: the largest logits are chosen. Only
            with sigmoids.
        factor: factor of all shares.
    """
    _check_route(logits, positions, ids, shares, scales)
    _check_bias(logits, flags, bias)
    (normalize, sigmoid, dependent), (rows, experts), each = flags, logits.shape, ids.shape[1]
    route_kernel[(rows,)](
        logits,
        positions,
        ids,
        shares,
        scales,
        bias,
        factor,
        logits.stride(0),
        EXPERTS=experts,
        EACH=each,
        NORMALIZE=normalize,
        SIGMOID=sigmoid,
        BLOCK=triton.next_power_of_2(experts),
        BLOCK_EACH=triton.next_power_of_2(each),
        num_warps=1,
        **options(dependent),
    )


@route.register_fake
def _(
    logits: Tensor,
    positions: Tensor,
    ids: Tensor,
    shares: Tensor,
    flags: list[bool],
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    _check_route(logits, positions, ids, shares, scales)
    _check_bias(logits, flags, bias)


def _check_bias(logits: Tensor, flags: list[bool], bias: Tensor | None) -> None:
    if bias is not None:
        assert flags[1]
        assert bias.shape == logits.shape[1:]
        assert bias.dtype == torch.float32
        assert bias.is_contiguous()


def _check_route(logits: Tensor, positions: Tensor, ids: Tensor, shares: Tensor, scales: Tensor | None) -> None:
    rows, experts = logits.shape
    assert scales is None or (scales.shape == (experts,) and scales.is_contiguous())
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert positions.shape == (rows,)
    assert ids.shape == shares.shape == (rows, ids.shape[1])
    assert 1 <= ids.shape[1] <= experts
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    assert shares.is_contiguous()


@torch.library.custom_op("specrs::sort_pairs", mutates_args=("pairs", "starts"))
def sort_pairs(ids: Tensor, pairs: Tensor, starts: Tensor, dependent: bool) -> None:
    """Write the pairs of each expert one after the other, in their order.

    Args:
        ids: `[N, k]` int32, the expert of each pair; -1: none, and the pair is left out.
        pairs: `[N * k]` int32, written: those of expert e are `starts[e]` to `starts[e + 1]`. Elements after the last
            pair are unchanged.
        starts: `[E + 1]` int32, written.
        dependent: launch dependently (see `_dependent_launch`).
    """
    _check_sort(ids, pairs, starts)
    experts, count = starts.shape[0] - 1, ids.numel()
    block = min(_BLOCK, max(16, triton.next_power_of_2(count)))
    sort_pairs_kernel[(experts,)](ids, pairs, starts, count, EXPERTS=experts, BLOCK=block, **options(dependent))


@sort_pairs.register_fake
def _(ids: Tensor, pairs: Tensor, starts: Tensor, dependent: bool) -> None:
    _check_sort(ids, pairs, starts)


def _check_sort(ids: Tensor, pairs: Tensor, starts: Tensor) -> None:
    assert pairs.shape == (ids.numel(),)
    assert ids.dtype == pairs.dtype == starts.dtype == torch.int32
    assert all(tensor.is_contiguous() for tensor in (ids, pairs, starts))


@torch.library.custom_op("specrs::add_pairs", mutates_args=("out",))
def add_pairs(
    x: Tensor, ids: Tensor, shares: Tensor | None, shared: list[Tensor], out: Tensor, dependent: bool
) -> None:
    """Add up the experts' outputs for each row, weighted by share, in the order of its pairs, then that of a shared
    expert. Writes the sums into `out` `[N, hidden]`.

    Args:
        x: `[N * k, hidden]` contiguous, the output for each pair. Rows of pairs without an expert are not read.
        ids: `[N, k]` int32, from `route`.
        shares: `[N, k]` fp32, from `route`.
        shared: empty without a shared expert; otherwise its input `[N, hidden]`, the weight `[hidden]` of its gate, and
            its output `[N, hidden]`, all contiguous and of x's dtype. The output counts `sigmoid(input . gate)` times.
            A row without experts has no shared expert.
        out: contiguous, of x's dtype. Sums are fp32 and rounded once.
        dependent: launch dependently (see `_dependent_launch`).
    """
    _check_add(x, ids, shares, shared, out)
    (rows, width), each = out.shape, ids.shape[1]
    grid = (rows, triton.cdiv(width, _BLOCK))
    operands = shared if len(shared) > 1 else (None, None, *(shared or (None,)))
    add_pairs_kernel[grid](x, ids, shares, *operands, out, WIDTH=width, EACH=each, BLOCK=_BLOCK, **options(dependent))


@add_pairs.register_fake
def _(x: Tensor, ids: Tensor, shares: Tensor | None, shared: list[Tensor], out: Tensor, dependent: bool) -> None:
    _check_add(x, ids, shares, shared, out)


def _check_add(x: Tensor, ids: Tensor, shares: Tensor | None, shared: list[Tensor], out: Tensor) -> None:
    assert len(shared) in (0, 1, 3)
    if len(shared) == 3:
        assert shared[0].shape == out.shape
        assert shared[1].shape == out.shape[1:]
    if shared:
        assert shared[-1].shape == out.shape
        assert all(tensor.dtype == out.dtype and tensor.is_contiguous() for tensor in shared)
    assert x.shape == (ids.numel(), out.shape[1])
    assert ids.shape == (out.shape[0], ids.shape[1])
    assert shares is None or (shares.shape == ids.shape and shares.is_contiguous())
    assert x.dtype == out.dtype
    assert all(tensor.is_contiguous() for tensor in (x, ids, out))


@torch.library.custom_op("specrs::weigh_inputs", mutates_args=("out",))
def weigh_inputs(x: Tensor, ids: Tensor, shares: Tensor, out: Tensor, dependent: bool) -> None:
    """Write the input of each pair's expert, for experts whose inputs are weighted and not their outputs: row `p // k`
    of x times the share of pair p. Computed in fp32 and rounded once.

    Args:
        x: `[N, hidden]`, rows of any stride.
        ids, shares: of `route`, `[N, k]`. Pairs without an expert are not written.
        out: `[N * k, hidden]` contiguous, of x's dtype, written.
        dependent: launch dependently (see `_dependent_launch`).
    """
    _check_weigh(x, ids, shares, out)
    pairs, width = out.shape
    weigh_inputs_kernel[(pairs, triton.cdiv(width, _BLOCK))](
        x, ids, shares, out, x.stride(0), WIDTH=width, EACH=ids.shape[1], BLOCK=_BLOCK, **options(dependent)
    )


@weigh_inputs.register_fake
def _(x: Tensor, ids: Tensor, shares: Tensor, out: Tensor, dependent: bool) -> None:
    _check_weigh(x, ids, shares, out)


def _check_weigh(x: Tensor, ids: Tensor, shares: Tensor, out: Tensor) -> None:
    assert ids.shape == shares.shape == (x.shape[0], ids.shape[1])
    assert out.shape == (ids.numel(), x.shape[1])
    assert x.dtype == out.dtype
    assert x.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (ids, shares, out))


def route_reference(
    logits: Tensor,
    positions: Tensor,
    ids: Tensor,
    shares: Tensor,
    flags: list[bool],
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Do what `route` does, in plain torch in float64. Rows with NaN differ."""
    (normalize, sigmoid, _), wide = flags, logits.double()
    weights = wide.sigmoid() if sigmoid else wide.softmax(1)
    scores = logits if bias is None else weights + bias
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : ids.shape[1]]
    chosen = weights.gather(1, order)
    total = chosen.sum(1, keepdim=True) + (1e-6 if sigmoid else 0)
    shares.copy_((chosen / total if normalize else chosen) * factor)
    if scales is not None:
        shares.mul_(scales.double()[order])
    ids.copy_(torch.where(positions[:, None] >= 0, order, -1))


def sort_pairs_reference(ids: Tensor, pairs: Tensor, starts: Tensor) -> None:
    """Reference for `sort_pairs`, in plain torch."""
    flat, end = ids.flatten(), 0
    for expert in range(starts.shape[0] - 1):
        mine = (flat == expert).nonzero().flatten()
        starts[expert] = end
        pairs[end : end + len(mine)] = mine
        end += len(mine)
    starts[-1] = end


def add_pairs_reference(x: Tensor, ids: Tensor, shares: Tensor | None, shared: list[Tensor], out: Tensor) -> None:
    """Do what `add_pairs` does, in plain torch in float64, rounded once."""
    parts = x.double().view(*ids.shape, -1)
    if shares is not None:
        parts = parts * shares.double().unsqueeze(2)
    added = torch.where((ids >= 0).unsqueeze(2), parts, 0).sum(1)
    if shared:
        *gated, made = (tensor.double() for tensor in shared)
        if gated:
            made = (gated[0] @ gated[1]).sigmoid()[:, None] * made
        added += torch.where(ids[:, :1] >= 0, made, 0)
    out.copy_(added)


_ROUTES = (
    # experts, experts of a row, whether they have factors, whether shares are sigmoids, whether these have biases
    (128, 8, False, False, False),
    (8, 2, False, False, False),
    (512, 10, False, False, False),
    (128, 8, True, False, False),
    (16, 1, False, True, False),
    (32, 4, False, True, True),
)
_ADDITIONS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    # end of the name, operands besides the experts' outputs, experts of a row
    ("", ("shares",), 8),
    ("_shared", ("shares", "rows", "gate", "shared"), 8),
    ("_unweighted", ("shared",), 1),
)
VARIANTS = (
    *(
        Variant(
            f"route_{each}_of_{experts}{'_scaled' * scaled}{'_sigmoid' * sigmoid}{'_biased' * biased}",
            route_kernel,
            {"logits": "*fp32", "positions": "*i64", "ids": "*i32", "shares": "*fp32", "logits_stride": "i32"}
            | {"factor": "fp32"}
            | ({"scales": "*bf16"} if scaled else {})
            | ({"bias": "*fp32"} if biased else {}),
            ({} if scaled else {"scales": None})
            | ({} if biased else {"bias": None})
            | {
                "EXPERTS": experts,
                "EACH": each,
                "NORMALIZE": biased or not sigmoid,
                "SIGMOID": sigmoid,
                "BLOCK": experts,
                "BLOCK_EACH": triton.next_power_of_2(each),
                "DEPENDENT": False,
            },
            num_warps=1,
        )
        for experts, each, scaled, sigmoid, biased in _ROUTES
    ),
    Variant(
        "sort_pairs",
        sort_pairs_kernel,
        {"ids": "*i32", "pairs": "*i32", "starts": "*i32", "count": "i32"},
        {"EXPERTS": 128, "BLOCK": _BLOCK, "DEPENDENT": False},
    ),
    Variant(
        "weigh_inputs_bf16",
        weigh_inputs_kernel,
        {"x": "*bf16", "ids": "*i32", "shares": "*fp32", "out": "*bf16", "x_stride": "i32"},
        {"WIDTH": 5120, "EACH": 1, "BLOCK": _BLOCK, "DEPENDENT": False},
        aligned=("x_stride",),
    ),
    *(
        Variant(
            f"add_pairs_bf16{name}",
            add_pairs_kernel,
            {"x": "*bf16", "ids": "*i32", "out": "*bf16"}
            | dict.fromkeys(present, "*bf16")
            | ({"shares": "*fp32"} if "shares" in present else {}),
            {"WIDTH": 2048, "EACH": each, "BLOCK": _BLOCK, "DEPENDENT": False}
            | dict.fromkeys({"shares", "rows", "gate", "shared"} - {*present}),
        )
        for name, present, each in _ADDITIONS
    ),
)
