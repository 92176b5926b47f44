//! Gated delta rule of one head (Yang et al. 2025, eq. 10), and the gated norm after it.
//!
//! A state `[key_dim, value_dim]` has lanes over its columns. A sum over keys has one accumulator for each column and
//! ascending keys, so that neither the instruction set nor the split of the columns changes a bit. Rows and replayed
//! updates go through the same function.

use super::element::Element;
use super::exp::exp;
use super::norm::squares;
use crate::isa::{Kernel, LANES, Simd, Vector};

/// Number of vectors of a state's row that are computed together: their sums stay in registers, their columns in the
/// first-level cache.
const BLOCK: usize = 4;

/// Divides by the length, in place: `x / sqrt(sum of x^2 + 1e-6)`, times `factor`.
pub(crate) struct Unit<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) factor: f32,
}

impl Kernel for Unit<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let scale = 1.0 / (squares(s, self.x) + 1e-6).sqrt() * self.factor;
        for x in self.x {
            *x *= scale;
        }
    }
}

/// Computes `out = x / sqrt(mean(x^2) + eps) * weight * silu(gate)`.
pub(crate) struct GatedNorm<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) gate: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for GatedNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, weight, gate, eps, out } = self;
        let scale = s.splat(1.0 / (squares(s, x) / x.len() as f32 + eps).sqrt());
        let parts = x.chunks(LANES).zip(weight.chunks(LANES)).zip(gate.chunks(LANES)).zip(out.chunks_mut(LANES));
        for (((x, weight), gate), out) in parts {
            let normed = s.mul(s.mul(f32::load_tail(s, x), scale), f32::load_tail(s, weight));
            let mut lanes = [0.0; LANES];
            s.store(s.mul(normed, silu(s, f32::load_tail(s, gate))), &mut lanes);
            out.copy_from_slice(&lanes[..out.len()]);
        }
    }
}

/// Computes `out = 1 / (1 + e^-x)`. Values after the last element have no meaning.
pub(crate) struct Sigmoid<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) out: &'a mut [Vector],
}

impl Kernel for Sigmoid<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, out) in self.x.chunks(LANES).zip(self.out) {
            let negative = s.sub(s.splat(0.0), f32::load_tail(s, x));
            s.store(s.div(s.splat(1.0), s.add(s.splat(1.0), exp(s, negative))), out);
        }
    }
}

/// Returns `x / (1 + e^-x)`.
#[inline(always)]
pub(super) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    s.div(x, s.add(s.splat(1.0), exp(s, s.sub(s.splat(0.0), x))))
}

/// Place of a head's numbers in an entry of the log, and the length of an entry.
#[derive(Clone, Copy)]
pub(crate) struct LogPlaces {
    pub(crate) entry: usize,
    pub(crate) key: usize,
    pub(crate) delta: usize,
    pub(crate) decay: usize,
}

/// Processes the rows of one request through one value head: its state after the logged updates, then the rows' updates
/// and outputs.
///
/// The first `commit` rows change the state. The updates of the other rows are appended to the log. This writes only
/// their `delta`. The caller writes keys and decays afterwards, because several heads and blocks of columns share them.
pub(crate) struct DeltaHead<'a> {
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    /// State, `[key_dim, vectors, 16]`.
    pub(crate) state: &'a mut [f32],
    /// Whether the state before the first row is zero, whatever `state` contains.
    pub(crate) zero: bool,
    /// Number of logged updates that come before the first row.
    pub(crate) replay: usize,
    pub(crate) commit: usize,
    /// First entry of the log that the rows after `commit` write.
    pub(crate) log_from: usize,
    pub(crate) log: &'a mut [f32],
    pub(crate) places: LogPlaces,
    /// Query and key of each row, and at `value` the head's value, `[rows, stride]`.
    pub(crate) rows: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) value: usize,
    /// beta and decay of each row.
    pub(crate) gates: &'a [(f32, f32)],
    /// Outputs of the head, `[rows, vectors, 16]`. `vectors` is `value_dim / 16`, rounded up. In each row the first
    /// `value_dim` numbers count.
    pub(crate) out: &'a mut [f32],
    /// Scratch memory, `[key_dim, BLOCK]`.
    pub(crate) scratch: &'a mut [Vector],
    /// Copies of the state to make on the way: the number of updates before each, replayed ones included, and its
    /// memory in the layout of `state`.
    pub(crate) snapshots: &'a mut [(usize, &'a mut [f32])],
}

impl DeltaHead<'_> {
    /// Number of vectors of scratch memory that a head needs.
    pub(crate) fn scratch(key_dim: usize) -> usize {
        key_dim * BLOCK
    }

    #[inline(always)]
    fn block<S: Simd, const N: usize>(&mut self, s: S, first: usize) {
        let Self { key_dim, value_dim, places, stride, replay, commit, .. } = *self;
        let vectors = value_dim.div_ceil(LANES);
        let scratch = &mut self.scratch[..key_dim * N];
        for (i, block) in scratch.chunks_exact_mut(N).enumerate() {
            let row = &self.state[(i * vectors + first) * LANES..][..N * LANES];
            if self.zero {
                block.fill([0.0; LANES]);
            } else {
                block.as_flattened_mut().copy_from_slice(row);
            }
        }
        // Loops in place of closures: what a closure calls is not compiled for the instruction set of `S`.
        let mut delta = [s.splat(0.0); N];
        for (i, entry) in self.log.chunks_exact(places.entry).take(replay).enumerate() {
            for (j, delta) in delta.iter_mut().enumerate() {
                *delta = s.load(entry[places.delta + (first + j) * LANES..].first_chunk().expect("whole vectors"));
            }
            update::<S, N, false>(s, scratch, &entry[places.key..][..key_dim], &[], delta, entry[places.decay]);
            for (_, kept) in self.snapshots.iter_mut().filter(|(updates, _)| *updates == i + 1) {
                write_columns::<N>(scratch, kept, vectors, first);
            }
        }
        for (row, (&(beta, decay), out)) in
            self.gates.iter().zip(self.out.chunks_exact_mut(vectors * LANES)).enumerate()
        {
            let x = &self.rows[row * stride..][..stride];
            let (query, key) = (&x[..key_dim], &x[key_dim..2 * key_dim]);
            let value = &x[self.value..][..value_dim];
            let mut known = [s.splat(0.0); N];
            for (block, &k) in scratch.chunks_exact(N).zip(key) {
                for j in 0..N {
                    known[j] = s.fma(s.splat(k), s.load(&block[j]), known[j]);
                }
            }
            for (j, delta) in delta.iter_mut().enumerate() {
                let value = &value[((first + j) * LANES).min(value_dim)..((first + j + 1) * LANES).min(value_dim)];
                let missing = s.sub(f32::load_tail(s, value), s.mul(s.splat(decay), known[j]));
                *delta = s.mul(s.splat(beta), missing);
            }
            let sums = update::<S, N, true>(s, scratch, key, query, delta, decay);
            for j in 0..N {
                s.store(sums[j], out[(first + j) * LANES..].first_chunk_mut().expect("rows of whole vectors"));
            }
            if row >= commit {
                let entry = &mut self.log[(self.log_from + row - commit) * places.entry + places.delta..];
                for j in 0..N {
                    s.store(delta[j], entry[(first + j) * LANES..].first_chunk_mut().expect("whole vectors"));
                }
            }
            for (_, kept) in self.snapshots.iter_mut().filter(|(updates, _)| *updates == replay + row + 1) {
                write_columns::<N>(scratch, kept, vectors, first);
            }
            if row + 1 == commit {
                write_columns::<N>(scratch, self.state, vectors, first);
            }
        }
    }
}

impl Kernel for DeltaHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let vectors = self.value_dim.div_ceil(LANES);
        for first in (0..vectors).step_by(BLOCK) {
            match vectors - first {
                1 => self.block::<S, 1>(s, first),
                2 => self.block::<S, 2>(s, first),
                3 => self.block::<S, 3>(s, first),
                _ => self.block::<S, BLOCK>(s, first),
            }
        }
    }
}

/// Writes columns of a state, from vector `first` on, into the rows of `vectors` vectors of a state's memory.
#[inline(always)]
fn write_columns<const N: usize>(columns: &[Vector], state: &mut [f32], vectors: usize, first: usize) {
    for (i, block) in columns.chunks_exact(N).enumerate() {
        state[(i * vectors + first) * LANES..][..N * LANES].copy_from_slice(block.as_flattened());
    }
}

/// Computes `state = decay state + key delta^T`. Returns `query^T state` if `READS`, otherwise an undefined value.
#[inline(always)]
fn update<S: Simd, const N: usize, const READS: bool>(
    s: S,
    state: &mut [Vector],
    key: &[f32],
    query: &[f32],
    delta: [S::V; N],
    decay: f32,
) -> [S::V; N] {
    let mut sums = [s.splat(0.0); N];
    for (i, (block, &k)) in state.chunks_exact_mut(N).zip(key).enumerate() {
        for j in 0..N {
            let new = s.fma(s.splat(k), delta[j], s.mul(s.splat(decay), s.load(&block[j])));
            s.store(new, &mut block[j]);
            if READS {
                sums[j] = s.fma(s.splat(query[i]), new, sums[j]);
            }
        }
    }
    sums
}
