//! Input of a head: `fc` combines the target's hidden states before an EAGLE-3 head's passes, or embeddings and hidden
//! states as the first phase of the pass of an MTP head or an assistant. Output of an assistant's pass for the next.

use super::scratch::{Buffers, Private};
use super::{Context, Decoder};
use crate::error::{Error, Result, check_len};
use crate::linear::Linear;
use crate::pass::MAX_TILE_ROWS;
use crate::weights::{Head, HeadInput, Weights};
use specrs_cpu_kernels::{Columns, LANES, RmsNorm};

impl Decoder {
    /// Combines the target's hidden states `[N, L, its hidden size]` into states of the head, `out` `[N, hidden_size]`,
    /// which [`HeadStates`](crate::HeadStates) takes. The decoder's weights must be those of a head. For an MTP head or
    /// an assistant, which read the states as they are, it copies them to `out`.
    ///
    /// # Errors
    /// If a slice has a wrong length, or the decoder is no head.
    pub fn fuse(&mut self, states: &[f32], out: &mut [f32]) -> Result<()> {
        let weights: &Weights = &self.weights;
        let hidden = weights.shape.hidden_size;
        let Some(head) = &weights.head else {
            return Err(Error::invalid("states", "given", "none, because the decoder is no head"));
        };
        if head.combines() {
            check_len("out", out.len(), states.len())?;
            out.copy_from_slice(states);
            return Ok(());
        }
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
    /// Applies `fc` of an MTP head or an assistant to its input, the rows `[rows, inputs]` of `e`, and writes the result
    /// to the residual stream `h`.
    pub(super) fn combine(&self, head: &Head, buffers: &mut Buffers, private: &mut [Private]) {
        let (rows, inputs) = (self.rows(), head.fc.inputs);
        let Buffers { h, e, .. } = buffers;
        let e = &*e;
        let outs = Columns::new(h, rows, self.weights.shape.hidden_size, &self.shares.hidden.bounds);
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&self.shares.hidden.first, &|t, pieces| {
            let mut own = own.take(t);
            let Private { x, y, room, .. } = &mut own.row_mut(0)[0];
            for (row, x) in e.chunks_exact(inputs).zip(x.chunks_exact_mut(inputs.div_ceil(LANES))).take(rows) {
                let (values, padding) = x.as_flattened_mut().split_at_mut(inputs);
                values.copy_from_slice(row);
                padding.fill(0.0);
            }
            self.round(x, rows, inputs);
            let mut fed = self.fed_rows(&head.fc, x, rows, &mut room.rounded);
            for piece in pieces {
                self.put_product(&head.fc, &mut fed, rows, y, &mut outs.take(piece));
            }
        });
    }

    /// Writes the state that an assistant's pass leaves to the next, `out` `[rows, state_size]`: `post` of the final norm
    /// of the residual stream `h`. `out` may be empty.
    pub(super) fn leave(&self, post: &Linear, h: &[f32], out: &mut [f32], private: &mut [Private]) {
        if out.is_empty() {
            return;
        }
        let rows = self.rows();
        let outs = Columns::new(out, rows, post.outputs(), &self.shares.states.bounds);
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&self.shares.states.first, &|t, pieces| {
            let mut own = own.take(t);
            let Private { x, y, room, .. } = &mut own.row_mut(0)[0];
            self.norm(0..rows, h, Some(&self.weights.final_norm), x);
            self.round(x, rows, post.inputs);
            let mut fed = self.fed_rows(post, x, rows, &mut room.rounded);
            for piece in pieces {
                self.put_product(post, &mut fed, rows, y, &mut outs.take(piece));
            }
        });
    }

    fn fuse(&self, head: &Head, states: &[f32], out: &mut [f32], private: &mut [Private]) {
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

    /// Writes the input of `fc` into the thread's `x`.
    fn fuse_input(&self, head: &Head, states: &[f32], own: &mut Private) {
        let (inputs, eps) = (head.fc.inputs, self.weights.shape.rms_norm_eps);
        let (norm, together) = match &head.input {
            HeadInput::Eagle3 { fc_norm, together, .. } => (fc_norm.as_deref(), *together),
            HeadInput::Mtp { .. } | HeadInput::Assistant => (None, inputs),
        };
        let rows = own.x.chunks_exact_mut(inputs.div_ceil(LANES));
        for (states, x) in states.chunks_exact(inputs).zip(rows) {
            let (values, padding) = x.as_flattened_mut().split_at_mut(inputs);
            padding.fill(0.0);
            let Some(norm) = norm else {
                values.copy_from_slice(states);
                continue;
            };
            for (i, out) in values.chunks_exact_mut(together).enumerate() {
                let part = i * together..(i + 1) * together;
                let t = &mut own.t[..together.div_ceil(LANES)];
                RmsNorm { x: &states[part.clone()], weight: &norm[part], eps, out: t }.run(self.isa);
                out.copy_from_slice(&t.as_flattened()[..together]);
            }
        }
    }
}
