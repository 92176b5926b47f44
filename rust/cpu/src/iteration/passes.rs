//! One pass of a model over gathered rows, and what it leaves: tokens drawn by argmax, or logits. Gathers nothing.

use specrs_core::sampling::largest;

use super::{Iteration, RowState};
use crate::error::Result;
use crate::{Decoder, KvCache, Output, Pass};

/// A model and its KV cache.
pub struct Cached<'a> {
    /// Runs the passes.
    pub decoder: &'a mut Decoder,
    /// What they write.
    pub kv_cache: &'a mut KvCache,
}

/// What is asked of the rows that a pass wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// Nothing: only KV.
    Nothing,
    /// The largest logit and its id.
    Best,
    /// All logits, and the largest of them.
    Logits,
    /// The same with its id: where some entry is greedy, or drafts stand at given rates.
    Both,
}

impl Want {
    /// What entries need of which some are greedy, some sample, or `best` all need the largest logit's id.
    pub(super) fn of(greedy: bool, sampled: bool, best: bool) -> Self {
        match (sampled, greedy || best) {
            (false, _) => Self::Best,
            (true, false) => Self::Logits,
            (true, true) => Self::Both,
        }
    }
}

impl Iteration {
    /// Runs the gathered rows; fills `tops` and, where asked for, `best` and `logits`, which are over the target's ids: minus
    /// infinity for those that a draft model does not know. Ids are held to the model's own vocabulary.
    pub(super) fn pass(&mut self, state: &RowState<'_>, model: &mut Cached<'_>, want: Want) -> Result<()> {
        let vocab_size = self.sampler.vocab_size();
        let known = model.decoder.weights().num_ids();
        if known < vocab_size {
            self.batch.tokens.iter_mut().for_each(|token| *token = (*token).min(known as i64 - 1));
        }
        let batch = &self.batch;
        let (count, num_ids) = (batch.wanted.len(), known.min(vocab_size));
        let pass = Pass {
            tokens: &batch.tokens,
            positions: &batch.positions,
            slots: &batch.slots,
            entries: &batch.rows,
            block_table: state.block_table,
            max_blocks: state.table_width(),
        };
        if want == Want::Nothing {
            return model.decoder.forward(&pass, model.kv_cache, Output::Nothing);
        }
        self.best.resize(count, 0);
        self.tops.resize(count, 0.0);
        if want == Want::Best {
            let output = Output::Argmax { rows: &batch.wanted, num_ids, ids: &mut self.best, top: &mut self.tops };
            return model.decoder.forward(&pass, model.kv_cache, output);
        }
        self.logits.resize(self.logits.len().max(count * vocab_size), 0.0);
        let logits = &mut self.logits[..count * num_ids];
        model.decoder.forward(&pass, model.kv_cache, Output::Logits { rows: &batch.wanted, num_ids, logits })?;
        if num_ids < vocab_size {
            spread(&mut self.logits[..count * vocab_size], num_ids, vocab_size);
        }
        for (i, row) in self.logits[..count * vocab_size].chunks_exact(vocab_size).enumerate() {
            let top = largest(row);
            let is_top = |x: &f32| if top.is_nan() { x.is_nan() } else { *x >= top };
            self.tops[i] = top;
            if want == Want::Both {
                self.best[i] = row.iter().position(is_top).unwrap_or(0) as i64;
            }
        }
        Ok(())
    }
}

/// Makes rows of `from` numbers, which lie at the start, rows of `to`, filled up with minus infinity.
fn spread(rows: &mut [f32], from: usize, to: usize) {
    for i in (0..rows.len() / to).rev() {
        rows.copy_within(i * from..(i + 1) * from, i * to);
        rows[i * to + from..(i + 1) * to].fill(f32::NEG_INFINITY);
    }
}

#[cfg(test)]
mod tests {
    use super::spread;

    #[test]
    fn rows_are_spread_in_place() {
        const NONE: f32 = f32::NEG_INFINITY;
        let mut rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0, 0.0];
        spread(&mut rows, 2, 3);
        assert_eq!(rows.map(f32::to_bits), [1.0, 2.0, NONE, 3.0, 4.0, NONE, 5.0, 6.0, NONE].map(f32::to_bits));
    }
}
