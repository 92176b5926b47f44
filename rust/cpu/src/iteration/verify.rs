//! Pass of the target over the drafts of an iteration.

use crate::error::Result;

use super::passes::{Want, Whose};
use super::{Iteration, Model, RowState};

impl Iteration {
    /// Feeds `t_{n-1}, d_1 .. d_{K_r}` of every entry to the target in one pass; row i gives the distribution of
    /// position n + i.
    pub(super) fn verify(&mut self, state: &RowState<'_>, target: &mut dyn Model) -> Result<()> {
        self.batch.clear();
        for entry in self.entries.iter().filter(|entry| entry.runs()) {
            for position in entry.n - 1..entry.n + entry.k {
                self.batch.feed(state, entry.row, position, self.config.block_size);
                self.batch.want_last();
            }
        }
        if self.batch.is_empty() {
            return Ok(());
        }
        let want = Want::of_target(self.entries.iter().filter(|entry| entry.runs()));
        self.pass(state, target, if self.rates.is_some() { want.with_best() } else { want }, Whose::Target)?;
        self.counts.target_passes += 1;
        Ok(())
    }
}
