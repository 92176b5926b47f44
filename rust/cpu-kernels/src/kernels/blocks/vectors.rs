//! Products of rounded rows with packed weights by vectors of integers.

use super::Rows;
use super::source::{Source, Strip, Work};
use crate::blocks::Packed;
use crate::isa::{Isa, Kernel, LANES, Simd, Vector};
use crate::kernels::rounded::{Numbers, PAIRS, QUADS, Rounded, UPPER, WIDTHS, Words, width};
use std::marker::PhantomData;
use std::ops::Range;

/// Work that is compiled for several numbers of rows, each in a function of its own: one function for all of them takes
/// the compiler much longer.
trait ByRows {
    /// Does the work for at most R rows. With `BYTES` four bytes are multiplied at once, otherwise two 16-bit numbers.
    /// Implementations are `#[inline(always)]`, as those of [`Kernel::run`] are.
    fn run<S: Simd, const BYTES: bool, const R: usize>(self, s: S);
}

/// Kernel that does `W` for at most R rows.
struct ForRows<W, const BYTES: bool, const R: usize>(W);

impl<W: ByRows, const BYTES: bool, const R: usize> Kernel for ForRows<W, BYTES, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if const { !takes::<S, BYTES, R>() } {
            unreachable!("{R} rows at once");
        }
        self.0.run::<S, BYTES, R>(s);
    }
}

/// Does work for at most R rows.
fn for_rows<const R: usize>(isa: Isa, bytes: bool, work: impl ByRows) {
    if bytes {
        isa.run_integers(ForRows::<_, true, R>(work));
    } else {
        isa.run_integers(ForRows::<_, false, R>(work));
    }
}

/// Does work for `rows` rows, at most as many as the instruction set takes at once.
fn by_rows(isa: Isa, bytes: bool, rows: usize, work: impl ByRows) {
    match width(rows) {
        12 => for_rows::<12>(isa, bytes, work),
        8 => for_rows::<8>(isa, bytes, work),
        6 => for_rows::<6>(isa, bytes, work),
        4 => for_rows::<4>(isa, bytes, work),
        3 => for_rows::<3>(isa, bytes, work),
        2 => for_rows::<2>(isa, bytes, work),
        _ => for_rows::<1>(isa, bytes, work),
    }
}

/// Returns whether an instruction set takes R rows at once, and with `BYTES` multiplies bytes. Kernels are empty for
/// combinations that it does not take.
const fn takes<S: Simd, const BYTES: bool, const R: usize>() -> bool {
    let mut known = false;
    let mut i = 0;
    while i < WIDTHS.len() {
        known |= S::INTEGER_ROWS == WIDTHS[i];
        i += 1;
    }
    assert!(known, "INTEGER_ROWS is one of WIDTHS");
    R <= S::INTEGER_ROWS && (!BYTES || S::LARGEST_BYTE > 0)
}

/// Products of few rows with the outputs `outputs`, strip by strip in their packed layout.
pub(super) struct FewRows<'a> {
    pub(super) outputs: Range<usize>,
    pub(super) x: Rounded<'a>,
    /// Whether four bytes are multiplied at once; otherwise two 16-bit numbers.
    pub(super) bytes: bool,
    pub(super) y: Rows<'a>,
}

impl Work for FewRows<'_> {
    fn run<'a, D: Strip<'a>>(self, isa: Isa, w: &'a Packed) {
        by_rows(isa, self.bytes, self.x.rows, FewRowsOf { work: self, w, strips: PhantomData::<D> });
    }
}

/// Products of few rows with strips of one format.
struct FewRowsOf<'a, 'b, D> {
    work: FewRows<'b>,
    w: &'a Packed,
    strips: PhantomData<D>,
}

impl<'a, D: Strip<'a>> ByRows for FewRowsOf<'a, '_, D> {
    #[inline(always)]
    fn run<S: Simd, const BYTES: bool, const R: usize>(self, s: S) {
        let Self { work: FewRows { outputs, x, mut y, .. }, w, .. } = self;
        for strip in outputs.start / LANES..outputs.end.div_ceil(LANES) {
            let mut acc = [[0.0; LANES]; R];
            tile::<S, D, BYTES, R>(s, &D::of(w, strip), x, (0, x.blocks, 0), &mut acc[..x.rows]);
            y.put(&acc[..x.rows], strip, &outputs);
        }
    }
}

/// Products of blocks `first .. first + count` of rows, which are blocks `0 .. count` of a source that is no packed
/// strip. They are added to `acc` `[rows]`.
pub(super) struct ByVectors<'a, 'b> {
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) x: Rounded<'a>,
    /// Whether four bytes are multiplied at once; otherwise two 16-bit numbers.
    pub(super) bytes: bool,
    pub(super) acc: &'b mut [Vector],
}

impl ByVectors<'_, '_> {
    /// Computes the products, panel by panel.
    pub(super) fn run(self, isa: Isa, source: &impl Source) {
        let Self { first, count, x, bytes, acc } = self;
        for panel in x.panels() {
            let (at, acc) = ((first, count, panel.start), &mut acc[panel.clone()]);
            by_rows(isa, bytes, panel.len(), OneTile { source, x, at, acc });
        }
    }
}

/// Panel of rows, from row `at.2` on: the products with `at.1` blocks, which are the rows' blocks from `at.0` on.
struct OneTile<'a, 'b, D> {
    source: &'b D,
    x: Rounded<'a>,
    at: (usize, usize, usize),
    acc: &'b mut [Vector],
}

impl<D: Source> ByRows for OneTile<'_, '_, D> {
    #[inline(always)]
    fn run<S: Simd, const BYTES: bool, const R: usize>(self, s: S) {
        tile::<S, D, BYTES, R>(s, self.source, self.x, self.at, self.acc);
    }
}

/// Adds the products of half of a block to the integer sums `$dots` of R rows.
macro_rules! add_half {
    ($half:literal, $bytes:ident, $s:ident, $source:ident, $block:ident, $dots:ident, $parts:ident, $pairs:ident, $quads:ident) => {
        if $bytes {
            each_run!(P, {
                let codes = $source.step::<S, BYTES, $half, P>($s, $block);
                $s.dots8(&mut $dots, P % $parts, codes, &$quads[$block][$half * (QUADS / 2) + P]);
            });
        } else {
            each_pair!(P, {
                let codes = $source.step::<S, BYTES, $half, P>($s, $block);
                $s.dots16(&mut $dots, P % $parts, codes, &$pairs[$block][$half * (PAIRS / 2) + P]);
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

/// Returns the initial integer sums of R rows: the offset times the rows' totals, negated.
#[inline(always)]
fn start<S: Simd, const R: usize>(s: S, offset: S::I, totals: &[i32; R]) -> [[S::I; 4]; R] {
    let mut dots = [[s.splat_int(0); 4]; R];
    s.dots16(&mut dots, 0, offset, totals);
    dots
}

/// Returns the pair that, multiplied by the pair of a total, gives the total times the offset, negated.
#[inline(always)]
fn negated<S: Simd>(s: S, offset: i32) -> S::I {
    s.splat_int(-offset & 0xFFFF | (-offset * UPPER) << 16)
}

/// Adds a group's integer sums, whose parts are `dots`, to the sums of R rows. `part` is the group's among `numbers`.
#[inline(always)]
fn add_group<S: Simd, D: Source, const R: usize>(
    s: S,
    acc: &mut [S::V; R],
    dots: &[[S::I; 4]; R],
    (scale, min): (S::V, S::V),
    numbers: &Numbers<'_, R>,
    part: usize,
) {
    let float = |word: i32| s.splat(f32::from_bits(word.cast_unsigned()));
    for r in 0..R {
        let [first, second, third, fourth] = dots[r];
        let dot = match parts::<S>(R) {
            1 => first,
            2 => s.add_int(first, second),
            _ => s.add_int(s.add_int(first, second), s.add_int(third, fourth)),
        };
        acc[r] = s.fma(s.to_f32(dot), s.mul(scale, float(numbers.scales()[r])), acc[r]);
        if D::MINS {
            acc[r] = s.fma(min, float(numbers.sums(part)[r]), acc[r]);
        }
    }
}

/// Computes one panel of R rows from `row` on: adds `count` blocks of the source, which are the rows' blocks from `first`
/// on. `out` may have fewer rows; places without a row are computed in vain.
#[inline(always)]
fn tile<S: Simd, D: Source, const BYTES: bool, const R: usize>(
    s: S,
    source: &D,
    x: Rounded<'_>,
    (first, count, row): (usize, usize, usize),
    out: &mut [Vector],
) {
    let (pairs, quads): (&[Words<PAIRS, R>], &[Words<QUADS, R>]) =
        if BYTES { (&[], x.quads(row, (first, count))) } else { (x.pairs(row, (first, count)), &[]) };
    let numbers = x.numbers::<R>(row, (first, count));
    let mut acc = [s.splat(0.0); R];
    for (acc, out) in acc.iter_mut().zip(&*out) {
        *acc = s.load(out);
    }
    let groups = if D::HALVES { 2 } else { 1 };
    let parts = parts::<S>(R);
    let offset = negated(s, source.offset::<BYTES>());
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
            source.prefetch(s, block);
        }
        let numbers = Numbers(&numbers[block]);
        let mut part = usize::from(D::HALVES);
        let mut dots = start(s, offset, numbers.totals(part));
        add_half!(0, BYTES, s, source, block, dots, parts, pairs, quads);
        if D::HALVES {
            add_group::<S, D, R>(s, &mut acc, &dots, (scale[0], min[0]), &numbers, part);
            part = 2;
            dots = start(s, offset, numbers.totals(part));
        }
        add_half!(1, BYTES, s, source, block, dots, parts, pairs, quads);
        let group = groups - 1;
        add_group::<S, D, R>(s, &mut acc, &dots, (scale[group], min[group]), &numbers, part);
    }
    for (acc, out) in acc.into_iter().zip(out) {
        s.store(acc, out);
    }
}
