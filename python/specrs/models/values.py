"""Readers of single values of config.json, with checks. Knows no field."""

import sys
from collections.abc import Mapping
from typing import Any

from specrs.models.errors import malformed, unsupported

MAX_SIZE = 2**31 - 1
"""Largest size or count, because some are stored in 32 bits."""


def size(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """Return an integer from 1 to MAX_SIZE; `default` if the field is missing or null. Raises CheckpointError for any
    other value, and for a missing field without a default."""
    value = raw.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise malformed(field, value, "an integer of at least 1")
    if value > MAX_SIZE:
        raise malformed(field, value, f"at most {MAX_SIZE}")
    return value


def number(raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """Return a finite number above 0; `default` if the field is missing, but not if it is null. Raises CheckpointError
    for any other value, and for a missing field without a default."""
    value = raw.get(field, default)
    if not is_number(value):
        raise malformed(field, value, "a finite number greater than 0")
    return float(value)


def is_number(value: object) -> bool:
    """Return True if `value` is a number above 0 that fits a float. Integers in JSON may be too large."""
    return isinstance(value, int | float) and type(value) is not bool and 0 < value <= sys.float_info.max


def optional_number(raw: Mapping[str, Any], field: str) -> float | None:
    """Return a finite number above 0; None if the field is missing or null. Raises CheckpointError for any other
    value."""
    return None if raw.get(field) is None else number(raw, field)


def flag(raw: Mapping[str, Any], field: str, *, allowed: bool = True, default: bool = False) -> bool:
    """Return a boolean; `default` if the field is missing or null. Raises UnsupportedModelError for true if `allowed`
    is False, and CheckpointError for a value that is no boolean."""
    value = raw.get(field)
    if value is not None and type(value) is not bool:
        raise malformed(field, value, "true or false")
    if value and not allowed:
        raise unsupported(field, value, "false for this architecture")
    return default if value is None else value
