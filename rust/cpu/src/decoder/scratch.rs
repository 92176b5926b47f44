//! The memory that passes need, made once for tiles of 64 rows. Pages that no pass touches take no memory.

use crate::isa::LANES;
use crate::kernels::AttendScratch;
use crate::memory::Vectors;
use crate::pass::MAX_TILE_ROWS;
use crate::weights::ModelShape;

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
    /// `[heads, rows, ceil(head_dim / 16)]` queries.
    pub(super) q: Vectors,
    /// `[kv_heads, rows, group * head_dim]` what attention gives.
    pub(super) attended: Vec<f32>,
    /// `[rows, ceil(intermediate / 16)]` what down is fed.
    pub(super) act: Vectors,
    /// `[rotations, rows, head_dim / 2]`, of shorter rotations their first elements; like `sin`.
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
}

/// What one participant has for itself.
pub(super) struct Private {
    /// `[rows, ceil(inputs / 16)]` what a projection is fed.
    pub(super) x: Vectors,
    /// One normed row, where a hidden state is fed beside tokens.
    pub(super) t: Vectors,
    /// `[rows, chunk]` what it gives.
    pub(super) y: Vec<f32>,
    /// `[rows, chunk]` what a second one gives.
    pub(super) z: Vec<f32>,
    pub(super) attend: AttendScratch,
    /// `[rows]` the most probable id of its share and its logit.
    pub(super) best: Vec<(usize, f32)>,
}

impl Buffers {
    /// `beside`: hidden states are fed beside tokens.
    pub(super) fn new(shape: &ModelShape, rotations: usize, beside: bool) -> Self {
        let (rows, dim) = (MAX_TILE_ROWS, shape.head_dim);
        let hidden = if beside { shape.hidden_size } else { 0 };
        Self {
            h: vec![0.0; rows * shape.hidden_size],
            e: vec![0.0; rows * hidden],
            t: Vectors::new(hidden.div_ceil(LANES)),
            q: Vectors::new(rows * shape.num_heads * dim.div_ceil(LANES)),
            attended: vec![0.0; rows * shape.num_heads * dim],
            act: Vectors::new(rows * shape.intermediate_size.div_ceil(LANES)),
            cos: vec![0.0; rotations * rows * dim / 2],
            sin: vec![0.0; rotations * rows * dim / 2],
        }
    }

    pub(super) fn poison(&mut self) {
        for buffer in [&mut self.h, &mut self.e, &mut self.attended, &mut self.cos, &mut self.sin] {
            buffer.fill(f32::NAN);
        }
        for buffer in [&mut self.q, &mut self.act, &mut self.t] {
            buffer.fill([f32::NAN; LANES]);
        }
    }
}

impl Private {
    /// `fused`: inputs of the states that are fed beside tokens; 0 where none are.
    pub(super) fn new(shape: &ModelShape, fused: usize) -> Self {
        let (rows, dim) = (MAX_TILE_ROWS, shape.head_dim);
        let hidden = shape.hidden_size;
        let (fed, kept) = if fused > 0 { (fused.max(2 * hidden), fused.max(hidden)) } else { (hidden, 0) };
        let inputs = fed.max(shape.num_heads * dim).div_ceil(LANES);
        Self {
            x: Vectors::new(rows * inputs),
            t: Vectors::new(kept.div_ceil(LANES)),
            y: vec![0.0; rows * CHUNK.max(dim)],
            z: vec![0.0; rows * CHUNK.max(dim)],
            attend: AttendScratch::new(RUN, shape.group(), dim),
            best: vec![(0, 0.0); rows],
        }
    }

    pub(super) fn poison(&mut self) {
        self.x.fill([f32::NAN; LANES]);
        self.t.fill([f32::NAN; LANES]);
        self.y.fill(f32::NAN);
        self.z.fill(f32::NAN);
        self.attend.poison();
        self.best.fill((usize::MAX, f32::NAN));
    }
}
