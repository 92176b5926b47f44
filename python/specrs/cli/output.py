"""Files that a command writes at its end: pictures, whether one can be drawn asked before; JSON. Draws nothing."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrs.errors import invalid_config

FORMATS = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Refuse, before anything is measured, what could not be drawn afterwards. Raises `InvalidConfigError`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise invalid_config("--plot", str(path), "needs matplotlib: pip install 'specrs[bench]'")
    if path.suffix.lower() not in FORMATS:
        raise invalid_config("--plot", str(path), f"must end in {', '.join(FORMATS)}")
    try:
        path.open("ab").close()
    except OSError as error:
        raise invalid_config("--plot", str(path), f"cannot be written: {error.strerror}") from None


def write_json(option: str, path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` into the file that `option` names. Raises `InvalidConfigError` where that fails."""
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise invalid_config(option, str(path), f"cannot be written: {error.strerror}") from None
