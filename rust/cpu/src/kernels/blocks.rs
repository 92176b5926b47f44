//! Products of rounded rows with packed weights. Sums over a group are integers, so their order is free; groups are added
//! in one order with one fused multiply-add each, whatever the rows, the layout and the instruction set.

// Loops over registers, which unroll.
#![allow(clippy::needless_range_loop)]

use super::rounded::{Pairs, Planes, Rounded};
use crate::blocks::{BLOCK, Format, Minima, Packed, SUPER, Scales};
use crate::isa::{Isa, Kernel, LANES, Simd, TileShape, Tiling, Vector};
use crate::memory::{Bf16, LINE_BYTES, Line};
use crate::pass::MAX_TILE_ROWS;
use std::ops::Range;

#[cfg(test)]
mod tests;

/// Blocks that are expanded at once where rows are many.
const EXPANDED: usize = 2 * SUPER / BLOCK;
/// Blocks ahead of the one that is multiplied, whose codes are fetched from memory.
const AHEAD: usize = 8;
/// Pairs of a block.
const PAIRS: usize = BLOCK / 2;
/// Lines of a block's codes as bytes: of four inputs each.
const RUNS: usize = BLOCK / 4;

/// Repeats a body for each pair of the first or second half of a block, with a constant that is its index.
macro_rules! each_pair {
    (FIRST, $p:ident, $body:block) => { each_pair!($p, $body, 0 1 2 3 4 5 6 7) };
    (SECOND, $p:ident, $body:block) => { each_pair!($p, $body, 8 9 10 11 12 13 14 15) };
    ($p:ident, $body:block, $($index:literal)*) => { $({ const $p: usize = $index; $body })* };
}

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
    /// Pair `P` of a block's codes.
    fn pair<S: Simd, const P: usize>(&self, s: S, block: usize) -> S::I;
    /// The scales of a group.
    fn scale<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V;
    /// The minima of a group.
    fn min<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V;
}

/// A strip as it is packed.
trait Strip: Source {
    /// Calls `each` with the index of each run of a block and its codes as signed bytes, less the offset, ascending.
    fn runs<S: Simd>(&self, s: S, block: usize, each: impl FnMut(usize, S::I));
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
    /// Of each block 16 lines of pairs, or 8 of bytes.
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
    fn pair<S: Simd, const P: usize>(&self, s: S, block: usize) -> S::I {
        let lines: &[Line] = &self.codes[block * (LOW + HIGH)..][..LOW + HIGH];
        let (run, odd) = (P / 2, P % 2);
        let codes = s.load_int(&lines[run * LOW / 8].0);
        let at = (8 * odd + run * LOW % 8) as u32;
        if LOW == 8 {
            return s.sar16(if odd == 0 { s.shl16(codes, 8) } else { codes }, 8);
        }
        let low = if at == 0 { codes } else { s.shr16(codes, at) };
        let low = if LOW == 4 && at == 12 { low } else { s.and(low, s.splat_int(0x0001_0001 * ((1 << LOW) - 1))) };
        if HIGH == 0 {
            return low;
        }
        let high = s.load_int(&lines[LOW + run * HIGH / 8].0);
        let (from, to) = ((8 * odd + run * HIGH % 8) as u32, LOW as u32);
        let high = if from < to { s.shl16(high, to - from) } else { s.shr16(high, from - to) };
        s.or(low, s.and(high, s.splat_int(0x0001_0001 * (((1 << HIGH) - 1) << LOW))))
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

impl<const LOW: usize, const HIGH: usize, const HALVES: bool, const MINS: bool> Strip
    for Direct<'_, LOW, HIGH, HALVES, MINS>
{
    #[inline(always)]
    fn runs<S: Simd>(&self, s: S, block: usize, mut each: impl FnMut(usize, S::I)) {
        let lines: &[Line] = &self.codes[block * (LOW + HIGH)..][..LOW + HIGH];
        let offset = s.splat_int(self.format.offset * 0x0101_0101);
        let mut high = s.splat_int(0);
        for run in 0..RUNS {
            let of_line = 8 / LOW;
            let codes = s.load_int(&lines[run / of_line].0);
            let shift = run % of_line * LOW;
            let mut codes = if shift > 0 { s.shr16(codes, shift as u32) } else { codes };
            if LOW < 8 {
                codes = s.and(codes, s.splat_int(0x0101_0101 * ((1 << LOW) - 1)));
            }
            if HIGH > 0 {
                let of_line = 8 / HIGH.max(1);
                if run % of_line == 0 {
                    high = s.load_int(&lines[LOW + run / of_line].0);
                }
                let from = run % of_line * HIGH;
                let there =
                    if from < LOW { s.shl16(high, (LOW - from) as u32) } else { s.shr16(high, (from - LOW) as u32) };
                codes = s.or(codes, s.and(there, s.splat_int(0x0101_0101 * (((1 << HIGH) - 1) << LOW))));
            }
            each(run, if LOW < 8 { s.sub8(codes, offset) } else { codes });
        }
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
    fn pair<S: Simd, const P: usize>(&self, s: S, block: usize) -> S::I {
        let both = s.load_int(&self.0.codes[block * 4 + P / 4].0);
        let run = if P / 2 % 2 == 0 { both } else { s.shr16(both, 4) };
        let codes = s.lookup(self.1, s.and(run, s.splat_int(0x0F0F_0F0F)));
        s.sar16(if P % 2 == 0 { s.shl16(codes, 8) } else { codes }, 8)
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

impl Strip for Looked<'_> {
    #[inline(always)]
    fn runs<S: Simd>(&self, s: S, block: usize, mut each: impl FnMut(usize, S::I)) {
        self.0.runs(s, block, |run, codes| each(run, s.lookup(self.1, codes)));
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
    fn pair<S: Simd, const P: usize>(&self, s: S, block: usize) -> S::I {
        s.load_int(&self.of.codes[block][P].0)
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
        let mut room = [[0.0; LANES]; MAX_TILE_ROWS];
        // Groups of 16 inputs fill tiles too little.
        let planes = x.planes.filter(|_| !w.format().halves);
        let tiling = planes.map(|planes| planes.tiles.begin(TileShape::Bytes));
        let mut tile_room = TileRoom { expanded: Expanded::new(), dots: [[[Line([0; LINE_BYTES]); LANES]; 2]; 2] };
        for strip in start / LANES..end.div_ceil(LANES) {
            room[..rows.next_multiple_of(LANES)].fill([0.0; LANES]);
            let acc = &mut room[..rows];
            if let Some((planes, tiling)) = planes.zip(tiling.as_ref()) {
                by_tiles(isa, w, strip, (planes, tiling), &mut tile_room, &mut room);
            } else if rows <= isa.integer_rows() {
                with_source(isa, w, strip, Tiles { first: 0, count: x.blocks, x, acc });
            } else {
                many(isa, w, strip, x, acc);
            }
            let (first, last) = (start.max(strip * LANES), end.min((strip + 1) * LANES));
            for (acc, y) in room[..rows].iter().zip(y.chunks_mut(y_stride)) {
                let y = &mut y[first - start..last - start];
                match y.as_mut_array() {
                    Some(y) => *y = *acc,
                    None => y.copy_from_slice(&acc[first - strip * LANES..last - strip * LANES]),
                }
            }
        }
    }
}

/// A strip's outputs of more rows than are multiplied at once.
fn many(isa: Isa, w: &Packed, strip: usize, x: Rounded<'_>, acc: &mut [Vector]) {
    let (format, mut expanded) = (w.format(), Expanded::new());
    for first in (0..x.blocks).step_by(EXPANDED) {
        let count = (x.blocks - first).min(EXPANDED);
        with_source(isa, w, strip, Expand::<false> { first, count, out: &mut expanded });
        let (of, offset) = (&expanded, format.offset);
        let work = Tiles { first, count, x, acc: &mut *acc };
        match (format.halves, format.minima != Minima::None) {
            (false, false) => isa.run_integers(OfReady { source: Ready::<false, false> { of, offset }, work }),
            (false, true) => isa.run_integers(OfReady { source: Ready::<false, true> { of, offset }, work }),
            (true, false) => isa.run_integers(OfReady { source: Ready::<true, false> { of, offset }, work }),
            (true, true) => isa.run_integers(OfReady { source: Ready::<true, true> { of, offset }, work }),
        }
    }
}

/// A strip's outputs by tiles: `acc` `[rows]`, whose number is a multiple of sixteen or more than there are rows.
fn by_tiles(
    isa: Isa,
    w: &Packed,
    strip: usize,
    (planes, tiling): (Planes<'_>, &Tiling),
    room: &mut TileRoom,
    acc: &mut [Vector],
) {
    let TileRoom { expanded, dots } = room;
    let groups = planes.codes.len() / w.blocks();
    let acc = &mut acc.as_chunks_mut().0[..groups];
    for first in (0..w.blocks()).step_by(EXPANDED) {
        let count = (w.blocks() - first).min(EXPANDED);
        with_source(isa, w, strip, Expand::<true> { first, count, out: expanded });
        let (of, dots, acc) = (&*expanded, &mut *dots, &mut *acc);
        if w.format().minima == Minima::None {
            isa.run(ByTiles::<false> { tiling, of, planes, stride: w.blocks(), first, count, dots, acc });
        } else {
            isa.run(ByTiles::<true> { tiling, of, planes, stride: w.blocks(), first, count, dots, acc });
        }
    }
}

/// Memory for products by tiles.
struct TileRoom {
    expanded: Expanded,
    dots: Dots,
}

/// Sums of the products of two blocks with sixteen rows: by planes and rows.
type Dots = [[[Line; LANES]; 2]; 2];

/// Adds the products of rows with the expanded blocks `first .. first + count` to `acc`.
struct ByTiles<'a, const MINS: bool> {
    tiling: &'a Tiling,
    of: &'a Expanded,
    planes: Planes<'a>,
    /// Blocks of a row.
    stride: usize,
    first: usize,
    count: usize,
    dots: &'a mut Dots,
    acc: &'a mut [[Vector; LANES]],
}

impl<const MINS: bool> Kernel for ByTiles<'_, MINS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { tiling, of, planes: Planes { codes, scales, sums, .. }, stride, first, count, dots, acc: groups } =
            self;
        let last = groups.len() * count - 1;
        let at = |step: usize| step / count * stride + first + step % count;
        // Products of a block are made while those of the block before are scaled.
        let multiply = |step: usize, dots: &mut [[Line; LANES]; 2]| {
            let lines = of.codes[step % count].first_chunk().expect("8 lines of 16");
            tiling.multiply_bytes(&codes[at(step)], lines, dots);
        };
        multiply(0, &mut dots[0]);
        let mut step = 0;
        for group in groups {
            let mut acc = [s.splat(0.0); LANES];
            for r in 0..LANES {
                acc[r] = s.load(&group[r]);
            }
            for block in 0..count {
                if step < last {
                    multiply(step + 1, &mut dots[(step + 1) % 2]);
                }
                let [upper, lower] = &dots[step % 2];
                let (scale, factors) = (s.load(&of.scales[block][0]), &scales[at(step)]);
                for r in 0..LANES {
                    let (upper, lower) = (s.to_f32(s.load_int(&upper[r].0)), s.to_f32(s.load_int(&lower[r].0)));
                    // Both are exact, so the sum is rounded once, like an integer's conversion.
                    let dot = s.fma(upper, s.splat(256.0), lower);
                    acc[r] = s.fma(dot, s.mul(scale, s.splat(factors[r])), acc[r]);
                }
                if MINS {
                    let (min, sums) = (s.load(&of.mins[block][0]), &sums[at(step)]);
                    for r in 0..LANES {
                        acc[r] = s.fma(min, s.splat(sums[r]), acc[r]);
                    }
                }
                step += 1;
            }
            for r in 0..LANES {
                s.store(acc[r], &mut group[r]);
            }
        }
    }
}

/// What is done with the blocks of a strip.
trait Work {
    fn run<S: Simd, D: Strip>(self, s: S, source: &D);
}

/// Work on a source: a kernel for each pair of types, because one for all would take the compiler minutes.
struct With<D, W> {
    source: D,
    work: W,
}

impl<D: Strip, W: Work> Kernel for With<D, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.work.run(s, &self.source);
    }
}

/// Products of expanded blocks.
struct OfReady<'a, 'b, 'c, const HALVES: bool, const MINS: bool> {
    source: Ready<'c, HALVES, MINS>,
    work: Tiles<'a, 'b>,
}

impl<const HALVES: bool, const MINS: bool> Kernel for OfReady<'_, '_, '_, HALVES, MINS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Tiles { first, count, x, acc } = self.work;
        tiles(s, &self.source, first, count, x, acc);
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
    fn run<S: Simd, D: Strip>(self, s: S, source: &D) {
        tiles(s, source, self.first, self.count, self.x, self.acc);
    }
}

/// Expands blocks `first .. first + count` of a source, to bytes or to pairs.
struct Expand<'a, const BYTES: bool> {
    first: usize,
    count: usize,
    out: &'a mut Expanded,
}

impl<const BYTES: bool> Work for Expand<'_, BYTES> {
    #[inline(always)]
    fn run<S: Simd, D: Strip>(self, s: S, source: &D) {
        let Self { first, count, out } = self;
        for i in 0..count {
            let codes = &mut out.codes[i];
            if BYTES {
                source.runs(s, first + i, |run, bytes| s.store_int(bytes, &mut codes[run].0));
            } else {
                each_pair!(FIRST, P, { s.store_int(source.pair::<S, P>(s, first + i), &mut codes[P].0) });
                each_pair!(SECOND, P, { s.store_int(source.pair::<S, P>(s, first + i), &mut codes[P].0) });
            }
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

/// How many sums grow side by side for each of `rows` rows: 1, 2 or 4.
#[inline(always)]
fn parts<S: Simd>(rows: usize) -> usize {
    match S::INTEGER_SUMS.div_ceil(rows) {
        0..=1 => 1,
        2 => 2,
        _ => 4,
    }
}

/// Adds a group's integer sums, whose parts are `dots`, to the sums of R rows.
#[inline(always)]
fn add_group<S: Simd, D: Source, const R: usize>(
    s: S,
    acc: &mut [S::V; R],
    dots: &[[S::I; 4]; R],
    (scale, min): (S::V, S::V),
    d: &[f32; R],
    totals: &[i32; R],
) {
    for r in 0..R {
        let [first, second, third, fourth] = dots[r];
        let dot = match parts::<S>(R) {
            1 => first,
            2 => s.add_int(first, second),
            _ => s.add_int(s.add_int(first, second), s.add_int(third, fourth)),
        };
        acc[r] = s.fma(s.to_f32(dot), s.mul(scale, s.splat(d[r])), acc[r]);
    }
    if D::MINS {
        for r in 0..R {
            acc[r] = s.fma(min, s.splat(d[r] * totals[r] as f32), acc[r]);
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
    let parts = parts::<S>(R);
    let start = |totals: &[i32; R]| {
        let mut dots = [[s.splat_int(0); 4]; R];
        for r in 0..R {
            dots[r][0] = s.splat_int(-source.offset() * totals[r]);
        }
        dots
    };
    for block in 0..count {
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
        let (mut d, mut totals) = ([0.0; R], [[0; R]; 2]);
        for r in 0..R {
            let [first, second] = sums[r][block];
            d[r] = scales[r][block];
            (totals[0][r], totals[1][r]) = if D::HALVES { (first, second) } else { (first + second, 0) };
        }
        let mut dots = start(&totals[0]);
        each_pair!(FIRST, P, {
            let codes = source.pair::<S, P>(s, block);
            for r in 0..R {
                dots[r][P % parts] = s.dot16(dots[r][P % parts], codes, s.splat_int(pairs[r][block][P]));
            }
        });
        if D::HALVES {
            add_group::<S, D, R>(s, &mut acc, &dots, (scale[0], min[0]), &d, &totals[0]);
            dots = start(&totals[1]);
        }
        each_pair!(SECOND, P, {
            let codes = source.pair::<S, P>(s, block);
            for r in 0..R {
                dots[r][P % parts] = s.dot16(dots[r][P % parts], codes, s.splat_int(pairs[r][block][P]));
            }
        });
        let last = groups - 1;
        add_group::<S, D, R>(s, &mut acc, &dots, (scale[last], min[last]), &d, &totals[last]);
    }
    for r in 0..R {
        s.store(acc[r], &mut out[r]);
    }
}
