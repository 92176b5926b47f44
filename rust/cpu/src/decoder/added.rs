//! Per-layer embeddings: those of a tile's tokens for all layers, and their addition to the residual stream after a
//! layer's MLP. Two phases and a norm for each layer.

use super::scratch::{Buffers, Private};
use super::{CHUNK, Context};
use crate::linear::Linear;
use crate::weights::Added;
use specrs_cpu_kernels::{Activation, Columns, GateMul, LANES, RmsScale};

impl Context<'_> {
    /// Writes the layers' embeddings of the tile's tokens, for which the residual stream holds the scaled embeddings.
    pub(super) fn embed_layers(&self, added: &Added, buffers: &mut Buffers, private: &mut [Private]) {
        let Buffers { h, layer_embedding, looked_up, .. } = buffers;
        let (rows, shape, width) = (self.rows(), &self.weights.shape, added.projection.outputs());
        {
            let outs = Columns::new(layer_embedding, rows, width, &self.shares.layer_embedding.bounds);
            let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
            self.session.run(&self.shares.layer_embedding.first, &|t, pieces| {
                let mut own = own.take(t);
                let Private { x, y, room, .. } = &mut own.row_mut(0)[0];
                self.norm(0..rows, h, None, x);
                self.round(x, rows, added.projection.inputs);
                let mut fed = self.fed_rows(&added.projection, x, rows, &mut room.rounded);
                for piece in pieces {
                    self.put_product(&added.projection, &mut fed, rows, y, &mut outs.take(piece));
                }
            });
        }
        let (of_projection, of_table) = (1.0 / (shape.hidden_size as f32).sqrt(), (added.size as f32).sqrt());
        let half = std::f32::consts::FRAC_1_SQRT_2;
        for (row, out) in layer_embedding.chunks_exact_mut(width).take(rows).enumerate() {
            if self.tile.positions[row] < 0 {
                looked_up.fill(0.0);
            } else {
                added.table.write(self.tile.tokens[row] as usize, looked_up);
            }
            for (out, looked_up) in out.chunks_exact_mut(added.size).zip(looked_up.chunks_exact(added.size)) {
                for x in &mut *out {
                    *x *= of_projection;
                }
                let scale = RmsScale { x: out, eps: shape.rms_norm_eps }.run(self.isa);
                for ((out, weight), e) in out.iter_mut().zip(&added.norm).zip(looked_up) {
                    *out = (*out * scale * weight + e * of_table) * half;
                }
            }
        }
    }

    /// Adds the layer's embedding of the tile's tokens to the residual stream, through `gate` and `projection`, and
    /// multiplies the stream by `scalar`.
    pub(super) fn add_embedding(
        &self,
        (gate, projection): (&Linear, &Linear),
        norm: &[f32],
        scalar: f32,
        buffers: &mut Buffers,
        private: &mut [Private],
    ) {
        let Buffers { h, added, layer_embedding, gated, .. } = buffers;
        let (rows, hidden, size) = (self.rows(), self.weights.shape.hidden_size, projection.inputs);
        let vectors = size.div_ceil(LANES);
        {
            let gateds = Columns::new(gated, rows, vectors, &self.shares.addition.bounds);
            let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
            self.session.run(&self.shares.addition.first, &|t, pieces| {
                let mut own = own.take(t);
                let Private { x, y, room, .. } = &mut own.row_mut(0)[0];
                self.norm(0..rows, h, None, x);
                self.round(x, rows, gate.inputs);
                let mut fed = self.fed_rows(gate, x, rows, &mut room.rounded);
                for piece in pieces {
                    let mut gateds = gateds.take(piece);
                    let columns = gateds.columns();
                    // A piece has at most CHUNK features, or more where there would be too many pieces.
                    for start in (columns.start * LANES..(columns.end * LANES).min(size)).step_by(CHUNK) {
                        let chunk = start..(start + CHUNK).min(columns.end * LANES).min(size);
                        self.product(gate, chunk.clone(), &mut fed, rows, y, CHUNK);
                        let from = start / LANES - columns.start;
                        for (row, y) in y.chunks_exact(CHUNK).take(rows).enumerate() {
                            let first = (row * self.weights.layers.len() + self.layer) * size + start;
                            let (gate, up) = (&y[..chunk.len()], &layer_embedding[first..first + chunk.len()]);
                            let out = &mut gateds.row_mut(row)[from..][..chunk.len().div_ceil(LANES)];
                            GateMul { activation: Activation::GeluTanh, gate, up, out }.run(self.isa);
                        }
                    }
                    for row in 0..rows {
                        let len = ((columns.end * LANES).min(size)) - columns.start * LANES;
                        self.round(gateds.row_mut(row), 1, len);
                    }
                }
            });
        }
        let gated = &gated[..rows * vectors];
        {
            let outs = Columns::new(added, rows, hidden, &self.shares.hidden.bounds);
            let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
            self.session.run(&self.shares.hidden.first, &|t, pieces| {
                let mut own = own.take(t);
                let Private { y, room, .. } = &mut own.row_mut(0)[0];
                let mut fed = self.fed_rows(projection, gated, rows, &mut room.rounded);
                for piece in pieces {
                    self.put_product(projection, &mut fed, rows, y, &mut outs.take(piece));
                }
            });
        }
        self.add_normed(Some(norm), scalar, added, h, private);
    }
}
