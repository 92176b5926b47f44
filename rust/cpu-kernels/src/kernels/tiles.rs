//! Products of rows with bf16 weights `[out, in]` by tiles. An fp32 row is the sum of three bf16 rows exactly, whose
//! products are summed separately and then added, the smallest part first. The order of a sum depends on the number of
//! inputs alone. It differs from that of [`Matmul`](super::matmul::Matmul).

use super::pairs::{PAIRS, round_row};
use crate::isa::{Kernel, LANES, MOST_TILES, Simd, Tile, TileShape, Tiles, Tiling, Vector};
use crate::memory::Bf16;
use std::ops::Range;

/// Number of outputs that are computed together: two tiles.
const BLOCK: usize = 2 * LANES;

/// Layout of rows as tiles: each step has sets of `columns` tiles. A tile holds sixteen rows, or a part of sixteen
/// rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of bf16 parts that add up to a number: 3, or 1 if rows are rounded.
    parts: usize,
    sets: usize,
    columns: usize,
}

impl Layout {
    /// Returns the layout of `rows` rows. Rows that are `rounded` to bf16 have one part, others three.
    pub fn new(rows: usize, rounded: bool) -> Self {
        let groups = rows.div_ceil(LANES);
        if rounded {
            let sets = groups.div_ceil(MOST_TILES);
            return Self { parts: 1, sets, columns: groups.div_ceil(sets.max(1)) };
        }
        Self { parts: 3, sets: groups, columns: 3 }
    }

    /// Returns the number of tiles of rows of `inputs` numbers.
    pub fn tiles(self, inputs: usize) -> usize {
        self.sets * self.columns * (inputs / PAIRS)
    }
}

/// Splits rows `[rows, inputs]` into tiles `[sets, inputs / 32, columns]`, with zeros after the rows.
pub struct Split<'a> {
    /// Layout of as many rows.
    pub layout: Layout,
    /// Number of inputs, a multiple of 32.
    pub inputs: usize,
    /// Rows, `[rows, inputs / 16]`.
    pub x: &'a [Vector],
    /// Tiles, as many as [`Layout::tiles`] says.
    pub out: &'a mut [Tile],
}

impl Kernel for Split<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Layout { parts, sets, columns } = self.layout;
        let (steps, vectors) = (self.inputs / PAIRS, self.inputs / LANES);
        // Groups of sixteen rows that a set has.
        let of_set = columns / parts;
        for group in 0..sets * of_set {
            let rows = self.x.chunks_exact(vectors).skip(group * LANES).take(LANES);
            for step in 0..steps {
                // Turned first, so that pairs are made of whole vectors.
                let mut numbers = Lines([[[0.0; LANES]; LANES]; 2]);
                for (half, numbers) in numbers.0.iter_mut().enumerate() {
                    let mut of_rows = [s.splat(0.0); LANES];
                    for (i, row) in rows.clone().enumerate() {
                        of_rows[i] = s.load(&row[2 * step + half]);
                    }
                    for (out, column) in numbers.iter_mut().zip(s.transpose(of_rows)) {
                        s.store(column, out);
                    }
                }
                let first = (group / of_set * steps + step) * columns + group % of_set * parts;
                let outs = &mut self.out[first..first + parts];
                for (i, [a, b]) in numbers.0.as_flattened().as_chunks().0.iter().enumerate() {
                    if let [out] = &mut *outs {
                        let rounded = |x: &Vector| s.load(&x.map(round_row));
                        s.store(s.pairs(rounded(a), rounded(b)), &mut out[i]);
                        continue;
                    }
                    let (mut a, mut b) = (s.load(a), s.load(b));
                    for out in &mut *outs {
                        s.store(s.pairs(a, b), &mut out[i]);
                        // Exactly: of 24 significant bits these are eight.
                        (a, b) = (s.sub(a, s.upper(a)), s.sub(b, s.upper(b)));
                    }
                }
            }
        }
    }
}

/// Vectors that begin at a cache line.
#[repr(align(64))]
struct Lines<T>(T);

/// Kernel for the product `y[row, o] = sum over i of w[o, i] x[row, i]` by tiles.
pub struct TileProduct<'a> {
    /// Instructions that multiply.
    pub tiles: Tiles,
    /// Layout of `x`.
    pub layout: Layout,
    /// Number of inputs, a multiple of 32.
    pub inputs: usize,
    /// Weights, `[outputs, inputs]`.
    pub w: &'a [Bf16],
    /// Rows as tiles, by [`Split`].
    pub x: &'a [Tile],
    /// Number of rows.
    pub rows: usize,
    /// Room for a block of weights, `[inputs / 32, 2]`. Loading a tile whose rows are not cache lines takes seven times
    /// as long, and a file's weights begin anywhere.
    pub block: &'a mut [Tile],
    /// Results, `[rows, y_stride]`, of which the first `outputs` columns are written.
    pub y: &'a mut [f32],
    /// Distance of two rows of `y`.
    pub y_stride: usize,
}

impl Kernel for TileProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let outputs = self.w.len() / self.inputs;
        let tiling = self.tiles.begin(TileShape::Pairs);
        let mut sums = Lines([[[0.0; LANES]; LANES]; 2 * MOST_TILES]);
        for first in (0..outputs).step_by(BLOCK) {
            let outputs = first..(first + BLOCK).min(outputs);
            self.load(s, outputs.clone());
            for set in 0..self.layout.sets {
                match self.layout.columns {
                    1 => self.set::<S, 1>(s, (&tiling, &mut sums.0), set, outputs.clone()),
                    2 => self.set::<S, 2>(s, (&tiling, &mut sums.0), set, outputs.clone()),
                    _ => self.set::<S, 3>(s, (&tiling, &mut sums.0), set, outputs.clone()),
                }
            }
        }
    }
}

impl TileProduct<'_> {
    /// Copies the weights of at most 32 outputs to `block`, from which tiles are loaded. Rows of `block` without an
    /// output are zeros.
    #[inline(always)]
    fn load<S: Simd>(&mut self, s: S, outputs: Range<usize>) {
        let (w, ahead) = (&self.w[outputs.start * self.inputs..outputs.end * self.inputs], BLOCK * self.inputs / 2);
        for (i, row) in w.chunks_exact(self.inputs).enumerate() {
            let lines = row.as_chunks::<2>().0.as_chunks::<LANES>().0;
            for (step, line) in self.block.as_chunks_mut::<2>().0.iter_mut().zip(lines) {
                s.prefetch(line.as_ptr().wrapping_add(ahead));
                s.store(s.load_bits(line), &mut step[i / LANES][i % LANES]);
            }
        }
        for i in outputs.len()..BLOCK {
            self.block.as_chunks_mut::<2>().0.iter_mut().for_each(|step| step[i / LANES][i % LANES] = [0.0; LANES]);
        }
    }

    /// Computes the loaded outputs for a set's rows.
    #[inline(always)]
    fn set<S: Simd, const N: usize>(
        &mut self,
        s: S,
        (tiling, sums): (&Tiling, &mut [Tile]),
        set: usize,
        outputs: Range<usize>,
    ) {
        let len = self.inputs / PAIRS * N;
        let sums = &mut sums[..2 * N];
        tiling.multiply::<N>(self.block, &self.x[set * len..][..len], sums);
        let groups = N / self.layout.parts;
        for (half, sums) in sums.chunks_exact(N).enumerate() {
            let outputs =
                (outputs.start + half * LANES).min(outputs.end)..(outputs.start + (half + 1) * LANES).min(outputs.end);
            for (group, sums) in sums.chunks_exact(self.layout.parts).enumerate() {
                let first = (set * groups + group) * LANES;
                self.put(s, sums, first..(first + LANES).min(self.rows), outputs.clone());
            }
        }
    }

    /// Adds the sums of parts `[outputs, rows]` and writes them to `y`.
    #[inline(always)]
    fn put<S: Simd>(&mut self, s: S, sums: &[Tile], rows: Range<usize>, outputs: Range<usize>) {
        let mut added = [s.splat(0.0); LANES];
        for i in 0..LANES {
            added[i] = match sums {
                [sums] => s.load(&sums[i]),
                [first, second, third] => s.add(s.load(&first[i]), s.add(s.load(&second[i]), s.load(&third[i]))),
                _ => unreachable!("one part or three"),
            };
        }
        let columns = s.transpose(added);
        for (row, column) in rows.zip(columns) {
            let y = &mut self.y[row * self.y_stride + outputs.start..];
            if outputs.len() == LANES
                && let Some(y) = y.first_chunk_mut()
            {
                s.store(column, y);
                continue;
            }
            let mut all = [0.0; LANES];
            s.store(column, &mut all);
            y[..outputs.len()].copy_from_slice(&all[..outputs.len()]);
        }
    }
}
