//! Products of tiles, as AMX does them: of bf16 pairs with fp32 sums, and of bytes with 32-bit sums.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::amx::Amx;
use super::{LANES, Tile, TileShape};
use crate::memory::Line;

/// Maximum number of tiles that a pair of tiles is multiplied with at once: there are registers for six sums.
pub(crate) const MOST_TILES: usize = 3;

/// Instructions that multiply tiles: those of this machine, or portable ones with the same meaning.
///
/// A product of pairs of a row of 16 pairs a with a column of 16 pairs b is `(a00 b00 + a10 b10 + ..) + (a01 b01 + a11
/// b11 + ..)`: the products of the first numbers, each added by a fused multiply-add, then those of the second, and
/// their sum, which is added to what was there. Subnormal numbers may be zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Portable,
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx(Amx),
}

impl Tiles {
    /// Returns AMX tiles, if the processor has them for bf16 pairs and bytes and the system lets this process use them.
    pub fn detect() -> Option<Self> {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        return Amx::detect().map(|amx| Self(Set::Amx(amx)));
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        None
    }

    /// Returns portable tiles, for tests: every machine has them, and they are far slower than products of vectors.
    pub fn portable() -> Self {
        Self(Set::Portable)
    }

    /// Makes this thread's registers tiles until the result is dropped.
    #[inline]
    pub(crate) fn begin(self, shape: TileShape) -> Tiling {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if let Set::Amx(amx) = self.0 {
            amx.configure(shape);
        }
        Tiling { tiles: self, shape }
    }
}

/// Registers of a thread while they are tiles.
pub(crate) struct Tiling {
    tiles: Tiles,
    shape: TileShape,
}

impl Tiling {
    /// Computes `c[half, n] = sum over steps of a[step, half] b[step, n]`. `a` is `[steps, 2]` tiles, `b` `[steps, N]`
    /// and `c` `[2, N]`. Rows of `c` are rows of `a`, and columns of `c` are columns of pairs of `b`: row i of a tile
    /// of `b` holds pair i of its sixteen columns.
    #[inline]
    pub(crate) fn multiply<const N: usize>(&self, a: &[Tile], b: &[Tile], c: &mut [Tile]) {
        const { assert!(N >= 1 && N <= MOST_TILES) };
        assert!(a.len() * N == b.len() * 2 && c.len() == 2 * N, "{} and {} tiles to {}", a.len(), b.len(), c.len());
        assert_eq!(self.shape, TileShape::Pairs);
        match self.tiles.0 {
            Set::Portable => multiply::<N>(a, b, c),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Set::Amx(amx) => amx.multiply::<N>(a, b, c),
        }
    }

    /// Computes `c[plane, row, o] = sum over i of rows[row, plane, i] codes[i, o]` for one plane or two. Of each row's
    /// 64 bytes, plane 0 has the first 32 and plane 1 the last 32. Element r of `codes` holds inputs `4 r .. 4 r + 4`
    /// of sixteen outputs. Bytes are signed; sums are 32-bit integers.
    #[inline]
    pub(crate) fn multiply_bytes<const PLANES: usize>(
        &self,
        rows: &[Line; LANES],
        codes: &[Line; 8],
        c: &mut [[Line; LANES]; PLANES],
    ) {
        const { assert!(PLANES == 1 || PLANES == 2) };
        debug_assert_eq!(self.shape, TileShape::Bytes);
        match self.tiles.0 {
            Set::Portable => multiply_bytes(rows, codes, c),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Set::Amx(amx) => amx.multiply_bytes(rows, codes, c),
        }
    }
}

impl Drop for Tiling {
    fn drop(&mut self) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if let Set::Amx(amx) = self.tiles.0 {
            amx.release();
        }
    }
}

fn multiply_bytes(rows: &[Line; LANES], codes: &[Line; 8], c: &mut [[Line; LANES]]) {
    for (plane, c) in c.iter_mut().enumerate() {
        for (row, c) in rows.iter().zip(c) {
            let row = row.0.as_chunks::<4>().0[8 * plane..][..8].iter();
            for (o, c) in c.0.as_chunks_mut().0.iter_mut().enumerate() {
                let pairs = row.clone().zip(codes).flat_map(|(x, codes)| x.iter().zip(&codes.0.as_chunks::<4>().0[o]));
                let product = |(x, code): (&u8, &u8)| i32::from(x.cast_signed()) * i32::from(code.cast_signed());
                *c = pairs.map(product).sum::<i32>().to_le_bytes();
            }
        }
    }
}

fn multiply<const N: usize>(a: &[Tile], b: &[Tile], c: &mut [Tile]) {
    let first = |x: f32| f32::from_bits(x.to_bits() << 16);
    let second = |x: f32| f32::from_bits(x.to_bits() & 0xFFFF_0000);
    c.as_flattened_mut().as_flattened_mut().fill(0.0);
    for (a, b) in a.chunks_exact(2).zip(b.chunks_exact(N)) {
        for (half, a) in a.iter().enumerate() {
            for (n, b) in b.iter().enumerate() {
                for (row, a) in a.iter().enumerate() {
                    for column in 0..LANES {
                        let (mut firsts, mut seconds) = (0.0, 0.0);
                        for (a, b) in a.iter().zip(b) {
                            firsts = first(*a).mul_add(first(b[column]), firsts);
                            seconds = second(*a).mul_add(second(b[column]), seconds);
                        }
                        c[half * N + n][row][column] += firsts + seconds;
                    }
                }
            }
        }
    }
}
