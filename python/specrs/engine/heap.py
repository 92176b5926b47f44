"""Returns memory that loading a model has freed."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Return freed pages of the heap to the system. glibc would keep them; does nothing with another C library."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
