"""Drafters some of whose passes raise. Holds no tests."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from specrs.engine.engine import Engine
from specrs.models.inputs import PassInputs
from torch import Tensor

Raises = Callable[[int], bool]
"""Whether the drafter's pass of this number raises."""


class BrokenError(Exception):
    """What drafters raise here."""


class _Count(threading.local):
    """A thread's own: where ranks are threads, each has a drafter."""

    calls = depth = 0


class Faulty:
    """The passes of an engine's drafter, some of which raise when they have written NaN where they were to write KV."""

    def __init__(
        self, engine: Engine, raises: Raises, patch: pytest.MonkeyPatch, here: Callable[[], bool] = lambda: True
    ) -> None:
        """Those that `raises` says, in threads of which `here` is true."""
        self.engine, self.raises, self.here = engine, raises, here
        self.raised = 0
        self._count = _Count()
        kind = type(engine.drafter)
        for name in ("feed", "propose", "propose_all", "step"):
            if hasattr(kind, name):
                patch.setattr(kind, name, self._broken(getattr(kind, name)))

    def _broken(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(drafter: Any, inputs: PassInputs | Tensor, *args: Any, **fields: Any) -> Any:
            count = self._count
            count.depth += 1
            try:
                found = method(drafter, inputs, *args, **fields)
            finally:
                count.depth -= 1
            if count.depth:  # `propose` of a draft model is made of `feed`
                return found
            count.calls += 1
            if self.here() and self.raises(count.calls):
                self.raised += 1
                if isinstance(inputs, PassInputs):
                    _spoil(drafter.kv_cache, inputs.slots)
                raise BrokenError(count.calls)
            return found

        return call


def _spoil(cache: Any, slots: Tensor) -> None:
    slots = slots[slots >= 0]
    for tensor in (*cache.k, *cache.v):
        tensor[slots // cache.block_size, :, slots % cache.block_size] = torch.nan
