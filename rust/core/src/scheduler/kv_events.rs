//! What came into the prefix cache and what left it, for routers that ask who holds which prefix, and for hosts that keep KV
//! elsewhere. By value: the caller takes the events when it likes. Off unless enabled.
//!
//! `plan` evicts before its launch executes. So the events taken between the two name the blocks that the launch may overwrite, whose
//! KV can still be copied out, on the launch's stream: no launch in flight names a block that is evicted.

use super::loras::Lora;
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
        /// The request's cache salt, where the first of them begins its text; further blocks have it through their parent's hash.
        cache_salt: Box<[u8]>,
        /// The adapter that they were computed with.
        lora: Option<Lora>,
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

/// Changes of one block each, in the order in which they happened: what `plan` and `settle` write. Flat, so that a block costs them
/// no allocation; [`KvEventBatch::to_events`] makes events of it, in another thread if the host likes.
#[derive(Clone, Debug, Default)]
pub struct KvEventBatch {
    changes: Vec<Change>,
    /// Of stored blocks, `block_size` each.
    token_ids: Vec<u32>,
    /// Change, offset in its block, and extra key.
    extra_keys: Vec<(usize, usize, Box<[u8]>)>,
    /// Change, and cache salt; none where it is empty.
    cache_salts: Vec<(usize, Box<[u8]>)>,
    /// Change, and the adapter of its request; none of the base model's.
    loras: Vec<(usize, Lora)>,
    block_size: usize,
}

#[derive(Clone, Copy, Debug)]
enum Change {
    /// `parent` means nothing where the block begins its text.
    Stored {
        block: i64,
        hash: BlockHash,
        parent: BlockHash,
        begins: bool,
    },
    Removed {
        block: i64,
        hash: BlockHash,
        has_draft: bool,
    },
    Cleared,
}

impl KvEventBatch {
    /// An empty one with room for twice what `taken` holds: growing costs more than the rest.
    fn like(taken: &Self) -> Self {
        Self {
            changes: Vec::with_capacity(2 * taken.changes.len()),
            token_ids: Vec::with_capacity(2 * taken.token_ids.len()),
            block_size: taken.block_size,
            ..Self::default()
        }
    }

    /// Whether nothing happened.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The same as events, the changes of consecutive blocks in one.
    pub fn to_events(&self) -> Vec<KvEvent> {
        let mut events: Vec<KvEvent> = Vec::new();
        let mut tokens = self.token_ids.chunks_exact(self.block_size.max(1));
        let (mut keys, mut salts) = (self.extra_keys.iter().peekable(), self.cache_salts.iter().peekable());
        let mut loras = self.loras.iter().peekable();
        for (index, change) in self.changes.iter().enumerate() {
            match *change {
                Change::Stored { block, hash, parent, begins } => {
                    let follows = match events.last() {
                        Some(KvEvent::BlockStored { block_hashes, .. }) => {
                            !begins && block_hashes.last() == Some(&parent)
                        }
                        _ => false,
                    };
                    let lora = loras.next_if(|(of, _)| *of == index).map(|(_, lora)| lora);
                    if !follows {
                        let salt = salts.next_if(|(of, _)| *of == index).map(|(_, salt)| salt.clone());
                        events.push(KvEvent::BlockStored {
                            blocks: vec![],
                            block_hashes: vec![],
                            parent_block_hash: (!begins).then_some(parent),
                            token_ids: vec![],
                            extra_keys: vec![],
                            cache_salt: salt.unwrap_or_default(),
                            lora: lora.cloned(),
                        });
                    }
                    let Some(KvEvent::BlockStored { blocks, block_hashes, token_ids, extra_keys, .. }) =
                        events.last_mut()
                    else {
                        continue;
                    };
                    blocks.push(block);
                    block_hashes.push(hash);
                    token_ids.extend_from_slice(tokens.next().unwrap_or_default());
                    let mut of_block = vec![];
                    while let Some((_, offset, key)) = keys.next_if(|(of, ..)| *of == index) {
                        of_block.push((*offset, key.clone()));
                    }
                    extra_keys.push(of_block);
                }
                Change::Removed { block, hash, has_draft: drafted } => {
                    if !matches!(events.last(), Some(KvEvent::BlockRemoved { .. })) {
                        events.push(KvEvent::BlockRemoved { blocks: vec![], block_hashes: vec![], has_draft: vec![] });
                    }
                    if let Some(KvEvent::BlockRemoved { blocks, block_hashes, has_draft }) = events.last_mut() {
                        blocks.push(block);
                        block_hashes.push(hash);
                        has_draft.push(drafted);
                    }
                }
                Change::Cleared => events.push(KvEvent::AllBlocksCleared),
            }
        }
        events
    }
}

/// Changes since the last were taken: at most two a block of the pool, which is what a launch and its settling can come to.
#[derive(Clone, Debug)]
pub(super) struct KvEventLog {
    batch: KvEventBatch,
    capacity: usize,
}

impl KvEventLog {
    pub(super) fn new(config: &SchedulerConfig) -> Self {
        let batch = KvEventBatch { block_size: config.block_size, ..KvEventBatch::default() };
        Self { batch, capacity: 2 * config.num_blocks }
    }

    /// Notes what `allocate` is about to evict.
    #[cold]
    fn before_allocate(&mut self, pool: &BlockPool) {
        let Some(block) = pool.next_eviction() else { return };
        let Some(hash) = pool.block_hash(block) else { return };
        self.note(Change::Removed { block, hash, has_draft: pool.has_draft(block) });
    }

    /// Notes that the request's block `index` was registered under `hash`.
    #[inline(never)] // out of the way of those who take no events
    pub(super) fn stored(&mut self, block: i64, request: &Request, index: usize, hash: BlockHash) {
        let parent = request.parent_hash(index);
        self.note(Change::Stored { block, hash, parent: parent.unwrap_or_default(), begins: parent.is_none() });
        let batch = &mut self.batch;
        let start = index * batch.block_size;
        batch.token_ids.extend_from_slice(&request.tokens[start..start + batch.block_size]);
        if request.has_extra_keys() {
            let change = batch.changes.len() - 1;
            for (offset, key) in request.extra_keys_of(start, batch.block_size) {
                batch.extra_keys.push((change, offset, key.into()));
            }
        }
        if index == 0 && !request.cache_salt.is_empty() {
            batch.cache_salts.push((batch.changes.len() - 1, request.cache_salt.clone()));
        }
        if let Some(lora) = &request.lora {
            batch.loras.push((batch.changes.len() - 1, lora.clone()));
        }
    }

    /// Notes that nothing is cached any more.
    pub(super) fn cleared(&mut self) {
        self.batch = KvEventBatch { block_size: self.batch.block_size, ..KvEventBatch::default() };
        self.batch.changes.push(Change::Cleared);
    }

    /// A caller who does not take events loses them, not memory.
    #[inline]
    fn note(&mut self, change: Change) {
        // The first may be what was dropped before.
        if self.batch.changes.len() > self.capacity {
            self.cleared();
        }
        self.batch.changes.push(change);
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
        self.take_kv_event_batch().to_events()
    }

    /// The same, of which no event was made yet: what costs the caller's thread least.
    pub fn take_kv_event_batch(&mut self) -> KvEventBatch {
        let Some(log) = &mut self.kv_events else { return KvEventBatch::default() };
        let next = KvEventBatch::like(&log.batch);
        std::mem::replace(&mut log.batch, next)
    }
}
