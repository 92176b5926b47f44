//! Slots of snapshots of states, found by the hash of the KV block that ends there. Knows no request and no plan.

use super::config::SchedulerConfig;
use super::kv_events::KvEventLog;
use super::row::RowIndex;
use crate::block_pool::BlockPool;
use crate::error::Result;
use crate::hash::BlockHash;

/// Statistics of the snapshots of states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StateCacheStats {
    /// Number of snapshots that fit.
    pub num_slots: usize,
    /// Number of snapshots that can be found now.
    pub num_cached: usize,
    /// Number of requests that began with a snapshot, counted each time they got a row.
    pub hits: u64,
    /// Number of snapshots that were written and could be found.
    pub stored: u64,
    /// Number of snapshots that were evicted: for another snapshot, or together with the KV block at their end.
    pub evictions: u64,
}

/// Snapshot that steps in flight, or the next ones, write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    /// Number of positions that the state covers.
    pub(super) len: usize,
    pub(super) slot: i64,
}

/// Snapshots of one row.
#[derive(Clone, Debug, Default)]
pub(super) struct RowSnapshots {
    /// Lengths at which the prompt's chunks to come write snapshots, ascending.
    pub(super) planned: Vec<usize>,
    /// Snapshots with a slot that no settled step has written, by ascending length.
    pub(super) pending: Vec<Pending>,
    /// Length of the next snapshot while the row decodes.
    pub(super) next: usize,
    /// Number of positions that the row's state covers after the steps that have settled.
    pub(super) passed: usize,
    /// Length and hash of the last snapshot that the row wrote while it decoded.
    pub(super) last: Option<(usize, BlockHash)>,
    /// Slot that the row's state begins with.
    pub(super) restored: Option<i64>,
}

/// Slots of all snapshots, and the snapshots that each row is going to write.
#[derive(Clone, Debug)]
pub(super) struct Snapshots {
    /// Pool whose blocks are the slots of snapshots. A held slot is being written; a cached slot has a snapshot that
    /// can be found.
    pub(super) pool: BlockPool,
    pub(super) rows: Vec<RowSnapshots>,
    pub(super) interval: usize,
    pub(super) decode_interval: usize,
    pub(super) stats: StateCacheStats,
}

impl Snapshots {
    /// Makes a pool of free slots; `None` if the settings have none.
    pub(super) fn new(config: &SchedulerConfig) -> Result<Option<Self>> {
        if config.num_snapshots == 0 {
            return Ok(None);
        }
        Ok(Some(Self {
            pool: BlockPool::new(config.num_snapshots)?,
            rows: vec![RowSnapshots::default(); config.max_num_seqs],
            interval: config.snapshot_interval.next_multiple_of(config.block_size),
            decode_interval: config.decode_snapshot_interval.next_multiple_of(config.block_size),
            stats: StateCacheStats { num_slots: config.num_snapshots, ..StateCacheStats::default() },
        }))
    }

    /// Frees the snapshot at the end of a block that leaves the prefix cache, if there is one.
    pub(super) fn forget(&mut self, hash: BlockHash, events: Option<&mut KvEventLog>) -> Result<()> {
        if let Some(slot) = self.pool.lookup(hash) {
            let evicted = self.pool.forget(slot)?;
            self.stats.evictions += 1;
            if let Some(events) = events {
                events.removed_snapshot(&evicted);
            }
        }
        Ok(())
    }

    /// Frees all snapshots. No row may be writing one.
    pub(super) fn clear(&mut self) {
        let cleared = self.pool.reset_prefix_cache();
        debug_assert!(cleared, "a row without blocks writes a snapshot");
    }

    /// Notes that a row's state covers `len` positions, in the step that settles.
    pub(super) fn passed(&mut self, row: RowIndex, len: usize) {
        self.rows[row as usize].passed = len;
    }

    /// Frees the slots of a row that no step in flight names.
    pub(super) fn release(&mut self, row: RowIndex) -> Result<()> {
        let own = &mut self.rows[row as usize];
        own.planned.clear();
        for pending in own.pending.drain(..) {
            self.pool.free(pending.slot)?;
        }
        Ok(())
    }

    /// Gives a row a slot for its snapshot at `len`. If rows are writing to all slots, the row gets none.
    pub(super) fn reserve(&mut self, row: RowIndex, len: usize, events: Option<&mut KvEventLog>) {
        if let Some(slot) = self.allocate(events) {
            self.rows[row as usize].pending.push(Pending { len, slot });
        }
    }

    /// Returns a slot to write into. If no slot is free, the least recently used snapshot is evicted. `None` if rows
    /// are writing into all slots.
    pub(super) fn allocate(&mut self, events: Option<&mut KvEventLog>) -> Option<i64> {
        if let Some(slot) = self.pool.allocate_free() {
            return Some(slot);
        }
        let evicted = self.pool.allocate_cached().ok()?;
        self.stats.evictions += 1;
        if let Some(events) = events {
            events.removed_snapshot(&evicted);
        }
        Some(evicted.block)
    }
}
