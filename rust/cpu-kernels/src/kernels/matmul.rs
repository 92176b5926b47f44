//! Products of rows with weights `[out, in]`. There is one accumulator vector for each (output, row), so the order of a
//! sum depends on the number of inputs alone.

// Loops over registers, which unroll.
#![allow(clippy::needless_range_loop)]

use super::code::Code;
use crate::isa::{Isa, Kernel, LANES, Simd, Vector};
use crate::memory::{Bf16, LINE_BYTES};

/// Operands of a product other than the weights, and its results.
pub struct Product<'a> {
    /// Number of inputs.
    pub inputs: usize,
    /// Rows, `[rows, ceil(inputs / 16)]`, with zeros after the inputs.
    pub x: &'a [Vector],
    /// Number of rows.
    pub rows: usize,
    /// Results, `[rows, y_stride]`, of which the first `outputs` columns are written.
    pub y: &'a mut [f32],
    /// Distance of two rows of `y`.
    pub y_stride: usize,
}

/// Kernel for the product `y[row, o] = sum over i of w[o, i] x[row, i]`.
struct Matmul<'w, 'a, W, const N: usize> {
    /// Weights, `[outputs, inputs / N]`.
    w: &'w [W],
    of: Product<'a>,
}

/// Weights that are not packed, `[outputs, inputs]`.
#[derive(Clone, Copy)]
pub enum Unpacked<'a> {
    /// Weights in fp32.
    F32(&'a [f32]),
    /// Weights in bf16.
    Bf16(&'a [Bf16]),
    /// Weights in bf16 as pairs of inputs, for rows that [`RoundPairs`](super::RoundPairs) has rounded.
    Pairs(&'a [[Bf16; 2]]),
}

impl Product<'_> {
    /// Computes `y[row, o] = sum over i of w[o, i] x[row, i]` with these instructions.
    pub fn run(self, w: Unpacked<'_>, isa: Isa) {
        match w {
            Unpacked::F32(w) => isa.run(Matmul { w, of: self }),
            Unpacked::Bf16(w) => isa.run(Matmul { w, of: self }),
            Unpacked::Pairs(w) => isa.run_pairs(Matmul { w, of: self }),
        }
    }
}

impl<W: Code<N>, const N: usize> Kernel for Matmul<'_, '_, W, N> {
    type Output = ();

    /// Divides the rows into tiles that are as equal as possible, with at most as many rows as registers hold
    /// accumulators for.
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        if !self.of.inputs.is_multiple_of(LANES) {
            // Rare: a call that pads the last vector would take the accumulators out of their registers.
            return (0..self.of.rows).for_each(|row| self.strip::<S, 4, 1, true>(s, row));
        }
        let most = if S::WIDE { 6 } else { 3 };
        let tiles = self.of.rows.div_ceil(most);
        for tile in 0..tiles {
            let (first, end) = (tile * self.of.rows / tiles, (tile + 1) * self.of.rows / tiles);
            match (S::WIDE, end - first) {
                (true, 1) => self.strip::<S, 8, 1, false>(s, first),
                (true, 2) => self.strip::<S, 8, 2, false>(s, first),
                (true, 3) => self.strip::<S, 4, 3, false>(s, first),
                (true, 4) => self.strip::<S, 4, 4, false>(s, first),
                (true, 5) => self.strip::<S, 4, 5, false>(s, first),
                (true, _) => self.strip::<S, 4, 6, false>(s, first),
                (false, 1) => self.strip::<S, 4, 1, false>(s, first),
                (false, 2) => self.strip::<S, 2, 2, false>(s, first),
                (false, _) => self.strip::<S, 2, 3, false>(s, first),
            }
        }
    }
}

impl<W: Code<N>, const N: usize> Matmul<'_, '_, W, N> {
    /// Computes all outputs of R rows, O at a time.
    #[inline(always)]
    fn strip<S: Simd, const O: usize, const R: usize, const TAIL: bool>(&mut self, s: S, first: usize) {
        let vectors = self.of.inputs.div_ceil(LANES);
        let mut x: [&[Vector]; R] = [&[]; R];
        for (r, x) in x.iter_mut().enumerate() {
            *x = &self.of.x[(first + r) * vectors..][..vectors];
        }
        let outputs = self.w.len() / (self.of.inputs / N);
        let whole = outputs / O * O;
        for o in (0..whole).step_by(O) {
            self.block::<S, O, R, TAIL>(s, first, o, x);
        }
        for o in whole..outputs {
            self.block::<S, 1, R, TAIL>(s, first, o, x);
        }
    }

    /// Computes O outputs of R rows.
    #[inline(always)]
    fn block<S: Simd, const O: usize, const R: usize, const TAIL: bool>(
        &mut self,
        s: S,
        first: usize,
        o: usize,
        x: [&[Vector]; R],
    ) {
        let stride = self.of.inputs / N;
        let whole = stride / LANES;
        let mut w: [&[[W; LANES]]; O] = [&[]; O];
        let mut tails: [&[W]; O] = [&[]; O];
        for j in 0..O {
            let (vectors, tail) = self.w[(o + j) * stride..][..stride].as_chunks();
            (w[j], tails[j]) = (&vectors[..whole], tail);
        }
        let mut body: [&[[Vector; N]]; R] = [&[]; R];
        for r in 0..R {
            body[r] = &x[r].as_chunks().0[..whole];
        }
        // The first rows load the weights of the next block while this one is computed. They are loaded line by line
        // in the order of memory, for any output, so that the processor's own prefetcher sees one stream.
        let (next, bring) = (self.w[o * stride..].as_ptr().wrapping_add(O * stride).cast::<u8>(), first == 0);
        let bytes = O * size_of::<[W; LANES]>();
        let mut sums = [[s.splat(0.0); O]; R];
        for i in 0..whole {
            if bring {
                for line in (0..bytes).step_by(LINE_BYTES) {
                    s.prefetch(next.wrapping_add(i * bytes + line));
                }
            }
            if W::PAIRED && S::DOTS {
                let mut pairs = [s.splat(0.0); O];
                for j in 0..O {
                    pairs[j] = W::bits(s, &w[j][i]);
                }
                for r in 0..R {
                    let x = s.load(&body[r][i][0]);
                    for j in 0..O {
                        sums[r][j] = s.dot(pairs[j], x, sums[r][j]);
                    }
                }
                continue;
            }
            for n in 0..N {
                let mut wide = [s.splat(0.0); O];
                for j in 0..O {
                    wide[j] = W::expand(s, &w[j][i], n);
                }
                for r in 0..R {
                    let x = s.load(&body[r][i][n]);
                    for j in 0..O {
                        sums[r][j] = s.fma(wide[j], x, sums[r][j]);
                    }
                }
            }
        }
        if TAIL {
            for j in 0..O {
                let mut padded = [W::default(); LANES];
                padded[..tails[j].len()].copy_from_slice(tails[j]);
                let wide = W::expand(s, &padded, 0);
                for r in 0..R {
                    sums[r][j] = s.fma(wide, s.load(&x[r][whole]), sums[r][j]);
                }
            }
        }
        for r in 0..R {
            reduce(s, &sums[r], &mut self.of.y[(first + r) * self.of.y_stride + o..][..O]);
        }
    }
}

/// Writes each vector's sum to `out`.
#[inline(always)]
fn reduce<S: Simd, const O: usize>(s: S, v: &[S::V; O], out: &mut [f32]) {
    if O == 8 {
        out.copy_from_slice(&s.sums8([v[0], v[1 % O], v[2 % O], v[3 % O], v[4 % O], v[5 % O], v[6 % O], v[7 % O]]));
    } else if O == 4 {
        out.copy_from_slice(&s.sums4([v[0], v[1 % O], v[2 % O], v[3 % O]]));
    } else {
        for j in 0..O {
            out[j] = s.sum(v[j]);
        }
    }
}
