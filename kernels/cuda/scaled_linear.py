"""Products of rows in FP8 with weights in FP8 of any number of rows, by torch's `_scaled_mm`. Rounds no rows."""

from __future__ import annotations

import torch
from specrs.kernels.coded_weight import CodedWeight
from specrs.kernels.cuda.device import INTERPRETER, DeviceLimits
from torch import Tensor

BLOCK = 128
"""Inputs and outputs of a block, as cuBLAS has them."""
PADDED_ROWS = 4
"""Rows of products with weights by block are a multiple of so many: cuBLAS reads scales by 16 bytes."""
CUDA = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])


def serves(w: CodedWeight, limits: DeviceLimits) -> bool:
    """Whether a device multiplies rows in FP8 with w.

    With scales for each row and each output from sm_89 on, and on a CPU; with those of 128 inputs of a row and of
    blocks of 128 x 128 on sm_90 from CUDA 12.9 on, where an output has a multiple of 4 blocks.
    """
    (out, size), coding = w.shape, w.coding
    if coding.kind != "fp8" or out % 16 or size % 16:
        return False
    if _by_output(w):
        return limits.capability >= 89 or limits == INTERPRETER
    in_blocks = coding.group == coding.outputs == BLOCK and size % (4 * BLOCK) == 0
    return in_blocks and 90 <= limits.capability < 100 and CUDA >= (12, 9)


def padded_rows(rows: int, w: CodedWeight) -> int:
    """Rows that a product of `rows` has room for."""
    return rows if _by_output(w) else rows + -rows % PADDED_ROWS


def _by_output(w: CodedWeight) -> bool:
    return w.coding.group >= w.shape[1] and w.coding.outputs == 1


def scaled_linear(codes: Tensor, scales: Tensor, w: CodedWeight, out: Tensor) -> None:
    """Write `x W^T + b` into `out` `[N, out]`, summed in fp32 and rounded once, for a device that `serves` w.

    x is what `quantize_rows` writes: `codes` `[M, in]` uint8 and `scales` `[groups, M]`, M being `padded_rows` of N.
    Memory behind `out`'s rows has room for M; what is in it then is no one's.
    """
    rows = codes.shape[0]
    whole = out.as_strided((rows, w.shape[0]), out.stride())
    # With one group the scales of rows lie as cuBLAS and CPUs have them: [M, 1].
    of_rows = scales.view(-1, 1) if len(scales) == 1 else scales.t()
    operands = [codes.view(torch.float8_e4m3fn), w.codes.view(torch.float8_e4m3fn).t(), of_rows, w.scales.t()]
    torch.ops.specrs.scaled_linear(operands, w.bias, whole)


@torch.library.custom_op("specrs::scaled_linear", mutates_args=("out",))
def _scaled_linear(operands: list[Tensor], bias: Tensor | None, out: Tensor) -> None:
    x, weight, of_rows, of_outputs = operands
    torch._scaled_mm(x, weight, of_rows, of_outputs, bias=bias, out_dtype=out.dtype, out=out)


@_scaled_linear.register_fake
def _(operands: list[Tensor], bias: Tensor | None, out: Tensor) -> None:
    x, weight, of_rows, of_outputs = operands
    assert out.stride(1) == 1
    # Torch's own check of a GPU's shapes and strides.
    assert torch._scaled_mm(x, weight, of_rows, of_outputs, bias=bias, out_dtype=out.dtype).shape == out.shape


def scaled_linear_reference(x: Tensor, w: CodedWeight) -> Tensor:
    """What they make of rows x `[N, in]` in 16 or more bits, in float64: rounded by the law, multiplied, added."""
    y = w.multiplied(x.double()) @ w.dequantized().t()
    return y if w.bias is None else y + w.bias.double()
