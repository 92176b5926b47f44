//! What came into the prefix cache and what left it, for routers that ask who holds which prefix, and for hosts that keep KV
//! elsewhere. By value: the caller takes the events when it likes. Off unless enabled.
//!
//! `plan` evicts before its launch executes. So the events taken between the two name the blocks that the launch may overwrite, whose
//! KV can still be copied out, on the launch's stream: no launch in flight names a block that is evicted.

use super::loras::Lora;
use super::request::Request;
use super::{Scheduler, SchedulerConfig};
use crate::block_pool::{BlockPool, Evicted};
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

/// Changes of one block each, in the order in which they happened: what `plan` and `settle` write. Flat and in one buffer, so that a
/// block costs them no allocation and a step one; [`KvEventBatch::to_events`] makes events of it, in another thread if the host likes.
#[derive(Clone, Debug, Default)]
pub struct KvEventBatch {
    /// A change after another: its kind, and unless that is `CLEARED` the block and its hash; where one was stored, the hash of the
    /// block before it, which means nothing in `STORED_FIRST`, and its tokens, `block_size` of them.
    words: Vec<u32>,
    /// Where the change begins in `words`, offset in its block, and extra key.
    extra_keys: Vec<(usize, usize, Box<[u8]>)>,
    /// Where the change begins in `words`, and cache salt; none where it is empty.
    cache_salts: Vec<(usize, Box<[u8]>)>,
    /// Where the change begins in `words`, and the adapter of its request; none of the base model's.
    loras: Vec<(usize, Lora)>,
    block_size: usize,
}

const STORED: u32 = 0;
/// Of a block that begins its text.
const STORED_FIRST: u32 = 1;
const REMOVED: u32 = 2;
/// Of a block whose draft KV was valid.
const REMOVED_WITH_DRAFT: u32 = 3;
const CLEARED: u32 = 4;
/// Words of a hash.
const HASH: usize = 4;
/// Words before a stored block's tokens.
const STORED_WORDS: usize = 2 + 2 * HASH;
const REMOVED_WORDS: usize = 2 + HASH;

/// A change, read back.
enum Change<'a> {
    Stored { block: i64, hash: BlockHash, parent: Option<BlockHash>, token_ids: &'a [u32] },
    Removed { block: i64, hash: BlockHash, has_draft: bool },
    Cleared,
}

#[inline]
fn words_of(hash: BlockHash) -> [u32; HASH] {
    [hash as u32, (hash >> 32) as u32, (hash >> 64) as u32, (hash >> 96) as u32]
}

fn hash_of(words: &[u32]) -> BlockHash {
    words.iter().rev().fold(0, |hash, &word| hash << 32 | BlockHash::from(word))
}

impl KvEventBatch {
    /// An empty one with room for twice what `taken` holds, or more: growing costs more than the rest, and an allocator that was
    /// given back as much before has it at hand.
    fn like(taken: &Self) -> Self {
        let room = (2 * taken.words.len()).next_power_of_two();
        Self { words: Vec::with_capacity(room), block_size: taken.block_size, ..Self::default() }
    }

    /// Whether nothing happened.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Where each change begins in `words`, and what it is.
    fn changes(&self) -> impl Iterator<Item = (usize, Change<'_>)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let (start, words) = (at, &self.words[at..]);
            let kind = *words.first()?;
            let (change, length) = match kind {
                CLEARED => (Change::Cleared, 1),
                REMOVED | REMOVED_WITH_DRAFT => {
                    let hash = hash_of(&words[2..REMOVED_WORDS]);
                    let has_draft = kind == REMOVED_WITH_DRAFT;
                    (Change::Removed { block: words[1].into(), hash, has_draft }, REMOVED_WORDS)
                }
                _ => {
                    let length = STORED_WORDS + self.block_size;
                    let parent = hash_of(&words[2 + HASH..STORED_WORDS]);
                    let stored = Change::Stored {
                        block: words[1].into(),
                        hash: hash_of(&words[2..2 + HASH]),
                        parent: (kind == STORED).then_some(parent),
                        token_ids: &words[STORED_WORDS..length],
                    };
                    (stored, length)
                }
            };
            at += length;
            Some((start, change))
        })
    }

    /// The same as events, the changes of consecutive blocks in one.
    pub fn to_events(&self) -> Vec<KvEvent> {
        let mut events: Vec<KvEvent> = Vec::new();
        let (mut keys, mut salts) = (self.extra_keys.iter().peekable(), self.cache_salts.iter().peekable());
        let mut loras = self.loras.iter().peekable();
        for (start, change) in self.changes() {
            match change {
                Change::Stored { block, hash, parent, token_ids: own } => {
                    let follows = match events.last() {
                        Some(KvEvent::BlockStored { block_hashes, .. }) => {
                            parent.is_some() && block_hashes.last().copied() == parent
                        }
                        _ => false,
                    };
                    let lora = loras.next_if(|(of, _)| *of == start).map(|(_, lora)| lora);
                    if !follows {
                        let salt = salts.next_if(|(of, _)| *of == start).map(|(_, salt)| salt.clone());
                        events.push(KvEvent::BlockStored {
                            blocks: vec![],
                            block_hashes: vec![],
                            parent_block_hash: parent,
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
                    token_ids.extend_from_slice(own);
                    let mut of_block = vec![];
                    while let Some((_, offset, key)) = keys.next_if(|(of, ..)| *of == start) {
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

/// Changes since the last were taken: at most as many words as every block of the pool being removed and stored, which is what a
/// launch and its settling can come to.
#[derive(Clone, Debug)]
pub(super) struct KvEventLog {
    batch: KvEventBatch,
    /// Words.
    capacity: usize,
}

impl KvEventLog {
    pub(super) fn new(config: &SchedulerConfig) -> Self {
        let batch = KvEventBatch { block_size: config.block_size, ..KvEventBatch::default() };
        Self { batch, capacity: config.num_blocks * (REMOVED_WORDS + STORED_WORDS + config.block_size) }
    }

    /// Notes what was evicted. Looks at no capacity: what is removed was stored.
    #[inline(never)] // out of the way of those who take no events
    fn removed(&mut self, evicted: &Evicted) {
        let &Evicted { block, hash, has_draft } = evicted;
        let [a, b, c, d] = words_of(hash);
        self.batch.words.extend_from_slice(&[REMOVED + u32::from(has_draft), block as u32, a, b, c, d]);
    }

    /// Notes that the request's block `index` was registered under `hash`.
    #[inline(never)] // out of the way of those who take no events
    pub(super) fn stored(&mut self, block: i64, request: &Request, index: usize, hash: BlockHash) {
        // A caller who does not take events loses them, not memory; the first may be what was dropped before.
        if self.batch.words.len() > self.capacity {
            self.cleared();
        }
        let parent = request.parent_hash(index);
        let kind = if parent.is_some() { STORED } else { STORED_FIRST };
        let (own, before) = (words_of(hash), words_of(parent.unwrap_or_default()));
        let batch = &mut self.batch;
        let change = batch.words.len();
        let head: [u32; STORED_WORDS] =
            [kind, block as u32, own[0], own[1], own[2], own[3], before[0], before[1], before[2], before[3]];
        batch.words.extend_from_slice(&head);
        let start = index * batch.block_size;
        batch.words.extend_from_slice(&request.tokens[start..start + batch.block_size]);
        if request.has_extra_keys() || request.lora.is_some() || !request.cache_salt.is_empty() {
            self.stored_of(change, request, index);
        }
    }

    /// Notes what the change's block depends on besides its tokens.
    #[cold]
    fn stored_of(&mut self, change: usize, request: &Request, index: usize) {
        let batch = &mut self.batch;
        for (offset, key) in request.extra_keys_of(index * batch.block_size, batch.block_size) {
            batch.extra_keys.push((change, offset, key.into()));
        }
        if index == 0 && !request.cache_salt.is_empty() {
            batch.cache_salts.push((change, request.cache_salt.clone()));
        }
        if let Some(lora) = &request.lora {
            batch.loras.push((change, lora.clone()));
        }
    }

    /// Notes that nothing is cached any more.
    #[cold]
    pub(super) fn cleared(&mut self) {
        self.batch = KvEventBatch { block_size: self.batch.block_size, ..KvEventBatch::default() };
        self.batch.words.push(CLEARED);
    }
}

/// Allocates where no block is free, and notes what that evicts.
#[inline]
pub(super) fn allocate(pool: &mut BlockPool, events: Option<&mut KvEventLog>) -> Result<i64> {
    let evicted = pool.allocate_cached()?;
    let block = evicted.block;
    if let Some(events) = events {
        events.removed(&evicted);
    }
    Ok(block)
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
