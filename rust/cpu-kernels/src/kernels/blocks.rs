//! Products of rounded rows with packed weights. Sums over a group are exact integers, so their order does not matter.
//! Groups are added in ascending order, each with one fused multiply-add. So the bits do not depend on the other rows,
//! the layout or the instruction set.

// Loops over registers, which unroll.
#![allow(clippy::needless_range_loop)]

use super::rounded::{PAIRS, Rounded};
use crate::blocks::{BLOCK, Minima, Packed};
use crate::isa::{Isa, LANES, TileShape, Vector};
use by_tiles::{TileRoom, by_tiles};
use source::{EXPANDED, Expand, Expanded, Ready, with_source};
use std::ops::Range;
use vectors::{ByVectors, FewRows};

/// Repeats a body for each pair of half a block, with a constant that is its index there.
macro_rules! each_pair {
    ($p:ident, $body:block) => { each!($p, $body, 0 1 2 3 4 5 6 7) };
}
/// Repeats a body for each run of half a block, with a constant that is its index there.
macro_rules! each_run {
    ($p:ident, $body:block) => { each!($p, $body, 0 1 2 3) };
}
macro_rules! each {
    ($p:ident, $body:block, $($index:literal)*) => { $({ const $p: usize = $index; $body })* };
}

mod by_tiles;
mod source;
mod vectors;

/// Maximum number of rows of a [`BlockProduct`].
pub const MAX_ROWS: usize = 64;

/// Number of runs in a block. A run is a line of bytes of four inputs each.
const RUNS: usize = BLOCK / 4;

/// Form to which codes are expanded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Lines of pairs of 16-bit integers, for two inputs each.
    Pairs,
    /// Runs of unsigned bytes: the codes' integers plus an offset.
    Unsigned,
    /// Runs of signed bytes.
    Signed,
}

/// Product of rounded rows with packed weights: `y[row, o - outputs.start] = sum over i of w[o, i] x[row, i]`.
pub struct BlockProduct<'a> {
    /// Weights.
    pub w: &'a Packed,
    /// Outputs to compute.
    pub outputs: Range<usize>,
    /// Rows, rounded for the inputs of `w`; at most [`MAX_ROWS`].
    pub x: Rounded<'a>,
    /// Results, `[rows, y_stride]`.
    pub y: &'a mut [f32],
    /// Distance of two rows of `y`.
    pub y_stride: usize,
}

/// Outputs of some rows, `[rows, stride]`.
struct Rows<'a> {
    y: &'a mut [f32],
    stride: usize,
}

impl Rows<'_> {
    /// Writes the sums of a strip to those of its outputs that are in `outputs`.
    #[inline(always)]
    fn put(&mut self, acc: &[Vector], strip: usize, outputs: &Range<usize>) {
        let (first, last) = (outputs.start.max(strip * LANES), outputs.end.min((strip + 1) * LANES));
        for (acc, y) in acc.iter().zip(self.y.chunks_mut(self.stride)) {
            let y = &mut y[first - outputs.start..last - outputs.start];
            if let Some(y) = y.first_chunk_mut::<LANES>() {
                *y = *acc;
            } else {
                y.copy_from_slice(&acc[first - strip * LANES..last - strip * LANES]);
            }
        }
    }
}

impl BlockProduct<'_> {
    /// Computes the strips one by one. For few rows it reads them packed, for many rows from blocks that are expanded
    /// once.
    pub fn run(self, isa: Isa) {
        let Self { w, outputs, x, y, y_stride: stride } = self;
        let rows = x.rows;
        let (format, mut y) = (w.format(), Rows { y, stride });
        let bytes = x.has_quads() && format.largest_byte() <= isa.largest_byte();
        // Groups of 16 inputs fill tiles too little.
        let planes = x.planes.filter(|_| !format.halves);
        if planes.is_none() && rows <= isa.integer_rows() {
            return with_source(isa, w, FewRows { outputs, x, bytes, y });
        }
        let mut tiles = planes.map(|planes| (planes, planes.tiles.begin(TileShape::Bytes)));
        let mut room = (TileRoom::new(), [[0.0; LANES]; MAX_ROWS]);
        let (tile_room, acc) = (&mut room.0, &mut room.1);
        for strip in outputs.start / LANES..outputs.end.div_ceil(LANES) {
            acc[..rows.next_multiple_of(LANES)].fill([0.0; LANES]);
            if let Some((planes, tiling)) = &mut tiles {
                by_tiles(isa, w, strip, (*planes, tiling), tile_room, acc);
            } else {
                let work = ByVectors { first: 0, count: x.blocks, x, bytes, acc: &mut acc[..rows] };
                by_vectors(isa, w, strip, &mut tile_room.expanded, work);
            }
            y.put(&acc[..rows], strip, &outputs);
        }
    }
}

/// Does the work on a strip by vectors, with blocks that are expanded once for all rows.
fn by_vectors(isa: Isa, w: &Packed, strip: usize, expanded: &mut Expanded, work: ByVectors<'_, '_>) {
    let format = w.format();
    let ByVectors { x, bytes, acc, .. } = work;
    let form = if bytes { Form::Unsigned } else { Form::Pairs };
    for first in (0..x.blocks).step_by(EXPANDED) {
        let count = (x.blocks - first).min(EXPANDED);
        with_source(isa, w, Expand { strip, first, count, form, out: expanded });
        let (of, work) = (&*expanded, ByVectors { first, count, x, bytes, acc: &mut *acc });
        match (format.halves, format.minima != Minima::None) {
            (false, false) => work.run(isa, &Ready::<false, false> { of, format }),
            (false, true) => work.run(isa, &Ready::<false, true> { of, format }),
            (true, false) => work.run(isa, &Ready::<true, false> { of, format }),
            (true, true) => work.run(isa, &Ready::<true, true> { of, format }),
        }
    }
}
