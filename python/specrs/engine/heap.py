"""Returns memory that loading a model has freed."""

from __future__ import annotations

import contextlib
import ctypes
import sys

from specrs.errors import CheckpointError
from specrs.tokenizer import Tokenizer


def end_loading(tokenizer: Tokenizer | None) -> None:
    """Make the decoder of `tokenizer`, and then return freed memory to the system.

    Otherwise the first request makes the decoder while the C library still holds the memory that loading freed. A
    tokenizer without a decoder is no error here: requests that want text raise it.
    """
    if tokenizer is not None:
        with contextlib.suppress(CheckpointError):
            _ = tokenizer.decoder
    trim_heap()


def trim_heap() -> None:
    """Return freed pages of the heap to the system. glibc would keep them; does nothing with another C library."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
