"""Converts the RoPE of a GGUF file to the object in config.json. Files hold either the parameters of a scaling, or the
factors that it results in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specrs.arrays import FLOAT64
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.kernels.frequencies import inverse_frequencies
from specrs.models.gguf.fields import Fields
from specrs.models.gguf.file import GGUFFile
from specrs.models.registry import Family

FACTORS = "rope_freqs.weight"
"""Name of the tensor with a divisor for each RoPE frequency: for the scaling of Llama 3.1, and for layers of Gemma 4
without a window."""
_NOT_ROTATED = 1e29
"""Smallest number in `FACTORS` of Gemma 4 by which a frequency becomes 0. Files have 1e30."""
LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
"""For each field of LongRoPE in config.json, the tensor with its factors."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of the Llama 3.1 scaling that models with the tensor `FACTORS` use. Their files only hold the resulting
factors."""
_LLAMA4 = _LLAMA3 | {"high_freq_factor": 1.0}
"""Parameters of Llama 4 Scout, which has no frequencies between the two ranges."""


def rope_object(values: Fields, family: Family, rotary_dim: int, positions: int) -> dict[str, Any]:
    """Return config.json's RoPE object of a model with `rotary_dim` rotated features and up to `positions` positions.

    Raises UnsupportedModelError for a scaling that is not implemented or that the file's tensors contradict.
    """
    theta = values.number("rope.freq_base", 10000.0)
    return {"rope_theta": theta, **_scaling(values, family, rotary_dim, theta, positions)}


def _scaling(values: Fields, family: Family, rotary_dim: int, theta: float, positions: int) -> dict[str, Any]:
    kind, tensors = values.get("rope.scaling.type"), values.file.tensors
    if kind in (None, ""):
        # Without a type the factor is that of linear scaling.
        field = "rope.scale_linear" if "rope.scale_linear" in values else "rope.scaling.factor"
        kind = "none" if values.get(field) in (None, 0, 1) else "linear"
    has_factors, has_long = FACTORS in tensors, any(name in tensors for name in LONG_FACTORS.values())
    if (has_factors and (kind != "none" or has_long)) or (has_long and kind not in ("none", "longrope")):
        found = ", ".join(name for name in (FACTORS, *LONG_FACTORS.values()) if name in tensors)
        raise CheckpointError(f"{values.file.path}: {values.prefix}.rope.scaling.type={kind!r}: contradicts {found}")
    if "proportional" in family.rope_kinds:
        return _proportional(values.file, rotary_dim)
    if has_factors:
        return _llama3(values.file, rotary_dim, theta)
    if has_long or kind == "longrope":
        return _longrope(values, positions)
    if kind == "none":
        return {}
    if kind == "linear":
        field = "rope.scale_linear" if "rope.scale_linear" in values else "rope.scaling.factor"
        return {"rope_type": "linear", "factor": values.number(field)}
    if kind == "yarn":
        return _yarn(values, family)
    raise values.unsupported("rope.scaling.type", "'none', 'linear', 'yarn' or 'longrope'")


def _yarn(values: Fields, family: Family) -> dict[str, Any]:
    """Return the object of YaRN. A file does not say whether the ends of its ramp are rounded, so the family's default
    is used."""
    fields: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": values.number("rope.scaling.factor"),
        "original_max_position_embeddings": values.size("rope.scaling.original_context_length"),
        "beta_fast": values.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": values.number("rope.scaling.yarn_beta_slow", 1.0),
        "truncate": dict(family.rope_default).get("truncate", True),
    }
    if values.get("rope.scaling.yarn_log_multiplier") not in (None, 0):
        fields |= {"mscale": 1.0, "mscale_all_dim": values.number("rope.scaling.yarn_log_multiplier")}
    return fields


def _longrope(values: Fields, positions: int) -> dict[str, Any]:
    file = values.file
    factors: dict[str, Any] = {}
    for field, name in LONG_FACTORS.items():
        if name not in file.tensors:
            raise CheckpointError(f"{file.path}: {name} is missing, a model with LongRoPE must have it")
        factors[field] = [float(str(np.float32(factor))) for factor in file.numbers(name).reshape(-1)]
    length = values.size("rope.scaling.original_context_length")
    fields = {"rope_type": "longrope", "original_max_position_embeddings": length, **factors}
    magnitude = values.number("rope.scaling.attn_factor")
    ratio = positions / length
    derived = 1.0 if ratio <= 1 or length == 1 else math.sqrt(1 + math.log(ratio) / math.log(length))
    return fields if np.float32(derived) == np.float32(magnitude) else fields | {"attention_factor": magnitude}


def _proportional(file: GGUFFile, rotary_dim: int) -> dict[str, Any]:
    """Return the object of a RoPE that rotates the first pairs of a head: their factors are 1, and all others very
    large. Raises CheckpointError without the factors, and UnsupportedModelError for other factors."""
    if FACTORS not in file.tensors:
        raise CheckpointError(f"{file.path}: {FACTORS} is missing, a model whose RoPE turns some pairs must have it")
    found = file.numbers(FACTORS).astype(FLOAT64).reshape(-1)
    pairs = int((found == 1).sum())
    if len(found) != rotary_dim // 2 or not pairs or (found[:pairs] != 1).any() or (found[pairs:] < _NOT_ROTATED).any():
        allowed = f"{rotary_dim // 2} factors, of which the first are 1 and the others at least {_NOT_ROTATED:g}"
        raise UnsupportedModelError(f"{file.path}: {FACTORS}: not implemented; allowed: {allowed}")
    share = 2 * pairs / rotary_dim
    if share * rotary_dim < 2 * pairs:  # rounding would turn one pair less
        share = math.nextafter(share, 1.0)
    return {"rope_type": "proportional", "partial_rotary_factor": share}


def _llama3(file: GGUFFile, rotary_dim: int, theta: float) -> dict[str, Any]:
    """Return the object of the scaling whose factors are in `rope_freqs.weight`. Raises UnsupportedModelError if
    another rule made them."""
    found = file.numbers(FACTORS).astype(FLOAT64).reshape(-1)
    factor = float(found.max()) if len(found) else 1.0
    plain = inverse_frequencies(rotary_dim, theta).astype(FLOAT64)
    for known in (_LLAMA4, _LLAMA3):
        fields: dict[str, Any] = known | {"factor": factor}
        if len(found) == len(plain) and found.min() > 0:
            made = plain / inverse_frequencies(rotary_dim, theta, **fields).astype(FLOAT64)
            if float(np.abs(found / made - 1).max()) < 1e-4:
                return {"rope_type": "llama3", **fields}
    allowed = "the factors of rope_type llama3 with " + ", ".join(f"{name}={value}" for name, value in known.items())
    raise UnsupportedModelError(f"{file.path}: {FACTORS}: not implemented; allowed: {allowed}")
