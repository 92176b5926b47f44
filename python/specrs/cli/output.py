"""Output files of commands: checks in advance whether charts can be written, and writes JSON. Draws nothing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrs.errors import invalid_config
from specrs.extras import require

FORMATS = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Check, before anything is measured, that a chart can be written to `path`. Raises `InvalidConfigError` if not."""
    require("matplotlib", "bench", f"--plot={path}")
    if path.suffix.lower() not in FORMATS:
        raise invalid_config("--plot", str(path), f"must end in {', '.join(FORMATS)}")
    try:
        path.open("ab").close()
    except OSError as error:
        raise invalid_config("--plot", str(path), f"cannot be written: {error.strerror}") from None


def write_json(option: str, path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as JSON into the file that `option` names. Raises `InvalidConfigError` if that fails."""
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise invalid_config(option, str(path), f"cannot be written: {error.strerror}") from None
