//! Which rows close the lag of their draft KV in the next launch, and which of them draft in it.
//!
//! Draft KV lags behind after a prompt (prefill runs the target alone) and after launches at K = 0. With positions
//!
//! | range | draft KV |
//! | --- | --- |
//! | `[0, draft_len)` | valid |
//! | `[draft_len, start)` | valid: another request has written it into shared blocks since |
//! | `[start, end)` | this launch's catch-up chunk |
//! | `[target, n - 1)` | the first drafting pass writes it, if `end` reaches `target` |
//!
//! Blocks that others can find are written under a claim; a block claimed by another row ends the chunk, and the row goes on at
//! K = 0 until the claim's holder has finished.

use super::Scheduler;
use super::plan::{CatchUp, DraftChunk, Plan};
use super::row::{Row, RowIndex};
use crate::error::Result;

impl Scheduler {
    /// Gives catch-up chunks in order of importance, within the draft's budget and one record; a launch's first chunk has at
    /// least one token.
    pub(super) fn catch_up(&mut self, plan: &mut Plan) -> Result<()> {
        if plan.catch_ups.is_empty() {
            return Ok(());
        }
        let chunks = plan.budget.map_or_else(|| self.chunk_budget(plan.decode_tokens), |budget| budget.chunks);
        let mut left = chunks.saturating_sub(plan.prefill_tokens);
        let mut room = self.config.max_num_batched_tokens;
        for at in 0..plan.catch_ups.len() {
            let first = room == self.config.max_num_batched_tokens;
            let most = room.min(self.draft_tokens(left).max(usize::from(first)));
            let len = self.catch_up_row(plan, at, most)?;
            left = left.saturating_sub(self.draft_cost(len));
            room -= len;
        }
        Ok(())
    }

    /// Catches one row up by at most `most` tokens; how many it took.
    fn catch_up_row(&mut self, plan: &mut Plan, at: usize, most: usize) -> Result<usize> {
        let CatchUp { decode, k } = plan.catch_ups[at];
        let decode = &mut plan.decodes[decode];
        let block_size = self.config.block_size;
        let row = &self.rows[decode.row as usize];
        // Draft KV is no use to a row that has no blocks for drafts.
        if (row.blocks.len() + self.pool.num_free()) * block_size <= decode.n_upper {
            return Ok(0);
        }
        let (draft_len, registered) = (row.draft_len, row.num_registered);
        let n = row.lower_bound();
        let start = self.skip_drafted(row, draft_len);
        let target = self.after_drafted(row, n.saturating_sub(self.config.drafter.max_draft_lag()).max(start));
        let free = self.first_claimed_by_other(decode.row, start, target.min(start + most));
        let end = target.min(start + most).min(free);
        let drafts = end == target && self.first_claimed_by_other(decode.row, target, n) == n;

        let claimed = if drafts { registered } else { registered.min(end.div_ceil(block_size)) };
        for index in start / block_size..claimed {
            let block = self.rows[decode.row as usize].blocks[index];
            if self.pool.is_registered(block) && !self.pool.has_draft(block) {
                self.pool.claim(block, decode.row)?;
            }
        }
        if end > draft_len {
            self.rows[decode.row as usize].draft_len = end;
            plan.draft_chunks.push(DraftChunk { row: decode.row, start, len: end - start });
        }
        if drafts {
            let limit = self.rows[decode.row as usize].limit;
            decode.k = self.reserve(decode.row, decode.n_upper, limit, k)?.unwrap_or(0);
            decode.need = (decode.n_upper + decode.k).min(limit);
        }
        Ok(end - start)
    }

    /// The end of the run of blocks with mark D at `position`; `position` itself if its block has none.
    fn skip_drafted(&self, row: &Row, mut position: usize) -> usize {
        let block_size = self.config.block_size;
        while position < row.num_registered * block_size && self.pool.has_draft(row.blocks[position / block_size]) {
            position = (position / block_size + 1) * block_size;
        }
        position
    }

    /// The end of the last block with mark D from `position` on, so that the first drafting pass does not write into it;
    /// `position` if there is none.
    fn after_drafted(&self, row: &Row, position: usize) -> usize {
        let block_size = self.config.block_size;
        (position / block_size..row.num_registered)
            .rfind(|&index| self.pool.has_draft(row.blocks[index]))
            .map_or(position, |index| (index + 1) * block_size)
    }

    /// The first position of `[start, end)` in a block whose draft KV another row is writing; `end` if there is none.
    fn first_claimed_by_other(&self, row_index: RowIndex, start: usize, end: usize) -> usize {
        let (block_size, row) = (self.config.block_size, &self.rows[row_index as usize]);
        let last = row.num_registered.min(end.div_ceil(block_size));
        (start / block_size..last)
            .find(|&index| self.pool.claimant(row.blocks[index]).is_some_and(|claimant| claimant != row_index))
            .map_or(end, |index| (index * block_size).max(start))
    }

    /// Draft tokens that a row could use at once, for the budget: 0 while it waits for another row's claim.
    pub(super) fn catch_up_demand(&self, row_index: RowIndex, n: usize) -> usize {
        let row = &self.rows[row_index as usize];
        let start = self.skip_drafted(row, row.draft_len);
        let end = n.saturating_sub(self.config.drafter.max_draft_lag()).min(start + self.config.max_num_batched_tokens);
        if start >= end || self.first_claimed_by_other(row_index, start, start + 1) == start {
            return 0;
        }
        end - start
    }

    /// Budget tokens that a draft chunk costs.
    pub(super) fn draft_cost(&self, tokens: usize) -> usize {
        (tokens as f64 * self.config.drafter.cost_ratio()).ceil() as usize
    }

    /// The longest draft chunk that costs at most `budget`.
    fn draft_tokens(&self, budget: usize) -> usize {
        let tokens = (budget as f64 / self.config.drafter.cost_ratio()) as usize;
        // The division rounds; a step back restores the bound.
        if self.draft_cost(tokens) <= budget { tokens } else { tokens - 1 }
    }
}
