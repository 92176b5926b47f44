"""LoRA adapters of the rows of a pass: `W x + B (A x)` for the rows that have one. Multiplies no W.

Adapters are in slots of equal size. A slot has one A and one B for each fused projection, which may consist of several
parts: q, k and v, or gate and up, or four of a delta net. Every part has its own rows of A and reads only their outputs
in B. `shrink` makes
`A x`, and `expand` makes `B` of it. Both have a program for each slot, tile of outputs and tile of 64 rows. A program
without a row of its slot exits immediately. The order of a row's sums does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.linear_product import MAX_ROWS, block_m
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_BLOCK_K = 128
"""Number of 16-bit inputs per step of `shrink`; of 32-bit inputs half as many."""
_MAX_SPLITS = 16
"""Largest number of programs that share a sum over the inputs, for up to 64 rows. Each has at least 256 inputs."""
_BLOCK_N = 64
_MAX_RANKS = 64
"""Largest number of rows of A in a tile, and of columns of B in a step."""
_SLOT_ROWS, _SLOT_SEQS = 16, 64


@triton.jit(do_not_specialize=["rows", "seqs", "first", "padding"])
def adapter_slots_kernel(  # type: ignore[no-untyped-def]
    positions, q_start, device_rows, of_row, out, rows, seqs, first, padding, BLOCK: tl.constexpr,
    BLOCK_SEQS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    enter(DEPENDENT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    # The request of a row is the number of requests that end before it.
    request = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, seqs, BLOCK_SEQS):
        seq = begin + tl.arange(0, BLOCK_SEQS)
        end = tl.load(q_start + 1 + seq, mask=seq < seqs, other=0)
        request += tl.sum(((seq < seqs)[None, :] & (end[None, :] <= row[:, None])).to(tl.int32), 1)
    position = tl.load(positions + first + row, mask=there, other=-1)
    fed = there & (request < seqs) & (position >= 0)
    state = tl.where(fed, tl.load(device_rows + request, mask=fed, other=0), padding)
    slot = tl.load(of_row + state, mask=there, other=-1)
    tl.store(out + first + row, slot, mask=there)


@triton.jit(do_not_specialize=["rows", "y_stride"])
def lora_shrink_kernel(  # type: ignore[no-untyped-def]
    x,
    a,
    slots,
    y,
    rows,
    x_stride,
    y_stride,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    TILES: tl.constexpr = COLUMNS // BLOCK_R
    EVEN: tl.constexpr = K % SPAN == 0
    tile = tl.program_id(0) % TILES
    split = tl.program_id(0) // TILES
    slot = tl.program_id(2)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = tl.load(slots + token, mask=token < rows, other=-1) == slot
    if tl.max(mine.to(tl.int32), 0) > 0:
        c = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        column = split * SPAN + tl.arange(0, BLOCK_K)
        a_rows = a + (slot.to(tl.int64) * COLUMNS + c) * K
        x_rows = x + token.to(tl.int64) * x_stride
        acc = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
        for k in range(0, SPAN // BLOCK_K):
            at = column + k * BLOCK_K
            if EVEN:
                w = tl.load(a_rows[:, None] + at[None, :])
                v = tl.load(x_rows[None, :] + at[:, None], mask=mine[None, :], other=0)
            else:
                w = tl.load(a_rows[:, None] + at[None, :], mask=(at < K)[None, :], other=0)
                v = tl.load(x_rows[None, :] + at[:, None], mask=(at < K)[:, None] & mine[None, :], other=0)
            acc = tl.dot(w, v, acc, input_precision="ieee")
        place = y + split.to(tl.int64) * y_stride + token.to(tl.int64)[None, :] * COLUMNS + c[:, None]
        tl.store(place, acc, mask=mine[None, :])


@triton.jit(do_not_specialize=["rows", "y_stride"])
def lora_expand_kernel(  # type: ignore[no-untyped-def]
    y,
    b,
    slots,
    squares,
    out,
    rows,
    y_stride,
    out_stride,
    eps,
    N: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    FOURTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    K: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_BLOCK: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    enter(DEPENDENT)
    # No tile has outputs of two parts. The parts begin at outputs 0, SECOND, THIRD and FOURTH.
    TILES_1: tl.constexpr = (SECOND + BLOCK_N - 1) // BLOCK_N
    TILES_2: tl.constexpr = TILES_1 + (THIRD - SECOND + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    slot = tl.program_id(2)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = tl.load(slots + token, mask=token < rows, other=-1) == slot
    if tl.max(mine.to(tl.int32), 0) > 0:
        part = (tile >= TILES_1).to(tl.int32) + (tile >= TILES_2).to(tl.int32)
        begin = tl.where(part == 0, 0, tl.where(part == 1, SECOND - TILES_1 * BLOCK_N, THIRD - TILES_2 * BLOCK_N))
        end = tl.where(part == 0, SECOND, tl.where(part == 1, THIRD, FOURTH))
        if FOURTH < N:
            TILES_3: tl.constexpr = TILES_2 + (FOURTH - THIRD + BLOCK_N - 1) // BLOCK_N
            if tile >= TILES_3:
                part += 1
                begin = FOURTH - TILES_3 * BLOCK_N
                end = N
        n = begin + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        r = tl.arange(0, BLOCK_R)
        stored = (n < end)[:, None] & mine[None, :]
        b_rows = b + (slot.to(tl.int64) * N + tl.minimum(n, N - 1)) * RANK
        y_rows = y + token.to(tl.int64) * COLUMNS + part * RANK
        if SQUARES > 0:
            tiles = tl.arange(0, SQUARES_BLOCK)
            square = tl.load(
                squares + tiles[:, None] * MAX_ROWS + token[None, :],
                mask=(tiles < SQUARES)[:, None] & mine[None, :],
                other=0,
            )
            scale = tl.rsqrt(tl.sum(square, 0) / K + eps)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in tl.static_range(0, RANK, BLOCK_R):
            v = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
            for split in tl.range(0, SPLITS, loop_unroll_factor=4):
                place = y_rows[None, :] + split * y_stride + (first + r)[:, None]
                v += tl.load(place, mask=mine[None, :], other=0)
            if SQUARES > 0:
                v = v * scale[None, :]
            w = tl.load(b_rows[:, None] + (first + r)[None, :])
            acc = tl.dot(w, v.to(b.dtype.element_ty), acc, input_precision="ieee")
        place = out + token.to(tl.int64)[None, :] * out_stride + n[:, None]
        if MULTIPLIER != 1:
            acc *= MULTIPLIER
        if ACCUMULATE:
            acc += tl.load(place, mask=stored, other=0).to(tl.float32)
        tl.store(place, acc.to(out.dtype.element_ty), mask=stored)


@dataclass(frozen=True, slots=True)
class Slots:
    """Adapters of one fused projection with K inputs and N outputs, in S slots."""

    a: Tensor
    """[S, parts * R, K]. A part's A has R rows; those past its rank are 0."""
    b: Tensor
    """[S, N, R]. Columns past an output's rank are 0."""
    parts: tuple[int, ...]
    """Number of outputs of each part, up to four parts. They add up to N."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all slots."""
        return self.a.nbytes + self.b.nbytes


def padded_rank(rank: int) -> int:
    """Return R of slots for adapters of at most `rank`: a power of two, at least 16, which matrix instructions need."""
    return max(16, 1 << (rank - 1).bit_length())


def num_splits(rows: int, k: int) -> int:
    """Return the number of programs that share a sum over `k` inputs. It is the same for all passes of up to 64 rows,
    so that these have one order of sums, and 1 for more rows."""
    return 1 if rows > MAX_ROWS else -(-k // _span(MAX_ROWS, k))


def _span(rows: int, k: int) -> int:
    """Return the number of inputs that a program of `shrink` adds up."""
    splits = 1 if rows > MAX_ROWS else max(1, min(_MAX_SPLITS, k // 256))
    return -(-k // (splits * _BLOCK_K)) * _BLOCK_K


@torch.library.custom_op("specrs::adapter_slots", mutates_args=("out",))
def adapter_slots(
    positions: Tensor, q_start: Tensor, device_rows: Tensor, of_row: Tensor, out: Tensor, first: int, dependent: bool
) -> None:
    """Write the adapter slot of each row of a pass from row `first` on.

    Args:
        positions: `[N]` int64 positions of all rows; -1: the row is masked and counts as one of no request.
        q_start: `[B + 1]` int64, first row of each request, counted from row `first`. Later rows are of no request.
        device_rows: `[B]` int64, state row of each request.
        of_row: `[R + 1]` int32, slot of each state row; -1: no adapter. The last element is that of rows of no request.
        out: `[N]` int32, written from `first` on.
        first: first row of the requests.
        dependent: launch dependently (see `_dependent_launch`).
    """
    _check_slots(positions, q_start, device_rows, of_row, out)
    rows = len(positions) - first
    adapter_slots_kernel[(triton.cdiv(rows, _SLOT_ROWS),)](
        positions,
        q_start,
        device_rows,
        of_row,
        out,
        rows,
        len(device_rows),
        first,
        len(of_row) - 1,
        BLOCK=_SLOT_ROWS,
        BLOCK_SEQS=_SLOT_SEQS,
        **options(dependent),
    )


@adapter_slots.register_fake
def _(
    positions: Tensor, q_start: Tensor, device_rows: Tensor, of_row: Tensor, out: Tensor, first: int, dependent: bool
) -> None:
    _check_slots(positions, q_start, device_rows, of_row, out)


def _check_slots(positions: Tensor, q_start: Tensor, device_rows: Tensor, of_row: Tensor, out: Tensor) -> None:
    assert q_start.shape == (len(device_rows) + 1,)
    assert out.shape == positions.shape
    assert of_row.dtype == out.dtype == torch.int32
    assert all(tensor.is_contiguous() for tensor in (positions, q_start, device_rows, of_row, out))


@torch.library.custom_op("specrs::lora_shrink", mutates_args=("y",))
def lora_shrink(x: Tensor, a: Tensor, slots: Tensor, y: Tensor, dependent: bool) -> None:
    """Write `A x` of each row that has an adapter.

    Args:
        x: `[N, K]`, contiguous rows of any stride.
        a: `[S, C, K]` contiguous, of x's dtype. C is a multiple of 16.
        slots: `[N]` int32 slot of each row; -1: its row of `y` is unchanged.
        y: `[num_splits(N, K), N, C]` fp32 contiguous, written: partial sums over the inputs.
        dependent: launch dependently (see `_dependent_launch`).
    """
    _check_shrink(x, a, slots, y)
    (rows, k), (count, columns, _) = x.shape, a.shape
    width, ranks = block_m(min(rows, MAX_ROWS)), _tile_of(columns)
    grid = (columns // ranks * len(y), triton.cdiv(rows, width), count)
    lora_shrink_kernel[grid](
        x,
        a,
        slots,
        y,
        rows,
        x.stride(0),
        y.stride(0),
        K=k,
        COLUMNS=columns,
        SPAN=_span(rows, k),
        BLOCK_R=ranks,
        BLOCK_K=_BLOCK_K * 2 // x.itemsize,
        BLOCK_M=width,
        **options(dependent),
    )


def _tile_of(columns: int) -> int:
    """Return the largest power of two, up to 64, that divides a number of rows of A."""
    return min(_MAX_RANKS, columns & -columns)


@lora_shrink.register_fake
def _(x: Tensor, a: Tensor, slots: Tensor, y: Tensor, dependent: bool) -> None:
    _check_shrink(x, a, slots, y)


def _check_shrink(x: Tensor, a: Tensor, slots: Tensor, y: Tensor) -> None:
    assert a.shape[2] == x.shape[1]
    assert a.shape[1] % 16 == 0
    assert slots.shape == x.shape[:1]
    assert y.shape == (num_splits(*x.shape), x.shape[0], a.shape[1])
    assert a.dtype == x.dtype
    assert slots.dtype == torch.int32
    assert y.dtype == torch.float32
    assert x.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (a, slots, y))


def lora_expand(
    y: Tensor,
    adapters: Slots,
    slots: Tensor,
    out: Tensor,
    dependent: bool,
    *,
    norm: tuple[Tensor, float] | None = None,
    accumulate: bool = False,
    multiplier: float = 1.0,
) -> None:
    """Write `m B (y / r)` of each row that has an adapter into `out`, or add it to `out`.

    Args:
        y: `A x` of the rows, as `lora_shrink` leaves it, summed over the splits and rounded to B's dtype.
        adapters: the slots of the projection.
        slots: `[N]` int32 slot of each row; -1: its row of `out` is unchanged.
        out: `[N, outputs]` of any floating dtype, contiguous rows of any stride. Sums are fp32 and rounded once.
        dependent: launch dependently (see `_dependent_launch`).
        norm: squares `[S, 64]` fp32, and eps. Column i adds up to the sum of squares of row i's inputs before a norm's
            weight was multiplied in. r is the root of their mean plus eps. None: r is 1.
        accumulate: add to `out`.
        multiplier: factor m.
    """
    squares, eps = (None, 0.0) if norm is None else norm
    numbers, flags = [eps, multiplier], [int(accumulate), adapters.a.shape[2], *adapters.parts]
    torch.ops.specrs.lora_expand(y, adapters.b, slots, squares, out, numbers, flags, dependent)


@torch.library.custom_op("specrs::lora_expand", mutates_args=("out",))
def _lora_expand(
    y: Tensor,
    b: Tensor,
    slots: Tensor,
    squares: Tensor | None,
    out: Tensor,
    numbers: list[float],
    flags: list[int],
    dependent: bool,
) -> None:
    _check_expand(y, b, slots, squares, out, flags)
    (eps, multiplier), (accumulate, k, *parts) = numbers, flags
    (count, n, rank), rows, sums = b.shape, len(slots), 0 if squares is None else len(squares)
    width, (second, third, fourth) = block_m(min(rows, MAX_ROWS)), _begins(parts)
    grid = (sum(triton.cdiv(part, _BLOCK_N) for part in parts), triton.cdiv(rows, width), count)
    lora_expand_kernel[grid](
        y,
        b,
        slots,
        squares,
        out,
        rows,
        y.stride(0),
        out.stride(0),
        eps,
        N=n,
        SECOND=second,
        THIRD=third,
        FOURTH=fourth,
        COLUMNS=y.shape[2],
        RANK=rank,
        SPLITS=len(y),
        K=k,
        SQUARES=sums,
        SQUARES_BLOCK=triton.next_power_of_2(sums),
        MAX_ROWS=MAX_ROWS,
        ACCUMULATE=bool(accumulate),
        MULTIPLIER=multiplier,
        BLOCK_N=_BLOCK_N,
        BLOCK_R=min(_MAX_RANKS, rank),
        BLOCK_M=width,
        **options(dependent),
    )


def _begins(parts: Sequence[int]) -> tuple[int, int, int]:
    """Return the first output of the second, third and fourth part; N for parts that are not there."""
    return sum(parts[:1]), sum(parts[:2]), sum(parts[:3])


@_lora_expand.register_fake
def _(
    y: Tensor,
    b: Tensor,
    slots: Tensor,
    squares: Tensor | None,
    out: Tensor,
    numbers: list[float],
    flags: list[int],
    dependent: bool,
) -> None:
    _check_expand(y, b, slots, squares, out, flags)


def _check_expand(
    y: Tensor, b: Tensor, slots: Tensor, squares: Tensor | None, out: Tensor, flags: Sequence[int]
) -> None:
    _, _, *parts = flags
    rows = len(slots)
    assert 1 <= len(parts) <= 4
    assert sum(parts) == b.shape[1] == out.shape[1]
    assert y.shape[1:] == (rows, len(parts) * b.shape[2])
    assert out.shape[0] == rows
    assert slots.dtype == torch.int32
    assert y.dtype == torch.float32
    assert out.stride(1) == 1
    assert squares is None or (rows <= MAX_ROWS and squares.shape[1:] == (MAX_ROWS,) and squares.is_contiguous())
    assert all(tensor.is_contiguous() for tensor in (y, b, slots))


def adapter_slots_reference(
    positions: Tensor, q_start: Tensor, device_rows: Tensor, of_row: Tensor, out: Tensor, first: int
) -> None:
    """Reference for `adapter_slots`, in plain torch."""
    out[first:] = of_row[-1]
    for i, (begin, end) in enumerate(zip(q_start[:-1].tolist(), q_start[1:].tolist(), strict=True)):
        out[first + begin : first + end] = of_row[device_rows[i]]
    out[first:].masked_fill_(positions[first:] < 0, int(of_row[-1]))


def lora_reference(
    x: Tensor,
    adapters: Slots,
    slots: Tensor,
    out: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    accumulate: bool = False,
    multiplier: float = 1.0,
) -> None:
    """Do what `lora_shrink` and `lora_expand` do, in plain torch in float64, rounded once."""
    rank = adapters.b.shape[2]
    for i in (slots >= 0).nonzero().flatten().tolist():
        y = adapters.a[slots[i]].double() @ x[i].double()
        if norm is not None:
            squares, eps = norm
            y *= (squares[:, i].double().sum() / x.shape[1] + eps).rsqrt()
        of_parts = y.view(len(adapters.parts), rank).repeat_interleave(torch.tensor(adapters.parts), 0)
        made = multiplier * (adapters.b[slots[i]].double() * of_parts).sum(1)
        out[i] = out[i].double() + made if accumulate else made


def _variants() -> tuple[Variant, ...]:
    variants = [
        Variant(
            "adapter_slots",
            adapter_slots_kernel,
            {
                **dict.fromkeys(("positions", "q_start", "device_rows"), "*i64"),
                **dict.fromkeys(("of_row", "out"), "*i32"),
                **dict.fromkeys(("rows", "seqs", "first", "padding"), "i32"),
            },
            {"BLOCK": _SLOT_ROWS, "BLOCK_SEQS": _SLOT_SEQS, "DEPENDENT": False},
        )
    ]
    # Projections of Qwen3-32B, and into a delta net of Qwen3.5-27B: inputs and parts.
    shapes = {"qkv": (5120, (8192, 1024, 1024)), "gate_up": (5120, (25600, 25600)), "down": (25600, (5120,))}
    shapes["net"] = (5120, (10240, 6144, 48, 48))
    cases = [("qkv", 6, 16, "bf16"), ("down", 64, 16, "bf16"), ("gate_up", 2048, 64, "bf16"), ("down", 6, 16, "fp16")]
    cases.append(("net", 6, 16, "bf16"))
    for name, rows, rank, dtype in cases:
        k, parts = shapes[name]
        columns, width, (second, third, fourth) = len(parts) * rank, block_m(min(rows, MAX_ROWS)), _begins(parts)
        types = dict.fromkeys(("x", "a", "b"), f"*{dtype}") | {"slots": "*i32", "y": "*fp32"}
        types |= dict.fromkeys(("rows", "y_stride", "x_stride", "out_stride"), "i32") | {"eps": "fp32"}
        sums = triton.cdiv(k, 64) if name in ("qkv", "net") else 0
        adds = name == "down"
        types |= {"squares": "*fp32"} if sums else {}
        types |= {"out": f"*{dtype}" if adds or rows > MAX_ROWS else "*fp32"}
        common = {"COLUMNS": columns, "BLOCK_M": width, "K": k, "DEPENDENT": False}
        shrink = common | {"SPAN": _span(rows, k), "BLOCK_R": _tile_of(columns), "BLOCK_K": _BLOCK_K}
        expand = common | {
            "N": sum(parts),
            "SECOND": second,
            "THIRD": third,
            "FOURTH": fourth,
            "RANK": rank,
            "SPLITS": num_splits(rows, k),
            "SQUARES": sums,
            "SQUARES_BLOCK": triton.next_power_of_2(sums),
            "MAX_ROWS": MAX_ROWS,
            "ACCUMULATE": adds or rows > MAX_ROWS,
            "MULTIPLIER": 1.0,
            "BLOCK_N": _BLOCK_N,
            "BLOCK_R": min(_MAX_RANKS, rank),
            **({} if sums else {"squares": None}),
        }
        for kind, fn, constants in (("shrink", lora_shrink_kernel, shrink), ("expand", lora_expand_kernel, expand)):
            own = {arg: kind_of for arg, kind_of in types.items() if arg in fn.arg_names}
            strides = tuple(arg for arg in ("x_stride", "out_stride") if arg in own)
            label = f"lora_{kind}_{name}_{dtype}_rows{rows}_rank{rank}"
            variants.append(Variant(label, fn, own, constants, aligned=strides))
    return tuple(variants)


VARIANTS = _variants()
