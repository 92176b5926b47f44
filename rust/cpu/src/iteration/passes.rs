//! One pass of a model over gathered rows, and what it leaves: tokens drawn by argmax, or logits. Gathers nothing.

use specrs_core::sampling::{UNKNOWN_BELOW, largest};

use super::{Entry, Iteration, Model, RowState};
use crate::error::Result;
use crate::{Beside, Entries, Output, Pass};
use std::time::Instant;

/// Whose pass it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// The target's, which keeps the hidden states that a head will read.
    Target,
    /// A draft model's.
    Draft,
    /// A head's, over what its states are.
    Head,
}

/// What is asked of the rows that a pass wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// Nothing: only KV.
    Nothing,
    /// The final hidden states.
    Hidden,
    /// The largest logit and its id.
    Best,
    /// All logits, and the largest of them.
    Logits,
    /// The same with its id: where some entry is greedy, or drafts stand at given rates.
    Both,
}

impl Want {
    /// What these entries need of the target.
    pub(super) fn of_target<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Self {
        Self::of(entries, |entry| entry.asked.logprobs)
    }

    /// What these entries need of a drafter, whose log probabilities are not reported.
    pub(super) fn of_drafter<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Self {
        Self::of(entries, |_| false)
    }

    fn of<'a>(entries: impl IntoIterator<Item = &'a Entry>, reports: impl Fn(&Entry) -> bool) -> Self {
        let (mut largest, mut logits) = (false, false);
        for entry in entries {
            largest |= entry.takes_largest();
            logits |= reports(entry) || !entry.takes_largest();
        }
        match (logits, largest) {
            (false, _) => Self::Best,
            (true, false) => Self::Logits,
            (true, true) => Self::Both,
        }
    }

    /// The same where the largest logit's id is needed of all.
    pub(super) fn with_best(self) -> Self {
        if self == Self::Logits { Self::Both } else { self }
    }
}

impl Iteration {
    /// Runs the gathered rows; fills `tops` and, where asked for, `best` and `logits`, which are over the target's ids: minus
    /// infinity for those that a draft model does not know, far below the others for those that a head does not. Ids are held
    /// to a draft model's own vocabulary.
    pub(super) fn pass(&mut self, state: &RowState<'_>, model: &mut dyn Model, want: Want, whose: Whose) -> Result<()> {
        let prompts = self.batch.prompts;
        let vocab_size = self.sampler.vocab_size();
        let known = model.facts().num_ids;
        if whose == Whose::Draft && known < vocab_size {
            self.batch.tokens.iter_mut().for_each(|token| *token = (*token).min(known as i64 - 1));
        }
        let in_groups = whose == Whose::Target && !state.group_tables.is_empty();
        if in_groups {
            self.batch.find_group_slots(state, self.config.block_size);
        }
        // Only where blocks come back behind windows, or states are not kept, does KV of drafts begin behind position 0.
        let begins_late = whose == Whose::Head || self.config.sliding_window.is_some();
        let Self { batch, hidden, best, tops, logits, pass_time, .. } = self;
        let (count, num_ids) = (batch.wanted.len(), known.min(vocab_size));
        let pass = Pass {
            tokens: &batch.tokens,
            positions: &batch.positions,
            slots: &batch.slots,
            entries: &batch.rows,
            block_table: state.block_table,
            max_blocks: state.table_width(),
            group_slots: &batch.group_slots,
            group_tables: if in_groups { state.group_tables } else { &[] },
            k_start: if whose == Whose::Target || !begins_late { &[] } else { state.draft_start },
            prompts,
            adapters: &[],
        };
        // A pass that keeps hidden states has none to write.
        let mut forward = |model: &mut dyn Model, output: Option<Output<'_>>| {
            let begun = pass_time.is_some().then(Instant::now);
            let (beside, entries) = match whose {
                Whose::Target => {
                    let states = room(&mut hidden.captured, pass.len() * hidden.size);
                    (None, Entries { layers: &hidden.layers, states })
                }
                Whose::Draft => (None, Entries { layers: &[], states: &mut [] }),
                Whose::Head => {
                    let states = room(&mut hidden.left, hidden.beside.len());
                    (Some(Beside { hidden: &hidden.beside }), Entries { layers: &[1], states })
                }
            };
            let done = match output {
                Some(output) => model.forward(&pass, beside, output, entries),
                None => model.forward_keeping(&pass, &batch.wanted, entries),
            };
            if let (Some(total), Some(begun)) = (pass_time.as_mut(), begun) {
                *total += begun.elapsed();
            }
            done
        };
        if want == Want::Nothing {
            return forward(model, Some(Output::Nothing));
        }
        if want == Want::Hidden {
            return forward(model, None);
        }
        best.resize(count, 0);
        tops.resize(count, 0.0);
        let spreads = num_ids < vocab_size;
        if want == Want::Best {
            forward(model, Some(Output::Argmax { rows: &batch.wanted, num_ids, ids: best, top: tops }))?;
            if spreads && let Some(ids) = model.facts().target_ids {
                for (best, top) in best.iter_mut().zip(tops) {
                    *best = if top.is_nan() { 0 } else { ids[*best as usize] };
                }
            }
            return Ok(());
        }
        logits.resize(logits.len().max(count * vocab_size), 0.0);
        let output = Output::Logits { rows: &batch.wanted, num_ids, logits: &mut logits[..count * num_ids] };
        forward(model, Some(output))?;
        let logits = &mut logits[..count * vocab_size];
        match model.facts().target_ids {
            _ if !spreads => {}
            Some(ids) => spread_head(logits, ids, vocab_size),
            None => spread(logits, num_ids, vocab_size),
        }
        self.find_largest(count, want == Want::Both);
        Ok(())
    }

    /// Fills `tops` and, `with_ids`, `best` from the first `count` rows of `logits`.
    pub(super) fn find_largest(&mut self, count: usize, with_ids: bool) {
        let vocab_size = self.sampler.vocab_size();
        self.best.resize(count, 0);
        self.tops.resize(count, 0.0);
        for (i, row) in self.logits.chunks_exact(vocab_size).take(count).enumerate() {
            self.tops[i] = largest(row);
            if with_ids {
                self.best[i] = first_of(row, self.tops[i]);
            }
        }
    }
}

/// The lowest id of a row's largest logit, `top`; the first NaN where there is one.
pub(super) fn first_of(row: &[f32], top: f32) -> i64 {
    let is_top = |x: &f32| if top.is_nan() { x.is_nan() } else { *x >= top };
    row.iter().position(is_top).unwrap_or(0) as i64
}

/// The first `len` numbers of a buffer that only grows: what is written over anyway is not filled with zeros for each pass.
fn room(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// Makes rows of `from` numbers, which lie at the start, rows of `to`, filled up with minus infinity.
fn spread(rows: &mut [f32], from: usize, to: usize) {
    for i in (0..rows.len() / to).rev() {
        rows.copy_within(i * from..(i + 1) * from, i * to);
        rows[i * to + from..(i + 1) * to].fill(f32::NEG_INFINITY);
    }
}

/// Makes rows over a head's ids, which lie at the start, rows of `to`: each at the target's id, which ascend, the others far
/// below all of them.
fn spread_head(rows: &mut [f32], ids: &[i64], to: usize) {
    let from = ids.len();
    for i in (0..rows.len() / to).rev() {
        let least = |least: f32, x: &f32| if least.is_nan() || *x >= least { least } else { *x };
        let below = rows[i * from..][..from].iter().fold(f32::INFINITY, least) - UNKNOWN_BELOW;
        // No id is before its place, so from the last on nothing is written over before it is read.
        let mut end = (i + 1) * to;
        for (j, &id) in ids.iter().enumerate().rev() {
            let (x, at) = (rows[i * from + j], i * to + id as usize);
            rows[at + 1..end].fill(below);
            rows[at] = x;
            end = at;
        }
        rows[i * to..end].fill(below);
    }
}

#[cfg(test)]
mod tests {
    use super::{spread, spread_head};

    #[test]
    fn rows_of_a_head_are_spread_in_place() {
        let mut rows = [1.0, 2.0, -3.0, 4.0, 5.0, 6.0, 0.0, 0.0, 0.0, 0.0];
        spread_head(&mut rows, &[1, 2, 4], 5);
        let (a, b) = (-3.0 - 1e4, 4.0 - 1e4);
        let expected = [a, 1.0, 2.0, a, -3.0, b, 4.0, 5.0, b, 6.0];
        assert_eq!(rows.map(f32::to_bits), expected.map(f32::to_bits));
        let mut broken = [1.0, f32::NAN, 3.0, 0.0];
        spread_head(&mut broken, &[0, 3], 4);
        assert!(broken[1..].iter().all(|x| x.is_nan()));
        assert_eq!(broken[0].to_bits(), 1.0_f32.to_bits());
    }

    #[test]
    fn rows_are_spread_in_place() {
        const NONE: f32 = f32::NEG_INFINITY;
        let mut rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0, 0.0];
        spread(&mut rows, 2, 3);
        assert_eq!(rows.map(f32::to_bits), [1.0, 2.0, NONE, 3.0, 4.0, NONE, 5.0, 6.0, NONE].map(f32::to_bits));
    }
}
