"""Random weights, for measuring speed without a model's files. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specrs.arrays import FLOAT32, Array, converted
from specrs.models.config import ModelConfig
from specrs.models.tensors import EXPERT_SCALES, ROUTER_SCALE, tensor_shapes

STD = 0.02
"""Standard deviation of the random weights. Activations stay finite through any number of layers."""
_ONES = ("norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar", ROUTER_SCALE, EXPERT_SCALES)
"""Endings of the names of norms and of factors, which are 1 in fresh models."""


class DummyCheckpoint:
    """Stand-in for a `Checkpoint` of a configuration. Norms are 1, all other tensors are random."""

    folder = "dummy weights"

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = tensor_shapes(config)
        """Shape of every tensor, by name."""
        self._generator = np.random.default_rng(0)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Do nothing: a dummy has every tensor."""

    def read(self, name: str, dtype: np.dtype[Any]) -> Array:
        """Return the tensor `name` as `dtype`: 1 for norms, random otherwise."""
        return converted(self.mapped(name), dtype)

    def mapped(self, name: str) -> Array:
        """Return the tensor `name` in float32. Values depend on the order of calls, and are the same for the same
        order."""
        shape = self.shapes[name]
        if is_norm(name):
            return np.ones(shape, FLOAT32)
        drawn = self._generator.standard_normal(shape, dtype=np.float32)
        drawn *= np.float32(STD)
        return drawn


def is_norm(name: str) -> bool:
    """Return whether a tensor holds the weights of a norm, or factors, which are 1 in fresh models too."""
    return name.endswith(_ONES)
