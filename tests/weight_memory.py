"""Memory that loaded weights take, for tests. Holds no tests."""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any

import pytest
import torch
from specrs.backends.cuda.fit import check_weights_fit
from specrs.config import EngineConfig
from specrs.errors import InvalidConfigError
from specrs.parallel.ranks import Ranks


class _Storages(pickle.Pickler):
    """Pickler that writes nothing of tensors and notes their memory, by its address."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, torch.Tensor):
            return None
        storage = obj.untyped_storage()
        if storage.nbytes():
            self.found[storage.data_ptr()] = storage.nbytes()
        return "tensor"


def memory_of(weights: object) -> int:
    """Return the bytes of all tensors that `weights` refers to. Memory that several share counts once."""
    storages = _Storages()
    storages.dump(weights)
    return sum(storages.found.values())


def assert_needed(
    config: EngineConfig, needed: int, monkeypatch: pytest.MonkeyPatch, *, ranks: Ranks | None = None, match: str = ""
) -> None:
    """Check that models fit in `needed` bytes of free memory, and that they do not fit in one byte less. `match` is a
    pattern for the message."""
    for free in (needed, needed - 1):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: (free, 2 * free))
        rejected = pytest.raises(InvalidConfigError, match=rf"^model=.*{match}.*too little")
        with rejected if free < needed else contextlib.nullcontext():
            check_weights_fit(config, "cuda:0", ranks)
