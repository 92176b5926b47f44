//! Sixteen lanes as one AVX-512 register.

#![allow(unsafe_code, clippy::wildcard_imports)]

use super::avx2::{self, Avx2};
use super::portable::Portable;
use super::{Kernel, LANES, Simd, each_row};
use crate::memory::Bf16;
use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// Extension constant: none of the extensions.
pub(super) const PLAIN: u8 = 0;
/// Extension constant: AVX512-BF16.
pub(super) const BF16: u8 = 1;
/// Extension constant: AVX512-VNNI.
const VNNI: u8 = 2;

/// Proof that the machine has AVX-512, made by [`detect`](Self::detect) alone: code that holds one may use AVX-512F,
/// BW, DQ and VL, and the extension `WITH`. Without VL the compiler keeps every value that is ever used as 128 or 256
/// bits in the lower 16 registers, accumulators among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx512<const WITH: u8>(());

/// Calls intrinsics of AVX-512F, BW, DQ and VL.
macro_rules! avx512 {
    ($e:expr) => {
        // SAFETY: the method's receiver exists only where the machine has them, and what is loaded or stored is a
        // reference to sixteen elements; these loads and stores need no alignment.
        unsafe { $e }
    };
}

impl Avx512<PLAIN> {
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

    /// Runs a kernel on integers with AVX512-VNNI if the machine has it, else with AVX2.
    #[inline]
    pub(super) fn run_integers<K: Kernel>(self, kernel: K) -> K::Output {
        if is_x86_feature_detected!("avx512vnni") {
            let Self(()) = self;
            // SAFETY: the machine has it, and by the receiver the rest.
            unsafe { run_vnni(Avx512::<VNNI>(()), kernel) }
        } else if let Some(s) = Avx2::<{ avx2::PLAIN }>::detect() {
            s.run(kernel)
        } else {
            kernel.run(Portable)
        }
    }
}

impl Avx512<BF16> {
    /// Returns the instructions if the machine has them, and if `vdpbf16ps` gives the bits that [`Simd::dot`] defines.
    pub(super) fn detect() -> Option<Self> {
        static SAME: OnceLock<bool> = OnceLock::new();
        let found = Avx512::<PLAIN>::detect().is_some() && is_x86_feature_detected!("avx512bf16");
        (found && *SAME.get_or_init(|| Self(()).run(Probe))).then_some(Self(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the receiver exists only where the machine has these instructions.
        unsafe { run_dots(self, kernel) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn run<K: Kernel>(s: Avx512<PLAIN>, kernel: K) -> K::Output {
    kernel.run(s)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn run_vnni<K: Kernel>(s: Avx512<VNNI>, kernel: K) -> K::Output {
    kernel.run(s)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn run_dots<K: Kernel>(s: Avx512<BF16>, kernel: K) -> K::Output {
    kernel.run(s)
}

/// Kernel that returns whether `dot` gives the bits of the portable one, for made-up numbers in its valid range.
struct Probe;

impl Kernel for Probe {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let mut state = 1_u64;
        // A number with random bits of the upper `bits`, from 2^-(spread / 2) to 2^(spread / 2).
        let mut number = |bits: u32, spread: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let random = (state >> 32) as u32;
            let exponent = 127 - spread as u32 / 2 + ((state >> 24 & 0xFF) % (spread + 1)) as u32;
            f32::from_bits((random & 1) << 31 | exponent << 23 | random >> 9 & !u32::MAX.checked_shr(bits).unwrap_or(0))
        };
        (0..4096).all(|round| {
            let mut make = |bits, spread| -> [f32; LANES] { std::array::from_fn(|_| number(bits, spread)) };
            let (first, second, third, fourth) = (make(16, 4), make(16, 4), make(16, 4), make(16, 4));
            // Accumulators from far below to far above the products, and ones that a product takes away.
            let mut acc = make(32, if round % 2 == 0 { 8 } else { 60 });
            for i in (0..LANES).step_by(3) {
                acc[i] = -first[i] * third[i];
            }
            let pairs = |x: &[f32; LANES], y: &[f32; LANES]| -> [[Bf16; 2]; LANES] {
                std::array::from_fn(|i| [Bf16::from_f32(x[i]), Bf16::from_f32(y[i])])
            };
            let (a, b) = (pairs(&first, &second), pairs(&third, &fourth));
            let mut found = [0.0; LANES];
            s.store(s.dot(s.load_bits(&a), s.load_bits(&b), s.load(&acc)), &mut found);
            let expected = Portable.dot(Portable.load_bits(&a), Portable.load_bits(&b), acc);
            found.iter().zip(&expected).all(|(found, expected)| found.to_bits() == expected.to_bits())
        })
    }
}

impl<const WITH: u8> Simd for Avx512<WITH> {
    type V = __m512;
    const WIDE: bool = true;
    const DOTS: bool = WITH == BF16;

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
    fn load_pairs<const SECOND: bool>(self, x: &[[Bf16; 2]; LANES]) -> __m512 {
        avx512!({
            let both = _mm512_loadu_si512(x.as_ptr().cast());
            let upper = _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed());
            let half = if SECOND { _mm512_and_si512(both, upper) } else { _mm512_slli_epi32::<16>(both) };
            _mm512_castsi512_ps(half)
        })
    }

    #[inline(always)]
    fn load_bits(self, x: &[[Bf16; 2]; LANES]) -> __m512 {
        avx512!(_mm512_loadu_ps(x.as_ptr().cast()))
    }

    #[inline(always)]
    fn dot(self, a: __m512, b: __m512, acc: __m512) -> __m512 {
        debug_assert!(Self::DOTS, "nothing asks a set without DOTS");
        // SAFETY: only sets with DOTS are asked, which exist where the machine has AVX512-BF16; a and b are bits.
        unsafe {
            let [a, b] = [a, b].map(|pairs| std::mem::transmute::<__m512, __m512bh>(pairs));
            _mm512_dpbf16_ps(acc, a, b)
        }
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> __m512 {
        avx512!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))))
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
    fn largest(self, v: __m512) -> f32 {
        avx512!({
            let eight = _mm512_max_ps(v, _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v));
            let four = _mm512_max_ps(eight, _mm512_shuffle_f32x4::<0b10_11_00_01>(eight, eight));
            let two = _mm512_max_ps(four, _mm512_permute_ps::<0b01_00_11_10>(four));
            let one = _mm512_max_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
            _mm512_cvtss_f32(one)
        })
    }

    #[inline(always)]
    fn upper(self, v: __m512) -> __m512 {
        avx512!({
            let upper = _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed());
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), upper))
        })
    }

    #[inline(always)]
    fn pairs(self, first: __m512, second: __m512) -> __m512 {
        avx512!({
            let first = _mm512_srli_epi32::<16>(_mm512_castps_si512(first));
            // The upper halves of the second, the lower of the shifted first.
            let both = _mm512_mask_blend_epi16(0xAAAA_AAAA, first, _mm512_castps_si512(second));
            _mm512_castsi512_ps(both)
        })
    }

    #[inline(always)]
    fn transpose(self, mut v: [__m512; LANES]) -> [__m512; LANES] {
        // Lanes of 32, 64, 128 and 256 bits change places with those of the vector that is as far away.
        avx512!({
            for i in (0..LANES).step_by(2) {
                (v[i], v[i + 1]) = (_mm512_unpacklo_ps(v[i], v[i + 1]), _mm512_unpackhi_ps(v[i], v[i + 1]));
            }
            let mut w = v;
            for i in (0..LANES).step_by(4) {
                for half in 0..2 {
                    let (a, b) = (_mm512_castps_pd(v[i + half]), _mm512_castps_pd(v[i + half + 2]));
                    w[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                    w[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                }
            }
            for i in 0..4 {
                let quads = [w[i], w[i + 4], w[i + 8], w[i + 12]];
                let even = |a, b| _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                let odd = |a, b| _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
                let (low, high) = (even(quads[0], quads[1]), even(quads[2], quads[3]));
                (v[i], v[i + 8]) = (even(low, high), odd(low, high));
                let (low, high) = (odd(quads[0], quads[1]), odd(quads[2], quads[3]));
                (v[i + 4], v[i + 12]) = (even(low, high), odd(low, high));
            }
            v
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
            // Lanes 0 + 2 and 1 + 3 of each quad, next to those of the other four vectors.
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

    const INTEGER_ROWS: usize = 12;
    // Five cycles from a sum to the next one, two sums a cycle.
    const INTEGER_SUMS: usize = if WITH == VNNI { 10 } else { 1 };
    type I = __m512i;

    #[inline(always)]
    fn splat_int(self, x: i32) -> __m512i {
        avx512!(_mm512_set1_epi32(x))
    }

    #[inline(always)]
    fn load_int(self, x: &[u8; 4 * LANES]) -> __m512i {
        avx512!(_mm512_loadu_si512(x.as_ptr().cast()))
    }

    #[inline(always)]
    fn store_int(self, v: __m512i, out: &mut [u8; 4 * LANES]) {
        avx512!(_mm512_storeu_si512(out.as_mut_ptr().cast(), v));
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        avx512!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        avx512!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn shl16(self, v: __m512i, n: u32) -> __m512i {
        avx512!(_mm512_sll_epi16(v, _mm_cvtsi32_si128(n.cast_signed())))
    }

    #[inline(always)]
    fn shr16(self, v: __m512i, n: u32) -> __m512i {
        avx512!(_mm512_srl_epi16(v, _mm_cvtsi32_si128(n.cast_signed())))
    }

    #[inline(always)]
    fn sar16(self, v: __m512i, n: u32) -> __m512i {
        avx512!(_mm512_sra_epi16(v, _mm_cvtsi32_si128(n.cast_signed())))
    }

    #[inline(always)]
    fn sub8(self, a: __m512i, b: __m512i) -> __m512i {
        avx512!(_mm512_sub_epi8(a, b))
    }

    #[inline(always)]
    fn add_int(self, a: __m512i, b: __m512i) -> __m512i {
        avx512!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn lookup(self, table: &[i8; 16], v: __m512i) -> __m512i {
        avx512!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), v))
    }

    const LARGEST_BYTE: i32 = if WITH == VNNI { 255 } else { 0 };

    #[inline(always)]
    fn dots16<const R: usize>(self, sums: &mut [[__m512i; 4]; R], part: usize, codes: __m512i, x: &[i32; R]) {
        debug_assert!(WITH == VNNI, "work on integers runs with VNNI");
        // SAFETY: only a receiver with VNNI is asked, which is made only where the machine has it.
        each_row!(R, ROW, { sums[ROW][part] = unsafe { pairs::<ROW, R>(sums[ROW][part], codes, x) } });
    }

    #[inline(always)]
    fn dots8<const R: usize>(self, sums: &mut [[__m512i; 4]; R], part: usize, codes: __m512i, x: &[i32; R]) {
        debug_assert!(WITH == VNNI, "work on integers runs with VNNI");
        // SAFETY: only a receiver with VNNI is asked, which is made only where the machine has it.
        each_row!(R, ROW, { sums[ROW][part] = unsafe { bytes::<ROW, R>(sums[ROW][part], codes, x) } });
    }

    #[inline(always)]
    fn to_f32(self, v: __m512i) -> __m512 {
        avx512!(_mm512_cvtepi32_ps(v))
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> __m512 {
        avx512!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
    }
}

/// Defines a function that adds the products of `a` with word `ROW` of `x`, in every lane, to `acc` by an instruction. It
/// is volatile, so that the compiler keeps the order. It would replace an intrinsic by two instructions where it expects
/// latency to matter.
macro_rules! word_products {
    ($name:ident, $instruction:literal) => {
        #[inline]
        #[target_feature(enable = "avx512f,avx512vnni")]
        fn $name<const ROW: usize, const R: usize>(mut acc: __m512i, a: __m512i, x: &[i32; R]) -> __m512i {
            assert!(ROW < R, "a row of the panel");
            // SAFETY: it reads word `ROW` of `x`, and registers.
            unsafe {
                asm!(
                    concat!($instruction, " {acc}, {a}, dword ptr [{x} + {at}]{{1to16}}"),
                    acc = inout(zmm_reg) acc, a = in(zmm_reg) a, x = in(reg) x.as_ptr(), at = const 4 * ROW,
                    options(readonly, nostack, preserves_flags),
                );
            }
            acc
        }
    };
}

word_products!(pairs, "vpdpwssd");
word_products!(bytes, "vpdpbusd");

/// Returns the first step of the sums of four vectors: quad i has lanes of vector i, lane j plus lane j + 8, then plus
/// j + 4.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn quads(a: __m512, b: __m512, c: __m512, d: __m512) -> __m512 {
    let halves =
        |x, y| _mm512_add_ps(_mm512_shuffle_f32x4::<0b01_00_01_00>(x, y), _mm512_shuffle_f32x4::<0b11_10_11_10>(x, y));
    let (ab, cd) = (halves(a, b), halves(c, d));
    _mm512_add_ps(_mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd), _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd))
}
