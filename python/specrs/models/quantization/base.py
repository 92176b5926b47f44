"""What loaders ask of a checkpoint that holds codes, and what such a checkpoint asks of a format. Reads no file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specrs.arrays import FLOAT32, Array, converted
from specrs.errors import CheckpointError
from specrs.kernels.coding import LEAST_GROUP, Coding
from specrs.models.quantization.grouped import Grouped, Raw
from specrs.models.stored import Codes


class QuantizedTensors(ABC):
    """A checkpoint in which some matrices are codes and scales, under the names of one without."""

    folder: Path
    """What messages call it."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise if what is `required` is not there in its shape, or if something is left over."""

    @abstractmethod
    def is_quantized(self, name: str) -> bool:
        """Whether the file has codes for `name`, so that `mapped` makes its numbers."""

    @abstractmethod
    def mapped(self, name: str) -> Array:
        """Return one tensor: in the file's type where the file holds its numbers, else float32, made each time.

        Raises CheckpointError for scales that no format allows.
        """

    @abstractmethod
    def codes(self, name: str) -> Codes | None:
        """Return the same numbers as the native pass reads them; None where its layouts cannot hold them."""

    @abstractmethod
    def raw(self, name: str) -> Raw | None:
        """Return the codes and scales of a quantized tensor; None where the file's are of another kind."""

    @abstractmethod
    def coded_bits(self, name: str) -> int | None:
        """Return the bits of a weight that a GPU's kernels read as codes, at most; None where it may become numbers.
        Reads no tensor."""

    def read(self, name: str, dtype: np.dtype[Any]) -> Array:
        """Return `mapped` as `dtype`."""
        return converted(self.mapped(name), dtype)


FLOATS = ("F32", "BF16", "F16")
"""Types that scales may have, in safetensors' words."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor of a quantized layer."""

    shapes: tuple[tuple[int, ...], ...]
    """Any of them."""
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True


@dataclass(frozen=True, slots=True)
class Layer:
    """A quantized linear layer of a checkpoint, `[out, in]`, whose tensors are read when they are asked for."""

    name: str
    shape: tuple[int, int]
    folder: Path
    read: Callable[[str], Array]
    """The tensor of the layer with this suffix."""
    has: Callable[[str], bool]

    def scales(self, suffix: str, *, zero: bool = True) -> Array:
        """Return scales as float32. Raises CheckpointError if one is not finite, negative or, unless `zero`, 0."""
        found = converted(self.read(suffix), FLOAT32)
        wrong = ~np.isfinite(found) | ((found < 0) if zero else (found <= 0))
        if wrong.any():
            allowed = "must be finite and at least 0" if zero else "must be finite and greater than 0"
            raise self.refused(suffix, found, wrong, allowed)
        return found

    def refused(self, suffix: str, array: Array, wrong: Array, allowed: str) -> CheckpointError:
        """Return, and do not raise, the exception for the first of the numbers that are `wrong`."""
        at = [int(i) for i in np.argwhere(wrong)[0]]
        value = array[tuple(at)].item()
        return CheckpointError(f"{self.folder}: {self.name}.{suffix}{at or ''}={value:g}: {allowed}")


class LinearFormat(ABC):
    """How the matrix of a linear layer `[out, in]` lies in a checkpoint."""

    @abstractmethod
    def tensors(self, name: str, out: int, size: int) -> dict[str, Expected]:
        """By suffix of the layer's `name`. Raises CheckpointError where the format does not divide the sizes."""

    @abstractmethod
    def numbers(self, layer: Layer) -> Array:
        """Return the matrix, `[out, in]` float32. Raises CheckpointError for scales that are not allowed."""

    def codes(self, layer: Layer) -> Codes | None:
        """See `QuantizedTensors`."""
        return None

    def raw(self, layer: Layer) -> Raw | None:
        """See `QuantizedTensors`."""
        return None

    def coded_bits(self, size: int) -> int | None:
        """See `QuantizedTensors`, of a layer of `size` inputs."""
        return None


class GroupedFormat(LinearFormat):
    """Codes times scales."""

    @abstractmethod
    def raw(self, layer: Layer) -> Grouped:
        """Return the layer's codes and scales. Raises as `numbers`."""

    def numbers(self, layer: Layer) -> Array:
        """See `LinearFormat`."""
        return self.raw(layer).numbers()

    def codes(self, layer: Layer) -> Codes | None:
        """See `LinearFormat`."""
        return self.raw(layer).codes()


@dataclass(frozen=True, slots=True)
class Scheme:
    """What `quantization_config` says: which format each linear layer has."""

    method: str
    format_of: Callable[[str], LinearFormat | None]
    """By the layer's name; None: it is not quantized."""
    unused: tuple[str, ...] = ()
    """Suffixes of tensors that a checkpoint may have besides and that change no weight: scales of activations."""


def groups_of(name: str, field: str, group: int, size: int) -> int:
    """How many groups of `group` inputs `size` has. Raises CheckpointError where it does not divide them."""
    if size % group:
        raise CheckpointError(
            f"config.json: quantization_config.{field}={group}: must divide the {size} inputs of {name}"
        )
    return size // group


def bits_of(kinds: Sequence[str], group: int, size: int) -> int | None:
    """Bits of the first of `kinds` of a `Coding` that holds `size` inputs in groups of `group`, 0 or -1: of all."""
    whole = group <= 0 or group >= size
    fits = (Coding(kind, size if whole else group) for kind in kinds if whole or group % LEAST_GROUP == 0)
    return next((coding.bits for coding in fits if coding.unit(size)), None)


def check_zero_scales(layer: Layer, suffix: str, grouped: Grouped, *, by_group: bool = False) -> Grouped:
    """`grouped`, unless codes other than 0 have a scale of 0: no quantizer writes that. The file's tensor `suffix` is
    `grouped.scales`, or `by_group` its transpose `[groups, out]`; it may lack dimensions of 1."""
    if not (grouped.scales == 0).any():
        return grouped
    lost = (grouped.spread() == 0) & (grouped.values != 0)
    if lost.any():
        groups, size = grouped.scales.shape[1], lost.shape[1]
        group_of = np.arange(size) // (size // groups) if grouped.group_of is None else grouped.group_of
        wrong: Array = np.zeros(grouped.scales.shape, np.bool_)
        for group in range(groups):
            wrong[:, group] = lost[:, group_of == group].any(axis=1)
        found = converted(layer.read(suffix), FLOAT32)
        wrong = wrong.T if by_group else wrong
        wrong = wrong.reshape(found.shape) if wrong.size == found.size else np.full(found.shape, wrong.any())
        raise layer.refused(suffix, found, wrong, "must be greater than 0, because its codes are not all 0")
    return grouped
