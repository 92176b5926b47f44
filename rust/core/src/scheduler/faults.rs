//! A drafter that fails: it costs drafts, never a request. Launches that were planned with drafts go on without them, which their results
//! say (`num_drafted` 0); what they cannot say is told here.

use super::Scheduler;
use crate::drafts::DrafterKind;
use crate::error::{Error, Result};

impl Scheduler {
    /// Takes it that the device has not written the draft KV that a launch was to write into `blocks`: of the launch planned last, or, behind
    /// prompt chunks for a head that reads hidden states, of the one before it. To be told before the next [`Self::plan`].
    ///
    /// A draft model catches up from there; a head starts anew, with every row that shares one of the blocks. No block among them keeps mark D.
    ///
    /// # Errors
    /// [`Error::InvalidBlock`] if one is not in the pool; nothing has changed then.
    pub fn draft_kv_not_written(&mut self, blocks: &[i64]) -> Result<()> {
        let mut lost = blocks.to_vec();
        lost.sort_unstable();
        self.pool.forget_drafts(&lost)?;
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

    /// Lets the next `launches` launches draft nothing on the device, nor write draft KV; those on the host go on.
    pub fn pause_drafting(&mut self, launches: u64) {
        self.drafting_from = self.next_launch_id.saturating_add(launches);
    }

    #[inline]
    pub(super) fn drafting_is_paused(&self) -> bool {
        self.next_launch_id < self.drafting_from
    }

    /// How often a drafter on the host has failed, and how it did last; each time cost the drafts of one request in one launch. Prompt lookup
    /// has nothing that can fail, and what happens on the device its host knows.
    pub fn draft_errors_of(&self, drafter: DrafterKind) -> (u64, Option<&Error>) {
        let (failures, last) = &self.host_drafts.errors[drafter as usize];
        (*failures, last.as_ref())
    }
}
