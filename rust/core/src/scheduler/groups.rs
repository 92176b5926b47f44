//! KV groups: layers that keep a different part of the context have their own block tables and windows. This file holds
//! the tables of all groups except the first, whose table is in [`super::row::Row`], and the window of each group.
//!
//! A block holds the KV of `block_size` positions of one group's layers, and one pool serves all groups. A row has a
//! block of each group for the same positions, except for blocks that left the group's window and returned to the pool.
//! So free memory is counted in *columns*: a column is one block of every group, and gives a row `block_size` more
//! positions. Draft KV is in the first group alone, together with `draft_valid` and its claims.
//!
//! A cached block is found by the hash of its content and the tag of its group. A prefix hit is the longest prefix that
//! every group can serve. A group with a window needs only the blocks of the last window.

use super::plan::Plan;
use super::row::{NO_BLOCK, RowIndex};
use super::{Scheduler, SchedulerConfig, StepHeader};
use crate::block_pool::BlockPool;
use crate::drafts::{Drafter, SHARED_KV_LAG};
use crate::error::Result;
use crate::hash::{BlockHash, BlockHasher};

/// Block table of a row in one KV group.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupTable {
    /// Block ids, at the same indices as the row's blocks in the first group; [`NO_BLOCK`] before `first_block`.
    pub(super) blocks: Vec<i64>,
    pub(super) first_block: usize,
}

/// Block tables of all groups after the first; empty if there is only one group.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    /// Tags that are combined with a hash to find a block of each group, `[G]`; 0 for the first group.
    tags: Vec<BlockHash>,
    /// Block tables by row and group, `[R, G - 1]`.
    tables: Vec<GroupTable>,
}

/// Functions that steps call are not inlined, because they would only lengthen the code for models with one group.
impl Groups {
    pub(super) fn new(config: &SchedulerConfig, hasher: &BlockHasher) -> Self {
        let further = config.window_groups.len();
        Self {
            tags: std::iter::once(0).chain((1..=further).map(|group| hasher.group_tag(group))).collect(),
            tables: vec![GroupTable::default(); config.max_num_seqs * further],
        }
    }

    /// Returns whether there is no group after the first.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Returns the number of columns (one block of every group) that `blocks` free blocks make.
    #[inline]
    pub(super) fn columns(&self, blocks: usize) -> usize {
        if self.is_empty() { blocks } else { blocks / self.tags.len() }
    }

    /// Returns the hash under which the block of `group` with the content `hash` is found.
    pub(super) fn hash_in(&self, group: usize, hash: BlockHash) -> BlockHash {
        hash ^ self.tags[group]
    }

    /// Returns a row's block tables in the groups after the first.
    pub(super) fn of(&self, row: RowIndex) -> &[GroupTable] {
        let further = self.tags.len() - 1;
        &self.tables[row as usize * further..][..further]
    }

    fn of_mut(&mut self, row: RowIndex) -> &mut [GroupTable] {
        let further = self.tags.len() - 1;
        &mut self.tables[row as usize * further..][..further]
    }

    /// Gives a newly opened row its cached blocks in the groups after the first, and reserves memory for `max_blocks`.
    pub(super) fn open(
        &mut self,
        row: RowIndex,
        hits: &[Vec<i64>],
        max_blocks: usize,
        pool: &mut BlockPool,
    ) -> Result<()> {
        for (table, hits) in self.of_mut(row).iter_mut().zip(hits) {
            table.blocks.reserve(max_blocks);
            table.blocks.extend(hits);
            table.first_block = hits.iter().take_while(|&&block| block == NO_BLOCK).count();
            for &block in &hits[table.first_block..] {
                pool.share(block)?;
            }
        }
        Ok(())
    }

    /// Allocates until the row has `num_blocks` blocks of every group after the first.
    #[inline(never)]
    pub(super) fn grow(&mut self, row: RowIndex, num_blocks: usize, pool: &mut BlockPool) -> Result<()> {
        for table in self.of_mut(row) {
            while table.blocks.len() < num_blocks {
                table.blocks.push(pool.allocate()?);
            }
        }
        Ok(())
    }

    /// Registers the row's blocks at `index` in the prefix cache, in the groups after the first. `hash` is the hash of
    /// their content.
    #[inline(never)]
    pub(super) fn register(&self, row: RowIndex, index: usize, hash: BlockHash, pool: &mut BlockPool) -> Result<()> {
        for (table, tag) in self.of(row).iter().zip(&self.tags[1..]) {
            pool.register(table.blocks[index], hash ^ tag)?;
        }
        Ok(())
    }

    /// Returns a row's blocks in the groups after the first to the pool, first to last, as far as they lie before the
    /// group's window of `n` settled tokens.
    #[inline(never)]
    pub(super) fn return_blocks(
        &mut self,
        row: RowIndex,
        n: usize,
        config: &SchedulerConfig,
        pool: &mut BlockPool,
    ) -> Result<()> {
        for (table, group) in self.of_mut(row).iter_mut().zip(1..) {
            for index in table.first_block..config.first_block_read(group, n) {
                pool.free(std::mem::replace(&mut table.blocks[index], NO_BLOCK))?;
                table.first_block = index + 1;
            }
        }
        Ok(())
    }

    /// Returns a row's blocks in the groups after the first to the pool, last to first.
    #[inline(never)]
    pub(super) fn release(&mut self, row: RowIndex, pool: &mut BlockPool) -> Result<()> {
        for table in self.of_mut(row) {
            for block in table.blocks.drain(..).skip(table.first_block).rev() {
                pool.free(block)?;
            }
            table.first_block = 0;
        }
        Ok(())
    }
}

impl SchedulerConfig {
    /// Returns G, the number of KV groups (layers with a block table of their own).
    pub fn num_groups(&self) -> usize {
        1 + self.window_groups.len()
    }

    /// Returns whether blocks return to the pool while their request runs.
    pub(super) fn has_windows(&self) -> bool {
        self.sliding_window.is_some() || !self.window_groups.is_empty()
    }

    /// Returns the window of a group and its lag. The lag is how many positions before n, including the last token's
    /// own, a step may feed to the group's layers for a row of n tokens. Only the first group's lag includes the
    /// positions of a draft's first pass.
    pub(super) fn window_of(&self, group: usize) -> Option<(usize, usize)> {
        let shares = matches!(self.drafter, Drafter::SharedKv { .. });
        if group > 0 {
            return Some((self.window_groups[group - 1], if shares { SHARED_KV_LAG } else { 1 }));
        }
        let lag = match self.drafter {
            Drafter::Cached { max_draft_lag, .. } | Drafter::Hidden { max_draft_lag, .. } => max_draft_lag,
            Drafter::SharedKv { .. } => SHARED_KV_LAG,
            Drafter::None | Drafter::Text => 1,
        };
        self.sliding_window.map(|window| (window, lag))
    }
}

impl Scheduler {
    /// Returns a running request's blocks in a group, in order of position, as [`super::RequestView::block_table`] does
    /// for group 0. Empty while the request waits.
    ///
    /// # Errors
    /// [`crate::Error::UnknownRequest`] if the id is not live.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn group_block_table(&self, request_id: i64, group: usize) -> Result<&[i64]> {
        let request = self.request(request_id)?;
        Ok(match (group.checked_sub(1), request.row) {
            (None, _) => request.block_table,
            (Some(further), Some(row)) => &self.groups.of(row as RowIndex)[further].blocks,
            (Some(_), None) => &[],
        })
    }

    /// Returns the number of positions that a row with `num_blocks` blocks of each group can cover, including the free
    /// blocks of the pool.
    #[inline]
    pub(super) fn coverable(&self, num_blocks: usize) -> usize {
        (num_blocks + self.groups.columns(self.pool.num_free())) * self.config.block_size
    }

    /// Adds the groups after the first to a record whose entries for the first group are written: their block table
    /// updates, and their slots of prompt chunks.
    pub(super) fn write_groups(&self, plan: &Plan, record: &mut [i64], header: &mut StepHeader) {
        let layout = self.record_layout;
        let of_first = header.num_block_updates;
        record[layout.block_group.offset..][..of_first].fill(0);
        for update in 0..of_first {
            let [row, index] = [layout.block_row, layout.block_index].map(|section| record[section.offset + update]);
            for (table, group) in self.groups.of(row as RowIndex).iter().zip(1..) {
                let block = table.blocks[index as usize];
                if block != NO_BLOCK {
                    let at = header.num_block_updates;
                    record[layout.block_row.offset + at] = row;
                    record[layout.block_group.offset + at] = group;
                    record[layout.block_index.offset + at] = index;
                    record[layout.block_id.offset + at] = block;
                    header.num_block_updates += 1;
                }
            }
        }
        let mut first = 0;
        for chunk in &plan.chunks {
            for (table, group) in self.groups.of(chunk.row).iter().zip(1..) {
                let at = layout.prefill_slot.offset + group * self.config.max_num_batched_tokens + first;
                self.slot_mapper.map_range(&table.blocks, chunk.start as i64, &mut record[at..][..chunk.len]);
            }
            first += chunk.len;
        }
    }

    /// Returns the number of blocks that a row holds, by group.
    pub(super) fn num_held(&self, row_index: RowIndex) -> impl Iterator<Item = usize> + '_ {
        let row = &self.rows[row_index as usize];
        let further = self.groups.of(row_index).iter().map(|table| table.blocks.len() - table.first_block);
        std::iter::once(row.blocks.len() - row.first_block).chain(further)
    }
}
