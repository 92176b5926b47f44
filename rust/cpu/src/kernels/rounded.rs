//! Rows rounded to integers of 16 bits by blocks of 32 inputs, for products with packed weights.

use crate::blocks::BLOCK;
use crate::isa::{Kernel, LANES, Simd, Vector};

/// The largest code. It is 127 * 256, so that a code is two signed bytes.
const LARGEST: f32 = 32_512.0;
/// Blocks whose numbers are all smaller than this are rounded to zero, so that factors stay finite.
const LEAST: f32 = f32::from_bits((127 - 100) << 23);
/// `x + SHIFT` has the integer nearest to x, ties to even, in its low bits where x is within 16 bits.
const SHIFT: f32 = 12_582_912.0;

/// Codes of a block's inputs in pairs, the first of each in the lower half: of inputs `4 r .. 4 r + 4` pair `2 r` has the
/// first and the third, pair `2 r + 1` the second and the fourth.
pub(crate) type Pairs = [i32; BLOCK / 2];

/// Rows of `blocks` blocks: number `code * scale`.
#[derive(Clone, Copy)]
pub(crate) struct Rounded<'a> {
    pub(crate) blocks: usize,
    /// `[rows, blocks]`
    pub(crate) pairs: &'a [Pairs],
    /// `[rows, blocks]`
    pub(crate) scales: &'a [f32],
    /// `[rows, blocks]` sums of the codes of each half of a block.
    pub(crate) sums: &'a [[i32; 2]],
}

/// Memory for rounded rows.
#[derive(Default)]
pub(crate) struct RoundedRoom {
    pairs: Vec<Pairs>,
    scales: Vec<f32>,
    sums: Vec<[i32; 2]>,
}

impl RoundedRoom {
    /// For `rows` rows of `inputs` inputs, or fewer.
    pub(crate) fn new(rows: usize, inputs: usize) -> Self {
        let blocks = rows * (inputs / BLOCK);
        Self { pairs: vec![[0; _]; blocks], scales: vec![0.0; blocks], sums: vec![[0; 2]; blocks] }
    }

    pub(crate) fn poison(&mut self) {
        self.scales.fill(f32::NAN);
    }
}

/// Rounds rows of `inputs` inputs, a multiple of 32, which lie one after the other in `x`.
///
/// The largest magnitude of a block becomes 32,512 by its scale `d`. A block with a number that is not finite gets a
/// scale of NaN.
pub(crate) struct Round<'a, 'r> {
    pub(crate) x: &'a [Vector],
    pub(crate) inputs: usize,
    pub(crate) room: &'r mut RoundedRoom,
}

impl<'r> Kernel for Round<'_, 'r> {
    type Output = Rounded<'r>;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Rounded<'r> {
        let numbers = self.x.as_flattened().as_chunks::<BLOCK>().0;
        let count = numbers.len();
        let RoundedRoom { pairs, scales, sums } = self.room;
        let (pairs, scales, sums) = (&mut pairs[..count], &mut scales[..count], &mut sums[..count]);
        for (((x, pairs), scale), sums) in numbers.iter().zip(&mut *pairs).zip(&mut *scales).zip(&mut *sums) {
            (*scale, *sums) = round(x, pairs);
        }
        Rounded { blocks: self.inputs / BLOCK, pairs, scales, sums }
    }
}

/// Rounds a block: its scale, and the sums of the codes of its halves.
#[inline(always)]
fn round(x: &[f32; BLOCK], pairs: &mut Pairs) -> (f32, [i32; 2]) {
    let top = x.iter().fold(0, |top, x| top.max(x.to_bits() & 0x7FFF_FFFF));
    let largest = f32::from_bits(top);
    if !largest.is_finite() {
        *pairs = [0; BLOCK / 2];
        return (f32::NAN, [0; 2]);
    }
    if largest < LEAST {
        *pairs = [0; BLOCK / 2];
        return (0.0, [0; 2]);
    }
    let factor = LARGEST / largest;
    let mut codes = [0; BLOCK];
    for (code, x) in codes.iter_mut().zip(x) {
        *code = (x * factor + SHIFT).to_bits().cast_signed() - SHIFT.to_bits().cast_signed();
    }
    for (pair, of) in pairs.as_chunks_mut::<2>().0.iter_mut().zip(codes.as_chunks::<4>().0) {
        *pair = [of[0] & 0xFFFF | of[2] << 16, of[1] & 0xFFFF | of[3] << 16];
    }
    let mut sums = [0; 2];
    for (sum, codes) in sums.iter_mut().zip(codes.as_chunks::<LANES>().0) {
        *sum = codes.iter().sum();
    }
    (largest / LARGEST, sums)
}
