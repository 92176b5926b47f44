//! Sixteen lanes as one AVX-512 register.

#![allow(unsafe_code, clippy::wildcard_imports)]

use super::{Kernel, LANES, Simd};
use crate::memory::Bf16;
use std::arch::x86_64::*;

/// Made by [`Avx512::detect`] alone: code that holds one may use AVX-512F, BW, DQ and VL. Without VL the compiler keeps
/// whatever is ever seen as 128 or 256 bits in the lower 16 registers, accumulators among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx512(());

/// Calls intrinsics of AVX-512F, BW, DQ and VL.
macro_rules! avx512 {
    ($e:expr) => {
        // SAFETY: the method's receiver exists only where the machine has them, and what is loaded or stored is a
        // reference to sixteen elements; these loads and stores need no alignment.
        unsafe { $e }
    };
}

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        found.then_some(Self(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        avx512!(run(self, kernel))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn run<K: Kernel>(s: Avx512, kernel: K) -> K::Output {
    kernel.run(s)
}

impl Simd for Avx512 {
    type V = __m512;
    const WIDE: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        avx512!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> __m512 {
        avx512!(_mm512_loadu_ps(x.as_ptr()))
    }

    #[inline(always)]
    fn load_bf16(self, x: &[Bf16; LANES]) -> __m512 {
        avx512!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> __m512 {
        avx512!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))))
    }

    #[inline(always)]
    fn load_i4<const UPPER: bool>(self, x: &[u8; LANES], scale: __m512) -> __m512 {
        avx512!({
            let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            // The lowest 4 bits of an index count.
            let index = if UPPER { _mm512_srli_epi32::<4>(wide) } else { wide };
            let numbers =
                _mm512_setr_ps(-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0);
            // Made once for as long as the scale is the same.
            _mm512_permutexvar_ps(index, _mm512_mul_ps(numbers, scale))
        })
    }

    #[inline(always)]
    fn store(self, v: __m512, out: &mut [f32; LANES]) {
        avx512!(_mm512_storeu_ps(out.as_mut_ptr(), v));
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        avx512!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        avx512!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn select_less(self, a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        avx512!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x))
    }

    #[inline(always)]
    fn pow2(self, shifted: __m512) -> __m512 {
        avx512!({
            let biased = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        })
    }

    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        avx512!({
            let eight = _mm512_add_ps(v, _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v));
            let four = _mm512_add_ps(eight, _mm512_shuffle_f32x4::<0b10_11_00_01>(eight, eight));
            let two = _mm512_add_ps(four, _mm512_permute_ps::<0b01_00_11_10>(four));
            let one = _mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
            _mm512_cvtss_f32(one)
        })
    }

    #[inline(always)]
    fn sums4(self, v: [__m512; 4]) -> [f32; 4] {
        avx512!({
            let four = quads(v[0], v[1], v[2], v[3]);
            let two = _mm512_add_ps(four, _mm512_permute_ps::<0b01_00_11_10>(four));
            let one = _mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
            let first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            let sums = _mm512_castps512_ps128(_mm512_permutexvar_ps(first, one));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sums);
            out
        })
    }

    #[inline(always)]
    fn sums8(self, v: [__m512; 8]) -> [f32; 8] {
        avx512!({
            let (low, high) = (quads(v[0], v[1], v[2], v[3]), quads(v[4], v[5], v[6], v[7]));
            // Of each quad its lanes 0 + 2 and 1 + 3, beside those of the other four vectors.
            let two = _mm512_add_ps(
                _mm512_shuffle_ps::<0b01_00_01_00>(low, high),
                _mm512_shuffle_ps::<0b11_10_11_10>(low, high),
            );
            let one = _mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
            let order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
            let sums = _mm512_castps512_ps256(_mm512_permutexvar_ps(order, one));
            let mut out = [0.0; 8];
            _mm256_storeu_ps(out.as_mut_ptr(), sums);
            out
        })
    }
}

/// Quad i: lanes of vector i, j with j + 8, then with j + 4.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn quads(a: __m512, b: __m512, c: __m512, d: __m512) -> __m512 {
    let halves =
        |x, y| _mm512_add_ps(_mm512_shuffle_f32x4::<0b01_00_01_00>(x, y), _mm512_shuffle_f32x4::<0b11_10_11_10>(x, y));
    let (ab, cd) = (halves(a, b), halves(c, d));
    _mm512_add_ps(_mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd), _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd))
}
