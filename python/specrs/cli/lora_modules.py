"""Reads `--lora-modules` of `specrs serve`, in vLLM's syntax: names and paths of LoRA adapters. Reads no adapter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specrs.errors import invalid_config
from specrs.lora_request import LoRARequest

_KEYS = {"name", "path", "base_model_name"}
_ALLOWED = 'must be NAME=PATH, or JSON as in \'{"name": "sql", "path": "adapters/sql"}\''


def read_lora_modules(given: Sequence[str], *, enable_lora: bool) -> list[LoRARequest]:
    """Return the adapters of the flag, numbered from 1. Raises InvalidConfigError for wrong syntax, a repeated name,
    and without `enable_lora`."""
    modules = [(text, module) for text in given for module in _modules(text)]
    if modules and not enable_lora:
        raise invalid_config("--lora-modules", given[0], "needs --enable-lora")
    requests = []
    for number, (text, module) in enumerate(modules, 1):
        if not isinstance(module, dict) or not {"name", "path"} <= module.keys() <= _KEYS:
            raise invalid_config("--lora-modules", text, _ALLOWED)
        name, path, base = (module.get(key) for key in ("name", "path", "base_model_name"))
        texts = (name, path) if base is None else (name, path, base)
        if not all(isinstance(value, str) and value for value in texts):
            raise invalid_config("--lora-modules", text, _ALLOWED)
        requests.append(LoRARequest(str(name), number, str(path), base))
    return requests


def _modules(text: str) -> list[Any]:
    try:
        found = json.loads(text)
    except ValueError:
        name, _, path = text.partition("=")
        return [{"name": name, "path": path}]
    return found if isinstance(found, list) else [found]
