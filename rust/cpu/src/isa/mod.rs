//! Sixteen fp32 lanes on every instruction set, with one meaning: the same bits everywhere. No kernels.
//!
//! [`Simd`] is what a kernel may use. Its operations are correctly rounded ones (IEEE 754) and selections, so that an
//! instruction set cannot change a result; sums over lanes have one tree. A value of the implementing types is the
//! proof that the machine has the instructions.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use crate::error::{Error, Result};
use crate::memory::Bf16;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Sixteen fp32 lanes.
pub(crate) trait Simd: Copy + Send + Sync {
    /// A vector.
    type V: Copy;
    /// Whether there are registers for 24 accumulators, else for 6.
    const WIDE: bool;

    /// Every lane `x`.
    fn splat(self, x: f32) -> Self::V;
    /// The lanes of `x`.
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// The lanes of `x`, exactly.
    fn load_bf16(self, x: &[Bf16; LANES]) -> Self::V;
    /// The lanes of `x`, exactly.
    fn load_i8(self, x: &[i8; LANES]) -> Self::V;
    /// The upper or lower halves of `x`, each less 8, times `scale`, which has at most 21 significant bits: exactly.
    fn load_i4<const UPPER: bool>(self, x: &[u8; LANES], scale: Self::V) -> Self::V;
    /// Writes the lanes.
    fn store(self, v: Self::V, out: &mut [f32; LANES]);
    /// Starts to load the cache line at `address`, which may be anywhere.
    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        let _ = address;
    }
    /// a + b
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// a - b
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// a b
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// a / b
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a b + c, rounded once
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// a where a > b, else b: also where one is NaN
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// a where a < b, else b: also where one is NaN
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// x where a < b, else y
    fn select_less(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// `2^n` of lanes that are `n + 1.5 * 2^23` with `-126 <= n <= 127`, by their low bits.
    fn pow2(self, shifted: Self::V) -> Self::V;
    /// The sum of the lanes: i with i + 8, then i + 4, i + 2, i + 1.
    fn sum(self, v: Self::V) -> f32;
    /// `sum` of each.
    fn sums4(self, v: [Self::V; 4]) -> [f32; 4];
    /// `sum` of each.
    fn sums8(self, v: [Self::V; 8]) -> [f32; 8];
}

/// Work that is compiled for every instruction set.
pub(crate) trait Kernel {
    /// What it gives.
    type Output;
    /// The work. Implementations are `#[inline(always)]`, so that they are compiled with the caller's instructions.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Portable(portable::Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon),
}

impl Isa {
    /// All that this machine has, the fastest first; the portable one is always the last.
    pub fn available() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        sets.extend([avx512::Avx512::detect().map(Set::Avx512), avx2::Avx2::detect().map(Set::Avx2)]);
        #[cfg(target_arch = "aarch64")]
        sets.extend([neon::Neon::detect().map(Set::Neon)]);
        sets.push(Some(Set::Portable(portable::Portable)));
        sets.into_iter().flatten().map(Self).collect()
    }

    /// The fastest that this machine has.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// The one of this name.
    ///
    /// # Errors
    /// Where this machine has none of this name.
    pub fn by_name(name: &str) -> Result<Self> {
        let available = Self::available();
        available.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
            let names: Vec<_> = available.iter().map(|isa| isa.name()).collect();
            Error::invalid("isa", name, format!("one of {}", names.join(", ")))
        })
    }

    /// `avx512`, `avx2`, `neon` or `portable`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Set::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(_) => "avx512",
            #[cfg(target_arch = "aarch64")]
            Set::Neon(_) => "neon",
        }
    }

    /// Does the work with these instructions.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Set::Portable(s) => kernel.run(s),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(s) => s.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(s) => s.run(kernel),
            #[cfg(target_arch = "aarch64")]
            Set::Neon(s) => s.run(kernel),
        }
    }
}
