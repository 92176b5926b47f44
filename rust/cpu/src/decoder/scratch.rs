//! Memory that passes need, allocated once for tiles of 64 rows. Pages that no pass uses take no memory.

use super::CHUNK;
use super::products::FedRoom;
use crate::layer::{ExpertSizes, Layer};
use crate::pass::MAX_TILE_ROWS;
use crate::shape::{ModelShape, StateShape};
use crate::weights::{Head, Weights};
use specrs_cpu_kernels::{AttendScratch, DeltaHead, Isa, LANES, Vectors};

/// Maximum number of rows of one request that are attended together.
pub(super) const RUN: usize = 16;

/// Buffers that all threads of a pass read and write.
pub(super) struct Buffers {
    /// Residual stream, `[rows, hidden]`.
    pub(super) h: Vec<f32>,
    /// Embeddings, `[rows, hidden]`, for EAGLE-3 heads. Normed embeddings and normed hidden states, `[rows, 2 hidden]`,
    /// for MTP heads. The target's embeddings and hidden states, `[rows, 2 state_size]`, for assistants.
    pub(super) e: Vec<f32>,
    /// One normed row, `[ceil(hidden / 16)]`.
    pub(super) t: Vectors,
    /// Output of attention, of an MLP or experts, or of a layer's embedding, `[rows, hidden]`, if a norm follows it.
    pub(super) added: Vec<f32>,
    /// Output of experts, `[rows, hidden]`, if the layer has an MLP, too.
    pub(super) mixture_output: Vec<f32>,
    /// Projected q, k and v, `[rows, heads + 2 kv_heads, head_dim]`, if all heads are normed as one.
    pub(super) heads: Vec<f32>,
    /// Queries, `[heads, rows, ceil(head_dim / 16)]`.
    pub(super) q: Vectors,
    /// Output of attention, `[kv_heads, rows, group * head_dim]`.
    pub(super) attended: Vec<f32>,
    /// Gates of attention's output after the sigmoid, `[heads, rows, ceil(head_dim / 16)]`, for models that have them.
    pub(super) gates: Vectors,
    /// Outputs of the input projection of a layer with a state, `[rows, outputs]`, for models with such layers.
    pub(super) mixed: Vec<f32>,
    /// Inputs of the output projection of a layer with a state, `[rows, inputs]`, for models with such layers.
    pub(super) netted: Vec<f32>,
    /// Input of the down projection of an MLP or shared expert, `[rows, ceil(intermediate / 16)]`.
    pub(super) act: Vectors,
    /// Per-layer embeddings, `[rows, layers, size]`, for models that have them.
    pub(super) layer_embedding: Vec<f32>,
    /// Per-layer embeddings as the table has them for one row, `[layers, size]`.
    pub(super) looked_up: Vec<f32>,
    /// Gated embeddings of one layer, `[rows, ceil(size / 16)]`.
    pub(super) gated: Vectors,
    /// Buffers of experts; empty if no layer has experts.
    pub(super) mixture: Mixture,
    /// Cosines of each rotation, `[rotations, rows, head_dim / 2]`, of which shorter rotations use the first elements.
    /// `sin` has the same layout.
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
    /// Factors of queries, `[rows]`, for models that scale queries by position.
    pub(super) query_factors: Vec<f32>,
}

/// Inputs and outputs of a layer's experts, for tiles of 64 rows.
#[derive(Default)]
pub(super) struct Mixture {
    /// Logits of the router, `[rows, experts]`.
    pub(super) logits: Vec<f32>,
    /// Experts of each row, `[rows, per_token]`.
    pub(super) chosen: Vec<usize>,
    /// Weight of each expert in `chosen`, `[rows, per_token]`.
    pub(super) shares: Vec<f32>,
    /// Start of each expert's rows among those of all experts, `[experts + 1]`.
    pub(super) starts: Vec<usize>,
    /// Rows sorted by expert, `[rows * per_token]`.
    pub(super) rows: Vec<usize>,
    /// Weight of each row in `rows`, `[rows * per_token]`.
    pub(super) weights: Vec<f32>,
    /// Input of the experts' down projections, `[rows * per_token, ceil(intermediate / 16)]`. The rows of one expert
    /// lie together.
    pub(super) act: Vectors,
}

impl Mixture {
    fn new(sizes: ExpertSizes) -> Self {
        let sent = MAX_TILE_ROWS * sizes.per_token;
        Self {
            logits: vec![0.0; MAX_TILE_ROWS * sizes.count],
            chosen: vec![0; sent],
            shares: vec![0.0; sent],
            starts: vec![0; sizes.count + 1],
            rows: vec![0; sent],
            weights: vec![0.0; sent],
            act: Vectors::new(sent * sizes.intermediate.div_ceil(LANES)),
        }
    }

    fn poison(&mut self) {
        self.logits.fill(f32::NAN);
        self.shares.fill(f32::NAN);
        self.weights.fill(f32::NAN);
        self.act.fill([f32::NAN; LANES]);
    }
}

/// Scratch memory of one thread of a pass.
pub(super) struct Private {
    /// Input of a projection, `[rows, ceil(inputs / 16)]`.
    pub(super) x: Vectors,
    /// One normed row, for models that are fed a hidden state with each token.
    pub(super) t: Vectors,
    /// Rows of one expert, `[rows, ceil(hidden / 16)]`, for models with experts.
    pub(super) sent: Vectors,
    /// Output of a projection, `[rows, chunk]`.
    pub(super) y: Vec<f32>,
    /// Output of a second projection, `[rows, chunk]`.
    pub(super) z: Vec<f32>,
    /// Factors of the norms of all query heads and of all key heads, `[2, rows]`, or gates of a shared expert, `[rows]`.
    pub(super) scales: Vec<f32>,
    pub(super) attend: AttendScratch,
    pub(super) room: FedRoom,
    pub(super) net: NetRoom,
    /// Most probable id among those that the thread computes, and its logit, `[rows]`.
    pub(super) best: Vec<(usize, f32)>,
}

impl Buffers {
    pub(super) fn new(weights: &Weights) -> Self {
        let (shape, rotations) = (&weights.shape, weights.rotations.len());
        let (rows, dim) = (MAX_TILE_ROWS, shape.head_dim);
        let where_some = |some: bool, len: usize| if some { len } else { 0 };
        let of_head = |head: &Head| if head.combines() { head.fc.inputs } else { shape.hidden_size };
        let fed = weights.head.as_ref().map_or(0, of_head);
        let behind = |layer: &Layer| {
            layer.attention_output_norm.is_some() || layer.mlp_output_norm.is_some() || layer.addition.is_some()
        };
        let behind = weights.layers.iter().any(behind);
        let parallel = weights.layers.iter().any(|layer| layer.expert_vectors.norms.is_some());
        let whole = weights.layers.iter().any(|layer| layer.qk_norm_whole);
        let gated = weights.layers.iter().any(|layer| layer.output_gate);
        let state = weights.states.map(|(state, _)| state);
        let heads = shape.num_heads + 2 * shape.num_kv_heads;
        let (size, all) = weights.layer_embedding.as_ref().map_or((0, 0), |e| (e.size, e.projection.outputs()));
        let shared = weights.experts.map_or(0, |sizes| sizes.shared);
        Self {
            h: vec![0.0; rows * shape.hidden_size],
            e: vec![0.0; rows * fed],
            t: Vectors::new(shape.hidden_size.div_ceil(LANES)),
            added: vec![0.0; rows * where_some(behind, shape.hidden_size)],
            mixture_output: vec![0.0; rows * where_some(parallel, shape.hidden_size)],
            heads: vec![0.0; rows * where_some(whole, heads * dim)],
            q: Vectors::new(rows * shape.num_heads * dim.div_ceil(LANES)),
            attended: vec![0.0; rows * shape.num_heads * dim],
            gates: Vectors::new(where_some(gated, rows * shape.num_heads * dim.div_ceil(LANES))),
            mixed: vec![0.0; rows * state.map_or(0, |state| state.outputs())],
            netted: vec![0.0; rows * state.map_or(0, |state| state.inner())],
            act: Vectors::new(rows * shape.intermediate_size.max(shared).div_ceil(LANES)),
            layer_embedding: vec![0.0; rows * all],
            looked_up: vec![0.0; all],
            gated: Vectors::new(rows * size.div_ceil(LANES)),
            mixture: weights.experts.map(Mixture::new).unwrap_or_default(),
            cos: vec![0.0; rotations * rows * dim / 2],
            sin: vec![0.0; rotations * rows * dim / 2],
            query_factors: vec![0.0; where_some(weights.query_scaling.is_some(), rows)],
        }
    }

    pub(super) fn poison(&mut self) {
        for buffer in [
            &mut self.h,
            &mut self.e,
            &mut self.added,
            &mut self.mixture_output,
            &mut self.heads,
            &mut self.attended,
            &mut self.mixed,
            &mut self.netted,
            &mut self.cos,
            &mut self.sin,
            &mut self.query_factors,
            &mut self.layer_embedding,
            &mut self.looked_up,
        ] {
            buffer.fill(f32::NAN);
        }
        for buffer in [&mut self.q, &mut self.gates, &mut self.act, &mut self.t, &mut self.gated] {
            buffer.fill([f32::NAN; LANES]);
        }
        self.mixture.poison();
    }
}

impl Private {
    pub(super) fn new(weights: &Weights, isa: Isa) -> Self {
        let (shape, experts) = (&weights.shape, weights.experts.is_some());
        let fused = weights.head.as_ref().map_or(0, |head| head.fc.inputs);
        let (rows, dim) = (MAX_TILE_ROWS, shape.head_dim);
        let hidden = shape.hidden_size;
        let (fed, kept) = if fused > 0 { (fused.max(2 * hidden), fused.max(hidden)) } else { (hidden, 0) };
        let state = weights.states.map(|(state, _)| state);
        let inner = state.map_or(0, |state| state.inner());
        let inputs = fed.max(shape.num_heads * dim).max(inner).div_ceil(LANES);
        Self {
            x: Vectors::new(rows * inputs),
            t: Vectors::new(kept.div_ceil(LANES)),
            sent: Vectors::new(if experts { rows * hidden.div_ceil(LANES) } else { 0 }),
            y: vec![0.0; rows * CHUNK.max(dim)],
            z: vec![0.0; rows * CHUNK.max(dim)],
            scales: vec![0.0; 2 * rows],
            attend: AttendScratch::new(RUN, weights.kinds.iter().map(ModelShape::group).max().unwrap_or(1), dim),
            room: FedRoom::new(weights, isa),
            net: state.map(|state| NetRoom::new(&state)).unwrap_or_default(),
            best: vec![(0, 0.0); rows],
        }
    }

    pub(super) fn poison(&mut self) {
        self.x.fill([f32::NAN; LANES]);
        self.t.fill([f32::NAN; LANES]);
        self.sent.fill([f32::NAN; LANES]);
        self.y.fill(f32::NAN);
        self.z.fill(f32::NAN);
        self.scales.fill(f32::NAN);
        self.attend.poison();
        self.room.poison();
        self.net.poison();
        self.best.fill((usize::MAX, f32::NAN));
    }
}

/// Scratch memory of one thread in a layer with a state, for a tile's rows of one request and one part.
#[derive(Default)]
pub(super) struct NetRoom {
    /// Inputs of the convolution, `[.., width]`: those of earlier positions, then of replayed drafts, then of the rows.
    pub(super) inputs: Vectors,
    /// Results of the convolution, `[rows, width]`: with a delta net queries, keys and values.
    pub(super) mixed: Vectors,
    /// Gates beta and decay of each value head of a delta net and row, `[value heads, rows]`.
    pub(super) gates: Vec<(f32, f32)>,
    /// Outputs of a value head of a delta net, `[rows, padded value]`.
    pub(super) out: Vec<f32>,
    /// Columns of a delta net's state.
    pub(super) state: Vectors,
}

impl NetRoom {
    pub(super) fn new(shape: &StateShape) -> Self {
        let (rows, vectors) = (MAX_TILE_ROWS, shape.width() / LANES);
        let convolution = Self {
            inputs: Vectors::new((rows + shape.kernel() - 1) * vectors),
            mixed: Vectors::new(rows * vectors),
            ..Self::default()
        };
        match shape {
            StateShape::Conv(_) => convolution,
            StateShape::Delta(shape) => Self {
                gates: vec![(0.0, 0.0); rows * shape.shared()],
                out: vec![0.0; rows * shape.padded_value()],
                state: Vectors::new(DeltaHead::scratch(shape.key_dim)),
                ..convolution
            },
        }
    }

    /// Reserves memory for logs of `capacity` entries.
    pub(super) fn reserve(&mut self, shape: &StateShape, capacity: usize) {
        let needed = (MAX_TILE_ROWS + capacity + shape.kernel() - 1) * shape.width() / LANES;
        if self.inputs.len() < needed {
            self.inputs = Vectors::new(needed);
        }
    }

    pub(super) fn poison(&mut self) {
        self.inputs.fill([f32::NAN; LANES]);
        self.mixed.fill([f32::NAN; LANES]);
        self.gates.fill((f32::NAN, f32::NAN));
        self.out.fill(f32::NAN);
        self.state.fill([f32::NAN; LANES]);
    }
}
