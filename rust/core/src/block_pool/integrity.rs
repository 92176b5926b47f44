//! Check that a pool's lists, validity marks and hash map agree.

use super::list::{self, ListId};
use super::{BlockPool, UNCLAIMED};
use crate::error::{Error, Result};

impl BlockPool {
    /// Checks that every block is in exactly one state, and that lists, validity marks, claims and hashes agree. Takes
    /// O(`num_blocks`) time.
    ///
    /// # Errors
    /// [`Error::Integrity`] naming the first contradiction.
    pub fn check_integrity(&self) -> Result<()> {
        let mut list_of = vec![None; self.num_blocks()];
        for list in [ListId::Free, ListId::Cached] {
            let mut len = 0;
            for id in list::iter(&self.blocks, list) {
                let Some(seen) = list_of.get_mut(id as usize) else {
                    return Err(Error::integrity(format!("{list:?} list leads to block {id}, which does not exist")));
                };
                if let Some(other) = seen.replace(list) {
                    return Err(Error::integrity(format!("block {id} is in lists {other:?} and {list:?}")));
                }
                len += 1;
            }
            if len != self.lists.len(list) {
                return Err(Error::integrity(format!(
                    "{list:?} list has {len} blocks, counted {}",
                    self.lists.len(list)
                )));
            }
        }
        let mut registered = 0;
        for (id, (block, list)) in self.blocks.iter().zip(&list_of).enumerate() {
            let expected = match (block.ref_count, block.registered) {
                (0, false) => Some(ListId::Free),
                (0, true) => Some(ListId::Cached),
                _ => None,
            };
            if *list != expected {
                return Err(Error::integrity(format!(
                    "block {id} is in list {list:?}, expected {expected:?}: {block:?}"
                )));
            }
            if block.has_draft && !block.registered {
                return Err(Error::integrity(format!("block {id} has valid draft KV and is not registered")));
            }
            let claimed = block.claimant != UNCLAIMED;
            if claimed && (block.ref_count == 0 || !block.registered || block.has_draft) {
                return Err(Error::integrity(format!("block {id} is claimed but not claimable: {block:?}")));
            }
            if block.registered {
                registered += 1;
                if self.lookup(block.entry.hash()) != Some(id as i64) {
                    return Err(Error::integrity(format!("block {id} is not found under its hash")));
                }
            }
        }
        if registered != self.by_hash.len() {
            let hashes = self.by_hash.len();
            return Err(Error::integrity(format!("{registered} registered blocks, but {hashes} hashes")));
        }
        Ok(())
    }
}
