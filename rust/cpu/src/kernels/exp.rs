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

#[cfg(test)]
mod tests {
    use super::exp;
    use crate::isa::{Isa, Kernel, LANES, Simd};

    struct Exp([f32; LANES]);

    impl Kernel for Exp {
        type Output = [f32; LANES];

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Output {
            let mut out = [0.0; LANES];
            s.store(exp(s, s.load(&self.0)), &mut out);
            out
        }
    }

    #[test]
    fn exponentials_are_accurate_and_the_same_everywhere() {
        for i in (-86_990..87_980_i32).step_by(LANES) {
            let x = std::array::from_fn(|j| (i + j as i32) as f32 * 1e-3);
            let sets = Isa::available();
            let found = sets[0].run(Exp(x));
            assert!(sets.iter().all(|isa| isa.run(Exp(x)).map(f32::to_bits) == found.map(f32::to_bits)), "{x:?}");
            for (x, found) in x.iter().zip(found) {
                let exact = f64::from(*x).exp();
                let error = (f64::from(found) - exact).abs() / exact;
                assert!(error < 2_f64.powi(-23), "e^{x} is off by {error:e} of itself");
            }
        }
    }

    #[test]
    fn ends_are_as_documented() {
        for isa in Isa::available() {
            let mut x = [0.0; LANES];
            x[..8].copy_from_slice(&[0.0, -0.0, f32::NEG_INFINITY, -87.1, f32::NAN, 1e30, f32::INFINITY, -1e-30]);
            let y = isa.run(Exp(x));
            assert_eq!(y[..4], [1.0, 1.0, 0.0, 0.0], "{}", isa.name());
            assert!(y[4].is_nan() && y[5] > 1e38 && y[5].is_finite() && y[6].is_finite(), "{}", isa.name());
            assert_eq!(y[7].to_bits(), 1.0_f32.to_bits());
        }
    }
}
