//! End of a pass: final norm, LM head, and the hidden states, logits or most probable ids of the requested rows.

use super::products::{Fed, FedRoom};
use super::scratch::Private;
use super::{CHUNK, Context, Decoder, Range};
use crate::error::{Error, Result, check_len};
use crate::pass::{MAX_TILE_ROWS, Output};
use specrs_cpu_kernels::{Argmax, Columns, LANES, Softcap, Vector, better};

/// Input of the LM head.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// Rows of a tile's residual stream `[.., hidden]` that still have to be normed. The fields are the stream, the
    /// requested rows as rows of the pass, and the tile's first row.
    Residual(&'a [f32], &'a [usize], usize),
    /// Normed final hidden states, `[L, hidden]`.
    Final(&'a [f32]),
}

impl Decoder {
    /// Writes the logits of the first `num_ids` ids for final hidden states `[L, hidden_size]` into `logits` `[L,
    /// num_ids]`. They have the same bits as the logits of a pass.
    ///
    /// # Errors
    /// If a slice has a wrong length, or `num_ids` is 0 or larger than the vocabulary.
    pub fn logits(&mut self, hidden: &[f32], num_ids: usize, logits: &mut [f32]) -> Result<()> {
        let rows = self.check_head(hidden, num_ids)?;
        check_len("logits", logits.len(), rows * num_ids)?;
        let tiles = hidden.chunks(MAX_TILE_ROWS * self.weights.shape.hidden_size);
        for (hidden, logits) in tiles.zip(logits.chunks_mut(MAX_TILE_ROWS * num_ids)) {
            self.head(num_ids, |cx, private| cx.logits(Source::Final(hidden), num_ids, logits, private))?;
        }
        Ok(())
    }

    /// Finds the most probable of the first `num_ids` ids and its logit for final hidden states `[L, hidden_size]`, as
    /// [`Output::Argmax`] does.
    ///
    /// # Errors
    /// If a slice has a wrong length, or `num_ids` is 0 or larger than the vocabulary.
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

    /// Checks the arguments of the LM head and returns the number of rows of final hidden states.
    fn check_head(&self, hidden: &[f32], num_ids: usize) -> Result<usize> {
        let shape = &self.weights.shape;
        if !hidden.len().is_multiple_of(shape.hidden_size) {
            let allowed = format!("a multiple of hidden_size={}", shape.hidden_size);
            return Err(Error::invalid("hidden", format!("{} elements", hidden.len()), allowed));
        }
        let known = self.weights.num_ids();
        if num_ids == 0 || num_ids > known {
            return Err(Error::invalid("num_ids", num_ids, format!("from 1 to vocab_size={known}")));
        }
        Ok(hidden.len() / shape.hidden_size)
    }

    fn head(&mut self, num_ids: usize, work: impl FnOnce(&Context<'_>, &mut [Private])) -> Result<()> {
        let session = self.pool.enter()?;
        let shares = &mut self.shares[session.participants() - 1][0];
        shares.set_ids(num_ids);
        let cx = Context::without_rows(self.isa, self.activations, &self.weights, shares, &session);
        work(&cx, &mut self.private);
        Ok(())
    }
}

impl Context<'_> {
    /// Writes the requested output of the rows of this tile, which are rows `tile` of the pass.
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
        let out = Columns::new(logits, rows, num_ids, &self.shares.ids.bounds);
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&self.shares.ids.first, &|t, pieces| {
            let mut own = own.take(t);
            let Private { x, y, room, .. } = &mut own.row_mut(0)[0];
            let mut fed = self.feed_head(source, rows, x, room);
            for piece in pieces {
                let mut out = out.take(piece);
                let ids = out.columns();
                self.chunks(rows, ids.clone(), &mut fed, y, |i, chunk, y| {
                    out.row_mut(i)[chunk.start - ids.start..chunk.end - ids.start].copy_from_slice(y);
                });
            }
        });
    }

    fn argmax(&self, source: Source<'_>, ids: &mut [i64], top: &mut [f32], private: &mut [Private]) {
        let rows = ids.len();
        if rows == 0 {
            return;
        }
        for own in &mut *private {
            own.best[..rows].fill(NO_ID);
        }
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&self.shares.ids.first, &|t, pieces| {
            let mut own = own.take(t);
            let Private { x, y, best, room, .. } = &mut own.row_mut(0)[0];
            let mut fed = self.feed_head(source, rows, x, room);
            for piece in pieces {
                let (ids, mut of_piece) = (self.shares.ids.piece(piece), [NO_ID; MAX_TILE_ROWS]);
                // Of ids that come later only a better one counts; before them an equal one does, too.
                for (found, best) in of_piece.iter_mut().zip(&best[..rows]).filter(|(_, best)| best.0 < ids.start) {
                    *found = *best;
                }
                self.chunks(rows, ids, &mut fed, y, |i, chunk, y| {
                    let found = Argmax { x: y, best: of_piece[i].1 }.run(self.isa);
                    if let Some((offset, x)) = found {
                        of_piece[i] = (chunk.start + offset, x);
                    }
                });
                best.iter_mut().zip(&of_piece[..rows]).for_each(|(best, found)| *best = best_of(*best, *found));
            }
        });
        for (i, (id, top)) in ids.iter_mut().zip(top).enumerate() {
            let found = private.iter().map(|own| own.best[i]).fold(NO_ID, best_of);
            // Where no logit is larger than minus infinity, the first id is as good as any.
            (*id, *top) = (if found == NO_ID { 0 } else { found.0 as i64 }, found.1);
        }
    }

    /// Writes the final hidden states of a source to `x`, in the form that the LM head is fed.
    fn feed_head<'a>(&self, source: Source<'_>, rows: usize, x: &'a mut [Vector], room: &'a mut FedRoom) -> Fed<'a> {
        self.feed(source, x);
        self.round(x, rows, self.weights.lm_head.inputs);
        self.fed_rows(&self.weights.lm_head, x, rows, &mut room.rounded)
    }

    /// Calls `each` with (row, ids, their logits) for chunks of `ids`.
    fn chunks(
        &self,
        rows: usize,
        ids: Range<usize>,
        fed: &mut Fed<'_>,
        y: &mut [f32],
        mut each: impl FnMut(usize, Range<usize>, &[f32]),
    ) {
        for start in ids.clone().step_by(CHUNK) {
            let chunk = start..(start + CHUNK).min(ids.end);
            self.product(&self.weights.lm_head, chunk.clone(), fed, rows, y, CHUNK);
            if let Some(cap) = self.weights.softcap {
                for y in y.chunks_exact_mut(CHUNK).take(rows) {
                    Softcap { x: &mut y[..chunk.len()], cap }.run(self.isa);
                }
            }
            for (i, y) in y.chunks_exact(CHUNK).take(rows).enumerate() {
                each(i, chunk.clone(), &y[..chunk.len()]);
            }
        }
    }
}

/// Value for no id, which is less probable than every id.
const NO_ID: (usize, f32) = (usize::MAX, f32::NEG_INFINITY);

/// Returns the more probable of two ids, or the lower id if they are equally probable. The result does not depend on
/// the order, because pieces are done in any order.
fn best_of(a: (usize, f32), b: (usize, f32)) -> (usize, f32) {
    if better(b.1, a.1) || (b.0 < a.0 && !better(a.1, b.1)) { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(crate::cases(256))]

        #[test]
        fn the_best_id_is_the_same_in_any_order(
            logits in prop::collection::vec(prop::sample::select(vec![f32::NAN, f32::NEG_INFINITY, 0.0, -0.0, 1.0]), 1..9),
            order in any::<u64>(),
        ) {
            let mut ids: Vec<_> = logits.iter().copied().enumerate().collect();
            ids.sort_by_key(|&(id, _)| (id as u64 + 1).wrapping_mul(order | 1).rotate_left(29));
            let found = ids.into_iter().fold(NO_ID, best_of);
            let mut first = (0, logits[0]);
            for (id, &x) in logits.iter().enumerate() {
                if better(x, first.1) {
                    first = (id, x);
                }
            }
            prop_assert_eq!(found.0, first.0);
            prop_assert_eq!(found.1.to_bits(), first.1.to_bits());
        }
    }
}
