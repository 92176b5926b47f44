//! Scheduling of a drafter that reads the target's hidden states ([`crate::Drafter::Hidden`]). It knows the start of
//! the drafter's KV, the work that prompt chunks leave to it, and the prefixes whose draft KV others may continue.
//! Plans no drafts.
//!
//! | range of positions | of a row with n tokens |
//! | --- | --- |
//! | `[draft_start, draft_len)` | draft KV valid: made of the target's hidden states, and of KV from `draft_start` on |
//! | `[hidden_start, n - 1)` | the target's hidden states are kept |
//!
//! KV is written when hidden states are available: after a prompt chunk, in the step that computes it, and by the
//! first drafting pass, at `[hidden_start, n - 1)`. If that would leave a gap after `draft_len`, the head starts anew:
//! `draft_start` is the first position written. So a row writes only into blocks that it computed itself, and needs no
//! claim of another row.
//!
//! A row's claim on a block that it registered means that this row sets `draft_valid`, which it does while
//! `draft_start` is 0. The KV of position p depends on token p + 1, so the mark holds only for readers whose token
//! after the block is the same.

use super::Scheduler;
use super::plan::{DraftChunk, Plan};
use super::request::RequestIndex;
use super::row::{NO_BLOCK, RowIndex, Sequence};
use crate::error::Result;

/// State of a row for a drafter that reads hidden states, in addition to [`super::row::Row`]. Other drafters have no
/// such state.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HiddenRow {
    pub(super) draft_start: usize,
    /// First position whose hidden state is kept, according to settled steps.
    pub(super) hidden_start: usize,
    /// Whether the next step orders the device to start the head anew.
    pub(super) restart: bool,
}

impl Scheduler {
    /// Plans draft chunks that give the head the hidden states of prompt chunks, and an empty chunk for each decoding
    /// row whose head starts anew. The last position of a prompt is left to the first drafting pass, because the token
    /// after it is not known yet.
    pub(super) fn feed_chunks(&mut self, plan: &mut Plan) {
        for decode in &plan.decodes {
            if std::mem::take(&mut self.hidden[decode.row as usize].restart) {
                plan.draft_chunks.push(DraftChunk { row: decode.row, start: 0, len: 0 });
            }
        }
        for chunk in &plan.chunks {
            let row = &self.rows[chunk.row as usize];
            // Its first drafts are at position prefill_end + 1; no head works for a row that never has any.
            let end_of_drafts = (row.limit - 1).min(self.drafts.end_of_drafts);
            let len = (chunk.start + chunk.len).min(row.prefill_end - 1).saturating_sub(chunk.start);
            if row.rebuild
                || self.drafting_is_paused()
                || row.max_k == 0
                || row.prefill_end + 1 >= end_of_drafts
                || len == 0
            {
                continue;
            }
            plan.draft_chunks.push(DraftChunk { row: chunk.row, start: chunk.start, len });
        }
    }

    /// Updates the row's draft positions for a planned draft chunk.
    pub(super) fn enter_chunk(&mut self, chunk: DraftChunk) {
        let row = &mut self.rows[chunk.row as usize];
        if row.draft_len < chunk.start || chunk.len == 0 {
            self.hidden[chunk.row as usize].draft_start = chunk.start;
        }
        row.draft_len = chunk.start + chunk.len;
    }

    /// Updates the row's draft and hidden positions after a step in which it drafted `drafted` tokens at `n`, as the
    /// device does.
    pub(super) fn settle_hidden(&mut self, sequence: Sequence, n: usize, drafted: usize) {
        let row = &mut self.rows[sequence.row as usize];
        let hidden = &mut self.hidden[sequence.row as usize];
        if drafted > 0 {
            if row.draft_len < hidden.hidden_start {
                hidden.draft_start = hidden.hidden_start;
            }
            row.draft_len = self.config.drafter.draft_len_after(n, drafted, row.n);
        }
        if sequence.emits() {
            let of_prompt = sequence.chunk_end > 0;
            hidden.hidden_start = if of_prompt {
                n - 1
            } else {
                self.config.drafter.hidden_start_after(hidden.hidden_start, n, drafted, row.n)
            };
        }
    }

    /// Removes `draft_valid` from the blocks of a row whose drafts were not finite, so that no other row
    /// continues from its KV.
    pub(super) fn unmark_broken(&mut self, row_index: RowIndex) -> Result<()> {
        let row = &self.rows[row_index as usize];
        for &block in row.registered_blocks() {
            self.pool.unmark_draft(block)?;
            if let Some(saves) = &mut self.saves {
                saves.draft_lost(block);
            }
        }
        Ok(())
    }

    /// Returns the number of leading blocks of a prefix hit whose draft KV the request can use. Draft KV made for
    /// another next token does not count.
    pub(super) fn drafted_hits(&self, index: RequestIndex, hits: &[i64]) -> usize {
        let (block_size, request) = (self.config.block_size, &self.requests[index]);
        let next = |place: usize| request.tokens.get((place + 1) * block_size).copied();
        let is_drafted = |&(place, &block): &(usize, &i64)| match next(place) {
            Some(token) => self.pool.has_draft_before(block, token),
            None => self.pool.has_draft(block),
        };
        hits.iter().enumerate().take_while(is_drafted).count()
    }

    /// Drops the last block of a prefix hit if only that block lacks `draft_valid`. Computing one block again
    /// costs less than a head without the context before it. With states the hit must end at its snapshot.
    pub(super) fn trim_hits(&self, index: RequestIndex, hits: &mut Vec<i64>) {
        let request = &self.requests[index];
        // Behind a window, in any group, the block before it would be missing then.
        let is_whole = hits.first() != Some(&NO_BLOCK) && self.groups.is_empty() && self.snapshots.is_none();
        if is_whole && request.k > 0 && !request.draft_failed && self.drafted_hits(index, hits) + 1 == hits.len() {
            hits.pop();
        }
    }
}
