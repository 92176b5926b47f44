//! Failures of a drafter in a step, which cost the step its drafts, but never a request. Runs no pass.

use super::{Batch, Host, Iteration, Model, RowState, Stage};
use crate::error::{Error, Result, guarded};
use specrs_core::Drafter;

/// Failure of a drafter in a step, which went on without the drafts of the drafter's passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftFault {
    /// First error of the drafter in the step.
    pub error: Error,
    /// Blocks whose draft KV should have been written before any draft but was not, ascending. They are the argument of
    /// the scheduler's `draft_kv_not_written`.
    pub blocks: Vec<i64>,
}

impl Iteration {
    /// Takes the drafter's failure since the last call. Until it is taken, no passes draft.
    pub fn take_draft_fault(&mut self) -> Option<DraftFault> {
        self.fault.take()
    }

    /// Runs a stage of the drafter and returns its error, from this or another rank.
    ///
    /// # Errors
    /// If a rank is lost.
    pub(super) fn stage(
        &mut self,
        stage: Stage,
        host: &mut dyn Host,
        work: impl FnOnce(&mut Self, &mut dyn Host) -> Result<()>,
    ) -> Result<Option<Error>> {
        host.enter(stage);
        let error = guarded(|| work(self, host)).err();
        let failed = host.leave(stage, error.as_ref())?;
        let elsewhere = || Error::Host { message: "the drafter failed on another rank".to_string() };
        Ok(failed.then(|| error.unwrap_or_else(elsewhere)))
    }

    /// Draws drafts by passes. If the drafter fails now or has failed before in this step, the sequences get no drafts.
    /// KV that it wrote before lies after `draft_len`, which does not change, and is overwritten before it is read.
    pub(super) fn draft_or_not(
        &mut self,
        state: &mut RowState<'_>,
        target: &mut dyn Model,
        draft: &mut dyn Model,
        host: &mut dyn Host,
    ) -> Result<()> {
        if !self.sequences.iter().any(|sequence| sequence.k > 0 && sequence.on_device()) {
            return Ok(());
        }
        if self.fault.is_none() {
            // The passes may end anywhere, also where they have the sequences in hand.
            self.planned.clone_from(&self.sequences);
            let failed = self.stage(Stage::Draft, host, |own, host| match own.config.drafter {
                Drafter::Text => own.draft_text(state, draft, host),
                _ => own.draft(state, target, draft, host),
            })?;
            let Some(error) = failed else { return Ok(()) };
            std::mem::swap(&mut self.sequences, &mut self.planned);
            self.note_fault(error, Vec::new());
        }
        self.q_width = 0;
        self.sequences.iter_mut().filter(|sequence| sequence.on_device()).for_each(|sequence| sequence.k = 0);
        Ok(())
    }

    /// Notes that the drafter failed before it had written draft KV into these blocks, which ascend.
    pub(super) fn note_fault(&mut self, error: Error, blocks: Vec<i64>) {
        let fault = self.fault.get_or_insert(DraftFault { error, blocks: Vec::new() });
        fault.blocks.extend(blocks);
        fault.blocks.sort_unstable();
        fault.blocks.dedup();
    }
}

impl Batch {
    /// Returns the blocks into which the rows write KV.
    pub(super) fn blocks(&self, block_size: usize) -> Vec<i64> {
        let written = self.slots.iter().filter(|&&slot| slot >= 0);
        let mut blocks: Vec<i64> = written.map(|slot| slot / block_size as i64).collect();
        blocks.dedup();
        blocks
    }
}
