//! Rows rounded to integers of 16 or 8 bits by blocks of 32 inputs, for products with packed weights.

// Loops over arrays, which become vectors.
#![allow(clippy::needless_range_loop)]

use crate::blocks::BLOCK;
use crate::isa::{Isa, Kernel, LANES, Simd, Tiles, Vector};
use crate::memory::{LINE_BYTES, Line};

/// Integers to which activations are rounded, by blocks of 32, for products with packed weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// Integers of 16 bits, from -32,512 to 32,512. The limit is 127 * 256, so that an integer splits into two signed
    /// bytes.
    #[default]
    Int16,
    /// Integers of 8 bits, from -127 to 127.
    Int8,
}

impl Rounding {
    /// Returns the largest integer.
    fn largest(self) -> f32 {
        match self {
            Self::Int16 => 32_512.0,
            Self::Int8 => 127.0,
        }
    }
}

/// Blocks whose numbers are all smaller than this in absolute value are rounded to zero, so that factors stay finite.
const LEAST: f32 = f32::from_bits((127 - 100) << 23);
/// Number for rounding: `x + SHIFT` has the integer nearest to x, ties to even, in its low bits if x fits in 16 bits.
const SHIFT: f32 = 12_582_912.0;

/// Integers of a block's inputs in pairs, the first of each in the lower half. Of inputs `4 r .. 4 r + 4`, pair `2 r`
/// has the first and the third, and pair `2 r + 1` the second and the fourth.
pub(crate) type Pairs = [i32; BLOCK / 2];

/// Eight-bit integers of a block's inputs, four in each word.
pub(crate) type Quads = [i32; BLOCK / 4];

/// Rounded rows of `blocks` blocks: a number is `integer * scale`.
#[derive(Clone, Copy)]
pub struct Rounded<'a> {
    pub(crate) blocks: usize,
    /// Pairs of each block, `[rows, blocks]`.
    pub(crate) pairs: &'a [Pairs],
    /// Bytes of each block, `[rows, blocks]`; only for 8-bit integers.
    pub(crate) quads: &'a [Quads],
    /// Scale of each block, `[rows, blocks]`.
    pub(crate) scales: &'a [f32],
    /// Sums of the integers of each half of a block, `[rows, blocks]`.
    pub(crate) sums: &'a [[i32; 2]],
    /// Rows in the layout of tiles, if tiles multiply them.
    pub(crate) planes: Option<Planes<'a>>,
}

/// Rounded rows for products by tiles, sixteen rows side by side. Values after the last row have no meaning.
#[derive(Clone, Copy)]
pub(crate) struct Planes<'a> {
    pub(crate) tiles: Tiles,
    /// Whether integers have 16 bits; otherwise 8.
    pub(crate) wide: bool,
    /// Lines of a block's integers, `[groups, blocks, 16]`: 32 signed bytes, or for 16-bit integers `256 upper + lower`
    /// the 32 signed bytes `upper`, then the 32 signed bytes `lower`.
    pub(crate) codes: &'a [[Line; LANES]],
    /// Scale of each block, `[groups, blocks, 16]`.
    pub(crate) scales: &'a [Vector],
    /// Sum of a block's integers times its scale, `[groups, blocks, 16]`.
    pub(crate) sums: &'a [Vector],
}

/// Memory for rounded rows.
#[derive(Default)]
pub struct RoundedRoom {
    pairs: Vec<Pairs>,
    quads: Vec<Quads>,
    scales: Vec<f32>,
    sums: Vec<[i32; 2]>,
    planes: PlaneRoom,
}

/// Memory for [`Planes`]; empty without tiles.
#[derive(Default)]
struct PlaneRoom {
    codes: Vec<[Line; LANES]>,
    scales: Vec<Vector>,
    sums: Vec<Vector>,
}

impl RoundedRoom {
    /// Reserves memory for `rows` rows of `inputs` inputs, or fewer, and with `tiles` also for products by tiles.
    pub fn new(rows: usize, inputs: usize, tiles: bool) -> Self {
        let (blocks, groups) = (rows * (inputs / BLOCK), rows.div_ceil(LANES) * (inputs / BLOCK));
        let groups = if tiles { groups } else { 0 };
        let planes = PlaneRoom {
            codes: vec![[Line([0; LINE_BYTES]); LANES]; groups],
            scales: vec![[0.0; LANES]; groups],
            sums: vec![[0.0; LANES]; groups],
        };
        Self {
            pairs: vec![[0; _]; blocks],
            quads: vec![[0; _]; blocks],
            scales: vec![0.0; blocks],
            sums: vec![[0; 2]; blocks],
            planes,
        }
    }

    /// Fills the memory's floats with NaN, for tests.
    pub fn poison(&mut self) {
        self.scales.fill(f32::NAN);
        self.planes.scales.as_flattened_mut().fill(f32::NAN);
    }
}

/// Rounds rows of `inputs` inputs, a multiple of 32, which follow one another in `x`.
///
/// The largest magnitude of a block becomes the largest code by its scale `d`. A block with a number that is not finite
/// gets a scale of NaN.
pub struct Round<'a, 'r> {
    /// Rows, `[rows, inputs / 16]`.
    pub x: &'a [Vector],
    /// Number of inputs of a row, a multiple of 32.
    pub inputs: usize,
    /// Input at each place of the blocks, `[inputs]`; `None` if inputs are in their own order.
    pub order: Option<&'a [u32]>,
    /// Integers to round to.
    pub to: Rounding,
    /// Tiles for whose layout the rows are written too.
    pub tiles: Option<Tiles>,
    /// Memory for as many rows and inputs, and for `tiles` if there are some.
    pub room: &'r mut RoundedRoom,
}

impl<'r> Round<'_, 'r> {
    /// Rounds the rows with these instructions.
    pub fn run(self, isa: Isa) -> Rounded<'r> {
        isa.run(self)
    }
}

impl<'r> Kernel for Round<'_, 'r> {
    type Output = Rounded<'r>;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Rounded<'r> {
        let blocks = self.inputs / BLOCK;
        let flat = self.x.as_flattened();
        let numbers = flat.as_chunks::<BLOCK>().0;
        let RoundedRoom { pairs, quads, scales, sums, planes } = self.room;
        let (count, wide) = (numbers.len(), self.to == Rounding::Int16);
        let quads = &mut quads[..if wide { 0 } else { count }];
        let (pairs, scales, sums) = (&mut pairs[..count], &mut scales[..count], &mut sums[..count]);
        let mut planes = self.tiles.map(|tiles| (tiles, planes.of(count / blocks, blocks)));
        for i in 0..count {
            let codes;
            let mut moved = [0.0; BLOCK];
            let numbers = match self.order {
                None => &numbers[i],
                Some(order) => {
                    let row = &flat[i / blocks * self.inputs..][..self.inputs];
                    for (number, &input) in moved.iter_mut().zip(&order[i % blocks * BLOCK..]) {
                        *number = row[input as usize];
                    }
                    &moved
                }
            };
            (scales[i], codes) = round(numbers, self.to.largest());
            pairs[i] = paired(&codes);
            sums[i] = totals(&codes);
            if !wide {
                quads[i] = quadrupled(&codes);
            }
            if let Some((_, planes)) = &mut planes {
                let (row, block) = (i / blocks, i % blocks);
                let (at, lane) = (row / LANES * blocks + block, row % LANES);
                planes.codes[at][lane] = if wide { halved(&codes) } else { narrow(&codes) };
                planes.scales[at][lane] = scales[i];
                planes.sums[at][lane] = scales[i] * (sums[i][0] + sums[i][1]) as f32;
            }
        }
        let planes =
            planes.map(|(tiles, PlaneSlices { codes, scales, sums })| Planes { tiles, wide, codes, scales, sums });
        Rounded { blocks, pairs, quads, scales, sums, planes }
    }
}

/// The part of a [`PlaneRoom`] that some rows fill.
struct PlaneSlices<'a> {
    codes: &'a mut [[Line; LANES]],
    scales: &'a mut [Vector],
    sums: &'a mut [Vector],
}

impl PlaneRoom {
    /// Returns the memory for `rows` rows of `blocks` blocks. Lanes without a row keep old values; the sums of these
    /// lanes are never read.
    fn of(&mut self, rows: usize, blocks: usize) -> PlaneSlices<'_> {
        let groups = rows.div_ceil(LANES) * blocks;
        PlaneSlices {
            codes: &mut self.codes[..groups],
            scales: &mut self.scales[..groups],
            sums: &mut self.sums[..groups],
        }
    }
}

/// Returns the scale of a block and its integers.
#[inline(always)]
fn round(x: &[f32; BLOCK], top_code: f32) -> (f32, [i32; BLOCK]) {
    let mut top = 0;
    for i in 0..BLOCK {
        top = top.max(x[i].to_bits() & 0x7FFF_FFFF);
    }
    let largest = f32::from_bits(top);
    if !largest.is_finite() {
        return (f32::NAN, [0; BLOCK]);
    }
    if largest < LEAST {
        return (0.0, [0; BLOCK]);
    }
    let factor = top_code / largest;
    let mut codes = [0; BLOCK];
    for i in 0..BLOCK {
        codes[i] = (x[i] * factor + SHIFT).to_bits().cast_signed() - SHIFT.to_bits().cast_signed();
    }
    (largest / top_code, codes)
}

#[inline(always)]
fn paired(codes: &[i32; BLOCK]) -> Pairs {
    let mut pairs = [0; BLOCK / 2];
    for run in 0..BLOCK / 4 {
        for odd in 0..2 {
            let (first, second) = (codes[4 * run + odd], codes[4 * run + odd + 2]);
            pairs[2 * run + odd] = first & 0xFFFF | second << 16;
        }
    }
    pairs
}

/// Returns the sums of the integers of each half of a block.
#[inline(always)]
fn totals(codes: &[i32; BLOCK]) -> [i32; 2] {
    let mut sums = [0; 2];
    for i in 0..BLOCK {
        sums[i / (BLOCK / 2)] += codes[i];
    }
    sums
}

#[inline(always)]
fn quadrupled(codes: &[i32; BLOCK]) -> Quads {
    let mut quads = [0; BLOCK / 4];
    for i in 0..BLOCK {
        quads[i / 4] |= (codes[i] & 0xFF) << (8 * (i % 4));
    }
    quads
}

/// Converts 8-bit integers to a line of bytes.
#[inline(always)]
fn narrow(codes: &[i32; BLOCK]) -> Line {
    let mut line = Line([0; LINE_BYTES]);
    for i in 0..BLOCK {
        line.0[i] = codes[i] as u8;
    }
    line
}

/// Splits integers `256 upper + lower` into their upper bytes, then their signed lower bytes.
#[inline(always)]
fn halved(codes: &[i32; BLOCK]) -> Line {
    let mut line = Line([0; LINE_BYTES]);
    for i in 0..BLOCK {
        line.0[i] = ((codes[i] + 128) >> 8) as u8;
        line.0[BLOCK + i] = codes[i] as u8;
    }
    line
}
