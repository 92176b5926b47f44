"""What a product of few rows is given: operands, their checks, the scratch that it needs, and what it gives, as
`skinny_linear_reference`. Launches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from specrs.kernels.coded_weight import CodedWeight
from specrs.kernels.coding import Coding
from specrs.kernels.cuda._codes import check_codes
from specrs.kernels.cuda._heads import Heads, check_heads
from specrs.kernels.cuda.configs import LinearConfig
from torch import Tensor

MAX_ROWS = 64
"""Rows above which cuBLAS serves: a product of that many is no longer bound by the weight's bytes alone."""


def block_m(rows: int) -> int:
    """Columns of a tile for `rows` rows: 16, 32 or 64. Fewer than 8 would leave the warp-group instructions."""
    return max(16, 1 << (rows - 1).bit_length())


def scratch_sizes(config: LinearConfig, rows: int, *, n: int, sides: int = 1) -> tuple[int, int]:
    """Elements of `partials` (fp32) and of `counters` (int32) that a product of `rows` rows needs; `n` and `sides` are
    those of its Product or LinearShape."""
    return 2 * config.programs * sides * config.block_n * block_m(rows), -(-n // config.block_n)


@dataclass(frozen=True, slots=True)
class Next:
    """What the next norm needs of the output y `[M, N]`, as it was rounded."""

    norm_weight: Tensor
    """[N], g"""
    x: Tensor
    """[M, N], y's dtype and strides: gets `g y`"""
    squares: Tensor
    """[S, 64] fp32, S at least the tiles of the output: row t gets the sums of squares of y's columns of tile t"""


@dataclass(frozen=True, slots=True)
class Product:
    """`m f(x W^T / r + b)`, r the root mean square of rows whose squares are given, else 1."""

    weight: Tensor
    """[N, K] contiguous, of x's dtype; with `gated` [2 N, K], the gates above the values; with `heads` [2 N, K]. Of a
    `coding` the codes, see `CodedWeight`."""
    bias: Tensor | None = None
    """As many as the weight has rows"""
    squares: Tensor | None = None
    """[S, 64] fp32: column i adds up to the sum of squares of the row that x[i] was before the norm's weight."""
    eps: float = 0.0
    gated: bool = False
    """f(y) = silu(y[:N]) * y[N:], else f(y) = y."""
    gelu: bool = False
    """GELU, by its approximation with tanh, in the place of SiLU."""
    accumulate: bool = False
    """Added to what is there, else written over it."""
    multiplier: float = 1.0
    """m"""
    next: Next | None = None
    """What is written beside the output for the product that reads it normed."""
    coding: Coding | None = None
    scales: Tensor | None = None
    """As of `CodedWeight`, where the weight is codes."""
    heads: Heads | None = None
    """The output `[M, 2 N]` is the heads of q, k and v: q is written as `qk_norm_rope` makes it, k and v into the cache
    alone."""

    @property
    def sides(self) -> int:
        """Rows of the weight to each of the N features that tiles are cut of."""
        return 2 if self.gated or self.heads is not None else 1

    @property
    def n(self) -> int:
        """N, features of the output; half of those of heads, of which a tile has both halves."""
        return self.weight.shape[0] // self.sides


def check_operands(x: Tensor, product: Product, scratch: Sequence[Tensor], config: list[int]) -> None:
    """Raise AssertionError for operands that the kernel would read past."""
    weight, coding, (partials, counters) = product.weight, product.coding, scratch
    assert 1 <= x.shape[0] <= MAX_ROWS, f"rows={x.shape[0]}: must be from 1 to {MAX_ROWS}"
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
    assert squares is None or (squares.shape[1:] == (MAX_ROWS,) and squares.is_contiguous())
    if following is not None:
        assert following.norm_weight.shape == out.shape[1:]
        assert following.x.shape == out.shape
        assert following.x.stride() == out.stride()
        tiles = -(-product.n // LinearConfig(*config).block_n)
        assert following.squares.shape[1:] == (MAX_ROWS,)
        assert following.squares.shape[0] >= tiles, f"squares must have {tiles} rows"
        assert following.squares.is_contiguous()


def skinny_linear_reference(x: Tensor, product: Product, out: Tensor) -> None:
    """`skinny_linear` in plain torch, in float64 throughout and rounded once; all squares of a row in `squares[0]`."""
    assert product.heads is None, "`qk_norm_rope_reference` behind it is theirs"
    weight = product.weight.double()
    if product.coding is not None:
        assert product.scales is not None
        weight = CodedWeight(product.weight, product.scales, product.coding).dequantized()
    y = x.double() @ weight.t()
    if product.squares is not None:
        sums = product.squares[:, : x.shape[0]].double().sum(0)
        y = y * (sums / x.shape[1] + product.eps).rsqrt()[:, None]
    if product.bias is not None:
        y = y + product.bias.double()
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
