//! Input of an EAGLE-3 head: combines the target's hidden states before the head's passes, in one phase.

use super::scratch::Private;
use super::{Context, Decoder};
use crate::error::{Error, Result, check_len};
use crate::isa::LANES;
use crate::kernels::RmsNorm;
use crate::memory::Columns;
use crate::pass::MAX_TILE_ROWS;
use crate::weights::{Normed, Weights};

impl Decoder {
    /// Combines the target's hidden states `[N, L, its hidden size]` into states of the head, `out` `[N, hidden_size]`,
    /// which [`Eagle3Input`](crate::Eagle3Input) takes. The decoder's weights must be those of an EAGLE-3 head.
    ///
    /// # Errors
    /// If a slice has a wrong length, or the decoder is no head.
    pub fn fuse(&mut self, states: &[f32], out: &mut [f32]) -> Result<()> {
        let weights: &Weights = &self.weights;
        let hidden = weights.shape.hidden_size;
        let Some(head) = &weights.eagle3 else {
            return Err(Error::invalid("states", "given", "none: it is no head"));
        };
        let inputs = head.fc.inputs;
        if !states.len().is_multiple_of(inputs) {
            let allowed = format!("a multiple of the {inputs} inputs of fc");
            return Err(Error::invalid("states", format!("{} elements", states.len()), allowed));
        }
        check_len("out", out.len(), states.len() / inputs * hidden)?;
        let session = self.pool.enter()?;
        let shares = &self.shares[session.participants() - 1][0];
        for (states, out) in states.chunks(MAX_TILE_ROWS * inputs).zip(out.chunks_mut(MAX_TILE_ROWS * hidden)) {
            let cx = Context::without_rows(self.isa, self.activations, weights, shares, &session);
            cx.fuse(head, states, out, &mut self.private);
        }
        Ok(())
    }
}

impl Context<'_> {
    fn fuse(&self, head: &Normed, states: &[f32], out: &mut [f32], private: &mut [Private]) {
        let rows = states.len() / head.fc.inputs;
        let outs = Columns::new(out, rows, self.weights.shape.hidden_size, &self.shares.hidden.bounds);
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&self.shares.hidden.first, &|t, pieces| {
            let mut own = own.take(t);
            let own = &mut own.row_mut(0)[0];
            self.fuse_input(head, states, own);
            self.round(&mut own.x, rows, head.fc.inputs);
            let Private { x, y, room, .. } = own;
            let mut fed = self.fed_rows(&head.fc, x, rows, &mut room.rounded);
            for piece in pieces {
                self.put_product(&head.fc, &mut fed, rows, y, &mut outs.take(piece));
            }
        });
    }

    /// Writes the input of `fc` into the participant's `x`.
    fn fuse_input(&self, head: &Normed, states: &[f32], own: &mut Private) {
        let (inputs, together, eps) = (head.fc.inputs, head.together, self.weights.shape.rms_norm_eps);
        let rows = own.x.chunks_exact_mut(inputs.div_ceil(LANES));
        for (states, x) in states.chunks_exact(inputs).zip(rows) {
            let (values, padding) = x.as_flattened_mut().split_at_mut(inputs);
            padding.fill(0.0);
            let Some(norm) = &head.fc_norm else {
                values.copy_from_slice(states);
                continue;
            };
            for (i, out) in values.chunks_exact_mut(together).enumerate() {
                let part = i * together..(i + 1) * together;
                let t = &mut own.t[..together.div_ceil(LANES)];
                self.isa.run(RmsNorm { x: &states[part.clone()], weight: &norm[part], eps, out: t });
                out.copy_from_slice(&t.as_flattened()[..together]);
            }
        }
    }
}
