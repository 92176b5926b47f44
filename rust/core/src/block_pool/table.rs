//! A hash table threaded through the blocks, which maps 128-bit hashes to blocks. Allocates no blocks.
//!
//! It replaces the standard library's table, whose entries are eight times as large as the head of a chain in this
//! table. In the standard table, each insertion and removal misses the cache twice, and removals leave tombstones that
//! are cleared in one pause.

use super::Block;
use crate::hash::BlockHash;

const NONE: u32 = u32::MAX;

/// A block's hash and its link to the next block of the same chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct TableEntry {
    /// Low and high half of the hash. One `u128` would be aligned to 16 bytes and pad the entry to 32.
    hash: [u64; 2],
    next: u32,
}

impl TableEntry {
    /// Table entry of a block that was never registered.
    pub(super) const NONE: Self = Self { hash: [0; 2], next: NONE };

    /// Returns the hash that the block was last inserted under.
    pub(super) fn hash(&self) -> BlockHash {
        let [low, high] = self.hash;
        u128::from(high) << 64 | u128::from(low)
    }
}

/// Table with at most one block per hash and at most one hash per block. Methods take the pool's `blocks`, which
/// contain the entries.
#[derive(Clone, Debug)]
pub(super) struct Table {
    heads: Vec<u32>,
    shift: u32,
    len: usize,
}

impl Table {
    /// Makes an empty table for `num_blocks` blocks.
    pub(super) fn new(num_blocks: usize) -> Self {
        // One head in two leads nowhere when every block is registered, so most lookups that find nothing end there.
        let heads = (2 * num_blocks).next_power_of_two();
        Self { heads: vec![NONE; heads], shift: u64::BITS - heads.trailing_zeros(), len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the block under `hash`.
    pub(super) fn find(&self, blocks: &[Block], hash: BlockHash) -> Option<u32> {
        let hash = halves(hash);
        let mut current = self.heads[self.head(hash)];
        while current != NONE {
            let entry = &blocks[current as usize].entry;
            if entry.hash == hash {
                return Some(current);
            }
            current = entry.next;
        }
        None
    }

    /// Inserts `block`, which must not be in the table, under `hash`. Returns false if another block has that hash.
    pub(super) fn insert(&mut self, blocks: &mut [Block], hash: BlockHash, block: u32) -> bool {
        if self.find(blocks, hash).is_some() {
            return false;
        }
        let hash = halves(hash);
        let head = self.head(hash);
        blocks[block as usize].entry = TableEntry { hash, next: self.heads[head] };
        self.heads[head] = block;
        self.len += 1;
        true
    }

    /// Removes `block`, which must be in the table.
    pub(super) fn remove(&mut self, blocks: &mut [Block], block: u32) {
        let TableEntry { hash, next } = blocks[block as usize].entry;
        let head = self.head(hash);
        let mut current = self.heads[head];
        if current == block {
            self.heads[head] = next;
        } else {
            while current != NONE {
                let entry = &mut blocks[current as usize].entry;
                current = entry.next;
                if current == block {
                    entry.next = next;
                }
            }
        }
        self.len -= 1;
    }

    /// Returns the index of the hash's chain in the table. All bits of a hash count, because callers may register any
    /// hashes.
    fn head(&self, [low, high]: [u64; 2]) -> usize {
        ((low ^ high.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }
}

fn halves(hash: BlockHash) -> [u64; 2] {
    [hash as u64, (hash >> 64) as u64]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// Generates hashes that differ in one half, in one bit, or only in bits that `head` folds together.
    fn hash() -> impl Strategy<Value = BlockHash> {
        let few = prop::sample::select(vec![0, 1, u128::MAX, 1 << 64, 1 << 96, (1 << 64) | (1 << 32), 1 << 127]);
        prop_oneof![3 => few, 1 => any::<u128>()]
    }

    proptest! {
        #[test]
        fn it_is_a_map(elements in 1..9_u32, ops in prop::collection::vec((any::<bool>(), 0..9_u32, hash()), 1..200)) {
            let mut table = Table::new(elements as usize);
            let mut blocks = vec![Block::FREE; elements as usize];
            let mut model: HashMap<BlockHash, u32> = HashMap::new();
            for (insert, block, hash) in ops {
                let block = block % elements;
                let registered = model.iter().find(|&(_, &other)| other == block).map(|(&hash, _)| hash);
                match registered {
                    Some(hash) if !insert => {
                        prop_assert_eq!(blocks[block as usize].entry.hash(), hash);
                        table.remove(&mut blocks, block);
                        model.remove(&hash);
                    }
                    None if insert => {
                        let fresh = !model.contains_key(&hash);
                        prop_assert_eq!(table.insert(&mut blocks, hash, block), fresh);
                        model.entry(hash).or_insert(block);
                    }
                    _ => {}
                }
                prop_assert_eq!(table.find(&blocks, hash), model.get(&hash).copied());
                for (&hash, &block) in &model {
                    prop_assert_eq!(table.find(&blocks, hash), Some(block));
                }
                prop_assert_eq!(table.len(), model.len());
            }
        }
    }

    /// Tests a hundred hashes in one chain: each is found, and can be removed from any place of the chain.
    #[test]
    fn collisions_of_heads_forced() {
        let mut table = Table::new(100);
        let mut blocks = vec![Block::FREE; 100];
        let head = table.head(halves(0));
        let hashes: Vec<BlockHash> = (0..).filter(|&hash| table.head(halves(hash)) == head).take(100).collect();
        for (block, &hash) in (0..).zip(&hashes) {
            assert!(table.insert(&mut blocks, hash, block));
        }
        for block in [0, 99, 50, 1, 98].into_iter().chain(2..50).chain(51..98) {
            assert_eq!(table.find(&blocks, hashes[block as usize]), Some(block));
            table.remove(&mut blocks, block);
            assert_eq!(table.find(&blocks, hashes[block as usize]), None);
        }
        assert_eq!(table.len(), 0);
        assert!(table.heads.iter().all(|&head| head == NONE));
    }
}
