//! Gated delta net of a layer: convolution and delta rule of one key head.

use super::Context;
use super::scratch::NetRoom;
use super::states::{Convolution, Written};
use crate::state_layer::DeltaLayer;
use crate::states::Run;
use specrs_cpu_kernels::{ConvSilu, DeltaHead, GatedNorm, LANES, LogPlaces, Unit, Vector, decay, sigmoid};

impl Context<'_> {
    /// Computes the rows of one request for key head `head`. `mixed` is the output of the input projection.
    pub(super) fn key_head(
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
        let convolution = Convolution { width, earlier, log: &mut *log, entry };
        convolution.feed(run, snapshots, inputs, |row, input| places.gather(shape, row_of(row), input));

        let vectors = width / LANES;
        let convolved = &mut convolved[..count * vectors];
        ConvSilu {
            inputs: inputs[run.replay * width..].as_chunks::<LANES>().0,
            weight: &net.conv[head * shape.kernel * vectors..][..shape.kernel * vectors],
            vectors,
            out: convolved,
        }
        .run(self.isa);
        let convolved = convolved.as_flattened_mut();
        for row in convolved.chunks_exact_mut(width) {
            let (query, rest) = row.split_at_mut(dim);
            Unit { x: query, factor: 1.0 / (dim as f32).sqrt() }.run(self.isa);
            Unit { x: &mut rest[..dim], factor: 1.0 }.run(self.isa);
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
            DeltaHead {
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
            }
            .run(self.isa);
            for (x, &row) in out.chunks_exact(padded).zip(&run.rows) {
                let gate = &row_of(row)[places.gate + j * shape.value_dim..][..shape.value_dim];
                let out = &mut outs.row_mut(row)[first + j * shape.value_dim..][..shape.value_dim];
                let eps = self.weights.shape.rms_norm_eps;
                GatedNorm { x: &x[..shape.value_dim], weight: &net.norm, gate, eps, out }.run(self.isa);
            }
        }

        // What heads and their columns share is written last: all of them have read what was there.
        for (i, entry) in log.chunks_exact_mut(entry).skip(run.log_from).take(count - run.commit).enumerate() {
            let row = run.commit + i;
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
