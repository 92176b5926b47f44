//! Prompt chunks in the verification pass of a step, where the device has room for them next to decoding sequences.
//! Such chunks need no pass of their own, which would read the target's weights a second time.
//!
//! A step merges its chunks if [`crate::SchedulerConfig::merged_rooms`] has rooms for its decoding sequences, and if
//! all running prompts fit into `max_merged_steps` steps with the largest of them. It takes the smallest room of
//! which two hold its prompts, because a pass with a larger room is padded to more rows. Its chunks are then
//! cut to the room, and the time of [`crate::SchedulerConfig::max_prefill_stall_ms`] does not limit them.
//! Other steps cut their chunks as if there were no rooms.
//!
//! No prompt starves. A merged step fills its room, which is at least the `1 / max_merged_steps` part of all running
//! prompts, or it ends all prompts that have a chunk in it, and there are `max_merged_chunks` of those unless it ends
//! all prompts. New prompts that exceed this work make the step an unmerged one. The next step is one, too, if
//! the last `MAX_DELAYS` steps left no room for a waiting prompt that could have a row. Otherwise short prompts could
//! arrive faster than merged steps take them.

use super::Scheduler;
use super::config::MergedRoom;
use super::plan::{Budget, Decoding, Merging, Plan};
use super::request::RequestIndex;
use super::row::Row;
use crate::sampling::STEPS_ON_LOGITS;

/// Number of rooms of one size that should hold a step's prompts. Smaller rooms cost more passes, larger ones padding.
const FEW_ROOMS: usize = 2;
/// Number of merged steps in a row that may leave no room for a waiting prompt.
const MAX_DELAYS: usize = 2;

impl Scheduler {
    /// Changes `budget`, of a step whose chunks have a pass of their own, to that of a step that merges them. Leaves it
    /// unchanged if they cannot be merged. The plan must have no chunks.
    pub(super) fn merge(&self, plan: &Plan, decoding: Decoding, budget: &mut Budget) {
        if self.num_delays >= MAX_DELAYS {
            return;
        }
        let rooms = self.merged_rooms(decoding);
        let Some(largest) = rooms.last() else { return };
        let largest = largest.num_tokens.min(budget.prefill_left);
        let mut merging = Merging {
            num_prompts: 0,
            num_tokens: 0,
            max_tokens: self.config.max_merged_steps * largest,
            withheld: 0,
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
            let expected = merging.num_tokens + self.next_prompts();
            let few = rooms.iter().find(|room| expected <= FEW_ROOMS * room.num_tokens);
            let room = few.map_or(largest, |room| room.num_tokens.min(largest));
            merging.withheld = budget.prefill_left - room;
            (budget.prefill_left, budget.prefill_ms) = (room, f64::INFINITY);
            budget.merging = Some(merging);
        }
    }

    /// Returns the rooms in verification passes of these sequences, smallest first.
    fn merged_rooms(&self, decoding: Decoding) -> &[MergedRoom] {
        let Decoding { num_seqs, max_k, num_tokens } = decoding;
        // Sequences that draft much less than the one that drafts the most are not padded to it, but run pass by pass.
        if num_seqs == 0 || 2 * num_tokens < num_seqs * (max_k + 1) {
            return &[];
        }
        let serves = |room: &MergedRoom| room.num_speculative_tokens == max_k && room.num_seqs >= num_seqs;
        let of_batch = |a: &MergedRoom, b: &MergedRoom| (max_k, a.num_seqs) == (b.num_speculative_tokens, b.num_seqs);
        let Some(first) = self.config.merged_rooms.iter().position(serves) else { return &[] };
        self.config.merged_rooms[first..].chunk_by(of_batch).next().unwrap_or_default()
    }

    /// Returns the number of tokens of the waiting prompts that a step with merged chunks may admit. Cached tokens
    /// count, too, because nothing was looked up yet.
    fn next_prompts(&self) -> usize {
        let most = self.free_rows.len().min(self.config.max_merged_chunks);
        self.waiting.values().take(most).map(|&index| self.requests[index].tokens.len()).sum()
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
        plan.merges() && plan.chunks.len() >= self.config.max_merged_chunks
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

impl Plan {
    /// Returns whether the step merges its chunks.
    pub(super) fn merges(&self) -> bool {
        self.budget.is_some_and(|budget| budget.merging.is_some())
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
