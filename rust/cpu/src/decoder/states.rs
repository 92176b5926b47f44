//! Layer with a state in the place of attention: input projection, then the state by parts, then output projection. It
//! takes three phases, and one more if a norm follows.

use super::Context;
use super::scratch::{Buffers, Private};
use crate::layer::Layer;
use crate::lora::Projection;
use crate::shape::DeltaShape;
use crate::state_layer::{StateLayer, StateNet};
use crate::states::{Run, States};
use specrs_cpu_kernels::{Columns, ColumnsMut, LANES};

/// Rows of a tile by request, and the split of their logs by parts.
#[derive(Clone, Copy)]
pub(super) struct StateTile<'a> {
    pub(super) runs: &'a [Run],
    pub(super) log_bounds: &'a [usize],
}

/// Outputs and states that the rows of one request write for one part.
pub(super) struct Written<'a, 'o> {
    /// State of the part: with a delta net the states of the value heads, then inputs of the convolution.
    pub(super) base: &'a mut [f32],
    pub(super) log: &'a mut [f32],
    /// Snapshots: copies of `base`, each after a given number of updates.
    pub(super) snapshots: &'a mut [(usize, &'a mut [f32])],
    /// Inputs of the output projection, the part's from column `first` on.
    pub(super) outs: &'a mut ColumnsMut<'o, f32>,
    pub(super) first: usize,
}

/// Inputs that the convolution of one part keeps.
pub(super) struct Convolution<'a> {
    /// Number of inputs at each position.
    pub(super) width: usize,
    /// Inputs at the last positions of the base state, `[kernel - 1, width]`.
    pub(super) earlier: &'a mut [f32],
    pub(super) log: &'a mut [f32],
    /// Number of elements in an entry of the log. The first `width` of them are the inputs of a draft.
    pub(super) entry: usize,
}

impl Convolution<'_> {
    /// Writes the inputs before a run's rows, and those of its rows, to `inputs` `[kernel - 1 + replay + rows, width]`.
    /// `gather` writes the inputs of a row.
    ///
    /// Keeps the inputs of the rows: those that are committed in the base state, the others in the log. Ends of
    /// snapshots get the inputs at their lengths.
    pub(super) fn feed(
        self,
        run: &Run,
        snapshots: &mut [(usize, &mut [f32])],
        inputs: &mut [f32],
        gather: impl Fn(usize, &mut [f32]),
    ) {
        let Self { width, earlier, log, entry } = self;
        let before = earlier.len();
        if run.zero {
            inputs[..before].fill(0.0);
        } else {
            inputs[..before].copy_from_slice(earlier);
        }
        let (known, new) = inputs.split_at_mut(before + run.replay * width);
        for (input, entry) in known[before..].chunks_exact_mut(width).zip(log.chunks_exact(entry)) {
            input.copy_from_slice(&entry[..width]);
        }
        for (input, &row) in new.chunks_exact_mut(width).zip(&run.rows) {
            gather(row, input);
        }
        if run.commit > 0 {
            earlier.copy_from_slice(&inputs[(run.replay + run.commit) * width..][..before]);
        }
        for (updates, kept) in snapshots {
            let end = kept.len() - before;
            kept[end..].copy_from_slice(&inputs[*updates * width..][..before]);
        }
        let drafts = inputs[before + (run.replay + run.commit) * width..].chunks_exact(width);
        for (entry, input) in log.chunks_exact_mut(entry).skip(run.log_from).zip(drafts) {
            entry[..width].copy_from_slice(input);
        }
    }
}

impl Context<'_> {
    pub(super) fn state_layer(
        &self,
        layer: &Layer,
        state: &StateLayer,
        states: &mut States,
        tile: StateTile<'_>,
        buffers: &mut Buffers,
        private: &mut [Private],
    ) {
        let (shape, rows, shares) = (&state.shape, self.rows(), self.shares);
        let inner = shape.inner();
        let Buffers { h, e, added, mixed, netted, .. } = buffers;
        self.project(layer, &shares.state_inputs, h, e, mixed, private);
        let mixed = &*mixed;
        {
            let outs = Columns::new(netted, rows, inner, &shares.state_outputs);
            let memory = states.split(state.index, tile.runs, &shares.state_bases, tile.log_bounds);
            let own = Columns::new(private, 1, shares.participants, &shares.each);
            self.session.run(&shares.state_parts.first, &|t, pieces| {
                let mut own = own.take(t);
                let room = &mut own.row_mut(0)[0].net;
                for piece in pieces {
                    let mut outs = outs.take(piece);
                    for row in (0..rows).filter(|&row| self.tile.positions[row] < 0) {
                        outs.row_mut(row).fill(0.0);
                    }
                    let parts = shares.state_parts.piece(piece);
                    let begin = shape.first_input(parts.start);
                    for (run, (bases, logs, snapshots)) in tile.runs.iter().zip(&memory) {
                        let (mut bases, mut logs) = (bases.take(piece), logs.take(piece));
                        let mut snapshots: Vec<_> =
                            snapshots.iter().map(|(updates, columns)| (*updates, columns.take(piece))).collect();
                        let bases = bases.row_mut(0).chunks_exact_mut(shape.base_len());
                        let log_len = logs.columns().len() / parts.len().max(1);
                        let logs = logs.row_mut(0);
                        for (i, (part, base)) in parts.clone().zip(bases).enumerate() {
                            let log = &mut logs[i * log_len..][..log_len];
                            let first = shape.first_input(part) - begin;
                            let of_part = i * shape.base_len()..(i + 1) * shape.base_len();
                            let snapshots = snapshots.iter_mut();
                            let mut snapshots: Vec<_> = snapshots
                                .map(|(updates, columns)| (*updates, &mut columns.row_mut(0)[of_part.clone()]))
                                .collect();
                            let written = Written { base, log, snapshots: &mut snapshots, outs: &mut outs, first };
                            match &state.net {
                                StateNet::Delta(net) => self.key_head(net, part, run, mixed, written, room),
                                StateNet::Conv(net) => self.conv_block(net, part, run, mixed, written, room),
                            }
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
            for (x, row) in x.chunks_exact_mut(inner.div_ceil(LANES)).zip(netted.chunks_exact(inner)).take(rows) {
                let (values, padding) = x.as_flattened_mut().split_at_mut(inner);
                match &state.net {
                    StateNet::Delta(net) if net.turned => turn(&net.shape, row, values),
                    _ => values.copy_from_slice(row),
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
}

/// Copies the value heads of a delta net's row `[key_heads, shared, value_dim]` to `out` `[shared, key_heads, value_dim]`.
fn turn(shape: &DeltaShape, row: &[f32], out: &mut [f32]) {
    for (i, head) in row.chunks_exact(shape.value_dim).enumerate() {
        let place = i % shape.shared() * shape.key_heads + i / shape.shared();
        out[place * shape.value_dim..][..shape.value_dim].copy_from_slice(head);
    }
}
