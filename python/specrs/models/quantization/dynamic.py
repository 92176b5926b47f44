"""Parser of `dynamic` in a GPTQ configuration: layers that are not quantized, or differently from the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specrs.models.errors import malformed, unsupported

_READ = ("bits", "group_size", "desc_act", "sym")
"""Fields that a rule may change."""
_OF_QUANTIZING = ("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "act_group_aware")
"""Fields of a rule that say how codes were computed, and do not change what they mean."""


def overrides(raw: Mapping[str, Any]) -> list[tuple[re.Pattern[str], dict[str, Any] | None]]:
    """Return the rules for single layers in the order in which they are tried. The first that matches a layer's name
    counts.

    A rule is a pattern, which must match at the beginning of a name, and the fields that differ there. None instead of
    fields: the layer is not quantized. In the file such a pattern begins with `-:`; others may begin with `+:`.

    Raises CheckpointError or UnsupportedModelError, which name the field.
    """
    at, given = "quantization_config.dynamic", raw.get("dynamic")
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise malformed(at, given, "an object of patterns")
    made: list[tuple[re.Pattern[str], dict[str, Any] | None]] = []
    for pattern, fields in given.items():
        skipped = pattern.startswith("-:")
        try:
            rule = re.compile(pattern[2:] if pattern.startswith(("-:", "+:")) else pattern)
        except re.error as fault:
            raise malformed(at, pattern, f"a regular expression after '-:' or '+:' ({fault})") from None
        if skipped:
            made.append((rule, None))
            continue
        if not isinstance(fields, Mapping):
            raise malformed(f"{at}[{pattern!r}]", fields, "an object of fields")
        for name in fields:
            if name not in (*_READ, *_OF_QUANTIZING):
                raise unsupported(f"{at}[{pattern!r}].{name}", fields[name], f"not there; only {', '.join(_READ)}")
        made.append((rule, {name: fields[name] for name in _READ if name in fields}))
    return made
