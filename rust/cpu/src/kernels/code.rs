//! The types that weights are stored as: sixteen codes become N vectors of fp32 numbers. Knows no layout of a matrix.

use super::element::Element;
use crate::isa::{LANES, Simd};
use crate::memory::Bf16;

/// A code of N weights.
pub(crate) trait Code<const N: usize>: Copy + Default + Send + Sync + 'static {
    /// Whether codes are multiples of a scale.
    const SCALED: bool;
    /// Whether codes are pairs that may be multiplied as they are.
    const PAIRED: bool = false;
    /// Vector `n` of sixteen codes, times the scale where they have one, rounded once.
    fn expand<S: Simd>(s: S, codes: &[Self; LANES], n: usize, scale: S::V) -> S::V;

    /// Sixteen pairs, for `Simd::dot`.
    #[inline(always)]
    fn bits<S: Simd>(s: S, codes: &[Self; LANES]) -> S::V {
        let _ = codes;
        s.splat(0.0)
    }
}

impl Code<1> for f32 {
    const SCALED: bool = false;

    #[inline(always)]
    fn expand<S: Simd>(s: S, codes: &[Self; LANES], _: usize, _: S::V) -> S::V {
        Element::load(s, codes)
    }
}

impl Code<1> for Bf16 {
    const SCALED: bool = false;

    #[inline(always)]
    fn expand<S: Simd>(s: S, codes: &[Self; LANES], _: usize, _: S::V) -> S::V {
        Element::load(s, codes)
    }
}

/// Two bf16 numbers; their rows are [`Pairs`](super::pairs), the second numbers before the first.
impl Code<2> for [Bf16; 2] {
    const SCALED: bool = false;
    const PAIRED: bool = true;

    #[inline(always)]
    fn expand<S: Simd>(s: S, codes: &[Self; LANES], n: usize, _: S::V) -> S::V {
        if n == 0 { s.load_pairs::<true>(codes) } else { s.load_pairs::<false>(codes) }
    }

    #[inline(always)]
    fn bits<S: Simd>(s: S, codes: &[Self; LANES]) -> S::V {
        s.load_bits(codes)
    }
}

impl Code<1> for i8 {
    const SCALED: bool = true;

    #[inline(always)]
    fn expand<S: Simd>(s: S, codes: &[Self; LANES], _: usize, scale: S::V) -> S::V {
        s.mul(s.load_i8(codes), scale)
    }
}

/// Two INT4 codes, each plus 8.
impl Code<2> for u8 {
    const SCALED: bool = true;

    #[inline(always)]
    fn expand<S: Simd>(s: S, codes: &[Self; LANES], n: usize, scale: S::V) -> S::V {
        if n == 0 { s.load_i4::<false>(codes, scale) } else { s.load_i4::<true>(codes, scale) }
    }
}
