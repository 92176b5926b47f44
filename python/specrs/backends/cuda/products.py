"""Matrix products with a model's weights, dense or quantized, for any number of rows. Norms nothing."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from specrs.backends.cuda.adapters import LayerAdapters
from specrs.backends.cuda.providers import CUBLASLT, OWN
from specrs.backends.cuda.workspace import QUANTIZED_ROWS, Workspace
from specrs.kernels.cuda.activation import activation_and_mul
from specrs.kernels.cuda.argmax import argmax
from specrs.kernels.cuda.dequantize import dequantize
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.cuda.fp8_rows import quantize_rows, round_rows
from specrs.kernels.cuda.linear_product import DRAFT_ROWS, MAX_ROWS, Product
from specrs.kernels.cuda.lm_head import ArgmaxScratch, linear_argmax
from specrs.kernels.cuda.scaled_linear import padded_rows, scaled_linear, serves
from specrs.kernels.cuda.skinny_linear import skinny_linear
from specrs.kernels.cuda.softcap import softcap
from specrs.kernels.linear import DenseWeight, Weight
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import SharedWeights


def few_rows(ws: Workspace) -> int:
    """Return the maximum number of rows of a pass whose products are our fused kernels. Wider passes use
    `wide_product`."""
    return DRAFT_ROWS if ws.fuses_more else MAX_ROWS


def write_logits(hidden: Tensor, weight: Tensor, out: Tensor, ws: Workspace, cap: float | None = None) -> None:
    """Write the LM head's logits of `hidden` `[L, hidden]` into `out` `[L, ids]` fp32, softcapped by `cap` unless that
    is None."""
    _write_logits("lm_head", hidden, Product(weight), out, ws)
    if cap is not None:
        softcap(out, cap, ws.dependent)


def write_router_logits(x: Tensor, router: Weight, out: Tensor, ws: Workspace, factor: float = 1.0) -> None:
    """Write the router's logits of `x` `[N, hidden]`, times `factor`, into `out` `[N, experts]` fp32."""
    _write_logits("router", x, Product(stored(router), router.bias, multiplier=factor), out, ws)


def _write_logits(name: str, x: Tensor, product: Product, out: Tensor, ws: Workspace) -> None:
    if x.shape[0] > few_rows(ws):
        _wide_logits(x, product.weight, out)
        if product.bias is not None:
            out.add_(product.bias)
        if product.multiplier != 1:
            out.mul_(product.multiplier)
        return
    skinny_linear(x, product, out, (ws.partials, ws.counters), ws.config(name, x.shape[0]), ws.dependent)


def write_argmax(
    hidden: Tensor,
    weight: Tensor,
    best: tuple[Tensor, Tensor],
    ws: Workspace,
    logits: Tensor | None = None,
    cap: float | None = None,
) -> None:
    """Write the most probable id of each row of `hidden` into `best`: ids `[L]` int64 and their logits `[L]` fp32.

    With `logits` `[L, ids]` fp32, all logits are written there too. `cap`: number by which logits are softcapped; None:
    they are not. Capped logits may tie where logits do not, so the argmax is that of capped logits.
    """
    rows, (ids, top) = hidden.shape[0], best
    if rows <= few_rows(ws) and cap is None:
        out = (ids, top) if logits is None else (ids, top, logits)
        scratch = ArgmaxScratch(ws.tile_top, ws.tile_id, ws.partials, ws.counters)
        linear_argmax(hidden, weight, out, scratch, ws.config("lm_head", rows), ws.dependent)
        return
    step, wide = ws.logits.shape[0], rows > few_rows(ws)
    assert step, f"rows={rows}: the workspace was allocated for argmaxes of at most {few_rows(ws)}"
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        kept = ws.logits[: part.stop - first, : weight.shape[0]] if logits is None else logits[part]
        if wide:
            _wide_logits(hidden[part], weight, kept)
        else:
            write_logits(hidden[part], weight, kept, ws)
        if cap is not None:
            softcap(kept, cap, ws.dependent)
        argmax(kept, ids[part], top[part], ws.scratch)


def product(ws: Workspace, name: str, x: Tensor, w: Weight, out: Tensor) -> None:
    """Write the product `name` of `x` with `w` into `out`, for any number of rows."""
    if x.shape[0] > few_rows(ws):
        wide_product(ws, name, x, w, out)
        return
    few_product(ws, name, multiplied(ws, x, w), operand(w), out)


def multiplied(ws: Workspace, x: Tensor, w: Weight) -> Tensor:
    """Return the rows that are multiplied with `w`: `x`, or `x` rounded to FP8 in the workspace."""
    if not isinstance(w, QuantizedWeight) or not w.fp8_rows:
        return x
    rounded = ws.rounded[: x.numel()].view(x.shape)
    round_rows(x, w.coding.group, rounded, ws.dependent)
    return rounded


def gated(w: Weight, c: ModelConfig) -> Product:
    """Return the operand of an MLP's fused gate and up projection, with the model's activation, for few rows."""
    return dataclasses.replace(operand(w), gated=True, gelu=c.activation != "silu")


def shared_expert(ws: Workspace, x: Tensor, w: SharedWeights[Weight], c: ModelConfig) -> list[Tensor]:
    """Compute a shared expert for the normed rows `x` `[N, hidden]`. Return what `add_pairs` adds to the output of the
    other experts: `x`, the weight of the expert's gate, and its output in the workspace; or without a gate its
    output alone."""
    rows, b = x.shape[0], ws.experts
    assert b is not None
    activated, made = b.shared_activated[:rows], b.shared_made[:rows]
    if rows <= few_rows(ws):
        few_product(ws, "shared_gate_up", x, gated(w.gate_up, c), activated)
    else:
        wide_product(ws, "shared_gate_up", x, w.gate_up, b.shared_gate_up[:rows])
        activation_and_mul(b.shared_gate_up[:rows], activated, c.activation != "silu", ws.dependent)
    product(ws, "shared_down", activated, w.down, made)
    return [made] if w.gate is None else [x, stored(w.gate).view(-1), made]


def gated_product(
    ws: Workspace, x: Tensor, w: Weight, out: Tensor, c: ModelConfig, adapters: LayerAdapters | None = None
) -> None:
    """Write the activated product `gate_up` of `x` into `out`, for up to `MLP_ROWS` rows. `adapters` are the LoRA
    adapters of these rows; None: there are none."""
    rows = x.shape[0]
    if rows <= few_rows(ws):
        added = None if adapters is None else adapters.added("gate_up", x)
        few_product(ws, "gate_up", multiplied(ws, x, w), dataclasses.replace(gated(w, c), added=added), out)
        return
    gate_up = ws.part(ws.gate_up, rows, w.shape[0])
    wide_product(ws, "gate_up", x, w, gate_up)
    if adapters is not None:
        adapters.add_("gate_up", x, gate_up)
    activation_and_mul(gate_up, out, c.activation != "silu", ws.dependent)


def few_product(ws: Workspace, name: str, x: Tensor, product: Product, out: Tensor) -> None:
    """Write a product of up to `few_rows` rows into `out`, with one of our kernels."""
    cut = ws.config(name, x.shape[0], product.coding, (product.n, x.shape[1]))
    skinny_linear(x, product, out, (ws.partials, ws.counters), cut, ws.dependent)


def wide_product(ws: Workspace, name: str, x: Tensor, w: Weight, out: Tensor) -> None:
    """Write a product of more than `few_rows` rows into `out`. Dense weights are multiplied by whom the table of
    products names, cuBLAS if it has no entry.

    Quantized weights with up to 256 rows are read in place, 64 rows at a time. For more rows they are dequantized piece
    by piece into the same memory. If rows are rounded to FP8, FP8 weights are multiplied as FP8 if the device can. A
    draft's rows are rounded only then.
    """
    if isinstance(w, QuantizedWeight):
        if not is_dequantized(w, ws.limits):
            _scaled_product(ws, x, w, out)
            return
        x = multiplied(ws, x, w)
        if x.shape[0] <= QUANTIZED_ROWS:
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
    _dense_product(ws, x, stored(w), w.bias, out)


def is_dequantized(w: Weight, limits: DeviceLimits) -> bool:
    """Return whether `w` is quantized and becomes 16-bit numbers in products of many rows. Up to `QUANTIZED_ROWS` rows
    read it once for every `MAX_ROWS` of them."""
    if not isinstance(w, QuantizedWeight):
        return False
    return not ((w.fp8_rows or w.fp8_wide_rows) and serves(w, limits))


def _dense_product(ws: Workspace, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the product of x with a dense weight into `out`, by the provider of `ws.providers`. A bias is left to
    cuBLAS or our kernel."""
    n, k = weight.shape
    choice = ws.providers.choice_of(n, k, weight.dtype, x.shape[0])
    if choice.provider == OWN and (n, k) in ws.own_configs:
        cut = ws.own_configs[n, k]
        skinny_linear(x, Product(weight, bias), out, (ws.partials, ws.counters), cut, ws.dependent)
        return
    done = False
    if choice.provider == CUBLASLT and ws.cublaslt is not None and bias is None:
        done = ws.cublaslt.multiply(x, weight, out, choice)
    if not done:
        _mm(x, weight, bias, out)


def _scaled_product(ws: Workspace, x: Tensor, w: QuantizedWeight, out: Tensor) -> None:
    (rows, size), group = x.shape, w.coding.group
    # Padding rows are whatever memory holds. They do not change the other rows of the product.
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
    """Return the operand for a weight that the kernels read: dense or quantized."""
    if isinstance(w, QuantizedWeight):
        return Product(w.codes, w.bias, coding=w.coding, scales=w.scales)
    return Product(stored(w), w.bias)


def stored(w: Weight) -> Tensor:
    """Return a dense weight as checkpoints have it, `[out, in]` contiguous. LM heads are always dense."""
    assert isinstance(w, DenseWeight), "a weight packed for a CPU"
    return w.weight
