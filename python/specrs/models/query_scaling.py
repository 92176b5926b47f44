"""Factors by which queries grow with their position, and the parsers of their fields in config.json. Scales nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrs.models.errors import malformed, unsupported
from specrs.models.values import size

FIELD = "llama_4_scaling_beta"
"""Field of a RoPE object that has `QueryScaling.beta`."""
_WITHOUT_EFFECT = "max_position_embeddings"
"""Field that such RoPE objects may have, too. transformers does not read it there."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """A query at a position is multiplied by `1 + beta ln(1 + floor((position + offset) / length))`, after RoPE. It
    keeps attention as sharp in long texts (transformers' `models/ministral3`, `models/llama4`)."""

    beta: float
    """Greater than 0."""
    length: int
    """Number of positions from one factor to the next. For Ministral 3 it is RoPE's
    `original_max_position_embeddings`, for Llama 4 `floor_scale`."""
    offset: int = 0
    """Number that is added to a position."""
    unrotated: bool = False
    """True if only the queries of layers without RoPE are multiplied."""

    def changes(self, max_model_len: int) -> bool:
        """Return whether a text of `max_model_len` tokens has a factor other than 1."""
        return max_model_len + self.offset > self.length


def parse_beta(raw: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return `raw`, a config.json, without the fields of query scaling in its RoPE objects, and the value of `FIELD`
    there. 0: queries are not scaled.

    Raises CheckpointError for an object whose value is missing or out of range, UnsupportedModelError for two objects
    with different values.
    """
    found: dict[str, float] = {}
    made = dict(raw)
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name)
        if not isinstance(rope, Mapping) or not rope:
            continue
        value = rope.get(FIELD)
        found[name] = _beta(f"{name}.{FIELD}", value)
        made[name] = {field: value for field, value in rope.items() if field not in (FIELD, _WITHOUT_EFFECT)}
    if len(set(found.values())) > 1:
        raise unsupported(f"rope_scaling.{FIELD}", found["rope_scaling"], "what rope_parameters says")
    return made, next(iter(found.values()), 0.0)


def parse_unrotated(raw: Mapping[str, Any]) -> QueryScaling | None:
    """Return the scaling of queries of layers without RoPE in Llama 4's fields of config.json. None: all factors are 1.

    Raises CheckpointError, which names the field, for a value out of range.
    """
    # Older files have the period of such layers in the place of true.
    switch = raw.get("attn_temperature_tuning")
    if switch is not None and (type(switch) not in (bool, int) or switch < 0):
        raise malformed("attn_temperature_tuning", switch, "true or false")
    given = raw.get("attn_scale")
    beta = _beta("attn_scale", 0.1 if given is None else given)
    length = size(raw, "floor_scale", 8192)
    if (switch is not None and not switch) or beta == 0:
        return None
    return QueryScaling(beta, length, offset=1, unrotated=True)


def _beta(name: str, value: object) -> float:
    """Return the factor of the logarithm. Raises CheckpointError, which names the field, for a value out of range."""
    if not isinstance(value, int | float) or type(value) is bool or not (value == 0 or 1e-6 <= value <= 1e6):
        raise malformed(name, value, "0, or a number from 1e-6 to 1e6")
    return float(value)
