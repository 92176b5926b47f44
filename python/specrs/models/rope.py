"""RoPE in config.json: the kinds of scaling, their frequencies, and the parser of their fields. Rotates nothing.

Each kind of scaling is a class with `frequencies` and with `magnitude`, the factor on cos and sin. In transformers some
kinds change with the length of a batch. Here they depend on the length of the model or engine only, as in vLLM, because
cached keys are not rotated again: see `LongRopeScaling`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from specrs.arrays import FLOAT32, Array
from specrs.kernels.frequencies import Powers, inverse_frequencies, rounded_powers, yarn_frequencies
from specrs.models.errors import malformed, unsupported
from specrs.models.values import flag, is_number, number, optional_number, size


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1 and later, by wavelength: see `kernels.frequencies.inverse_frequencies`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin: 1."""
        return 1.0

    def frequencies(self, dim: int, theta: float, powers: Powers) -> Array:
        """Return the scaled frequencies, `[dim / 2]` float32."""
        return inverse_frequencies(dim, theta, **asdict(self), powers=powers)


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """RoPE scaling that divides all frequencies by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin: 1."""
        return 1.0

    def frequencies(self, dim: int, theta: float, powers: Powers) -> Array:
        """Return the scaled frequencies, `[dim / 2]` float32."""
        return inverse_frequencies(dim, theta, powers=powers) / np.float32(self.factor)


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """RoPE scaling that changes frequencies only for texts beyond `max_position_embeddings`. The engine has no such
    texts, so it changes nothing."""

    factor: float

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin: 1."""
        return 1.0

    def frequencies(self, dim: int, theta: float, powers: Powers) -> Array:
        """Return the unscaled frequencies, `[dim / 2]` float32."""
        return inverse_frequencies(dim, theta, powers=powers)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """RoPE scaling of YaRN (Peng et al. 2023): see `kernels.frequencies.yarn_frequencies`."""

    factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_max_position_embeddings: int
    magnitude: float
    """Factor on cos and sin."""

    def frequencies(self, dim: int, theta: float, powers: Powers) -> Array:
        """Return the scaled frequencies, `[dim / 2]` float32."""
        length = self.original_max_position_embeddings
        ramp = (self.beta_fast, self.beta_slow)
        return yarn_frequencies(dim, theta, self.factor, ramp, length, truncate=self.truncate, powers=powers)


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """RoPE scaling of LongRoPE (Ding et al. 2024), which divides each frequency by its own factor.

    There are two sets of factors: for texts up to `original_max_position_embeddings` tokens, and for longer ones.
    transformers uses the set of the longest text in a batch, and recomputes a text that outgrows the first set. Here
    the set depends on the longest text that the engine serves. So a text does not change with the rest of its batch.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    magnitude: float
    """Factor on cos and sin."""
    max_length: int
    """Number of tokens of the longest text that the engine serves."""

    def frequencies(self, dim: int, theta: float, powers: Powers) -> Array:
        """Return the scaled frequencies, `[dim / 2]` float32."""
        short = self.max_length <= self.original_max_position_embeddings
        factors = np.array(self.short_factor if short else self.long_factor, FLOAT32)
        return np.float32(1) / (factors * powers(dim, theta))


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """RoPE of Gemma 4's full layers: the first `share` of the frequencies of a whole head, divided by `factor`, and 0
    for the others. A pair at frequency 0 is not rotated."""

    share: float
    factor: float

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin: 1."""
        return 1.0

    def frequencies(self, dim: int, theta: float, powers: Powers) -> Array:
        """Return the frequencies, `[dim / 2]` float32."""
        made = inverse_frequencies(dim, theta, powers=powers) / np.float32(self.factor)
        made[int(self.share * dim // 2) :] = 0.0
        return made


Scaling: TypeAlias = (
    ProportionalScaling | Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling
)
Rope: TypeAlias = tuple[float, Scaling | None]
"""Theta, and the scaling of frequencies (None: they are not scaled)."""


def rope_magnitude(scaling: Scaling | None) -> float:
    """Return the factor on cos and sin of RoPE angles."""
    return 1.0 if scaling is None else scaling.magnitude


@np.errstate(all="ignore")
def frequencies(rope: Rope, dim: int, powers: Powers = rounded_powers) -> Array:
    """Return the frequencies of `rope`, `[dim / 2]` float32. `powers` computes the powers of theta: see
    `kernels.frequencies`."""
    theta, scaling = rope
    if scaling is None:
        return inverse_frequencies(dim, theta, powers=powers)
    return scaling.frequencies(dim, theta, powers)


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Facts from outside the RoPE objects of config.json that parsing them needs."""

    max_positions: int
    """Number of positions that the model was trained for."""
    theta: float
    """Theta if config.json names none."""
    rotary_dim: int
    """Number of features of a head that RoPE rotates."""
    original_positions: int | None
    """`original_max_position_embeddings` at the top level of config.json, or else the family's default for it."""
    kinds: tuple[str, ...]
    """Values of `rope_type` that are allowed."""


_FIELDS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
)
KINDS = ("default", "llama3", "linear", "dynamic", "yarn", "longrope")
"""Values of `rope_type` that most families allow."""
ALL_KINDS = (*KINDS, "proportional")
"""Values of `rope_type` that some family allows."""


def parse_rope(raw: Mapping[str, Any], facts: RopeFacts, partial_rotary_factor: float = 1.0) -> Rope:
    """Return theta and scaling from `rope_parameters` or `rope_scaling`, and from `rope_theta` if they lack it.

    transformers prefers `rope_scaling` if a file has both, so one that contradicts `rope_parameters` is rejected.
    Raises UnsupportedModelError for a value that is not implemented, CheckpointError for a malformed one; both name
    field and value.
    """
    names = [name for name in ("rope_parameters", "rope_scaling") if raw.get(name) not in (None, {})]
    found = [parse_object(raw, name, raw.get(name), facts) for name in names or ["rope_parameters"]]
    if found[0] != found[-1]:
        raise unsupported("rope_scaling", raw["rope_scaling"], "what rope_parameters says")
    for name in names:
        given = raw[name].get("partial_rotary_factor")
        if given is not None and given != partial_rotary_factor:
            raise unsupported(f"{name}.partial_rotary_factor", given, f"{partial_rotary_factor:g}")
    # Some versions of transformers read the top-level field, others the field of the object.
    length, used = raw.get("original_max_position_embeddings"), getattr(found[0][1], _LENGTH, None)
    if used is not None and length not in (None, used):
        raise unsupported(_LENGTH, length, f"{used}, as in {names[0]}")
    return found[0]


_LENGTH = "original_max_position_embeddings"


def parse_object(raw: Mapping[str, Any], name: str, rope: object, facts: RopeFacts) -> Rope:
    """Return theta and scaling from one RoPE object, which messages call `name`. `raw` is the object that holds it and
    may have a `rope_theta`.

    Raises UnsupportedModelError for a value that is not implemented, CheckpointError for a malformed one; both name
    field and value.
    """
    if rope is None:
        rope = {}
    if not isinstance(rope, Mapping):
        raise malformed(name, rope, "an object")
    for field, value in rope.items():
        if field not in _FIELDS and value is not None:
            raise unsupported(f"{name}.{field}", value, f"one object for all layers, of {', '.join(_FIELDS)}")
    source: dict[str, Any] = {"rope_theta": facts.theta}
    source |= {key: raw[key] for key in ("rope_theta",) if key in raw} | dict(rope)
    theta = number(source, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name in older files, as in vLLM
    if kind not in facts.kinds:
        allowed = " or ".join(map(repr, facts.kinds)) if len(facts.kinds) < 3 else ", ".join(map(repr, facts.kinds))
        raise unsupported(f"{name}.rope_type", kind, allowed)
    if source.get(_LENGTH) is None:
        source[_LENGTH] = facts.original_positions or facts.max_positions
    if kind == "yarn" and theta <= 1:
        raise malformed("rope_theta", theta, "greater than 1 with rope_type 'yarn'")
    return theta, _scaling(kind, source, name, facts)


def _scaling(kind: str, source: Mapping[str, Any], name: str, facts: RopeFacts) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(number(source, "factor"))
    if kind == "dynamic":
        return DynamicScaling(number(source, "factor"))
    if kind == "llama3":
        return _llama3(source, name)
    if kind == "proportional":
        share = number(source, "partial_rotary_factor", 1.0)
        if share > 1:
            raise malformed(f"{name}.partial_rotary_factor", share, "at most 1")
        return ProportionalScaling(share, number(source, "factor", 1.0))
    length = size(source, _LENGTH)
    ratio = facts.max_positions / length
    given = optional_number(source, "factor")
    factor = ratio if given is None else given
    magnitude = optional_number(source, "attention_factor")
    if kind == "yarn":
        if magnitude is None:
            magnitude = _yarn_magnitude(source, factor)
        for field in ("beta_fast", "beta_slow"):
            if not 1e-6 <= (optional_number(source, field) or 1.0) <= 1e6:
                raise malformed(f"{name}.{field}", source[field], "from 1e-6 to 1e6 turns")
        return YarnScaling(
            factor=factor,
            beta_fast=optional_number(source, "beta_fast") or 32.0,
            beta_slow=optional_number(source, "beta_slow") or 1.0,
            truncate=flag(source, "truncate", default=True),
            original_max_position_embeddings=length,
            magnitude=magnitude,
        )
    if magnitude is None and factor > 1 and length == 1:
        raise malformed(f"{name}.{_LENGTH}", length, "at least 2, or attention_factor given")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return LongRopeScaling(
        short_factor=_factors(source, "short_factor", name, facts.rotary_dim // 2),
        long_factor=_factors(source, "long_factor", name, facts.rotary_dim // 2),
        original_max_position_embeddings=length,
        magnitude=magnitude,
        max_length=facts.max_positions,
    )


def _llama3(source: Mapping[str, Any], name: str) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=number(source, "factor"),
        low_freq_factor=number(source, "low_freq_factor"),
        high_freq_factor=number(source, "high_freq_factor"),
        original_max_position_embeddings=size(source, _LENGTH),
    )
    if scaling.high_freq_factor < scaling.low_freq_factor:
        allowed = f"at least low_freq_factor={scaling.low_freq_factor}"
        raise malformed(f"{name}.high_freq_factor", scaling.high_freq_factor, allowed)
    return scaling


def _yarn_magnitude(source: Mapping[str, Any], factor: float) -> float:
    """Return the magnitude of YaRN: 0.1 ln(factor) + 1 (Peng et al. 2023, eq. 22). If both `mscale` and
    `mscale_all_dim` are there and not 0, return the quotient of two such terms, each with one of them as a weight on
    0.1 ln(factor)."""

    def of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def weight(field: str) -> float | None:
        value = source.get(field)
        return None if type(value) in (int, float) and value == 0 else optional_number(source, field)

    above, below = weight("mscale"), weight("mscale_all_dim")
    return of(1.0) if above is None or below is None else of(above) / of(below)


def _factors(source: Mapping[str, Any], field: str, name: str, count: int) -> tuple[float, ...]:
    values = source.get(field)
    good = isinstance(values, list) and all(is_number(value) for value in values)
    if not isinstance(values, list) or not good or len(values) != count:
        raise malformed(f"{name}.{field}", values, f"a list of {count} finite numbers above 0")
    return tuple(float(value) for value in values)
