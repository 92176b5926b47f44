"""Arrays of the types that models are stored in. NumPy has no bfloat16 or FP8 of its own; `ml_dtypes` adds them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""An array of any dtype, those of `ml_dtypes` included."""

FLOAT32, FLOAT64, FLOAT16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)

_BITS = {BFLOAT16: np.uint16, FLOAT8_E4M3: np.uint8, FLOAT8_E5M2: np.uint8}


def bits(array: Array) -> Array:
    """Return `array` as the Rust core reads it: a view of bfloat16 as uint16, of FP8 as uint8, else `array` itself."""
    return array.view(_BITS[array.dtype]) if array.dtype in _BITS else array


def converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return `array` as `dtype`, or `array` itself if it has that type. Elements are rounded to the nearest value of
    `dtype`. Elements too large for `dtype` become infinite, without a warning."""
    with np.errstate(all="ignore"):
        return array.astype(dtype, copy=False)


def aligned(array: Array) -> Array:
    """Return `array` itself if it is contiguous and aligned for its dtype, otherwise an aligned copy.

    A file may store a tensor at any offset.
    """
    array = np.ascontiguousarray(array)
    return array if array.flags.aligned else array.copy()
