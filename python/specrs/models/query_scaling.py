"""Factors by which queries grow with their position, and the parser of their field in config.json. Scales nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrs.models.errors import malformed, unsupported

FIELD = "llama_4_scaling_beta"
"""Field of a RoPE object that has `QueryScaling.beta`."""
_WITHOUT_EFFECT = "max_position_embeddings"
"""Field that such RoPE objects may have, too. transformers does not read it there."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """A query at a position is multiplied by `1 + beta ln(1 + floor(position / length))`, after RoPE. The factor is 1
    at positions below `length`. It keeps attention as sharp in long texts (transformers' `models/ministral3`)."""

    beta: float
    """Greater than 0."""
    length: int
    """Number of positions for which the model was trained first: RoPE's `original_max_position_embeddings`."""


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
        if not isinstance(value, int | float) or type(value) is bool or not (value == 0 or 1e-6 <= value <= 1e6):
            raise malformed(f"{name}.{FIELD}", value, "0, or a number from 1e-6 to 1e6")
        found[name] = float(value)
        made[name] = {field: value for field, value in rope.items() if field not in (FIELD, _WITHOUT_EFFECT)}
    if len(set(found.values())) > 1:
        raise unsupported(f"rope_scaling.{FIELD}", found["rope_scaling"], "what rope_parameters says")
    return made, next(iter(found.values()), 0.0)
