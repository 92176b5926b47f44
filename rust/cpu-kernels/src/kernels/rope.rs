//! Rotary position embedding of halves of a head or of neighbouring features, and the norm of heads before it.

use super::norm::scale;
use crate::isa::{Kernel, Simd};

/// Cosines and sines of the angles `position * frequency`, products in fp32.
pub struct Angles<'a> {
    /// Position, at least 0.
    pub position: i64,
    /// Angle of each pair at position 1, `[P]`.
    pub frequencies: &'a [f32],
    /// Factor of cosines and sines.
    pub magnitude: f32,
    /// Cosines, `[P]`.
    pub cos: &'a mut [f32],
    /// Sines, `[P]`.
    pub sin: &'a mut [f32],
}

impl Kernel for Angles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let position = self.position as f32;
        for ((frequency, cos), sin) in self.frequencies.iter().zip(self.cos).zip(self.sin) {
            let (s, c) = sin_cos(position * frequency);
            (*sin, *cos) = (s * self.magnitude, c * self.magnitude);
        }
    }
}

/// Returns sine and cosine for `|x| <= 2^20`, each the nearest f32 or its neighbour. It computes in f64 by products and
/// sums that are rounded one by one, so that every machine has the same bits.
///
/// `x = n pi/2 + r` with `|r| <= pi/4`, and the Taylor series of both to r^13, which are within 2^-41 of them.
#[inline(always)]
fn sin_cos(x: f32) -> (f32, f32) {
    // Adding 1.5 * 2^52 rounds to an integer and leaves it in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // pi/2 in two parts: the first has 33 bits, so that its product with n is exact.
    const HALF_PI_HIGH: f64 = 1.570_796_326_734_125_6;
    const HALF_PI_LOW: f64 = 6.077_100_506_506_192e-11;
    let x = f64::from(x);
    let shifted = x * std::f64::consts::FRAC_2_PI + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * HALF_PI_HIGH) - n * HALF_PI_LOW;
    let z = r * r;
    let sin = r + r
        * z
        * (-1.0 / 6.0
            + z * (1.0 / 120.0
                + z * (-1.0 / 5040.0
                    + z * (1.0 / 362_880.0 + z * (-1.0 / 39_916_800.0 + z * (1.0 / 6_227_020_800.0))))));
    let cos = 1.0
        + z * (-1.0 / 2.0
            + z * (1.0 / 24.0
                + z * (-1.0 / 720.0 + z * (1.0 / 40_320.0 + z * (-1.0 / 3_628_800.0 + z * (1.0 / 479_001_600.0))))));
    let quarter = shifted.to_bits();
    let (sin, cos) = if quarter & 1 == 0 { (sin, cos) } else { (cos, sin) };
    // Sines are negative in quarters 2 and 3, cosines in 1 and 2.
    let negate = |x: f64, quarter: u64| f64::from_bits(x.to_bits() ^ (quarter >> 1 & 1) << 63);
    (negate(sin, quarter) as f32, negate(cos, quarter.wrapping_add(1)) as f32)
}

/// Norms one query or key head, if there is a norm, then rotates it.
pub struct QkHead<'a> {
    /// Head, `[head_dim]`, overwritten.
    pub x: &'a mut [f32],
    /// Weight of the norm, `[head_dim]`.
    pub norm: Option<&'a [f32]>,
    /// Number that the norm adds to the mean of the squares.
    pub eps: f32,
    /// Cosines, `[P]`. Feature i < P is rotated against feature P + i; without cosines nothing is rotated.
    pub cos: &'a [f32],
    /// Sines, `[P]`.
    pub sin: &'a [f32],
    /// Whether feature 2 i is rotated against feature 2 i + 1 instead.
    pub interleaved: bool,
}

impl Kernel for QkHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if let Some(weight) = self.norm {
            let scale = scale(s, self.x, self.eps);
            for (x, weight) in self.x.iter_mut().zip(weight) {
                *x = *x * scale * weight;
            }
        }
        let turns = self.cos.iter().zip(self.sin);
        if self.interleaved {
            let (pairs, _) = self.x.as_chunks_mut::<2>();
            for ([a, b], (cos, sin)) in pairs.iter_mut().zip(turns) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
            return;
        }
        let (low, high) = self.x.split_at_mut(self.cos.len());
        for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(turns) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}
