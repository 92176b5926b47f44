"""Interfaces of quantized checkpoints for loaders, and of quantization formats for checkpoints. Reads no file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specrs.arrays import FLOAT32, Array, converted
from specrs.core import PackedMatrix
from specrs.errors import CheckpointError
from specrs.kernels.coding import LEAST_GROUP, Coding
from specrs.models.quantization.grouped import Grouped, Raw, WithMinima


class QuantizedTensors(ABC):
    """A checkpoint in which some matrices are quantized. It has the tensor names of an unquantized one."""

    folder: Path
    """Name of the checkpoint in messages."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError if a `required` tensor is missing or has another shape, or if one is neither required
        nor `optional`."""

    @abstractmethod
    def is_quantized(self, name: str) -> bool:
        """Return whether the tensor `name` is quantized, so that `mapped` has to dequantize it."""

    @abstractmethod
    def mapped(self, name: str) -> Array:
        """Return the tensor `name`: an unquantized one in the file's dtype, a quantized one dequantized to float32 in
        each call.

        Raises CheckpointError for scales that the format does not allow.
        """

    @abstractmethod
    def packed(self, name: str) -> PackedMatrix | None:
        """Return the quantized matrix `name` packed for native CPU passes. None if no packed layout holds it
        exactly."""

    @abstractmethod
    def raw(self, name: str) -> Raw | None:
        """Return the codes and scales of a quantized tensor. None if no class of `Raw` can hold them."""

    @abstractmethod
    def coding(self, name: str) -> Coding | None:
        """Return the layout in which GPU kernels read a quantized matrix. None: they may have to read it dequantized.

        Reads no tensor data, on which it depends whether INT4 codes have zero points, and whether scales leave room
        for these.
        """

    def super_blocks(self, name: str) -> WithMinima | None:
        """Return a quantized matrix as super-blocks, whose minima may be 0. None if the checkpoint does not store it in
        such blocks."""
        return None

    def super_group(self, name: str) -> int | None:
        """Return the number of inputs of a group of `super_blocks`. None if that returns None. Reads no tensor
        data."""
        return None

    def packed_bits(self, name: str) -> float:
        """Return the bits per weight that a quantized matrix takes at least once it is packed for native CPU passes.
        Reads no tensor data."""
        coding = self.coding(name)
        return 4 if coding is None else coding.bits

    def read(self, name: str, dtype: np.dtype[Any]) -> Array:
        """Return the tensor `name` converted to `dtype`; a quantized one is dequantized first."""
        return converted(self.mapped(name), dtype)


FLOATS = ("F32", "BF16", "F16")
"""Safetensors' names of the dtypes that scales may have."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Allowed shapes and dtypes of a tensor of a quantized layer."""

    shapes: tuple[tuple[int, ...], ...]
    """Allowed shapes."""
    dtypes: tuple[str, ...] = FLOATS
    """Allowed dtypes, by safetensors' names."""
    required: bool = True
    """False if the tensor may be missing."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A quantized linear layer `[out, in]` of a checkpoint. Its tensors are read when they are asked for."""

    name: str
    shape: tuple[int, int]
    """Number of outputs and of inputs."""
    folder: Path
    read: Callable[[str], Array]
    """Returns the layer's tensor with a given suffix."""
    has: Callable[[str], bool]
    """Returns whether the layer has a tensor with a given suffix."""

    def scales(self, suffix: str, *, zero: bool = True) -> Array:
        """Return the scales with `suffix` as float32. Raises CheckpointError if one is not finite, negative or, unless
        `zero`, 0."""
        found = converted(self.read(suffix), FLOAT32)
        wrong = ~np.isfinite(found) | ((found < 0) if zero else (found <= 0))
        if wrong.any():
            allowed = "must be finite and at least 0" if zero else "must be finite and greater than 0"
            raise self.refused(suffix, found, wrong, allowed)
        return found

    def refused(self, suffix: str, array: Array, wrong: Array, allowed: str) -> CheckpointError:
        """Return the exception for the first number of the layer's tensor `array` whose flag in `wrong` is set.
        `suffix` is the end of the tensor's name, `allowed` says what numbers it may have."""
        at = [int(i) for i in np.argwhere(wrong)[0]]
        value = array[tuple(at)].item()
        return CheckpointError(f"{self.folder}: {self.name}.{suffix}{at or ''}={value:g}: {allowed}")


class LinearFormat(ABC):
    """Format of the matrix `[out, in]` of a linear layer in a checkpoint."""

    def of_layer(self, has: Callable[[str], bool]) -> LinearFormat:
        """Return the format of a layer, where `has` says whether the layer has a tensor with a given suffix. Only the
        names of its tensors may depend on that."""
        return self

    @abstractmethod
    def tensors(self, name: str, out: int, size: int) -> dict[str, Expected]:
        """Return the tensors that a layer of `out` outputs and `size` inputs must have, by suffix of its `name`. Raises
        CheckpointError if the format's groups or words do not divide these sizes."""

    @abstractmethod
    def numbers(self, layer: Layer) -> Array:
        """Return the dequantized matrix, `[out, in]` float32. Raises CheckpointError for scales that are not
        allowed."""

    def packed(self, layer: Layer) -> PackedMatrix | None:
        """Return the layer packed for native CPU passes. None if no packed layout holds it exactly."""
        return None

    def raw(self, layer: Layer) -> Raw | None:
        """Return the layer's codes and scales. None if no class of `Raw` can hold them."""
        return None

    def coding(self, size: int) -> Coding | None:
        """Return the layout in which GPU kernels read a layer of `size` inputs. None: they may have to read it
        dequantized."""
        return None


class GroupedFormat(LinearFormat):
    """Format of integer codes times scales."""

    @abstractmethod
    def raw(self, layer: Layer) -> Grouped:
        """Return the layer's codes less zero points, and its scales. Raises CheckpointError for scales that are not
        allowed."""

    def numbers(self, layer: Layer) -> Array:
        """Return the dequantized matrix, `[out, in]` float32. Raises CheckpointError for scales that are not
        allowed."""
        return self.raw(layer).numbers()

    def packed(self, layer: Layer) -> PackedMatrix | None:
        """Return the layer packed for native CPU passes. None if no packed layout holds it exactly."""
        return self.raw(layer).packed()


@dataclass(frozen=True, slots=True)
class Scheme:
    """Content of a `quantization_config`: the format of each linear layer."""

    method: str
    """Name of the method, as `quant_method` has it."""
    format_of: Callable[[str], LinearFormat | None]
    """Returns the format of the layer with a given name. None: the layer is not quantized."""
    unused: tuple[str, ...] = ()
    """Suffixes of further tensors that a checkpoint may have, and that change no weight: scales of activations, for
    example."""


def groups_of(name: str, field: str, group: int, size: int) -> int:
    """Return the number of groups of `group` inputs among `size` inputs. Raises CheckpointError if `group` does not
    divide `size`."""
    if size % group:
        raise CheckpointError(
            f"config.json: quantization_config.{field}={group}: must divide the {size} inputs of {name}"
        )
    return size // group


def coding_of(kinds: Sequence[str], group: int, size: int, outputs: int = 1) -> Coding | None:
    """Return the `Coding` of the first of `kinds` that can hold `size` inputs in groups of `group`. None if none can.

    With `group` 0 or -1, all inputs of an output share a scale. `outputs` is the number of outputs that share one.
    """
    whole = group <= 0 or group >= size
    fits = (Coding(kind, size if whole else group, outputs) for kind in kinds if whole or group % LEAST_GROUP == 0)
    return next((coding for coding in fits if coding.unit(size)), None)


def check_zero_scales(layer: Layer, suffix: str, grouped: Grouped, *, by_group: bool = False) -> Grouped:
    """Return `grouped`. Raises CheckpointError if codes other than 0 have a scale of 0, which no quantizer writes.

    The file's tensor `suffix` is `grouped.scales`, or with `by_group` its transpose `[groups, out]`. It may lack
    dimensions of 1.
    """
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
