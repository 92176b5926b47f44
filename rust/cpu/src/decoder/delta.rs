//! Gated delta net of a layer, in the place of attention: input projection, convolution and delta rule by key head,
//! output projection. It takes three phases, and one more if a norm follows.

use super::Context;
use super::scratch::{Buffers, NetRoom, Private};
use crate::isa::{LANES, Vector};
use crate::kernels::{ConvSilu, DeltaHead, GatedNorm, LogPlaces, Unit, decay, sigmoid};
use crate::layer::{DeltaLayer, Layer};
use crate::lora::Projection;
use crate::memory::{Columns, ColumnsMut};
use crate::shape::DeltaShape;
use crate::states::{Run, States};

/// Rows of a tile by request, and the split of their logs by key heads.
#[derive(Clone, Copy)]
pub(super) struct NetTile<'a> {
    pub(super) runs: &'a [Run],
    pub(super) log_bounds: &'a [usize],
}

/// Outputs and states that the rows of one request write for a key head.
struct Written<'a, 'o> {
    /// States of the key head's value heads, and inputs of the convolution.
    base: &'a mut [f32],
    log: &'a mut [f32],
    /// Snapshots: copies of `base`, each after a given number of updates.
    snapshots: &'a mut [(usize, &'a mut [f32])],
    /// Outputs of value heads, the key head's from column `first` on.
    outs: &'a mut ColumnsMut<'o, f32>,
    first: usize,
}

impl Context<'_> {
    pub(super) fn delta_net(
        &self,
        layer: &Layer,
        net: &DeltaLayer,
        states: &mut States,
        tile: NetTile<'_>,
        buffers: &mut Buffers,
        private: &mut [Private],
    ) {
        let (shape, rows, shares) = (&net.shape, self.rows(), self.shares);
        let Buffers { h, e, added, mixed, netted, .. } = buffers;
        self.project(layer, &shares.net_inputs, h, e, mixed, private);
        let mixed = &*mixed;
        {
            let outs = Columns::new(netted, rows, shape.inner(), &shares.net_outputs);
            let parts = states.split(net.index, tile.runs, &shares.net_states, tile.log_bounds);
            let own = Columns::new(private, 1, shares.participants, &shares.each);
            self.session.run(&shares.key_heads.first, &|t, pieces| {
                let mut own = own.take(t);
                let room = &mut own.row_mut(0)[0].net;
                for piece in pieces {
                    let mut outs = outs.take(piece);
                    for row in (0..rows).filter(|&row| self.tile.positions[row] < 0) {
                        outs.row_mut(row).fill(0.0);
                    }
                    let heads = shares.key_heads.piece(piece);
                    for (run, (bases, logs, snapshots)) in tile.runs.iter().zip(&parts) {
                        let (mut bases, mut logs) = (bases.take(piece), logs.take(piece));
                        let mut snapshots: Vec<_> =
                            snapshots.iter().map(|(updates, columns)| (*updates, columns.take(piece))).collect();
                        let bases = bases.row_mut(0).chunks_exact_mut(shape.base_len());
                        let log_len = logs.columns().len() / heads.len().max(1);
                        let logs = logs.row_mut(0);
                        for (i, (head, base)) in heads.clone().zip(bases).enumerate() {
                            let log = &mut logs[i * log_len..][..log_len];
                            let first = i * shape.shared() * shape.value_dim;
                            let of_head = i * shape.base_len()..(i + 1) * shape.base_len();
                            let snapshots = snapshots.iter_mut();
                            let mut snapshots: Vec<_> = snapshots
                                .map(|(updates, columns)| (*updates, &mut columns.row_mut(0)[of_head.clone()]))
                                .collect();
                            let written = Written { base, log, snapshots: &mut snapshots, outs: &mut outs, first };
                            self.key_head(net, head, run, mixed, written, room);
                        }
                    }
                }
            });
        }
        let netted = &*netted;
        let norm = layer.attention_output_norm.as_deref();
        let out = if norm.is_some() { &mut *added } else { &mut *h };
        let outs = Columns::new(out, rows, self.weights.shape.hidden_size, &shares.hidden.bounds);
        let own = Columns::new(private, 1, shares.participants, &shares.each);
        self.session.run(&shares.hidden.first, &|t, pieces| {
            let mut own = own.take(t);
            let Private { x, y, room, .. } = &mut own.row_mut(0)[0];
            let inner = shape.inner();
            for (x, row) in x.chunks_exact_mut(inner.div_ceil(LANES)).zip(netted.chunks_exact(inner)).take(rows) {
                let (values, padding) = x.as_flattened_mut().split_at_mut(inner);
                if net.turned {
                    turn(shape, row, values);
                } else {
                    values.copy_from_slice(row);
                }
                padding.fill(0.0);
            }
            self.round(x, rows, layer.o.inputs);
            let mut fed = self.fed(Projection::O, &layer.o, x, room);
            for piece in pieces {
                self.give(&layer.o, norm.is_some(), &mut fed, y, &mut outs.take(piece));
            }
        });
        self.add_normed(norm, 1.0, added, h, private);
    }

    /// Computes the rows of one request for key head `head`. `mixed` is the output of the input projection.
    fn key_head(
        &self,
        net: &DeltaLayer,
        head: usize,
        run: &Run,
        mixed: &[f32],
        written: Written<'_, '_>,
        room: &mut NetRoom,
    ) {
        let Written { base, log, snapshots, outs, first } = written;
        let shape = &net.shape;
        let (width, shared, dim, padded) = (shape.width(), shape.shared(), shape.key_dim, shape.padded_value());
        let (entry, before, count) = (shape.entry_len(), shape.kernel - 1, run.rows.len());
        let (states, earlier) = base.split_at_mut(shared * dim * padded);
        let row_of = |row: usize| &mixed[row * shape.outputs()..][..shape.outputs()];
        let places = shape.places(head, net.by_key_head);

        let NetRoom { inputs, mixed: convolved, gates, out, state } = room;
        let inputs = &mut inputs.as_flattened_mut()[..(before + run.replay + count) * width];
        if run.zero {
            inputs[..before * width].fill(0.0);
        } else {
            inputs[..before * width].copy_from_slice(earlier);
        }
        let (known, new) = inputs.split_at_mut((before + run.replay) * width);
        for (input, entry) in known[before * width..].chunks_exact_mut(width).zip(log.chunks_exact(entry)) {
            input.copy_from_slice(&entry[..width]);
        }
        for (input, &row) in new.chunks_exact_mut(width).zip(&run.rows) {
            places.gather(shape, row_of(row), input);
        }
        if run.commit > 0 {
            earlier.copy_from_slice(&inputs[(run.replay + run.commit) * width..][..before * width]);
        }

        for (updates, kept) in snapshots.iter_mut() {
            kept[shared * dim * padded..].copy_from_slice(&inputs[*updates * width..][..before * width]);
        }

        let vectors = width / LANES;
        let convolved = &mut convolved[..count * vectors];
        self.isa.run(ConvSilu {
            inputs: inputs[run.replay * width..].as_chunks::<LANES>().0,
            weight: &net.conv[head * shape.kernel * vectors..][..shape.kernel * vectors],
            vectors,
            out: convolved,
        });
        let convolved = convolved.as_flattened_mut();
        for row in convolved.chunks_exact_mut(width) {
            let (query, rest) = row.split_at_mut(dim);
            self.isa.run(Unit { x: query, factor: 1.0 / (dim as f32).sqrt() });
            self.isa.run(Unit { x: &mut rest[..dim], factor: 1.0 });
        }
        for j in 0..shared {
            let value_head = head * shared + j;
            for (gates, &row) in gates[j * count..][..count].iter_mut().zip(&run.rows) {
                let (b, a) = (row_of(row)[places.b + j], row_of(row)[places.a + j]);
                *gates = (sigmoid(b), decay(a, net.dt_bias[value_head], net.rates[value_head]));
            }
        }

        let logged = |j| LogPlaces {
            entry,
            key: width,
            delta: width + dim + j * padded,
            decay: width + dim + shared * padded + j,
        };
        for (j, head_state) in states.chunks_exact_mut(dim * padded).enumerate() {
            let of_head = j * dim * padded..(j + 1) * dim * padded;
            let mut snapshots: Vec<(usize, &mut [f32])> =
                snapshots.iter_mut().map(|(updates, kept)| (*updates, &mut kept[of_head.clone()])).collect();
            self.isa.run(DeltaHead {
                snapshots: &mut snapshots,
                key_dim: dim,
                value_dim: shape.value_dim,
                state: head_state,
                zero: run.zero,
                replay: run.replay,
                commit: run.commit,
                log_from: run.log_from,
                log: &mut *log,
                places: logged(j),
                rows: convolved,
                stride: width,
                value: 2 * dim + j * shape.value_dim,
                gates: &gates[j * count..][..count],
                out: &mut out[..count * padded],
                scratch: &mut *state,
            });
            for (x, &row) in out.chunks_exact(padded).zip(&run.rows) {
                let gate = &row_of(row)[places.gate + j * shape.value_dim..][..shape.value_dim];
                let out = &mut outs.row_mut(row)[first + j * shape.value_dim..][..shape.value_dim];
                let eps = self.weights.shape.rms_norm_eps;
                self.isa.run(GatedNorm { x: &x[..shape.value_dim], weight: &net.norm, gate, eps, out });
            }
        }

        // What heads and their columns share is written last: all of them have read what was there.
        let new = &inputs[(before + run.replay + run.commit) * width..];
        let entries = log.chunks_exact_mut(entry).skip(run.log_from);
        for (i, (entry, input)) in entries.zip(new.chunks_exact(width)).enumerate() {
            let row = run.commit + i;
            entry[..width].copy_from_slice(input);
            entry[width..][..dim].copy_from_slice(&convolved[row * width + dim..][..dim]);
            for j in 0..shared {
                entry[logged(j).decay] = gates[j * count + row].1;
            }
        }
    }

    /// Multiplies the outputs of attention in `x` `[rows, ceil(heads head_dim / 16)]` by their gates `[heads, rows,
    /// ceil(head_dim / 16)]`.
    pub(super) fn apply_gates(&self, gates: &[Vector], x: &mut [Vector]) {
        let shape = &self.weights.shape;
        let (rows, dim) = (self.rows(), shape.head_dim);
        let inputs = shape.num_heads * dim;
        let vectors = dim.div_ceil(LANES);
        for (row, x) in x.chunks_exact_mut(inputs.div_ceil(LANES)).take(rows).enumerate() {
            for (head, x) in x.as_flattened_mut()[..inputs].chunks_exact_mut(dim).enumerate() {
                let gates = gates[(head * rows + row) * vectors..][..vectors].as_flattened();
                for (x, gate) in x.iter_mut().zip(gates) {
                    *x *= gate;
                }
            }
        }
    }
}

/// Copies the value heads of a row `[key_heads, shared, value_dim]` to `out` `[shared, key_heads, value_dim]`.
fn turn(shape: &DeltaShape, row: &[f32], out: &mut [f32]) {
    for (i, head) in row.chunks_exact(shape.value_dim).enumerate() {
        let place = i % shape.shared() * shape.key_heads + i / shape.shared();
        out[place * shape.value_dim..][..shape.value_dim].copy_from_slice(head);
    }
}
