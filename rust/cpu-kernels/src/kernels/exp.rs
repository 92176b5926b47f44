//! The function e^x with the same bits on every instruction set.

use crate::isa::Simd;

/// Returns e^x within 2 units in the last place; 0 below -87, where f32 has no normal value; e^88 above 88. e^0 is 1
/// exactly.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, and the Taylor series of e^r to r^7, which is within 2^-27 of it.
#[inline(always)]
pub(super) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: the first has so few bits that its product with n is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // NaN stays NaN: of two arguments of which one is NaN, min and max give the second.
    let clamped = s.max(s.splat(-87.0), s.min(s.splat(88.0), x));
    let shifted = s.fma(clamped, s.splat(std::f32::consts::LOG2_E), s.splat(ROUND));
    let n = s.sub(shifted, s.splat(ROUND));
    let r = s.fma(n, s.splat(-LN_2_HIGH), clamped);
    let r = s.fma(n, s.splat(-LN_2_LOW), r);
    let mut series = s.splat(1.0 / 5040.0);
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0, 1.0, 1.0] {
        series = s.fma(series, r, s.splat(coefficient));
    }
    let value = s.mul(series, s.pow2(shifted));
    s.select_less(x, s.splat(-87.0), s.splat(0.0), value)
}
