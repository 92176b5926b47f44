"""Default sampling parameters that a checkpoint recommends in its generation_config.json. A request's own values take
precedence."""

from __future__ import annotations

import json
from typing import Any

from specrs.config import EngineConfig
from specrs.errors import CheckpointError
from specrs.sampling import SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def checkpoint_defaults(config: EngineConfig) -> dict[str, Any]:
    """Return the sampling parameters that the target's generation_config.json sets, without those that equal the
    server's defaults.

    Raises `CheckpointError` if the file cannot be read, or if a value is not allowed in requests.
    """
    from specrs.models.checkpoint import resolve_folder
    from specrs.models.gguf.checkpoint import gguf_path

    if gguf_path(config.target, config.revision) is not None:
        return {}
    path = resolve_folder(config.target, config.revision, weights=False) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        found = {name: given[name] for name in _NAMES if given.get(name) is not None}
        SamplingParams(**found)
    except (OSError, ValueError, AttributeError) as fault:
        raise CheckpointError(f"generation_config.json of {config.target}: {fault}") from fault
    plain = SamplingParams()
    return {name: value for name, value in found.items() if value != getattr(plain, name)}
