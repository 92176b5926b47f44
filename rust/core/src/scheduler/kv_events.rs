//! What came into the prefix cache and what left it, for routers that ask who holds which prefix, and for hosts that keep KV
//! elsewhere. By value: the caller takes the events when it likes. Off unless enabled.
//!
//! `plan` evicts before its launch executes. So the events taken between the two name the blocks that the launch may overwrite, whose
//! KV can still be copied out, on the launch's stream: no launch in flight names a block that is evicted.

use super::request::Request;
use super::{Scheduler, SchedulerConfig};
use crate::block_pool::BlockPool;
use crate::error::Result;
use crate::hash::BlockHash;

/// A change of what can be found by hash. Names are those of vLLM's KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvEvent {
    /// Consecutive blocks of one request can be found from now on: their target KV is valid.
    #[non_exhaustive]
    BlockStored {
        /// The blocks.
        blocks: Vec<i64>,
        /// Their hashes.
        block_hashes: Vec<BlockHash>,
        /// Hash of the block before the first of them; none at position 0.
        parent_block_hash: Option<BlockHash>,
        /// Their tokens, `block_size` each.
        token_ids: Vec<u32>,
        /// By block, the extra keys and the offset in it from which on each counts.
        extra_keys: Vec<Vec<(usize, Box<[u8]>)>>,
    },
    /// Blocks can no longer be found. Their KV stays as it is until the next launch that is planned executes.
    #[non_exhaustive]
    BlockRemoved {
        /// The blocks.
        blocks: Vec<i64>,
        /// The hashes that they had.
        block_hashes: Vec<BlockHash>,
        /// Whether their draft KV was valid too.
        has_draft: Vec<bool>,
    },
    /// What was stored before counts no longer: the cache was reset, or so much happened since the events were last taken that they
    /// were dropped. What follows is true again; blocks stored before may still be cached then, but no event will say so.
    AllBlocksCleared,
}

/// Events since the last were taken. Holds at most two a block of the pool, which is what a launch and its settling can come to.
#[derive(Clone, Debug)]
pub(super) struct KvEventLog {
    events: Vec<KvEvent>,
    /// Blocks in `events`, and the most.
    num_blocks: usize,
    capacity: usize,
    block_size: usize,
}

impl KvEventLog {
    pub(super) fn new(config: &SchedulerConfig) -> Self {
        Self { events: Vec::new(), num_blocks: 0, capacity: 2 * config.num_blocks, block_size: config.block_size }
    }

    /// Notes what `allocate` is about to evict.
    #[cold]
    fn before_allocate(&mut self, pool: &BlockPool) {
        let Some(block) = pool.next_eviction() else { return };
        let Some(hash) = pool.block_hash(block) else { return };
        self.make_room();
        if !matches!(self.events.last(), Some(KvEvent::BlockRemoved { .. })) {
            self.events.push(KvEvent::BlockRemoved { blocks: vec![], block_hashes: vec![], has_draft: vec![] });
        }
        if let Some(KvEvent::BlockRemoved { blocks, block_hashes, has_draft }) = self.events.last_mut() {
            blocks.push(block);
            block_hashes.push(hash);
            has_draft.push(pool.has_draft(block));
        }
    }

    /// Notes that the request's block `index` was registered under `hash`.
    #[cold]
    pub(super) fn stored(&mut self, block: i64, request: &Request, index: usize, hash: BlockHash) {
        self.make_room();
        let (start, parent) = (index * self.block_size, request.parent_hash(index));
        let follows = match self.events.last() {
            Some(KvEvent::BlockStored { block_hashes, .. }) => {
                parent.is_some() && block_hashes.last() == parent.as_ref()
            }
            _ => false,
        };
        if !follows {
            self.events.push(KvEvent::BlockStored {
                blocks: vec![],
                block_hashes: vec![],
                parent_block_hash: parent,
                token_ids: vec![],
                extra_keys: vec![],
            });
        }
        if let Some(KvEvent::BlockStored { blocks, block_hashes, token_ids, extra_keys, .. }) = self.events.last_mut() {
            blocks.push(block);
            block_hashes.push(hash);
            token_ids.extend_from_slice(&request.tokens[start..start + self.block_size]);
            let keys = request.extra_keys_of(start, self.block_size);
            extra_keys.push(keys.map(|(offset, key)| (offset, key.into())).collect());
        }
    }

    /// Notes that nothing is cached any more.
    pub(super) fn cleared(&mut self) {
        self.events.clear();
        self.events.push(KvEvent::AllBlocksCleared);
        self.num_blocks = 0;
    }

    /// Room for one more block. A caller who does not take events loses them, not memory.
    fn make_room(&mut self) {
        if self.num_blocks == self.capacity {
            self.cleared();
        }
        self.num_blocks += 1;
    }
}

/// Allocates where no block is free, and notes what that evicts.
pub(super) fn allocate(pool: &mut BlockPool, events: Option<&mut KvEventLog>) -> Result<i64> {
    if let Some(events) = events {
        events.before_allocate(pool);
    }
    pool.allocate()
}

impl Scheduler {
    /// What came into the prefix cache and left it since the last call, in order; nothing unless `enable_kv_cache_events` is set.
    ///
    /// Taken after each `plan`, before its launch executes, [`KvEvent::BlockRemoved`] names the cached blocks that the launch may
    /// overwrite. Who takes none for more than a launch may find [`KvEvent::AllBlocksCleared`] in place of what was dropped.
    pub fn take_kv_events(&mut self) -> Vec<KvEvent> {
        let Some(log) = &mut self.kv_events else { return Vec::new() };
        log.num_blocks = 0;
        std::mem::take(&mut log.events)
    }
}
