"""Arguments and flags of vLLM that have no counterpart here, read from vllm_arguments.json.

The file has four tables. `engine`, `server` and `sampling` list arguments of vLLM's `LLM`, flags of `vllm serve` and
fields of `SamplingParams`, each with the values that change nothing and are accepted. `rejected` lists flags that are
rejected whatever their value. `short` is vLLM's short form of a flag, `instead` what to use in its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrs.errors import short


@dataclass(frozen=True, slots=True)
class VLLMArgument:
    """One row of vllm_arguments.json."""

    accepted: tuple[Any, ...] = ()
    short: str | None = None
    instead: str | None = None

    def accepts(self, value: Any) -> bool:
        """Return True if `value` changes nothing. 1 and True are different values."""
        return any(type(value) is type(one) and value == one for one in self.accepted)

    def reason(self, field: str, value: Any) -> str:
        """Return what is wrong with `field=value`. Leaves the value out if possible, because it may be a secret."""
        if self.instead is not None:
            return f"{field}: not implemented; use {self.instead}"
        return f"{field}={short(value)}: not implemented; allowed: {' or '.join(map(repr, self.accepted))}"


def _table(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, VLLMArgument]:
    return {
        name: VLLMArgument(tuple(row.get("accepted", ())), row.get("short"), row.get("instead"))
        for name, row in rows.items()
    }


_FILE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ENGINE, SERVER, SAMPLING, REJECTED = (_table(_FILE[name]) for name in ("engine", "server", "sampling", "rejected"))
