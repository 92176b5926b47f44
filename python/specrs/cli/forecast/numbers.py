"""Numbers of `specrs forecast`: as options spell them, and written to a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.errors import invalid_config

if TYPE_CHECKING:
    from specrs.forecast import Forecast


def floats(text: str) -> list[float]:
    """`1.8,2.4` as numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 1.8,2.4") from None


def pairs(text: str) -> dict[int, float]:
    """`1=1.8,4=3.28` as numbers by K."""
    try:
        found = [(int(k), float(value)) for k, _, value in (part.partition("=") for part in text.split(","))]
    except ValueError:
        found = []
    if not found or len(dict(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers by K, such as 1=1.8,4=3.28")
    return dict(found)


def write_json(path: Path, forecasts: list[Forecast], **more: Any) -> None:
    """Write the numbers. Raises `InvalidConfigError` where that fails."""
    import json

    from specrs.forecast import report

    try:
        text = json.dumps({"forecasts": [report.record(item) for item in forecasts], **more}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise invalid_config("--json", str(path), f"cannot be written: {error.strerror}") from None
