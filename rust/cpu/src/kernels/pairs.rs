//! Rows rounded to bf16 and laid out for products of pairs with pairs. Multiplies nothing.

use crate::isa::{Kernel, LANES, Simd, Vector};

/// Number of inputs of a row that are laid out together: sixteen pairs.
pub(crate) const PAIRS: usize = 2 * LANES;
/// Absolute value below which numbers of rows become zeros.
pub(crate) const LEAST_ROW: f32 = f32::from_bits((127 - 40) << 23);
/// Absolute value below which weights other than zeros must not be multiplied by instructions that treat subnormal
/// numbers as zeros. Products of larger weights are multiples of `2^-40 2^-7 2^-72 2^-7`, the smallest normal number,
/// and so are all sums of them.
pub(crate) const LEAST_WEIGHT: f32 = f32::from_bits((127 - 72) << 23);

/// Returns the nearest bf16 as fp32, ties to even; zero for tiny numbers. Selections instead of branches let the
/// compiler work lane by lane.
#[inline(always)]
pub(crate) fn round_row(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
    let rounded = if x.is_nan() { bits | 0x0040_0000 } else { rounded };
    f32::from_bits(if x.abs() < LEAST_ROW { 0 } else { rounded & 0xFFFF_0000 })
}

/// Rounds rows to the nearest bf16, ties to even, in place. Every 32 numbers become 16 pairs. If the machine multiplies
/// pairs, a pair's bits lie side by side; otherwise the second numbers of all pairs come before the first, as fp32.
pub(crate) struct RoundPairs<'a> {
    pub(crate) x: &'a mut [Vector],
}

impl Kernel for RoundPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for pairs in self.x.as_chunks_mut::<2>().0 {
            let rounded: [u32; PAIRS] = std::array::from_fn(|i| round_row(pairs[i / LANES][i % LANES]).to_bits());
            if S::DOTS {
                pairs[0] = std::array::from_fn(|i| f32::from_bits(rounded[2 * i] >> 16 | rounded[2 * i + 1]));
            } else {
                pairs[0] = std::array::from_fn(|i| f32::from_bits(rounded[2 * i + 1]));
                pairs[1] = std::array::from_fn(|i| f32::from_bits(rounded[2 * i]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    /// Checks rounding to the nearest bf16, ties to even. Tiny numbers become positive zeros. Both layouts hold the
    /// same pairs.
    #[test]
    fn rows_are_rounded_and_paired() {
        let tie = |bits: u32| f32::from_bits(bits << 16 | 0x8000);
        let given = [
            (1.0, 1.0),
            (1.0 + 1.0 / 512.0, 1.0),
            (tie(0x3F80), 1.0),
            (tie(0x3F81), 1.0 + 1.0 / 64.0),
            (-tie(0x3F81), -1.0 - 1.0 / 64.0),
            (LEAST_ROW, LEAST_ROW),
            (-LEAST_ROW, -LEAST_ROW),
            (LEAST_ROW * 0.9999, 0.0),
            (-LEAST_ROW * 0.9999, 0.0),
            (f32::MIN_POSITIVE / 2.0, 0.0),
            (f32::INFINITY, f32::INFINITY),
            (f32::MAX, f32::INFINITY),
        ];
        let x: [f32; PAIRS] = std::array::from_fn(|i| given[i % given.len()].0);
        let nan = std::array::from_fn(|i| if i == 3 { f32::NAN } else { x[i] });
        for (x, nan_at) in [(x, PAIRS), (nan, 3)] {
            for isa in Isa::available() {
                let mut vectors: [Vector; 2] = std::array::from_fn(|v| std::array::from_fn(|i| x[v * LANES + i]));
                isa.run_pairs(RoundPairs { x: &mut vectors });
                for i in 0..PAIRS {
                    let found = if isa.name() == "portable" || isa.has_dots() {
                        let bits = vectors[0][i / 2].to_bits();
                        f32::from_bits(if i % 2 == 0 { bits << 16 } else { bits & 0xFFFF_0000 })
                    } else {
                        vectors[1 - i % 2][i / 2]
                    };
                    let expected = given[i % given.len()].1;
                    let right = if i == nan_at { found.is_nan() } else { found.to_bits() == expected.to_bits() };
                    assert!(right, "{}: {i}: {found:?}", isa.name());
                }
            }
        }
    }
}
