"""Philox4x32-10 noise on the device: the same words and uniforms as in `specrs.core`, and Gumbel values to 2 ulp. Draws
no tokens.

The layout is that of `rust/core/src/philox.rs`, and frozen: key = the seed, counter = (token / 4, low and high word of
the position, purpose), lane = token % 4. The sampling kernels make noise in registers. `fill_noise` writes noise to
memory, for tests and for users who want the same numbers.

Gumbel values are computed in float64, because the 32 bits of a word do not fit float32, and a logarithm near 1 loses
most of the rest. The logarithm is that of the Rust core, operation by operation. It takes about 30 float64 operations
per value, one of them a division, which is noticeable on GPUs that run float64 at 1/64 of the speed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.core import philox_gumbel, philox_uniform
from specrs.kernels.cuda.sampling_scratch import expect
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

BLOCK = 1024
"""Number of tokens per program of `fill_noise`."""


@triton.jit
def philox_words(seed, position, purpose, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the words of tokens first .. first + BLOCK, `[BLOCK]` uint32. `first` is a multiple of 4; seed and
    position are int64."""
    group = (tl.arange(0, BLOCK // 4) + first // 4).to(tl.uint32)
    zero = group * 0
    bits = position.to(tl.uint64, bitcast=True)
    low = zero + (bits & 0xFFFFFFFF).to(tl.uint32)
    high = zero + (bits >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed.to(tl.uint64, bitcast=True), group, low, high, (zero + purpose).to(tl.uint32))
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def uniform_from_word(word):  # type: ignore[no-untyped-def]
    """Return `((word >> 9) + 0.5) * 2^-23` in float32, which is exact."""
    return ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def uniform(seed, position, purpose):  # type: ignore[no-untyped-def]
    """Return the uniforms of token 0, for `position` of any shape."""
    zero = (position * 0).to(tl.uint32)
    bits = position.to(tl.uint64, bitcast=True)
    low = (bits & 0xFFFFFFFF).to(tl.uint32)
    high = (bits >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(seed.to(tl.uint64, bitcast=True), zero, low, high, (zero + purpose).to(tl.uint32))
    return uniform_from_word(word)


@triton.jit
def log64(x):  # type: ignore[no-untyped-def]
    """Return ln of a positive normal float64, with a relative error under 2^-40. It is `math::ln` of the Rust core."""
    # Constants are written as integers and ratios: a Python float in an expression with float64 may become float32.
    bits = x.to(tl.int64, bitcast=True) + 0x95F619980C433  # 1.0 - sqrt(1/2), as bits
    exponent = ((bits >> 52) - 1023).to(tl.float64)
    m = ((bits & 0xFFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD).to(tl.float64, bitcast=True)
    one = tl.full([1], 1.0, tl.float64)
    two = one + one
    s = (m - one) / (m + one)
    z = s * s
    z2 = z * z
    low = (two / 3 + z * (two / 5)) + z2 * (two / 7 + z * (two / 9))
    high = (two / 11 + z * (two / 13)) + z2 * (two / 15)
    ln2 = tl.full([1], 0x3FE62E42FEFA39EF, tl.int64).to(tl.float64, bitcast=True)
    return (exponent * ln2 + (s + s)) + s * (z * (low + (z2 * z2) * high))


@triton.jit
def gumbel_from_word(word):  # type: ignore[no-untyped-def]
    """Return `-ln(-ln((word + 0.5) * 2^-32))`, computed in float64 and rounded once to float32."""
    half = tl.full([1], 0.5, tl.float64)
    scale = tl.full([1], 0x3DF0000000000000, tl.int64).to(tl.float64, bitcast=True)  # 2^-32
    u = (word.to(tl.float64) + half) * scale
    return (-log64(-log64(u))).to(tl.float32)


@triton.jit
def gumbel(seed, position, purpose, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return standard Gumbel values of tokens first .. first + BLOCK, `[BLOCK]` float32."""
    return gumbel_from_word(philox_words(seed, position, purpose, first, BLOCK))


@triton.jit(do_not_specialize=["purpose"])
def fill_noise_kernel(  # type: ignore[no-untyped-def]
    seeds, positions, out, out_stride, purpose, V, GUMBEL: tl.constexpr, BLOCK: tl.constexpr
):
    row, first = tl.program_id(1), tl.program_id(0) * BLOCK
    words = philox_words(tl.load(seeds + row), tl.load(positions + row), purpose, first, BLOCK)
    noise = gumbel_from_word(words) if GUMBEL else uniform_from_word(words)
    token = first + tl.arange(0, BLOCK)
    tl.store(out + row.to(tl.int64) * out_stride + token, noise, mask=token < V)


@torch.library.custom_op("specrs::fill_noise", mutates_args=["out"])
def fill_noise(seeds: Tensor, positions: Tensor, purpose: int, out: Tensor, gumbel: bool) -> None:
    """Write the noise of tokens 0..V-1 at `(seeds[r], positions[r])` into row r of `out`, in one launch.

    Args:
        seeds: `[N]` int64, whose bits are taken as unsigned.
        positions: `[N]` int64, whose bits are taken as unsigned.
        purpose: one of `specrs.core.PURPOSE_*`.
        out: `[N, V]` fp32, dense rows.
        gumbel: True for standard Gumbel values, False for uniforms in (0, 1).
    """
    if out.numel():
        grid = (triton.cdiv(out.shape[1], BLOCK), out.shape[0])
        fill_noise_kernel[grid](
            seeds,
            positions,
            out,
            out.stride(0),
            purpose,
            out.shape[1],
            GUMBEL=gumbel,
            BLOCK=BLOCK,
            enable_fp_fusion=True,
        )


@fill_noise.register_fake
def _(seeds: Tensor, positions: Tensor, purpose: int, out: Tensor, gumbel: bool) -> None:
    expect("seeds", seeds, out.shape[:1], torch.int64)
    expect("positions", positions, out.shape[:1], torch.int64)
    expect("out", out, out.shape, torch.float32)


def fill_noise_reference(seeds: Tensor, positions: Tensor, purpose: int, out: Tensor, gumbel: bool) -> None:
    """Do what `fill_noise` does, by the Rust core, for tensors on the CPU."""
    fill = philox_gumbel if gumbel else philox_uniform
    fill(seeds.numpy(), positions.numpy(), purpose, out.numpy())


VARIANTS = tuple(
    Variant(
        f"fill_noise_{kind}",
        fill_noise_kernel,
        {"seeds": "*i64", "positions": "*i64", "out": "*fp32", "out_stride": "i32", "purpose": "i32", "V": "i32"},
        {"GUMBEL": kind == "gumbel", "BLOCK": BLOCK},
    )
    for kind in ("gumbel", "uniform")
)
