"""Parser of per-layer fields of config.json: which layers have a sliding window, and the RoPE of each. Reads no
weights."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from specrs.models.errors import malformed, unsupported
from specrs.models.registry import Family
from specrs.models.rope import Rope, RopeFacts, parse_object, parse_rope
from specrs.models.values import flag, optional_number, size

SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
Windows: TypeAlias = tuple[int | None, ...]
Ropes: TypeAlias = tuple[Rope | None, ...]


def parse_layers(
    raw: Mapping[str, Any], family: Family, num_layers: int, facts: RopeFacts, rotary_factor: float
) -> tuple[Rope, Ropes, Windows]:
    """Return the model's RoPE, then RoPE and window of each layer as in `ModelConfig`.

    Raises UnsupportedModelError for a value that is not implemented, CheckpointError for a malformed one; both name
    field and value.
    """
    chunks = family.windows == "chunks"
    rotated = _rotated(raw, num_layers, or_empty=chunks) if family.unrotated_layers else (True,) * num_layers
    kinds_of = _chunks if chunks else partial(_kinds, family=family)
    kinds, window = kinds_of(raw, num_layers=num_layers, max_positions=facts.max_positions, rotated=rotated)
    windows = tuple(None if kind == FULL else window for kind in kinds)
    if all(size is None for size in windows):
        windows = ()
    if family.local_rope_theta is not None:
        rope, local = _two_ropes(raw, facts, family.local_rope_theta)
        return rope, tuple(local if kind == SLIDING else rope for kind in kinds), windows
    rope = parse_rope(raw, facts, rotary_factor)
    return rope, () if all(rotated) else tuple(rope if has else None for has in rotated), windows


def layer_kinds(raw: Mapping[str, Any], family: Family, num_layers: int, max_positions: int) -> list[str]:
    """Return the kind of attention of each layer, for a family in which all layers have RoPE.

    Raises UnsupportedModelError for a value that is not implemented, CheckpointError for a malformed one; both name
    field and value.
    """
    kinds = _kinds(raw, family, num_layers, max_positions, (True,) * num_layers)[0]
    if family.varied_layers and kinds[-1] != FULL:
        raise unsupported("layer_types", kinds[-1], f"{FULL!r} in the last layer")
    return kinds


def _kinds(
    raw: Mapping[str, Any], family: Family, num_layers: int, max_positions: int, rotated: tuple[bool, ...]
) -> tuple[list[str], int | None]:
    """Return the kind of attention of each layer, and the size of sliding windows. The size is None if no text is long
    enough for a window to hide a position."""
    switched = family.windows in ("switched", "chosen", "unrotated")
    off = switched and not flag(raw, "use_sliding_window")
    value = raw.get("sliding_window", family.sliding_window)
    window = None if off or value is None else size({"sliding_window": value}, "sliding_window")
    # A window no shorter than the context hides nothing.
    hides = window is not None and window < max_positions
    if hides and family.windows is None:
        raise unsupported("sliding_window", window, "null, or max_position_embeddings or more, for this architecture")
    if family.windows in ("pattern", "alternating", "three of four"):
        every = 2 if family.windows == "alternating" else 4
        sliding = [(i + 1) % every != 0 for i in range(num_layers)]
        if family.windows == "pattern":
            sliding = _pattern(raw, num_layers)
        known: tuple[str, ...] = (FULL, SLIDING)
    else:
        first = 0
        if family.windows == "chosen" and raw.get("max_window_layers") != 0:
            first = size(raw, "max_window_layers", family.max_window_layers)
        sliding = [hides and i >= first for i in range(num_layers)]
        if family.windows == "unrotated":
            sliding = [hides and not has for has in rotated]
        mixed = family.windows in ("chosen", "unrotated") and window is not None
        known = (FULL, SLIDING) if mixed else (SLIDING,) if hides else (FULL,)
    kinds = [SLIDING if slides else FULL for slides in sliding]
    given = raw.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != num_layers or any(kind not in known for kind in given):
            wrong = isinstance(given, list) and [kind for kind in given if kind not in known]
            names = " or ".join(map(repr, known))
            raise unsupported("layer_types", wrong or given, f"{names} in every one of {num_layers} layers")
        kinds = given
    if window is None and SLIDING in kinds:
        raise unsupported("sliding_window", value, "a number, because some layers have a window")
    return kinds, window if hides else None


def _chunks(
    raw: Mapping[str, Any], num_layers: int, max_positions: int, rotated: tuple[bool, ...]
) -> tuple[list[str], int | None]:
    """Return the kind of attention of each layer, and the size of chunks. The size is None if no text is longer than a
    chunk."""
    kinds = [CHUNKED if has else FULL for has in rotated]
    given = raw.get("layer_types")
    if given is not None:
        if (
            not isinstance(given, list)
            or len(given) != num_layers
            or any(kind not in (CHUNKED, FULL) for kind in given)
        ):
            raise unsupported("layer_types", given, f"{CHUNKED!r} or {FULL!r} in every one of {num_layers} layers")
        kinds = given
    if "attention_chunk_size" in raw and raw["attention_chunk_size"] is None:
        raise unsupported("attention_chunk_size", None, "a number")
    chunk = size(raw, "attention_chunk_size", 8192)
    return kinds, chunk if chunk < max_positions else None


def _pattern(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return whether each layer has a window: all but every `sliding_window_pattern`-th."""
    every = size(raw, "sliding_window_pattern", 6)
    older = raw.get("_sliding_window_pattern")
    if older not in (None, every) and raw.get("layer_types") is None:
        raise unsupported("_sliding_window_pattern", older, f"{every}, or layer_types")
    return [(i + 1) % every != 0 for i in range(num_layers)]


def _rotated(raw: Mapping[str, Any], num_layers: int, *, or_empty: bool) -> tuple[bool, ...]:
    """Return whether each layer has RoPE. With `or_empty`, an empty list counts as missing."""
    given = raw.get("no_rope_layers")
    if given is None or (or_empty and given == []):
        every = size(raw, "no_rope_layer_interval", 4)
        return tuple((i + 1) % every != 0 for i in range(num_layers))
    if not isinstance(given, list) or len(given) < num_layers or any(has not in (0, 1) for has in given):
        raise malformed("no_rope_layers", given, f"a list of 0 and 1, one for each of {num_layers} layers")
    return tuple(bool(has) for has in given[:num_layers])


def _two_ropes(raw: Mapping[str, Any], facts: RopeFacts, local_theta: float) -> tuple[Rope, Rope]:
    """Return the RoPE of layers without a window and the RoPE of layers with one. They are in `rope_parameters`, by
    kind of layer, or in `rope_scaling` and `rope_local_base_freq`."""
    ropes, full = raw.get("rope_parameters"), f"rope_parameters.{FULL}"
    if ropes is None:
        ropes, full = {FULL: raw.get("rope_scaling")}, "rope_scaling"
    elif raw.get("rope_scaling") is not None:
        raise unsupported("rope_scaling", raw["rope_scaling"], "null where rope_parameters is there")
    if not isinstance(ropes, Mapping) or any(kind not in (FULL, SLIDING) for kind in ropes):
        raise unsupported("rope_parameters", ropes, f"an object of {FULL} and {SLIDING}")
    for kind, rope in ropes.items():
        factor = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
        proportional = isinstance(rope, Mapping) and rope.get("rope_type") == "proportional"
        if factor not in (None, 1) and not proportional:
            raise unsupported(f"rope_parameters.{kind}.partial_rotary_factor", factor, "1")
    base = optional_number(raw, "rope_local_base_freq")
    local = {} if base is None else {"rope_theta": base}
    return (
        parse_object(raw, full, ropes.get(FULL), facts),
        parse_object(local, f"rope_parameters.{SLIDING}", ropes.get(SLIDING), replace(facts, theta=local_theta)),
    )
