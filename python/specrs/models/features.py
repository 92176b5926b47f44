"""What a model has beyond a plain dense decoder, by the field of config.json that says so, and which passes know it."""

from typing import NamedTuple

from specrs.models.config import ModelConfig
from specrs.models.errors import unsupported
from specrs.models.registry import Family
from specrs.models.rope import rope_magnitude


class Feature(NamedTuple):
    """Something that passes must know."""

    name: str
    field: str
    value: object
    without: str
    """What the field would say without it."""


NATIVE = frozenset(
    {
        "scaled angles",
        "windows",
        "norms behind",
        "norms of all heads",
        "partial RoPE",
        "layers without RoPE",
        "RoPE by layer",
        "GELU",
        "multipliers",
    }
)
"""What the native pass of a CPU knows; those of torch on a CPU and those of a GPU know all."""


def features_of(config: ModelConfig) -> list[Feature]:
    """What a model has."""
    found: list[Feature] = []

    def add(has: bool, *feature: object) -> None:
        if has:
            found.append(Feature(*feature))  # type: ignore[arg-type]

    scalings = [config.rope_scaling, *(rope[1] for rope in config.ropes if rope is not None)]
    scaled = next((scaling for scaling in scalings if rope_magnitude(scaling) != 1), None)
    add(scaled is not None, "scaled angles", "rope_scaling", scaled, "one that scales no angle's cosine")
    window = max((size for size in config.windows if size is not None), default=None)
    add(window is not None, "windows", "sliding_window", window, "null")
    norms = "of which every layer has norms before attention and MLP alone"
    add(config.norms != "before", "norms behind", "architectures", [config.architecture], norms)
    heads = "of which queries and keys have no norm, or one for each head"
    add(config.qk_norm_whole, "norms of all heads", "architectures", [config.architecture], heads)
    add(config.partial_rotary_dim is not None, "partial RoPE", "partial_rotary_factor", _factor(config), "1")
    without = [i for i in range(config.num_layers) if config.rope_of(i) is None]
    add(bool(without), "layers without RoPE", "no_rope_layers", f"layers {without}", "1 for every layer")
    kinds = {rope for rope in config.ropes if rope is not None}
    one = "one theta and scaling for all layers"
    add(len(kinds) > 1, "RoPE by layer", "rope_parameters", sorted(theta for theta, _ in kinds), one)
    add(config.activation != "silu", "GELU", "hidden_activation", config.activation, "'silu'")
    count = None if config.experts is None else config.experts.count
    add(count is not None, "experts", "architectures", [config.architecture], "of which every layer has an MLP")
    for field, plain in (("embedding_multiplier", 1.0), ("residual_multiplier", 1.0), ("attention_multiplier", None)):
        value = getattr(config, field)
        add(value != plain, "multipliers", field, value, "1" if plain else "null")
    return found


def features_of_family(family: Family) -> dict[str, bool]:
    """What models of a family may have, and whether all of them have it."""
    scaled = {"yarn", "longrope"} & set(family.rope_kinds)
    may = {
        "scaled angles": False if scaled else None,
        "windows": family.windows == "pattern" if family.windows is not None else None,
        "norms behind": True if family.norms != "before" else None,
        "norms of all heads": True if family.qk_norm == "whole" else None,
        "partial RoPE": False if family.partial_rotary else None,
        "layers without RoPE": True if family.unrotated_layers else None,
        "RoPE by layer": True if family.local_rope_theta is not None else None,
        "GELU": True if family.activation != "silu" else None,
        "experts": True if family.experts is not None else None,
        "multipliers": True if family.multipliers or family.scaled_embedding else None,
    }
    return {name: always for name, always in may.items() if always is not None}


def _factor(config: ModelConfig) -> float:
    return config.rotary_dim / config.head_dim


def unknown_feature(config: ModelConfig, known: frozenset[str]) -> Feature | None:
    """The first that is not `known`."""
    return next((feature for feature in features_of(config) if feature.name not in known), None)


def check_known(config: ModelConfig, known: frozenset[str], where: str) -> None:
    """Raises UnsupportedModelError for what passes `where` do not know."""
    feature = unknown_feature(config, known)
    if feature is not None:
        raise unsupported(feature.field, feature.value, f"{where}, {feature.without}")
