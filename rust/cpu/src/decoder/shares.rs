//! Distribution of a phase's work among the threads of the pool: whole output features and heads, split evenly into a
//! share per thread and then into pieces. A row's sums do not depend on the split.

use super::CHUNK;
use super::scratch::RUN;
use crate::layer::ExpertSizes;
use crate::pass::{MAX_TILE_ROWS, Pass};
use crate::shape::{ModelShape, StateShape};
use specrs_cpu_kernels::{LANES, MAX_PARTS};
use std::ops::Range;

/// Split of a phase's work into pieces, and the pieces with which each thread begins.
pub(super) struct Cut {
    /// Bounds of the pieces: piece i is `bounds[i]..bounds[i + 1]`.
    pub(super) bounds: Vec<usize>,
    /// First piece of each thread: thread t begins with the pieces `first[t]..first[t + 1]`.
    pub(super) first: Vec<usize>,
}

impl Cut {
    /// Makes an empty split with room for any number of pieces.
    fn new() -> Self {
        Self { bounds: Vec::with_capacity(MAX_PARTS + 1), first: Vec::with_capacity(MAX_PARTS + 1) }
    }

    /// Splits 0..n into one share per thread, as even as possible, and each share into pieces of at most `most`.
    /// All are multiples of `unit`.
    fn even(n: usize, unit: usize, most: usize, participants: usize) -> Self {
        let mut made = Self::new();
        made.set_even(n, unit, most, participants);
        made
    }

    fn set_even(&mut self, n: usize, unit: usize, most: usize, participants: usize) {
        let units = n.div_ceil(unit);
        let share = |t: usize| (units * t / participants * unit).min(n);
        self.set((0..participants).map(|t| share(t + 1)), |start| start + most, unit);
    }

    /// Splits shares that end at `ends` into pieces. A piece that begins at `start` ends at `end_of(start)` or before.
    /// Pieces are longer if there would be more than [`MAX_PARTS`] of them.
    fn set(&mut self, ends: impl ExactSizeIterator<Item = usize>, end_of: impl Fn(usize) -> usize, unit: usize) {
        let most = MAX_PARTS / ends.len();
        for bounds in [&mut self.bounds, &mut self.first] {
            bounds.clear();
            bounds.push(0);
        }
        let mut start = 0;
        for end in ends {
            let least = (end - start).div_ceil(most).next_multiple_of(unit);
            while start < end {
                start = end_of(start).max(start + least).min(end);
                self.bounds.push(start);
            }
            self.first.push(self.bounds.len() - 1);
        }
    }

    /// Returns the split in which each bound `x` is replaced by `bound(x)`. Threads begin with the same pieces.
    fn map(&self, bound: impl Fn(usize) -> usize) -> Self {
        Self { bounds: self.bounds.iter().map(|&at| bound(at)).collect(), first: self.first.clone() }
    }

    pub(super) fn piece(&self, piece: usize) -> Range<usize> {
        self.bounds[piece]..self.bounds[piece + 1]
    }
}

/// Split of the work of every phase of a pass among `participants` threads.
pub(super) struct Shares {
    pub(super) participants: usize,
    /// Bounds of the threads' own memory: one element each.
    pub(super) each: Vec<usize>,
    /// Split of the residual stream's features.
    pub(super) hidden: Cut,
    /// Split of the residual stream's features into longer pieces, for each of which every expert is read once.
    pub(super) mixed: Cut,
    /// Split of the MLP's intermediate features, which gate and up output and down reads, in vectors of sixteen.
    pub(super) intermediate: Cut,
    /// Split of an expert's intermediate features, in vectors of sixteen.
    pub(super) expert: Cut,
    /// Split of a shared expert's intermediate features, in vectors of sixteen.
    pub(super) shared: Cut,
    /// Split of a router's logits.
    pub(super) router: Cut,
    /// Split of the query heads.
    pub(super) q: Cut,
    /// Split of the key heads, into the same pieces as `q`.
    pub(super) k: Cut,
    /// Split of the value heads into the same pieces as `q`. Value heads are numbered after the key heads.
    pub(super) v: Cut,
    /// Whether a piece is a KV head with its queries, which one thread projects and attends in the same phase.
    /// Then no thread waits in between.
    pub(super) fused: bool,
    /// Bounds of the pieces of `q` in vectors, for a tile's rows.
    pub(super) q_vectors: Vec<usize>,
    /// Split of the units of attention, which are pairs (KV head, row), for a tile's rows. If `fused`, the pieces are
    /// those of `q`.
    pub(super) units: Cut,
    /// Bounds of the pieces of `units` in the output of attention, for a tile's rows.
    pub(super) attended: Vec<usize>,
    /// Split of the rows of a tile, for phases that compute whole rows.
    pub(super) rows: Cut,
    /// Split of the features of q, k and v.
    pub(super) qkv: Cut,
    /// Split of the outputs of the input projection of a layer with a state.
    pub(super) state_inputs: Cut,
    /// Split of the parts of a layer's state.
    pub(super) state_parts: Cut,
    /// Bounds of the pieces of `state_parts` in the inputs of the output projection.
    pub(super) state_outputs: Vec<usize>,
    /// Bounds of the pieces of `state_parts` in a row's base states of a layer.
    pub(super) state_bases: Vec<usize>,
    /// Split of the token ids whose logits are requested.
    pub(super) ids: Cut,
    /// Split of a layer's embedding of a token, in vectors of sixteen features.
    pub(super) addition: Cut,
    /// Split of the outputs of the projection to all layers' embeddings.
    pub(super) layer_embedding: Cut,
    /// Split of the state that an assistant's pass leaves to the next.
    pub(super) states: Cut,
    shape: ModelShape,
    /// Maximum number of positions that a row attends.
    attended_at_most: usize,
}

impl Shares {
    /// Splits the work of a model's phases among `participants` threads: output features, heads, experts and ids. For
    /// attention, whose work depends on positions, `window` is the maximum number that a row attends; `None` for all.
    pub(super) fn new(
        shape: ModelShape,
        window: Option<usize>,
        experts: Option<ExpertSizes>,
        state: Option<StateShape>,
        participants: usize,
    ) -> Self {
        let at_once = state.map_or(1, |state| state.parts_at_once());
        let state_parts = Cut::even(state.map_or(0, |state| state.parts()), 1, at_once, participants);
        let of_parts = |bound: &dyn Fn(StateShape, usize) -> usize| {
            let bounds = state_parts.bounds.iter();
            bounds.map(|&part| state.map_or(0, |state| bound(state, part))).collect()
        };
        let (heads, kv_heads) = (shape.num_heads, shape.num_kv_heads);
        let even = |n: usize, unit: usize, most: usize| Cut::even(n, unit, most, participants);
        let fused = kv_heads.is_multiple_of(participants);
        let (q, k, v) = if fused {
            let k = even(kv_heads, 1, 1);
            (k.map(|head| head * shape.group()), k.map(|head| head), k.map(|head| kv_heads + head))
        } else {
            let all = even(heads + 2 * kv_heads, 1, (CHUNK / shape.head_dim).max(1));
            let within = |first: usize, len: usize| all.map(|head| head.clamp(first, first + len) - first);
            let v = within(heads + kv_heads, kv_heads);
            (within(0, heads), within(heads, kv_heads), v.map(|head| kv_heads + head))
        };
        Self {
            participants,
            each: (0..=participants).collect(),
            // A cache line is written by one of them only.
            hidden: even(shape.hidden_size, 16, CHUNK),
            mixed: even(shape.hidden_size, 16, 4 * CHUNK),
            // Pairs of bf16 numbers lie by 32.
            intermediate: even(shape.intermediate_size.div_ceil(LANES), 2, CHUNK / LANES),
            expert: even(experts.map_or(0, |sizes| sizes.intermediate.div_ceil(LANES)), 2, 4 * CHUNK / LANES),
            shared: even(experts.map_or(0, |sizes| sizes.shared.div_ceil(LANES)), 2, CHUNK / LANES),
            router: even(experts.map_or(0, |sizes| sizes.count), 8, CHUNK),
            q_vectors: vec![0; q.bounds.len()],
            q,
            k,
            v,
            fused,
            units: Cut::new(),
            attended: Vec::with_capacity(MAX_PARTS + 1),
            rows: Cut::new(),
            qkv: even((heads + 2 * kv_heads) * shape.head_dim, 16, CHUNK),
            state_inputs: Cut::even(state.map_or(0, |state| state.outputs()), 16, CHUNK, participants),
            state_outputs: of_parts(&|state, part| state.first_input(part)),
            state_bases: of_parts(&|state, part| part * state.base_len()),
            state_parts,
            ids: Cut::new(),
            addition: Cut::new(),
            layer_embedding: Cut::new(),
            states: Cut::new(),
            shape,
            attended_at_most: window.unwrap_or(usize::MAX),
        }
    }

    /// Returns the splits for a model whose layers add embeddings. `size` is the number of features for one layer,
    /// `all` for all layers.
    pub(super) fn with_added(mut self, (size, all): (usize, usize)) -> Self {
        self.addition.set_even(size.div_ceil(LANES), 2, CHUNK / LANES, self.participants);
        self.layer_embedding.set_even(all, 16, CHUNK, self.participants);
        self
    }

    /// Returns the splits for a head that leaves states of `size` features to the next pass.
    pub(super) fn with_states(mut self, size: usize) -> Self {
        self.states.set_even(size, 16, CHUNK, self.participants);
        self
    }

    /// Sets the splits that depend on the rows of a tile. Attention is split by the cost of the rows' contexts. A bound
    /// never separates rows that are attended together.
    pub(super) fn set_tile(&mut self, tile: &Pass<'_>) {
        let (rows, participants) = (tile.len(), self.participants);
        let shape = &self.shape;
        let width = shape.group() * shape.head_dim;
        let vectors = shape.head_dim.div_ceil(LANES);
        for (vector, head) in self.q_vectors.iter_mut().zip(&self.q.bounds) {
            *vector = head * rows * vectors;
        }
        if self.fused {
            self.units.bounds.clear();
            self.units.bounds.extend(self.k.bounds.iter().map(|head| head * rows));
            self.units.first.clone_from(&self.k.first);
        } else {
            let mut costs = [0; MAX_TILE_ROWS + 1];
            for row in 0..rows {
                costs[row + 1] = costs[row] + 32 + self.attended_at_most.min((tile.positions[row] + 1) as usize);
            }
            let share = |t: usize| {
                let target = costs[rows] * shape.num_kv_heads * t / participants;
                let (head, within) = (target / costs[rows], target % costs[rows]);
                head * rows + costs[..=rows].partition_point(|&cost| cost < within)
            };
            let end_of = |unit: usize| (unit + RUN).min((unit / rows + 1) * rows);
            self.units.set((0..participants).map(|t| share(t + 1)), end_of, 1);
        }
        self.attended.clear();
        self.attended.extend(self.units.bounds.iter().map(|unit| unit * width));
        self.rows.set_even(rows * shape.hidden_size, shape.hidden_size, shape.hidden_size, participants);
    }

    /// Sets the number of token ids whose logits are requested.
    pub(super) fn set_ids(&mut self, num_ids: usize) {
        self.ids.set_even(num_ids, 16, CHUNK, self.participants);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::{ConvShape, DeltaShape};
    use proptest::prelude::*;

    const STATES: [StateShape; 2] = [
        StateShape::Delta(DeltaShape { key_heads: 3, value_heads: 6, key_dim: 5, value_dim: 7, kernel: 4 }),
        StateShape::Conv(ConvShape { channels: 2009, kernel: 3 }),
    ];

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

    fn check(bounds: &[usize], first: &[usize], range: Range<usize>) {
        assert_eq!((bounds[0], bounds.last()), (range.start, Some(&range.end)));
        assert_eq!((first[0], first.last()), (0, Some(&(bounds.len() - 1))));
        assert!(bounds.is_sorted() && first.is_sorted() && bounds.len() <= MAX_PARTS + 1);
    }

    proptest! {
        #![proptest_config(crate::cases(256))]

        #[test]
        fn pieces_cover_everything_once(
            participants in 1..=MAX_PARTS,
            (heads, kv_heads) in prop::sample::select(vec![(4, 2), (6, 3), (1, 1), (32, 8), (300, 300), (600, 300)]),
            rows in 1..=MAX_TILE_ROWS,
            num_ids in 1..300_000_usize,
            state in prop::sample::select(STATES.to_vec()),
        ) {
            let sizes = ExpertSizes { count: 21, per_token: 2, intermediate: 50, shared: 90 };
            let mut shares = Shares::new(shape(heads, kv_heads), None, Some(sizes), Some(state), participants);
            let positions: Vec<i64> = (0..rows as i64).map(|i| i * i * 100 - 1).collect();
            let zeros = [0; MAX_TILE_ROWS];
            let tile = Pass {
                tokens: &zeros[..rows],
                positions: &positions,
                slots: &zeros[..rows],
                sequences: &[0; MAX_TILE_ROWS][..rows],
                max_blocks: 1,
                ..Pass::default()
            };
            shares.set_tile(&tile);
            shares.set_ids(num_ids);
            let of_heads = &shares.q.first;
            let whole = [
                (&shares.hidden.bounds, &shares.hidden.first, 0..72),
                (&shares.mixed.bounds, &shares.mixed.first, 0..72),
                (&shares.intermediate.bounds, &shares.intermediate.first, 0..9),
                (&shares.q.bounds, of_heads, 0..heads),
                (&shares.k.bounds, of_heads, 0..kv_heads),
                (&shares.v.bounds, of_heads, kv_heads..2 * kv_heads),
                (&shares.q_vectors, of_heads, 0..heads * rows),
                (&shares.units.bounds, &shares.units.first, 0..rows * kv_heads),
                (&shares.attended, &shares.units.first, 0..rows * heads * 12),
                (&shares.rows.bounds, &shares.rows.first, 0..rows * 72),
                (&shares.qkv.bounds, &shares.qkv.first, 0..(heads + 2 * kv_heads) * 12),
                (&shares.expert.bounds, &shares.expert.first, 0..4),
                (&shares.shared.bounds, &shares.shared.first, 0..6),
                (&shares.router.bounds, &shares.router.first, 0..21),
                (&shares.state_inputs.bounds, &shares.state_inputs.first, 0..state.outputs()),
                (&shares.state_parts.bounds, &shares.state_parts.first, 0..state.parts()),
                (&shares.state_outputs, &shares.state_parts.first, 0..state.inner()),
                (&shares.state_bases, &shares.state_parts.first, 0..state.parts() * state.base_len()),
                (&shares.ids.bounds, &shares.ids.first, 0..num_ids),
            ];
            for (bounds, first, range) in whole {
                prop_assert_eq!(first.len(), participants + 1);
                check(bounds, first, range);
            }
            // Lines of cache and pairs of bf16 numbers have one writer.
            prop_assert!(shares.hidden.bounds.iter().all(|&at| at % 16 == 0 || at == 72));
            prop_assert!(shares.intermediate.bounds.iter().all(|&at| at % 2 == 0 || at == 9));
        }
    }

    #[test]
    fn pieces_are_short_where_there_is_room_for_many() {
        let mut shares = Shares::new(shape(4, 2), None, None, None, 2);
        shares.set_ids(1000);
        assert_eq!(shares.ids.first, [0, 8, 16]);
        assert!(shares.ids.bounds.windows(2).all(|piece| piece[1] - piece[0] <= CHUNK));
        shares.set_ids(49_152);
        assert_eq!(shares.ids.first, [0, 128, 256]);
    }
}
