"""Parser of adapter_config.json of a PEFT adapter. Checks each field. Reads no tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrs.errors import CheckpointError, UnsupportedModelError, invalid
from specrs.models.checkpoint import read_json
from specrs.models.values import is_number

FILE = "adapter_config.json"

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none", None),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None, {}),
    "velora_config": (None, {}),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    # Other values change the base model's weights, and the adapter fits only the changed weights.
    "init_lora_weights": (None, True, False, "gaussian", "eva"),
}
"""Fields that would make another kind of adapter, with the values at which they do not."""

Modules = tuple[str, ...] | str
"""Suffixes of module names, or a regular expression that matches whole module names."""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Ranks and scales of an adapter's modules. Modules have the names of the base model's checkpoint.

    LoRA: Hu et al. 2021; scales by the root of the rank: Kalajdzievski 2023.
    """

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: Modules
    exclude_modules: Modules
    layers_to_transform: tuple[int, ...] | None
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's two matrices."""
        return next((rank for key, rank in self.rank_pattern.items() if _ends_in(module, key)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor on the product of a module's two matrices."""
        alpha = next((alpha for key, alpha in self.alpha_pattern.items() if _ends_in(module, key)), self.alpha)
        rank = self.rank_of(module)
        return float(alpha / (rank**0.5 if self.use_rslora else rank))

    def has(self, module: str) -> bool:
        """Return whether the adapter applies to `module`, a projection of a layer."""
        if _is_of(module, self.exclude_modules):
            return False
        if self.target_modules != "all-linear" and not _is_of(module, self.target_modules):
            return False
        layer = re.search(r"\.layers\.(\d+)\.", module)
        return self.layers_to_transform is None or layer is None or int(layer[1]) in self.layers_to_transform


def read_lora_config(folder: Path) -> LoRAConfig:
    """Return the configuration of the adapter in `folder`. Fields that only training reads are ignored. Raises
    CheckpointError for malformed values, and UnsupportedModelError for what is not implemented."""
    path = folder / FILE
    raw = read_json(path)

    def malformed(field: str, allowed: str) -> CheckpointError:
        return invalid(CheckpointError, f"{path}: {field}", raw.get(field), f"must be {allowed}")

    for field, neutral in _NEUTRAL.items():
        # The type is compared too, because 0 == False.
        if field in raw and not any(raw[field] == value and type(raw[field]) is type(value) for value in neutral):
            reason = f"not implemented; allowed: {' or '.join(map(repr, neutral))}"
            raise invalid(UnsupportedModelError, f"{path}: {field}", raw[field], reason)
    rank, alpha, use_rslora = (raw.get(field) for field in ("r", "lora_alpha", "use_rslora"))
    if rank is None or not _is_rank(rank):
        raise malformed("r", "an integer of at least 1")
    if alpha is None or not is_number(alpha):
        raise malformed("lora_alpha", "a finite number greater than 0")
    if use_rslora not in (None, True, False) or type(use_rslora) is int:
        raise malformed("use_rslora", "true or false")
    layers, patterns = raw.get("layers_to_transform"), raw.get("layers_pattern")
    if layers is not None and type(layers) is not list:
        layers = [layers]
    if layers is not None and not all(type(layer) is int and layer >= 0 for layer in layers):
        raise malformed("layers_to_transform", "a layer's number, or a list of them")
    if patterns not in (None, [], "layers", ["layers"]):
        raise malformed("layers_pattern", "layers, which is what models call them here")
    for field, is_value, values in (
        ("rank_pattern", _is_rank, "integers of at least 1"),
        ("alpha_pattern", is_number, "finite numbers greater than 0"),
    ):
        found = raw.get(field)
        if found is not None and (type(found) is not dict or not all(map(is_value, found.values()))):
            raise malformed(field, f"{values} by names of modules")
        for key in found or ():
            _compile(path, field, key)
    return LoRAConfig(
        rank=rank,
        alpha=alpha,
        use_rslora=bool(use_rslora),
        target_modules=_modules(path, raw, "target_modules"),
        exclude_modules=_modules(path, raw, "exclude_modules"),
        layers_to_transform=None if layers is None else tuple(layers),
        rank_pattern=raw.get("rank_pattern") or {},
        alpha_pattern=raw.get("alpha_pattern") or {},
    )


def _modules(path: Path, raw: Mapping[str, Any], field: str) -> Modules:
    value = raw.get(field)
    if isinstance(value, str) and value:
        _compile(path, field, value)
        return value
    if value is None and field == "exclude_modules":
        return ()
    if isinstance(value, Sequence) and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    allowed = "must be a list of modules' names, or an expression that matches them"
    raise invalid(CheckpointError, f"{path}: {field}", value, allowed)


def _compile(path: Path, field: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as fault:
        raise invalid(CheckpointError, f"{path}: {field}", expression, f"must be an expression: {fault}") from None


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_of(module: str, modules: Modules) -> bool:
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in modules)


def _ends_in(module: str, key: str) -> bool:
    return re.fullmatch(rf"(.*\.)?({key})", module) is not None
