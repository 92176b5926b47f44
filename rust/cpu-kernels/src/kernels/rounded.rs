//! Rows rounded to integers of 16 or 8 bits by blocks of 32 inputs, for products with packed weights.

// Loops over arrays, which become vectors.
#![allow(clippy::needless_range_loop)]

use crate::blocks::BLOCK;
use crate::isa::{Isa, Kernel, LANES, Simd, Tiles, Vector};
use crate::memory::{LINE_BYTES, Line};
use std::ops::Range;

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

/// Numbers of rows that are multiplied at once. Not every number has code of its own, because builds would take longer.
pub(crate) const WIDTHS: [usize; 7] = [1, 2, 3, 4, 6, 8, 12];
/// Number of words of a row and block that hold its pairs. Of inputs `4 r .. 4 r + 4`, word `2 r` has the first and the
/// third, and word `2 r + 1` the second and the fourth. The earlier input is in the lower half.
pub(crate) const PAIRS: usize = BLOCK / 2;
/// Number of words of a row and block that hold its quads: four 8-bit integers each.
pub(crate) const QUADS: usize = BLOCK / 4;
/// Number of words of a row and block that hold its [`Numbers`].
pub(crate) const NUMBERS: usize = 7;
/// Factor of the upper half of a total, see [`Numbers`].
pub(crate) const UPPER: i32 = 64;

/// `WORDS` words of a block for each of R rows.
pub(crate) type Words<const WORDS: usize, const R: usize> = [[i32; R]; WORDS];

/// Further words of a block of R rows.
pub(crate) struct Numbers<'a, const R: usize>(pub(crate) &'a Words<NUMBERS, R>);

impl<'a, const R: usize> Numbers<'a, R> {
    /// Returns the rows' scales, as bits.
    #[inline(always)]
    pub(crate) fn scales(&self) -> &'a [i32; R] {
        &self.0[0]
    }

    /// Returns the sums of the integers, as pairs `(sum - 64 upper, upper)`. `part` is 0 for the block, and 1 and 2 for
    /// its halves.
    #[inline(always)]
    pub(crate) fn totals(&self, part: usize) -> &'a [i32; R] {
        &self.0[1 + part]
    }

    /// Returns the sums of the integers times their scales, as bits. `part` is as in [`totals`](Self::totals).
    #[inline(always)]
    pub(crate) fn sums(&self, part: usize) -> &'a [i32; R] {
        &self.0[4 + part]
    }
}

/// Rounded rows of `blocks` blocks: a number is `integer * scale`. Up to `most` rows are side by side in a panel, so that
/// a product reads their words one after the other.
#[derive(Clone, Copy)]
pub struct Rounded<'a> {
    pub(crate) rows: usize,
    pub(crate) blocks: usize,
    /// Largest number of rows of a panel, one of [`WIDTHS`].
    most: usize,
    /// Pairs of panels with R rows, `[panels, blocks, PAIRS, R]`.
    pairs: &'a [i32],
    /// Quads, `[panels, blocks, QUADS, R]`; only for 8-bit integers.
    quads: &'a [i32],
    /// Numbers, `[panels, blocks, NUMBERS, R]`.
    numbers: &'a [i32],
    /// Rows in the layout of tiles, if tiles multiply them.
    pub(crate) planes: Option<Planes<'a>>,
}

impl<'a> Rounded<'a> {
    /// Returns whether there are quads.
    pub(crate) fn has_quads(&self) -> bool {
        !self.quads.is_empty()
    }

    /// Returns the panels' rows.
    pub(crate) fn panels(&self) -> impl Iterator<Item = Range<usize>> {
        panels(self.rows, self.most)
    }

    /// Returns `WORDS` words of each block of a panel of R rows that starts with row `row`: from `first` on, `count`
    /// blocks.
    #[inline(always)]
    fn panel<const WORDS: usize, const R: usize>(
        &self,
        of: &'a [i32],
        row: usize,
        (first, count): (usize, usize),
    ) -> &'a [Words<WORDS, R>] {
        let at = (row * self.blocks + first * R) * WORDS;
        of[at..][..count * WORDS * R].as_chunks().0.as_chunks().0
    }

    /// Returns the pairs of `blocks` (first, count) of the panel of R rows that starts with row `row`.
    #[inline(always)]
    pub(crate) fn pairs<const R: usize>(&self, row: usize, blocks: (usize, usize)) -> &'a [Words<PAIRS, R>] {
        self.panel(self.pairs, row, blocks)
    }

    /// Returns the quads of `blocks` (first, count) of the panel of R rows that starts with row `row`.
    #[inline(always)]
    pub(crate) fn quads<const R: usize>(&self, row: usize, blocks: (usize, usize)) -> &'a [Words<QUADS, R>] {
        self.panel(self.quads, row, blocks)
    }

    /// Returns the further words of `blocks` (first, count) of the panel of R rows that starts with row `row`.
    #[inline(always)]
    pub(crate) fn numbers<const R: usize>(&self, row: usize, blocks: (usize, usize)) -> &'a [Words<NUMBERS, R>] {
        self.panel(self.numbers, row, blocks)
    }
}

/// Returns the rows of each panel. All but the last have one of [`WIDTHS`]. If few rows would be left for the last one,
/// it gets a part of those of the panel before.
fn panels(rows: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let panel = move |start: usize| {
        let rest = rows - start;
        let few_left = rest > most && 3 * (rest - most) <= most;
        let count = if few_left { width(rest.div_ceil(2)) } else { rest.min(most) };
        (count > 0).then_some(start..start + count)
    };
    std::iter::successors(panel(0), move |last| panel(last.end))
}

/// Returns the smallest of [`WIDTHS`] that is at least `rows`, which is at most the largest.
pub(crate) fn width(rows: usize) -> usize {
    WIDTHS.into_iter().find(|&width| width >= rows).expect("a panel has at most 12 rows")
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
    pairs: Vec<i32>,
    quads: Vec<i32>,
    numbers: Vec<i32>,
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
        // The last panel may have up to three places without a row.
        let (places, groups) = ((rows + 3) * (inputs / BLOCK), rows.div_ceil(LANES) * (inputs / BLOCK));
        let groups = if tiles { groups } else { 0 };
        let planes = PlaneRoom {
            codes: vec![[Line([0; LINE_BYTES]); LANES]; groups],
            scales: vec![[0.0; LANES]; groups],
            sums: vec![[0.0; LANES]; groups],
        };
        Self {
            pairs: vec![0; places * PAIRS],
            quads: vec![0; places * QUADS],
            numbers: vec![0; places * NUMBERS],
            planes,
        }
    }

    /// Fills the memory's floats with NaN, for tests.
    pub fn poison(&mut self) {
        self.numbers.fill(f32::NAN.to_bits().cast_signed());
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
        isa.run(RoundInto { work: self, most: isa.integer_rows() })
    }
}

/// Kernel that rounds rows into panels of at most `most` rows.
struct RoundInto<'a, 'r> {
    work: Round<'a, 'r>,
    most: usize,
}

impl<'r> Kernel for RoundInto<'_, 'r> {
    type Output = Rounded<'r>;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Rounded<'r> {
        let Self { work, most } = self;
        work.into_panels(most)
    }
}

impl<'r> Round<'_, 'r> {
    #[inline(always)]
    fn into_panels(self, most: usize) -> Rounded<'r> {
        let blocks = self.inputs / BLOCK;
        let flat = self.x.as_flattened();
        let numbers = flat.as_chunks::<BLOCK>().0;
        let RoundedRoom { pairs, quads, numbers: further, planes } = self.room;
        let (count, wide) = (numbers.len(), self.to == Rounding::Int16);
        let rows = count / blocks;
        let places = panels(rows, most).last().map_or(0, |last| last.start + width(last.len())) * blocks;
        let quads = &mut quads[..if wide { 0 } else { places * QUADS }];
        let (pairs, further) = (&mut pairs[..places * PAIRS], &mut further[..places * NUMBERS]);
        let mut planes = self.tiles.map(|tiles| (tiles, planes.of(rows, blocks)));
        let mut panels = panels(rows, most);
        // The panel of the row, and its number of places side by side.
        let (mut panel, mut across) = (0..0, 0);
        for i in 0..count {
            let (row, block) = (i / blocks, i % blocks);
            if row == panel.end {
                panel = panels.next().expect("a panel for every row");
                across = width(panel.len());
            }
            let mut moved = [0.0; BLOCK];
            let numbers = match self.order {
                None => &numbers[i],
                Some(order) => {
                    let row = &flat[row * self.inputs..][..self.inputs];
                    for (number, &input) in moved.iter_mut().zip(&order[block * BLOCK..]) {
                        *number = row[input as usize];
                    }
                    &moved
                }
            };
            let (scale, codes) = round(numbers, self.to.largest());
            let (place, lane) = (panel.start * blocks + block * across, row - panel.start);
            put(pairs, place, across, lane, &paired(&codes));
            if !wide {
                put(quads, place, across, lane, &quadrupled(&codes));
            }
            let [first, second] = totals(&codes);
            put(further, place, across, lane, &further_words(scale, first, second));
            if let Some((_, planes)) = &mut planes {
                let (at, lane) = (row / LANES * blocks + block, row % LANES);
                planes.codes[at][lane] = if wide { halved(&codes) } else { narrow(&codes) };
                planes.scales[at][lane] = scale;
                planes.sums[at][lane] = scale * (first + second) as f32;
            }
        }
        let planes =
            planes.map(|(tiles, PlaneSlices { codes, scales, sums })| Planes { tiles, wide, codes, scales, sums });
        Rounded { rows, blocks, most, pairs, quads, numbers: further, planes }
    }
}

/// Writes words of a row and block to a panel `[blocks, N, width]` whose block starts at place `place`.
#[inline(always)]
fn put<const N: usize>(panels: &mut [i32], place: usize, width: usize, lane: usize, words: &[i32; N]) {
    let block = &mut panels[place * N..][..N * width];
    for (to, word) in block[lane..].iter_mut().step_by(width).zip(words) {
        *to = *word;
    }
}

/// Returns the words of [`Numbers`] for one row.
#[inline(always)]
fn further_words(scale: f32, first: i32, second: i32) -> [i32; NUMBERS] {
    let mut words = [0; NUMBERS];
    words[0] = scale.to_bits().cast_signed();
    for (part, total) in [first + second, first, second].into_iter().enumerate() {
        let upper = total.div_euclid(UPPER);
        words[1 + part] = (total - UPPER * upper) & 0xFFFF | upper << 16;
        words[4 + part] = (scale * total as f32).to_bits().cast_signed();
    }
    words
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
fn paired(codes: &[i32; BLOCK]) -> [i32; PAIRS] {
    let mut pairs = [0; PAIRS];
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
fn quadrupled(codes: &[i32; BLOCK]) -> [i32; QUADS] {
    let mut quads = [0; QUADS];
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
