//! Who computes what: whole output features and heads, cut evenly. A row's sums do not hang on it.

use crate::isa::Vector;
use crate::layer::ExpertSizes;
use crate::pass::{MAX_TILE_ROWS, Pass};
use crate::weights::ModelShape;

/// Bounds of the participants' shares: participant t has `bounds[t]..bounds[t + 1]`.
pub(super) struct Shares {
    pub(super) threads: usize,
    /// One each.
    pub(super) each: Vec<usize>,
    /// Of the residual stream's features.
    pub(super) hidden: Vec<usize>,
    /// Of the features between gate, up and down, by sixteens.
    pub(super) intermediate: Vec<usize>,
    /// Of an expert's features between gate, up and down, by sixteens.
    pub(super) expert: Vec<usize>,
    /// Of a router's logits.
    pub(super) router: Vec<usize>,
    /// Of query heads.
    pub(super) q: Vec<usize>,
    /// Of key heads.
    pub(super) k: Vec<usize>,
    /// Of value heads, behind the key heads.
    pub(super) v: Vec<usize>,
    /// Whether those who compute a KV head and its queries attend them, too: then no thread waits in between.
    pub(super) fused: bool,
    /// Of vectors of q, for a tile's rows.
    pub(super) q_vectors: Vec<usize>,
    /// Of (KV head, row), for a tile's rows.
    pub(super) units: Vec<usize>,
    /// Of what attention gives, for a tile's rows.
    pub(super) attended: Vec<usize>,
    /// Of the residual stream of a tile's rows, by whole rows.
    pub(super) rows: Vec<usize>,
    /// Of the features of q, k and v.
    pub(super) qkv: Vec<usize>,
    /// Of the ids that are asked for.
    pub(super) ids: Vec<usize>,
    shape: ModelShape,
    /// The most positions that a row attends.
    attended_at_most: usize,
}

/// `parts` ranges of 0..n in multiples of `unit`, as even as they go.
fn cut(bounds: &mut [usize], n: usize, unit: usize) {
    let (units, parts) = (n.div_ceil(unit), bounds.len() - 1);
    for (i, bound) in bounds.iter_mut().enumerate() {
        *bound = (units * i / parts * unit).min(n);
    }
}

impl Shares {
    /// `window`: the most positions that a row attends, None: all.
    pub(super) fn new(shape: ModelShape, window: Option<usize>, experts: Option<ExpertSizes>, threads: usize) -> Self {
        let bounds = |n: usize, unit: usize| {
            let mut bounds = vec![0; threads + 1];
            cut(&mut bounds, n, unit);
            bounds
        };
        let (heads, kv_heads) = (shape.num_heads, shape.num_kv_heads);
        let fused = kv_heads.is_multiple_of(threads);
        let k = bounds(kv_heads, 1);
        let (q, k, v): (Vec<_>, Vec<_>, Vec<_>) = if fused {
            let v = k.iter().map(|head| kv_heads + head).collect();
            (k.iter().map(|head| head * shape.group()).collect(), k, v)
        } else {
            let all = bounds(heads + 2 * kv_heads, 1);
            let within = |first: usize, len: usize| all.iter().map(move |&unit| unit.clamp(first, first + len) - first);
            (
                within(0, heads).collect(),
                within(heads, kv_heads).collect(),
                within(heads + kv_heads, kv_heads).map(|head| kv_heads + head).collect(),
            )
        };
        Self {
            threads,
            each: bounds(threads, 1),
            // A cache line is written by one of them only.
            hidden: bounds(shape.hidden_size, 16),
            // Pairs of bf16 numbers lie by 32.
            intermediate: bounds(shape.intermediate_size.div_ceil(16), 2),
            expert: bounds(experts.map_or(0, |sizes| sizes.intermediate.div_ceil(16)), 2),
            router: bounds(experts.map_or(0, |sizes| sizes.count), 8),
            q,
            k,
            v,
            fused,
            q_vectors: vec![0; threads + 1],
            units: vec![0; threads + 1],
            attended: vec![0; threads + 1],
            rows: vec![0; threads + 1],
            qkv: bounds((heads + 2 * kv_heads) * shape.head_dim, 16),
            ids: vec![0; threads + 1],
            shape,
            attended_at_most: window.unwrap_or(usize::MAX),
        }
    }

    /// Sets what hangs on the rows of a tile: attention is cut by what its contexts cost.
    pub(super) fn set_tile(&mut self, tile: &Pass<'_>) {
        let rows = tile.len();
        let shape = &self.shape;
        let width = shape.group() * shape.head_dim;
        let vectors = shape.head_dim.div_ceil(size_of::<Vector>() / size_of::<f32>());
        for (vector, head) in self.q_vectors.iter_mut().zip(&self.q) {
            *vector = head * rows * vectors;
        }
        if self.fused {
            for (unit, head) in self.units.iter_mut().zip(&self.k) {
                *unit = head * rows;
            }
        } else {
            let mut costs = [0; MAX_TILE_ROWS + 1];
            for row in 0..rows {
                costs[row + 1] = costs[row] + 32 + self.attended_at_most.min((tile.positions[row] + 1) as usize);
            }
            for (i, unit) in self.units.iter_mut().enumerate() {
                let target = costs[rows] * shape.num_kv_heads * i / self.threads;
                let (head, within) = (target / costs[rows], target % costs[rows]);
                *unit = head * rows + costs[..=rows].partition_point(|&cost| cost < within);
            }
        }
        for (bound, unit) in self.attended.iter_mut().zip(&self.units) {
            *bound = unit * width;
        }
        cut(&mut self.rows, rows * shape.hidden_size, shape.hidden_size);
    }

    /// Sets how many ids are asked for.
    pub(super) fn set_ids(&mut self, num_ids: usize) {
        cut(&mut self.ids, num_ids, 16);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(heads: usize, kv_heads: usize) -> ModelShape {
        ModelShape {
            vocab_size: 100,
            hidden_size: 72,
            intermediate_size: 130,
            num_heads: heads,
            num_kv_heads: kv_heads,
            head_dim: 12,
            rms_norm_eps: 1e-6,
        }
    }

    #[test]
    fn shares_cover_everything_once() {
        let sizes = ExpertSizes { count: 21, per_token: 2, intermediate: 50 };
        for threads in 1..20 {
            for (heads, kv_heads) in [(4, 2), (6, 3), (1, 1), (32, 8)] {
                let mut shares = Shares::new(shape(heads, kv_heads), None, Some(sizes), threads);
                let positions: Vec<i64> = (0..7).map(|i| i * i * 100 - 1).collect();
                let zeros = [0; 7];
                let tile = Pass {
                    tokens: &zeros,
                    positions: &positions,
                    slots: &zeros,
                    entries: &[0; 7],
                    max_blocks: 1,
                    ..Pass::default()
                };
                shares.set_tile(&tile);
                shares.set_ids(77);
                let whole = [
                    (&shares.hidden, 0, 72),
                    (&shares.intermediate, 0, 9),
                    (&shares.q, 0, heads),
                    (&shares.k, 0, kv_heads),
                    (&shares.v, kv_heads, 2 * kv_heads),
                    (&shares.units, 0, 7 * kv_heads),
                    (&shares.attended, 0, 7 * heads * 12),
                    (&shares.rows, 0, 7 * 72),
                    (&shares.qkv, 0, (heads + 2 * kv_heads) * 12),
                    (&shares.expert, 0, 4),
                    (&shares.router, 0, 21),
                    (&shares.ids, 0, 77),
                ];
                for (bounds, first, last) in whole {
                    assert_eq!((bounds[0], bounds[threads]), (first, last), "{threads} threads, {heads} heads");
                    assert!(bounds.is_sorted());
                }
            }
        }
    }
}
