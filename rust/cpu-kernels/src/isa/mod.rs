//! Operations on sixteen fp32 lanes for every instruction set, with the same bits everywhere. Contains no kernels.
//!
//! [`Simd`] is what a kernel may use. Its operations are correctly rounded ones (IEEE 754) and selections, so that an
//! instruction set cannot change a result; sums over lanes have one tree. A value of the implementing types is the
//! proof that the machine has the instructions.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod tiles;

use crate::error::{Error, Result};
use crate::memory::Bf16;
pub use tiles::Tiles;
pub(crate) use tiles::{MOST_TILES, Tiling};

/// Number of lanes in a vector.
pub const LANES: usize = 16;

/// Sixteen numbers that are loaded at once.
pub type Vector = [f32; LANES];

/// Sixteen rows of sixteen numbers or of sixteen bf16 pairs, the first of each pair in its lower half.
pub type Tile = [Vector; LANES];

/// Content of the tiles of a [`Tiling`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TileShape {
    /// Sixteen rows of sixteen bf16 pairs, for [`Tiling::multiply`].
    Pairs,
    /// Sixteen rows of 32 bytes, for [`Tiling::multiply_bytes`].
    Bytes,
}

/// Operations on sixteen fp32 lanes.
pub(crate) trait Simd: Copy + Send + Sync {
    /// Vector of sixteen fp32 lanes.
    type V: Copy;
    /// Whether there are registers for 24 accumulators; otherwise for 6.
    const WIDE: bool;
    /// Whether rows are laid out as bf16 pairs for [`dot`](Self::dot). Otherwise they are fp32 numbers, the second
    /// numbers of all pairs before the first.
    const DOTS: bool = false;

    /// Returns a vector with every lane `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Loads the lanes of `x`.
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// Converts the lanes of `x` to fp32, exactly.
    fn load_bf16(self, x: &[Bf16; LANES]) -> Self::V;
    /// Returns the first numbers of the pairs, or with `SECOND` the second ones, exactly.
    fn load_pairs<const SECOND: bool>(self, x: &[[Bf16; 2]; LANES]) -> Self::V;
    /// Loads the bits of the pairs, for [`dot`](Self::dot) and tiles.
    #[inline(always)]
    fn load_bits(self, x: &[[Bf16; 2]; LANES]) -> Self::V {
        self.load(&std::array::from_fn(|i| f32::from_bits(u32::from(x[i][0].0) | u32::from(x[i][1].0) << 16)))
    }
    /// Returns `acc` plus the product of the second numbers of the pairs `a` and `b`, rounded once, then plus the
    /// product of the first numbers, rounded once. A subnormal operand or result may count as zero. Only for
    /// instruction sets with [`DOTS`](Self::DOTS).
    #[inline(always)]
    fn dot(self, a: Self::V, b: Self::V, acc: Self::V) -> Self::V {
        let _ = (a, b);
        acc
    }
    /// Converts the lanes of `x` to fp32, exactly.
    fn load_i8(self, x: &[i8; LANES]) -> Self::V;
    /// Writes the lanes to `out`.
    fn store(self, v: Self::V, out: &mut [f32; LANES]);
    /// Starts to load the cache line at `address`, which need not be valid.
    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        let _ = address;
    }
    /// Returns `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Returns a where a > b, else b; so b where one is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns a where a < b, else b; so b where one is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns x where a < b, else y.
    fn select_less(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Returns `2^n` of lanes that are `n + 1.5 * 2^23` with `-126 <= n <= 127`, by their low bits.
    fn pow2(self, shifted: Self::V) -> Self::V;
    /// Returns the sum of the lanes: i plus i + 8, then i + 4, i + 2, i + 1.
    fn sum(self, v: Self::V) -> f32;
    /// Returns the largest lane, by [`max`](Self::max): i with i + 8, then i + 4, i + 2, i + 1.
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        let mut x = [0.0; LANES];
        self.store(v, &mut x);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                x[i] = if x[i] > x[i + half] { x[i] } else { x[i + half] };
            }
        }
        x[0]
    }
    /// Returns the numbers whose bf16 bits are the upper halves of the lanes.
    #[inline(always)]
    fn upper(self, v: Self::V) -> Self::V {
        let mut x = [0.0; LANES];
        self.store(v, &mut x);
        self.load(&x.map(|x| f32::from_bits(x.to_bits() & 0xFFFF_0000)))
    }
    /// Returns bf16 pairs of the upper halves of lanes: from `first` and from `second`.
    #[inline(always)]
    fn pairs(self, first: Self::V, second: Self::V) -> Self::V {
        let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
        self.store(first, &mut a);
        self.store(second, &mut b);
        self.load(&std::array::from_fn(|i| f32::from_bits(a[i].to_bits() >> 16 | b[i].to_bits() & 0xFFFF_0000)))
    }
    /// Transposes sixteen vectors: vector i of the result has lane i of each, to the bit.
    #[inline(always)]
    fn transpose(self, v: [Self::V; LANES]) -> [Self::V; LANES] {
        let mut rows = [[0.0; LANES]; LANES];
        for (row, v) in rows.iter_mut().zip(v) {
            self.store(v, row);
        }
        std::array::from_fn(|i| self.load(&rows.map(|row| row[i])))
    }
    /// Returns [`sum`](Self::sum) of each vector.
    fn sums4(self, v: [Self::V; 4]) -> [f32; 4];
    /// Returns [`sum`](Self::sum) of each vector.
    fn sums8(self, v: [Self::V; 8]) -> [f32; 8];

    /// Number of rows whose products with integer weights are computed at once; the number of registers limits it. One
    /// of the numbers that products of few rows have code for.
    const INTEGER_ROWS: usize;
    /// Number of integer sums that have to be accumulated side by side, so that products follow each other without
    /// waiting.
    const INTEGER_SUMS: usize = 1;

    /// Vector of sixteen lanes of 32 bits: an integer each, two 16-bit integers, or four bytes.
    type I: Copy;

    /// Returns a vector with every lane `x`.
    fn splat_int(self, x: i32) -> Self::I;
    /// Loads the lanes of `x`, four bytes each.
    fn load_int(self, x: &[u8; 4 * LANES]) -> Self::I;
    /// Writes the lanes to `out`, four bytes each.
    fn store_int(self, v: Self::I, out: &mut [u8; 4 * LANES]);
    /// Returns the bitwise and.
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// Returns the bitwise or.
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// Shifts each 16-bit half left by `n` below 16.
    fn shl16(self, v: Self::I, n: u32) -> Self::I;
    /// Shifts each 16-bit half right by `n` below 16, filled with zeros.
    fn shr16(self, v: Self::I, n: u32) -> Self::I;
    /// Shifts each 16-bit half right by `n` below 16, filled with its sign.
    fn sar16(self, v: Self::I, n: u32) -> Self::I;
    /// Returns the wrapping difference of each byte.
    fn sub8(self, a: Self::I, b: Self::I) -> Self::I;
    /// Replaces each byte, which must be below 16, by that element of `table`.
    fn lookup(self, table: &[i8; 16], v: Self::I) -> Self::I;
    /// Returns the wrapping sum of each lane.
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I;
    /// Multiplies `codes` with a word of each of R rows: adds to sum `part` of row r the products of the two signed 16-bit
    /// halves of each lane with those of `x[r]`. Sums wrap. Compilers tend to compute one row after the other, so that
    /// each instruction waits for the one before, or registers run out; sets may prevent that.
    fn dots16<const R: usize>(self, sums: &mut [[Self::I; 4]; R], part: usize, codes: Self::I, x: &[i32; R]);
    /// Largest unsigned byte that [`dots8`](Self::dots8) takes; 0 if there is no such instruction.
    const LARGEST_BYTE: i32 = 0;
    /// Multiplies `codes` with a word of each of R rows: adds to sum `part` of row r the products of the four unsigned
    /// bytes of each lane with the signed bytes of `x[r]`. Sums wrap. Only for instruction sets whose
    /// [`LARGEST_BYTE`](Self::LARGEST_BYTE) is not 0.
    #[inline(always)]
    fn dots8<const R: usize>(self, sums: &mut [[Self::I; 4]; R], part: usize, codes: Self::I, x: &[i32; R]) {
        let _ = (sums, part, codes, x);
    }
    /// Converts integers to the nearest fp32 numbers, ties to even.
    fn to_f32(self, v: Self::I) -> Self::V;
    /// Converts fp16 numbers, given as bits, to fp32, exactly.
    fn load_f16(self, x: &[u16; LANES]) -> Self::V;
}

/// Repeats a body for each row below `$rows`, with a constant that is its number. A panel has at most 12 rows.
#[cfg(target_arch = "x86_64")]
macro_rules! each_row {
    ($rows:ident, $r:ident, $body:block) => { each_row!($rows, $r, $body, 0 1 2 3 4 5 6 7 8 9 10 11) };
    ($rows:ident, $r:ident, $body:block, $($index:literal)*) => {
        $({ const $r: usize = $index; if $r < $rows $body })*
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use each_row;

/// Work that is compiled for every instruction set.
pub(crate) trait Kernel {
    /// Result of the work.
    type Output;
    /// Does the work. Implementations are `#[inline(always)]`, so that they are compiled with the caller's
    /// instructions.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Portable(portable::Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2<{ avx2::PLAIN }>),
    #[cfg(target_arch = "x86_64")]
    AvxVnni(avx2::Avx2<{ avx2::PLAIN }>, avx2::Avx2<{ avx2::VNNI }>),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512<{ avx512::PLAIN }>),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(avx512::Avx512<{ avx512::PLAIN }>, avx512::Avx512<{ avx512::BF16 }>),
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon),
}

impl Isa {
    /// Returns all instruction sets of this machine, fastest first; the portable one is the last.
    pub fn available() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        sets.extend([
            avx512::Avx512::<{ avx512::PLAIN }>::detect()
                .zip(avx512::Avx512::<{ avx512::BF16 }>::detect())
                .map(|(s, dots)| Set::Avx512Bf16(s, dots)),
            avx512::Avx512::<{ avx512::PLAIN }>::detect().map(Set::Avx512),
            avx2::Avx2::<{ avx2::PLAIN }>::detect()
                .zip(avx2::Avx2::<{ avx2::VNNI }>::detect())
                .map(|(s, integers)| Set::AvxVnni(s, integers)),
            avx2::Avx2::<{ avx2::PLAIN }>::detect().map(Set::Avx2),
        ]);
        #[cfg(target_arch = "aarch64")]
        sets.extend([neon::Neon::detect().map(Set::Neon)]);
        sets.push(Some(Set::Portable(portable::Portable)));
        sets.into_iter().flatten().map(Self).collect()
    }

    /// Returns the fastest instruction set of this machine.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// Returns the instruction set with this name.
    ///
    /// # Errors
    /// Where this machine has none of this name.
    pub fn by_name(name: &str) -> Result<Self> {
        let available = Self::available();
        available.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
            let names: Vec<_> = available.iter().map(|isa| isa.name()).collect();
            Error::invalid("instructions", name, format!("one of {}", names.join(", ")))
        })
    }

    /// Returns the name: `avx512_bf16`, `avx512`, `avx_vnni`, `avx2`, `neon` or `portable`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Set::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::AvxVnni(..) => "avx_vnni",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16(..) => "avx512_bf16",
            #[cfg(target_arch = "aarch64")]
            Set::Neon(_) => "neon",
        }
    }

    /// Runs a kernel with these instructions.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Set::Portable(s) => kernel.run(s),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(s) | Set::AvxVnni(s, _) => s.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(s) | Set::Avx512Bf16(s, _) => s.run(kernel),
            #[cfg(target_arch = "aarch64")]
            Set::Neon(s) => s.run(kernel),
        }
    }

    /// Runs a kernel on integers: with AVX-512 only if it has fused products and sums of 16-bit pairs, else with AVX2.
    /// Such work has the same bits everywhere, and fewer copies of it take less time to compile.
    #[inline]
    pub(crate) fn run_integers<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Set::Portable(s) => kernel.run(s),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(s) => s.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Set::AvxVnni(_, s) => s.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(s) | Set::Avx512Bf16(s, _) => s.run_integers(kernel),
            #[cfg(target_arch = "aarch64")]
            Set::Neon(s) => s.run(kernel),
        }
    }

    /// Returns the number of rows whose products [`run_integers`](Self::run_integers) computes at once.
    pub(crate) fn integer_rows(self) -> usize {
        struct Rows;
        impl Kernel for Rows {
            type Output = usize;

            #[inline(always)]
            fn run<S: Simd>(self, _: S) -> usize {
                S::INTEGER_ROWS
            }
        }
        self.run_integers(Rows)
    }

    /// Returns [`Simd::LARGEST_BYTE`] of the instructions that [`run_integers`](Self::run_integers) uses.
    pub(crate) fn largest_byte(self) -> i32 {
        struct Largest;
        impl Kernel for Largest {
            type Output = i32;

            #[inline(always)]
            fn run<S: Simd>(self, _: S) -> i32 {
                S::LARGEST_BYTE
            }
        }
        self.run_integers(Largest)
    }

    /// Returns the tiles that the machine has next to these instructions, if any. For many rows they multiply faster
    /// than vectors: bytes with the same bits, bf16 numbers with other ones.
    pub fn tiles(self) -> Option<Tiles> {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(_) | Set::Avx512Bf16(..) => Tiles::detect(),
            _ => None,
        }
    }

    /// Runs a kernel on pairs of bf16 numbers, with instructions for pairs if there are some.
    #[inline]
    pub(crate) fn run_pairs<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16(_, s) => s.run(kernel),
            _ => self.run(kernel),
        }
    }

    /// Returns these instructions without the ones for bf16 pairs. Those treat subnormal numbers as zeros, so they give
    /// other bits for tiny numbers.
    #[must_use]
    pub fn without_dots(self) -> Self {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16(s, _) => Self(Set::Avx512(s)),
            _ => self,
        }
    }

    /// Returns whether there are instructions for pairs.
    pub fn has_dots(self) -> bool {
        self != self.without_dots()
    }
}
