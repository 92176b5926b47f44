"""FP8 codes of K and V in kernels: every code, and every tie between two codes."""

import re

import pytest
import torch
import triton
import triton.language as tl
from specrs.kernels.cuda import _kv_codes
from specrs.kernels.kv_codes import FRACTIONS, encode
from torch import Tensor

from .launch import directly
from .ptx import bf16_of, execute

ASSEMBLY = {torch.float8_e4m3fn: _kv_codes.E4M3_BF16.value, torch.float8_e5m2: _kv_codes.E5M2_BF16.value}
ALL = torch.arange(256, dtype=torch.uint8)


@triton.jit
def numbers_kernel(codes, out, FRACTION: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 256)
    tl.store(out + i, _kv_codes.numbers(tl.load(codes + i), FRACTION, out.dtype.element_ty))


@triton.jit
def encoded_kernel(x, scale, codes, FRACTION: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(codes + i, _kv_codes.encoded(tl.load(x + i), tl.full([256], scale, tl.float32), FRACTION))


def exact(codes: torch.dtype) -> Tensor:
    """Return the value of every FP8 code, float64. Infinity becomes NaN, because no kernel writes its code."""
    values = ALL.view(codes).double()
    return values.where(values.isfinite(), torch.nan)


@pytest.mark.parametrize("codes", FRACTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_of_all_codes(codes: torch.dtype, dtype: torch.dtype) -> None:
    out = torch.zeros(256, dtype=dtype)
    directly(lambda *tensors: numbers_kernel[(1,)](*tensors, FRACTIONS[codes]), ALL, out)
    found = out.double()
    assert torch.equal(found.where(found.isfinite(), torch.nan).nan_to_num(-1.5), exact(codes).nan_to_num(-1.5))
    assert (found.isfinite() == exact(codes).isfinite()).all()


@pytest.mark.parametrize("codes", FRACTIONS)
def test_the_instructions(codes: torch.dtype) -> None:
    """Check the PTX that converts codes to bf16, for every code in every byte; the interpreter cannot run it."""
    for code in range(256):
        others = [(code * 7 + 31 * i) % 120 for i in range(3)]
        for place in range(4):
            four = [*others[:place], code, *others[place:]]
            made = execute(ASSEMBLY[codes], {"$2": sum(each << 8 * i for i, each in enumerate(four))})
            found = bf16_of([made["$0"], made["$1"]])
            assert torch.equal(found.nan_to_num(-1.5), exact(codes)[four].nan_to_num(-1.5)), (code, place)
            zeros = found == 0
            assert torch.equal(found.signbit()[zeros], torch.tensor([each > 127 for each in four])[zeros])


def test_every_operand_is_used() -> None:
    for text in ASSEMBLY.values():
        assert {int(n) for n in re.findall(r"\$(\d)", text)} == {0, 1, 2}


@pytest.mark.parametrize("codes", FRACTIONS)
@pytest.mark.parametrize("scale", [1.0, 0.037])
def test_what_is_written(codes: torch.dtype, scale: float) -> None:
    """Check that encoding equals torch's conversion: for representable numbers, ties and their neighbours, and too
    large numbers."""
    values = exact(codes).float()
    values = values[values.isfinite()]
    halves = (values[1:] + values[:-1]) / 2
    x = torch.cat((values, halves, halves.nextafter(torch.tensor(torch.inf)), halves.nextafter(torch.tensor(0.0))))
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e-45, 0.0, -0.0])
    more = torch.randn(4096 - len(x) - len(ends), generator=torch.Generator().manual_seed(0))
    x = torch.cat((x * scale, ends, more * more.abs().mul(9).exp()))
    out = torch.zeros(len(x), dtype=torch.uint8)
    directly(lambda x, out: encoded_kernel[(len(x) // 256,)](x, scale, out, FRACTIONS[codes]), x.contiguous(), out)
    expected = encode(x, scale, codes)
    there = ~expected.double().isnan()
    assert torch.equal(out[there], expected.view(torch.uint8)[there])
    assert torch.equal(out.view(codes).double().isnan(), ~there)
