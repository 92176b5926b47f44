//! Doubly linked lists threaded through the blocks: every block is in at most one list, every operation is O(1).

use super::Block;

const NONE: u32 = u32::MAX;

/// Links of a block to the previous and the next block in its list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    prev: u32,
    next: u32,
}

impl Link {
    /// Link of a block that is in no list.
    pub(super) const NONE: Self = Self { prev: NONE, next: NONE };
}

/// Name of one of the two lists in a [`Lists`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListId {
    /// Blocks without a reference whose content can no longer be found by hash.
    Free,
    /// Unreferenced blocks whose content is in the prefix cache, least recently used first.
    Cached,
}

/// Number of sentinels, which are stored after the pool's blocks. A ring with a sentinel needs no special cases at its
/// ends.
pub(super) const SENTINELS: usize = 2;

/// Lengths of the two lists. Methods take the pool's `blocks`, whose last [`SENTINELS`] elements are the ends of the
/// lists.
#[derive(Clone, Debug)]
pub(super) struct Lists {
    len: [usize; 2],
}

impl Lists {
    /// Makes two empty lists by linking each sentinel in `blocks` to itself.
    pub(super) fn new(blocks: &mut [Block]) -> Self {
        for list in [ListId::Free, ListId::Cached] {
            let sentinel = sentinel(blocks, list);
            blocks[sentinel as usize].link = Link { prev: sentinel, next: sentinel };
        }
        Self { len: [0; 2] }
    }

    pub(super) fn len(&self, list: ListId) -> usize {
        self.len[list as usize]
    }

    pub(super) fn push_front(&mut self, blocks: &mut [Block], list: ListId, element: u32) {
        let sentinel = sentinel(blocks, list);
        let next = blocks[sentinel as usize].link.next;
        self.insert(blocks, list, element, Link { prev: sentinel, next });
    }

    pub(super) fn push_back(&mut self, blocks: &mut [Block], list: ListId, element: u32) {
        let sentinel = sentinel(blocks, list);
        let prev = blocks[sentinel as usize].link.prev;
        self.insert(blocks, list, element, Link { prev, next: sentinel });
    }

    fn insert(&mut self, blocks: &mut [Block], list: ListId, element: u32, link: Link) {
        debug_assert_eq!(blocks[element as usize].link.next, NONE, "the block is in a list");
        blocks[element as usize].link = link;
        blocks[link.prev as usize].link.next = element;
        blocks[link.next as usize].link.prev = element;
        self.len[list as usize] += 1;
    }

    #[inline]
    pub(super) fn pop_front(&mut self, blocks: &mut [Block], list: ListId) -> Option<u32> {
        let sentinel = sentinel(blocks, list);
        let first = blocks[sentinel as usize].link.next;
        if first == sentinel {
            return None;
        }
        self.remove(blocks, list, first);
        Some(first)
    }

    /// Removes `element` from `list`, which must contain it.
    #[inline]
    pub(super) fn remove(&mut self, blocks: &mut [Block], list: ListId, element: u32) {
        let Link { prev, next } = blocks[element as usize].link;
        blocks[prev as usize].link.next = next;
        blocks[next as usize].link.prev = prev;
        blocks[element as usize].link = Link::NONE;
        self.len[list as usize] -= 1;
    }
}

/// Iterates over the elements of `list` in order. If the links form a wrong cycle, it stops after `blocks.len()`
/// elements.
pub(super) fn iter(blocks: &[Block], list: ListId) -> impl Iterator<Item = u32> + '_ {
    let sentinel = sentinel(blocks, list);
    std::iter::successors(Some(blocks[sentinel as usize].link.next), |&current| {
        blocks.get(current as usize).map(|block| block.link.next)
    })
    .take_while(move |&current| current != sentinel)
    .take(blocks.len())
}

fn sentinel(blocks: &[Block], list: ListId) -> u32 {
    (blocks.len() - SENTINELS) as u32 + list as u32
}
