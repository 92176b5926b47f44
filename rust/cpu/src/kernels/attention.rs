//! Causal attention of the rows of one request over one KV head, in groups of 16 positions aligned at position 0.
//!
//! A row's order of sums hangs on its position alone: groups in order (an online softmax), in a group every second position
//! from the first that it sees and the others apart. Positions past a row's own, and those before its window, are never
//! read, whatever lies there.

use super::element::{Element, Vector};
use super::exp::exp;
use crate::isa::{Kernel, LANES, Simd};
use crate::memory::Vectors;
use std::marker::PhantomData;

/// Positions that are attended together.
pub(crate) const GROUP: usize = LANES;

/// Keys and values of one KV head.
pub(crate) trait KvRead<T> {
    /// `[block_size, head_dim]` keys of a block.
    fn keys(&self, block: usize) -> &[T];
    /// `[block_size, head_dim]` values of a block.
    fn values(&self, block: usize) -> &[T];
}

/// Memory that an attention needs, for up to `rows` rows and `heads` query heads.
pub(crate) struct AttendScratch {
    /// `[rows, heads, ceil(head_dim / 16)]` weighted sums of values.
    sums: Vectors,
    /// `[rows, heads]` largest score.
    largest: Vec<f32>,
    /// `[rows, heads]` sum of weights.
    total: Vec<f32>,
    /// `[2, 16, head_dim]` keys and values of a group that lies in several blocks.
    gathered: Vec<f32>,
}

impl AttendScratch {
    pub(crate) fn new(rows: usize, heads: usize, head_dim: usize) -> Self {
        Self {
            sums: Vectors::new(rows * heads * head_dim.div_ceil(LANES)),
            largest: vec![0.0; rows * heads],
            total: vec![0.0; rows * heads],
            gathered: vec![0.0; 2 * GROUP * head_dim],
        }
    }

    /// Everything NaN, for tests.
    pub(crate) fn poison(&mut self) {
        self.sums.fill([f32::NAN; LANES]);
        self.largest.fill(f32::NAN);
        self.total.fill(f32::NAN);
        self.gathered.fill(f32::NAN);
    }
}

/// `softmax(scale q K^T) V` over the positions `first` to `positions[row]` of one request, or the last `window` of them.
pub(crate) struct Attend<'a, T, K> {
    pub(crate) kv: &'a K,
    /// Blocks of the request.
    pub(crate) blocks: &'a [i64],
    pub(crate) block_size: usize,
    pub(crate) head_dim: usize,
    /// The first position that is attended; groups begin where they would without it, but the first one here.
    pub(crate) first: usize,
    /// The last positions that a row sees, its own among them; `usize::MAX`: all.
    pub(crate) window: usize,
    /// `[rows]`, at least `first`.
    pub(crate) positions: &'a [i64],
    /// Query heads.
    pub(crate) heads: usize,
    /// `q[head * head_stride + row * ceil(head_dim / 16)..]`, zeros behind the last feature.
    pub(crate) q: &'a [Vector],
    pub(crate) head_stride: usize,
    pub(crate) scale: f32,
    pub(crate) scratch: &'a mut AttendScratch,
    /// `[rows, heads, head_dim]`
    pub(crate) out: &'a mut [f32],
    pub(crate) element: PhantomData<T>,
}

impl<T: Element, K: KvRead<T>> Kernel for Attend<'_, T, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.head_dim.is_multiple_of(LANES) { self.attend::<S, false>(s) } else { self.attend::<S, true>(s) }
    }
}

impl<T: Element, K: KvRead<T>> Attend<'_, T, K> {
    /// TAIL: heads end within a vector. Apart, because a call that pads it would take sums out of their registers.
    #[inline(always)]
    fn attend<S: Simd, const TAIL: bool>(self, s: S) {
        let (dim, heads, rows) = (self.head_dim, self.heads, self.positions.len());
        let vectors = dim.div_ceil(LANES);
        let scratch = self.scratch;
        scratch.sums[..rows * heads * vectors].fill([0.0; LANES]);
        scratch.largest[..rows * heads].fill(f32::NEG_INFINITY);
        scratch.total[..rows * heads].fill(0.0);
        let first_of = |position: i64| (position as usize + 1).saturating_sub(self.window).max(self.first);
        let last = self.positions.iter().copied().max().unwrap_or(-1);
        let begin = self.positions.iter().map(|&position| first_of(position)).min().unwrap_or(0);
        for group in (begin / GROUP * GROUP..(last + 1) as usize).step_by(GROUP) {
            let (start, end) = (group.max(begin), (group + GROUP).min(last as usize + 1));
            let (first, offset) = (start / self.block_size, start % self.block_size);
            let block = |i: usize| self.blocks[i] as usize;
            let (keys, values) = scratch.gathered.split_at_mut(GROUP * dim);
            let inside = offset + end - start <= self.block_size;
            if !inside {
                for (j, p) in (start..end).enumerate() {
                    let (block, from) = (block(p / self.block_size), p % self.block_size * dim);
                    copy(&self.kv.keys(block)[from..][..dim], &mut keys[j * dim..][..dim]);
                    copy(&self.kv.values(block)[from..][..dim], &mut values[j * dim..][..dim]);
                }
            }
            for (row, &position) in self.positions.iter().enumerate() {
                let (from, to) = (first_of(position).max(start), (position as usize + 1).min(end));
                if from >= to {
                    continue;
                }
                let seen = (from - start) * dim..(to - start) * dim;
                for head in 0..heads {
                    let i = row * heads + head;
                    let q = &self.q[head * self.head_stride + row * vectors..][..vectors];
                    let state = State {
                        sums: &mut scratch.sums[i * vectors..][..vectors],
                        largest: &mut scratch.largest[i],
                        total: &mut scratch.total[i],
                    };
                    if inside {
                        let keys = &self.kv.keys(block(first))[offset * dim..][seen.clone()];
                        let values = &self.kv.values(block(first))[offset * dim..][seen.clone()];
                        state.group::<S, _, TAIL>(s, q, self.scale, keys, values, dim);
                    } else {
                        state.group::<S, _, TAIL>(s, q, self.scale, &keys[seen.clone()], &values[seen.clone()], dim);
                    }
                }
            }
        }
        for (i, out) in self.out.chunks_exact_mut(dim).enumerate() {
            let total = scratch.total[i];
            for (out, sum) in out.iter_mut().zip(scratch.sums[i * vectors..][..vectors].as_flattened()) {
                *out = sum / total;
            }
        }
    }
}

fn copy<T: Element>(from: &[T], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.expand();
    }
}

/// Where the softmax of one row and head is.
struct State<'a> {
    sums: &'a mut [Vector],
    largest: &'a mut f32,
    total: &'a mut f32,
}

impl State<'_> {
    /// Takes in the next group: `keys` and `values` are `[n, dim]`, n <= 16.
    #[inline(always)]
    fn group<S: Simd, T: Element, const TAIL: bool>(
        self,
        s: S,
        q: &[Vector],
        scale: f32,
        keys: &[T],
        values: &[T],
        dim: usize,
    ) {
        let n = keys.len() / dim;
        let mut scores = [f32::NEG_INFINITY; LANES];
        let mut j = 0;
        if S::WIDE {
            while j + 8 <= n {
                let sums = dots::<S, T, 8, TAIL>(s, q, &keys[j * dim..][..8 * dim], dim);
                scores[j..j + 8].copy_from_slice(&s.sums8(sums));
                j += 8;
            }
        }
        while j + 4 <= n {
            let sums = dots::<S, T, 4, TAIL>(s, q, &keys[j * dim..][..4 * dim], dim);
            scores[j..j + 4].copy_from_slice(&s.sums4(sums));
            j += 4;
        }
        while j < n {
            scores[j] = s.sum(dots::<S, T, 1, TAIL>(s, q, &keys[j * dim..][..dim], dim)[0]);
            j += 1;
        }
        // Lanes past n stay -inf: their weights are exact zeros.
        let scaled = s.mul(s.load(&scores), s.splat(scale));
        s.store(scaled, &mut scores);
        let before = *self.largest;
        let group = largest(&scores);
        let after = if group > before { group } else { before };
        let mut weights = [0.0; LANES];
        let exps = exp(s, s.sub(scaled, s.splat(after)));
        s.store(exps, &mut weights);
        // e^0 is 1 and products with it change nothing, so they are left out where the largest score stays.
        if group > before {
            let mut lanes = [0.0; LANES];
            s.store(exp(s, s.splat(before - after)), &mut lanes);
            let fade = s.splat(lanes[0]);
            *self.total *= lanes[0];
            for sum in self.sums.iter_mut() {
                s.store(s.mul(s.load(sum), fade), sum);
            }
        }
        *self.largest = after;
        *self.total += s.sum(exps);
        let mut v = 0;
        if S::WIDE {
            while v + 4 <= self.sums.len() {
                weigh::<S, T, 4, TAIL>(s, &weights[..n], values, dim, v, self.sums);
                v += 4;
            }
        }
        while v + 2 <= self.sums.len() {
            weigh::<S, T, 2, TAIL>(s, &weights[..n], values, dim, v, self.sums);
            v += 2;
        }
        if v < self.sums.len() {
            weigh::<S, T, 1, TAIL>(s, &weights[..n], values, dim, v, self.sums);
        }
    }
}

/// The largest lane; lanes i with i + 8, then i + 4, i + 2, i + 1.
#[inline(always)]
fn largest(x: &Vector) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let (mut eight, mut four) = ([0.0; 8], [0.0; 4]);
    for i in 0..8 {
        eight[i] = larger(x[i], x[i + 8]);
    }
    for i in 0..4 {
        four[i] = larger(eight[i], eight[i + 4]);
    }
    larger(larger(four[0], four[2]), larger(four[1], four[3]))
}

/// Lanes of the products of q with P keys; features are summed in order, by their number modulo 16.
#[inline(always)]
fn dots<S: Simd, T: Element, const P: usize, const TAIL: bool>(
    s: S,
    q: &[Vector],
    keys: &[T],
    dim: usize,
) -> [S::V; P] {
    let whole = dim / LANES;
    let mut k: [&[[T; LANES]]; P] = [&[]; P];
    let mut tails: [&[T]; P] = [&[]; P];
    for j in 0..P {
        let (vectors, tail) = keys[j * dim..][..dim].as_chunks();
        (k[j], tails[j]) = (&vectors[..whole], tail);
    }
    let body = &q[..whole];
    let mut sums = [s.splat(0.0); P];
    for i in 0..whole {
        let q = s.load(&body[i]);
        for j in 0..P {
            sums[j] = s.fma(T::load(s, &k[j][i]), q, sums[j]);
        }
    }
    if TAIL {
        let q = s.load(&q[whole]);
        for j in 0..P {
            sums[j] = s.fma(T::load_tail(s, tails[j]), q, sums[j]);
        }
    }
    sums
}

/// Adds the weighted values of features 16 v to 16 (v + C): the even positions' sum and the odd ones', then both.
#[inline(always)]
fn weigh<S: Simd, T: Element, const C: usize, const TAIL: bool>(
    s: S,
    weights: &[f32],
    values: &[T],
    dim: usize,
    v: usize,
    sums: &mut [Vector],
) {
    let (mut even, mut odd) = ([s.splat(0.0); C], [s.splat(0.0); C]);
    let (pairs, last) = weights.as_chunks::<2>();
    let mut rows = values.chunks_exact(2 * dim);
    for (pair, rows) in pairs.iter().zip(rows.by_ref()) {
        let (first, second) = rows.split_at(dim);
        add_row::<S, T, C, TAIL>(s, pair[0], &first[v * LANES..], &mut even);
        add_row::<S, T, C, TAIL>(s, pair[1], &second[v * LANES..], &mut odd);
    }
    if let [weight] = last {
        add_row::<S, T, C, TAIL>(s, *weight, &rows.remainder()[v * LANES..], &mut even);
    }
    for (c, sum) in sums[v..v + C].iter_mut().enumerate() {
        s.store(s.add(s.load(sum), s.add(even[c], odd[c])), sum);
    }
}

#[inline(always)]
fn add_row<S: Simd, T: Element, const C: usize, const TAIL: bool>(s: S, weight: f32, row: &[T], sums: &mut [S::V; C]) {
    let weight = s.splat(weight);
    if TAIL {
        for c in 0..C {
            let row = &row[c * LANES..];
            sums[c] = s.fma(weight, T::load_tail(s, &row[..row.len().min(LANES)]), sums[c]);
        }
    } else {
        let (vectors, _) = row[..C * LANES].as_chunks::<LANES>();
        for c in 0..C {
            sums[c] = s.fma(weight, T::load(s, &vectors[c]), sums[c]);
        }
    }
}
