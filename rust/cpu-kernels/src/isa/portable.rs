//! Sixteen lanes as an array. Defines the results of all instruction sets, and serves machines without any.

use super::{LANES, Simd};
use crate::memory::{Bf16, from_f16};

/// Instruction set for any machine. Fused multiply-adds are calls if the compiler's target lacks them.
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
    /// True, so that tests cover this layout of rows on every machine.
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

    const INTEGER_ROWS: usize = 1;
    // Calls: where all of a block is one basic block of scalars, the compiler takes minutes.
    type I = [u32; LANES];

    #[inline(never)]
    fn splat_int(self, x: i32) -> Self::I {
        [x.cast_unsigned(); LANES]
    }

    #[inline(never)]
    fn load_int(self, x: &[u8; 4 * LANES]) -> Self::I {
        std::array::from_fn(|i| u32::from_le_bytes(x.as_chunks().0[i]))
    }

    #[inline(never)]
    fn store_int(self, v: Self::I, out: &mut [u8; 4 * LANES]) {
        for (out, x) in out.as_chunks_mut().0.iter_mut().zip(v) {
            *out = x.to_le_bytes();
        }
    }

    #[inline(never)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i] & b[i])
    }

    #[inline(never)]
    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(never)]
    fn shl16(self, v: Self::I, n: u32) -> Self::I {
        halves(v, |x| x << n)
    }

    #[inline(never)]
    fn shr16(self, v: Self::I, n: u32) -> Self::I {
        halves(v, |x| x >> n)
    }

    #[inline(never)]
    fn sar16(self, v: Self::I, n: u32) -> Self::I {
        halves(v, |x| (x.cast_signed() >> n).cast_unsigned())
    }

    #[inline(never)]
    fn sub8(self, a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| {
            let (a, b) = (a[i].to_le_bytes(), b[i].to_le_bytes());
            u32::from_le_bytes(std::array::from_fn(|byte| a[byte].wrapping_sub(b[byte])))
        })
    }

    #[inline(never)]
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(never)]
    fn lookup(self, table: &[i8; 16], v: Self::I) -> Self::I {
        v.map(|x| u32::from_le_bytes(x.to_le_bytes().map(|code| table[usize::from(code & 15)].cast_unsigned())))
    }

    #[inline(never)]
    fn dots16<const R: usize>(self, sums: &mut [[Self::I; 4]; R], part: usize, codes: Self::I, x: &[i32; R]) {
        let product = |a: u32, b: i32| i32::from((a as u16).cast_signed()) * i32::from(b as i16);
        for (sums, &x) in sums.iter_mut().zip(x) {
            for (sum, &code) in sums[part].iter_mut().zip(&codes) {
                let both = product(code, x).wrapping_add(product(code >> 16, x >> 16));
                *sum = sum.wrapping_add(both.cast_unsigned());
            }
        }
    }

    #[inline(never)]
    fn to_f32(self, v: Self::I) -> V {
        lanes(|i| v[i].cast_signed() as f32)
    }

    #[inline(never)]
    fn load_f16(self, x: &[u16; LANES]) -> V {
        lanes(|i| from_f16(x[i]))
    }
}

/// Applies `f` to both 16-bit halves of each lane.
#[inline(always)]
fn halves(v: [u32; LANES], f: impl Fn(u16) -> u16) -> [u32; LANES] {
    v.map(|x| u32::from(f(x as u16)) | u32::from(f((x >> 16) as u16)) << 16)
}
