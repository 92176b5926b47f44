//! One pass of a model over gathered rows, and its results: tokens drawn by argmax, or logits. Gathers nothing.

use specrs_core::sampling::{UNKNOWN_BELOW, largest, lowest_id};

use super::{Facts, Iteration, Model, RowState, Sequence};
use crate::error::Result;
use crate::{Entries, HeadStates, Output, Pass};
use std::time::Instant;

/// Kind of model that runs a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// Target, whose hidden states are kept for a head.
    Target,
    /// Draft model.
    Draft,
    /// EAGLE-3 or MTP head, which is fed hidden states.
    Head,
    /// Head that is fed hidden states and attends the target's KV.
    Attending,
}

/// Results that a pass should compute for the requested rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// No results, only KV.
    Nothing,
    /// Final hidden states.
    Hidden,
    /// Largest logit and its id.
    Best,
    /// All logits, and the largest of them.
    Logits,
    /// All logits, the largest of them and its id, for a greedy sequence or for drafts accepted at given rates.
    Both,
}

impl Want {
    /// Returns the results that these sequences need from the target.
    pub(super) fn of_target<'a>(sequences: impl IntoIterator<Item = &'a Sequence>) -> Self {
        Self::of(sequences, |sequence| sequence.asked.logprobs)
    }

    /// Returns the results that these sequences need from a drafter, whose log probabilities are not reported.
    pub(super) fn of_drafter<'a>(sequences: impl IntoIterator<Item = &'a Sequence>) -> Self {
        Self::of(sequences, |_| false)
    }

    fn of<'a>(sequences: impl IntoIterator<Item = &'a Sequence>, reports: impl Fn(&Sequence) -> bool) -> Self {
        let (mut largest, mut logits) = (false, false);
        for sequence in sequences {
            largest |= sequence.takes_largest();
            logits |= reports(sequence) || !sequence.takes_largest();
        }
        match (logits, largest) {
            (false, _) => Self::Best,
            (true, false) => Self::Logits,
            (true, true) => Self::Both,
        }
    }

    /// Returns the results with the largest logit's id added, if all logits are wanted.
    pub(super) fn with_best(self) -> Self {
        if self == Self::Logits { Self::Both } else { self }
    }
}

impl Iteration {
    /// Runs the gathered rows and fills those of `tops`, `best` and `logits` that `want` names. Logits are over the
    /// target's ids. They are minus infinity for ids that a draft model does not have, and far below the others for ids
    /// that a head does not have. Ids fed to a draft model are limited to its own vocabulary.
    ///
    /// Rows at which a grammar allows only the next draft need no logits: theirs are zeros, and the mask leaves that
    /// draft.
    pub(super) fn pass(&mut self, state: &RowState<'_>, model: &mut dyn Model, want: Want, whose: Whose) -> Result<()> {
        self.compute(state, model, want, whose)?;
        if !self.batch.forced.is_empty() {
            self.insert_forced();
        }
        Ok(())
    }

    /// Inserts zeros for the outputs that were not computed among those that were.
    fn insert_forced(&mut self) {
        let (vocab_size, forced) = (self.sampler.vocab_size(), &self.batch.forced);
        let total = self.batch.wanted.len() + forced.len();
        self.logits.resize(self.logits.len().max(total * vocab_size), 0.0);
        self.best.resize(total, 0);
        self.tops.resize(total, 0.0);
        // From the last on, so that no output is overwritten before it has moved.
        let (mut left, mut source) = (forced.len(), self.batch.wanted.len());
        for row in (0..total).rev() {
            if left == 0 {
                break;
            }
            let place = row * vocab_size..(row + 1) * vocab_size;
            if forced[left - 1] == row {
                left -= 1;
                self.logits[place].fill(0.0);
                (self.best[row], self.tops[row]) = (0, 0.0);
            } else {
                source -= 1;
                self.logits.copy_within(source * vocab_size..(source + 1) * vocab_size, place.start);
                (self.best[row], self.tops[row]) = (self.best[source], self.tops[source]);
            }
        }
    }

    fn compute(&mut self, state: &RowState<'_>, model: &mut dyn Model, want: Want, whose: Whose) -> Result<()> {
        let prompts = self.batch.prompts;
        let vocab_size = self.sampler.vocab_size();
        let Facts { vocab_size: fed, num_ids: known, .. } = model.facts();
        if whose == Whose::Draft && fed < vocab_size {
            self.batch.tokens.iter_mut().for_each(|token| *token = (*token).min(fed as i64 - 1));
        }
        let on_target_kv = matches!(whose, Whose::Target | Whose::Attending);
        let in_groups = on_target_kv && !state.group_tables.is_empty();
        if in_groups {
            self.batch.find_group_slots(state, self.config.block_size);
        }
        // Draft KV begins after position 0 only if blocks outside windows are freed, or states are not kept.
        let begins_late = whose == Whose::Head || self.config.sliding_window.is_some();
        let Self { batch, snapshots, hidden, best, tops, logits, pass_time, .. } = self;
        let (count, num_ids) = (batch.wanted.len(), known.min(vocab_size));
        let pass = Pass {
            tokens: &batch.tokens,
            positions: &batch.positions,
            slots: &batch.slots,
            sequences: &batch.rows,
            block_table: state.block_table,
            max_blocks: state.table_width(),
            group_slots: &batch.group_slots,
            group_tables: if in_groups { state.group_tables } else { &[] },
            k_start: if on_target_kv || !begins_late { &[] } else { state.draft_start },
            prompts,
            adapters: &[],
            snapshots: if whose == Whose::Target { snapshots } else { &[] },
        };
        // A pass that keeps hidden states has none to write.
        let mut forward = |model: &mut dyn Model, output: Option<Output<'_>>| {
            let begun = pass_time.is_some().then(Instant::now);
            let (head_states, entries) = match whose {
                Whose::Target => {
                    let states = room(&mut hidden.captured, pass.len() * hidden.size);
                    (None, Entries { layers: &hidden.layers, states })
                }
                Whose::Draft => (None, Entries { layers: &[], states: &mut [] }),
                Whose::Head | Whose::Attending => {
                    let states = room(&mut hidden.left, hidden.head_states.len());
                    (Some(HeadStates { hidden: &hidden.head_states }), Entries { layers: &[1], states })
                }
            };
            let done = match output {
                Some(output) => model.forward(&pass, head_states, output, entries),
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

    /// Fills `tops` and, if `with_ids`, `best` from the first `count` rows of `logits`.
    pub(super) fn find_largest(&mut self, count: usize, with_ids: bool) {
        let vocab_size = self.sampler.vocab_size();
        self.best.resize(count, 0);
        self.tops.resize(count, 0.0);
        for (i, row) in self.logits.chunks_exact(vocab_size).take(count).enumerate() {
            self.tops[i] = largest(row);
            if with_ids {
                self.best[i] = lowest_id(row, self.tops[i]) as i64;
            }
        }
    }
}

/// Returns the first `len` elements of a buffer, which is enlarged if it is too small. The elements keep old values,
/// because the pass overwrites them.
fn room(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// Widens rows in place: from rows of `from` logits at the start of the buffer to rows of `to` logits, filled up with
/// minus infinity.
fn spread(rows: &mut [f32], from: usize, to: usize) {
    for i in (0..rows.len() / to).rev() {
        rows.copy_within(i * from..(i + 1) * from, i * to);
        rows[i * to + from..(i + 1) * to].fill(f32::NEG_INFINITY);
    }
}

/// Widens rows in place: from rows of logits over a head's ids, at the start of the buffer, to rows of `to` logits over
/// the target's ids. `ids`, ascending, has the target's id of each of the head's ids. Target ids that the head does not
/// have get a logit far below all others.
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
