//! Logarithm and exponential with the same bits on every machine, written so that loops vectorise.

/// Converts `n` below 2^52 to f64 by writing it into the mantissa of 2^52, because SSE2 has no conversion for 64-bit
/// integers.
#[inline]
pub(crate) fn to_f64(n: u64) -> f64 {
    f64::from_bits(0x4330_0000_0000_0000 | n) - 4_503_599_627_370_496.0
}

/// Computes the natural logarithm of a positive normal f64 with a relative error below 2^-40.
///
/// `x = 2^exponent m` with m in `[sqrt(1/2), sqrt(2))`, and `ln m = 2 atanh(s) = 2 (s + s^3/3 + s^5/5 + ...)` with `s =
/// (m - 1) / (m + 1)`, `s^2 <= 0.0295`. The standard library's `ln` calls the platform's, whose bits differ between
/// machines, once per value. This function is branch-free over 64-bit adds, shifts and masks. So loops vectorise on
/// every x86-64, which takes a third off [`fill_gumbel`](crate::philox::fill_gumbel).
#[inline]
pub(crate) fn ln(x: f64) -> f64 {
    const SQRT_HALF: u64 = 0x3FE6_A09E_667F_3BCD;
    const ONE: u64 = 0x3FF0_0000_0000_0000;
    const MANTISSA: u64 = 0x000F_FFFF_FFFF_FFFF;
    let bits = x.to_bits() + (ONE - SQRT_HALF);
    let exponent = to_f64(bits >> 52) - 1023.0;
    let m = f64::from_bits((bits & MANTISSA) + SQRT_HALF);
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let z2 = z * z;
    // 2/3 + 2/5 z + ... + 2/15 z^6, paired: the chain of a Horner scheme is a fifth slower.
    let low = (2.0 / 3.0 + z * (2.0 / 5.0)) + z2 * (2.0 / 7.0 + z * (2.0 / 9.0));
    let high = (2.0 / 11.0 + z * (2.0 / 13.0)) + z2 * (2.0 / 15.0);
    (exponent * std::f64::consts::LN_2 + (s + s)) + s * (z * (low + (z2 * z2) * high))
}

/// Computes e^x for `x <= 0` with a relative error below 2^-22. The result is 0 below -87, where f32 has no normal
/// value, and e^0 is 1 exactly.
///
/// The method is `x = n ln 2 + r` with `|r| <= ln 2 / 2`, and the Taylor series of e^r up to r^7.
#[inline]
pub(crate) fn exp_nonpositive(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: the first has so few bits that its product with n is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN_2_HIGH) - n * LN_2_LOW;
    let r2 = r * r;
    let low = 1.0 / 2.0 + r * (1.0 / 6.0);
    let high = (1.0 / 24.0 + r * (1.0 / 120.0)) + r2 * (1.0 / 720.0 + r * (1.0 / 5040.0));
    let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    let value = (1.0 + (r + r2 * (low + r2 * high))) * power;
    if x < -87.0 { 0.0 } else { value }
}

#[cfg(test)]
mod tests {
    use super::exp_nonpositive;

    #[test]
    fn exp_is_accurate() {
        assert!((exp_nonpositive(0.0) - 1.0).abs() <= 0.0);
        assert!((exp_nonpositive(-0.0) - 1.0).abs() <= 0.0);
        for i in 0..870_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp_nonpositive(x)) - exact).abs() / exact;
            assert!(error < 2_f64.powi(-22), "e^{x} is off by {error:e} of itself");
        }
        for x in [-87.1, -200.0, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(exp_nonpositive(x).to_bits(), 0, "e^{x}");
        }
    }
}
