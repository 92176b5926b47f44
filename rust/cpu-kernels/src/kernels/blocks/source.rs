//! Blocks of a strip in the form that kernels read: codes as pairs or as bytes, scales and minima.

use super::{Form, PAIRS, RUNS};
use crate::blocks::{Format, Minima, Packed, SUPER, Scales};
use crate::isa::{Isa, Kernel, LANES, Simd, Vector};
use crate::memory::{Bf16, LINE_BYTES, Line};

/// Number of blocks that are expanded at once for many rows.
pub(super) const EXPANDED: usize = 2 * SUPER / crate::blocks::BLOCK;
/// Number of lines between the codes that are multiplied and those that are prefetched: 8 KiB. With a quarter of it, one
/// thread that reads weights from memory waits for them.
const AHEAD: usize = 128;
/// Number that [`Form::Unsigned`] adds to signed bytes.
const BIAS: i32 = 128;

/// Source of a strip's blocks for a kernel.
pub(super) trait Source {
    /// Whether a group has 16 inputs; otherwise it has 32.
    const HALVES: bool;
    /// Whether groups have minima.
    const MINS: bool;
    /// Returns the offset subtracted from every code, for pairs, or with `BYTES` for unsigned bytes.
    fn offset<const BYTES: bool>(&self) -> i32;
    /// Starts to load the codes [`AHEAD`] lines after those of a block, which may lie past the end.
    fn prefetch<S: Simd>(&self, s: S, block: usize);
    /// Returns pair `8 HALF + P` of a block's codes, or with `BYTES` run `4 HALF + P` as unsigned bytes.
    fn step<S: Simd, const BYTES: bool, const HALF: usize, const P: usize>(&self, s: S, block: usize) -> S::I;
    /// Returns the scales of a group.
    fn scale<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V;
    /// Returns the minima of a group.
    fn min<S: Simd>(&self, s: S, block: usize, group: usize) -> S::V;
}

/// Strip in its packed layout.
pub(super) trait Strip<'a>: Source {
    /// Returns strip number `strip` of `w`: 16 outputs with all their inputs. The format of `w` must be that of this
    /// type.
    fn of(w: &'a Packed, strip: usize) -> Self;
    /// Returns a run of a block as signed bytes, after subtraction of the offset.
    fn signed<S: Simd>(&self, s: S, block: usize, run: usize) -> S::I;
}

/// Work on strips of `w` in their packed layout.
pub(super) trait Work {
    /// Does the work. `D` is the type of strips of the format of `w`.
    fn run<'a, D: Strip<'a>>(self, isa: Isa, w: &'a Packed);
}

/// Does work on strips of `w` in their packed layout.
pub(super) fn with_source(isa: Isa, w: &Packed, work: impl Work) {
    let format = w.format();
    match (format.low, format.high, format.halves, format.minima != Minima::None, format.table) {
        (4, 0, false, false, None) => work.run::<Direct<'_, 4, 0, false, false>>(isa, w),
        (4, 0, false, true, None) => work.run::<Direct<'_, 4, 0, false, true>>(isa, w),
        (4, 1, false, false, None) => work.run::<Direct<'_, 4, 1, false, false>>(isa, w),
        (4, 1, false, true, None) => work.run::<Direct<'_, 4, 1, false, true>>(isa, w),
        (4, 2, true, false, None) => work.run::<Direct<'_, 4, 2, true, false>>(isa, w),
        (2, 0, true, true, None) => work.run::<Direct<'_, 2, 0, true, true>>(isa, w),
        (2, 1, true, false, None) => work.run::<Direct<'_, 2, 1, true, false>>(isa, w),
        (8, 0, false, false, None) => work.run::<Direct<'_, 8, 0, false, false>>(isa, w),
        (4, 0, false, false, Some(_)) => work.run::<Looked<'_>>(isa, w),
        _ => unreachable!("no type has this format"),
    }
}

/// Packed strip with codes of `LOW` bits and `HIGH` further bits.
struct Direct<'a, const LOW: usize, const HIGH: usize, const HALVES: bool, const MINS: bool> {
    format: Format,
    codes: &'a [Line],
    halves: &'a [u16],
    subs: &'a [i8],
}

impl<const LOW: usize, const HIGH: usize, const HALVES: bool, const MINS: bool> Direct<'_, LOW, HIGH, HALVES, MINS> {
    /// Returns sixteen scales of a group, or with `of` 1 sixteen stored minima.
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

    /// Returns sixteen 8-bit integers.
    #[inline(always)]
    fn sub(&self, i: usize) -> &[i8; LANES] {
        &self.subs.as_chunks::<LANES>().0[i]
    }
}

impl<const LOW: usize, const HIGH: usize, const HALVES: bool, const MINS: bool> Direct<'_, LOW, HIGH, HALVES, MINS> {
    /// Returns pair `p` of a block's codes.
    #[inline(always)]
    fn pair<S: Simd>(&self, s: S, block: usize, p: usize) -> S::I {
        let (run, odd) = (p / 2, p % 2);
        if HIGH > 0 {
            // The high bits of a run's two pairs are added at once.
            let codes = self.bytes(s, block, run);
            return if odd == 1 { s.shr16(codes, 8) } else { s.and(codes, s.splat_int(0x00FF_00FF)) };
        }
        let lines: &[Line] = &self.codes[block * LOW..][..LOW];
        let codes = s.load_int(&lines[run * LOW / 8].0);
        let at = (8 * odd + run * LOW % 8) as u32;
        if LOW == 8 {
            return s.sar16(if odd == 0 { s.shl16(codes, 8) } else { codes }, 8);
        }
        let low = if at == 0 { codes } else { s.shr16(codes, at) };
        if LOW == 4 && at == 12 { low } else { s.and(low, s.splat_int(0x0001_0001 * ((1 << LOW) - 1))) }
    }

    /// Returns run number `run` of a block's codes, one code per byte.
    #[inline(always)]
    fn bytes<S: Simd>(&self, s: S, block: usize, run: usize) -> S::I {
        let lines: &[Line] = &self.codes[block * (LOW + HIGH)..][..LOW + HIGH];
        let codes = s.load_int(&lines[run * LOW / 8].0);
        if LOW == 8 {
            return codes;
        }
        let at = (run * LOW % 8) as u32;
        let low = if at == 0 { codes } else { s.shr16(codes, at) };
        let low = s.and(low, s.splat_int(0x0101_0101 * ((1 << LOW) - 1)));
        if HIGH == 0 {
            return low;
        }
        let high = s.load_int(&lines[LOW + run * HIGH / 8].0);
        let (from, to) = ((run * HIGH % 8) as u32, LOW as u32);
        let high = if from < to { s.shl16(high, to - from) } else { s.shr16(high, from - to) };
        s.or(low, s.and(high, s.splat_int(0x0101_0101 * (((1 << HIGH) - 1) << LOW))))
    }
}

impl<const LOW: usize, const HIGH: usize, const HALVES: bool, const MINS: bool> Source
    for Direct<'_, LOW, HIGH, HALVES, MINS>
{
    const HALVES: bool = HALVES;
    const MINS: bool = MINS;

    #[inline(always)]
    fn offset<const BYTES: bool>(&self) -> i32 {
        if BYTES && LOW == 8 { BIAS } else { self.format.offset }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, block: usize) {
        for line in 0..LOW + HIGH {
            s.prefetch(self.codes.as_ptr().wrapping_add(block * (LOW + HIGH) + line + AHEAD));
        }
    }

    #[inline(always)]
    fn step<S: Simd, const BYTES: bool, const HALF: usize, const P: usize>(&self, s: S, block: usize) -> S::I {
        if !BYTES {
            return self.pair(s, block, HALF * PAIRS / 2 + P);
        }
        let codes = self.bytes(s, block, HALF * RUNS / 2 + P);
        if LOW == 8 { biased(s, codes) } else { codes }
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

impl<'a, const LOW: usize, const HIGH: usize, const HALVES: bool, const MINS: bool> Strip<'a>
    for Direct<'a, LOW, HIGH, HALVES, MINS>
{
    #[inline(always)]
    fn of(w: &'a Packed, strip: usize) -> Self {
        let (halves, subs) = w.scales(strip);
        Self { format: w.format(), codes: w.codes(strip), halves, subs }
    }

    #[inline(always)]
    fn signed<S: Simd>(&self, s: S, block: usize, run: usize) -> S::I {
        let codes = self.bytes(s, block, run);
        if LOW == 8 { codes } else { s.sub8(codes, s.splat_int(self.format.offset * 0x0101_0101)) }
    }
}

/// Converts signed bytes to unsigned ones by adding the bias.
#[inline(always)]
fn biased<S: Simd>(s: S, codes: S::I) -> S::I {
    s.sub8(codes, s.splat_int(i32::from_le_bytes([BIAS as u8; 4])))
}

/// Packed strip of 4-bit codes that stand for the integers of a table.
struct Looked<'a>(Direct<'a, 4, 0, false, false>, &'static [i8; 16]);

impl Source for Looked<'_> {
    const HALVES: bool = false;
    const MINS: bool = false;

    #[inline(always)]
    fn offset<const BYTES: bool>(&self) -> i32 {
        if BYTES { BIAS } else { 0 }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, block: usize) {
        self.0.prefetch(s, block);
    }

    #[inline(always)]
    fn step<S: Simd, const BYTES: bool, const HALF: usize, const P: usize>(&self, s: S, block: usize) -> S::I {
        if BYTES {
            return biased(s, self.signed(s, block, HALF * RUNS / 2 + P));
        }
        let codes = self.signed(s, block, HALF * RUNS / 2 + P / 2);
        s.sar16(if P.is_multiple_of(2) { s.shl16(codes, 8) } else { codes }, 8)
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

impl<'a> Strip<'a> for Looked<'a> {
    #[inline(always)]
    fn of(w: &'a Packed, strip: usize) -> Self {
        Self(Direct::of(w, strip), w.format().table.expect("a type with a table"))
    }

    #[inline(always)]
    fn signed<S: Simd>(&self, s: S, block: usize, run: usize) -> S::I {
        s.lookup(self.1, self.0.bytes(s, block, run))
    }
}

/// Blocks with expanded codes and scales.
pub(super) struct Expanded {
    /// Lines of each block: 16 lines of pairs, or 8 of bytes.
    pub(super) codes: [[Line; PAIRS]; EXPANDED],
    /// Scales and minima, `[blocks, groups]`.
    pub(super) scales: [[Vector; 2]; EXPANDED],
    pub(super) mins: [[Vector; 2]; EXPANDED],
}

impl Expanded {
    pub(super) fn new() -> Self {
        Self {
            codes: [[Line([0; LINE_BYTES]); PAIRS]; EXPANDED],
            scales: [[[0.0; LANES]; 2]; EXPANDED],
            mins: [[[0.0; LANES]; 2]; EXPANDED],
        }
    }
}

/// Expansion of blocks `first .. first + count` of a strip.
pub(super) struct Expand<'a> {
    pub(super) strip: usize,
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) form: Form,
    pub(super) out: &'a mut Expanded,
}

impl Work for Expand<'_> {
    fn run<'a, D: Strip<'a>>(self, isa: Isa, w: &'a Packed) {
        isa.run_integers(ExpandStrip { source: D::of(w, self.strip), work: self });
    }
}

/// Kernel for an expansion, with the strip as its source.
struct ExpandStrip<'a, D> {
    source: D,
    work: Expand<'a>,
}

impl<'a, D: Strip<'a>> Kernel for ExpandStrip<'_, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { source, work: Expand { first, count, form, out, .. } } = self;
        for i in 0..count {
            let (block, codes) = (first + i, &mut out.codes[i]);
            match form {
                Form::Pairs => {
                    each_pair!(P, { s.store_int(source.step::<S, false, 0, P>(s, block), &mut codes[P].0) });
                    each_pair!(P, { s.store_int(source.step::<S, false, 1, P>(s, block), &mut codes[8 + P].0) });
                }
                Form::Unsigned => {
                    each_run!(P, { s.store_int(source.step::<S, true, 0, P>(s, block), &mut codes[P].0) });
                    each_run!(P, { s.store_int(source.step::<S, true, 1, P>(s, block), &mut codes[4 + P].0) });
                }
                Form::Signed => {
                    each_run!(P, { s.store_int(source.signed(s, block, P), &mut codes[P].0) });
                    each_run!(P, { s.store_int(source.signed(s, block, 4 + P), &mut codes[4 + P].0) });
                }
            }
            for group in 0..if D::HALVES { 2 } else { 1 } {
                s.store(source.scale(s, block, group), &mut out.scales[i][group]);
                if D::MINS {
                    s.store(source.min(s, block, group), &mut out.mins[i][group]);
                }
            }
        }
    }
}

/// Expanded blocks as a source, with the constants of a format.
pub(super) struct Ready<'a, const HALVES: bool, const MINS: bool> {
    pub(super) of: &'a Expanded,
    pub(super) format: Format,
}

impl<const HALVES: bool, const MINS: bool> Source for Ready<'_, HALVES, MINS> {
    const HALVES: bool = HALVES;
    const MINS: bool = MINS;

    #[inline(always)]
    fn offset<const BYTES: bool>(&self) -> i32 {
        if BYTES && self.format.is_signed() { BIAS } else { self.format.offset }
    }

    #[inline(always)]
    fn prefetch<S: Simd>(&self, _: S, _: usize) {}

    #[inline(always)]
    fn step<S: Simd, const BYTES: bool, const HALF: usize, const P: usize>(&self, s: S, block: usize) -> S::I {
        s.load_int(&self.of.codes[block][HALF * if BYTES { RUNS / 2 } else { PAIRS / 2 } + P].0)
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
