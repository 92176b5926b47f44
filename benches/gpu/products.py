"""Measures products of a pass and the sampling cut alone, in their default configurations, next to cuBLAS. Checks no
results."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from specrs.backends.cuda import many_rows
from specrs.backends.cuda.cublaslt import CublasLt
from specrs.backends.cuda.providers import BUCKETS, write_providers
from specrs.backends.cuda.workspace import linear_shapes
from specrs.core import RequestSampling
from specrs.kernels.cuda.configs import LinearShape, linear_config
from specrs.kernels.cuda.device import limits_of
from specrs.kernels.cuda.linear_product import block_m
from specrs.kernels.cuda.sampling_cut import sampling_cut
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.sampling_structs import Cut
from specrs.kernels.cuda.tuning import Trial
from specrs.models.loader import load_config
from specrs.verify.params import SamplingRows

from gpu.formats import CODINGS
from gpu.models import VOCAB, write_config
from gpu.timing import ON_GPU, graphed, milliseconds

ROWS = (6, 32, 64) if ON_GPU else (2,)
MANY_ROWS = BUCKETS if ON_GPU else BUCKETS[:1]
"""Rows for which the table of products says who computes them."""
LAUNCHES = 24 if ON_GPU else 1


def measure(models: list[str], device: torch.device, table: Path) -> dict[str, Any]:
    """Return the microseconds of one launch by model, product, kind of weight and rows; and those of the sampling
    cut. Write into `table` who computes products of many rows fastest, as `specrs tune` does."""
    found: dict[str, Any] = {}
    lt = CublasLt.load(device) if device.type == "cuda" else None
    limits = limits_of(device)
    clock = None if ON_GPU else lambda launch: 1e-6 * microseconds(launch)
    timer = many_rows.ManyRowsTimer(limits, device, lt, clock)
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            config = load_config(write_config(model, Path(folder)))
        for name, shape in linear_shapes(config, torch.bfloat16 if ON_GPU else torch.float32, device).items():
            kinds = ["dense", "cublas", *([] if name == "lm_head" else CODINGS)]
            found[f"{model} {name}"] = of_product = {
                kind: {rows: one(shape, kind, rows, device) for rows in ROWS} for kind in kinds
            }
            of_product["many rows, cublaslt by torch"] = by_torch(shape, device)
            of_product["many rows"] = of_rows = {}
            for measured in many_rows.measure([shape], timer, MANY_ROWS):
                us = {provider: 1e6 * seconds for provider, seconds in measured.by_provider.items()}
                best, flop = us[measured.choice.provider], 2e-6 * measured.rows * measured.shape.n * shape.k
                of_rows[measured.rows] = us | {"best": measured.choice.provider, "tflop_per_s": flop / best}
                write_providers(table, limits.name, {measured.shape: {measured.rows: measured.choice}})
    return found | {"sampling_cut": sampling(device)}


def one(shape: LinearShape, kind: str, rows: int, device: torch.device) -> float:
    """Return the microseconds of one product. `kind` says which: dense weights as in a pass, dense weights by cuBLAS,
    or quantized weights as in a graph."""
    if kind in CODINGS:
        # What is after a product of codes that are heads is a kernel of its own.
        features = shape.n if shape.gated else shape.n * shape.sides
        shape = dataclasses.replace(shape, n=features, head_dim=0, coding=CODINGS[kind](shape.k))
    limits = limits_of(device)
    trial = Trial.of(shape, linear_config(shape, block_m(rows), limits), rows, limits)
    operands = trial.in_turn(device)
    if kind == "cublas":
        x, weight = operands[0].x, operands[0].weight
        wide = torch.empty(rows, len(weight), device=device, dtype=x.dtype)
        return microseconds(lambda i: torch.mm(x, operands[i % len(operands)].weight.t(), out=wide))
    return microseconds(lambda i: trial.launch(operands[i % len(operands)]))


def by_torch(shape: LinearShape, device: torch.device) -> dict[int, float]:
    """Return the microseconds of products of many rows by their number, if torch prefers cuBLASLt. It takes the first
    algorithm that cuBLASLt proposes, and leaves shapes to cuBLAS that cuBLASLt does not serve."""
    limits, shape = limits_of(device), many_rows.as_dense(shape)
    operands = Trial.of(shape, linear_config(shape, block_m(1), limits), 1, limits).in_turn(device)
    found = {}
    if device.type == "cuda":
        torch.backends.cuda.preferred_blas_library("cublaslt")
    for rows in MANY_ROWS:
        x = torch.randn(rows, shape.k, device=device).to(shape.dtype)
        out = torch.empty(rows, shape.n, device=device, dtype=shape.dtype)

        def launch(i: int, x: Any = x, out: Any = out) -> None:
            torch.mm(x, operands[i % len(operands)].weight.t(), out=out)

        found[rows] = microseconds(launch)
    if device.type == "cuda":
        torch.backends.cuda.preferred_blas_library("default")
    return found


@torch.inference_mode()
def sampling(device: torch.device) -> dict[str, float]:
    """Return the microseconds of the sampling cut of a draft's row and of verification's six, at temperature 0.7 and
    top_p 0.9, for normally distributed logits."""
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
    """Measure microseconds of one of a graph's launches."""

    def several() -> None:
        for i in range(LAUNCHES):
            launch(i)

    return 1e3 * milliseconds(graphed(several), calls=5) / LAUNCHES
