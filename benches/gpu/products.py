"""Products of a pass and the sampling cut alone, in their default configurations, beside cuBLAS. Checks no results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from specrs.core import RequestSampling
from specrs.kernels.cuda.configs import LinearShape, linear_config
from specrs.kernels.cuda.device import limits_of
from specrs.kernels.cuda.sampling_cut import sampling_cut
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.sampling_structs import Cut
from specrs.kernels.cuda.skinny_linear import block_m, scratch_sizes, skinny_linear
from specrs.kernels.linear import DenseWeight, Weight
from specrs.models.cuda.products import operand
from specrs.verify.params import SamplingRows

from gpu.formats import CODINGS, random_codes
from gpu.models import SHAPES, VOCAB
from gpu.timing import ON_GPU, graphed, milliseconds

_COLD_BYTES = 400 * 2**20
"""Of copies of a weight that take turns, so that none is in a cache."""
ROWS = (6, 32, 64) if ON_GPU else (2,)
LAUNCHES = 24 if ON_GPU else 1


def shapes(name: str) -> dict[str, tuple[int, int, bool]]:
    """Features, inputs and whether gated of the products of a model of `SHAPES`."""
    _, hidden, heads, kv_heads, dim, intermediate, _ = SHAPES[name]
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden, False),
        "o": (hidden, heads * dim, False),
        "gate_up": (intermediate, hidden, True),
        "down": (hidden, intermediate, False),
        "lm_head": (VOCAB.get(name, 151_936), hidden, False),
    }


def measure(models: list[str], device: torch.device) -> dict[str, Any]:
    """Microseconds of one launch by model, product, kind of weight and rows; and of the sampling cut."""
    found: dict[str, Any] = {}
    for model in models:
        for name, (n, k, gated) in shapes(model).items():
            kinds = ["dense", "cublas", *([] if name == "lm_head" else CODINGS)]
            found[f"{model} {name}"] = {kind: {r: one(n, k, gated, kind, r, device) for r in ROWS} for kind in kinds}
    return found | {"sampling_cut": sampling(device)}


def one(n: int, k: int, gated: bool, kind: str, rows: int, device: torch.device) -> float:
    """Microseconds of a product, as a graph has it."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    features = n * (1 + gated)
    x = torch.randn(rows, k, device=device).to(dtype)

    def weight() -> Weight:
        if kind in CODINGS:
            return random_codes(features, k, kind, device)
        return DenseWeight(torch.randn(features, k, device=device).to(dtype))

    weights = [weight()]
    if ON_GPU:
        weights += [weight() for _ in range(math.ceil(_COLD_BYTES / weights[0].num_bytes))]
    operands = [dataclasses.replace(operand(w), gated=gated) for w in weights]
    if kind == "cublas":
        wide = torch.empty(rows, features, device=device, dtype=dtype)
        return microseconds(lambda i: torch.mm(x, operands[i % len(operands)].weight.t(), out=wide))
    limits = limits_of(device)
    config = linear_config(LinearShape(n, k, dtype, gated, operands[0].coding), block_m(rows), limits)
    sizes, out = scratch_sizes(config, rows, n=n, sides=1 + gated), torch.empty(rows, n, device=device, dtype=dtype)
    scratch = torch.zeros(sizes[0], device=device), torch.zeros(sizes[1], dtype=torch.int32, device=device)

    def launch(i: int) -> None:
        product = operands[i % len(operands)]
        skinny_linear(x, product, out, scratch, config.as_list(), limits.capability >= 90)

    return microseconds(launch)


@torch.inference_mode()
def sampling(device: torch.device) -> dict[str, float]:
    """Microseconds of a draft's cut of one row and of verification's of six, at temperature 0.7 and top_p 0.9, of
    normal logits of a standard deviation."""
    vocab, found = VOCAB["tiny"] if not ON_GPU else 151_936, {}
    for spread in (0.9, 3.0):
        for rows, coarse in ((1, True), (6, False)):
            params = SamplingRows.allocate(rows + 1, dtype=torch.float32, device=device)
            for row in range(rows):
                params.write(row, RequestSampling(temperature=0.7, top_p=0.9))
            cut = Cut(
                torch.empty(rows, device=device),
                torch.empty(rows, device=device, dtype=torch.float64),
                torch.empty(rows, device=device),
            )
            scratch = SamplingScratch.allocate(rows, rows, vocab, device)
            logits, at = spread * torch.randn(rows, vocab, device=device), torch.arange(rows, device=device)

            def launch(_: int, logits: Any = logits, at: Any = at, params: Any = params, cut: Any = cut) -> None:
                sampling_cut(logits, at, params.values, cut, scratch, coarse=coarse)  # noqa: B023

            found[f"{'draft' if coarse else 'verification'} {rows} rows, deviation {spread}"] = microseconds(launch)
    return found


def microseconds(launch: Callable[[int], object]) -> float:
    """Of one of a graph's launches."""

    def several() -> None:
        for i in range(LAUNCHES):
            launch(i)

    return 1e3 * milliseconds(graphed(several), calls=5) / LAUNCHES
