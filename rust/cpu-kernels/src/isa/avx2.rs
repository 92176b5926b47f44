//! Sixteen lanes as two AVX registers, lanes 0 to 7 and 8 to 15.

#![allow(unsafe_code, clippy::wildcard_imports)]

use super::{Kernel, LANES, Simd, each_row};
use crate::memory::Bf16;
use std::arch::asm;
use std::arch::x86_64::*;

/// Extension constant: none.
pub(super) const PLAIN: u8 = 0;
/// Extension constant: AVX-VNNI.
pub(super) const VNNI: u8 = 1;

/// Proof that the machine has AVX2 and the extension `WITH`, made by [`Avx2::detect`] alone: code that holds one may use
/// AVX2, FMA and F16C, and the extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx2<const WITH: u8>(());

/// Lanes 0 to 7 and lanes 8 to 15.
type V = [__m256; 2];

/// Calls intrinsics of AVX2, FMA and F16C.
macro_rules! avx2 {
    ($e:expr) => {
        // SAFETY: the method's receiver exists only where the machine has AVX2, FMA and F16C, and what is loaded or
        // stored is within a reference to sixteen elements; these loads and stores need no alignment.
        unsafe { $e }
    };
}

impl<const WITH: u8> Avx2<WITH> {
    pub(super) fn detect() -> Option<Self> {
        let found =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        let extended = WITH == PLAIN || is_x86_feature_detected!("avxvnni");
        (found && extended).then_some(Self(()))
    }
}

impl Avx2<PLAIN> {
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        avx2!(run(self, kernel))
    }
}

impl Avx2<VNNI> {
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the receiver exists only where the machine has AVX2, FMA, F16C and AVX-VNNI.
        unsafe { run_vnni(self, kernel) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn run<K: Kernel>(s: Avx2<PLAIN>, kernel: K) -> K::Output {
    kernel.run(s)
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn run_vnni<K: Kernel>(s: Avx2<VNNI>, kernel: K) -> K::Output {
    kernel.run(s)
}

impl<const WITH: u8> Simd for Avx2<WITH> {
    type V = V;
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        avx2!([_mm256_set1_ps(x); 2])
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> V {
        avx2!([_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))])
    }

    #[inline(always)]
    fn load_bf16(self, x: &[Bf16; LANES]) -> V {
        avx2!({
            let (low, high) = (_mm_loadu_si128(x.as_ptr().cast()), _mm_loadu_si128(x.as_ptr().add(8).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(low))),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(high))),
            ]
        })
    }

    #[inline(always)]
    fn load_pairs<const SECOND: bool>(self, x: &[[Bf16; 2]; LANES]) -> V {
        avx2!({
            let (low, high) = (_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(8).cast()));
            let upper = _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed());
            let half = |x| if SECOND { _mm256_and_si256(x, upper) } else { _mm256_slli_epi32::<16>(x) };
            [_mm256_castsi256_ps(half(low)), _mm256_castsi256_ps(half(high))]
        })
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> V {
        avx2!(from_i8(_mm_loadu_si128(x.as_ptr().cast())))
    }

    #[inline(always)]
    fn store(self, v: V, out: &mut [f32; LANES]) {
        avx2!({
            _mm256_storeu_ps(out.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), v[1]);
        });
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        avx2!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        avx2!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        avx2!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        avx2!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        avx2!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        avx2!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        avx2!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        avx2!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn select_less(self, a: V, b: V, x: V, y: V) -> V {
        avx2!([
            _mm256_blendv_ps(y[0], x[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
            _mm256_blendv_ps(y[1], x[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
        ])
    }

    #[inline(always)]
    fn pow2(self, shifted: V) -> V {
        avx2!({
            let bias = _mm256_set1_epi32(127);
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_castps_si256(shifted[0]), bias))),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_castps_si256(shifted[1]), bias))),
            ]
        })
    }

    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        avx2!({
            let eight = _mm256_add_ps(v[0], v[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn sums4(self, v: [V; 4]) -> [f32; 4] {
        avx2!({
            let (ab, cd) = (quads(v[0], v[1]), quads(v[2], v[3]));
            // Halves: vectors a and c, b and d. Of each lanes 0 + 2 and 1 + 3.
            let two =
                _mm256_add_ps(_mm256_shuffle_ps::<0b01_00_01_00>(ab, cd), _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
            let one = _mm256_add_ps(two, _mm256_permute_ps::<0b10_11_00_01>(two));
            let (ac, bd) = (_mm256_castps256_ps128(one), _mm256_extractf128_ps::<1>(one));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), _mm_blend_ps::<0b1010>(ac, bd));
            out
        })
    }

    #[inline(always)]
    fn sums8(self, v: [V; 8]) -> [f32; 8] {
        let (low, high) = (self.sums4([v[0], v[1], v[2], v[3]]), self.sums4([v[4], v[5], v[6], v[7]]));
        [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
    }

    const INTEGER_ROWS: usize = if WITH == VNNI { 6 } else { 3 };
    // Five cycles from a sum to the next one, and up to two of a row's two sums a cycle. A fifth would want more registers.
    const INTEGER_SUMS: usize = if WITH == VNNI { 4 } else { 1 };
    type I = [__m256i; 2];

    #[inline(always)]
    fn splat_int(self, x: i32) -> Self::I {
        avx2!([_mm256_set1_epi32(x); 2])
    }

    #[inline(always)]
    fn load_int(self, x: &[u8; 4 * LANES]) -> Self::I {
        avx2!([_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(32).cast())])
    }

    #[inline(always)]
    fn store_int(self, v: Self::I, out: &mut [u8; 4 * LANES]) {
        avx2!({
            _mm256_storeu_si256(out.as_mut_ptr().cast(), v[0]);
            _mm256_storeu_si256(out.as_mut_ptr().add(32).cast(), v[1]);
        });
    }

    #[inline(always)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        avx2!([_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])])
    }

    #[inline(always)]
    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        avx2!([_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])])
    }

    #[inline(always)]
    fn shl16(self, v: Self::I, n: u32) -> Self::I {
        avx2!({
            let n = _mm_cvtsi32_si128(n.cast_signed());
            [_mm256_sll_epi16(v[0], n), _mm256_sll_epi16(v[1], n)]
        })
    }

    #[inline(always)]
    fn shr16(self, v: Self::I, n: u32) -> Self::I {
        avx2!({
            let n = _mm_cvtsi32_si128(n.cast_signed());
            [_mm256_srl_epi16(v[0], n), _mm256_srl_epi16(v[1], n)]
        })
    }

    #[inline(always)]
    fn sar16(self, v: Self::I, n: u32) -> Self::I {
        avx2!({
            let n = _mm_cvtsi32_si128(n.cast_signed());
            [_mm256_sra_epi16(v[0], n), _mm256_sra_epi16(v[1], n)]
        })
    }

    #[inline(always)]
    fn sub8(self, a: Self::I, b: Self::I) -> Self::I {
        avx2!([_mm256_sub_epi8(a[0], b[0]), _mm256_sub_epi8(a[1], b[1])])
    }

    #[inline(always)]
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I {
        avx2!([_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])])
    }

    #[inline(always)]
    fn lookup(self, table: &[i8; 16], v: Self::I) -> Self::I {
        avx2!({
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, v[0]), _mm256_shuffle_epi8(table, v[1])]
        })
    }

    // Without VNNI sums of two products have to be within 16 bits.
    const LARGEST_BYTE: i32 = if WITH == VNNI { 255 } else { 127 };

    #[inline(always)]
    fn dots16<const R: usize>(self, sums: &mut [[Self::I; 4]; R], part: usize, codes: Self::I, x: &[i32; R]) {
        if WITH == VNNI {
            // SAFETY: this receiver is made only where the machine has AVX-VNNI.
            each_row!(R, ROW, { sums[ROW][part] = unsafe { pairs_vnni::<ROW, R>(sums[ROW][part], codes, x) } });
        } else {
            each_row!(R, ROW, { sums[ROW][part] = avx2!(pairs::<ROW, R>(sums[ROW][part], codes, x)) });
        }
    }

    #[inline(always)]
    fn dots8<const R: usize>(self, sums: &mut [[Self::I; 4]; R], part: usize, codes: Self::I, x: &[i32; R]) {
        if WITH == VNNI {
            // SAFETY: this receiver is made only where the machine has AVX-VNNI.
            each_row!(R, ROW, { sums[ROW][part] = unsafe { bytes_vnni::<ROW, R>(sums[ROW][part], codes, x) } });
        } else {
            each_row!(R, ROW, { sums[ROW][part] = avx2!(bytes::<ROW, R>(sums[ROW][part], codes, x)) });
        }
    }

    #[inline(always)]
    fn to_f32(self, v: Self::I) -> V {
        avx2!([_mm256_cvtepi32_ps(v[0]), _mm256_cvtepi32_ps(v[1])])
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> V {
        avx2!([
            _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().add(8).cast())),
        ])
    }
}

/// Returns the first step of a sum of lanes for one half of two vectors: lane i plus lane i + 8, then plus i + 4.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quads(a: V, b: V) -> __m256 {
    let (a, b) = (_mm256_add_ps(a[0], a[1]), _mm256_add_ps(b[0], b[1]));
    _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn from_i8(x: __m128i) -> V {
    [_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x)))]
}

/// Defines a function that adds the products of `a` with word `ROW` of `x` to `acc`. The word is in every lane of register
/// `t`. The instructions are volatile, so that the compiler keeps their order.
macro_rules! word_products {
    ($name:ident, $features:literal, [$($line:literal),+], $($operand:tt)*) => {
        #[inline]
        #[target_feature(enable = $features)]
        fn $name<const ROW: usize, const R: usize>(acc: [__m256i; 2], a: [__m256i; 2], x: &[i32; R]) -> [__m256i; 2] {
            assert!(ROW < R, "a row of the panel");
            let ([mut low, mut high], [a, b]) = (acc, a);
            // SAFETY: it reads word `ROW` of `x`, and registers.
            unsafe {
                asm!(
                    "vpbroadcastd {t}, dword ptr [{x} + {at}]", $($line,)+
                    low = inout(ymm_reg) low, high = inout(ymm_reg) high, a = in(ymm_reg) a, b = in(ymm_reg) b,
                    t = out(ymm_reg) _, x = in(reg) x.as_ptr(), at = const 4 * ROW, $($operand)*
                    options(readonly, nostack, preserves_flags),
                );
            }
            [low, high]
        }
    };
}

word_products!(
    pairs,
    "avx2,fma,f16c",
    [
        "vpmaddwd {u}, {t}, {a}",
        "vpmaddwd {t}, {t}, {b}",
        "vpaddd {low}, {low}, {u}",
        "vpaddd {high}, {high}, {t}"
    ],
    u = out(ymm_reg) _,
);
word_products!(
    bytes,
    "avx2,fma,f16c",
    [
        "vpmaddubsw {u}, {a}, {t}",
        "vpmaddubsw {t}, {b}, {t}",
        "vpmaddwd {u}, {u}, {ones}",
        "vpmaddwd {t}, {t}, {ones}",
        "vpaddd {low}, {low}, {u}",
        "vpaddd {high}, {high}, {t}"
    ],
    u = out(ymm_reg) _, ones = in(ymm_reg) _mm256_set1_epi16(1),
);
word_products!(
    pairs_vnni,
    "avx2,fma,f16c,avxvnni",
    ["{{vex}} vpdpwssd {low}, {a}, {t}", "{{vex}} vpdpwssd {high}, {b}, {t}"],
);
word_products!(
    bytes_vnni,
    "avx2,fma,f16c,avxvnni",
    ["{{vex}} vpdpbusd {low}, {a}, {t}", "{{vex}} vpdpbusd {high}, {b}, {t}"],
);
