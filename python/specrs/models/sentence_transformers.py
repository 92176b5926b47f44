"""Reads whether a checkpoint is an embedding model: from the files of sentence-transformers, or a field of a GGUF file.

Imports nothing of sentence-transformers, and loads no model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specrs.errors import CheckpointError, UnsupportedRequestError
from specrs.models.checkpoint import read_json, resolve_folder
from specrs.models.gguf.checkpoint import gguf_path
from specrs.models.gguf.file import open_gguf

MODULES = "modules.json"
_SERVED = frozenset({"Transformer", "Pooling", "Normalize"})
"""Names of the modules that an embedding model may consist of."""
_LAST_TOKEN = "lasttoken"
_GGUF_LAST = 3
"""Value of a GGUF file's `pooling_type` for pooling by the last token."""


def pools_last_token(source: str | Path, revision: str | None = None) -> bool:
    """Return True for an embedding model that pools the last token's state. False: no file says that it embeds, or a
    GGUF file names another pooling.

    Raises `UnsupportedRequestError` if sentence-transformers' files name another pooling or further layers after it,
    and `CheckpointError` if a file is malformed.
    """
    file = gguf_path(source, revision)
    if file is not None:
        metadata = open_gguf(file).metadata
        return bool(metadata.get(f"{metadata.get('general.architecture')}.pooling_type") == _GGUF_LAST)
    folder = resolve_folder(source, revision, weights=False)
    if not (folder / MODULES).is_file():
        return False
    modules = {str(module.get("type")).rpartition(".")[2]: module for module in _modules(folder / MODULES)}
    if "Pooling" not in modules:
        return False
    if others := sorted(modules.keys() - _SERVED):
        raise UnsupportedRequestError(
            f"model: the module {others[0]} in its {MODULES} is not implemented; use a model whose modules are "
            f"{', '.join(sorted(_SERVED))}"
        )
    pooling = folder / Path(str(modules["Pooling"].get("path"))).name / "config.json"
    if pooling.is_file():  # not among the files that are downloaded from the hub
        modes = _modes(read_json(pooling))
        if modes != [_LAST_TOKEN]:
            raise UnsupportedRequestError(
                f"model: it pools by {' and '.join(modes) or 'nothing'}, which is not implemented; use a model that "
                f"pools by {_LAST_TOKEN}"
            )
    return True


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise CheckpointError(f"{path}: could not be read as JSON: {fault}") from fault
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path}: must hold a list of JSON objects")
    return modules


def _modes(config: dict[str, Any]) -> list[str]:
    """Return the pooling modes that are on: from one field with a name, or from one switch for each mode."""
    mode = config.get("pooling_mode")
    if mode is not None:
        return [str(one) for one in (mode if isinstance(mode, list) else [mode])]
    prefix = "pooling_mode_"
    return [name.removeprefix(prefix) for name, on in config.items() if name.startswith(prefix) and on is True]
