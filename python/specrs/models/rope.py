"""RoPE as config.json says it: the kinds of scaling, their frequencies, and how they are read. Rotates nothing.

A kind is a class: what it holds, `frequencies`, and `magnitude`, which cos and sin are multiplied by. In transformers
some change with the length of a batch. Here they depend on the model's or the engine's length alone, as in vLLM,
because keys in the cache are not rotated again: see `LongRopeScaling`.
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
    """Scaling of RoPE frequencies of Llama 3.1 and later; see `kernels.frequencies.inverse_frequencies`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0

    def frequencies(self, dim: int, theta: float, powers: Powers) -> Array:
        """`[dim / 2]` float32."""
        return inverse_frequencies(dim, theta, **asdict(self), powers=powers)


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor` (Chen et al. 2023, position interpolation)."""

    factor: float

    @property
    def magnitude(self) -> float:
        """See `Llama3Scaling`; like what follows."""
        return 1.0

    def frequencies(self, dim: int, theta: float, powers: Powers) -> Array:
        """See `Llama3Scaling`."""
        return inverse_frequencies(dim, theta, powers=powers) / np.float32(self.factor)


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Frequencies that change with texts beyond `max_position_embeddings`, which there are none of here."""

    factor: float

    @property
    def magnitude(self) -> float:
        """See `Llama3Scaling`; like what follows."""
        return 1.0

    def frequencies(self, dim: int, theta: float, powers: Powers) -> Array:
        """See `Llama3Scaling`."""
        return inverse_frequencies(dim, theta, powers=powers)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023); see `kernels.frequencies.yarn_frequencies`."""

    factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_max_position_embeddings: int
    magnitude: float

    def frequencies(self, dim: int, theta: float, powers: Powers) -> Array:
        """See `Llama3Scaling`."""
        length = self.original_max_position_embeddings
        ramp = (self.beta_fast, self.beta_slow)
        return yarn_frequencies(dim, theta, self.factor, ramp, length, truncate=self.truncate, powers=powers)


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): each frequency divided by a factor of its own.

    There are two sets, for texts up to `original_max_position_embeddings` and for longer ones. transformers takes that
    of the longest text of a batch, and computes a text anew that grows longer. Here the set is that of the longest text
    that the engine serves, so a text of an engine does not change with what is beside it.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    magnitude: float
    max_length: int
    """Of the longest text."""

    def frequencies(self, dim: int, theta: float, powers: Powers) -> Array:
        """See `Llama3Scaling`."""
        short = self.max_length <= self.original_max_position_embeddings
        factors = np.array(self.short_factor if short else self.long_factor, FLOAT32)
        return np.float32(1) / (factors * powers(dim, theta))


Scaling: TypeAlias = Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling
Rope: TypeAlias = tuple[float, Scaling | None]
"""theta and scaling."""


def rope_magnitude(scaling: Scaling | None) -> float:
    """What cos and sin of angles are multiplied by."""
    return 1.0 if scaling is None else scaling.magnitude


@np.errstate(all="ignore")
def frequencies(rope: Rope, dim: int, powers: Powers = rounded_powers) -> Array:
    """`[dim / 2]` float32; `powers` are those of theta, see `kernels.frequencies`."""
    theta, scaling = rope
    if scaling is None:
        return inverse_frequencies(dim, theta, powers=powers)
    return scaling.frequencies(dim, theta, powers)


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """What a model's config.json says beside its RoPE objects that they depend on."""

    max_positions: int
    theta: float
    """Where nothing says one."""
    rotary_dim: int
    original_positions: int | None
    """`original_max_position_embeddings` beside the objects, or the family's default for it."""
    kinds: tuple[str, ...]
    """`rope_type` that the family has."""


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
"""`rope_type` of most families."""


def parse_rope(raw: Mapping[str, Any], facts: RopeFacts, partial_rotary_factor: float = 1.0) -> Rope:
    """(theta, scaling) from `rope_parameters` or `rope_scaling`, and `rope_theta` where they lack it.

    transformers takes `rope_scaling` where a file has both, so one that is at odds with `rope_parameters` is refused.
    """
    names = [name for name in ("rope_parameters", "rope_scaling") if raw.get(name) not in (None, {})]
    found = [parse_object(raw, name, raw.get(name), facts) for name in names or ["rope_parameters"]]
    if found[0] != found[-1]:
        raise unsupported("rope_scaling", raw["rope_scaling"], "what rope_parameters says")
    for name in names:
        given = raw[name].get("partial_rotary_factor")
        if given is not None and given != partial_rotary_factor:
            raise unsupported(f"{name}.partial_rotary_factor", given, f"{partial_rotary_factor:g}")
    # Some versions of transformers take this one, others the one of the object.
    length, used = raw.get("original_max_position_embeddings"), getattr(found[0][1], _LENGTH, None)
    if used is not None and length not in (None, used):
        raise unsupported(_LENGTH, length, f"{used}, as in {names[0]}")
    return found[0]


_LENGTH = "original_max_position_embeddings"


def parse_object(raw: Mapping[str, Any], name: str, rope: object, facts: RopeFacts) -> Rope:
    """The same of one object `rope`, called `name`; `raw` may have a `rope_theta` beside it."""
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
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        allowed = f"greater than low_freq_factor={scaling.low_freq_factor}"
        raise malformed(f"{name}.high_freq_factor", scaling.high_freq_factor, allowed)
    return scaling


def _yarn_magnitude(source: Mapping[str, Any], factor: float) -> float:
    """0.1 ln(factor) + 1 (Peng et al. 2023, eq. 22), or the quotient of two such with weights of their own."""

    def of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = optional_number(source, "mscale"), optional_number(source, "mscale_all_dim")
    return of(1.0) if above is None or below is None else of(above) / of(below)


def _factors(source: Mapping[str, Any], field: str, name: str, count: int) -> tuple[float, ...]:
    values = source.get(field)
    good = isinstance(values, list) and all(is_number(value) for value in values)
    if not isinstance(values, list) or not good or len(values) != count:
        raise malformed(f"{name}.{field}", values, f"a list of {count} finite numbers above 0")
    return tuple(float(value) for value in values)
