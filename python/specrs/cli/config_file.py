"""`--config file.yaml`: flags from a file. Flags on the command line take precedence. Checks no values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specrs.errors import invalid_config

END = "--end-of-config-file"
"""Hidden flag between the flags of the file and those of the command line, whose action is `EndOfFile`."""


def with_config_file(argv: Sequence[str]) -> list[str]:
    """Return `argv` of a command with the flags of `--config` inserted after its name and MODELs, if it has one.

    A key is a flag without its dashes. true and false turn it on and off, lists are several values, and mappings are
    JSON.

    Raises `InvalidConfigError` for a file that cannot be read or is no mapping of flags.
    """
    rest, path = [], None
    values = iter(argv)
    for value in values:
        if value == "--config":
            path = next(values, "")
        elif value.startswith("--config="):
            path = value.removeprefix("--config=")
        else:
            rest.append(value)
    if path is None:
        return rest
    # a list at the end of the file would take a MODEL after it as one value more
    first = next((i for i, value in enumerate(rest) if value.startswith("-")), len(rest))
    flags = [part for key, value in _read(path).items() for part in _flag(key, value)]
    return [*rest[:first], *flags, END, *rest[first:]]


def _read(path: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as fault:
        raise invalid_config("--config", path, f"cannot be read: {fault}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise invalid_config("--config", path, "must be a YAML file of flags and their values, such as `port: 8000`")
    for key in found:
        if key.startswith("-"):
            reason = f"has the key {key!r}; leave the dashes at its start out: {key.lstrip('-')}"
            raise invalid_config("--config", path, reason)
    return found


def _flag(key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if isinstance(value, bool):
        return [f"{flag}={str(value).lower()}"]
    if isinstance(value, list):
        return [flag, *map(_text, value)]
    return [] if value is None else [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
