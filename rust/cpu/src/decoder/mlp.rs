//! MLP of a layer after its attention: two phases, or three if a norm follows.

use super::products::Fed;
use super::scratch::{Buffers, Private};
use super::{CHUNK, Context, Range};
use crate::layer::Layer;
use crate::linear::Linear;
use crate::lora::Projection;
use specrs_cpu_kernels::{Columns, ColumnsMut, GateMul, LANES, RmsNorm, Vector};

impl Context<'_> {
    pub(super) fn mlp(
        &self,
        layer: &Layer,
        gate_up: &Linear,
        down: &Linear,
        buffers: &mut Buffers,
        private: &mut [Private],
    ) {
        let norm = layer.mlp_output_norm.as_deref();
        self.mlp_output(layer, gate_up, down, norm.is_some(), buffers, private);
        self.add_normed(norm, layer.mlp_scalar(), &buffers.added, &mut buffers.h, private);
    }

    /// Computes the output of an MLP. It is added to the residual stream, or written to the buffer `added` if it is
    /// `normed`.
    pub(super) fn mlp_output(
        &self,
        layer: &Layer,
        gate_up: &Linear,
        down: &Linear,
        normed: bool,
        buffers: &mut Buffers,
        private: &mut [Private],
    ) {
        let shape = &layer.shape;
        let rows = self.rows();
        let vectors = shape.intermediate_size.div_ceil(LANES);
        let Buffers { h, added, act, .. } = buffers;
        {
            let acts = Columns::new(act, rows, vectors, &self.shares.intermediate.bounds);
            let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
            self.session.run(&self.shares.intermediate.first, &|t, pieces| {
                let mut own = own.take(t);
                let Private { x, y, z, room, .. } = &mut own.row_mut(0)[0];
                self.norm(0..rows, h, layer.post_attention_norm.as_deref(), x);
                self.round(x, rows, gate_up.inputs);
                let mut fed = self.fed(Projection::GateUp, gate_up, x, room);
                for piece in pieces {
                    self.gate_up(gate_up, &mut fed, 0..rows, None, (y, z), &mut acts.take(piece));
                }
            });
        }
        let act = &act[..rows * vectors];
        let out = if normed { &mut *added } else { &mut *h };
        let outs = Columns::new(out, rows, shape.hidden_size, &self.shares.hidden.bounds);
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&self.shares.hidden.first, &|t, pieces| {
            let mut own = own.take(t);
            let Private { y, room, .. } = &mut own.row_mut(0)[0];
            let mut fed = self.fed(Projection::Down, down, act, room);
            for piece in pieces {
                self.give(down, normed, &mut fed, y, &mut outs.take(piece));
            }
        });
    }

    /// Computes a piece of the MLP's intermediate features, the input of the down projection, into rows `rows` of
    /// `acts`. `rows` are the rows that the gate and up projection is fed. With `factors`, each row's features are
    /// multiplied by its factor.
    pub(super) fn gate_up(
        &self,
        linear: &Linear,
        fed: &mut Fed<'_>,
        rows: Range<usize>,
        factors: Option<&[f32]>,
        (y, z): (&mut [f32], &mut [f32]),
        acts: &mut ColumnsMut<'_, Vector>,
    ) {
        let intermediate = linear.outputs() / 2;
        let columns = acts.columns();
        let (first, end) = (columns.start * LANES, (columns.end * LANES).min(intermediate));
        for start in (first..end).step_by(CHUNK) {
            let chunk = start..(start + CHUNK).min(end);
            let up = intermediate + chunk.start..intermediate + chunk.end;
            self.product(linear, chunk.clone(), fed, rows.len(), y, CHUNK);
            self.product(linear, up, fed, rows.len(), z, CHUNK);
            let from = (start - first) / LANES;
            for (row, (gate, up)) in rows.clone().zip(y.chunks_exact(CHUNK).zip(z.chunks_exact(CHUNK))) {
                let out = &mut acts.row_mut(row)[from..][..chunk.len().div_ceil(LANES)];
                let (gate, up) = (&gate[..chunk.len()], &up[..chunk.len()]);
                GateMul { activation: self.weights.activation, gate, up, out }.run(self.isa);
                if let Some(factors) = factors {
                    out.as_flattened_mut().iter_mut().for_each(|x| *x *= factors[row]);
                }
            }
        }
        for row in rows {
            self.round(acts.row_mut(row), 1, end - first);
        }
    }

    /// Computes a piece of the output features of the last projection of attention or MLP. It is added to `outs`, a
    /// part of the residual stream. If it is `normed` afterwards, `outs` is a buffer that it overwrites.
    pub(super) fn give(
        &self,
        linear: &Linear,
        normed: bool,
        fed: &mut Fed<'_>,
        y: &mut [f32],
        outs: &mut ColumnsMut<'_, f32>,
    ) {
        if normed {
            self.put_product(linear, fed, self.rows(), y, outs);
        } else {
            self.add_product(linear, fed, y, outs);
        }
    }

    /// Norms the output of attention or MLP, adds it to the residual stream and multiplies the stream by `scalar`, as
    /// one phase by rows. Does nothing without `norm`.
    pub(super) fn add_normed(
        &self,
        norm: Option<&[f32]>,
        scalar: f32,
        added: &[f32],
        h: &mut [f32],
        private: &mut [Private],
    ) {
        let Some(weight) = norm else { return };
        let (hidden, eps) = (self.weights.shape.hidden_size, self.weights.shape.rms_norm_eps);
        let multiplier = self.weights.multipliers.residual;
        let hs = Columns::new(h, 1, self.rows() * hidden, &self.shares.rows.bounds);
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&self.shares.rows.first, &|t, pieces| {
            let mut own = own.take(t);
            let out = &mut own.row_mut(0)[0].x[..hidden.div_ceil(LANES)];
            for piece in pieces {
                let mut hs = hs.take(piece);
                let added = &added[hs.columns()];
                for (h, x) in hs.row_mut(0).chunks_exact_mut(hidden).zip(added.chunks_exact(hidden)) {
                    RmsNorm { x, weight, eps, out: &mut *out }.run(self.isa);
                    for (h, x) in h.iter_mut().zip(out.as_flattened()) {
                        *h = (*h + x * multiplier) * scalar;
                    }
                }
            }
        });
    }

    /// Writes a piece of the output features of a projection, for `rows` rows, to `outs`.
    pub(super) fn put_product(
        &self,
        linear: &Linear,
        fed: &mut Fed<'_>,
        rows: usize,
        y: &mut [f32],
        outs: &mut ColumnsMut<'_, f32>,
    ) {
        let Range { start: first, end } = outs.columns();
        for start in (first..end).step_by(CHUNK) {
            let chunk = start..(start + CHUNK).min(end);
            self.product(linear, chunk.clone(), fed, rows, y, CHUNK);
            for (row, y) in y.chunks_exact(CHUNK).take(rows).enumerate() {
                outs.row_mut(row)[start - first..][..chunk.len()].copy_from_slice(&y[..chunk.len()]);
            }
        }
    }

    /// Adds a piece of the features of a projection to the residual stream `hs`.
    fn add_product(&self, linear: &Linear, fed: &mut Fed<'_>, y: &mut [f32], hs: &mut ColumnsMut<'_, f32>) {
        let Range { start: first, end } = hs.columns();
        let multiplier = self.weights.multipliers.residual;
        for start in (first..end).step_by(CHUNK) {
            let chunk = start..(start + CHUNK).min(end);
            self.product(linear, chunk.clone(), fed, self.rows(), y, CHUNK);
            for (row, y) in y.chunks_exact(CHUNK).take(self.rows()).enumerate() {
                for (h, y) in hs.row_mut(row)[start - first..][..chunk.len()].iter_mut().zip(y) {
                    *h += y * multiplier;
                }
            }
        }
    }
}
