//! Changes of the prefix cache, for routers that track which instance has which prefix, and for hosts that keep KV
//! elsewhere. Events are stored by value, and the caller takes them at any time. Off unless enabled.
//!
//! `plan` evicts blocks before its step executes. So events taken between the two name the blocks that the step may
//! overwrite. Their KV can still be copied out on the step's stream, because no step in flight names an evicted
//! block.

use super::config::Lora;
use super::request::Request;
use super::{Scheduler, SchedulerConfig};
use crate::block_pool::Evicted;
use crate::hash::BlockHash;

/// Change of the blocks that can be found by hash, with the names of vLLM's KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvEvent {
    /// Consecutive blocks of one request were stored: their target KV is valid, and they can be found.
    #[non_exhaustive]
    BlockStored {
        /// Ids of the stored blocks.
        blocks: Vec<i64>,
        /// Hashes of the stored blocks.
        block_hashes: Vec<BlockHash>,
        /// Hash of the block before the first stored one; `None` at position 0.
        parent_block_hash: Option<BlockHash>,
        /// Tokens of the stored blocks, `block_size` each.
        token_ids: Vec<u32>,
        /// Extra keys of each stored block, with the offset in the block from which each counts.
        extra_keys: Vec<Vec<(usize, Box<[u8]>)>>,
        /// Cache salt of the request, if the first stored block begins its text. Later blocks depend on it through
        /// their parent's hash.
        cache_salt: Box<[u8]>,
        /// Adapter that the stored blocks were computed with.
        lora: Option<Lora>,
        /// Whether these are snapshots of states at the ends of blocks, in the place of KV. `blocks` has their slots then.
        /// With states, a prefix hit needs KV and a snapshot.
        is_snapshot: bool,
    },
    /// Blocks were removed and can no longer be found. Their KV is unchanged until the next planned step executes.
    #[non_exhaustive]
    BlockRemoved {
        /// Ids of the removed blocks.
        blocks: Vec<i64>,
        /// Hashes that the removed blocks had.
        block_hashes: Vec<BlockHash>,
        /// Whether the draft KV of each removed block was valid too.
        has_draft: Vec<bool>,
        /// Whether these are snapshots of states, as in [`KvEvent::BlockStored`].
        is_snapshot: bool,
    },
    /// All blocks were removed, or earlier events were dropped because too many came since the last call. Later events
    /// are correct again. After a drop, blocks stored before may still be cached, but no event will name them.
    AllBlocksCleared,
}

/// Changes of one block each, in order, as `plan` and `settle` record them. All changes are in one flat buffer, so that
/// a block needs no allocation and a step needs one. [`KvEventBatch::to_events`] converts them to events, possibly in
/// another thread.
#[derive(Clone, Debug, Default)]
pub struct KvEventBatch {
    /// Changes one after another. Each begins with its kind. All kinds except `CLEARED` have the block and its hash.
    /// Stored blocks also have the hash of the block before (meaningless in `STORED_FIRST`) and their `block_size`
    /// tokens.
    words: Vec<u32>,
    /// For each extra key: index in `words` at which its change begins, offset in its block, and the key.
    extra_keys: Vec<(usize, usize, Box<[u8]>)>,
    /// For each change with a cache salt: index in `words` at which the change begins, and the salt.
    cache_salts: Vec<(usize, Box<[u8]>)>,
    /// For each change with an adapter: index in `words` at which the change begins, and its request's adapter.
    loras: Vec<(usize, Lora)>,
    block_size: usize,
}

/// Kind of change: a block was stored whose request has a block before it.
const STORED: u32 = 0;
/// Kind of change: a block was stored that begins its text.
const STORED_FIRST: u32 = 1;
/// Kind of change: a block was removed whose draft KV was not valid.
const REMOVED: u32 = 2;
/// Kind of change: a block was removed whose draft KV was valid.
const REMOVED_WITH_DRAFT: u32 = 3;
/// Kind of change: all blocks were removed, or earlier changes were dropped.
const CLEARED: u32 = 4;
/// Bit of a kind: the change is of a snapshot of states at the block's end.
const SNAPSHOT: u32 = 8;
/// Number of words in a block's hash.
const HASH: usize = 4;
/// Number of words of a stored block's event before the block's tokens.
const STORED_WORDS: usize = 2 + 2 * HASH;
/// Number of words of a removed block's event.
const REMOVED_WORDS: usize = 2 + HASH;

/// Change that was decoded from the words of a batch.
enum Change<'a> {
    Stored { block: i64, hash: BlockHash, parent: Option<BlockHash>, token_ids: &'a [u32], is_snapshot: bool },
    Removed { block: i64, hash: BlockHash, has_draft: bool, is_snapshot: bool },
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
    /// Makes an empty batch with room for at least twice the changes of `taken`. Growing would cost more than
    /// recording, and the allocator has memory of this size at hand.
    fn like(taken: &Self) -> Self {
        let room = (2 * taken.words.len()).next_power_of_two();
        Self { words: Vec::with_capacity(room), block_size: taken.block_size, ..Self::default() }
    }

    /// Returns whether there are no changes.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Iterates over the changes, each with its start in `words`.
    fn changes(&self) -> impl Iterator<Item = (usize, Change<'_>)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let (start, words) = (at, &self.words[at..]);
            let kind = *words.first()? & !SNAPSHOT;
            let is_snapshot = words[0] & SNAPSHOT > 0;
            let (change, length) = match kind {
                CLEARED => (Change::Cleared, 1),
                REMOVED | REMOVED_WITH_DRAFT => {
                    let hash = hash_of(&words[2..REMOVED_WORDS]);
                    let has_draft = kind == REMOVED_WITH_DRAFT;
                    (Change::Removed { block: words[1].into(), hash, has_draft, is_snapshot }, REMOVED_WORDS)
                }
                _ => {
                    let length = STORED_WORDS + self.block_size;
                    let parent = hash_of(&words[2 + HASH..STORED_WORDS]);
                    let stored = Change::Stored {
                        block: words[1].into(),
                        hash: hash_of(&words[2..2 + HASH]),
                        parent: (kind == STORED).then_some(parent),
                        token_ids: &words[STORED_WORDS..length],
                        is_snapshot,
                    };
                    (stored, length)
                }
            };
            at += length;
            Some((start, change))
        })
    }

    /// Converts the changes to events; changes of consecutive blocks become one event.
    pub fn to_events(&self) -> Vec<KvEvent> {
        let mut events: Vec<KvEvent> = Vec::new();
        let (mut keys, mut salts) = (self.extra_keys.iter().peekable(), self.cache_salts.iter().peekable());
        let mut loras = self.loras.iter().peekable();
        for (start, change) in self.changes() {
            match change {
                Change::Stored { block, hash, parent, token_ids: own, is_snapshot } => {
                    let follows = match events.last() {
                        Some(KvEvent::BlockStored { block_hashes, is_snapshot: before, .. }) => {
                            *before == is_snapshot && parent.is_some() && block_hashes.last().copied() == parent
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
                            is_snapshot,
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
                Change::Removed { block, hash, has_draft: drafted, is_snapshot } => {
                    let follows = match events.last() {
                        Some(KvEvent::BlockRemoved { is_snapshot: before, .. }) => *before == is_snapshot,
                        _ => false,
                    };
                    if !follows {
                        let (blocks, block_hashes, has_draft) = (vec![], vec![], vec![]);
                        events.push(KvEvent::BlockRemoved { blocks, block_hashes, has_draft, is_snapshot });
                    }
                    if let Some(KvEvent::BlockRemoved { blocks, block_hashes, has_draft, .. }) = events.last_mut() {
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

/// Changes since the caller last took them. The maximum corresponds to every block of the pool being removed and
/// stored, which one step can cause.
#[derive(Clone, Debug)]
pub(super) struct KvEventLog {
    batch: KvEventBatch,
    /// Maximum number of words.
    capacity: usize,
}

impl KvEventLog {
    pub(super) fn new(config: &SchedulerConfig) -> Self {
        let batch = KvEventBatch { block_size: config.block_size, ..KvEventBatch::default() };
        let most = config.num_blocks + config.num_snapshots;
        Self { batch, capacity: most * (REMOVED_WORDS + STORED_WORDS + config.block_size) }
    }

    /// Records an evicted block. It needs no check of the capacity, because the block was stored before.
    #[inline(never)] // out of the way of those who take no events
    pub(super) fn removed(&mut self, evicted: &Evicted) {
        let &Evicted { block, hash, has_draft } = evicted;
        let [a, b, c, d] = words_of(hash);
        self.batch.words.extend_from_slice(&[REMOVED + u32::from(has_draft), block as u32, a, b, c, d]);
    }

    /// Records a snapshot of states that was evicted.
    pub(super) fn removed_snapshot(&mut self, evicted: &Evicted) {
        let change = self.batch.words.len();
        self.removed(evicted);
        self.batch.words[change] |= SNAPSHOT;
    }

    /// Records that a snapshot of states at the end of the request's block `index` is in `slot`.
    pub(super) fn stored_snapshot(&mut self, slot: i64, request: &Request, index: usize, hash: BlockHash) {
        let change = self.stored(slot, request, index, hash);
        self.batch.words[change] |= SNAPSHOT;
    }

    /// Records that the request's block `index` was registered under `hash`. Returns the start of the change.
    #[inline(never)] // out of the way of those who take no events
    pub(super) fn stored(&mut self, block: i64, request: &Request, index: usize, hash: BlockHash) -> usize {
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
        change
    }

    /// Records the extra keys, cache salt and adapter of the change's block.
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

    /// Drops all recorded changes and records [`CLEARED`] in their place, because no block is cached any more or there
    /// were too many changes.
    #[cold]
    pub(super) fn cleared(&mut self) {
        self.batch = KvEventBatch { block_size: self.batch.block_size, ..KvEventBatch::default() };
        self.batch.words.push(CLEARED);
    }
}

impl Scheduler {
    /// Takes the changes of the prefix cache since the last call, in order; empty unless `enable_kv_cache_events` is
    /// set.
    ///
    /// If events are taken after each `plan`, before its step executes, [`KvEvent::BlockRemoved`] names the cached
    /// blocks that the step may overwrite. A caller that takes no events for longer may get
    /// [`KvEvent::AllBlocksCleared`] in place of dropped events.
    pub fn take_kv_events(&mut self) -> Vec<KvEvent> {
        self.take_kv_event_batch().to_events()
    }

    /// Takes the changes since the last call without converting them to events, which costs the caller's thread less.
    /// [`take_kv_events`](Self::take_kv_events) returns them as events.
    pub fn take_kv_event_batch(&mut self) -> KvEventBatch {
        let Some(log) = &mut self.kv_events else { return KvEventBatch::default() };
        let next = KvEventBatch::like(&log.batch);
        std::mem::replace(&mut log.batch, next)
    }
}
