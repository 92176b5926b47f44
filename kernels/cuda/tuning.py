"""Finds the fastest configuration of each product on this GPU: candidates, compiled ahead and timed, and the table of
results. No pass uses it."""

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
from specrs.kernels.cuda._codes import scales_dtype
from specrs.kernels.cuda._heads import Heads
from specrs.kernels.cuda.configs import LinearConfig, LinearShape, default_config, fit
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.cuda.linear_product import Product, block_m, scratch_sizes
from specrs.kernels.cuda.skinny_linear import launch
from torch import Tensor
from triton.runtime.errors import OutOfResources

Timer = Callable[[LinearShape, LinearConfig], float]
"""Function that returns the seconds of one product; inf if the device cannot run the configuration."""
_LAUNCHES = 32
"""Number of a product's launches in the graph that is timed."""
_FINALISTS = 6
_ROUNDS = 5
_COLD_BYTES = 512 * 2**20
"""Bytes of weight copies that take turns. They exceed any L2 cache, so every product reads memory."""
_WORTH = 0.98
"""A configuration replaces the default only if it takes less than this share of the default's time."""


def candidates(shape: LinearShape, limits: DeviceLimits) -> list[LinearConfig]:
    """Return the configurations worth timing, the default first. Each fits the device with 16 columns."""
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
    """Return `(the best of configs, its seconds, the seconds of the first)`. The first is the default, and wins if the
    times are close.

    Everything is timed once. Then the fastest few and the default are timed again in turn, so that a drifting clock
    affects all of them. Medians decide.
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
    """Tensors of one product."""

    x: Tensor
    weight: Tensor
    out: Tensor
    beside: tuple[Tensor, Tensor]
    """Partial sums and counters of a product; for a grouped product, its pairs and their starts."""
    heads: Heads | None = None
    """Arguments for attention heads (norms, rotation, KV cache), if the product's outputs are heads."""
    scales: Tensor | None = None
    """Scales of a quantized weight; None if it is dense."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One product of `rows` rows that is compiled and timed."""

    shape: LinearShape
    config: LinearConfig
    rows: int
    limits: DeviceLimits

    @classmethod
    def of(cls, shape: LinearShape, config: LinearConfig, rows: int, limits: DeviceLimits) -> Trial:
        """Return a trial of `config` with as many stages as fit with `rows` rows."""
        return cls(shape, fit(config, shape, block_m(rows), limits), rows, limits)

    def operands(self, device: torch.device) -> Operands:
        """Allocate the operands. Counters are zero, and pairs are those of rows that choose their experts at random;
        everything else is undefined."""
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
            coding = shape.coding
            groups = -(-features // coding.outputs), -(-shape.k // coding.block) * coding.words
            scales = torch.ones(groups, dtype=scales_dtype(coding), device=device)
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
        """Return operands of random numbers and codes. On a GPU there are several weights, together larger than its L2
        cache. A pass reads each weight once, so a weight that stays cached would give a wrong time."""
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
        """Launch the product as passes do: as a dependent launch, if the device supports that."""
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
    """Return pairs and the starts of each expert's pairs, as `grouped_linear` reads them; the same each time."""
    chosen = torch.rand(rows, experts, generator=torch.Generator().manual_seed(0)).topk(each).indices.flatten()
    order = chosen.argsort(stable=True).int()
    ends = torch.bincount(chosen, minlength=experts).cumsum(0)
    starts = torch.nn.functional.pad(ends, (1, 0)).int()
    return order.to(device), starts.to(device)


def _heads(count: int, shape: LinearShape, rows: int, device: torch.device) -> Heads:
    """Return `Heads` for `count` heads, a quarter of them k and a quarter v, as in many models. The shares hardly
    change a time."""
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
    """Compile the kernels that `trial` launches, for the GPU that Triton was told to compile for."""
    trial.launch(trial.operands(torch.device("meta")), compile_only=True)


@dataclass(frozen=True, slots=True)
class Tuned:
    """Result of tuning one shape."""

    shape: LinearShape
    config: LinearConfig
    seconds: float
    """Seconds of the best configuration; inf if none runs."""
    default_seconds: float
    failed: Sequence[tuple[LinearConfig, str]]
    """Candidates that do not compile, with the compilers' errors."""


def trials(shapes: Iterable[LinearShape], rows: int, limits: DeviceLimits) -> list[Trial]:
    """Return everything worth timing, shape by shape."""
    found = (Trial.of(shape, config, rows, limits) for shape in shapes for config in candidates(shape, limits))
    return list(dict.fromkeys(found))


def tune(compiled: Iterable[tuple[Trial, str | None]], total: Sequence[Trial], timer: Timer) -> Iterator[Tuned]:
    """Yield the fastest configuration of each shape, as soon as all of its trials are in `compiled` (see
    `compile_ahead`). `total` has all trials. A trial that did not compile is not timed, nor compiled again."""
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
    """Timer of products of `rows` rows on a CUDA device, in a graph, over weights that no cache holds."""

    def __init__(self, rows: int, limits: DeviceLimits, device: torch.device) -> None:
        self.rows = rows
        self.limits = limits
        self.device = device

    def __call__(self, shape: LinearShape, config: LinearConfig) -> float:
        """Return the seconds of one product, with its launch from a graph."""
        trial = Trial.of(shape, config, self.rows, self.limits)
        operands = trial.in_turn(self.device)
        try:
            trial.launch(operands[0])
        except OutOfResources:
            return math.inf
        return graph_seconds(lambda i: trial.launch(operands[i % len(operands)]), _LAUNCHES)


def graph_seconds(launch: Callable[[int], object], launches: int, replays: int = 1) -> float:
    """Return the seconds of one of a graph's `launches`, which `launch` enqueues by their index: the median of
    `replays`. The kernels must have run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    graph.replay()
    times = []
    for _ in range(replays):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e-3 / launches)
    return statistics.median(times)


def write_table(path: Path, gpu: str, chosen: Mapping[LinearShape, LinearConfig]) -> None:
    """Add `chosen` to the table at `path`, which is created if it is missing. Other GPUs and other shapes keep their
    entries."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    entries = table.setdefault("products", {}).setdefault(gpu, {})
    entries.update({shape.key: dataclasses.asdict(config) for shape, config in chosen.items()})
    made_with = {"torch": torch.__version__, "triton": triton.__version__}
    table.setdefault("made_with", {})[gpu] = made_with
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")
