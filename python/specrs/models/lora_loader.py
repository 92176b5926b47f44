"""Loader of LoRA adapters for decoders, from a PEFT folder. Checks names, ranks and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from specrs.arrays import FLOAT64, Array, converted
from specrs.errors import CheckpointError, UnsupportedModelError, invalid
from specrs.models.checkpoint import DTYPES, SafetensorsFile
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.experts import Experts
from specrs.models.lora import LoRAAdapter, LoRAPart, expert_projection
from specrs.models.lora_config import LoRAConfig, read_lora_config
from specrs.models.registry import stored_name
from specrs.models.tensors import tensor_shapes
from specrs.models.wrappers import TEXT_BEGINNINGS

FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "gate_up"),
    "o_proj": "o",
    "down_proj": "down",
    **dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), "qkv"),
    "in_proj": "qkv",
    "out_proj": "o",
}
"""Name in `LayerWeights` of the fused matrix that holds a projection, by the projection's name in `tensor_shapes`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a module in a layer's fused matrix."""

    layer: int
    projection: str
    """Name of the matrix in `LayerWeights`."""
    first: int
    """First row of the matrix that belongs to the module."""
    outputs: int
    inputs: int


def places(config: ModelConfig, *, experts: bool = False) -> dict[str, Place]:
    """Return the modules of a model that adapters may change, by their names in the model's checkpoints. Shared experts
    are not among them. With `experts`, those of single experts are, if the family's checkpoints may have a tensor for
    each expert."""
    found: dict[str, Place] = {}
    rows: dict[tuple[int, str], int] = {}
    for name, shape in tensor_shapes(config).items():
        module, _, kind = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        projection = _expert_part(module, config.experts) if experts else None
        if projection is None and ".experts." not in module and ".shared_expert." not in module:
            projection = _PARTS.get(leaf)
        if kind != "weight" or projection is None:
            continue
        layer = int(module.split(".")[2])
        first = rows.get((layer, projection), 0)
        rows[layer, projection] = first + shape[0]
        found[stored_name(config.architecture, module)] = Place(layer, projection, first, *shape)
    return found


def _expert_part(module: str, experts: Experts | None) -> str | None:
    """Return the name of an expert's fused matrix that holds `module`, as `expert_projection` makes it; None for
    modules that belong to no single expert."""
    found = re.search(r"\.experts\.(\d+)\.(\w+)$", module)
    if found is None or experts is None or experts.stacked == "alternating":
        return None
    return expert_projection(int(found[1]), "down" if found[2] == experts.projections[2] else "gate_up")


def load_lora(
    folder: Path,
    model: DecoderFacts,
    model_config: ModelConfig | None = None,
    *,
    name: str,
    lora_int_id: int,
    max_lora_rank: int,
    experts: bool = True,
) -> LoRAAdapter:
    """Read the PEFT adapter in `folder`, in the dtype of `model`. `model_config` is the whole model's configuration if
    `model` is a rank's part of it; None: the model's. `experts`: whether the device computes adapters of experts.

    Names, ranks and shapes of all tensors are checked before any data is read. Modules have the names of the text model
    or those of a multimodal checkpoint that it is a part of. Raises CheckpointError if a file is
    missing or does not fit the model, or UnsupportedModelError for what is not implemented.
    """
    c = model.config if model_config is None else model_config
    config, known = read_lora_config(folder), places(c, experts=True)
    path = folder / FILE
    if not path.is_file():
        is_pickled = (folder / "adapter_model.bin").exists()
        also = "adapter_model.bin is a pickle, which can run code when it is read; " if is_pickled else ""
        raise CheckpointError(f"{folder}: {FILE} is missing; {also}save the adapter with safetensors")
    try:
        file = SafetensorsFile(path)
    except (SafetensorError, OSError) as fault:
        raise CheckpointError(f"{path}: could not be read: {fault}") from fault
    spellings = (each for each in TEXT_BEGINNINGS for name in file.entries if name.startswith(_PREFIX + each))
    beginning = next(spellings, "model.")
    known = {beginning + module.removeprefix("model."): place for module, place in known.items()}
    names = _check(path, file.entries, config, known, max_lora_rank, experts)
    layers: list[dict[str, tuple[LoRAPart, ...]]] = [{} for _ in range(c.num_layers)]
    for module, (a, b) in names.items():
        place, scale = known[module], config.scale_of(module)
        # Scale in float64, so that rounding to the model's dtype happens once.
        scaled = converted(file.mapped(b), FLOAT64) * scale
        for tensor, numbers in ((a, converted(file.mapped(a), FLOAT64)), (b, scaled)):
            if not np.isfinite(numbers).all():
                times = f" times its scale of {scale}" if tensor == b else ""
                raise CheckpointError(f"{path}: {tensor}{times} must hold finite numbers; train or save it again")
        part = LoRAPart(model.place(_inputs(module, file.mapped(a), c)), model.place(scaled), place.first)
        parts = layers[place.layer]
        parts[place.projection] = (*parts.get(place.projection, ()), part)
    return LoRAAdapter(name, lora_int_id, tuple(layers))


def _inputs(module: str, a: Array, c: ModelConfig) -> Array:
    """Return the matrix A of a module, with its columns in the order in which the model's projection reads its inputs.

    An adapter has those of a delta net's output projection in the order of checkpoints, and GGUF files have another.
    """
    d = c.delta
    if d is None or not d.turned or not module.endswith(".out_proj"):
        return a
    heads = a.reshape(len(a), d.key_heads, d.value_heads // d.key_heads, d.value_dim)
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(a.shape)


def _check(
    path: Path,
    entries: Mapping[str, tuple[tuple[int, ...], str]],
    config: LoRAConfig,
    known: Mapping[str, Place],
    max_lora_rank: int,
    experts: bool,
) -> dict[str, tuple[str, str]]:
    """Check the tensors of an adapter, and return the names of A and B for each module. `entries` has the shape and
    dtype name of every tensor."""
    found: dict[str, dict[str, str]] = {}
    for name in entries:
        module, _, kind = name.removeprefix(_PREFIX).removesuffix(".weight").partition(".lora_")
        if not name.startswith(_PREFIX) or module not in known or kind not in ("A", "B"):
            leaves = ", ".join(dict.fromkeys(each.rpartition(".")[2] for each in known))
            allowed = f"{_PREFIX}MODULE.lora_A.weight and lora_B.weight of a layer's {leaves}, or of a single expert"
            allowed += ", but not of shared or fused experts"
            raise UnsupportedModelError(f"{path}: {name}: not implemented; allowed: {allowed}, as the model has them")
        if not config.has(module):
            reason = f"is there, but adapter_config.json does not name {module}; add it to target_modules"
            raise CheckpointError(f"{path}: {name} {reason}, or use the adapter_config.json of these tensors")
        if ".experts." in module and not experts:
            allowed = "an adapter without experts, or device='cpu'"
            raise UnsupportedModelError(f"{path}: {name}: experts are not implemented on a GPU; allowed: {allowed}")
        found.setdefault(module, {})[kind] = name
    # The name of a projection may also match experts, which PEFT does not find where a model fuses them.
    has_experts = any(".experts." in module for module in found)
    wanted = [module for module in known if config.has(module) and (has_experts or ".experts." not in module)]
    missing = [f"{module}.lora_{kind}" for module in wanted for kind in "AB" if kind not in found.get(module, ())]
    if missing or not wanted:
        what = ", ".join(missing[:3]) or "every module that adapter_config.json names"
        more = f", and {len(missing) - 3} more" if missing[3:] else ""
        remedy = "take modules that the adapter does not change out of target_modules in adapter_config.json"
        raise CheckpointError(f"{path}: {what} is missing{more}; {remedy}, or use the file that belongs to it")
    for module, names in found.items():
        rank, place = config.rank_of(module), known[module]
        if rank > max_lora_rank:
            allowed = f"must be at most max_lora_rank={max_lora_rank}; raise max_lora_rank"
            raise invalid(CheckpointError, f"{path.parent}: the rank of {module}", rank, allowed)
        for kind, axis, shape in (("A", 0, (rank, place.inputs)), ("B", 1, (place.outputs, rank))):
            own, dtype = entries[names[kind]]
            if own != shape:
                remedy = "use an adapter that was trained for this model"
                if len(own) == 2 and own[1 - axis] == shape[1 - axis]:
                    remedy = f"set r, or rank_pattern, in adapter_config.json to {own[axis]}"
                allowed = f"must be {shape} for rank {rank} and this model; {remedy}"
                raise invalid(CheckpointError, f"{path}: the shape of {names[kind]}", own, allowed)
            if dtype not in DTYPES:
                allowed = f"must be one of {', '.join(DTYPES)}; convert the tensor"
                raise invalid(CheckpointError, f"{path}: the dtype of {names[kind]}", dtype, allowed)
    return {module: (names["A"], names["B"]) for module, names in found.items()}
