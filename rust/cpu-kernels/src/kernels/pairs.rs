//! Rows rounded to bf16 and laid out for products of pairs with pairs. Multiplies nothing.

use crate::isa::{Isa, Kernel, LANES, Simd, Vector};

/// Number of inputs of a row that are laid out together: sixteen pairs.
pub const PAIRS: usize = 2 * LANES;
/// Absolute value below which numbers of rows become zeros.
pub(crate) const LEAST_ROW: f32 = f32::from_bits((127 - 40) << 23);
/// Absolute value below which weights other than zeros must not be multiplied by instructions that treat subnormal
/// numbers as zeros. Products of larger weights are multiples of `2^-40 2^-7 2^-72 2^-7`, the smallest normal number,
/// and so are all sums of them.
pub const LEAST_WEIGHT: f32 = f32::from_bits((127 - 72) << 23);

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
pub struct RoundPairs<'a> {
    /// Rows, a multiple of two vectors each, overwritten.
    pub x: &'a mut [Vector],
}

impl RoundPairs<'_> {
    /// Rounds the rows, in the layout of the products of pairs with these instructions.
    pub fn run(self, isa: Isa) {
        isa.run_pairs(self);
    }
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
