//! Products of rounded rows with packed weights by vectors of integers.

use super::source::{Source, Strip, Work};
use super::{PAIRS, Rows};
use crate::blocks::Packed;
use crate::isa::{Kernel, LANES, Simd, Vector};
use crate::kernels::rounded::{Pairs, Quads, Rounded};
use crate::pass::MAX_TILE_ROWS;
use std::ops::Range;

/// Number of blocks ahead of the multiplied one whose codes are prefetched.
const AHEAD: usize = 8;

/// Adds the products of blocks `first .. first + count` of rows, which are blocks `0 .. count` of the source, to `acc`
/// `[rows]`.
pub(super) struct ByVectors<'a, 'b> {
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) x: Rounded<'a>,
    /// Whether four bytes are multiplied at once; otherwise two 16-bit numbers.
    pub(super) bytes: bool,
    pub(super) acc: &'b mut [Vector],
}

/// Kernel for products of few rows with the outputs `outputs`, strip by strip in their packed layout.
pub(super) struct FewRows<'a> {
    pub(super) outputs: Range<usize>,
    pub(super) x: Rounded<'a>,
    pub(super) bytes: bool,
    pub(super) rows: usize,
    pub(super) y: Rows<'a>,
}

impl Work for FewRows<'_> {
    #[inline(always)]
    fn run<'a, S: Simd, D: Strip<'a>>(self, s: S, w: &'a Packed) {
        let Self { outputs, x, bytes, rows, mut y } = self;
        let mut acc = [[0.0; LANES]; MAX_TILE_ROWS];
        for strip in outputs.start / LANES..outputs.end.div_ceil(LANES) {
            let acc = &mut acc[..rows];
            acc.fill([0.0; LANES]);
            ByVectors { first: 0, count: x.blocks, x, bytes, acc }.multiply(s, &D::of(w, strip));
            y.put(acc, strip, &outputs);
        }
    }
}

/// Kernel for products with a source that is no packed strip.
pub(super) struct Of<'a, 'b, D> {
    pub(super) source: D,
    pub(super) work: ByVectors<'a, 'b>,
}

impl<D: Source> Kernel for Of<'_, '_, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.work.multiply(s, &self.source);
    }
}

impl ByVectors<'_, '_> {
    #[inline(always)]
    fn multiply<S: Simd, D: Source>(self, s: S, source: &D) {
        if S::LARGEST_BYTE > 0 && self.bytes {
            self.tiles::<S, D, true>(s, source);
        } else {
            self.tiles::<S, D, false>(s, source);
        }
    }

    /// Divides the rows into tiles.
    #[inline(always)]
    fn tiles<S: Simd, D: Source, const BYTES: bool>(self, s: S, source: &D) {
        let Self { first, count, x, acc, .. } = self;
        let rows = acc.len();
        let tiles = rows.div_ceil(S::INTEGER_ROWS);
        for i in 0..tiles {
            let (row, end) = (i * rows / tiles, (i + 1) * rows / tiles);
            let (acc, at) = (&mut acc[row..end], (first, count, row));
            // Arms of more rows than an instruction set takes at once are not compiled for it. Not every number has an
            // arm: code for each would double the time of a build.
            match end - row {
                9.. if S::INTEGER_ROWS >= 12 => tile::<S, D, BYTES, 12>(s, source, x, at, acc),
                7.. if S::INTEGER_ROWS >= 8 => tile::<S, D, BYTES, 8>(s, source, x, at, acc),
                5.. if S::INTEGER_ROWS >= 6 => tile::<S, D, BYTES, 6>(s, source, x, at, acc),
                4 if S::INTEGER_ROWS >= 4 => tile::<S, D, BYTES, 4>(s, source, x, at, acc),
                3 if S::INTEGER_ROWS >= 3 => tile::<S, D, BYTES, 3>(s, source, x, at, acc),
                2 if S::INTEGER_ROWS >= 2 => tile::<S, D, BYTES, 2>(s, source, x, at, acc),
                _ => tile::<S, D, BYTES, 1>(s, source, x, at, acc),
            }
        }
    }
}

/// Adds the products of half of a block to the integer sums `$dots` of R rows.
macro_rules! add_half {
    ($half:literal, $bytes:ident, $s:ident, $source:ident, $block:ident, $dots:ident, $parts:ident, $pairs:ident, $quads:ident) => {
        if $bytes {
            each_run!(P, {
                let codes = $source.step::<S, BYTES, $half, P>($s, $block);
                for r in 0..R {
                    let x = $s.splat_int($quads[r][$block][$half * 4 + P]);
                    $dots[r][P % $parts] = $s.dot8($dots[r][P % $parts], codes, x);
                }
            });
        } else {
            each_pair!(P, {
                let codes = $source.step::<S, BYTES, $half, P>($s, $block);
                for r in 0..R {
                    let x = $s.splat_int($pairs[r][$block][$half * (PAIRS / 2) + P]);
                    $dots[r][P % $parts] = $s.dot16($dots[r][P % $parts], codes, x);
                }
            });
        }
    };
}

/// Returns the number of sums accumulated side by side for each of `rows` rows: 1, 2 or 4.
#[inline(always)]
fn parts<S: Simd>(rows: usize) -> usize {
    match S::INTEGER_SUMS.div_ceil(rows) {
        0..=1 => 1,
        2 => 2,
        _ => 4,
    }
}

/// Returns the initial integer sums of R rows: the offset times the rows' sums, negated.
#[inline(always)]
fn start<S: Simd, const R: usize>(s: S, offset: i32, totals: &[i32; R]) -> [[S::I; 4]; R] {
    let mut dots = [[s.splat_int(0); 4]; R];
    for r in 0..R {
        dots[r][0] = s.splat_int(-offset * totals[r]);
    }
    dots
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

/// Computes one tile of at most R rows from `row` on: adds `count` blocks of the source, which are the rows' blocks from
/// `first` on. If `out` has fewer than R rows, its last row is computed more than once.
#[inline(always)]
fn tile<S: Simd, D: Source, const BYTES: bool, const R: usize>(
    s: S,
    source: &D,
    x: Rounded<'_>,
    (first, count, row): (usize, usize, usize),
    out: &mut [Vector],
) {
    let mut pairs: [&[Pairs]; R] = [&[]; R];
    let mut quads: [&[Quads]; R] = [&[]; R];
    let mut scales: [&[f32]; R] = [&[]; R];
    let mut sums: [&[[i32; 2]]; R] = [&[]; R];
    let mut acc = [s.splat(0.0); R];
    let last = out.len() - 1;
    for r in 0..R {
        let from = (row + r.min(last)) * x.blocks + first;
        if BYTES {
            quads[r] = &x.quads[from..][..count];
        } else {
            pairs[r] = &x.pairs[from..][..count];
        }
        scales[r] = &x.scales[from..][..count];
        sums[r] = &x.sums[from..][..count];
        acc[r] = s.load(&out[r.min(last)]);
    }
    let groups = if D::HALVES { 2 } else { 1 };
    let parts = parts::<S>(R);
    let offset = source.offset::<BYTES>();
    for block in 0..count {
        // First of all, because the type of scales is a branch: loads of codes that wait for it would fill all
        // registers.
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
        let mut dots = start(s, offset, &totals[0]);
        add_half!(0, BYTES, s, source, block, dots, parts, pairs, quads);
        if D::HALVES {
            add_group::<S, D, R>(s, &mut acc, &dots, (scale[0], min[0]), &d, &totals[0]);
            dots = start(s, offset, &totals[1]);
        }
        add_half!(1, BYTES, s, source, block, dots, parts, pairs, quads);
        let group = groups - 1;
        add_group::<S, D, R>(s, &mut acc, &dots, (scale[group], min[group]), &d, &totals[group]);
    }
    for (r, out) in out.iter_mut().enumerate() {
        s.store(acc[r], out);
    }
}
