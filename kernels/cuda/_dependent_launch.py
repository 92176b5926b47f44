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
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)


@triton.jit
def start_next(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first half of `enter`: blocks of the next kernel may start."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The second half of `enter`. What a kernel does between the two may touch only what no kernel writes, weights, and
    behind a kernel that waits before it calls `start_next` also what was written ahead of that one."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers):  # type: ignore[no-untyped-def]
    """Bring the 128-byte lines at `pointers` into the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def options(dependent: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel launch. The interpreter knows no `launch_pdl`, so that is only named when on.

    Fusing products and sums is spelled out, because Triton 3.10 changes the default.
    """
    return {"enable_fp_fusion": True, "DEPENDENT": dependent} | ({"launch_pdl": True} if dependent else {})
