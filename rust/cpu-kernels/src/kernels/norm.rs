//! Root mean square normalisation (Zhang and Sennrich 2019, eq. 4). No mean is subtracted, no bias added.

use super::element::Element;
use crate::isa::{Kernel, LANES, Simd, Vector};

/// Computes `out = x / sqrt(mean(x^2) + eps) * weight`.
pub struct RmsNorm<'a> {
    /// Numbers to norm.
    pub x: &'a [f32],
    /// Weights, one for each element of `x`.
    pub weight: &'a [f32],
    /// Number that is added to the mean of the squares.
    pub eps: f32,
    /// Results, with zeros after the last element.
    pub out: &'a mut [Vector],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let scale = scale(s, self.x, self.eps);
        let out = self.out.as_flattened_mut();
        let (values, padding) = out.split_at_mut(self.x.len());
        for ((out, x), weight) in values.iter_mut().zip(self.x).zip(self.weight) {
            *out = x * scale * weight;
        }
        padding.fill(0.0);
    }
}

/// Computes the factor of `x` in a norm over features that several threads compute.
pub struct RmsScale<'a> {
    /// Numbers whose norm is taken.
    pub x: &'a [f32],
    /// Number that is added to the mean of the squares.
    pub eps: f32,
}

impl Kernel for RmsScale<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        scale(s, self.x, self.eps)
    }
}

/// Returns `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(super) fn scale<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    1.0 / (squares(s, x) / x.len() as f32 + eps).sqrt()
}

/// Returns the sum of squares. Vectors are summed by their number modulo 4, so that sums do not wait for each other.
#[inline(always)]
pub(super) fn squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let (vectors, tail) = x.as_chunks::<LANES>();
    let (fours, rest) = vectors.as_chunks::<4>();
    let mut sums = [s.splat(0.0); 4];
    for four in fours {
        for j in 0..4 {
            let x = s.load(&four[j]);
            sums[j] = s.fma(x, x, sums[j]);
        }
    }
    for (j, x) in rest.iter().enumerate() {
        let x = s.load(x);
        sums[j] = s.fma(x, x, sums[j]);
    }
    if !tail.is_empty() {
        let x = f32::load_tail(s, tail);
        sums[3] = s.fma(x, x, sums[3]);
    }
    s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}
