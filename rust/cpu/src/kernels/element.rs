//! The types that weights, K and V are stored as, and how their vectors are loaded.

use crate::isa::{LANES, Simd};
use crate::memory::Bf16;

/// A number that expands to f32 exactly.
pub(crate) trait Element: Copy + Default + Send + Sync + 'static {
    /// Sixteen of them.
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::V;
    /// The nearest to `x`.
    fn round(x: f32) -> Self;
    /// As f32.
    fn expand(self) -> f32;

    /// Fewer than sixteen, zeros behind them.
    #[inline(always)]
    fn load_tail<S: Simd>(s: S, x: &[Self]) -> S::V {
        let mut padded = [Self::default(); LANES];
        padded[..x.len()].copy_from_slice(x);
        Self::load(s, &padded)
    }
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::V {
        s.load(x)
    }

    #[inline(always)]
    fn round(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn expand(self) -> f32 {
        self
    }
}

impl Element for Bf16 {
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::V {
        s.load_bf16(x)
    }

    #[inline(always)]
    fn round(x: f32) -> Self {
        Self::from_f32(x)
    }

    #[inline(always)]
    fn expand(self) -> f32 {
        self.to_f32()
    }
}
