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
pub struct Unit<'a> {
    /// Numbers, overwritten.
    pub x: &'a mut [f32],
    /// Factor of the results.
    pub factor: f32,
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
pub struct GatedNorm<'a> {
    /// Numbers to norm.
    pub x: &'a [f32],
    /// Weight of the norm, one for each element of `x`.
    pub weight: &'a [f32],
    /// Gates, one for each element of `x`.
    pub gate: &'a [f32],
    /// Number that is added to the mean of the squares.
    pub eps: f32,
    /// Results, one for each element of `x`.
    pub out: &'a mut [f32],
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
pub struct Sigmoid<'a> {
    /// Arguments.
    pub x: &'a [f32],
    /// Results, `[ceil(len / 16)]` for `len` arguments.
    pub out: &'a mut [Vector],
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
pub struct LogPlaces {
    /// Number of elements in an entry.
    pub entry: usize,
    /// First element of the key.
    pub key: usize,
    /// First element of the update.
    pub delta: usize,
    /// Element of the decay.
    pub decay: usize,
}

/// Processes the rows of one request through one value head: its state after the logged updates, then the rows' updates
/// and outputs.
///
/// The first `commit` rows change the state. The updates of the other rows are appended to the log. This writes only
/// their `delta`. The caller writes keys and decays afterwards, because several heads and blocks of columns share them.
pub struct DeltaHead<'a> {
    /// Number of features of a key.
    pub key_dim: usize,
    /// Number of features of a value.
    pub value_dim: usize,
    /// State, `[key_dim, vectors, 16]`.
    pub state: &'a mut [f32],
    /// Whether the state before the first row is zero, whatever `state` contains.
    pub zero: bool,
    /// Number of logged updates that come before the first row.
    pub replay: usize,
    /// Number of rows that change the state.
    pub commit: usize,
    /// First entry of the log that the rows after `commit` write.
    pub log_from: usize,
    /// Log of updates, `[entries, places.entry]`.
    pub log: &'a mut [f32],
    /// Places of this head's numbers in an entry of the log.
    pub places: LogPlaces,
    /// Query and key of each row, and at `value` the head's value, `[rows, stride]`.
    pub rows: &'a [f32],
    /// Distance of two rows of `rows`.
    pub stride: usize,
    /// First element of the head's value in a row of `rows`.
    pub value: usize,
    /// beta and decay of each row.
    pub gates: &'a [(f32, f32)],
    /// Outputs of the head, `[rows, vectors, 16]`. `vectors` is `value_dim / 16`, rounded up. In each row the first
    /// `value_dim` numbers count.
    pub out: &'a mut [f32],
    /// Scratch memory, `[key_dim, BLOCK]`.
    pub scratch: &'a mut [Vector],
    /// Copies of the state to make on the way: the number of updates before each, replayed ones included, and its
    /// memory in the layout of `state`.
    pub snapshots: &'a mut [(usize, &'a mut [f32])],
}

impl DeltaHead<'_> {
    /// Number of vectors of scratch memory that a head needs.
    pub fn scratch(key_dim: usize) -> usize {
        key_dim * BLOCK
    }

    /// Computes `N` vectors of columns, from vector `first` on. A pass over them applies an update and sums the new state
    /// for the row's output and for the next row's update, so that each row reads the columns once.
    #[inline(always)]
    fn block<S: Simd, const N: usize>(&mut self, s: S, first: usize) {
        let Self { key_dim, value_dim, places, stride, replay, commit, rows, .. } = *self;
        let vectors = value_dim.div_ceil(LANES);
        let columns = &mut self.scratch.as_chunks_mut::<N>().0[..key_dim];
        let mut next_key = &rows[key_dim..2 * key_dim];
        let lanes = first * LANES..(first + N) * LANES;
        // Loops in place of closures: what a closure calls is not compiled for the instruction set of `S`. Their bodies
        // are short, so that they are unrolled and `known` and `delta` stay in registers.
        let mut known = load(s, columns, self.state, self.zero, vectors, first, next_key);
        let mut delta = [s.splat(0.0); N];
        for i in 0..replay {
            let entry = &self.log[i * places.entry..][..places.entry];
            let logged: &[Vector; N] = vectors_of(&entry[places.delta..][lanes.clone()]);
            for j in 0..N {
                delta[j] = s.load(&logged[j]);
            }
            let (key, decay) = (&entry[places.key..][..key_dim], entry[places.decay]);
            if i + 1 < replay {
                update::<S, N, false, false>(s, columns, key, delta, decay, [&[]; 2]);
            } else {
                (_, known) = update::<S, N, false, true>(s, columns, key, delta, decay, [&[], next_key]);
            }
            for (_, kept) in self.snapshots.iter_mut().filter(|(updates, _)| *updates == i + 1) {
                write_columns(columns, kept, vectors, first);
            }
        }
        let count = self.gates.len();
        for row in 0..count {
            let x = &rows[row * stride..][..stride];
            let (query, key) = (&x[..key_dim], &x[key_dim..2 * key_dim]);
            let value = &x[self.value..][..value_dim];
            let (beta, decay) = self.gates[row];
            let mut values = [[0.0; LANES]; N];
            let value = &value[lanes.start..lanes.end.min(value_dim)];
            values.as_flattened_mut()[..value.len()].copy_from_slice(value);
            for j in 0..N {
                let missing = s.sub(s.load(&values[j]), s.mul(s.splat(decay), known[j]));
                delta[j] = s.mul(s.splat(beta), missing);
            }
            let out: &mut [Vector; N] = vectors_of_mut(&mut self.out[row * vectors * LANES..][lanes.clone()]);
            let sums = if row + 1 < count {
                next_key = &rows[(row + 1) * stride + key_dim..][..key_dim];
                update::<S, N, true, true>(s, columns, key, delta, decay, [query, next_key])
            } else {
                update::<S, N, true, false>(s, columns, key, delta, decay, [query, &[]])
            };
            for j in 0..N {
                s.store(sums.0[j], &mut out[j]);
                known[j] = sums.1[j];
            }
            if row >= commit {
                let entry = &mut self.log[(self.log_from + row - commit) * places.entry + places.delta..];
                let logged: &mut [Vector; N] = vectors_of_mut(&mut entry[lanes.clone()]);
                for j in 0..N {
                    s.store(delta[j], &mut logged[j]);
                }
            }
            for (_, kept) in self.snapshots.iter_mut().filter(|(updates, _)| *updates == replay + row + 1) {
                write_columns(columns, kept, vectors, first);
            }
            if row + 1 == commit {
                write_columns(columns, self.state, vectors, first);
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

/// Returns `N` vectors of numbers, of which there are as many.
#[inline(always)]
fn vectors_of<const N: usize>(x: &[f32]) -> &[Vector; N] {
    x.as_chunks().0.first_chunk().expect("N vectors")
}

#[inline(always)]
fn vectors_of_mut<const N: usize>(x: &mut [f32]) -> &mut [Vector; N] {
    x.as_chunks_mut().0.first_chunk_mut().expect("N vectors")
}

/// Copies columns of a state, from vector `first` on, out of rows of `vectors` vectors; zeros if `zero`. Returns `key^T
/// state`.
#[inline(always)]
fn load<S: Simd, const N: usize>(
    s: S,
    columns: &mut [[Vector; N]],
    state: &[f32],
    zero: bool,
    vectors: usize,
    first: usize,
    key: &[f32],
) -> [S::V; N] {
    let mut known = [s.splat(0.0); N];
    if zero {
        columns.fill([[0.0; LANES]; N]);
        return known;
    }
    for ((block, row), &k) in columns.iter_mut().zip(state.chunks_exact(vectors * LANES)).zip(key) {
        let row: &[Vector; N] = vectors_of(&row[first * LANES..]);
        for j in 0..N {
            let x = s.load(&row[j]);
            s.store(x, &mut block[j]);
            known[j] = s.fma(s.splat(k), x, known[j]);
        }
    }
    known
}

/// Writes columns of a state, from vector `first` on, into the rows of `vectors` vectors of a state's memory.
#[inline(always)]
fn write_columns<const N: usize>(columns: &[[Vector; N]], state: &mut [f32], vectors: usize, first: usize) {
    for (block, row) in columns.iter().zip(state.chunks_exact_mut(vectors * LANES)) {
        *vectors_of_mut(&mut row[first * LANES..]) = *block;
    }
}

/// Computes `state = decay state + key delta^T`. Returns `with^T state` for the first of `with` if `READS` and for the
/// second if `KNOWS`, otherwise zeros.
#[inline(always)]
fn update<S: Simd, const N: usize, const READS: bool, const KNOWS: bool>(
    s: S,
    columns: &mut [[Vector; N]],
    key: &[f32],
    delta: [S::V; N],
    decay: f32,
    with: [&[f32]; 2],
) -> ([S::V; N], [S::V; N]) {
    let [query, next_key] = with;
    let (mut read, mut known) = ([s.splat(0.0); N], [s.splat(0.0); N]);
    for (i, (block, &k)) in columns.iter_mut().zip(key).enumerate() {
        for j in 0..N {
            let new = s.fma(s.splat(k), delta[j], s.mul(s.splat(decay), s.load(&block[j])));
            s.store(new, &mut block[j]);
            if READS {
                read[j] = s.fma(s.splat(query[i]), new, read[j]);
            }
            if KNOWS {
                known[j] = s.fma(s.splat(next_key[i]), new, known[j]);
            }
        }
    }
    (read, known)
}
