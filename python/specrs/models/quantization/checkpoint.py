"""Folder of safetensors with quantized matrices, under the tensor names of an unquantized model. Knows no format."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specrs.arrays import Array
from specrs.core import PackedMatrix
from specrs.errors import CheckpointError
from specrs.kernels.coding import Coding
from specrs.models.checkpoint import DTYPES, Checkpoint, check_tensors
from specrs.models.quantization.base import Expected, Layer, LinearFormat, QuantizedTensors, Scheme
from specrs.models.quantization.grouped import Raw
from specrs.models.tensors import EMBEDDING


class QuantizedCheckpoint(QuantizedTensors):
    """Tensors of a folder whose config.json has a `quantization_config`."""

    def __init__(self, files: Checkpoint, scheme: Scheme) -> None:
        self.folder = files.folder
        self._files = files
        self._scheme = scheme
        self._modules = files.modules
        self._layers: dict[str, tuple[LinearFormat, tuple[int, int]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._layers or name in self._files

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Check every tensor of every quantized layer, and all others: names, shapes and dtypes. Remembers the
        quantized layers, which other methods need. Raises CheckpointError, also for tensors that are left over."""
        found = self._files.entries()
        plain, layers = dict(required), dict[str, Expected]()
        for name, shape in {**required, **optional}.items():
            form = self._format(name, shape)
            if form is None:
                continue
            out, size = shape
            of = form.tensors(name.removesuffix(".weight"), out, size)
            own = {name.removesuffix("weight") + suffix: expected for suffix, expected in of.items()}
            if name in optional and not own.keys() & found.keys():
                continue
            plain.pop(name, None)
            layers |= own
            self._layers[name] = form, (out, size)
        rest = {name: shape for name, (shape, _) in found.items() if name not in layers and not self._unused(name)}
        missing = {name: expected.shapes[0] for name, expected in layers.items() if expected.required}
        present = {name: expected.shapes[0] for name, expected in layers.items() if name in found}
        self._files.check_placement((*plain, *layers, *optional))
        check_tensors(self.folder, rest | present, plain | missing, {**optional, **present}, (*self._files.unlisted,))
        for name, (shape, dtype) in found.items():
            expected = layers.get(name)
            if expected is None:
                if name in plain and dtype not in DTYPES:
                    raise CheckpointError(f"{self.folder}: {name} is {dtype}; must be one of {', '.join(DTYPES)}")
            elif shape not in expected.shapes:
                allowed = " or ".join(map(str, expected.shapes))
                raise CheckpointError(
                    f"{self.folder}: {name} has shape {shape}, quantization_config makes it {allowed}"
                )
            elif dtype not in expected.dtypes:
                allowed = ", ".join(expected.dtypes)
                raise CheckpointError(f"{self.folder}: {name} is {dtype}, quantization_config makes it {allowed}")

    def is_quantized(self, name: str) -> bool:
        """Return whether the matrix `name` is quantized."""
        return name in self._layers

    def mapped(self, name: str) -> Array:
        """Return the tensor `name`: an unquantized one in the file's dtype, a quantized one dequantized to float32.
        Raises CheckpointError for scales that are not allowed and weights that are not finite."""
        if name not in self._layers:
            return self._files.mapped(name)
        form, shape = self._layers[name]
        made = form.numbers(self._layer(name, shape))
        finite = np.isfinite(made)
        if not finite.all():
            raise self._layer(name, shape).refused("weight", made, ~finite, "weights must be finite")
        return made

    def packed(self, name: str) -> PackedMatrix | None:
        """Return a quantized matrix packed for native CPU passes. None if no packed layout holds it exactly."""
        form, shape = self._layers[name]
        return form.packed(self._layer(name, shape))

    def raw(self, name: str) -> Raw | None:
        """Return the codes and scales of a quantized matrix. None if no class of `Raw` can hold them."""
        form, shape = self._layers[name]
        return form.raw(self._layer(name, shape))

    def coding(self, name: str) -> Coding | None:
        """Return the layout in which GPU kernels read a quantized matrix. None: they may have to read it dequantized.
        Reads no tensor data."""
        form, (_, size) = self._layers[name]
        return form.coding(size)

    def _format(self, name: str, shape: tuple[int, ...]) -> LinearFormat | None:
        if len(shape) != 2 or name == EMBEDDING:
            return None
        module = name.removesuffix(".weight")
        form = self._scheme.format_of(self._modules.get(module, module))
        return None if form is None else form.of_layer(lambda suffix: f"{module}.{suffix}" in self._files)

    def _unused(self, name: str) -> bool:
        if name.endswith(self._scheme.unused):
            return True
        # Some quantizers write a bias of zeros for layers without bias.
        layer = name.removesuffix(".bias") + ".weight"
        return name.endswith(".bias") and layer in self._layers and not bool(self._files.mapped(name).any())

    def _layer(self, name: str, shape: tuple[int, int]) -> Layer:
        stem = name.removesuffix("weight")
        return Layer(
            stem.removesuffix("."),
            shape,
            self.folder,
            lambda suffix: self._files.mapped(stem + suffix),
            lambda suffix: stem + suffix in self._files,
        )
