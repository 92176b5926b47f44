"""Tensors of a checkpoint as torch tensors on any device, and random ones for dummy weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specrs.arrays import Array
from specrs.models.config import ModelConfig
from specrs.models.dummy import STD, DummyCheckpoint, is_norm
from specrs.models.shards import Cuts, Shard, ShardedTensors
from specrs.models.tensors import Readable, Tensors
from specrs.models.torch_arrays import TORCH_DTYPES, to_numpy, to_torch

CPU = torch.device("cpu")


class TorchTensors(Readable, Protocol):
    """Source of tensors for a torch model."""

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the tensor `name` as `dtype` on `device`."""


def torch_tensors(tensors: Tensors, config: ModelConfig, shard: Shard | None) -> TorchTensors:
    """Return the tensors of a checkpoint of `config`, each cut to the part of `shard`. None: whole tensors."""
    if isinstance(tensors, DummyCheckpoint):
        return TorchDummy(config, shard)
    return TorchArrays(tensors if shard is None else ShardedTensors(tensors, config, shard))


class TorchArrays:
    """Tensors of a checkpoint in host memory. Each is copied to a device when it is asked for."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    @property
    def folder(self) -> Path | str:
        """Name of the checkpoint in messages."""
        return self._tensors.folder

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError if a `required` tensor is missing or has another shape, or if one is neither required
        nor `optional`."""
        self._tensors.check(required, optional)

    def read(self, name: str, dtype: np.dtype[Any]) -> Array:
        """Return the tensor `name` as `dtype` in host memory."""
        return self._tensors.read(name, dtype)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the tensor `name` as `dtype` on `device`. On a CPU it may share memory with the mapped file."""
        return to_torch(self._tensors.mapped(name)).to(device=device, dtype=dtype)


class TorchDummy(DummyCheckpoint):
    """Random tensors, drawn on the device that asks for them, because drawing them on the host would take minutes."""

    def __init__(self, config: ModelConfig, shard: Shard | None) -> None:
        super().__init__(config)
        self._cuts = None if shard is None else Cuts(config, shard)
        self._generators: dict[torch.device, torch.Generator] = {}

    def mapped(self, name: str) -> Array:
        """Return this rank's part of the tensor `name` in float32 on the host."""
        return to_numpy(self.tensor(name, torch.float32, CPU))

    def read(self, name: str, dtype: np.dtype[Any]) -> Array:
        """Return this rank's part of the tensor `name` as `dtype` on the host."""
        return to_numpy(self.tensor(name, TORCH_DTYPES[dtype], CPU))

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return this rank's part of the tensor `name`. Values depend on the order of calls, and are the same for the
        same order."""
        whole = self.drawn(name, dtype, device)
        cut = None if self._cuts is None else self._cuts.of(name, tuple(whole.shape))
        if cut is None:
            return whole
        parts = [whole[place] for place in cut.slices]
        if cut.zero_rows:
            parts.append(whole.new_zeros((cut.zero_rows, *whole.shape[1:])))
        return torch.cat(parts, cut.axis)

    def drawn(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the whole tensor `name`."""
        shape = self.shapes[name]
        if is_norm(name):
            return torch.ones(shape, dtype=dtype, device=device)
        generator = self._generators.setdefault(device, torch.Generator(device).manual_seed(0))
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, STD, generator=generator)
