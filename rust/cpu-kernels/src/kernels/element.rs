//! The types that weights, K and V are stored as, and how their vectors are loaded.

use crate::isa::{LANES, Simd};
use crate::memory::{Bf16, E4m3, E5m2};

/// Number that converts to f32 exactly.
pub(crate) trait Element: Copy + Default + Send + Sync + 'static {
    /// Loads sixteen elements.
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::V;
    /// Converts to f32.
    fn expand(self) -> f32;

    /// Loads fewer than sixteen elements, followed by zeros.
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
    fn expand(self) -> f32 {
        self.to_f32()
    }
}

/// Converts sixteen FP8 codes with FRACTION fraction bits to f32. A number is its magnitude, which is computed from the
/// code without the sign bit, times 1 or -1.
///
/// A code of exponent e > 0 and fraction f is `2^(e - bias) (1 + f)`, whose exponent and fraction a bf16 takes as they
/// are. For e = 0 that gives v = `2^-bias (1 + f)` in place of `2^(1 - bias) f`, which is `2 v - 2^(1 - bias)`. No
/// number on the way is subnormal: some machines take a hundred cycles for one.
#[inline(always)]
fn load_codes<S: Simd, const FRACTION: u32>(s: S, x: [u8; LANES]) -> S::V {
    let bias = (1 << (6 - FRACTION)) - 1;
    let above = (127 - bias) << 7;
    let sizes = x.map(|x| Bf16(size_bits::<FRACTION>(x, above)));
    let signs = x.map(|x| Bf16(u16::from(x & 0x80) << 8 | 0x3F80));
    let (size, least) = (s.load_bf16(&sizes), s.splat(f32::from_bits((128 - u32::from(bias)) << 23)));
    let subnormal = s.fma(size, s.splat(2.0), s.sub(s.splat(0.0), least));
    s.mul(s.select_less(size, least, subnormal, size), s.load_bf16(&signs))
}

/// Returns the bits of a code's magnitude as bf16, with `above` added to its exponent; also for infinity and NaN.
#[inline(always)]
fn size_bits<const FRACTION: u32>(x: u8, above: u16) -> u16 {
    let size = u16::from(x & 0x7F);
    let bits = (size << (7 - FRACTION)) + above;
    let beyond = if FRACTION == 3 { size == 0x7F } else { size >= 0x7C };
    if beyond { bits | 0x7F80 } else { bits }
}

/// Converts one code to f32.
#[inline(always)]
fn expand_code<const FRACTION: u32>(x: u8) -> f32 {
    let bias = (1 << (6 - FRACTION)) - 1;
    let size = Bf16(size_bits::<FRACTION>(x, (127 - bias) << 7)).to_f32();
    let least = f32::from_bits((128 - u32::from(bias)) << 23);
    let size = if size < least { 2.0 * size - least } else { size };
    if x & 0x80 == 0 { size } else { -size }
}

impl Element for E4m3 {
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::V {
        load_codes::<S, 3>(s, x.map(|x| x.0))
    }

    #[inline(always)]
    fn expand(self) -> f32 {
        expand_code::<3>(self.0)
    }
}

impl Element for E5m2 {
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::V {
        load_codes::<S, 2>(s, x.map(|x| x.0))
    }

    #[inline(always)]
    fn expand(self) -> f32 {
        expand_code::<2>(self.0)
    }
}
