//! Choice of the rows that close the lag of their draft KV in the next step, and of those that draft in it.
//!
//! Draft KV lags after a prompt (prefill runs the target alone) and after steps at K = 0. With positions
//!
//! | range | draft KV |
//! | --- | --- |
//! | `[0, draft_len)` | valid |
//! | `[draft_len, start)` | valid: another request has written it into shared blocks since |
//! | `[start, end)` | this step's catch-up chunk |
//! | `[target, n - 1)` | the first drafting pass writes it, if `end` reaches `target` |
//!
//! Blocks that others can find are written under a claim. A block claimed by another row ends the chunk, and the row
//! goes on at K = 0 until the claim's holder has finished. A row takes claims from the front of its table and waits
//! only for blocks after them, so no two rows wait for each other. The claims of a row that no longer drafts pass to
//! the next row that wants them.
//!
//! The shortest lag goes first, so that a long one does not keep the others waiting. Every fourth step goes by
//! importance instead, so that the long lag is closed too. A share of each step would not suffice, because a lag
//! grows by one token per step while it is open.

use super::Scheduler;
use super::plan::{DraftChunk, Lagging, Plan};
use super::row::{Row, RowIndex, RowState};
use crate::error::Result;

/// Number of steps of which one catches up rows by importance instead of by lag.
const IMPORTANCE_STEPS: u64 = 4;

/// Number of tokens that a step catches up regardless of their time. So drafts after usual prompts begin at the same
/// token on machines of any speed, and a seed gives the same text under `rejection`.
const LEAST_CAUGHT_UP: usize = 512;

/// Positions that a row catches up in one step, as in the table of the module.
struct Gap {
    start: usize,
    end: usize,
    /// Whether the row drafts in this step: `end` is the target, and the first drafting pass may write the positions
    /// after it.
    drafts: bool,
}

impl Scheduler {
    /// Adds catch-up chunks within the draft's budget and the room of one record. The first chunk of a step has at
    /// least one token.
    pub(super) fn catch_up(&mut self, plan: &mut Plan) -> Result<()> {
        if plan.lagging.is_empty() {
            return Ok(());
        }
        let chunks = plan.budget.map_or_else(|| self.chunk_budget(plan.decode_tokens), |budget| budget.chunks);
        let mut left = chunks.saturating_sub(plan.prefill_tokens);
        let mut room = self.config.max_num_batched_tokens;
        // A request that decodes alone waits for itself.
        let most_ms = self.most_ms(plan.decodes.len() - 1);
        if !self.next_step_id.is_multiple_of(IMPORTANCE_STEPS) {
            plan.lagging.sort_unstable_by_key(|row| (row.demand, row.decode));
        }
        for index in 0..plan.lagging.len() {
            let first = room == self.config.max_num_batched_tokens;
            let mut most = room.min(self.draft_tokens(left).max(usize::from(first)));
            if most_ms < f64::INFINITY {
                let least = LEAST_CAUGHT_UP.saturating_sub(self.config.max_num_batched_tokens - room);
                most = self.catch_up_within(plan, index, most, most_ms).max(most.min(least));
            }
            let len = self.catch_up_row(plan, index, most)?;
            left = left.saturating_sub(self.draft_cost(len));
            room -= len;
        }
        Ok(())
    }

    /// Returns how many of `most` tokens a row may catch up if all chunks together take at most `ms`.
    fn catch_up_within(&self, plan: &Plan, index: usize, most: usize, ms: f64) -> usize {
        let row_index = plan.decodes[plan.lagging[index].decode].row;
        let start = self.rows[row_index as usize].draft_len.max(self.held_from(row_index));
        let ratio = self.config.drafter.cost_ratio();
        self.prefill_costs.fitting_draft(&plan.work, ratio, start, most, ms)
    }

    /// Catches one row up by at most `most` tokens and returns their number.
    fn catch_up_row(&mut self, plan: &mut Plan, index: usize, most: usize) -> Result<usize> {
        let Lagging { decode, k, .. } = plan.lagging[index];
        let decode = &mut plan.decodes[decode];
        let block_size = self.config.block_size;
        let row = &self.rows[decode.row as usize];
        // Draft KV is no use to a row that has no blocks for drafts.
        if self.coverable(row.blocks.len()) <= decode.n_upper {
            return Ok(0);
        }
        self.begin_at_window(decode.row);
        let Gap { start, end, drafts } = self.gap(decode.row, most);
        let row = &self.rows[decode.row as usize];
        let (limit, registered, moved) = (row.limit, row.num_registered, end > row.draft_len || row.draft_len_moved);
        self.claim_blocks(decode.row, start / block_size, if drafts { registered } else { end.div_ceil(block_size) })?;
        if moved {
            let row = &mut self.rows[decode.row as usize];
            (row.draft_len, row.draft_len_moved, row.last_catch_up) = (end, false, self.next_step_id);
            plan.draft_chunks.push(DraftChunk { row: decode.row, start, len: end - start });
            plan.work.add_draft_chunk(self.config.drafter.cost_ratio(), start, end - start);
        }
        if drafts {
            decode.k = self.reserve(decode.row, decode.n_upper, limit, k)?.unwrap_or(0);
            decode.covered = (decode.n_upper + decode.k).min(limit);
        }
        Ok(end - start)
    }

    fn gap(&self, row_index: RowIndex, most: usize) -> Gap {
        let row = &self.rows[row_index as usize];
        let n = row.lower_bound();
        let start = self.skip_drafted(row, row.draft_len);
        let target = self.after_drafted(row, n.saturating_sub(self.drafts.max_draft_lag).max(start));
        let end = self.first_claimed_by_other(row_index, start, target.min(start + most));
        let drafts = end == target && self.first_claimed_by_other(row_index, target, n) == n;
        Gap { start, end, drafts }
    }

    /// Claims those blocks `[from, to)` of a row that others can find and that have no `draft_valid`. Another row
    /// that has the claim on such a block loses its claims from that block on.
    fn claim_blocks(&mut self, row_index: RowIndex, from: usize, to: usize) -> Result<()> {
        for index in from..to.min(self.rows[row_index as usize].num_registered) {
            let block = self.rows[row_index as usize].blocks[index];
            if self.pool.is_registered(block) && !self.pool.has_draft(block) {
                if let Some(other) = self.pool.claimant(block).filter(|&claimant| claimant != row_index) {
                    self.give_back_claims(other, index);
                }
                self.pool.claim(block, row_index)?;
            }
        }
        Ok(())
    }

    /// Releases a row's claims from block `first` on, because another row writes them. If the row drafts again, it has
    /// to catch up from there.
    fn give_back_claims(&mut self, row_index: RowIndex, first: usize) {
        let row = &mut self.rows[row_index as usize];
        row.lower_draft_len(first * self.config.block_size);
        for &block in &row.blocks[first..row.num_registered] {
            self.pool.release_claim(block, row_index);
        }
    }

    /// Returns the end of the run of blocks with `draft_valid` at `position`, or `position` itself if its
    /// block has none.
    fn skip_drafted(&self, row: &Row, mut position: usize) -> usize {
        let block_size = self.config.block_size;
        while position < row.num_registered * block_size && self.pool.has_draft(row.blocks[position / block_size]) {
            position = (position / block_size + 1) * block_size;
        }
        position
    }

    /// Returns the end of the last block with `draft_valid` from `position` on, or `position` if there is
    /// none. The first drafting pass starts there, so that it does not write into marked blocks.
    fn after_drafted(&self, row: &Row, position: usize) -> usize {
        let block_size = self.config.block_size;
        (position / block_size..row.num_registered)
            .rfind(|&index| self.pool.has_draft(row.blocks[index]))
            .map_or(position, |index| (index + 1) * block_size)
    }

    /// Returns the first position of `[start, end)` in a block whose draft KV another row is writing, or `end` if there
    /// is none.
    fn first_claimed_by_other(&self, row_index: RowIndex, start: usize, end: usize) -> usize {
        let (block_size, row) = (self.config.block_size, &self.rows[row_index as usize]);
        let last = row.num_registered.min(end.div_ceil(block_size));
        (start / block_size..last)
            .find(|&index| {
                let claimant = self.pool.claimant(row.blocks[index]);
                claimant.is_some_and(|claimant| claimant != row_index && self.keeps_claims(claimant))
            })
            .map_or(end, |index| (index * block_size).max(start))
    }

    /// Returns whether a row keeps its claims: it drafts, may still draft, or has ended with steps in flight.
    fn keeps_claims(&self, row_index: RowIndex) -> bool {
        let row = &self.rows[row_index as usize];
        row.state == RowState::Closed || row.drafting > 0 || self.most_drafts(row, row.k) > 0
    }

    /// Returns the number of tokens that a row's drafter could catch up in one step, for the budget. It is 0 while the
    /// row waits for another row's claim.
    pub(super) fn catch_up_demand(&self, row_index: RowIndex, n: usize) -> usize {
        let row = &self.rows[row_index as usize];
        let start = self.skip_drafted(row, row.draft_len.max(self.held_from(row_index)));
        let end = n.saturating_sub(self.drafts.max_draft_lag).min(start + self.config.max_num_batched_tokens);
        if start >= end || self.first_claimed_by_other(row_index, start, start + 1) == start {
            return 0;
        }
        end - start
    }

    /// Returns the cost of a draft chunk of `tokens` tokens, in tokens of the budget.
    pub(super) fn draft_cost(&self, tokens: usize) -> usize {
        (tokens as f64 * self.config.drafter.cost_ratio()).ceil() as usize
    }

    /// Returns the length of the longest draft chunk that costs at most `budget`.
    fn draft_tokens(&self, budget: usize) -> usize {
        let tokens = (budget as f64 / self.config.drafter.cost_ratio()) as usize;
        // The division rounds; a step back restores the bound.
        if self.draft_cost(tokens) <= budget { tokens } else { tokens - 1 }
    }
}
