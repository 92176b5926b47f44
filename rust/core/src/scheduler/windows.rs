//! KV behind a window: which blocks come back to the pool while their request goes on, and how many a row needs at most. Writes no record:
//! the device's block table keeps the entry of a block that came back, and no query reads it.
//!
//! With a window of W positions a query at position p reads the KV of `[p + 1 - W, p]`. Launches in flight, and those to come, feed a
//! row of n settled tokens positions from n - `lag` on, where `lag` is 1 or what its drafter's first pass feeds; of a prompt those behind
//! its last settled chunk. Positions before the first of these windows are read by no one, and whole blocks of them come back. Catch-up
//! chunks alone begin further back: while one is in flight, nothing of its row comes back in the first group, where the draft's KV is.
//!
//! A drafter that catches up from tokens begins at the first position that its row still holds, if its KV ends before that. What its
//! first queries miss of their windows is gone, so the record says where draft KV begins (`draft_chunk_k_start`).

use super::row::{Launch, NO_BLOCK, RowIndex, RowState};
use super::{Scheduler, SchedulerConfig};
use crate::error::Result;

impl SchedulerConfig {
    /// The first block of a group that a row of `n` settled tokens, or of `n - 1` computed ones of its prompt, may still read.
    pub(super) fn first_block_read(&self, group: usize, n: usize) -> usize {
        self.window_of(group).map_or(0, |(window, lag)| (n + 1).saturating_sub(lag + window) / self.block_size)
    }

    /// The most blocks that a row holds which feeds `len` positions, once everything in flight has settled.
    fn blocks_of_window(&self, (window, lag): (usize, usize), len: usize) -> usize {
        self.blocks_for(window + lag + len - 2) + 1
    }

    /// Blocks without which a request of this limit does not get there, alone in the pool.
    pub(super) fn least_blocks(&self, limit: usize) -> usize {
        let all = self.blocks_for(limit);
        let of_group = |group| self.window_of(group).map_or(all, |window| all.min(self.blocks_of_window(window, 1)));
        (0..self.num_groups()).map(of_group).sum()
    }

    /// The most blocks of a group that a row is reckoned to hold: with a whole launch's tokens ahead of its window.
    pub(super) fn most_blocks_held(&self, group: usize) -> Option<usize> {
        let len = self.max_num_batched_tokens + self.num_speculative_tokens + 1;
        self.window_of(group).map(|window| self.blocks_of_window(window, len))
    }
}

impl Scheduler {
    /// Blocks without which a request of `limit` tokens, prompt and output, does not get there, alone in the pool: in every group all of
    /// its positions, or a window of them.
    pub fn least_blocks(&self, limit: usize) -> usize {
        self.config.least_blocks(limit)
    }

    /// Gives the pool what the rows of a launch that has just settled need no more. Its blocks have been published.
    pub(super) fn return_behind_windows(&mut self, launch: &Launch) -> Result<()> {
        for entry in &launch.entries {
            let row = &self.rows[entry.row as usize];
            if row.state != RowState::Live {
                continue;
            }
            let n = if entry.emits() { row.n } else { entry.chunk_end as usize + 1 };
            self.groups.return_blocks(entry.row, n, &self.config, &mut self.pool)?;
            if row.last_catch_up <= launch.id {
                self.return_blocks(entry.row, self.config.first_block_read(0, n))?;
            }
        }
        Ok(())
    }

    /// Gives the row's blocks before block `first` back, first to last: of cached ones the head is evicted before the window.
    fn return_blocks(&mut self, row_index: RowIndex, first: usize) -> Result<()> {
        let row = &mut self.rows[row_index as usize];
        for index in row.first_block..first {
            let block = std::mem::replace(&mut row.blocks[index], NO_BLOCK);
            self.pool.release_claim(block, row_index);
            self.pool.free(block)?;
            row.first_block = index + 1;
        }
        Ok(())
    }

    /// Lets draft KV begin at the first position that the row holds, if it ends before that.
    pub(super) fn begin_at_window(&mut self, row_index: RowIndex) {
        let held_from = self.held_from(row_index);
        let row = &mut self.rows[row_index as usize];
        if row.draft_len < held_from {
            (row.draft_len, row.draft_len_moved) = (held_from, true);
        }
    }

    /// The first position of the blocks that a row holds.
    pub(super) fn held_from(&self, row_index: RowIndex) -> usize {
        self.rows[row_index as usize].first_block * self.config.block_size
    }
}
