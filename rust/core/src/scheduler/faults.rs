//! Drafters that fail, which costs drafts but never a request. Steps planned with drafts go on without them, and
//! their results say so (`num_drafted` 0). Other consequences are reported by the calls in this file.

use super::Scheduler;
use crate::drafts::DrafterKind;
use crate::error::{Error, Result};

impl Scheduler {
    /// Notes that the device has not written the draft KV that a step was to write into `blocks`. That step is the
    /// one planned last. For prompt chunks of a head that reads hidden states, it is the one before. Call this before
    /// the next [`Self::plan`].
    ///
    /// A draft model catches up from these blocks. A head starts anew, in every row that shares one of the blocks. No
    /// block among them keeps `draft_valid`.
    ///
    /// # Errors
    /// [`Error::InvalidBlock`] if a block is not in the pool; nothing has changed then.
    pub fn draft_kv_not_written(&mut self, blocks: &[i64]) -> Result<()> {
        let mut lost = blocks.to_vec();
        lost.sort_unstable();
        self.pool.forget_drafts(&lost)?;
        if let Some(saves) = &mut self.saves {
            for &block in &lost {
                saves.draft_lost(block);
            }
        }
        let mut broken = Vec::new();
        for &row_index in &self.running {
            let row = &mut self.rows[row_index as usize];
            let Some(first) = row.blocks.iter().position(|block| lost.binary_search(block).is_ok()) else { continue };
            if self.drafts.from_hidden {
                broken.push((row_index, first));
            } else {
                row.lower_draft_len(first * self.config.block_size);
                row.num_draft_marked = row.num_draft_marked.min(first);
            }
        }
        self.discard_from(broken)
    }

    /// Stops drafting on the device and writing draft KV for the next `steps` steps. Drafters on the host go on.
    pub fn pause_drafting(&mut self, steps: u64) {
        self.drafting_from = self.next_step_id.saturating_add(steps);
    }

    #[inline]
    pub(super) fn drafting_is_paused(&self) -> bool {
        self.next_step_id < self.drafting_from
    }

    /// Returns how often a drafter on the host has failed, and its last error. Each failure cost one request its drafts
    /// in one step. Prompt lookup never fails, and the host already knows of failures on the device.
    pub fn draft_errors_of(&self, drafter: DrafterKind) -> (u64, Option<&Error>) {
        let (failures, last) = &self.host_drafts.errors[drafter as usize];
        (*failures, last.as_ref())
    }
}
