"""Programmatic dependent launch: a kernel's blocks start while the one before it still runs. Moves no data.

Every kernel that is launched so calls `enter` before it touches memory: it lets the next kernel's blocks start, and
waits until the one before has finished and its writes are visible. Since each kernel waits for the whole one before
it, it also follows all earlier ones. A kernel launched the usual way, torch's among them, waits for all of it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def enter(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Does nothing unless DEPENDENT, which needs compute capability 9.0 and a launch with `options(True)`."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def options(dependent: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel launch. The interpreter knows no `launch_pdl`, so that is only named when on.

    Fusing products and sums is spelled out, because Triton 3.10 changes the default.
    """
    return {"enable_fp_fusion": True, "DEPENDENT": dependent} | ({"launch_pdl": True} if dependent else {})
