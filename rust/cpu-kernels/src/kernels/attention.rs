//! Causal attention of the rows of one request over one KV head, in groups of 16 positions aligned at position 0.
//!
//! The order of a row's sums depends on its position alone. Groups are added in order (an online softmax). Within a
//! group, every second position from the first one that the row attends to is summed, the others are summed separately,
//! and then both sums are added. Positions after the row's own and before its window are never read.

// Loops over registers, which unroll.
#![allow(clippy::needless_range_loop)]

use super::element::Element;
use super::exp::exp;
use crate::isa::{Isa, Kernel, LANES, Simd, Vector};
use crate::memory::{Bf16, E4m3, E5m2, PlanesMut, Vectors};

/// Number of positions in a group, which are attended to together.
pub(crate) const GROUP: usize = LANES;

/// Type that K and V are stored as: fp32, bf16 or 8-bit floats.
pub trait KvElement: Copy + Send + Sync + 'static {
    /// Whether the elements are codes that stand for a number times a scale.
    const CODES: bool;
    /// Writes the numbers `x` to `out`, each as the nearest element. Codes stand for numbers divided by `scale`; other types ignore it.
    fn write(x: &[f32], scale: f32, out: &mut [Self]);
    /// Runs an attention with these instructions.
    fn attend(attend: Attend<'_, Self>, isa: Isa);
}

macro_rules! kv_element {
    ($element:ty, $codes:literal, $nearest:expr) => {
        impl KvElement for $element {
            const CODES: bool = $codes;

            fn write(x: &[f32], scale: f32, out: &mut [Self]) {
                let nearest: fn(f32) -> Self = $nearest;
                for (out, &x) in out.iter_mut().zip(x) {
                    *out = nearest(if $codes { x / scale } else { x });
                }
            }

            fn attend(attend: Attend<'_, Self>, isa: Isa) {
                attend.run(isa);
            }
        }
    };
}

kv_element!(f32, false, |x| x);
kv_element!(Bf16, false, Bf16::from_f32);
kv_element!(E4m3, true, E4m3::from_f32);
kv_element!(E5m2, true, E5m2::from_f32);

/// Keys and values of one KV head: two planes of a KV cache `[blocks, planes, block_size * head_dim]`.
pub enum KvHead<'a, T> {
    /// Planes that only one thread uses.
    Own {
        /// The thread's planes.
        planes: &'a PlanesMut<'a, T>,
        /// Plane of the keys.
        key: usize,
        /// Plane of the values.
        value: usize,
    },
    /// Planes that all threads read.
    Shared {
        /// All planes.
        layer: &'a [T],
        /// Number of blocks, of planes, and of elements in a plane.
        sizes: [usize; 3],
        /// Plane of the keys.
        key: usize,
        /// Plane of the values.
        value: usize,
    },
}

impl<T> KvHead<'_, T> {
    /// Returns the keys of a block, `[block_size, head_dim]`.
    #[inline(always)]
    fn keys(&self, block: usize) -> &[T] {
        let (Self::Own { key, .. } | Self::Shared { key, .. }) = self;
        self.plane(block, *key)
    }

    /// Returns the values of a block, `[block_size, head_dim]`.
    #[inline(always)]
    fn values(&self, block: usize) -> &[T] {
        let (Self::Own { value, .. } | Self::Shared { value, .. }) = self;
        self.plane(block, *value)
    }

    #[inline(always)]
    fn plane(&self, block: usize, plane: usize) -> &[T] {
        match self {
            Self::Own { planes, .. } => planes.plane(block, plane),
            Self::Shared { layer, sizes, .. } => &layer[(block * sizes[1] + plane) * sizes[2]..][..sizes[2]],
        }
    }
}

/// Memory that an attention needs, for up to `rows` rows and `heads` query heads.
pub struct AttendScratch {
    /// Weighted sums of values, `[rows, heads, ceil(head_dim / 16)]`.
    sums: Vectors,
    /// Largest score so far, `[rows, heads]`.
    largest: Vec<f32>,
    /// Sum of weights so far, `[rows, heads]`.
    total: Vec<f32>,
    /// Keys and values of a group that spans several blocks, `[2, 16, head_dim]`.
    gathered: Vec<f32>,
}

impl AttendScratch {
    /// Allocates memory for `rows` rows and `heads` query heads of `head_dim` features.
    pub fn new(rows: usize, heads: usize, head_dim: usize) -> Self {
        Self {
            sums: Vectors::new(rows * heads * head_dim.div_ceil(LANES)),
            largest: vec![0.0; rows * heads],
            total: vec![0.0; rows * heads],
            gathered: vec![0.0; 2 * GROUP * head_dim],
        }
    }

    /// Fills the memory with NaN, for tests.
    pub fn poison(&mut self) {
        self.sums.fill([f32::NAN; LANES]);
        self.largest.fill(f32::NAN);
        self.total.fill(f32::NAN);
        self.gathered.fill(f32::NAN);
    }
}

/// Computes `softmax(scale q K^T) V` over the positions `first` to `positions[row]` of one request, or the last
/// `window` of them.
pub struct Attend<'a, T> {
    /// Keys and values.
    pub kv: KvHead<'a, T>,
    /// Blocks of the request.
    pub blocks: &'a [i64],
    /// Number of positions in a block.
    pub block_size: usize,
    /// Number of features in a head.
    pub head_dim: usize,
    /// First position that is attended to. Groups stay aligned at position 0, so the first group may be shorter.
    pub first: usize,
    /// Number of last positions that a row attends to, its own included; `usize::MAX` for all.
    pub window: usize,
    /// Whether the window ends where the row's chunk begins. Chunks have `window` positions, the first from position 0
    /// on.
    pub chunked: bool,
    /// Position of each row, `[rows]`, at least `first`.
    pub positions: &'a [i64],
    /// Number of query heads.
    pub heads: usize,
    /// Attention sinks, `[heads]`: an extra score per head, which comes first and has a value of zero.
    pub sinks: Option<&'a [f32]>,
    /// Queries: `q[head * head_stride + row * ceil(head_dim / 16)..]`, with zeros after the last feature.
    pub q: &'a [Vector],
    /// Distance of two heads in `q`.
    pub head_stride: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Memory for as many rows and heads.
    pub scratch: &'a mut AttendScratch,
    /// Output, `[rows, heads, head_dim]`.
    pub out: &'a mut [f32],
}

impl<T> Attend<'_, T> {
    /// Runs the attention. Only [`Group`] is compiled for every instruction set, once for each type of element.
    /// Gathering and the final division are not. With blocks of a multiple of 16 positions nothing is gathered.
    fn run(self, isa: Isa)
    where
        T: Element,
    {
        let (dim, heads, rows) = (self.head_dim, self.heads, self.positions.len());
        let vectors = dim.div_ceil(LANES);
        let scratch = self.scratch;
        scratch.sums[..rows * heads * vectors].fill([0.0; LANES]);
        match self.sinks {
            None => {
                scratch.largest[..rows * heads].fill(f32::NEG_INFINITY);
                scratch.total[..rows * heads].fill(0.0);
            }
            Some(sinks) => {
                scratch.largest[..rows * heads].chunks_exact_mut(heads).for_each(|row| row.copy_from_slice(sinks));
                scratch.total[..rows * heads].fill(1.0);
            }
        }
        let first_of = |position: i64| match position as usize {
            position if self.chunked => (position - position % self.window).max(self.first),
            position => (position + 1).saturating_sub(self.window).max(self.first),
        };
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
            let seen_by = |row: usize| {
                let position = self.positions[row];
                first_of(position).max(start)..(position as usize + 1).min(end)
            };
            let mut next = 0;
            while next < rows {
                // Rows that see the same positions go together.
                let (first_row, seen) = (next, seen_by(next));
                next += 1;
                while next < rows && seen_by(next) == seen {
                    next += 1;
                }
                if seen.is_empty() {
                    continue;
                }
                let seen = (seen.start - start) * dim..(seen.end - start) * dim;
                let units = Units {
                    first: first_row * heads,
                    end: next * heads,
                    heads,
                    dim,
                    q: self.q,
                    head_stride: self.head_stride,
                    scale: self.scale,
                    sums: &mut scratch.sums,
                    largest: &mut scratch.largest,
                    total: &mut scratch.total,
                };
                if inside {
                    let keys = &self.kv.keys(block(first))[offset * dim..][seen.clone()];
                    let values = &self.kv.values(block(first))[offset * dim..][seen];
                    isa.run(Group { units, keys, values });
                } else {
                    isa.run(Group { units, keys: &keys[seen.clone()], values: &values[seen] });
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

/// Pairs of row and head that attend to the same positions of a group, with the places of their softmax.
struct Units<'a> {
    /// Number of the first pair, `row * heads + head`.
    first: usize,
    end: usize,
    heads: usize,
    dim: usize,
    q: &'a [Vector],
    head_stride: usize,
    scale: f32,
    sums: &'a mut [Vector],
    largest: &'a mut [f32],
    total: &'a mut [f32],
}

/// Kernel that adds a group of positions to the sums of pairs. `keys` and `values` are `[n, dim]`, n <= 16.
struct Group<'a, T> {
    units: Units<'a>,
    keys: &'a [T],
    values: &'a [T],
}

impl<T: Element> Kernel for Group<'_, T> {
    type Output = ();

    /// Several pairs are computed at once, so that they share loads and do not wait for exponentials. A pair's sums do
    /// not depend on how many pairs are computed at once. Heads that end within a vector are computed pair by pair:
    /// they are rare, and padding vectors would take sums out of their registers.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { mut units, keys, values } = self;
        if !units.dim.is_multiple_of(LANES) {
            while units.first < units.end {
                units.some::<S, T, 1, true>(s, keys, values);
            }
            return;
        }
        if S::WIDE {
            while units.end - units.first >= 4 {
                units.some::<S, T, 4, false>(s, keys, values);
            }
            if units.end - units.first >= 2 {
                units.some::<S, T, 2, false>(s, keys, values);
            }
        }
        while units.first < units.end {
            units.some::<S, T, 1, false>(s, keys, values);
        }
    }
}

impl Units<'_> {
    /// Adds the group of positions for the first U pairs. With TAIL, heads end within a vector.
    #[inline(always)]
    fn some<S: Simd, T: Element, const U: usize, const TAIL: bool>(&mut self, s: S, keys: &[T], values: &[T]) {
        let dim = self.dim;
        let (n, vectors, of) = (keys.len() / dim, dim.div_ceil(LANES), self.first..self.first + U);
        self.first += U;
        let mut q: [&[Vector]; U] = [&[]; U];
        for (u, unit) in of.clone().enumerate() {
            q[u] = &self.q[unit % self.heads * self.head_stride + unit / self.heads * vectors..][..vectors];
        }
        // Lanes past n stay -inf: their weights are exact zeros.
        let mut scores = [[f32::NEG_INFINITY; LANES]; U];
        let mut j = 0;
        if S::WIDE && U <= 2 {
            while j + 8 <= n {
                let sums = dots::<S, T, U, 8, TAIL>(s, &q, &keys[j * dim..][..8 * dim], dim);
                for u in 0..U {
                    scores[u][j..j + 8].copy_from_slice(&s.sums8(sums[u]));
                }
                j += 8;
            }
        }
        while j + 4 <= n {
            let sums = dots::<S, T, U, 4, TAIL>(s, &q, &keys[j * dim..][..4 * dim], dim);
            for u in 0..U {
                scores[u][j..j + 4].copy_from_slice(&s.sums4(sums[u]));
            }
            j += 4;
        }
        while j < n {
            let sums = dots::<S, T, U, 1, TAIL>(s, &q, &keys[j * dim..][..dim], dim);
            for u in 0..U {
                scores[u][j] = s.sum(sums[u][0]);
            }
            j += 1;
        }
        let (largest, total) = (&mut self.largest[of.clone()], &mut self.total[of.clone()]);
        let sums = &mut self.sums[of.start * vectors..of.end * vectors];
        let mut scaled = [s.splat(0.0); U];
        let (mut grown, mut differences) = (false, [0.0; LANES]);
        for u in 0..U {
            scaled[u] = s.mul(s.load(&scores[u]), s.splat(self.scale));
            let (before, group) = (largest[u], s.largest(scaled[u]));
            if group > before {
                (grown, differences[u], largest[u]) = (true, before - group, group);
            }
        }
        let mut weights = [[0.0; LANES]; U];
        let mut exps = [s.splat(0.0); U];
        for u in 0..U {
            exps[u] = exp(s, s.sub(scaled[u], s.splat(largest[u])));
            s.store(exps[u], &mut weights[u]);
        }
        if grown {
            // e^0 is 1 and products with it change nothing, where the largest score stays.
            let mut fades = [0.0; LANES];
            s.store(exp(s, s.load(&differences)), &mut fades);
            for (u, sums) in sums.chunks_exact_mut(vectors).enumerate() {
                total[u] *= fades[u];
                for sum in sums {
                    s.store(s.mul(s.load(sum), s.splat(fades[u])), sum);
                }
            }
        }
        for u in 0..U {
            total[u] += s.sum(exps[u]);
        }
        let mut seen: [&[f32]; U] = [&[]; U];
        for u in 0..U {
            seen[u] = &weights[u][..n];
        }
        let mut v = 0;
        if S::WIDE && U <= 2 {
            while v + 4 <= vectors {
                weigh::<S, T, U, 4, TAIL>(s, &seen, values, dim, v, sums);
                v += 4;
            }
        }
        while v + 2 <= vectors {
            weigh::<S, T, U, 2, TAIL>(s, &seen, values, dim, v, sums);
            v += 2;
        }
        if v < vectors {
            weigh::<S, T, U, 1, TAIL>(s, &seen, values, dim, v, sums);
        }
    }
}

/// Returns lanes of the products of U queries with P keys; features are summed in order, by their number modulo 16.
#[inline(always)]
fn dots<S: Simd, T: Element, const U: usize, const P: usize, const TAIL: bool>(
    s: S,
    q: &[&[Vector]; U],
    keys: &[T],
    dim: usize,
) -> [[S::V; P]; U] {
    let whole = dim / LANES;
    let mut k: [&[[T; LANES]]; P] = [&[]; P];
    let mut tails: [&[T]; P] = [&[]; P];
    for j in 0..P {
        let (vectors, tail) = keys[j * dim..][..dim].as_chunks();
        (k[j], tails[j]) = (&vectors[..whole], tail);
    }
    let mut body: [&[Vector]; U] = [&[]; U];
    for u in 0..U {
        body[u] = &q[u][..whole];
    }
    let mut sums = [[s.splat(0.0); P]; U];
    for i in 0..whole {
        let mut x = [s.splat(0.0); U];
        for u in 0..U {
            x[u] = s.load(&body[u][i]);
        }
        for j in 0..P {
            let k = T::load(s, &k[j][i]);
            for u in 0..U {
                sums[u][j] = s.fma(k, x[u], sums[u][j]);
            }
        }
    }
    if TAIL {
        for j in 0..P {
            let k = T::load_tail(s, tails[j]);
            for u in 0..U {
                sums[u][j] = s.fma(k, s.load(&q[u][whole]), sums[u][j]);
            }
        }
    }
    sums
}

/// Adds the weighted values of features 16 v to 16 (v + C) to the sums `[U, ceil(dim / 16)]`: sums of even and of odd
/// positions first, then their sum.
#[inline(always)]
fn weigh<S: Simd, T: Element, const U: usize, const C: usize, const TAIL: bool>(
    s: S,
    weights: &[&[f32]; U],
    values: &[T],
    dim: usize,
    v: usize,
    sums: &mut [Vector],
) {
    let (mut even, mut odd) = ([[s.splat(0.0); C]; U], [[s.splat(0.0); C]; U]);
    let n = weights[0].len();
    for j in (0..n / 2 * 2).step_by(2) {
        let (first, second) = values[j * dim..][..2 * dim].split_at(dim);
        add_row::<S, T, U, C, TAIL>(s, weights, j, &first[v * LANES..], &mut even);
        add_row::<S, T, U, C, TAIL>(s, weights, j + 1, &second[v * LANES..], &mut odd);
    }
    if n % 2 == 1 {
        add_row::<S, T, U, C, TAIL>(s, weights, n - 1, &values[(n - 1) * dim..][v * LANES..dim], &mut even);
    }
    let vectors = sums.len() / U;
    for u in 0..U {
        for (c, sum) in sums[u * vectors + v..][..C].iter_mut().enumerate() {
            s.store(s.add(s.load(sum), s.add(even[u][c], odd[u][c])), sum);
        }
    }
}

/// Adds the weighted features of one position to the sums.
#[inline(always)]
fn add_row<S: Simd, T: Element, const U: usize, const C: usize, const TAIL: bool>(
    s: S,
    weights: &[&[f32]; U],
    position: usize,
    row: &[T],
    sums: &mut [[S::V; C]; U],
) {
    let mut x = [s.splat(0.0); C];
    if TAIL {
        for c in 0..C {
            let row = &row[c * LANES..];
            x[c] = T::load_tail(s, &row[..row.len().min(LANES)]);
        }
    } else {
        let (vectors, _) = row[..C * LANES].as_chunks::<LANES>();
        for c in 0..C {
            x[c] = T::load(s, &vectors[c]);
        }
    }
    for u in 0..U {
        let weight = s.splat(weights[u][position]);
        for c in 0..C {
            sums[u][c] = s.fma(weight, x[c], sums[u][c]);
        }
    }
}
