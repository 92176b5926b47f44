"""Weights of random numbers, for measuring speed where a model's own are not at hand. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specrs.arrays import FLOAT32, Array, converted
from specrs.models.config import ModelConfig
from specrs.models.tensors import tensor_shapes

STD = 0.02
"""Standard deviation of the weights, as models are initialised: activations of any number of layers stay finite."""


class DummyCheckpoint:
    """Stands in for a `Checkpoint` of a configuration; norms are 1, all else is drawn."""

    folder = "dummy weights"

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = tensor_shapes(config)
        """Of every tensor, by name."""
        self._generator = np.random.default_rng(0)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Nothing can be missing."""

    def read(self, name: str, dtype: np.dtype[Any]) -> Array:
        """Return `mapped` as `dtype`."""
        return converted(self.mapped(name), dtype)

    def mapped(self, name: str) -> Array:
        """Return a tensor of the right shape in float32, the same for the same order of calls."""
        shape = self.shapes[name]
        if is_norm(name):
            return np.ones(shape, FLOAT32)
        drawn = self._generator.standard_normal(shape, dtype=np.float32)
        drawn *= np.float32(STD)
        return drawn


def is_norm(name: str) -> bool:
    """Whether a tensor is the weights of a norm, which are 1."""
    return name.endswith("norm.weight")
