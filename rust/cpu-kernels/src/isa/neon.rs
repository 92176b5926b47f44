//! Sixteen lanes as four NEON registers of four.

#![allow(unsafe_code, clippy::wildcard_imports)]

use super::{Kernel, LANES, Simd};
use crate::memory::Bf16;
use std::arch::aarch64::*;

/// Proof that the machine has NEON, made by [`Neon::detect`] alone: code that holds one may use NEON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Neon(());

/// Vector of sixteen lanes: 0 to 3, 4 to 7, 8 to 11 and 12 to 15.
type V = [float32x4_t; 4];

/// Calls intrinsics of NEON.
macro_rules! neon {
    ($e:expr) => {
        // SAFETY: the method's receiver exists only where the machine has NEON, and what is loaded or stored is within
        // a reference to sixteen elements.
        unsafe { $e }
    };
}

/// Evaluates `e` with `i` from 0 to 3, one for each quad of lanes.
macro_rules! each {
    ($i:ident => $e:expr) => {
        neon!([
            {
                let $i = 0;
                $e
            },
            {
                let $i = 1;
                $e
            },
            {
                let $i = 2;
                $e
            },
            {
                let $i = 3;
                $e
            },
        ])
    };
}

impl Neon {
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        neon!(run(self, kernel))
    }
}

#[target_feature(enable = "neon")]
fn run<K: Kernel>(s: Neon, kernel: K) -> K::Output {
    kernel.run(s)
}

impl Simd for Neon {
    type V = V;
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        neon!([vdupq_n_f32(x); 4])
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> V {
        each!(i => vld1q_f32(x.as_ptr().add(4 * i)))
    }

    #[inline(always)]
    fn load_bf16(self, x: &[Bf16; LANES]) -> V {
        each!(i => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(x.as_ptr().add(4 * i).cast()))))
    }

    #[inline(always)]
    fn load_pairs<const SECOND: bool>(self, x: &[[Bf16; 2]; LANES]) -> V {
        each!(i => {
            let both = vreinterpretq_u32_u16(vld1q_u16(x.as_ptr().add(4 * i).cast()));
            let half = if SECOND { vandq_u32(both, vdupq_n_u32(0xFFFF_0000)) } else { vshlq_n_u32::<16>(both) };
            vreinterpretq_f32_u32(half)
        })
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> V {
        neon!(from_i8(vld1q_s8(x.as_ptr())))
    }

    #[inline(always)]
    fn store(self, v: V, out: &mut [f32; LANES]) {
        each!(i => vst1q_f32(out.as_mut_ptr().add(4 * i), v[i]));
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        each!(i => vaddq_f32(a[i], b[i]))
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        each!(i => vsubq_f32(a[i], b[i]))
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        each!(i => vmulq_f32(a[i], b[i]))
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        each!(i => vdivq_f32(a[i], b[i]))
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        each!(i => vfmaq_f32(c[i], a[i], b[i]))
    }

    // vmaxq_f32 gives NaN where one is NaN and orders zeros, which x86 does not.
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        each!(i => vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]))
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        each!(i => vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i]))
    }

    #[inline(always)]
    fn select_less(self, a: V, b: V, x: V, y: V) -> V {
        each!(i => vbslq_f32(vcltq_f32(a[i], b[i]), x[i], y[i]))
    }

    #[inline(always)]
    fn pow2(self, shifted: V) -> V {
        each!(i => {
            let biased = vaddq_u32(vreinterpretq_u32_f32(shifted[i]), vdupq_n_u32(127));
            vreinterpretq_f32_u32(vshlq_n_u32::<23>(biased))
        })
    }

    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        neon!({
            let four = quad(v);
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        })
    }

    #[inline(always)]
    fn sums4(self, v: [V; 4]) -> [f32; 4] {
        neon!({
            let quads = [quad(v[0]), quad(v[1]), quad(v[2]), quad(v[3])];
            let halves = |x, y| {
                vaddq_f32(
                    vcombine_f32(vget_low_f32(x), vget_low_f32(y)),
                    vcombine_f32(vget_high_f32(x), vget_high_f32(y)),
                )
            };
            let mut out = [0.0; 4];
            vst1q_f32(out.as_mut_ptr(), vpaddq_f32(halves(quads[0], quads[1]), halves(quads[2], quads[3])));
            out
        })
    }

    #[inline(always)]
    fn sums8(self, v: [V; 8]) -> [f32; 8] {
        let (low, high) = (self.sums4([v[0], v[1], v[2], v[3]]), self.sums4([v[4], v[5], v[6], v[7]]));
        [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
    }

    const INTEGER_ROWS: usize = 3;
    type I = [int32x4_t; 4];

    #[inline(always)]
    fn splat_int(self, x: i32) -> Self::I {
        neon!([vdupq_n_s32(x); 4])
    }

    #[inline(always)]
    fn load_int(self, x: &[u8; 4 * LANES]) -> Self::I {
        each!(i => vreinterpretq_s32_u8(vld1q_u8(x.as_ptr().add(16 * i))))
    }

    #[inline(always)]
    fn store_int(self, v: Self::I, out: &mut [u8; 4 * LANES]) {
        each!(i => vst1q_u8(out.as_mut_ptr().add(16 * i), vreinterpretq_u8_s32(v[i])));
    }

    #[inline(always)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        each!(i => vandq_s32(a[i], b[i]))
    }

    #[inline(always)]
    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        each!(i => vorrq_s32(a[i], b[i]))
    }

    #[inline(always)]
    fn shl16(self, v: Self::I, n: u32) -> Self::I {
        let by = neon!(vdupq_n_s16(n as i16));
        each!(i => vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_s32(v[i]), by)))
    }

    #[inline(always)]
    fn shr16(self, v: Self::I, n: u32) -> Self::I {
        let by = neon!(vdupq_n_s16(-(n as i16)));
        each!(i => vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_s32(v[i]), by)))
    }

    #[inline(always)]
    fn sar16(self, v: Self::I, n: u32) -> Self::I {
        let by = neon!(vdupq_n_s16(-(n as i16)));
        each!(i => vreinterpretq_s32_s16(vshlq_s16(vreinterpretq_s16_s32(v[i]), by)))
    }

    #[inline(always)]
    fn sub8(self, a: Self::I, b: Self::I) -> Self::I {
        each!(i => vreinterpretq_s32_s8(vsubq_s8(vreinterpretq_s8_s32(a[i]), vreinterpretq_s8_s32(b[i]))))
    }

    #[inline(always)]
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I {
        each!(i => vaddq_s32(a[i], b[i]))
    }

    #[inline(always)]
    fn lookup(self, table: &[i8; 16], v: Self::I) -> Self::I {
        let table = neon!(vld1q_s8(table.as_ptr()));
        each!(i => vreinterpretq_s32_s8(vqtbl1q_s8(table, vreinterpretq_u8_s32(v[i]))))
    }

    #[inline(always)]
    fn dots16<const R: usize>(self, sums: &mut [[Self::I; 4]; R], part: usize, codes: Self::I, x: &[i32; R]) {
        for (sums, x) in sums.iter_mut().zip(x) {
            let b = neon!(vreinterpretq_s16_s32(vdupq_n_s32(*x)));
            let acc = sums[part];
            sums[part] = each!(i => {
                let a = vreinterpretq_s16_s32(codes[i]);
                let (low, high) = (vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
                vaddq_s32(acc[i], vpaddq_s32(low, high))
            });
        }
    }

    #[inline(always)]
    fn to_f32(self, v: Self::I) -> V {
        each!(i => vcvtq_f32_s32(v[i]))
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> V {
        self.load(&x.map(crate::memory::from_f16))
    }
}

/// Returns the first step of a sum of lanes: lane i plus lane i + 8, then plus i + 4.
#[inline]
#[target_feature(enable = "neon")]
fn quad(v: V) -> float32x4_t {
    vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]))
}

#[inline]
#[target_feature(enable = "neon")]
fn from_i8(x: int8x16_t) -> V {
    let (low, high) = (vmovl_s8(vget_low_s8(x)), vmovl_s8(vget_high_s8(x)));
    [
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
        vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
        vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))),
    ]
}
