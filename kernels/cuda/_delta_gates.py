"""Gates of delta nets in float64: one number for each value head and row. Launches nothing.

Float32 would do for one row. But a decay near 1 is multiplied row after row, and errors of the device's fast
exponential add up over thousands of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp64(x):  # type: ignore[no-untyped-def]
    """Return e^x of float64: 0 below -700, and e^700 above 700. NaN stays NaN.

    `x = n ln 2 + r` with `|r| <= ln 2 / 2`, and the Taylor series of e^r to r^13, which is within 2^-60 of it.
    """
    # Constants are bits and ratios: a Python float in an expression with float64 may become float32.
    one = tl.full([1], 1.0, tl.float64)
    log2e = tl.full([1], 0x3FF71547652B82FE, tl.int64).to(tl.float64, bitcast=True)
    # ln 2 in two parts: the first has so few bits that its product with n is exact.
    high = tl.full([1], 0x3FE62E42FEE00000, tl.int64).to(tl.float64, bitcast=True)
    low = tl.full([1], 0x3DEA39EF35793C76, tl.int64).to(tl.float64, bitcast=True)
    # Adding 1.5 * 2^52 rounds to an integer.
    large = tl.full([1], 0x4338000000000000, tl.int64).to(tl.float64, bitcast=True)
    most = one * 700
    bounded = tl.where(x > most, most, tl.where(x < -most, -most, x))
    n = (bounded * log2e + large) - large
    r = (bounded - n * high) - n * low
    series = one
    for i in tl.static_range(13):
        series = one + series * (r * (one / (13 - i)))
    exponent = tl.where(x == x, n, one - one).to(tl.int64)
    power = ((exponent + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x < -most, one - one, series * power)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """Return `1 / (1 + e^-x)` of float32."""
    one = tl.full([1], 1.0, tl.float64)
    return (one / (one + exp64(-x.to(tl.float64)))).to(tl.float32)


@triton.jit
def decay(a, dt_bias, a_log):  # type: ignore[no-untyped-def]
    """Return `exp(-e^a_log softplus(a + dt_bias))` of float32 (Yang et al. 2025, section 3.4)."""
    one = tl.full([1], 1.0, tl.float64)
    x = a.to(tl.float64) + dt_bias.to(tl.float64)
    y = exp64(-tl.abs(x))
    # ln(1 + y) is 2 artanh(y / (2 + y)); its series to the 25th power is within 2^-42 of it.
    t = y / (one + one + y)
    square = t * t
    series = one / 25
    for i in tl.static_range(12):
        series = series * square + one / (23 - 2 * i)
    softplus = tl.where(x > 0, x, one - one) + (t + t) * series
    return exp64(-exp64(a_log.to(tl.float64)) * softplus).to(tl.float32)
