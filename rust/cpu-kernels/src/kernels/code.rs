//! Types of unpacked weights: sixteen elements become N vectors of fp32 numbers.

use super::element::Element;
use crate::isa::{LANES, Simd};
use crate::memory::Bf16;

/// Element that holds N weights.
pub(crate) trait Code<const N: usize>: Copy + Default + Send + Sync + 'static {
    /// Whether elements are pairs that can be multiplied directly.
    const PAIRED: bool = false;
    /// Returns vector `n` of sixteen elements.
    fn expand<S: Simd>(s: S, codes: &[Self; LANES], n: usize) -> S::V;

    /// Returns the bits of sixteen pairs, for `Simd::dot`.
    #[inline(always)]
    fn bits<S: Simd>(s: S, codes: &[Self; LANES]) -> S::V {
        let _ = codes;
        s.splat(0.0)
    }
}

impl Code<1> for f32 {
    #[inline(always)]
    fn expand<S: Simd>(s: S, codes: &[Self; LANES], _: usize) -> S::V {
        Element::load(s, codes)
    }
}

impl Code<1> for Bf16 {
    #[inline(always)]
    fn expand<S: Simd>(s: S, codes: &[Self; LANES], _: usize) -> S::V {
        Element::load(s, codes)
    }
}

/// Pairs of bf16 numbers. Their rows are [`Pairs`](super::pairs), the second numbers before the first.
impl Code<2> for [Bf16; 2] {
    const PAIRED: bool = true;

    #[inline(always)]
    fn expand<S: Simd>(s: S, codes: &[Self; LANES], n: usize) -> S::V {
        if n == 0 { s.load_pairs::<true>(codes) } else { s.load_pairs::<false>(codes) }
    }

    #[inline(always)]
    fn bits<S: Simd>(s: S, codes: &[Self; LANES]) -> S::V {
        s.load_bits(codes)
    }
}
