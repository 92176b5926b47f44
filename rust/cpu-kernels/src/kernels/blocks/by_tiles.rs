//! Products of rounded rows with packed weights by tiles of bytes, for many rows.

use super::Form;
use super::source::{EXPANDED, Expand, Expanded, with_source};
use crate::blocks::{Minima, Packed};
use crate::isa::{Isa, Kernel, LANES, Simd, Tiling, Vector};
use crate::kernels::rounded::Planes;
use crate::memory::{LINE_BYTES, Line};

/// Memory for products of many rows.
pub(super) struct TileRoom {
    pub(super) expanded: Expanded,
    dots: Dots,
}

impl TileRoom {
    pub(super) fn new() -> Self {
        Self { expanded: Expanded::new(), dots: [[[Line([0; LINE_BYTES]); LANES]; 2]; 2] }
    }
}

/// Sums of the products of two blocks with sixteen rows, by planes and rows.
type Dots = [[[Line; LANES]; 2]; 2];

/// Adds a strip's outputs to `acc` `[rows]`. The number of rows in `acc` is a multiple of sixteen, at least the number
/// of rows.
pub(super) fn by_tiles(
    isa: Isa,
    w: &Packed,
    strip: usize,
    (planes, tiling): (Planes<'_>, &Tiling),
    room: &mut TileRoom,
    acc: &mut [Vector],
) {
    let TileRoom { expanded, dots } = room;
    let (stride, groups) = (w.blocks(), planes.codes.len() / w.blocks());
    let acc = &mut acc.as_chunks_mut().0[..groups];
    for first in (0..stride).step_by(EXPANDED) {
        let count = (stride - first).min(EXPANDED);
        with_source(isa, w, Expand { strip, first, count, form: Form::Signed, out: expanded });
        let (of, dots, acc) = (&*expanded, &mut *dots, &mut *acc);
        match (w.format().minima != Minima::None, planes.wide) {
            (false, true) => isa.run(ByTiles::<false, 2> { tiling, of, planes, stride, first, count, dots, acc }),
            (true, true) => isa.run(ByTiles::<true, 2> { tiling, of, planes, stride, first, count, dots, acc }),
            (false, false) => isa.run(ByTiles::<false, 1> { tiling, of, planes, stride, first, count, dots, acc }),
            (true, false) => isa.run(ByTiles::<true, 1> { tiling, of, planes, stride, first, count, dots, acc }),
        }
    }
}

/// Adds the products of rows of `PLANES` planes with the expanded blocks `first .. first + count` to `acc`.
struct ByTiles<'a, const MINS: bool, const PLANES: usize> {
    tiling: &'a Tiling,
    of: &'a Expanded,
    planes: Planes<'a>,
    /// Number of blocks in a row.
    stride: usize,
    first: usize,
    count: usize,
    dots: &'a mut Dots,
    acc: &'a mut [[Vector; LANES]],
}

impl<const MINS: bool, const PLANES: usize> Kernel for ByTiles<'_, MINS, PLANES> {
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
            tiling.multiply_bytes::<PLANES>(&codes[at(step)], lines, dots.first_chunk_mut().expect("at most 2 planes"));
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
                let [first, second] = &dots[step % 2];
                let (scale, factors) = (s.load(&of.scales[block][0]), &scales[at(step)]);
                for r in 0..LANES {
                    let mut dot = s.to_f32(s.load_int(&first[r].0));
                    if PLANES == 2 {
                        // Both are exact, so the sum is rounded once, like an integer's conversion.
                        dot = s.fma(dot, s.splat(256.0), s.to_f32(s.load_int(&second[r].0)));
                    }
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
