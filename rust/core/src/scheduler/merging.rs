//! Prompt chunks in the verification pass of a step, where the device has room for them next to decoding sequences.
//! Such chunks need no pass of their own, which would read the target's weights a second time.
//!
//! A step merges its chunks if [`crate::SchedulerConfig::merged_rooms`] has a room for its decoding sequences, and if
//! all running prompts fit into `max_merged_steps` such steps. Its chunks are then cut to the room, and the time of
//! [`crate::SchedulerConfig::max_prefill_stall_ms`] does not limit them. Other steps cut their chunks as if there were
//! no rooms.
//!
//! No prompt starves. A merged step fills its room or ends all prompts that have a chunk in it, and there are
//! `max_merged_chunks` of those unless it ends all prompts. So after at most `2 * max_merged_steps` merged steps without
//! a new prompt, none is left. New prompts that exceed this work make the step an unmerged one.

use super::Scheduler;
use super::config::MergedRoom;
use super::plan::{Budget, Decoding, Merging, Plan};
use super::request::RequestIndex;
use super::row::Row;
use crate::sampling::STEPS_ON_LOGITS;

impl Scheduler {
    /// Changes `budget`, of a step whose chunks have a pass of their own, to that of a step that merges them. Leaves it
    /// unchanged if they cannot be merged. The plan must have no chunks.
    pub(super) fn merge(&self, plan: &Plan, decoding: Decoding, budget: &mut Budget) {
        let Some(room) = self.merged_room(decoding) else { return };
        let room = room.min(budget.prefill_left);
        let mut merging = Merging {
            num_prompts: 0,
            num_tokens: 0,
            max_tokens: self.config.max_merged_steps * room,
            withheld: budget.prefill_left - room,
            alone_ms: budget.prefill_ms,
        };
        let placed = plan.decodes.iter().map(|decode| decode.row);
        for row in placed.chain(self.running[plan.num_placed..].iter().copied()) {
            let row = &self.rows[row as usize];
            if !self.is_mergeable(row.request) {
                return;
            }
            merging.num_prompts += usize::from(row.is_prefilling());
            merging.num_tokens += num_left(row);
        }
        if self.fits(&merging) {
            (budget.prefill_left, budget.prefill_ms) = (room, f64::INFINITY);
            budget.merging = Some(merging);
        }
    }

    /// Returns the number of prompt tokens for which the verification pass of these sequences has room.
    fn merged_room(&self, decoding: Decoding) -> Option<usize> {
        let Decoding { num_seqs, max_k, num_tokens } = decoding;
        // Sequences that draft much less than the one that drafts the most are not padded to it, but run pass by pass.
        if num_seqs == 0 || 2 * num_tokens < num_seqs * (max_k + 1) {
            return None;
        }
        let fits = |room: &&MergedRoom| room.num_speculative_tokens == max_k && room.num_seqs >= num_seqs;
        self.config.merged_rooms.iter().find(fits).map(|room| room.num_tokens)
    }

    /// Returns whether a request may be in a step that merges its chunks: it reports no log probabilities, and changes
    /// logits only by temperature, top k, top p and min p.
    fn is_mergeable(&self, index: RequestIndex) -> bool {
        let request = &self.requests[index];
        request.sampling.steps & STEPS_ON_LOGITS == 0 && !request.tells_prompt()
    }

    fn fits(&self, merging: &Merging) -> bool {
        merging.num_tokens <= merging.max_tokens
            && merging.num_prompts <= self.config.max_merged_steps * self.config.max_merged_chunks
    }

    /// Returns whether the step merges its chunks and has as many as it may.
    pub(super) fn has_all_merged(&self, plan: &Plan) -> bool {
        plan.budget.is_some_and(|budget| budget.merging.is_some()) && plan.chunks.len() >= self.config.max_merged_chunks
    }

    /// Counts a new prompt, of which `num_tokens` tokens are not cached, in the work of a step that merges its chunks.
    /// The work is all running and new prompts: their number, and their tokens that no earlier step computes. If it
    /// does not fit into `max_merged_steps` merged steps, the chunks of this step get a pass of their own, and the
    /// budget gets back the tokens that merging withheld. The same happens if the request reports log probabilities, or
    /// changes logits by more than temperature, top k, top p and min p. Does nothing for other steps. The plan must
    /// have budget left, so that no running prompt was passed over.
    pub(super) fn admit_chunk(&self, plan: &mut Plan, index: RequestIndex, num_tokens: usize) {
        let Some(budget) = &mut plan.budget else { return };
        let Some(merging) = budget.merging else { return };
        let merging =
            Merging { num_prompts: merging.num_prompts + 1, num_tokens: merging.num_tokens + num_tokens, ..merging };
        if self.is_mergeable(index) && self.fits(&merging) {
            budget.merging = Some(merging);
        } else {
            budget.merging = None;
            budget.prefill_left += merging.withheld;
            budget.prefill_ms = merging.alone_ms;
        }
    }
}

/// Returns the number of a row's prompt tokens that no step computes yet.
fn num_left(row: &Row) -> usize {
    row.prefill_end.saturating_sub(row.num_computed)
}

impl Budget {
    /// Returns the maximum number of further prompt tokens of the step, if its chunks should get a pass of their own.
    pub(super) fn most_prefill(&self) -> usize {
        self.prefill_left + self.merging.map_or(0, |merging| merging.withheld)
    }
}
