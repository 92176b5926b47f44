"""Bytes of the weights that the loader keeps on a GPU, from a model's configuration and the layouts of its matrices.
Reads no tensor and allocates no memory of the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace

import torch
from torch import Tensor

from specrs.backends.cuda.loader import QuantizedLoader
from specrs.kernels.coding import Coding
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.config import ModelConfig
from specrs.models.shards import Shard
from specrs.models.torch_loader import Loader
from specrs.models.torch_tensors import TorchDummy
from specrs.models.torch_weights import TorchLayer, TorchWeights

META = torch.device("meta")
"""Device of tensors that have shapes, but no memory."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts in which a GPU holds the quantized matrices of a checkpoint, by tensor name."""

    codings: Mapping[str, Coding] = field(default_factory=dict)
    """Layout of each matrix that can stay quantized."""
    super_groups: Mapping[str, int] = field(default_factory=dict)
    """Number of inputs of a group, for each matrix that can be read as super-blocks."""


def weight_bytes(config: ModelConfig, layouts: Layouts, dtype: torch.dtype, shard: Shard | None = None) -> int:
    """Return the bytes of all weights that the loader keeps of a model, or of the part `shard` of it.

    The loader itself runs, on tensors without memory. So matrices that are stacked have one layout or are dequantized,
    as when the model is loaded. `config` is that of the whole model.
    """
    weights = _Sizes(config, layouts, dtype, shard).load()
    # Equal layers are one object here, and each has memory of its own once it is loaded.
    return held_bytes(replace(weights, layers=())) + sum(map(held_bytes, weights.layers))


def held_bytes(weights: TorchWeights | TorchLayer) -> int:
    """Return the bytes of all tensors of a model or a layer. Memory that several tensors share counts once."""
    storages = {storage._cdata: storage.nbytes() for storage in _storages(weights)}
    return sum(storages.values())


def _storages(value: object) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, Tensor):
        yield value.untyped_storage()
    elif isinstance(value, tuple):
        for item in value:
            yield from _storages(item)
    elif is_dataclass(value):
        for part in fields(value):
            yield from _storages(getattr(value, part.name))


class _Shapes(TorchDummy):
    """Tensors of a model, without memory on the meta device and all 0 on others."""

    def drawn(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(self.shapes[name], dtype=dtype, device=device)


class _Sizes(QuantizedLoader):
    """`QuantizedLoader` of tensors that have shapes and layouts, and no memory."""

    def __init__(self, config: ModelConfig, layouts: Layouts, dtype: torch.dtype, shard: Shard | None) -> None:
        tensors = _Shapes(config, shard)
        Loader.__init__(self, config, tensors, dtype, META, shard)
        self.shard, self.shapes, self.layouts = shard, tensors.shapes, layouts
        self.num_codes, self.code_bytes = 0, 0
        self._made: dict[object, TorchLayer] = {}
        self._names: dict[str, list[str]] = defaultdict(list)
        """Names of the tensors of each layer, by their beginning: `model.layers.3`, for example."""
        for name in self.shapes:
            self._names[".".join(name.split(".", 3)[:3])].append(name)

    def load(self) -> TorchWeights:
        return Loader.load(self)

    def _layer(self, i: int) -> TorchLayer:
        """Return layer i. Layers whose tensors have the same shapes and layouts are one object."""
        prefix, c, of = f"model.layers.{i}", self.config, self.layouts
        tensors = [
            (name.removeprefix(prefix), self.shapes[name], of.codings.get(name), of.super_groups.get(name))
            for name in self._names[prefix]
        ]
        key = tuple(tensors), c.sizes_of(i), c.rope_of(i) is None
        if key not in self._made:
            self._made[key] = super()._layer(i)
        return self._made[key]

    def quantized(self, name: str) -> QuantizedWeight | None:
        return self._own_part(name, self._empty(name, self.layouts.codings.get(name)))

    def super_group(self, name: str) -> int | None:
        return self.layouts.super_groups.get(name)

    def widened(self, name: str, group: int) -> QuantizedWeight | None:
        return self._own_part(name, self._empty(name, Coding("int8", group, minima="blocks")))

    def _empty(self, name: str, coding: Coding | None) -> QuantizedWeight | None:
        out, size = self.shapes[name]
        if coding is None or coding.unit(size) is None:
            return None
        codes = torch.empty((out, size * coding.bits // 16), dtype=torch.int16, device=META)
        words = -(-out // coding.outputs), -(-size // coding.block) * coding.words
        dtype = torch.uint8 if coding.kind == "mxfp4" else torch.int32 if coding.minima else torch.float32
        return QuantizedWeight(codes, torch.empty(words, dtype=dtype, device=META), coding)
