"""Lists of modules in a `quantization_config`, and whether they contain a linear layer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from specrs.models.errors import malformed


def patterns(field: str, value: Any) -> tuple[str, ...]:
    """Return the list `value` as a tuple, empty for None. Raises CheckpointError, which names `field`, for anything
    else."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise malformed(f"quantization_config.{field}", value, "a list of names, or of patterns that begin with 're:'")
    for item in value:
        if item.startswith("re:"):
            try:
                re.compile(item[3:])
            except re.error as fault:
                raise malformed(f"quantization_config.{field}", item, f"a regular expression ({fault})") from None
    return tuple(value)


def is_in(name: str, modules: Iterable[str]) -> bool:
    """Return whether a layer is in a list of modules. An entry `re:PATTERN` must match the beginning of `name`; any
    other entry must be whole components of it, anywhere.

    `layers.1` does not stand for `layers.10`.
    """
    for module in modules:
        if module.startswith("re:"):
            if re.match(module[3:], name):
                return True
        elif f".{module.strip('.')}." in f".{name}.":
            return True
    return False
