//! `LoRA` adapters: the root of a request's block hashes, and the limit of adapters that run at once. Knows no weights.
//!
//! A step computes every row with its own adapter, and each adapter adds products of its own. So at most `max_loras`
//! different adapters run, and a request whose adapter would exceed that waits. No request with an adapter overtakes
//! it, so it is admitted when running adapters end. Requests of the base model need no adapter and continue to be
//! admitted.

use std::collections::HashSet;

use rustc_hash::FxBuildHasher;

use super::Scheduler;
use super::config::Lora;
use super::request::RequestIndex;
use crate::hash::{BlockHash, BlockHasher};

/// Returns the start of a request's hash chain, which differs between adapters and the base model so that they share no
/// blocks. `salted` is the hash of the request's cache salt.
pub(super) fn root(hasher: &BlockHasher, salted: BlockHash, lora: Option<&Lora>) -> BlockHash {
    // No extra key counts from an offset that is beyond all blocks.
    lora.map_or(salted, |lora| {
        let key = [&b"LoRA"[..], &lora.id.to_le_bytes(), lora.name.as_bytes()].concat();
        hasher.with_extra_key(salted, usize::MAX, &key)
    })
}

/// Adapters of the running requests, during admission.
#[derive(Clone, Debug, Default)]
pub(super) struct RunningLoras {
    ids: HashSet<u32, FxBuildHasher>,
    /// Whether a request waits for an adapter. Then no new adapter starts, and running adapters get no more requests.
    closed: bool,
}

impl RunningLoras {
    /// Returns whether a request with this adapter may be admitted now. If not, no later request with an adapter may be
    /// admitted either.
    pub(super) fn admits(&mut self, lora: Option<u32>, max_loras: usize) -> bool {
        let Some(id) = lora else { return true };
        self.closed |= !self.ids.contains(&id) && self.ids.len() >= max_loras;
        !self.closed
    }

    /// Notes that a request with this adapter runs.
    pub(super) fn add(&mut self, lora: Option<u32>) {
        self.ids.extend(lora);
    }
}

impl Scheduler {
    /// Returns the adapters of the running requests.
    pub(super) fn running_loras(&self) -> RunningLoras {
        let mut running = RunningLoras::default();
        if self.config.max_loras > 0 {
            self.running.iter().for_each(|&row| running.add(self.lora_id(self.rows[row as usize].request)));
        }
        running
    }

    pub(super) fn lora_id(&self, index: RequestIndex) -> Option<u32> {
        self.requests[index].lora.as_ref().map(|lora| lora.id)
    }

    /// Returns the number of different adapters that run.
    pub(super) fn num_running_loras(&self) -> usize {
        self.running_loras().ids.len()
    }
}
