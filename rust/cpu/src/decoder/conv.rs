//! Short convolution of a layer: one block of channels.

use super::Context;
use super::scratch::NetRoom;
use super::states::{Convolution, Written};
use crate::shape::ConvShape;
use crate::state_layer::ConvLayer;
use crate::states::Run;
use specrs_cpu_kernels::{GatedConv, LANES};

impl Context<'_> {
    /// Computes the rows of one request for block `block` of the channels. `mixed` is the output of the input
    /// projection: B, C and x of each row.
    pub(super) fn conv_block(
        &self,
        net: &ConvLayer,
        block: usize,
        run: &Run,
        mixed: &[f32],
        written: Written<'_, '_>,
        room: &mut NetRoom,
    ) {
        const WIDTH: usize = ConvShape::BLOCK;
        const VECTORS: usize = WIDTH / LANES;
        let Written { base, log, snapshots, outs, first } = written;
        let ConvShape { channels, kernel } = net.shape;
        let own = block * WIDTH..((block + 1) * WIDTH).min(channels);
        let count = run.rows.len();
        let features = |row: usize, kind: usize| &mixed[(3 * row + kind) * channels..][own.clone()];

        let NetRoom { inputs, mixed: gated, .. } = room;
        let inputs = &mut inputs.as_flattened_mut()[..(kernel - 1 + run.replay + count) * WIDTH];
        let convolution = Convolution { width: WIDTH, earlier: base, log, entry: WIDTH };
        convolution.feed(run, snapshots, inputs, |row, input| {
            let (values, padding) = input.split_at_mut(own.len());
            for ((value, b), x) in values.iter_mut().zip(features(row, 0)).zip(features(row, 2)) {
                *value = b * x;
            }
            padding.fill(0.0);
        });

        let gated = &mut gated[..count * VECTORS];
        for (gate, &row) in gated.chunks_exact_mut(VECTORS).zip(&run.rows) {
            let (values, padding) = gate.as_flattened_mut().split_at_mut(own.len());
            values.copy_from_slice(features(row, 1));
            padding.fill(0.0);
        }
        GatedConv {
            inputs: inputs[run.replay * WIDTH..].as_chunks::<LANES>().0,
            weight: &net.conv[block * kernel * VECTORS..][..kernel * VECTORS],
            vectors: VECTORS,
            gated: &mut *gated,
        }
        .run(self.isa);
        for (gated, &row) in gated.chunks_exact(VECTORS).zip(&run.rows) {
            outs.row_mut(row)[first..][..own.len()].copy_from_slice(&gated.as_flattened()[..own.len()]);
        }
    }
}
