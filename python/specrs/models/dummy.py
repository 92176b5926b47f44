"""Weights of random numbers, for measuring speed where a model's own are not at hand. Reads no file."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specrs.models.config import ModelConfig
from specrs.models.tensors import tensor_shapes

_STD = 0.02
"""Of the weights, as models are initialised: activations stay finite through any number of layers."""


class DummyCheckpoint:
    """Stands in for a `Checkpoint` of a configuration; norms are 1, all else is drawn on the device itself."""

    folder = "dummy weights"

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = tensor_shapes(config)
        self._generators: dict[torch.device, torch.Generator] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Nothing can be missing."""

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of the right shape, the same for the same order of calls."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        generator = self._generators.setdefault(device, torch.Generator(device).manual_seed(0))
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _STD, generator=generator)

    def mapped(self, name: str) -> Tensor:
        """A tensor in fp32, in the same order of calls the same as from `read`."""
        return self.read(name, torch.float32, torch.device("cpu"))
