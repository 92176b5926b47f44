"""Gives freed memory of the C library's heap back to the system."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Give freed pages of the heap back to the system.

    Reading a checkpoint's header and tokenizer frees tens of MB, which glibc would keep. Does nothing with another C
    library.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
