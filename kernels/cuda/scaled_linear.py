"""Products of FP8 rows with FP8 weights, for any number of rows, by torch's `_scaled_mm`. Rounds no rows."""

from __future__ import annotations

import torch
from specrs.kernels.cuda.device import INTERPRETER, DeviceLimits
from specrs.kernels.quantized_weight import QuantizedWeight
from torch import Tensor

BLOCK = 128
"""Number of inputs, and of outputs, of a block of weights in cuBLAS."""
PADDED_ROWS = 4
"""In products with scales by block, the number of rows is padded to a multiple of this, because cuBLAS reads 16 bytes
of scales at a time."""
CUDA = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])


def serves(w: QuantizedWeight, limits: DeviceLimits) -> bool:
    """Return True if a device can multiply FP8 rows with w, which must be FP8 with multiples of 16 as sizes.

    It can with scales for each row and each output: from sm_89 on, and on a CPU. With scales for 128 inputs of a row
    and for weight blocks of 128 x 128, it needs sm_90 (no newer one), CUDA 12.9 or newer, and a number of blocks per
    output that is a multiple of 4.
    """
    (out, size), coding = w.shape, w.coding
    if coding.kind != "fp8" or out % 16 or size % 16:
        return False
    if _by_output(w):
        return limits.capability >= 89 or limits == INTERPRETER
    in_blocks = coding.group == coding.outputs == BLOCK and size % (4 * BLOCK) == 0
    return in_blocks and 90 <= limits.capability < 100 and CUDA >= (12, 9)


def padded_rows(rows: int, w: QuantizedWeight) -> int:
    """Return the number of rows for which a product of `rows` rows needs room."""
    return rows if _by_output(w) else rows + -rows % PADDED_ROWS


def _by_output(w: QuantizedWeight) -> bool:
    return w.coding.group >= w.shape[1] and w.coding.outputs == 1


def scaled_linear(codes: Tensor, scales: Tensor, w: QuantizedWeight, out: Tensor) -> None:
    """Write `x W^T + b` into `out` `[N, out]`, summed in fp32 and rounded once, on a device for which `serves` is True.

    x is what `quantize_rows` writes: `codes` `[M, in]` uint8 and `scales` `[groups, M]`, with M = `padded_rows` of N.
    The memory of `out` must have room for M rows. Rows after the N-th are overwritten with meaningless values.
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


def scaled_linear_reference(x: Tensor, w: QuantizedWeight) -> Tensor:
    """Compute `x W^T + b` in float64 for rows x `[N, in]` of 16 or more bits, with x rounded to e4m3 first if
    `w.fp8_rows`."""
    y = w.multiplied(x.double()) @ w.dequantized().t()
    return y if w.bias is None else y + w.bias.double()
