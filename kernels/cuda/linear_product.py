"""Operands of a product of few rows, their checks, the size of its scratch, and a reference for the result. Launches
nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from specrs.kernels.coding import Coding
from specrs.kernels.cuda._codes import check_codes
from specrs.kernels.cuda._heads import Heads, check_heads
from specrs.kernels.cuda.configs import LinearConfig
from specrs.kernels.quantized_weight import QuantizedWeight
from torch import Tensor

MAX_ROWS = 64
"""Maximum number of rows that these kernels serve for a target. With more, cuBLAS is used, because reading the weight
is no longer the only limit."""
DRAFT_ROWS = 128
"""Maximum number of rows that these kernels serve for a draft model, which is so small that kernels and norms of their
own take longer than its products."""


def block_m(rows: int) -> int:
    """Return the number of columns of a tile for `rows` rows: 16, 32, 64 or 128. With fewer, the compiler could not use
    warp-group instructions."""
    return max(16, 1 << (rows - 1).bit_length())


def scratch_sizes(config: LinearConfig, rows: int, *, n: int, sides: int = 1) -> tuple[int, int]:
    """Return the numbers of elements of `partials` (fp32) and of `counters` (int32) for a product of `rows` rows. `n`
    and `sides` are those of its Product or LinearShape."""
    return 2 * config.programs * sides * config.block_n * block_m(rows), -(-n // config.block_n)


@dataclass(frozen=True, slots=True)
class Next:
    """Buffers that a product also writes, from which the next product computes the norm of the rounded output y
    `[M, N]`."""

    norm_weight: Tensor
    """[N], weight g of the next norm."""
    x: Tensor
    """[M, N], written: `g y`. It has y's dtype and strides."""
    squares: Tensor
    """[S, 64] fp32, or [S, 128] for a draft, written. S is at least the number of tiles of the output; row t gets the
    sums of squares of y's columns in tile t."""


@dataclass(frozen=True, slots=True)
class Added:
    """Sums of LoRA adapters, which a product adds to the outputs of some rows, after the bias."""

    values: Tensor
    """[M, rows of the weight] fp32, contiguous. Rows without a slot are not read."""
    slots: Tensor
    """[M] int32, adapter slot of each row; -1: nothing is added to the row."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product `m f(x W^T / r + b)`. r is the root mean square of each row if `squares` is given, else 1."""

    weight: Tensor
    """[N, K] contiguous, of x's dtype; with `gated` [2 N, K], the gates above the values; with `heads` [2 N, K]. With a
    `coding`, the codes of a `QuantizedWeight`."""
    bias: Tensor | None = None
    """[rows of the weight], or None."""
    squares: Tensor | None = None
    """[S, 64] fp32, or [S, 128] for a draft. Column i adds up to the sum of squares of row i before the norm's weight
    was multiplied in. None: rows are not normed."""
    eps: float = 0.0
    gated: bool = False
    """True if f(y) = silu(y[:N]) * y[N:]. False: f(y) = y."""
    gelu: bool = False
    """True to use GELU, by its approximation with tanh, instead of SiLU."""
    accumulate: bool = False
    """True to add the result to the output, False to overwrite it."""
    multiplier: float = 1.0
    """Factor m of the product."""
    next: Next | None = None
    """Buffers into which the product also writes its output times the next norm's weight, and sums of squares. None: it
    writes neither."""
    coding: Coding | None = None
    scales: Tensor | None = None
    """Scales of a `QuantizedWeight`; None if the weight is dense."""
    heads: Heads | None = None
    """If given, the output `[M, 2 N]` is heads of q, k and v. q is written as `qk_norm_rope` leaves it; k and v go only
    into the cache."""
    added: Added | None = None
    """Values that are added before the activation, or before heads are normed. None: none."""

    @property
    def sides(self) -> int:
        """Number of rows of the weight per output feature: 2 if gated or for heads, else 1."""
        return 2 if self.gated or self.heads is not None else 1

    @property
    def squares_width(self) -> int:
        """Number of columns of the sums of squares that the product reads and writes, 64 or 128."""
        given = self.squares if self.next is None else self.next.squares
        return MAX_ROWS if given is None else given.shape[1]

    @property
    def n(self) -> int:
        """Number of output features N that tiles are cut from. For heads it is half of the output, because a tile has
        both halves of a head."""
        return self.weight.shape[0] // self.sides


def check_operands(x: Tensor, product: Product, scratch: Sequence[Tensor], config: list[int]) -> None:
    """Raise AssertionError for operands that the kernel would read past."""
    weight, coding, (partials, counters) = product.weight, product.coding, scratch
    assert 1 <= x.shape[0] <= DRAFT_ROWS, f"rows={x.shape[0]}: must be from 1 to {DRAFT_ROWS}"
    size = weight.shape[1] if coding is None else weight.shape[1] * 16 // coding.bits
    assert x.shape[1] == size, f"x has {x.shape[1]} columns and the weight {size}"
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    if coding is None:
        assert x.dtype == weight.dtype
    else:
        check_codes(weight, product.scales, coding, size)
        assert LinearConfig(*config).block_k % (coding.unit(size) or 1) == 0, "a step must have whole units"
    needed = scratch_sizes(LinearConfig(*config), x.shape[0], n=product.n, sides=product.sides)
    assert partials.numel() >= needed[0], f"partials must have {needed[0]} elements"
    assert counters.numel() >= needed[1], f"counters must have {needed[1]} elements"


def check_product(x: Tensor, product: Product, out: Tensor, scratch: Sequence[Tensor], config: list[int]) -> None:
    check_operands(x, product, scratch, config)
    weight, bias, squares, following = product.weight, product.bias, product.squares, product.next
    if product.heads is None:
        assert out.shape == (x.shape[0], product.n)
    else:
        assert following is None
        assert not product.gated
        assert not product.accumulate
        assert product.multiplier == 1
        check_heads(product.heads, x, out, weight.shape[0], LinearConfig(*config).block_n)
    assert out.stride(1) == 1
    assert bias is None or bias.shape == weight.shape[:1]
    if product.added is not None:
        values, slots = product.added.values, product.added.slots
        assert values.shape == (x.shape[0], weight.shape[0])
        assert slots.shape == x.shape[:1]
        assert values.dtype == torch.float32
        assert slots.dtype == torch.int32
        assert values.is_contiguous()
        assert slots.is_contiguous()
    width = product.squares_width
    if squares is not None or following is not None:
        assert width in (MAX_ROWS, DRAFT_ROWS)
        assert x.shape[0] <= width, f"rows={x.shape[0]}: must be at most the {width} columns of squares"
    assert squares is None or (squares.shape[1:] == (width,) and squares.is_contiguous())
    if following is not None:
        assert following.norm_weight.shape == out.shape[1:]
        assert following.x.shape == out.shape
        assert following.x.stride() == out.stride()
        tiles = -(-product.n // LinearConfig(*config).block_n)
        assert following.squares.shape[1:] == (width,)
        assert following.squares.shape[0] >= tiles, f"squares must have {tiles} rows"
        assert following.squares.is_contiguous()


def skinny_linear_reference(x: Tensor, product: Product, out: Tensor) -> None:
    """Do what `skinny_linear` does, in plain torch in float64, rounded once. Sums of squares for the next norm are all
    written into row 0 of `next.squares`."""
    assert product.heads is None, "`qk_norm_rope_reference` after it is theirs"
    weight = product.weight.double()
    if product.coding is not None:
        assert product.scales is not None
        weight = QuantizedWeight(product.weight, product.scales, product.coding).dequantized()
    y = x.double() @ weight.t()
    if product.squares is not None:
        sums = product.squares[:, : x.shape[0]].double().sum(0)
        y = y * (sums / x.shape[1] + product.eps).rsqrt()[:, None]
    if product.bias is not None:
        y = y + product.bias.double()
    if product.added is not None:
        y = torch.where(product.added.slots[:, None] >= 0, y + product.added.values.double(), y)
    if product.gated:
        gate, up = y.chunk(2, dim=1)
        f = torch.nn.functional.gelu(gate, approximate="tanh") if product.gelu else torch.nn.functional.silu(gate)
        y = f * up
    y = y * product.multiplier
    out.copy_(out.double() + y if product.accumulate else y)
    if product.next is not None:
        rounded = out.double()
        product.next.x.copy_(rounded * product.next.norm_weight.double())
        product.next.squares.zero_()
        product.next.squares[0, : x.shape[0]] = rounded.square().sum(1)
