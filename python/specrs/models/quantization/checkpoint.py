"""A folder of safetensors with codes, under the names of one without. Knows no format."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specrs.arrays import Array
from specrs.errors import CheckpointError
from specrs.models.checkpoint import DTYPES, Checkpoint, check_tensors
from specrs.models.quantization.base import Expected, Layer, LinearFormat, QuantizedTensors, Scheme
from specrs.models.quantization.grouped import Raw
from specrs.models.stored import Codes
from specrs.models.tensors import EMBEDDING


class QuantizedCheckpoint(QuantizedTensors):
    """The tensors of a folder whose config.json has a `quantization_config`."""

    def __init__(self, files: Checkpoint, scheme: Scheme) -> None:
        self.folder = files.folder
        self._files = files
        self._scheme = scheme
        self._layers: dict[str, tuple[LinearFormat, tuple[int, int]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._layers or name in self._files

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """See `QuantizedTensors`; every tensor of every format is checked, none is left over."""
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
        self._files.placement.check(self.folder, (*plain, *layers, *optional))
        check_tensors(self.folder, rest | present, plain | missing, {**optional, **present}, (*self._files.unlisted,))
        for name, (shape, dtype) in found.items():
            expected = layers.get(name)
            if expected is None:
                if name in plain and dtype not in DTYPES:
                    raise CheckpointError(f"{self.folder}: {name} is {dtype}, allowed are {', '.join(DTYPES)}")
            elif shape not in expected.shapes:
                allowed = " or ".join(map(str, expected.shapes))
                raise CheckpointError(
                    f"{self.folder}: {name} has shape {shape}, quantization_config makes it {allowed}"
                )
            elif dtype not in expected.dtypes:
                allowed = ", ".join(expected.dtypes)
                raise CheckpointError(f"{self.folder}: {name} is {dtype}, quantization_config makes it {allowed}")

    def is_quantized(self, name: str) -> bool:
        """See `QuantizedTensors`; like what follows."""
        return name in self._layers

    def mapped(self, name: str) -> Array:
        """See `QuantizedTensors`."""
        if name not in self._layers:
            return self._files.mapped(name)
        form, shape = self._layers[name]
        made = form.numbers(self._layer(name, shape))
        finite = np.isfinite(made)
        if not finite.all():
            raise self._layer(name, shape).refused("weight", made, ~finite, "weights must be finite")
        return made

    def codes(self, name: str) -> Codes | None:
        """See `QuantizedTensors`."""
        form, shape = self._layers[name]
        return form.codes(self._layer(name, shape))

    def raw(self, name: str) -> Raw | None:
        """See `QuantizedTensors`."""
        form, shape = self._layers[name]
        return form.raw(self._layer(name, shape))

    def coded_bits(self, name: str) -> int | None:
        """See `QuantizedTensors`."""
        form, (_, size) = self._layers[name]
        return form.coded_bits(size)

    def _format(self, name: str, shape: tuple[int, ...]) -> LinearFormat | None:
        if len(shape) != 2 or name == EMBEDDING:
            return None
        return self._scheme.format_of(name.removesuffix(".weight"))

    def _unused(self, name: str) -> bool:
        if name.endswith(self._scheme.unused):
            return True
        # some quantizers write the bias that a layer does not have
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
