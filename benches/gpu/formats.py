"""Measures passes of a target in other formats and of mixtures of experts at batch 1, with random weights. Checks
nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from specrs.backends.weights import Weights
from specrs.kernels.coding import SUPER_BLOCK, Coding
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.torch_decoder import TorchDecoder

from gpu.iterations import MAX_K, Alone

CODINGS: dict[str, Callable[[int], Coding]] = {
    "fp8_block": lambda _: Coding("fp8", 128, outputs=128),
    "fp8_channel": lambda size: Coding("fp8", size),
    "int8_channel": lambda size: Coding("int8", size),
    "int4_group": lambda _: Coding("int4", 128, zeros=True),
    "q4_k": lambda size: Coding("int4", 32, minima="pairs" if size % SUPER_BLOCK else "blocks"),
}
"""Codings by name, with the groups of Qwen3-FP8, compressed-tensors by channel, W8A16, AWQ and GGUF's Q4_K. A trial's
matrices are too small for blocks of Q4_K."""
K = min(5, MAX_K)
ROWS = (1, 2, K + 1)


def random_codes(out: int, size: int, kind: str, device: torch.device) -> QuantizedWeight:
    """Return a random quantized weight `[out, size]`. No e4m3 code is NaN, and scales keep a residual stream finite."""
    coding = CODINGS[kind](size)
    codes = torch.randint(-(2**15), 2**15, (out, size * coding.bits // 16), device=device)
    codes &= 0x7777 if coding.kind == "fp8" else -1
    if coding.minima:
        blocks = size // coding.block
        halves = (1e-5 * torch.rand(out, blocks, 2, device=device)).half().view(torch.int32)
        factors = torch.randint(2**31, (out, blocks, coding.words - 1), device=device) & 0x3F3F3F3F
        words = torch.cat((halves, factors.to(torch.int32)), 2).view(out, -1)
        return QuantizedWeight(codes.to(torch.int16), words, coding)
    scales = torch.rand(-(-out // coding.outputs), -(-size // coding.group), device=device)
    return QuantizedWeight(codes.to(torch.int16), 1e-4 * scales, coding)


def quantized(model: TorchDecoder, kind: str) -> TorchDecoder:
    """Return `model` with the projections of its layers randomly quantized."""
    layers = []
    for layer in model.weights.layers:
        shapes = {name: getattr(layer, name).shape for name in ("qkv", "o", "gate_up", "down")}
        made = {name: random_codes(*shape, kind, model.device) for name, shape in shapes.items()}
        layers.append(dataclasses.replace(layer, **made))
    return TorchDecoder(dataclasses.replace(model.weights, layers=tuple(layers)))


def measure(target: str, draft: str, weights: Weights, **settings: Any) -> dict[str, Any]:
    """Return the milliseconds of a pass by its rows, and of a whole iteration at K = 5 (2 in a trial)."""
    alone = Alone(target, draft, weights, **settings)
    return {
        "target_pass_ms": {rows: alone.target_pass(rows) for rows in ROWS},
        f"whole_k{K}_ms": alone.whole(K),
    }
