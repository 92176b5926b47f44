"""Programmatic dependent launch: the blocks of a kernel start while the previous kernel still runs. Moves no data.

Every kernel that is launched in this way calls `enter` before it touches memory. `enter` lets the next kernel's blocks
start, and waits until the previous kernel has finished and its writes are visible. Since each kernel waits for the
whole previous one, it also comes after all earlier ones. A kernel that is launched in the usual way, such as torch's,
waits for the previous kernel completely.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def enter(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start, and wait for the previous one. Does nothing unless DEPENDENT, which needs compute
    capability 9.0 and a launch with `options(True)`."""
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)


@triton.jit
def start_next(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let blocks of the next kernel start. This is the first half of `enter`."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the previous kernel. This is the second half of `enter`.

    Between the two halves, a kernel may only touch memory that no kernel writes, such as weights. If the previous
    kernel waits before it calls `start_next`, memory that was written before that kernel may be touched, too.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers):  # type: ignore[no-untyped-def]
    """Prefetch the 128-byte cache lines at `pointers` into the L2 cache. Does not wait for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def options(dependent: bool) -> dict[str, Any]:
    """Return the keyword arguments of a kernel launch. `launch_pdl` is only given if it is on, because the interpreter
    does not know it.

    `enable_fp_fusion` is set explicitly, because Triton 3.10 changes its default.
    """
    return {"enable_fp_fusion": True, "DEPENDENT": dependent} | ({"launch_pdl": True} if dependent else {})
