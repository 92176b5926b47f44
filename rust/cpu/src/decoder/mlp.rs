//! What a layer does behind its attention: two phases.

use super::scratch::{Buffers, CHUNK, Private};
use super::{Context, Range};
use crate::isa::LANES;
use crate::kernels::{SiluMul, Vector};
use crate::linear::Linear;
use crate::memory::{Columns, ColumnsMut};
use crate::weights::Layer;

impl Context<'_> {
    pub(super) fn mlp(&self, layer: &Layer, buffers: &mut Buffers, private: &mut [Private]) {
        let shape = &self.weights.shape;
        let rows = self.rows();
        let vectors = shape.intermediate_size.div_ceil(LANES);
        let Buffers { h, act, .. } = buffers;
        {
            let acts = Columns::new(act, rows, vectors, &self.shares.intermediate);
            let own = Columns::new(private, 1, self.shares.threads, &self.shares.each);
            self.session.run(&|t| {
                let (mut acts, mut own) = (acts.take(t), own.take(t));
                let own = &mut own.row_mut(0)[0];
                self.norm(0..rows, h, &layer.post_attention_norm, &mut own.x);
                self.round(&mut own.x, rows, layer.gate_up.inputs);
                self.gate_up(layer, own, &mut acts);
            });
        }
        let act = &act[..rows * vectors];
        let hs = Columns::new(h, rows, shape.hidden_size, &self.shares.hidden);
        let own = Columns::new(private, 1, self.shares.threads, &self.shares.each);
        self.session.run(&|t| {
            let (mut hs, mut own) = (hs.take(t), own.take(t));
            self.add_product(&layer.down, act, &mut own.row_mut(0)[0].y, &mut hs);
        });
    }

    /// One participant's features between gate, up and down.
    fn gate_up(&self, layer: &Layer, own: &mut Private, acts: &mut ColumnsMut<'_, Vector>) {
        let (rows, intermediate) = (self.rows(), self.weights.shape.intermediate_size);
        let columns = acts.columns();
        let (first, end) = (columns.start * LANES, (columns.end * LANES).min(intermediate));
        for start in (first..end).step_by(CHUNK) {
            let chunk = start..(start + CHUNK).min(end);
            let up = intermediate + chunk.start..intermediate + chunk.end;
            self.product(&layer.gate_up, chunk.clone(), &own.x, rows, &mut own.y, CHUNK);
            self.product(&layer.gate_up, up, &own.x, rows, &mut own.z, CHUNK);
            let from = (start - first) / LANES;
            for (row, (gate, up)) in own.y.chunks_exact(CHUNK).zip(own.z.chunks_exact(CHUNK)).take(rows).enumerate() {
                let out = &mut acts.row_mut(row)[from..][..chunk.len().div_ceil(LANES)];
                self.isa.run(SiluMul { gate: &gate[..chunk.len()], up: &up[..chunk.len()], out });
            }
        }
        for row in 0..rows {
            self.round(acts.row_mut(row), 1, end - first);
        }
    }

    /// Adds one participant's features of a projection of `x` to the residual stream.
    pub(super) fn add_product(&self, linear: &Linear, x: &[Vector], y: &mut [f32], hs: &mut ColumnsMut<'_, f32>) {
        let Range { start: first, end } = hs.columns();
        let multiplier = self.weights.multipliers.residual;
        for start in (first..end).step_by(CHUNK) {
            let chunk = start..(start + CHUNK).min(end);
            self.product(linear, chunk.clone(), x, self.rows(), y, CHUNK);
            for (row, y) in y.chunks_exact(CHUNK).take(self.rows()).enumerate() {
                for (h, y) in hs.row_mut(row)[start - first..][..chunk.len()].iter_mut().zip(y) {
                    *h += y * multiplier;
                }
            }
        }
    }
}
