//! Snapshots that the host keeps elsewhere too, such as on a disk: which ones to copy out, and where to copy them in.
//! Copies no states itself. Off unless block saves are enabled.
//!
//! A snapshot of a prompt is due as soon as it can be found. A row keeps only the last one of its output, so that one
//! is due when the row is released. A due snapshot that is evicted before the host takes it is lost to the host.
//!
//! A snapshot is found by the hash of the KV block at its end, so the host must copy in that block first.

use std::collections::VecDeque;

use super::Scheduler;
use crate::error::{Error, Result};
use crate::hash::BlockHash;

/// Snapshot of states to copy out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DueSnapshot {
    /// Slot of the snapshot.
    pub slot: i64,
    /// Hash of the KV block at its end, which the snapshot is found by.
    pub hash: BlockHash,
    /// Number of positions that the states cover.
    pub len: usize,
}

/// Snapshots that the host has not taken yet, at most one for each slot.
#[derive(Clone, Debug)]
pub(super) struct DueSnapshots {
    /// Slots that became due, each once.
    queue: VecDeque<i64>,
    /// Length and hash of the due snapshot in each slot. The slot may have another snapshot since.
    by_slot: Vec<Option<(usize, BlockHash)>>,
}

impl DueSnapshots {
    pub(super) fn new(num_slots: usize) -> Self {
        Self { queue: VecDeque::with_capacity(num_slots), by_slot: vec![None; num_slots] }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Notes that the snapshot in a slot is due.
    pub(super) fn add(&mut self, slot: i64, len: usize, hash: BlockHash) {
        if self.by_slot[slot as usize].replace((len, hash)).is_none() {
            self.queue.push_back(slot);
        }
    }

    /// Notes that no snapshot is cached any more.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.by_slot.fill(None);
    }

    fn take(&mut self) -> Option<DueSnapshot> {
        let slot = self.queue.pop_front()?;
        self.by_slot[slot as usize].take().map(|(len, hash)| DueSnapshot { slot, hash, len })
    }
}

impl Scheduler {
    /// Takes the next snapshot that the host should copy out, before the next [`Self::plan`]. Always `None` unless
    /// `enable_block_saves` is set.
    pub fn take_due_snapshot(&mut self) -> Option<DueSnapshot> {
        let (saves, snapshots) = (self.saves.as_mut()?, self.snapshots.as_ref()?);
        while !saves.snapshots.is_empty() {
            let due = saves.snapshots.take();
            if due.is_some_and(|due| snapshots.pool.block_hash(due.slot) == Some(due.hash)) {
                return due;
            }
        }
        None
    }

    /// Returns the number of blocks of the prefix hit that a live request would have now, and the hashes of the blocks
    /// after it. A snapshot at the end of one of them makes the hit longer, if the KV up to there is cached.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if the id is not live.
    pub fn missing_snapshots(&mut self, request_id: i64) -> Result<(usize, Vec<BlockHash>)> {
        let index = self.live(request_id)?;
        let Some(snapshots) = &self.snapshots else { return Ok((0, Vec::new())) };
        let (block_size, request) = (self.config.block_size, &mut self.requests[index]);
        let most = (request.tokens.len() - 1) / block_size;
        let mut hashes: Vec<_> = (0..most).map(|block| request.block_hash(block, block_size, &self.hasher)).collect();
        let cached = hashes.iter().take_while(|&&hash| self.pool.lookup(hash).is_some()).count();
        let last = hashes[..cached].iter().rposition(|&hash| snapshots.pool.lookup(hash).is_some());
        let hit = last.map_or(0, |last| last + 1);
        Ok((hit, hashes.split_off(hit)))
    }

    /// Notes that the KV of a live request's first `num_blocks` blocks is cached, or that the host has it. When the
    /// request next gets a row, it plans a snapshot at the end of these blocks, as it does at the end of cached KV.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if the id is not live.
    pub fn note_stored(&mut self, request_id: i64, num_blocks: usize) -> Result<()> {
        let index = self.live(request_id)?;
        let request = &mut self.requests[index];
        request.num_stored = num_blocks.min((request.tokens.len() - 1) / self.config.block_size);
        Ok(())
    }

    /// Puts the snapshot at the end of a live request's first `num_blocks` blocks into the prefix cache. Returns its
    /// slot, which the host must fill before the next step. This may evict a snapshot with which a request of the
    /// planned step begins. So the host must call it after that step has been executed. Returns `None` if there is such
    /// a snapshot already, if the KV at its end is not cached, or if rows are writing into all slots.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if the id is not live. [`Error::InvalidBuffer`] if a prefix hit could not have so many
    /// blocks. Nothing has changed then.
    pub fn adopt_snapshot(&mut self, request_id: i64, num_blocks: usize) -> Result<Option<i64>> {
        let index = self.live(request_id)?;
        let block_size = self.config.block_size;
        let request = &mut self.requests[index];
        let most = (request.tokens.len() - 1) / block_size;
        if num_blocks == 0 || num_blocks > most {
            let allowed = format!("from 1 to {most}, the blocks before the last token");
            return Err(Error::invalid_buffer("num_blocks", num_blocks, allowed));
        }
        let hash = request.block_hash(num_blocks - 1, block_size, &self.hasher);
        let Some(snapshots) = &mut self.snapshots else { return Ok(None) };
        if self.pool.lookup(hash).is_none() || snapshots.pool.lookup(hash).is_some() {
            return Ok(None);
        }
        let Some(slot) = snapshots.allocate(self.kv_events.as_mut()) else { return Ok(None) };
        snapshots.pool.register(slot, hash)?;
        snapshots.pool.free(slot)?;
        if let Some(events) = &mut self.kv_events {
            events.stored_snapshot(slot, &self.requests[index], num_blocks - 1, hash);
        }
        Ok(Some(slot))
    }
}
