"""From a folder to a LoRA adapter of a dense decoder: names, ranks and shapes of its matrices. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specrs.errors import CheckpointError, UnsupportedModelError, invalid
from specrs.models.checkpoint import DTYPES
from specrs.models.config import ModelConfig
from specrs.models.dense_weights import DenseFacts
from specrs.models.lora import LoRAAdapter, LoRAPart
from specrs.models.lora_config import LoRAConfig, read_lora_config
from specrs.models.tensors import tensor_shapes

FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "gate_up"),
    "o_proj": "o",
    "down_proj": "down",
}
"""What a layer calls the matrix (`LayerWeights`) that has a projection's outputs as rows, by the projection's name."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module's outputs are."""

    layer: int
    projection: str
    """A matrix of `LayerWeights`."""
    first: int
    """The first row of it that is the module's."""
    outputs: int
    inputs: int


def places(config: ModelConfig) -> dict[str, Place]:
    """The modules of a model that adapters may have, by their names."""
    found: dict[str, Place] = {}
    rows: dict[tuple[int, str], int] = {}
    for name, shape in tensor_shapes(config).items():
        module, _, kind = name.rpartition(".")
        projection = _PARTS.get(module.rpartition(".")[2])
        if kind != "weight" or projection is None or ".experts." in module:
            continue
        layer = int(module.split(".")[2])
        first = rows.get((layer, projection), 0)
        rows[layer, projection] = first + shape[0]
        found[module] = Place(layer, projection, first, *shape)
    return found


def load_lora(folder: Path, model: DenseFacts, *, name: str, lora_int_id: int, max_lora_rank: int) -> LoRAAdapter:
    """Read the PEFT adapter in `folder` for `model`, in whose dtype and on whose device it is.

    Every tensor is checked before the first is read: that `target_modules` name it, that none of those is missing, and
    shapes. Raises CheckpointError, or UnsupportedModelError for what is not implemented.
    """
    config, known = read_lora_config(folder), places(model.config)
    path = folder / FILE
    if not path.is_file():
        is_pickled = (folder / "adapter_model.bin").exists()
        also = ", adapter_model.bin is a pickle, which can run code when it is read" if is_pickled else ""
        raise CheckpointError(f"{folder}: {FILE} is missing{also}")
    try:
        with safe_open(path, "pt") as file:
            names = _check(path, file, config, known, max_lora_rank)
            layers: list[dict[str, tuple[LoRAPart, ...]]] = [{} for _ in range(model.num_layers)]
            for module, (a, b) in names.items():
                place, scale = known[module], config.scale_of(module)
                # multiplied before it is rounded to the model's dtype
                scaled = file.get_tensor(b).to(torch.float64) * scale
                down, up = (x.to(model.device, model.dtype) for x in (file.get_tensor(a), scaled))
                part = LoRAPart(down, up, place.first)
                parts = layers[place.layer]
                parts[place.projection] = (*parts.get(place.projection, ()), part)
    except (SafetensorError, OSError) as fault:
        raise CheckpointError(f"{path}: could not be read: {fault}") from fault
    return LoRAAdapter(name, lora_int_id, tuple(layers))


def _check(
    path: Path, file: Any, config: LoRAConfig, known: Mapping[str, Place], max_lora_rank: int
) -> dict[str, tuple[str, str]]:
    """The names of A and B by module."""
    found: dict[str, dict[str, str]] = {}
    for name in file.keys():  # noqa: SIM118, it is no dictionary
        module, _, kind = name.removeprefix(_PREFIX).removesuffix(".weight").partition(".lora_")
        if not name.startswith(_PREFIX) or module not in known or kind not in ("A", "B"):
            allowed = f"{_PREFIX}MODULE.lora_A.weight and lora_B.weight of a layer's {', '.join(_PARTS)}"
            raise UnsupportedModelError(f"{path}: {name}: not implemented; allowed: {allowed}, as the model has them")
        if not config.has(module):
            raise CheckpointError(f"{path}: {name} is there, but adapter_config.json does not name {module}")
        found.setdefault(module, {})[kind] = name
    wanted = [module for module in known if config.has(module)]
    missing = [f"{module}.lora_{kind}" for module in wanted for kind in "AB" if kind not in found.get(module, ())]
    if missing or not wanted:
        what = ", ".join(missing[:3]) or "every module that adapter_config.json names"
        raise CheckpointError(f"{path}: {what} is missing" + (f", and {len(missing) - 3} more" if missing[3:] else ""))
    for module, names in found.items():
        rank, place = config.rank_of(module), known[module]
        if rank > max_lora_rank:
            allowed = f"must be at most max_lora_rank={max_lora_rank}"
            raise invalid(CheckpointError, f"{path.parent}: the rank of {module}", rank, allowed)
        for kind, shape in (("A", (rank, place.inputs)), ("B", (place.outputs, rank))):
            view = file.get_slice(names[kind])
            if tuple(view.get_shape()) != shape:
                raise CheckpointError(
                    f"{path}: {names[kind]} has shape {tuple(view.get_shape())}, its rank and the model make it {shape}"
                )
            if view.get_dtype() not in DTYPES:
                raise CheckpointError(f"{path}: {names[kind]} is {view.get_dtype()}, allowed are {', '.join(DTYPES)}")
    return {module: (names["A"], names["B"]) for module, names in found.items()}
