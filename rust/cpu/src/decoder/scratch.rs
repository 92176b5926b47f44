//! The memory that passes need, made once for tiles of 64 rows. Pages that no pass touches take no memory.

use super::products::FedRoom;
use crate::isa::LANES;
use crate::kernels::AttendScratch;
use crate::layer::{ExpertSizes, Layer};
use crate::memory::Vectors;
use crate::pass::MAX_TILE_ROWS;
use crate::weights::{ModelShape, Weights};

/// Outputs that are computed together before anything is done with them.
pub(super) const CHUNK: usize = 64;
/// Rows of one request that are attended together.
pub(super) const RUN: usize = 16;

/// What all participants read and write.
pub(super) struct Buffers {
    /// `[rows, hidden]` residual stream.
    pub(super) h: Vec<f32>,
    /// `[rows, hidden]` embeddings, where a hidden state is fed beside them.
    pub(super) e: Vec<f32>,
    /// `[ceil(hidden / 16)]` one normed row, there.
    pub(super) t: Vectors,
    /// `[rows, hidden]` what a block gives, where a norm is behind it.
    pub(super) added: Vec<f32>,
    /// `[rows, heads + 2 kv_heads, head_dim]` q, k and v, where all heads are normed as one.
    pub(super) heads: Vec<f32>,
    /// `[heads, rows, ceil(head_dim / 16)]` queries.
    pub(super) q: Vectors,
    /// `[kv_heads, rows, group * head_dim]` what attention gives.
    pub(super) attended: Vec<f32>,
    /// `[rows, ceil(intermediate / 16)]` what down is fed.
    pub(super) act: Vectors,
    /// Nothing where no layer has experts.
    pub(super) mixture: Mixture,
    /// `[rotations, rows, head_dim / 2]`, of shorter rotations their first elements; like `sin`.
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
}

/// What the experts of a layer are fed and give, for tiles of 64 rows.
#[derive(Default)]
pub(super) struct Mixture {
    /// `[rows, experts]` the router's logits.
    pub(super) logits: Vec<f32>,
    /// `[rows, per_token]` experts of each row, and their weights.
    pub(super) chosen: Vec<usize>,
    pub(super) shares: Vec<f32>,
    /// `[experts + 1]` where the rows of each expert begin among those of all.
    pub(super) starts: Vec<usize>,
    /// `[rows per_token]` rows by expert, and their weights there.
    pub(super) rows: Vec<usize>,
    pub(super) weights: Vec<f32>,
    /// `[rows per_token, ceil(intermediate / 16)]` what down is fed, by expert.
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

/// What one participant has for itself.
pub(super) struct Private {
    /// `[rows, ceil(inputs / 16)]` what a projection is fed.
    pub(super) x: Vectors,
    /// One normed row, where a hidden state is fed beside tokens.
    pub(super) t: Vectors,
    /// `[rows, ceil(hidden / 16)]` rows of an expert, where some layer has experts.
    pub(super) sent: Vectors,
    /// `[rows, chunk]` what it gives.
    pub(super) y: Vec<f32>,
    /// `[rows, chunk]` what a second one gives.
    pub(super) z: Vec<f32>,
    /// `[2, rows]` what the norms of all query heads and of all key heads multiply by.
    pub(super) scales: Vec<f32>,
    pub(super) attend: AttendScratch,
    pub(super) room: FedRoom,
    /// `[rows]` the most probable id of its share and its logit.
    pub(super) best: Vec<(usize, f32)>,
}

impl Buffers {
    pub(super) fn new(weights: &Weights) -> Self {
        let (shape, rotations) = (&weights.shape, weights.rotations.len());
        let (rows, dim) = (MAX_TILE_ROWS, shape.head_dim);
        let where_some = |some: bool, len: usize| if some { len } else { 0 };
        let hidden = where_some(weights.beside.is_some(), shape.hidden_size);
        let behind = |layer: &Layer| layer.attention_output_norm.is_some() || layer.mlp_output_norm.is_some();
        let behind = weights.layers.iter().any(behind);
        let whole = weights.layers.iter().any(|layer| layer.qk_norm_whole);
        let heads = shape.num_heads + 2 * shape.num_kv_heads;
        Self {
            h: vec![0.0; rows * shape.hidden_size],
            e: vec![0.0; rows * hidden],
            t: Vectors::new(hidden.div_ceil(LANES)),
            added: vec![0.0; rows * where_some(behind, shape.hidden_size)],
            heads: vec![0.0; rows * where_some(whole, heads * dim)],
            q: Vectors::new(rows * shape.num_heads * dim.div_ceil(LANES)),
            attended: vec![0.0; rows * shape.num_heads * dim],
            act: Vectors::new(rows * shape.intermediate_size.div_ceil(LANES)),
            mixture: weights.experts.map(Mixture::new).unwrap_or_default(),
            cos: vec![0.0; rotations * rows * dim / 2],
            sin: vec![0.0; rotations * rows * dim / 2],
        }
    }

    pub(super) fn poison(&mut self) {
        for buffer in [
            &mut self.h,
            &mut self.e,
            &mut self.added,
            &mut self.heads,
            &mut self.attended,
            &mut self.cos,
            &mut self.sin,
        ] {
            buffer.fill(f32::NAN);
        }
        for buffer in [&mut self.q, &mut self.act, &mut self.t] {
            buffer.fill([f32::NAN; LANES]);
        }
        self.mixture.poison();
    }
}

impl Private {
    /// `fused`: inputs of the states that are fed beside tokens; 0 where none are.
    pub(super) fn new(shape: &ModelShape, fused: usize, experts: bool) -> Self {
        let (rows, dim) = (MAX_TILE_ROWS, shape.head_dim);
        let hidden = shape.hidden_size;
        let (fed, kept) = if fused > 0 { (fused.max(2 * hidden), fused.max(hidden)) } else { (hidden, 0) };
        let inputs = fed.max(shape.num_heads * dim).div_ceil(LANES);
        Self {
            x: Vectors::new(rows * inputs),
            t: Vectors::new(kept.div_ceil(LANES)),
            sent: Vectors::new(if experts { rows * hidden.div_ceil(LANES) } else { 0 }),
            y: vec![0.0; rows * CHUNK.max(dim)],
            z: vec![0.0; rows * CHUNK.max(dim)],
            scales: vec![0.0; 2 * rows],
            attend: AttendScratch::new(RUN, shape.group(), dim),
            room: FedRoom::default(),
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
        self.room.tiles.poison();
        self.room.loras.poison();
        self.best.fill((usize::MAX, f32::NAN));
    }
}
