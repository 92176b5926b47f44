"""Drafters in which some passes raise. Holds no tests."""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from native_calls import NativeCalls
from numpy.typing import NDArray
from specrs.backends.cpu.runner import CpuRunner
from specrs.drafters.cpu import CpuDrafter

Raises = Callable[[int], bool]
"""Function that returns whether the drafter's pass of this number raises."""


class BrokenError(Exception):
    """Error that faulty drafters raise here."""


class Faulty:
    """Makes some passes of drafters raise, in engines that are created afterwards."""

    def __init__(self, raises: Raises, patch: pytest.MonkeyPatch, here: Callable[[], bool] = lambda: True) -> None:
        """Make passes raise as `raises` says, in threads where `here()` is true. Passes are numbered from 1 in each
        thread."""
        self.raised = 0
        self._raises, self._here = raises, here
        self._count = threading.local()  # where ranks are threads, each has a drafter
        source = CpuRunner._draft_source

        def broken(runner: CpuRunner, drafter: CpuDrafter) -> Any:
            model = source(runner, drafter)
            if isinstance(model, tuple):
                model = NativeCalls(drafter.model, drafter.kv_cache, runner.target.vocab_size)
            return FaultyPasses(model, drafter.kv_cache, self._end)

        patch.setattr(CpuRunner, "_draft_source", broken)

    def _end(self) -> None:
        self._count.calls = getattr(self._count, "calls", 0) + 1
        if self._here() and self._raises(self._count.calls):
            self.raised += 1
            raise BrokenError(self._count.calls)


class FaultyPasses:
    """A `CallableModel` whose passes may raise, after they have written NaN where they should have written KV."""

    def __init__(self, model: Any, kv_cache: Any, end: Callable[[], None]) -> None:
        """Wrap `model`. `end` is called at the end of each pass, and may raise."""
        self._model, self._kv_cache, self._end = model, kv_cache, end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, inputs: dict[str, Any], *args: Any) -> Any:
        """Run the model's pass."""
        slots = inputs["slots"]
        found = self._model.forward(inputs, *args)
        try:
            self._end()
        except BrokenError:
            _spoil(self._kv_cache, slots)
            raise
        return found

    def fuse(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Run the head's combination of hidden states. Counts as a pass."""
        fused: NDArray[np.float32] = self._model.fuse(states)
        self._end()
        return fused


def _spoil(cache: Any, slots: NDArray[np.int64]) -> None:
    slots = slots[slots >= 0]
    for layer in (*cache.k, *cache.v):
        layer[slots // cache.block_size, :, slots % cache.block_size] = math.nan
