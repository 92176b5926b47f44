//! Windows of KV: the blocks that return to the pool while their request runs, and the maximum number that a row needs.
//! Writes no record: the device's block table keeps the entry of a returned block, and no query reads it.
//!
//! With a window of W positions, a query at position p reads the KV of `[p + 1 - W, p]`. Steps in flight and later ones
//! feed a row of n settled tokens positions from n - `lag` on. `lag` is 1, or the number of positions that the
//! drafter's first pass feeds. For a prompt they feed positions after its last settled chunk. No query reads positions
//! before the window of the first fed position, so blocks that lie wholly before it return to the pool. Only catch-up
//! chunks begin earlier: while one is in flight, no block of its row returns in the first group, which has the draft's
//! KV.
//!
//! A drafter that catches up from tokens begins at the first position that its row still holds, if its KV ends before
//! that. Its first queries lack a part of their windows, so the record says where draft KV begins
//! (`draft_chunk_k_start`).

use super::row::{NO_BLOCK, RowIndex, RowState, Step};
use super::{Scheduler, SchedulerConfig};
use crate::error::Result;

impl SchedulerConfig {
    /// Returns the index of the first block of a group that a row of `n` settled tokens may still read. For a prompt,
    /// `n` is the number of computed tokens plus 1.
    pub(super) fn first_block_read(&self, group: usize, n: usize) -> usize {
        self.window_of(group).map_or(0, |(window, lag)| (n + 1).saturating_sub(lag + window) / self.block_size)
    }

    /// Returns the maximum number of blocks that a row holds if it feeds `len` positions, once everything in flight has
    /// settled.
    fn blocks_of_window(&self, (window, lag): (usize, usize), len: usize) -> usize {
        self.blocks_for(window + lag + len - 2) + 1
    }

    /// Returns the minimum number of blocks with which a request of `limit` tokens can reach its limit, alone in the
    /// pool.
    pub(super) fn least_blocks(&self, limit: usize) -> usize {
        let all = self.blocks_for(limit);
        let of_group = |group| self.window_of(group).map_or(all, |window| all.min(self.blocks_of_window(window, 1)));
        (0..self.num_groups()).map(of_group).sum()
    }

    /// Returns the maximum number of blocks of a group that a row is expected to hold, with a whole step's tokens
    /// ahead of its window. `None` for a group without a window.
    pub(super) fn most_blocks_held(&self, group: usize) -> Option<usize> {
        let len = self.max_num_batched_tokens + self.num_speculative_tokens + 1;
        self.window_of(group).map(|window| self.blocks_of_window(window, len))
    }
}

impl Scheduler {
    /// Returns the minimum number of blocks with which a request of `limit` tokens, prompt and output, can reach its
    /// limit, alone in the pool. Each group needs blocks for all positions or for a window of them.
    pub fn least_blocks(&self, limit: usize) -> usize {
        self.config.least_blocks(limit)
    }

    /// Returns blocks that the rows of a just settled step no longer need to the pool. The step's blocks must have
    /// been published.
    pub(super) fn return_behind_windows(&mut self, step: &Step) -> Result<()> {
        for sequence in &step.sequences {
            let row = &self.rows[sequence.row as usize];
            if row.state != RowState::Live {
                continue;
            }
            let n = if sequence.emits() { row.n } else { sequence.chunk_end as usize + 1 };
            self.groups.return_blocks(sequence.row, n, &self.config, &mut self.pool)?;
            if row.last_catch_up <= step.id {
                self.return_blocks(sequence.row, self.config.first_block_read(0, n))?;
            }
        }
        Ok(())
    }

    /// Returns the row's blocks before block `first` to the pool, first to last, so that of cached blocks the earliest
    /// are evicted first.
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

    /// Moves the start of draft KV to the first position that the row holds, if the draft KV ends before it.
    pub(super) fn begin_at_window(&mut self, row_index: RowIndex) {
        let held_from = self.held_from(row_index);
        let row = &mut self.rows[row_index as usize];
        if row.draft_len < held_from {
            (row.draft_len, row.draft_len_moved) = (held_from, true);
        }
    }

    /// Returns the first position of the blocks that a row holds.
    pub(super) fn held_from(&self, row_index: RowIndex) -> usize {
        self.rows[row_index as usize].first_block * self.config.block_size
    }
}
