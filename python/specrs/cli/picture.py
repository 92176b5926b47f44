"""Whether a picture can be drawn into a file, asked before anything is measured. Draws nothing."""

import importlib.util
from pathlib import Path

from specrs.errors import invalid_config

FORMATS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Refuse, before anything is measured, what could not be drawn afterwards. Raises `InvalidConfigError`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise invalid_config("--plot", str(path), "needs matplotlib: pip install 'specrs[bench]'")
    if path.suffix.lower() not in FORMATS:
        raise invalid_config("--plot", str(path), f"must end in {', '.join(FORMATS)}")
    try:
        path.open("ab").close()
    except OSError as error:
        raise invalid_config("--plot", str(path), f"cannot be written: {error.strerror}") from None
