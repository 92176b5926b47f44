//! The end of a pass: final norm, LM head, and the hidden states, logits or most probable ids of the rows asked for.

use super::products::Fed;
use super::scratch::{CHUNK, Private};
use super::{Context, Decoder, Range};
use crate::error::{Error, Result, check_len};
use crate::isa::{LANES, Vector};
use crate::kernels::{Argmax, better};
use crate::memory::Columns;
use crate::pass::{MAX_TILE_ROWS, Output};

/// What the LM head is fed.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// Rows of a tile's residual stream `[.., hidden]`, to be normed: those asked for, as rows of the pass, and the
    /// tile's first.
    Residual(&'a [f32], &'a [usize], usize),
    /// `[L, hidden]`, normed.
    Final(&'a [f32]),
}

impl Decoder {
    /// Logits of the first `num_ids` ids of final hidden states `[L, hidden_size]`, into `logits` `[L, num_ids]`: the bits
    /// that a pass gives for them.
    ///
    /// # Errors
    /// Where a slice has another length, or `num_ids` is none of the vocabulary.
    pub fn logits(&mut self, hidden: &[f32], num_ids: usize, logits: &mut [f32]) -> Result<()> {
        let rows = self.check_head(hidden, num_ids)?;
        check_len("logits", logits.len(), rows * num_ids)?;
        let tiles = hidden.chunks(MAX_TILE_ROWS * self.weights.shape.hidden_size);
        for (hidden, logits) in tiles.zip(logits.chunks_mut(MAX_TILE_ROWS * num_ids)) {
            self.head(num_ids, |cx, private| cx.logits(Source::Final(hidden), num_ids, logits, private))?;
        }
        Ok(())
    }

    /// The most probable of the first `num_ids` ids of final hidden states `[L, hidden_size]`, and its logit, as
    /// [`Output::Argmax`] has them.
    ///
    /// # Errors
    /// As [`logits`](Self::logits).
    pub fn argmax(&mut self, hidden: &[f32], num_ids: usize, ids: &mut [i64], top: &mut [f32]) -> Result<()> {
        let rows = self.check_head(hidden, num_ids)?;
        check_len("ids", ids.len(), rows)?;
        check_len("top", top.len(), rows)?;
        let tiles = hidden.chunks(MAX_TILE_ROWS * self.weights.shape.hidden_size);
        let out = ids.chunks_mut(MAX_TILE_ROWS).zip(top.chunks_mut(MAX_TILE_ROWS));
        for (hidden, (ids, top)) in tiles.zip(out) {
            self.head(num_ids, |cx, private| cx.argmax(Source::Final(hidden), ids, top, private))?;
        }
        Ok(())
    }

    /// Rows of final hidden states.
    fn check_head(&self, hidden: &[f32], num_ids: usize) -> Result<usize> {
        let shape = &self.weights.shape;
        if !hidden.len().is_multiple_of(shape.hidden_size) {
            let allowed = format!("a multiple of hidden_size = {}", shape.hidden_size);
            return Err(Error::invalid("hidden", format!("{} elements", hidden.len()), allowed));
        }
        let known = self.weights.num_ids();
        if num_ids == 0 || num_ids > known {
            return Err(Error::invalid("num_ids", num_ids, format!("1 to vocab_size = {known}")));
        }
        Ok(hidden.len() / shape.hidden_size)
    }

    fn head(&mut self, num_ids: usize, work: impl FnOnce(&Context<'_>, &mut [Private])) -> Result<()> {
        let session = self.pool.enter()?;
        let shares = &mut self.shares[session.participants() - 1];
        shares.set_ids(num_ids);
        let cx = Context::without_rows(self.isa, self.bf16_rows, &self.weights, shares, &session);
        work(&cx, &mut self.private);
        Ok(())
    }
}

impl Context<'_> {
    /// What is asked of the rows of this tile, which are `tile` of the pass.
    pub(super) fn output(&self, output: &mut Output<'_>, tile: &Range<usize>, h: &[f32], private: &mut [Private]) {
        // Rows asked for are ascending, so those of a tile lie side by side.
        let within =
            |rows: &[usize]| rows.partition_point(|&row| row < tile.start)..rows.partition_point(|&row| row < tile.end);
        match output {
            Output::Nothing => {}
            Output::Hidden { rows, hidden } => {
                let (asked, size) = (within(rows), self.weights.shape.hidden_size);
                let x = &mut private[0].x;
                self.feed(Source::Residual(h, &rows[asked.clone()], tile.start), x);
                let out = hidden[asked.start * size..asked.end * size].chunks_exact_mut(size);
                for (out, x) in out.zip(x.chunks_exact(size.div_ceil(LANES))) {
                    out.copy_from_slice(&x.as_flattened()[..size]);
                }
            }
            Output::Logits { rows, num_ids, logits } => {
                let asked = within(rows);
                let logits = &mut logits[asked.start * *num_ids..asked.end * *num_ids];
                self.logits(Source::Residual(h, &rows[asked], tile.start), *num_ids, logits, private);
            }
            Output::Argmax { rows, ids, top, .. } => {
                let asked = within(rows);
                let source = Source::Residual(h, &rows[asked.clone()], tile.start);
                self.argmax(source, &mut ids[asked.clone()], &mut top[asked], private);
            }
        }
    }

    /// Writes the final hidden states of a source to `x`.
    fn feed(&self, source: Source<'_>, x: &mut [Vector]) {
        match source {
            Source::Residual(h, asked, first) => {
                self.norm(asked.iter().map(|row| row - first), h, Some(&self.weights.final_norm), x);
            }
            Source::Final(hidden) => {
                let size = self.weights.shape.hidden_size;
                for (hidden, x) in hidden.chunks_exact(size).zip(x.chunks_exact_mut(size.div_ceil(LANES))) {
                    let (values, padding) = x.as_flattened_mut().split_at_mut(size);
                    values.copy_from_slice(hidden);
                    padding.fill(0.0);
                }
            }
        }
    }

    fn logits(&self, source: Source<'_>, num_ids: usize, logits: &mut [f32], private: &mut [Private]) {
        let rows = logits.len() / num_ids;
        if rows == 0 {
            return;
        }
        let out = Columns::new(logits, rows, num_ids, &self.shares.ids);
        let own = Columns::new(private, 1, self.shares.threads, &self.shares.each);
        self.session.run(&|t| {
            let (mut out, mut own) = (out.take(t), own.take(t));
            let first = out.columns().start;
            self.chunks(source, rows, out.columns(), &mut own.row_mut(0)[0], |_, i, chunk, y| {
                out.row_mut(i)[chunk.start - first..chunk.end - first].copy_from_slice(y);
            });
        });
    }

    fn argmax(&self, source: Source<'_>, ids: &mut [i64], top: &mut [f32], private: &mut [Private]) {
        let rows = ids.len();
        if rows == 0 {
            return;
        }
        let own = Columns::new(private, 1, self.shares.threads, &self.shares.each);
        self.session.run(&|t| {
            let mut own = own.take(t);
            let own = &mut own.row_mut(0)[0];
            let ids = self.shares.ids[t]..self.shares.ids[t + 1];
            own.best[..rows].fill((ids.start, f32::NEG_INFINITY));
            self.chunks(source, rows, ids, own, |best, i, chunk, y| {
                if let Some((offset, x)) = self.isa.run(Argmax { x: y, best: best[i].1 }) {
                    best[i] = (chunk.start + offset, x);
                }
            });
        });
        // Shares are ascending, so a later one has to be better.
        for (i, (id, top)) in ids.iter_mut().zip(top).enumerate() {
            let mut best = private[0].best[i];
            for own in &private[1..self.shares.threads] {
                if better(own.best[i].1, best.1) {
                    best = own.best[i];
                }
            }
            (*id, *top) = (best.0 as i64, best.1);
        }
    }

    /// Calls `each` with (best, row of the source, ids, their logits) for chunks of `ids`.
    fn chunks(
        &self,
        source: Source<'_>,
        rows: usize,
        ids: Range<usize>,
        own: &mut Private,
        mut each: impl FnMut(&mut [(usize, f32)], usize, Range<usize>, &[f32]),
    ) {
        if ids.is_empty() {
            return;
        }
        let Private { x, y, best, .. } = own;
        self.feed(source, x);
        self.round(x, rows, self.weights.lm_head.inputs);
        for start in ids.clone().step_by(CHUNK) {
            let chunk = start..(start + CHUNK).min(ids.end);
            self.product(&self.weights.lm_head, chunk.clone(), &mut Fed::rows(x), rows, y, CHUNK);
            for (i, y) in y.chunks_exact(CHUNK).take(rows).enumerate() {
                each(best, i, chunk.clone(), &y[..chunk.len()]);
            }
        }
    }
}
