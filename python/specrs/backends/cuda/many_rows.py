"""Search for the library or kernel that computes each product of 65 to 2,048 rows fastest on this GPU.

No pass uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from specrs.backends.cuda.cublaslt import CublasLt
from specrs.backends.cuda.providers import BUCKETS, CUBLASLT, DEFAULT, OWN, OWN_BUCKETS, Choice
from specrs.kernels.cuda.configs import LinearShape, linear_config
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.cuda.linear_product import DRAFT_ROWS
from specrs.kernels.cuda.tuning import Operands, Trial, graph_seconds

_WORTH = 0.98
"""cuBLASLt replaces cuBLAS only if it takes less than this share of its time. Our kernel replaces both if it takes at
most the inverse: its sums do not depend on the number of rows, and its passes need no kernels for norms."""
_LAUNCHES = 8
"""Number of a product's launches in the graph that is timed. With 2,048 rows one takes up to a millisecond."""
_REPLAYS = 3
_LM_HEAD = 2**16
"""Number of outputs from which on a product is that of an LM head."""
Clock = Callable[[Callable[[int], object]], float]
"""Function that returns the seconds of one of several launches, which its argument enqueues by their index."""
Times = Mapping[Choice, float]
"""Seconds of one product by who computes it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one product with one number of rows."""

    shape: LinearShape
    rows: int
    seconds: Times
    choice: Choice
    """Who should compute it."""

    @property
    def by_provider(self) -> dict[str, float]:
        """Seconds by the name of the provider."""
        return {choice.provider: seconds for choice, seconds in self.seconds.items()}


def choose(seconds: Times) -> Choice:
    """Return who should compute a product: the fastest, but cuBLAS unless cuBLASLt is clearly faster, and our kernel
    unless it is clearly slower."""
    best = min(seconds, key=lambda choice: seconds[choice])
    if best.provider == CUBLASLT and not seconds[best] < _WORTH * seconds[DEFAULT]:
        best = DEFAULT
    own = Choice(OWN)
    return own if own in seconds and _WORTH * seconds[own] <= seconds[best] else best


def measure(
    shapes: Iterable[LinearShape], timer: Callable[[LinearShape, int], Times], buckets: Sequence[int] | None = None
) -> Iterator[Measured]:
    """Yield the times and the choice of every different dense weight in `shapes`, by bucket. `timer` times one. With
    `buckets=None` all of them are measured.

    An LM head is measured up to 128 rows, without cuBLASLt: in passes that are not fused, cuBLAS computes logits.
    """
    for shape in dict.fromkeys(as_dense(shape) for shape in shapes if shape.coding is None and shape.experts is None):
        is_head = shape.n >= _LM_HEAD
        for rows in (rows for rows in buckets or BUCKETS if not is_head or rows in OWN_BUCKETS):
            seconds = timer(shape, rows)
            if is_head:
                seconds = {choice: time for choice, time in seconds.items() if choice.provider != CUBLASLT}
            yield Measured(shape, rows, seconds, choose(seconds))


def as_dense(shape: LinearShape) -> LinearShape:
    """Return the product with the weight of `shape` as passes of many rows compute it, without gates and heads."""
    return replace(shape, n=shape.n * shape.sides, gated=False, head_dim=0)


class ManyRowsTimer:
    """Timer of dense products by each provider, over weights that no cache holds."""

    def __init__(
        self, limits: DeviceLimits, device: torch.device, cublaslt: CublasLt | None, clock: Clock | None = None
    ) -> None:
        """Without `cublaslt` that library is not timed. `clock=None` times a captured graph."""
        self.limits, self.device, self.cublaslt = limits, device, cublaslt
        self.clock = clock or partial(graph_seconds, launches=_LAUNCHES, replays=_REPLAYS)

    def __call__(self, shape: LinearShape, rows: int) -> Times:
        """Return the seconds of the product `shape` of `rows` rows. A provider that does not run, or cannot be
        captured, is left out."""
        trial = Trial.of(shape, linear_config(shape, DRAFT_ROWS, self.limits), min(rows, DRAFT_ROWS), self.limits)
        operands = trial.in_turn(self.device)
        x = torch.randn(rows, shape.k, device=self.device).to(shape.dtype)
        out = torch.empty(rows, shape.n, device=self.device, dtype=shape.dtype)
        found = {DEFAULT: self._seconds(lambda o: torch.mm(x, o.weight.t(), out=out), operands)}
        if self.cublaslt is not None and shape.dtype != torch.float32:
            found |= self._by_cublaslt(x, operands, out)
        if rows in OWN_BUCKETS:
            own = self._seconds(trial.launch, operands)
            found |= {} if own is None else {Choice(OWN): own}
        return {choice: seconds for choice, seconds in found.items() if seconds is not None}

    def _by_cublaslt(self, x: Tensor, operands: list[Operands], out: Tensor) -> dict[Choice, float | None]:
        lt = self.cublaslt
        assert lt is not None
        try:
            choice = lt.autotune(x, operands[0].weight, out)
            if not lt.multiply(x, operands[0].weight, out, choice):
                return {}
            return {choice: self._seconds(lambda o: lt.multiply(x, o.weight, out, choice), operands)}
        except Exception as error:  # of a library that is optional, and of a capture
            torch.cuda.synchronize(self.device)
            print(f"cuBLASLt with {len(x)} rows: {type(error).__name__}: {error}")
            return {}

    def _seconds(self, launch: Callable[[Operands], object], operands: list[Operands]) -> float | None:
        try:
            launch(operands[0])
        except OutOfResources:
            return None
        return self.clock(lambda i: launch(operands[i % len(operands)]))
