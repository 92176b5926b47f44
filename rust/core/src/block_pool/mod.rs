//! Reference counts of KV blocks, and the prefix cache that finds blocks by content. Knows no requests and stores no
//! KV.
//!
//! A block is in exactly one of three states:
//!
//! | state | `ref_count` | found by hash | leaves it by |
//! | --- | --- | --- | --- |
//! | free | 0 | no | `allocate` |
//! | held | >= 1 | if registered | the last `free` |
//! | cached | 0 | yes | `share`, or eviction by `allocate` |
//!
//! `allocate` takes free blocks before it evicts the least recently freed cached one. A registered block has `target_valid`:
//! its target KV is valid. `draft_valid` means that its draft KV is valid too, either in general or only before one
//! given next token. A registered block without `draft_valid` is written by one holder at a time, which has its
//! *claim*. Operations on one block are O(1) and allocate no memory.

mod integrity;
mod list;
mod table;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::hash::BlockHash;
use list::{Link, ListId, Lists, SENTINELS};
use table::{Table, TableEntry};

const UNCLAIMED: u32 = u32::MAX;
/// Value of [`Block::successor`] if the block's draft KV does not depend on the token after the block.
const ANY: u32 = u32::MAX;

/// State of one block, in one cache line: in a large pool, every line that an operation reads is a cache miss.
#[derive(Clone, Debug)]
#[repr(align(64))]
struct Block {
    ref_count: u32,
    claimant: u32,
    registered: bool,
    has_draft: bool,
    /// Token after the block on which its draft KV depends; meaningful only if `has_draft` is set.
    successor: u32,
    link: Link,
    entry: TableEntry,
}

impl Block {
    const FREE: Self = Self {
        ref_count: 0,
        claimant: UNCLAIMED,
        registered: false,
        has_draft: false,
        successor: ANY,
        link: Link::NONE,
        entry: TableEntry::NONE,
    };
}

/// Block that was evicted from the prefix cache, with the hash that it was registered under and whether its draft KV
/// was valid.
pub(crate) struct Evicted {
    pub(crate) block: i64,
    pub(crate) hash: BlockHash,
    pub(crate) has_draft: bool,
}

/// A pool of `num_blocks` reference-counted KV blocks with a prefix cache.
///
/// ```
/// use specrs_core::{BlockHasher, BlockPool};
///
/// let mut pool = BlockPool::new(8)?;
/// let hasher = BlockHasher::new(&[0; 16]);
/// let hash = hasher.chain(hasher.root(b"tenant"), &[1, 2, 3, 4]);
///
/// let block = pool.allocate()?;
/// pool.register(block, hash)?; // its KV is complete: others may find it
/// pool.free(block)?; // not held, and still found
/// assert_eq!(pool.lookup(hash), Some(block));
/// pool.share(block)?;
/// assert_eq!(pool.ref_count(block), Some(1));
/// assert!(pool.free(block).is_ok() && pool.free(block).is_err(), "a double free is an error");
/// # Ok::<(), specrs_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BlockPool {
    /// State of the pool's blocks, followed by the two ends of the lists.
    blocks: Vec<Block>,
    lists: Lists,
    by_hash: Table,
}

impl BlockPool {
    /// Makes a pool whose blocks are all free; the first allocations return 0, 1, 2, ...
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless `1 <= num_blocks <= 2^31`.
    pub fn new(num_blocks: usize) -> Result<Self> {
        if num_blocks == 0 || num_blocks > 1 << 31 {
            return Err(Error::invalid_config("num_blocks", num_blocks, "from 1 to 2^31"));
        }
        let mut blocks = vec![Block::FREE; num_blocks + SENTINELS];
        let mut lists = Lists::new(&mut blocks);
        for block in 0..num_blocks {
            lists.push_back(&mut blocks, ListId::Free, block as u32);
        }
        Ok(Self { blocks, lists, by_hash: Table::new(num_blocks) })
    }

    /// Returns the number of blocks in the pool.
    pub fn num_blocks(&self) -> usize {
        self.blocks.len() - SENTINELS
    }

    /// Returns the number of blocks that `allocate` can return: free and cached ones.
    pub fn num_free(&self) -> usize {
        self.lists.len(ListId::Free) + self.lists.len(ListId::Cached)
    }

    /// Returns the number of holders of `block`, or `None` if the pool has no such block.
    pub fn ref_count(&self, block: i64) -> Option<usize> {
        self.get(block).map(|b| b.ref_count as usize)
    }

    /// Allocates a block with one holder. Its KV is stale, and it has neither `target_valid` nor `draft_valid`.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] if every block is held.
    #[inline]
    pub fn allocate(&mut self) -> Result<i64> {
        match self.allocate_free() {
            Some(block) => Ok(block),
            None => self.allocate_evicting(),
        }
    }

    /// Allocates a free block as [`Self::allocate`] does. Returns `None` if that would evict a cached block or no block
    /// is left.
    #[inline]
    pub(crate) fn allocate_free(&mut self) -> Option<i64> {
        let id = self.lists.pop_front(&mut self.blocks, ListId::Free)?;
        self.blocks[id as usize].ref_count = 1;
        Some(i64::from(id))
    }

    #[inline(never)]
    fn allocate_evicting(&mut self) -> Result<i64> {
        self.allocate_cached().map(|evicted| evicted.block)
    }

    /// Evicts the least recently freed cached block and allocates it, as [`Self::allocate`] does when no block is free.
    /// Returns the block with its former hash.
    #[inline]
    pub(crate) fn allocate_cached(&mut self) -> Result<Evicted> {
        let evicted = self.evict().ok_or(Error::OutOfBlocks { num_blocks: self.num_blocks() })?;
        self.blocks[evicted.block as usize].ref_count = 1;
        Ok(evicted)
    }

    /// Returns the cached block that the next `allocate` will evict, or `None` if it will take a free block or find
    /// none. The block's KV still matches [`Self::block_hash`], so the caller may copy it out first.
    #[inline]
    pub fn next_eviction(&self) -> Option<i64> {
        if self.lists.len(ListId::Free) > 0 {
            return None;
        }
        list::iter(&self.blocks, ListId::Cached).next().map(i64::from)
    }

    #[inline]
    fn evict(&mut self) -> Option<Evicted> {
        let id = self.lists.pop_front(&mut self.blocks, ListId::Cached)?;
        self.by_hash.remove(&mut self.blocks, id);
        let block = &mut self.blocks[id as usize];
        block.registered = false;
        let has_draft = std::mem::take(&mut block.has_draft);
        Some(Evicted { block: i64::from(id), hash: block.entry.hash(), has_draft })
    }

    /// Frees a cached block: it can no longer be found. Returns it with its former hash.
    ///
    /// # Errors
    /// [`Error::InvalidBlock`] if the block is not cached.
    pub(crate) fn forget(&mut self, block: i64) -> Result<Evicted> {
        let id = self.checked(block, "a cached block", |b| b.ref_count == 0 && b.registered)?;
        self.lists.remove(&mut self.blocks, ListId::Cached, id as u32);
        self.by_hash.remove(&mut self.blocks, id as u32);
        self.lists.push_front(&mut self.blocks, ListId::Free, id as u32);
        let b = &mut self.blocks[id];
        b.registered = false;
        let has_draft = std::mem::take(&mut b.has_draft);
        Ok(Evicted { block, hash: b.entry.hash(), has_draft })
    }

    /// Returns the number of cached blocks, which can be found by hash and have no holder.
    pub(crate) fn num_cached(&self) -> usize {
        self.lists.len(ListId::Cached)
    }

    /// Adds a holder to a held or cached block.
    ///
    /// # Errors
    /// [`Error::InvalidBlock`] if the block is free or not in the pool, or has 2^32 - 1 holders.
    pub fn share(&mut self, block: i64) -> Result<()> {
        let allowed = "a held or cached block with fewer than 2^32 - 1 holders";
        let id = self.checked(block, allowed, |b| (b.ref_count > 0 || b.registered) && b.ref_count < u32::MAX)?;
        if self.blocks[id].ref_count == 0 {
            self.lists.remove(&mut self.blocks, ListId::Cached, id as u32);
        }
        self.blocks[id].ref_count += 1;
        Ok(())
    }

    /// Removes one holder of `block`. A registered block without holders becomes the most recently used cached block;
    /// any other block without holders becomes free. A claim on the block ends with its last holder; before that, a
    /// claimant that leaves must call [`Self::release_claim`]. Free a sequence's blocks last to first, so that its tail
    /// is evicted before its head.
    ///
    /// # Errors
    /// [`Error::InvalidBlock`] if the block is not held (a double free) or not in the pool.
    #[inline]
    pub fn free(&mut self, block: i64) -> Result<()> {
        let id = self.checked(block, "a held block", |b| b.ref_count > 0)?;
        let b = &mut self.blocks[id];
        b.ref_count -= 1;
        if b.ref_count == 0 {
            b.claimant = UNCLAIMED;
            if b.registered {
                self.lists.push_back(&mut self.blocks, ListId::Cached, id as u32);
            } else {
                self.lists.push_front(&mut self.blocks, ListId::Free, id as u32);
            }
        }
        Ok(())
    }

    /// Returns the block that is registered under `hash`.
    pub fn lookup(&self, hash: BlockHash) -> Option<i64> {
        self.by_hash.find(&self.blocks, hash).map(i64::from)
    }

    /// Sets `target_valid`: the held `block` can be found under `hash` from now on. Returns false, and changes nothing,
    /// if another block has that content already; the block then stays private to its holder.
    ///
    /// # Errors
    /// [`Error::InvalidBlock`] if the block is not held, is registered already, or is not in the pool.
    #[inline]
    pub fn register(&mut self, block: i64, hash: BlockHash) -> Result<bool> {
        let id = self.checked(block, "a held block that is not registered", |b| b.ref_count > 0 && !b.registered)?;
        if !self.by_hash.insert(&mut self.blocks, hash, id as u32) {
            return Ok(false);
        }
        self.blocks[id].registered = true;
        Ok(true)
    }

    /// Returns whether `block` has `target_valid`: its target KV is valid and it can be found by hash.
    pub fn is_registered(&self, block: i64) -> bool {
        self.get(block).is_some_and(|b| b.registered)
    }

    /// Returns the hash that `block` is registered under.
    pub fn block_hash(&self, block: i64) -> Option<BlockHash> {
        self.get(block).filter(|b| b.registered).map(|b| b.entry.hash())
    }

    /// Returns whether `block` has `draft_valid`: its draft KV is valid, perhaps only before one next token, which
    /// [`Self::has_draft_before`] checks.
    pub fn has_draft(&self, block: i64) -> bool {
        self.get(block).is_some_and(|b| b.has_draft)
    }

    /// Sets `draft_valid` on a registered held block and ends its claim.
    ///
    /// # Errors
    /// [`Error::InvalidBlock`] if the block is not held, not registered, or not in the pool.
    #[inline]
    pub fn mark_draft(&mut self, block: i64) -> Result<()> {
        let id = self.checked(block, "a registered held block", |b| b.ref_count > 0 && b.registered)?;
        self.blocks[id].has_draft = true;
        self.blocks[id].successor = ANY;
        self.blocks[id].claimant = UNCLAIMED;
        Ok(())
    }

    /// Sets `draft_valid` on a registered held block and ends its claim. The draft KV of the block's last position may
    /// depend on the token after the block. The flag then holds only for requests whose token after the block is
    /// `successor`; `u32::MAX` stands for any token.
    ///
    /// # Errors
    /// [`Error::InvalidBlock`] if the block is not held, not registered, or not in the pool.
    #[inline]
    pub fn mark_draft_before(&mut self, block: i64, successor: u32) -> Result<()> {
        self.mark_draft(block)?;
        self.blocks[block as usize].successor = successor;
        Ok(())
    }

    /// Returns whether the draft KV of `block` is valid for a request whose token after the block is `successor`.
    pub fn has_draft_before(&self, block: i64, successor: u32) -> bool {
        self.get(block).is_some_and(|b| b.has_draft && (b.successor == ANY || b.successor == successor))
    }

    /// Returns the token after `block` for which its draft KV is valid, `u32::MAX` for any; `None` without
    /// `draft_valid`.
    pub(crate) fn draft_successor(&self, block: i64) -> Option<u32> {
        self.get(block).filter(|b| b.has_draft).map(|b| b.successor)
    }

    /// Clears `draft_valid` of `block`. Returns false if it was not set.
    ///
    /// # Errors
    /// [`Error::InvalidBlock`] if the block is not held or not in the pool.
    pub fn unmark_draft(&mut self, block: i64) -> Result<bool> {
        let id = self.checked(block, "a held block", |b| b.ref_count > 0)?;
        Ok(std::mem::take(&mut self.blocks[id].has_draft))
    }

    /// Removes `draft_valid` from `blocks`, which may be held, cached or free.
    ///
    /// # Errors
    /// [`Error::InvalidBlock`] if a block is not in the pool; no block has changed then.
    pub(crate) fn forget_drafts(&mut self, blocks: &[i64]) -> Result<()> {
        for &block in blocks {
            self.checked(block, "a block of the pool", |_| true)?;
        }
        for &block in blocks {
            self.blocks[block as usize].has_draft = false;
        }
        Ok(())
    }

    /// Takes the claim on writing the draft KV of `block` for the holder `claimant`. The block must be registered and
    /// held and lack `draft_valid`. Returns whether `claimant` now has the claim; false means that another holder has
    /// it. `u32::MAX` stands for no claimant and never gets a claim.
    ///
    /// # Errors
    /// [`Error::InvalidBlock`] if the block is not held, not registered, has `draft_valid`, or is not in the pool.
    #[inline]
    pub fn claim(&mut self, block: i64, claimant: u32) -> Result<bool> {
        let allowed = "a registered held block without valid draft KV";
        let id = self.checked(block, allowed, |b| b.ref_count > 0 && b.registered && !b.has_draft)?;
        let b = &mut self.blocks[id];
        if b.claimant == UNCLAIMED {
            b.claimant = claimant;
        }
        Ok(claimant != UNCLAIMED && b.claimant == claimant)
    }

    /// Returns the holder that has the claim on writing the draft KV of `block`.
    pub fn claimant(&self, block: i64) -> Option<u32> {
        self.get(block).map(|b| b.claimant).filter(|&claimant| claimant != UNCLAIMED)
    }

    /// Releases the claim of `claimant` on `block`. Returns false if `claimant` does not have it.
    pub fn release_claim(&mut self, block: i64, claimant: u32) -> bool {
        let held = claimant != UNCLAIMED && self.claimant(block) == Some(claimant);
        if held {
            self.blocks[block as usize].claimant = UNCLAIMED;
        }
        held
    }

    /// Makes all cached blocks free, so that no content is found any more. Returns false, and changes nothing, while
    /// any block is held.
    pub fn reset_prefix_cache(&mut self) -> bool {
        if self.num_free() != self.num_blocks() {
            return false;
        }
        while let Some(evicted) = self.evict() {
            self.lists.push_back(&mut self.blocks, ListId::Free, evicted.block as u32);
        }
        true
    }

    fn get(&self, block: i64) -> Option<&Block> {
        usize::try_from(block).ok().and_then(|id| self.blocks[..self.num_blocks()].get(id))
    }

    #[inline]
    fn checked(&self, block: i64, allowed: &'static str, ok: impl Fn(&Block) -> bool) -> Result<usize> {
        if self.get(block).is_some_and(ok) { Ok(block as usize) } else { Err(self.refused(block, allowed)) }
    }

    #[cold]
    fn refused(&self, block: i64, allowed: &'static str) -> Error {
        let state = match self.get(block) {
            Some(b) => {
                let marks = match (b.registered, b.has_draft) {
                    (false, _) => "no marks",
                    (true, false) => "registered",
                    (true, true) => "registered, with valid draft KV",
                };
                format!("{} holders, {marks}", b.ref_count)
            }
            None => format!("not among the {} blocks", self.num_blocks()),
        };
        Error::InvalidBlock { block, state, allowed }
    }
}
