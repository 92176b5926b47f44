"""Products with the weights of a model, dense or coded, of any number of rows. Norms nothing."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from specrs.kernels.coded_weight import CodedWeight
from specrs.kernels.cuda.activation import activation_and_mul
from specrs.kernels.cuda.argmax import argmax
from specrs.kernels.cuda.dequantize import dequantize
from specrs.kernels.cuda.fp8_rows import quantize_rows, round_rows
from specrs.kernels.cuda.linear_product import MAX_ROWS, Product
from specrs.kernels.cuda.lm_head import ArgmaxScratch, linear_argmax
from specrs.kernels.cuda.scaled_linear import padded_rows, scaled_linear, serves
from specrs.kernels.cuda.skinny_linear import skinny_linear
from specrs.kernels.linear import DenseWeight, Weight
from specrs.models.config import ModelConfig
from specrs.models.cuda.workspace import CODED_ROWS, Workspace


def write_logits(hidden: Tensor, weight: Tensor, out: Tensor, ws: Workspace) -> None:
    """Those of a workspace's model, `out` `[L, ids]` fp32."""
    _write_logits("lm_head", hidden, Product(weight), out, ws)


def write_router_logits(x: Tensor, router: Weight, out: Tensor, ws: Workspace) -> None:
    """The logits of a layer's experts, `out` `[N, experts]` fp32."""
    _write_logits("router", x, Product(stored(router), router.bias), out, ws)


def _write_logits(name: str, x: Tensor, product: Product, out: Tensor, ws: Workspace) -> None:
    if x.shape[0] > MAX_ROWS:
        _wide_logits(x, product.weight, out)
        if product.bias is not None:
            out.add_(product.bias)
        return
    skinny_linear(x, product, out, (ws.partials, ws.counters), ws.config(name, x.shape[0]), ws.dependent)


def write_argmax(
    hidden: Tensor, weight: Tensor, best: tuple[Tensor, Tensor], ws: Workspace, logits: Tensor | None = None
) -> None:
    """The same with an argmax behind it: ids `[L]` int64 and their logits `[L]` fp32; all logits where `logits` is
    given."""
    rows, (ids, top) = hidden.shape[0], best
    if rows <= MAX_ROWS:
        out = (ids, top) if logits is None else (ids, top, logits)
        scratch = ArgmaxScratch(ws.tile_top, ws.tile_id, ws.partials, ws.counters)
        linear_argmax(hidden, weight, out, scratch, ws.config("lm_head", rows), ws.dependent)
        return
    step = ws.logits.shape[0]
    assert step, f"rows={rows}: the workspace was allocated for argmaxes of at most {MAX_ROWS}"
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        kept = ws.logits[: part.stop - first, : weight.shape[0]] if logits is None else logits[part]
        _wide_logits(hidden[part], weight, kept)
        argmax(kept, ids[part], top[part], ws.scratch)


def product(ws: Workspace, name: str, x: Tensor, w: Weight, out: Tensor) -> None:
    """The product `name` of a workspace's model, of any number of rows."""
    if x.shape[0] > MAX_ROWS:
        wide_product(ws, name, x, w, out)
        return
    few_product(ws, name, multiplied(ws, x, w), operand(w), out)


def multiplied(ws: Workspace, x: Tensor, w: Weight) -> Tensor:
    """The rows that w is multiplied with: x, or x rounded to FP8, in the workspace."""
    if not isinstance(w, CodedWeight) or not w.fp8_rows:
        return x
    rounded = ws.rounded[: x.numel()].view(x.shape)
    round_rows(x, w.coding.group, rounded, ws.dependent)
    return rounded


def gated(w: Weight, c: ModelConfig) -> Product:
    """The product of few rows with gates above values, as the model's MLPs have it."""
    return dataclasses.replace(operand(w), gated=True, gelu=c.activation != "silu")


def gated_product(ws: Workspace, x: Tensor, w: Weight, out: Tensor, c: ModelConfig) -> None:
    """The product `gate_up` of a workspace's model, of up to `MLP_ROWS` rows."""
    rows = x.shape[0]
    if rows <= MAX_ROWS:
        few_product(ws, "gate_up", multiplied(ws, x, w), gated(w, c), out)
        return
    wide_product(ws, "gate_up", x, w, ws.gate_up[:rows])
    activation_and_mul(ws.gate_up[:rows], out, c.activation != "silu", ws.dependent)


def few_product(ws: Workspace, name: str, x: Tensor, product: Product, out: Tensor) -> None:
    cut = ws.config(name, x.shape[0], product.coding)
    skinny_linear(x, product, out, (ws.partials, ws.counters), cut, ws.dependent)


def wide_product(ws: Workspace, name: str, x: Tensor, w: Weight, out: Tensor) -> None:
    """By cuBLAS. Codes of up to 256 rows are read where they are, 64 rows at a time; for more, pieces of them become
    numbers, one after the other in the same memory. Where rows are rounded to FP8, codes are multiplied with codes if
    the device can."""
    if isinstance(w, CodedWeight):
        if w.fp8_rows and serves(w, ws.limits):
            _scaled_product(ws, x, w, out)
            return
        x = multiplied(ws, x, w)
        if x.shape[0] <= CODED_ROWS:
            for first in range(0, x.shape[0], MAX_ROWS):
                few_product(ws, name, x[first : first + MAX_ROWS], operand(w), out[first : first + MAX_ROWS])
            return
        features, size = w.shape
        step = ws.numbers.numel() // size
        for first in range(0, features, step):
            part = slice(first, min(first + step, features))
            numbers = ws.numbers[: (part.stop - first) * size].view(-1, size)
            dequantize(w, first, numbers, ws.dependent)
            _mm(x, numbers, None if w.bias is None else w.bias[part], out[:, part])
        return
    _mm(x, stored(w), w.bias, out)


def _scaled_product(ws: Workspace, x: Tensor, w: CodedWeight, out: Tensor) -> None:
    (rows, size), group = x.shape, w.coding.group
    # Those behind the last row are what memory has there: each is a row of the product by itself.
    padded, unit = padded_rows(rows, w), w.coding.unit(size)
    assert unit is not None
    codes = ws.rounded.view(torch.uint8)[: padded * size].view(padded, size)
    scales = ws.row_scales[: padded * -(-size // group)].view(-1, padded)
    quantize_rows(x, group, unit, codes[:rows], scales, ws.dependent)
    scaled_linear(codes, scales, w, out)


def _mm(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _wide_logits(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)


def operand(w: Weight) -> Product:
    """A product with a weight that the kernels read: dense or coded."""
    if isinstance(w, CodedWeight):
        return Product(w.codes, w.bias, coding=w.coding, scales=w.scales)
    return Product(stored(w), w.bias)


def stored(w: Weight) -> Tensor:
    """A dense weight as checkpoints have it, `[out, in]` contiguous; LM heads are always dense."""
    assert isinstance(w, DenseWeight), "a weight packed for a CPU"
    return w.weight
