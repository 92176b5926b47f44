"""Softcapping of logits. Computes no logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.kernels.cuda._dependent_launch import enter, options
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_BLOCK = 1024


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """Return the hyperbolic tangent in fp32, within a few units in the last place. NaN stays NaN, and no exponential
    overflows."""
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    far = tl.where(x < 0, -far, far)
    # Near 0 the difference above cancels. The next term of this series is below 1e-8.
    s = x * x
    near = x * (1 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def softcap_kernel(  # type: ignore[no-untyped-def]
    logits, stride, cap, V: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    enter(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = logits + row * stride + column
    x = tl.load(target, mask=column < V, other=0)
    tl.store(target, cap * tanh(x / cap), mask=column < V)


@torch.library.custom_op("specrs::softcap", mutates_args=("logits",))
def softcap(logits: Tensor, cap: float, dependent: bool) -> None:
    """Replace logits x `[N, V]` fp32, rows of any stride, by `cap tanh(x / cap)`. `dependent`: launch dependently (see
    `_dependent_launch`)."""
    _check(logits)
    rows, vocab = logits.shape
    softcap_kernel[(triton.cdiv(vocab, _BLOCK), rows)](
        logits, logits.stride(0), cap, V=vocab, BLOCK=_BLOCK, **options(dependent)
    )


@softcap.register_fake
def _(logits: Tensor, cap: float, dependent: bool) -> None:
    _check(logits)


def _check(logits: Tensor) -> None:
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1


def softcap_reference(logits: Tensor, cap: float) -> None:
    """Do what `softcap` does, in plain torch in float64, rounded once."""
    logits.copy_((logits.double() / cap).tanh() * cap)


VARIANTS = (
    Variant(
        "softcap",
        softcap_kernel,
        {"logits": "*fp32", "stride": "i32", "cap": "fp32"},
        {"V": 262144, "BLOCK": _BLOCK, "DEPENDENT": False},
        aligned=("stride",),
    ),
)
