//! KV groups: layers that remember otherwise, by block tables and windows of their own. Holds those of the groups behind the first, whose table is in
//! [`super::row::Row`], and says what each group's window is.
//!
//! A block holds the KV of `block_size` positions of one group's layers, and one pool serves all groups. A row has a block of each group for the same
//! positions, but for those that have left the group's window and come back. So what a row can still cover is counted in *columns*: a
//! block of every group. Draft KV is in the first group alone, and with it mark D and its claims.
//!
//! A cached block is found by its content's hash and its group's tag. A prefix hit is the longest prefix that every group can serve; of a group with a
//! window that takes the blocks of the last window.

use super::plan::Plan;
use super::row::{NO_BLOCK, RowIndex};
use super::{LaunchHeader, Scheduler, SchedulerConfig};
use crate::block_pool::BlockPool;
use crate::drafts::Drafter;
use crate::error::Result;
use crate::hash::{BlockHash, BlockHasher};

/// A row's blocks in one group.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupTable {
    /// As many as the row's in the first group, [`NO_BLOCK`] before `first_block`.
    pub(super) blocks: Vec<i64>,
    pub(super) first_block: usize,
}

/// The groups behind the first; nothing where there is one.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    /// What a hash is combined with to find a block of each group, `[G]`: 0 in the first.
    tags: Vec<BlockHash>,
    /// `[R, G - 1]`.
    tables: Vec<GroupTable>,
}

/// What launches call is not inlined: with one group they would only be longer by it.
impl Groups {
    pub(super) fn new(config: &SchedulerConfig, hasher: &BlockHasher) -> Self {
        let further = config.window_groups.len();
        Self {
            tags: std::iter::once(0).chain((1..=further).map(|group| hasher.group_tag(group))).collect(),
            tables: vec![GroupTable::default(); config.max_num_seqs * further],
        }
    }

    /// Whether there is none behind the first.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Columns that `blocks` come to.
    #[inline]
    pub(super) fn columns(&self, blocks: usize) -> usize {
        if self.is_empty() { blocks } else { blocks / self.tags.len() }
    }

    /// What the block of `group` with this content is found under.
    pub(super) fn hash_in(&self, group: usize, hash: BlockHash) -> BlockHash {
        hash ^ self.tags[group]
    }

    /// A row's tables.
    pub(super) fn of(&self, row: RowIndex) -> &[GroupTable] {
        let further = self.tags.len() - 1;
        &self.tables[row as usize * further..][..further]
    }

    fn of_mut(&mut self, row: RowIndex) -> &mut [GroupTable] {
        let further = self.tags.len() - 1;
        &mut self.tables[row as usize * further..][..further]
    }

    /// Gives a row that has just been opened cached blocks, by group, and room for `max_blocks`.
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

    /// Allocates until the row has `num_blocks` blocks of every group.
    #[inline(never)]
    pub(super) fn grow(&mut self, row: RowIndex, num_blocks: usize, pool: &mut BlockPool) -> Result<()> {
        for table in self.of_mut(row) {
            while table.blocks.len() < num_blocks {
                table.blocks.push(pool.allocate()?);
            }
        }
        Ok(())
    }

    /// Offers the row's blocks at `index`, whose content has this hash, to the prefix cache.
    #[inline(never)]
    pub(super) fn register(&self, row: RowIndex, index: usize, hash: BlockHash, pool: &mut BlockPool) -> Result<()> {
        for (table, tag) in self.of(row).iter().zip(&self.tags[1..]) {
            pool.register(table.blocks[index], hash ^ tag)?;
        }
        Ok(())
    }

    /// Gives a row's blocks behind the windows of `n` settled tokens back, first to last.
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

    /// Gives all blocks of a row back, last to first.
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
    /// G: groups of layers with block tables of their own.
    pub fn num_groups(&self) -> usize {
        1 + self.window_groups.len()
    }

    /// Whether blocks come back while their request goes on.
    pub(super) fn has_windows(&self) -> bool {
        self.sliding_window.is_some() || !self.window_groups.is_empty()
    }

    /// The window of a group, and how many positions before n, the last token's own among them, a launch may feed its layers of a row of n tokens. No draft's
    /// first pass is among what reads the groups behind the first.
    pub(super) fn window_of(&self, group: usize) -> Option<(usize, usize)> {
        if group > 0 {
            return Some((self.window_groups[group - 1], 1));
        }
        let lag = match self.drafter {
            Drafter::Cached { max_draft_lag, .. } | Drafter::Hidden { max_draft_lag, .. } => max_draft_lag,
            Drafter::None | Drafter::Text => 1,
        };
        self.sliding_window.map(|window| (window, lag))
    }
}

impl Scheduler {
    /// A running request's blocks in a group, position by position, as [`super::RequestView::block_table`] has those of group 0. Empty while it waits.
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

    /// Positions that a row can cover which has `num_blocks` blocks of each group.
    #[inline]
    pub(super) fn coverable(&self, num_blocks: usize) -> usize {
        (num_blocks + self.groups.columns(self.pool.num_free())) * self.config.block_size
    }

    /// Adds to a record what it says of the groups behind the first: blocks beside those of the first group, whose entries are written, and
    /// slots of prompt chunks.
    pub(super) fn write_groups(&self, plan: &Plan, record: &mut [i64], header: &mut LaunchHeader) {
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

    /// Blocks that a row holds, by group.
    pub(super) fn num_held(&self, row_index: RowIndex) -> impl Iterator<Item = usize> + '_ {
        let row = &self.rows[row_index as usize];
        let further = self.groups.of(row_index).iter().map(|table| table.blocks.len() - table.first_block);
        std::iter::once(row.blocks.len() - row.first_block).chain(further)
    }
}
