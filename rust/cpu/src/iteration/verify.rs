//! Pass of the target over the drafts of an iteration.

use crate::error::Result;

use super::passes::{Want, Whose};
use super::{Iteration, Model, RowState};

impl Iteration {
    /// Feeds `t_{n-1}, d_1 .. d_{K_r}` of every sequence to the target in one pass; row i gives the distribution of
    /// position n + i.
    pub(super) fn verify(&mut self, state: &RowState<'_>, target: &mut dyn Model) -> Result<()> {
        self.batch.clear();
        let sequences = std::mem::take(&mut self.sequences);
        for sequence in sequences.iter().filter(|sequence| sequence.runs()) {
            for num_drafts in 0..=sequence.k {
                let is_forced = self.is_forced(sequence, num_drafts, state);
                self.batch.feed(state, sequence.row, sequence.n - 1 + num_drafts, self.config.block_size);
                self.batch.want_last_unless(is_forced);
            }
        }
        self.sequences = sequences;
        if self.batch.is_empty() {
            return Ok(());
        }
        let want = Want::of_target(self.sequences.iter().filter(|sequence| sequence.runs()));
        self.pass(state, target, if self.rates.is_some() { want.with_best() } else { want }, Whose::Target)?;
        self.counts.target_passes += 1;
        Ok(())
    }
}
