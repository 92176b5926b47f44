//! Products of rounded rows with packed weights. Sums over a group are integers, so their order is free; groups are added
//! in one order with one fused multiply-add each, whatever the rows, the layout and the instruction set.

// Loops over registers, which unroll.
#![allow(clippy::needless_range_loop)]

use super::rounded::{Pairs, Rounded};
use crate::blocks::{BLOCK, Format, Minima, Packed, SUPER, Scales};
use crate::isa::{Isa, Kernel, LANES, Simd, Vector};
use crate::memory::{Bf16, LINE_BYTES, Line};
use crate::pass::MAX_TILE_ROWS;
use std::ops::Range;

#[cfg(test)]
mod tests;

/// Blocks that are expanded at once where rows are many.
const EXPANDED: usize = SUPER / BLOCK;
/// Blocks ahead of the one that is multiplied, whose codes are fetched from memory.
const AHEAD: usize = 8;
/// Pairs of a block.
const PAIRS: usize = BLOCK / 2;

/// `y[row, o - outputs.start] = sum over i of w[o, i] x[row, i]`
pub(crate) struct BlockProduct<'a> {
    pub(crate) w: &'a Packed,
    pub(crate) outputs: Range<usize>,
    pub(crate) x: Rounded<'a>,
    pub(crate) rows: usize,
    /// `[rows, y_stride]`
    pub(crate) y: &'a mut [f32],
    pub(crate) y_stride: usize,
}

/// Where a kernel finds the blocks of a strip.
trait Source {
    /// Whether a group has 16 inputs, else 32.
    const HALVES: bool;
    /// Whether groups have minima.
    const MINS: bool;
    /// What is taken from every code.
    fn offset(&self) -> i32;
    /// Starts to load the codes of a block, which may lie past the end.
    fn prefetch<S: Simd>(&self, s: S, block: usize);
    /// Calls `each` with the index of each pair of a block and its codes, ascending.
    fn pairs<S: Simd>(&self, s: S, block: usize, each: impl FnMut(usize, S::I));
    /// The scales of a group.
    fn scale<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V;
    /// The minima of a group.
    fn min<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V;
}

/// A strip as it is packed, with codes of `LOW` bits and `HIGH` ones.
struct Direct<'a, const LOW: usize, const HIGH: usize, const HALVES: bool, const MINS: bool> {
    format: Format,
    codes: &'a [Line],
    halves: &'a [u16],
    subs: &'a [i8],
}

/// Blocks whose codes and scales have been expanded.
struct Expanded {
    codes: [[Line; PAIRS]; EXPANDED],
    /// `[blocks, groups]`
    scales: [[Vector; 2]; EXPANDED],
    mins: [[Vector; 2]; EXPANDED],
}

impl Expanded {
    fn new() -> Self {
        Self {
            codes: [[Line([0; LINE_BYTES]); PAIRS]; EXPANDED],
            scales: [[[0.0; LANES]; 2]; EXPANDED],
            mins: [[[0.0; LANES]; 2]; EXPANDED],
        }
    }
}

/// Expanded blocks with the numbers of a type.
struct Ready<'a, const HALVES: bool, const MINS: bool> {
    of: &'a Expanded,
    offset: i32,
}

impl<const LOW: usize, const HIGH: usize, const HALVES: bool, const MINS: bool> Direct<'_, LOW, HIGH, HALVES, MINS> {
    /// Sixteen scales of a group, or sixteen stored minima with `of` 1.
    #[inline(always)]
    fn number<S: Simd>(&self, s: S, block: usize, group: usize, of: usize) -> S::V {
        let slot = block >> self.format.shift;
        let stored = if MINS && self.format.minima == Minima::Stored { 2 } else { 1 };
        let halves = self.halves.as_chunks::<LANES>().0;
        let half = |i: usize| &halves[slot * stored + i];
        match self.format.scales {
            Scales::F16 => s.load_f16(half(of)),
            Scales::Bf16 => s.load_bf16(Bf16::of_bits(half(of))),
            Scales::F32 => {
                let (upper, lower) = (&halves[2 * slot], &halves[2 * slot + 1]);
                s.load(&std::array::from_fn(|i| f32::from_bits(u32::from(upper[i]) << 16 | u32::from(lower[i]))))
            }
            Scales::Sub => {
                let groups = if HALVES { 2 } else { 1 };
                s.mul(s.load_f16(half(of)), s.load_i8(self.sub((block * stored + of) * groups + group)))
            }
        }
    }

    /// Sixteen integers of 8 bits.
    #[inline(always)]
    fn sub(&self, i: usize) -> &[i8; LANES] {
        &self.subs.as_chunks::<LANES>().0[i]
    }
}

impl<const LOW: usize, const HIGH: usize, const HALVES: bool, const MINS: bool> Source
    for Direct<'_, LOW, HIGH, HALVES, MINS>
{
    const HALVES: bool = HALVES;
    const MINS: bool = MINS;

    #[inline(always)]
    fn offset(&self) -> i32 {
        self.format.offset
    }

    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, block: usize) {
        for line in 0..LOW + HIGH {
            s.prefetch(self.codes.as_ptr().wrapping_add(block * (LOW + HIGH) + line));
        }
    }

    #[inline(always)]
    fn pairs<S: Simd>(&self, s: S, block: usize, mut each: impl FnMut(usize, S::I)) {
        let lines: &[Line] = &self.codes[block * (LOW + HIGH)..][..LOW + HIGH];
        // One load serves eight runs of one bit.
        let mut high = s.splat_int(0);
        for line in 0..LOW {
            let codes = s.load_int(&lines[line].0);
            // The bits of `codes` from `at` on, as 16-bit numbers.
            let runs = 8 / LOW;
            let mask = s.splat_int(if LOW == 8 { -1 } else { 0x0001_0001 * ((1 << LOW) - 1) });
            for i in 0..runs {
                let run = line * runs + i;
                if HIGH > 0 && run.is_multiple_of(8 / HIGH.max(1)) {
                    high = s.load_int(&lines[LOW + run * HIGH / 8].0);
                }
                for odd in 0..2 {
                    let at = (8 * odd + i * LOW) as u32;
                    let mut pair = if LOW == 8 {
                        s.sar16(if odd == 0 { s.shl16(codes, 8) } else { codes }, 8)
                    } else if LOW == 4 && at == 12 {
                        s.shr16(codes, at)
                    } else {
                        s.and(if at == 0 { codes } else { s.shr16(codes, at) }, mask)
                    };
                    if HIGH > 0 {
                        let from = (8 * odd + run % (8 / HIGH.max(1)) * HIGH) as u32;
                        let to = LOW as u32;
                        let there = if from < to { s.shl16(high, to - from) } else { s.shr16(high, from - to) };
                        pair = s.or(pair, s.and(there, s.splat_int(0x0001_0001 * (((1 << HIGH) - 1) << LOW))));
                    }
                    each(2 * run + odd, pair);
                }
            }
        }
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V {
        self.number(s, block, group, 0)
    }

    #[inline(always)]
    fn min<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V {
        if self.format.minima == Minima::Zeros {
            let zeros = s.load_i8(self.sub(block >> self.format.shift));
            return s.mul(self.scale(s, block, group), zeros);
        }
        self.number(s, block, group, 1)
    }
}

/// A strip of 4-bit codes that stand for the numbers of a table.
struct Looked<'a>(Direct<'a, 4, 0, false, false>, &'static [i8; 16]);

impl Source for Looked<'_> {
    const HALVES: bool = false;
    const MINS: bool = false;

    #[inline(always)]
    fn offset(&self) -> i32 {
        0
    }

    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, block: usize) {
        self.0.prefetch(s, block);
    }

    #[inline(always)]
    fn pairs<S: Simd>(&self, s: S, block: usize, mut each: impl FnMut(usize, S::I)) {
        let low = s.splat_int(0x0F0F_0F0F);
        for line in 0..4 {
            let both = s.load_int(&self.0.codes[block * 4 + line].0);
            for i in 0..2 {
                let codes = s.lookup(self.1, s.and(if i == 0 { both } else { s.shr16(both, 4) }, low));
                each(4 * line + 2 * i, s.sar16(s.shl16(codes, 8), 8));
                each(4 * line + 2 * i + 1, s.sar16(codes, 8));
            }
        }
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V {
        self.0.scale(s, block, group)
    }

    #[inline(always)]
    fn min<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V {
        self.0.min(s, block, group)
    }
}

impl<const HALVES: bool, const MINS: bool> Source for Ready<'_, HALVES, MINS> {
    const HALVES: bool = HALVES;
    const MINS: bool = MINS;

    #[inline(always)]
    fn offset(&self) -> i32 {
        self.offset
    }

    #[inline(always)]
    fn prefetch<S: Simd>(&self, _: S, _: usize) {}

    #[inline(always)]
    fn pairs<S: Simd>(&self, s: S, block: usize, mut each: impl FnMut(usize, S::I)) {
        for (p, line) in self.of.codes[block].iter().enumerate() {
            each(p, s.load_int(&line.0));
        }
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V {
        s.load(&self.of.scales[block][group])
    }

    #[inline(always)]
    fn min<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V {
        s.load(&self.of.mins[block][group])
    }
}

impl BlockProduct<'_> {
    /// Computes the strips one by one: few rows read them as they are packed, many from blocks that are expanded once.
    pub(crate) fn run(self, isa: Isa) {
        let Self { w, outputs: Range { start, end }, x, rows, y, y_stride } = self;
        let mut acc = [[0.0; LANES]; MAX_TILE_ROWS];
        let acc = &mut acc[..rows];
        for strip in start / LANES..end.div_ceil(LANES) {
            acc.fill([0.0; LANES]);
            if rows <= isa.integer_rows() {
                with_source(isa, w, strip, Tiles { first: 0, count: x.blocks, x, acc });
            } else {
                many(isa, w, strip, x, acc);
            }
            let (first, last) = (start.max(strip * LANES), end.min((strip + 1) * LANES));
            let lanes = first - strip * LANES..last - strip * LANES;
            for (acc, y) in acc.iter().zip(y.chunks_mut(y_stride)) {
                y[first - start..last - start].copy_from_slice(&acc[lanes.clone()]);
            }
        }
    }
}

/// A strip's outputs of more rows than are multiplied at once.
fn many(isa: Isa, w: &Packed, strip: usize, x: Rounded<'_>, acc: &mut [Vector]) {
    let (format, mut expanded) = (w.format(), Expanded::new());
    for first in (0..x.blocks).step_by(EXPANDED) {
        let count = (x.blocks - first).min(EXPANDED);
        with_source(isa, w, strip, Expand { first, count, out: &mut expanded });
        let (of, offset) = (&expanded, format.offset);
        let work = Tiles { first, count, x, acc: &mut *acc };
        match (format.halves, format.minima != Minima::None) {
            (false, false) => isa.run_integers(With { source: Ready::<false, false> { of, offset }, work }),
            (false, true) => isa.run_integers(With { source: Ready::<false, true> { of, offset }, work }),
            (true, false) => isa.run_integers(With { source: Ready::<true, false> { of, offset }, work }),
            (true, true) => isa.run_integers(With { source: Ready::<true, true> { of, offset }, work }),
        }
    }
}

/// What is done with the blocks of a strip.
trait Work {
    fn run<S: Simd, D: Source>(self, s: S, source: &D);
}

/// Work on a source: a kernel for each pair of types, because one for all would take the compiler minutes.
struct With<D, W> {
    source: D,
    work: W,
}

impl<D: Source, W: Work> Kernel for With<D, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.work.run(s, &self.source);
    }
}

/// Does work on a strip as it is packed.
fn with_source(isa: Isa, w: &Packed, strip: usize, work: impl Work) {
    let format = w.format();
    match (format.low, format.high, format.halves, format.minima != Minima::None, format.table) {
        (4, 0, false, false, None) => isa.run_integers(With { source: direct::<4, 0, false, false>(w, strip), work }),
        (4, 0, false, true, None) => isa.run_integers(With { source: direct::<4, 0, false, true>(w, strip), work }),
        (4, 1, false, false, None) => isa.run_integers(With { source: direct::<4, 1, false, false>(w, strip), work }),
        (4, 1, false, true, None) => isa.run_integers(With { source: direct::<4, 1, false, true>(w, strip), work }),
        (4, 2, true, false, None) => isa.run_integers(With { source: direct::<4, 2, true, false>(w, strip), work }),
        (2, 0, true, true, None) => isa.run_integers(With { source: direct::<2, 0, true, true>(w, strip), work }),
        (2, 1, true, false, None) => isa.run_integers(With { source: direct::<2, 1, true, false>(w, strip), work }),
        (8, 0, false, false, None) => isa.run_integers(With { source: direct::<8, 0, false, false>(w, strip), work }),
        (4, 0, false, false, Some(table)) => {
            isa.run_integers(With { source: Looked(direct(w, strip), table), work });
        }
        _ => unreachable!("no type has this format"),
    }
}

/// The strip as it is packed.
fn direct<const LOW: usize, const HIGH: usize, const HALVES: bool, const MINS: bool>(
    w: &Packed,
    strip: usize,
) -> Direct<'_, LOW, HIGH, HALVES, MINS> {
    let (halves, subs) = w.scales(strip);
    Direct { format: w.format(), codes: w.codes(strip), halves, subs }
}

/// Adds the products of blocks `first .. first + count` of rows, which are blocks `0 .. count` of the source, to `acc`
/// `[rows]`.
struct Tiles<'a, 'b> {
    first: usize,
    count: usize,
    x: Rounded<'a>,
    acc: &'b mut [Vector],
}

impl Work for Tiles<'_, '_> {
    #[inline(always)]
    fn run<S: Simd, D: Source>(self, s: S, source: &D) {
        tiles(s, source, self.first, self.count, self.x, self.acc);
    }
}

/// Expands blocks `first .. first + count` of a source.
struct Expand<'a> {
    first: usize,
    count: usize,
    out: &'a mut Expanded,
}

impl Work for Expand<'_> {
    #[inline(always)]
    fn run<S: Simd, D: Source>(self, s: S, source: &D) {
        let Self { first, count, out } = self;
        for i in 0..count {
            let codes = &mut out.codes[i];
            source.pairs(s, first + i, |p, pair| s.store_int(pair, &mut codes[p].0));
            for group in 0..if D::HALVES { 2 } else { 1 } {
                s.store(source.scale(s, first + i, group), &mut out.scales[i][group]);
                if D::MINS {
                    s.store(source.min(s, first + i, group), &mut out.mins[i][group]);
                }
            }
        }
    }
}

/// Adds `count` blocks of the source, which are those of the rows from `first` on.
#[inline(always)]
fn tiles<S: Simd, D: Source>(s: S, source: &D, first: usize, count: usize, x: Rounded<'_>, acc: &mut [Vector]) {
    let rows = acc.len();
    let tiles = rows.div_ceil(S::INTEGER_ROWS);
    for i in 0..tiles {
        let (row, end) = (i * rows / tiles, (i + 1) * rows / tiles);
        let acc = &mut acc[row..end];
        // Arms of more rows than an instruction set takes at once are not compiled for it.
        match end - row {
            6 if S::INTEGER_ROWS >= 6 => tile::<S, D, 6>(s, source, first, count, x, row, acc),
            5 if S::INTEGER_ROWS >= 5 => tile::<S, D, 5>(s, source, first, count, x, row, acc),
            4 if S::INTEGER_ROWS >= 4 => tile::<S, D, 4>(s, source, first, count, x, row, acc),
            3 if S::INTEGER_ROWS >= 3 => tile::<S, D, 3>(s, source, first, count, x, row, acc),
            2 if S::INTEGER_ROWS >= 2 => tile::<S, D, 2>(s, source, first, count, x, row, acc),
            _ => tile::<S, D, 1>(s, source, first, count, x, row, acc),
        }
    }
}

/// One tile of R rows.
#[inline(always)]
fn tile<S: Simd, D: Source, const R: usize>(
    s: S,
    source: &D,
    first: usize,
    count: usize,
    x: Rounded<'_>,
    row: usize,
    out: &mut [Vector],
) {
    let mut pairs: [&[Pairs]; R] = [&[]; R];
    let mut scales: [&[f32]; R] = [&[]; R];
    let mut sums: [&[[i32; 2]]; R] = [&[]; R];
    let mut acc = [s.splat(0.0); R];
    for r in 0..R {
        let from = (row + r) * x.blocks + first;
        pairs[r] = &x.pairs[from..][..count];
        scales[r] = &x.scales[from..][..count];
        sums[r] = &x.sums[from..][..count];
        acc[r] = s.load(&out[r]);
    }
    let groups = if D::HALVES { 2 } else { 1 };
    let offset = source.offset();
    for block in 0..count {
        let sum = |r: usize, group: usize| {
            let [first, second] = sums[r][block];
            if D::HALVES { [first, second][group] } else { first + second }
        };
        // First of all, because the type of scales is a branch: loads of codes that wait for it would fill all registers.
        let (mut scale, mut min) = ([s.splat(0.0); 2], [s.splat(0.0); 2]);
        for group in 0..groups {
            scale[group] = source.scale(s, block, group);
            if D::MINS {
                min[group] = source.min(s, block, group);
            }
        }
        if row == 0 {
            source.prefetch(s, block + AHEAD);
        }
        let mut dots = [[s.splat_int(0); 2]; R];
        for r in 0..R {
            for group in 0..groups {
                dots[r][group] = s.splat_int(-offset * sum(r, group));
            }
        }
        source.pairs(s, block, |p, codes| {
            let group = if D::HALVES { p / (PAIRS / 2) } else { 0 };
            for r in 0..R {
                dots[r][group] = s.dot16(dots[r][group], codes, s.splat_int(pairs[r][block][p]));
            }
        });
        for group in 0..groups {
            for r in 0..R {
                let d = s.splat(scales[r][block]);
                acc[r] = s.fma(s.to_f32(dots[r][group]), s.mul(scale[group], d), acc[r]);
            }
            if D::MINS {
                for r in 0..R {
                    acc[r] = s.fma(min[group], s.splat(scales[r][block] * sum(r, group) as f32), acc[r]);
                }
            }
        }
    }
    for r in 0..R {
        s.store(acc[r], &mut out[r]);
    }
}
