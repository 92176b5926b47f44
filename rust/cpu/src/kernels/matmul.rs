//! Products of rows with weights `[out, in]`. One accumulator vector for each (output, row): the order of a sum hangs
//! on the number of inputs alone.

// Loops over registers, which unroll.
#![allow(clippy::needless_range_loop)]

use super::element::{Element, Vector};
use crate::isa::{Kernel, LANES, Simd};

/// `y[row, o] = sum over i of w[o, i] x[row, i]`
pub(crate) struct Matmul<'a, W> {
    /// `[outputs, inputs]`
    pub(crate) w: &'a [W],
    pub(crate) inputs: usize,
    /// `[rows, ceil(inputs / 16)]`, zeros behind the inputs.
    pub(crate) x: &'a [Vector],
    pub(crate) rows: usize,
    /// `[rows, y_stride]`, of which the first outputs columns are written.
    pub(crate) y: &'a mut [f32],
    pub(crate) y_stride: usize,
}

impl<W: Element> Kernel for Matmul<'_, W> {
    type Output = ();

    /// Rows in tiles of as many as registers hold accumulators for, as even as they go.
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        if !self.inputs.is_multiple_of(LANES) {
            // Rare: a call that pads the last vector would take the accumulators out of their registers.
            return (0..self.rows).for_each(|row| self.strip::<S, 4, 1, true>(s, row));
        }
        let tiles = self.rows.div_ceil(if S::WIDE { 6 } else { 3 });
        for tile in 0..tiles {
            let (first, end) = (tile * self.rows / tiles, (tile + 1) * self.rows / tiles);
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

impl<W: Element> Matmul<'_, W> {
    /// All outputs of R rows, O at a time.
    #[inline(always)]
    fn strip<S: Simd, const O: usize, const R: usize, const TAIL: bool>(&mut self, s: S, first: usize) {
        let vectors = self.inputs.div_ceil(LANES);
        let mut x: [&[Vector]; R] = [&[]; R];
        for (r, x) in x.iter_mut().enumerate() {
            *x = &self.x[(first + r) * vectors..][..vectors];
        }
        let outputs = self.w.len() / self.inputs;
        let whole = outputs / O * O;
        for o in (0..whole).step_by(O) {
            self.block::<S, O, R, TAIL>(s, first, o, x);
        }
        for o in whole..outputs {
            self.block::<S, 1, R, TAIL>(s, first, o, x);
        }
    }

    /// O outputs of R rows.
    #[inline(always)]
    fn block<S: Simd, const O: usize, const R: usize, const TAIL: bool>(
        &mut self,
        s: S,
        first: usize,
        o: usize,
        x: [&[Vector]; R],
    ) {
        let whole = self.inputs / LANES;
        let mut w: [&[[W; LANES]]; O] = [&[]; O];
        let mut tails: [&[W]; O] = [&[]; O];
        for j in 0..O {
            let (vectors, tail) = self.w[(o + j) * self.inputs..][..self.inputs].as_chunks();
            (w[j], tails[j]) = (&vectors[..whole], tail);
        }
        let mut body: [&[Vector]; R] = [&[]; R];
        for r in 0..R {
            body[r] = &x[r][..whole];
        }
        // The first rows bring in the weights: those of the block behind this one while this one is computed.
        let (ahead, bring) = (O * self.inputs, first == 0);
        let mut sums = [[s.splat(0.0); O]; R];
        for i in 0..whole {
            let mut wide = [s.splat(0.0); O];
            for j in 0..O {
                wide[j] = W::load(s, &w[j][i]);
            }
            if bring {
                for j in 0..O {
                    s.prefetch(w[j][i].as_ptr().wrapping_add(ahead));
                }
            }
            for r in 0..R {
                let x = s.load(&body[r][i]);
                for j in 0..O {
                    sums[r][j] = s.fma(wide[j], x, sums[r][j]);
                }
            }
        }
        if TAIL {
            for j in 0..O {
                let wide = W::load_tail(s, tails[j]);
                for r in 0..R {
                    sums[r][j] = s.fma(wide, s.load(&x[r][whole]), sums[r][j]);
                }
            }
        }
        for r in 0..R {
            reduce(s, &sums[r], &mut self.y[(first + r) * self.y_stride + o..][..O]);
        }
    }
}

/// Each vector's sum.
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
