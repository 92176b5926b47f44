//! Sixteen lanes as an array: the meaning that the other instruction sets keep to, and what serves where there is none.

use super::{LANES, Simd};
use crate::memory::Bf16;

/// Needs nothing of the machine. Fused multiply-adds are calls where the compiler's target lacks them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Portable;

type V = [f32; LANES];

#[inline(always)]
fn lanes(f: impl Fn(usize) -> f32) -> V {
    std::array::from_fn(f)
}

impl Simd for Portable {
    type V = V;
    const WIDE: bool = false;
    /// So that tests meet this way of laying out rows on every machine.
    const DOTS: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> V {
        *x
    }

    #[inline(always)]
    fn load_bf16(self, x: &[Bf16; LANES]) -> V {
        lanes(|i| x[i].to_f32())
    }

    #[inline(always)]
    fn load_pairs<const SECOND: bool>(self, x: &[[Bf16; 2]; LANES]) -> V {
        lanes(|i| x[i][usize::from(SECOND)].to_f32())
    }

    #[inline(always)]
    fn dot(self, a: V, b: V, acc: V) -> V {
        let second = |x: f32| f32::from_bits(x.to_bits() & 0xFFFF_0000);
        let first = |x: f32| f32::from_bits(x.to_bits() << 16);
        lanes(|i| first(a[i]).mul_add(first(b[i]), second(a[i]).mul_add(second(b[i]), acc[i])))
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> V {
        lanes(|i| f32::from(x[i]))
    }

    #[inline(always)]
    fn load_i4<const UPPER: bool>(self, x: &[u8; LANES], scale: V) -> V {
        lanes(|i| (f32::from(if UPPER { x[i] >> 4 } else { x[i] & 15 }) - 8.0) * scale[i])
    }

    #[inline(always)]
    fn store(self, v: V, out: &mut [f32; LANES]) {
        *out = v;
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        lanes(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        lanes(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        lanes(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        lanes(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        lanes(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        lanes(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn select_less(self, a: V, b: V, x: V, y: V) -> V {
        lanes(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }

    #[inline(always)]
    fn pow2(self, shifted: V) -> V {
        lanes(|i| f32::from_bits(shifted[i].to_bits().wrapping_add(127) << 23))
    }

    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        let eight: [f32; 8] = std::array::from_fn(|i| v[i] + v[i + 8]);
        let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }

    #[inline(always)]
    fn sums4(self, v: [V; 4]) -> [f32; 4] {
        v.map(|v| self.sum(v))
    }

    #[inline(always)]
    fn sums8(self, v: [V; 8]) -> [f32; 8] {
        v.map(|v| self.sum(v))
    }
}
