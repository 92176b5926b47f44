"""Products of each expert's weight with the rows that use the expert, in one launch. Sorts no rows and adds none up.

Weights are dense or quantized. As in `skinny_linear`, they are on the tensor core's M side, and rows, padded to 16, on
its N side. A program has one tile of features of one expert and up to 64 of the expert's rows. So for up to 64 rows,
the weights of each chosen expert are read once, and those of others not at all. The grid is large enough for any choice
of experts; programs past the last tile exit immediately. The order of a row's sums does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from specrs.kernels.activation import clamped_swiglu as clamped_swiglu_reference
from specrs.kernels.coding import Coding
from specrs.kernels.cuda._codes import DENSE, add_step, check_codes, coding_constants, coding_of, scale_of
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.activation import activation, clamped_swiglu
from specrs.kernels.cuda.configs import LinearConfig, LinearShape, linear_config
from specrs.kernels.cuda.linear_product import MAX_ROWS, block_m
from specrs.kernels.cuda.variants import BLACKWELL, DTYPES, SIZES, Variant
from torch import Tensor


@triton.jit
def grouped_linear_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    bias,
    pairs,
    starts,
    out,
    x_stride,
    alpha,
    limit,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ZEROS: tl.constexpr,
    MINIMA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    K_STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = K % BLOCK_K == 0
    tile = tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(starts + e, mask=e < EXPERTS, other=0)
    end = tl.load(starts + e + 1, mask=e < EXPERTS, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, 0)
    # The first expert with a tile after this one; none where there is no such tile.
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    if expert < EXPERTS:
        mine = e == expert
        first = tl.sum(tl.where(mine, begin + (tile - (after - tiles)) * BLOCK_M, 0), 0)
        last = tl.sum(tl.where(mine, end, 0), 0)
        token = first + tl.arange(0, BLOCK_M)
        there = token < last
        pair = tl.load(pairs + token, mask=there, other=0)
        x_rows = x + (pair // EACH).to(tl.int64) * x_stride
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        column = tl.arange(0, BLOCK_K)
        # Features past the end repeat the last one and are not stored: no mask on weights.
        rows_n = expert * ((2 if GATED else 1) * N) + tl.minimum(n, N - 1)
        w_rows = weight + rows_n.to(tl.int64) * K
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for k in range(0, K_STEPS):
            if CODE != DENSE:
                acc, up = add_step(
                    acc, up, weight, scales, x_rows, rows_n, N, k, there, K, BLOCK_K, CODE, GROUP, UNIT, OUTPUTS, ZEROS,
                    MINIMA, GATED,
                )  # fmt: skip
            else:
                at = k * BLOCK_K + column
                second = w_rows + N * K
                if EVEN:
                    w = tl.load(w_rows[:, None] + at[None, :])
                    v = tl.load(x_rows[None, :] + at[:, None], mask=there[None, :], other=0)
                else:
                    w = tl.load(w_rows[:, None] + at[None, :], mask=(at < K)[None, :], other=0)
                    v = tl.load(x_rows[None, :] + at[:, None], mask=(at < K)[:, None] & there[None, :], other=0)
                acc = tl.dot(w, v, acc, input_precision="ieee")
                if GATED:
                    if EVEN:
                        w = tl.load(second[:, None] + at[None, :])
                    else:
                        w = tl.load(second[:, None] + at[None, :], mask=(at < K)[None, :], other=0)
                    up = tl.dot(w, v, up, input_precision="ieee")
        if CODE != DENSE and GROUP >= K:
            acc *= scale_of(tl.load(scales + rows_n // OUTPUTS), ZEROS)[:, None]
            if GATED:
                up *= scale_of(tl.load(scales + (N + rows_n) // OUTPUTS), ZEROS)[:, None]
        if bias is not None:
            acc += tl.load(bias + rows_n).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(bias + rows_n + N).to(tl.float32)[:, None]
        if GATED:
            acc = clamped_swiglu(acc, up, alpha, limit) if limit is not None else activation(acc, GELU) * up
        place = out + pair.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & there[None, :])


def most_tiles(experts: int, pairs: int, width: int) -> int:
    """Return the maximum number of tiles for `pairs` pairs, with up to `width` pairs of one expert per tile.

    An expert of n > 0 pairs has at most 1 + (n - 1) / width tiles, so there are most if as many experts as possible
    have pairs.
    """
    some = min(experts, pairs)
    return some + (pairs - some) // width


def launch(
    x: Tensor,
    weights: Sequence[Tensor],
    pairs: Sequence[Tensor],
    out: Tensor,
    shape: tuple[Sequence[int], Sequence[float]],
    config: LinearConfig,
    dependent: bool,
    *,
    compile_only: bool = False,
) -> None:
    """Launch the kernel, or only compile it. `grouped_linear` checks the arguments, which are its own; `shape` holds
    its flags and clamp."""
    (each, gated, gelu, rows, *coding), clamp = shape
    weight, scales, bias = _parts(weights, coding)
    alpha, limit = clamp or (None, None)
    experts, n, width = weight.shape[0], out.shape[1], block_m(min(rows, MAX_ROWS))
    grid = (triton.cdiv(n, config.block_n), most_tiles(experts, out.shape[0], width))
    call = partial(grouped_linear_kernel.warmup, grid=grid) if compile_only else grouped_linear_kernel[grid]
    call(
        x,
        weight,
        scales,
        bias,
        *pairs,
        out,
        x.stride(0),
        alpha,
        limit,
        EXPERTS=experts,
        EACH=each,
        N=n,
        K=x.shape[1],
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BLOCK_M=width,
        GATED=bool(gated),
        GELU=bool(gelu),
        **coding_constants(coding_of(coding) if coding else None, x.shape[1]),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options(dependent),
    )


@torch.library.custom_op("specrs::grouped_linear", mutates_args=("out",))
def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    pairs: Sequence[Tensor],
    out: Tensor,
    flags: list[int],
    clamp: list[float],
    config: list[int],
    dependent: bool,
) -> None:
    """Write `f(W_e x + b_e)` for each pair p of expert e into row p of `out`, where x is row `p // each` of x.

    Args:
        x: `[M, K]`, contiguous rows of any stride; M * each is at least the number of pairs.
        weights: W `[E, N, K]` contiguous, of x's dtype; with `gated` `[E, 2 N, K]`, for each expert the gates above the
            values. If experts have biases, also b `[E, N]` or `[E, 2 N]`. Of a quantized W, its words `[E, N, K * bits
            / 16]` int16, then the scales of a `QuantizedWeight` that has the outputs of all experts, one after the
            other.
        pairs: pairs `[P]` sorted by expert, and the start of each expert's pairs `[E + 1]`, int32, from
            `experts.sort_pairs`.
        out: `[P, N]` contiguous, of x's dtype. Sums are fp32 and rounded once. Rows of pairs without an expert are
            unchanged.
        flags: `each`, `gated`, `gelu` and the maximum number of pairs of one expert, which sets the width of tiles, up
            to 64. With `gated`, `f(y) = silu(y[:N]) * y[N:]`, or with `gelu` GELU instead of SiLU; otherwise f(y) = y.
            For a quantized W then the fields of its coding, see `_codes.coding_as_list`.
        clamp: with `gated`, alpha and limit of `kernels.activation.clamped_swiglu` as f; or empty.
        config: the fields of a LinearConfig in order.
        dependent: launch dependently (see `_dependent_launch`).
    """
    _check(x, weights, pairs, out, flags)
    launch(x, weights, pairs, out, (flags, clamp), LinearConfig(*config), dependent)


@grouped_linear.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    pairs: Sequence[Tensor],
    out: Tensor,
    flags: list[int],
    clamp: list[float],
    config: list[int],
    dependent: bool,
) -> None:
    _check(x, weights, pairs, out, flags)


def _parts(weights: Sequence[Tensor], coding: Sequence[int]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return W, scales and biases from the argument `weights` of `grouped_linear`; scales and biases may be None.
    `coding` is empty if W is not quantized."""
    (weight, *more), count = weights, 1 if coding else 0
    return weight, more[0] if count else None, more[count] if len(more) > count else None


def _check(x: Tensor, weights: Sequence[Tensor], pairs: Sequence[Tensor], out: Tensor, flags: Sequence[int]) -> None:
    (each, gated, _, rows, *fields), (order, starts) = flags, pairs
    weight, scales, bias = _parts(weights, fields)
    assert x.shape[0] * each >= out.shape[0]
    if fields:
        coding = coding_of(fields)
        assert weight.shape[1] % coding.outputs == 0, "a scale of several experts"
        check_codes(weight.flatten(0, 1), scales, coding, x.shape[1])
        assert weight.shape[:2] == (starts.shape[0] - 1, out.shape[1] * (1 + gated))
        assert x.dtype == out.dtype
    else:
        assert weight.shape == (starts.shape[0] - 1, out.shape[1] * (1 + gated), x.shape[1])
        assert x.dtype == weight.dtype == out.dtype
    assert order.shape == out.shape[:1]
    assert rows >= 1
    assert order.dtype == starts.dtype == torch.int32
    assert x.stride(1) == 1
    assert bias is None or bias.shape == weight.shape[:2]
    assert all(tensor.is_contiguous() for tensor in (*weights, order, starts, out))


def grouped_linear_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    pairs: Sequence[Tensor],
    out: Tensor,
    flags: Sequence[int],
    clamp: Sequence[float] = (),
) -> None:
    """Do what `grouped_linear` does with a dense W, in plain torch in float64, rounded once."""
    (each, gated, gelu, _), (order, starts) = flags, pairs
    for expert, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        mine = order[begin:end].long()
        y = x[mine // each].double() @ weights[0][expert].double().t()
        for bias in weights[1:]:
            y += bias[expert].double()
        if clamp:
            y = clamped_swiglu_reference(y, *clamp)
        elif gated:
            gate, up = y.chunk(2, dim=1)
            f = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
            y = f * up
        out[mine] = y.to(out.dtype)


def _variants() -> tuple[Variant, ...]:
    variants, fp8, int4 = [], Coding("fp8", 128, outputs=128), Coding("int4", 128)
    for size in (*SIZES, BLACKWELL):
        for kind, n, k, gated, coding in (
            ("gate_up", 768, 2048, True, None),
            ("down", 2048, 768, False, None),
            ("gate_up_fp8", 768, 2048, True, fp8),
            ("down_fp8", 2048, 768, False, fp8),
            ("gate_up_int4", 768, 2048, True, int4),
            ("down_int8", 2048, 768, False, Coding("int8", 768)),
            ("gate_up_oss", 2880, 2880, True, None),
            ("down_oss", 2880, 2880, False, None),
            ("gate_up_mxfp4_oss", 2880, 2880, True, Coding("mxfp4", 32)),
            ("down_mxfp4_oss", 2880, 2880, False, Coding("mxfp4", 32)),
            ("gate_up_q4_k", 768, 2048, True, Coding("int4", 32, minima="blocks")),
        ):
            oss = kind.endswith("oss")
            experts, each = (32, 4) if oss else (128, 8)
            for dtype, rows in (("bf16", 6), ("bf16", 64), ("fp16", 6)):
                wide = kind in ("gate_up_fp8", "gate_up_mxfp4_oss") and rows == 64
                only = (oss or coding is not None) and (dtype, rows) != ("bf16", 6)
                if (dtype == "fp16" and not gated) or (only and not wide):
                    continue
                small_groups = coding is not None and coding.group == 32
                if size is BLACKWELL and not small_groups:
                    continue
                width = block_m(rows)
                shape = LinearShape(n, k, DTYPES[dtype], gated=gated, coding=coding, experts=(experts, each))
                config = linear_config(shape, width, size.limits)
                types = dict.fromkeys(("x", "weight", "out"), f"*{dtype}") | {"pairs": "*i32", "starts": "*i32"}
                types |= {"x_stride": "i32"}
                if coding is not None:
                    of_scales = "*u8" if coding.kind == "mxfp4" else "*i32" if coding.minima else "*fp32"
                    types |= {"weight": "*i16", "scales": of_scales}
                types |= {"bias": "*bf16"} if oss else {}
                types |= {"alpha": "fp32", "limit": "fp32"} if oss and gated else {}
                constants = {
                    **{name: None for name in ("scales", "bias", "alpha", "limit") if name not in types},
                    "EXPERTS": experts,
                    "EACH": each if gated else 1,
                    "N": n,
                    "K": k,
                    "BLOCK_E": experts,
                    "BLOCK_N": config.block_n,
                    "BLOCK_K": config.block_k,
                    "BLOCK_M": width,
                    "GATED": gated,
                    "GELU": False,
                    **coding_constants(coding, k),
                    "DEPENDENT": False,
                }
                variants.append(
                    Variant(
                        f"grouped_linear_{kind}_{dtype}_rows{rows}_{size.name}",
                        grouped_linear_kernel,
                        types,
                        constants,
                        config.num_warps,
                        config.num_stages,
                        ("x_stride",),
                        (90,) if small_groups and size is SIZES[0] else size.capabilities,
                    )
                )
    return tuple(variants)


VARIANTS = _variants()
