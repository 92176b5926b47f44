"""Lists of modules in a `quantization_config`: whether a linear layer is in one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from specrs.models.errors import malformed


def patterns(field: str, value: Any) -> tuple[str, ...]:
    """The list in `value`, None being empty. Raises CheckpointError for what is none."""
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
    """Whether the layer `name` is one of `modules`: by a pattern, by its name, or because it is in or ends with one.

    Parts of a name are whole: `layers.1` is not `layers.10`.
    """
    for module in modules:
        if module.startswith("re:"):
            if re.match(module[3:], name):
                return True
        elif f".{module.strip('.')}." in f".{name}.":
            return True
    return False
