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
//! K = 0 until the claim's holder has finished. A row takes its claims from the front of its table on and waits only for blocks
//! behind them, so no two rows wait for each other. The claims of a row that drafts no more pass to the next that wants them.
//!
//! The shortest lag goes first, so that a long one does not keep the others waiting. Every fourth launch goes by importance instead, so that the
//! long one gets there, too: a share of each launch would not do, since a lag grows by a token a launch while it is open.

use super::Scheduler;
use super::plan::{DraftChunk, Lagging, Plan};
use super::row::{Row, RowIndex, RowState};
use crate::error::Result;

/// One launch of so many goes by importance.
const IMPORTANCE_LAUNCHES: u64 = 4;

/// Tokens that a launch catches up whatever they take: drafts of usual prompts then begin at the same token however fast the machine was, and
/// with them stays the text that a seed gives by `rejection`.
const LEAST_CAUGHT_UP: usize = 512;

/// How far a row catches up in one launch: the positions of the table above.
struct Gap {
    start: usize,
    end: usize,
    /// `end` is the target, and the first drafting pass may write what is behind it.
    drafts: bool,
}

impl Scheduler {
    /// Gives catch-up chunks within the draft's budget and one record; a launch's first chunk has at least one token.
    pub(super) fn catch_up(&mut self, plan: &mut Plan) -> Result<()> {
        if plan.lagging.is_empty() {
            return Ok(());
        }
        let chunks = plan.budget.map_or_else(|| self.chunk_budget(plan.decode_tokens), |budget| budget.chunks);
        let mut left = chunks.saturating_sub(plan.prefill_tokens);
        let mut room = self.config.max_num_batched_tokens;
        // A request that decodes alone waits for itself.
        let most_ms = self.most_ms(plan.decodes.len() - 1);
        if !self.next_launch_id.is_multiple_of(IMPORTANCE_LAUNCHES) {
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

    /// How much of `most` a row may catch up without chunks taking more than `ms`.
    fn catch_up_within(&self, plan: &Plan, index: usize, most: usize, ms: f64) -> usize {
        let row_index = plan.decodes[plan.lagging[index].decode].row;
        let start = self.rows[row_index as usize].draft_len.max(self.held_from(row_index));
        let ratio = self.config.drafter.cost_ratio();
        self.prefill_costs.fitting_draft(&plan.work, ratio, start, most, ms)
    }

    /// Catches one row up by at most `most` tokens; how many it took.
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
            (row.draft_len, row.draft_len_moved, row.last_catch_up) = (end, false, self.next_launch_id);
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

    /// Claims the blocks `[from, to)` of a row that others can find, so far as they have no mark D.
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

    /// Takes a row's claims from block `first` on; should it draft again, it has to catch up from there, since another writes them.
    fn give_back_claims(&mut self, row_index: RowIndex, first: usize) {
        let row = &mut self.rows[row_index as usize];
        row.lower_draft_len(first * self.config.block_size);
        for &block in &row.blocks[first..row.num_registered] {
            self.pool.release_claim(block, row_index);
        }
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
            .find(|&index| {
                let claimant = self.pool.claimant(row.blocks[index]);
                claimant.is_some_and(|claimant| claimant != row_index && self.keeps_claims(claimant))
            })
            .map_or(end, |index| (index * block_size).max(start))
    }

    /// Whether what a row has claimed is its own: it drafts, or may yet, or launches in flight name it after its end.
    fn keeps_claims(&self, row_index: RowIndex) -> bool {
        let row = &self.rows[row_index as usize];
        row.state == RowState::Closed || row.drafting > 0 || self.most_drafts(row, row.k) > 0
    }

    /// Draft tokens that a row could use at once, for the budget: 0 while it waits for another row's claim.
    pub(super) fn catch_up_demand(&self, row_index: RowIndex, n: usize) -> usize {
        let row = &self.rows[row_index as usize];
        let start = self.skip_drafted(row, row.draft_len.max(self.held_from(row_index)));
        let end = n.saturating_sub(self.drafts.max_draft_lag).min(start + self.config.max_num_batched_tokens);
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
