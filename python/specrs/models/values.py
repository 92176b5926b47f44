"""Values of fields of config.json, checked. Knows no field."""

import sys
from collections.abc import Mapping
from typing import Any

from specrs.models.errors import malformed, unsupported

MAX_SIZE = 2**31 - 1
"""Of what is counted in 32 bits somewhere."""


def size(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """An integer of at least 1 that 31 bits hold. Raises CheckpointError; like what follows."""
    value = raw.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise malformed(field, value, "an integer of at least 1")
    if value > MAX_SIZE:
        raise malformed(field, value, f"at most {MAX_SIZE}")
    return value


def number(raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """A finite number above 0. `default` is of a field that is missing, not of one that is null."""
    value = raw.get(field, default)
    if not is_number(value):
        raise malformed(field, value, "a finite number greater than 0")
    return float(value)


def is_number(value: object) -> bool:
    """Whether it is a number above 0 that a float holds; JSON's integers may have any number of digits."""
    return isinstance(value, int | float) and type(value) is not bool and 0 < value <= sys.float_info.max


def optional_number(raw: Mapping[str, Any], field: str) -> float | None:
    """The same, None where the field is missing or null."""
    return None if raw.get(field) is None else number(raw, field)


def flag(raw: Mapping[str, Any], field: str, *, allowed: bool = True, default: bool = False) -> bool:
    """True or false; raises UnsupportedModelError for true where that is not `allowed`."""
    value = raw.get(field)
    if value is not None and type(value) is not bool:
        raise malformed(field, value, "true or false")
    if value and not allowed:
        raise unsupported(field, value, "false for this architecture")
    return default if value is None else value
