"""Which configuration of a product is the fastest on this GPU: candidates, compiled ahead, timed; the table. Used by no
pass."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from specrs.kernels.cuda import grouped_linear
from specrs.kernels.cuda._heads import Heads
from specrs.kernels.cuda.configs import LinearConfig, LinearShape, default_config, fit
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.cuda.linear_product import Product, block_m, scratch_sizes
from specrs.kernels.cuda.skinny_linear import launch
from torch import Tensor
from triton.runtime.errors import OutOfResources

Timer = Callable[[LinearShape, LinearConfig], float]
"""Seconds of one product; inf if the device can't run the configuration."""
_FINALISTS = 6
_ROUNDS = 5
_COLD_BYTES = 512 * 2**20
"""Of weights that take turns: more than any L2 cache."""
_WORTH = 0.98
"""A configuration replaces the default only if it takes less than this share of its time."""


def candidates(shape: LinearShape, limits: DeviceLimits) -> list[LinearConfig]:
    """Configurations worth timing, the default first; each fits the device with 16 columns."""
    default = fit(default_config(shape, limits), shape, 16, limits)
    found = {default: None}
    widths = [32, 64] if shape.dtype == torch.float32 else [32, 64, 128]
    if shape.head_dim:
        widths = [shape.head_dim // 2]
    depths = (32,) if shape.dtype == torch.float32 else (64, 128, 256)
    for block_n in widths:
        for block_k in depths:
            # A grouped product has a program for each tile.
            for per_sm in (1, 2, 3, 4) if shape.experts is None else (1,):
                programs = min(per_sm * limits.num_sms, shape.bound(block_n, block_k))
                programs = default.programs if shape.experts is not None else programs
                for warps in (4, 8) if block_n >= 64 else (4,):
                    for stages in (3, 4, 6, 8) if shape.experts is None else (2, 3, 4, 6):
                        config = LinearConfig(block_n, block_k, programs, warps, stages, default.prefetch)
                        fitted = fit(config, shape, 16, limits)
                        if fitted.num_stages == stages:
                            found[fitted] = None
    return list(found)


def select(shape: LinearShape, configs: Iterable[LinearConfig], timer: Timer) -> tuple[LinearConfig, float, float]:
    """`(the best of configs, its seconds, the seconds of the first)`; the first is the default, and wins when close.

    Everything is timed once, the fastest few and the default again in turn, so that a clock that drifts meets all of
    them; medians decide.
    """
    default, *others = configs
    once = {config: timer(shape, config) for config in (default, *others)}
    finalists = sorted(others, key=lambda config: once[config])[:_FINALISTS]
    times: dict[LinearConfig, list[float]] = {config: [] for config in (default, *finalists)}
    for _ in range(_ROUNDS):
        for config, seconds in times.items():
            seconds.append(timer(shape, config))
    medians = {config: statistics.median(seconds) for config, seconds in times.items()}
    best = min(medians, key=lambda config: medians[config])
    if not medians[best] < _WORTH * medians[default]:
        best = default
    return best, medians[best], medians[default]


class Operands(NamedTuple):
    """Of one product."""

    x: Tensor
    weight: Tensor
    out: Tensor
    beside: tuple[Tensor, Tensor]
    """Partial sums and counters; of a grouped product its pairs."""
    heads: Heads | None = None
    """What the product makes of its output, where that is heads."""
    scales: Tensor | None = None
    """Of a weight of codes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One product of `rows` rows as it is compiled and timed."""

    shape: LinearShape
    config: LinearConfig
    rows: int
    limits: DeviceLimits

    @classmethod
    def of(cls, shape: LinearShape, config: LinearConfig, rows: int, limits: DeviceLimits) -> Trial:
        """With as many stages as `rows` rows leave room for."""
        return cls(shape, fit(config, shape, block_m(rows), limits), rows, limits)

    def operands(self, device: torch.device) -> Operands:
        """Counters are zero, pairs those of rows that choose their experts at random, all else is undefined."""
        shape, rows = self.shape, self.rows
        if shape.experts is not None:
            count, each = shape.experts
            pairs = rows * each
            # Of the first of the two products a row is that of all its pairs.
            x = torch.empty((rows if shape.gated else pairs, shape.k), dtype=shape.dtype, device=device)
            weight = torch.empty((count, shape.sides * shape.n, shape.k), dtype=shape.dtype, device=device)
            out = torch.empty((pairs, shape.n), dtype=shape.dtype, device=device)
            return Operands(x, weight, out, _sorted_pairs(rows, count, each, device))
        features, size, dtype, scales = shape.sides * shape.n, shape.k, shape.dtype, None
        if shape.coding is not None:
            size, dtype = shape.k * shape.bits // 16, torch.int16
            groups = -(-features // shape.coding.outputs), -(-shape.k // shape.coding.group)
            scales = torch.ones(groups, dtype=torch.float32, device=device)
        sizes = scratch_sizes(self.config, rows, n=shape.n, sides=shape.sides)
        return Operands(
            torch.empty((rows, shape.k), dtype=shape.dtype, device=device),
            torch.empty((features, size), dtype=dtype, device=device),
            torch.empty((rows, shape.n if shape.gated else features), dtype=shape.dtype, device=device),
            (
                torch.empty(sizes[0], dtype=torch.float32, device=device),
                torch.zeros(sizes[1], dtype=torch.int32, device=device),
            ),
            _heads(features // shape.head_dim, shape, rows, device) if shape.head_dim else None,
            scales,
        )

    def in_turn(self, device: torch.device) -> list[Operands]:
        """Operands of random numbers and codes; on a GPU of several weights, more than its L2 cache holds: a pass reads
        each once, so one that stays cached would be timed as another."""
        made = self.operands(device)
        made.x.normal_()
        if self.shape.coding is None:
            made.weight.normal_()
        else:
            # Of e4m3 no code is NaN.
            made.weight.random_(-(2**15), 2**15).bitwise_and_(0x7777 if self.shape.coding.kind == "fp8" else -1)
        copies = math.ceil(_COLD_BYTES / made.weight.nbytes) if device.type == "cuda" else 0
        scales = made.scales
        return [made] + [
            made._replace(weight=made.weight.clone(), scales=None if scales is None else scales.clone())
            for _ in range(copies)
        ]

    def launch(self, o: Operands, *, compile_only: bool = False) -> None:
        """The product, dependent where the device can, as passes launch it."""
        dependent, gated = self.limits.capability >= 90, self.shape.gated
        if self.shape.experts is not None:
            flags = [self.shape.experts[1] if gated else 1, int(gated), 0, self.rows]
            grouped_linear.launch(
                o.x, [o.weight], o.beside, o.out, (flags, []), self.config, dependent, compile_only=compile_only
            )
            return
        product = Product(o.weight, gated=gated, heads=o.heads, coding=self.shape.coding, scales=o.scales)
        launch(o.x, product, o.out, None, o.beside, self.config, dependent, compile_only=compile_only)


def _sorted_pairs(rows: int, experts: int, each: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pairs and where each expert's begin, as `grouped_linear` reads them; the same each time."""
    chosen = torch.rand(rows, experts, generator=torch.Generator().manual_seed(0)).topk(each).indices.flatten()
    order = chosen.argsort(stable=True).int()
    ends = torch.bincount(chosen, minlength=experts).cumsum(0)
    starts = torch.nn.functional.pad(ends, (1, 0)).int()
    return order.to(device), starts.to(device)


def _heads(count: int, shape: LinearShape, rows: int, device: torch.device) -> Heads:
    """Of `count` heads a quarter each of k and v, as in many models; what they are hardly changes a time."""
    kv_heads, block_size = max(1, count // 4), 16
    dim, blocks = shape.head_dim, -(-rows // block_size) + 1
    return Heads(
        torch.ones((count - kv_heads, dim), dtype=shape.dtype, device=device),
        [torch.ones((rows, dim // 2), dtype=torch.float32, device=device) for _ in range(2)],
        torch.arange(rows, device=device),
        torch.empty((blocks, 2, kv_heads, block_size, dim), dtype=shape.dtype, device=device),
        count - 2 * kv_heads,
        1e-6,
        (1.0, 1.0),
    )


def compile_trial(trial: Trial) -> None:
    """Compile what `trial` launches, for the GPU that Triton has been told of."""
    trial.launch(trial.operands(torch.device("meta")), compile_only=True)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found for a shape."""

    shape: LinearShape
    config: LinearConfig
    seconds: float
    """inf: no configuration runs."""
    default_seconds: float
    failed: Sequence[tuple[LinearConfig, str]]
    """Candidates that do not compile, and the compilers' errors."""


def trials(shapes: Iterable[LinearShape], rows: int, limits: DeviceLimits) -> list[Trial]:
    """All that is worth timing, shape by shape."""
    found = (Trial.of(shape, config, rows, limits) for shape in shapes for config in candidates(shape, limits))
    return list(dict.fromkeys(found))


def tune(compiled: Iterable[tuple[Trial, str | None]], total: Sequence[Trial], timer: Timer) -> Iterator[Tuned]:
    """What is the fastest of each shape, as soon as all of its trials are `compiled` (see `compile_ahead`); `total` are
    all of them. What did not compile is not timed, nor compiled again."""
    left: dict[LinearShape, list[LinearConfig]] = {}
    for trial in total:
        left.setdefault(trial.shape, []).append(trial.config)
    failed: dict[LinearShape, dict[LinearConfig, str]] = {shape: {} for shape in left}
    missing = {shape: len(configs) for shape, configs in left.items()}

    def timed(shape: LinearShape, config: LinearConfig) -> float:
        return math.inf if config in failed[shape] else timer(shape, config)

    for trial, error in compiled:
        shape = trial.shape
        missing[shape] -= 1
        if error is not None:
            failed[shape][trial.config] = error
        if not missing[shape]:
            yield Tuned(shape, *select(shape, left[shape], timed), list(failed[shape].items()))


class DeviceTimer:
    """Times products of `rows` rows on a CUDA device, in a graph, over weights that no cache holds."""

    _LAUNCHES = 32

    def __init__(self, rows: int, limits: DeviceLimits, device: torch.device) -> None:
        self.rows = rows
        self.limits = limits
        self.device = device

    def __call__(self, shape: LinearShape, config: LinearConfig) -> float:
        """Seconds of one product, launch included as a graph has it."""
        trial = Trial.of(shape, config, self.rows, self.limits)
        operands = trial.in_turn(self.device)
        try:
            trial.launch(operands[0])
        except OutOfResources:
            return math.inf
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(self._LAUNCHES):
                trial.launch(operands[i % len(operands)])
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / self._LAUNCHES


def write_table(path: Path, gpu: str, chosen: Mapping[LinearShape, LinearConfig]) -> None:
    """Put `chosen` into the table at `path` (made if missing); other GPUs and other shapes keep their entries."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    entries = table.setdefault("products", {}).setdefault(gpu, {})
    entries.update({shape.key: dataclasses.asdict(config) for shape, config in chosen.items()})
    made_with = {"torch": torch.__version__, "triton": triton.__version__}
    table.setdefault("made_with", {})[gpu] = made_with
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")
