//! `LoRA` adapters: what names one, and how many may run at once. Knows no weights.
//!
//! A launch computes every row with its own adapter, and each adapter costs it products of its own. So at most `max_loras`
//! different ones run, and a request whose adapter would be one too many waits. No request of an adapter overtakes it, so
//! its turn comes when those that run have ended; requests of the base model need no adapter and go on beside it.

use std::collections::HashSet;
use std::sync::Arc;

use rustc_hash::FxBuildHasher;

use super::Scheduler;
use super::request::RequestIndex;
use crate::hash::{BlockHash, BlockHasher};

/// A `LoRA` adapter (Hu et al. 2021) that a request is computed with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lora {
    /// What the device knows it by, at least 1. Two adapters of a scheduler never have the same.
    pub id: u32,
    /// What users and routers call it.
    pub name: Arc<str>,
}

/// Start of the chain of a request's hashes, so that no block is shared between adapters, or with the base model.
pub(super) fn root(hasher: &BlockHasher, cache_salt: &[u8], lora: Option<&Lora>) -> BlockHash {
    let salted = hasher.root(cache_salt);
    // No extra key counts from an offset that is beyond all blocks.
    lora.map_or(salted, |lora| {
        let key = [&b"LoRA"[..], &lora.id.to_le_bytes(), lora.name.as_bytes()].concat();
        hasher.with_extra_key(salted, usize::MAX, &key)
    })
}

/// The adapters that run, while requests are admitted.
#[derive(Clone, Debug, Default)]
pub(super) struct RunningLoras {
    ids: HashSet<u32, FxBuildHasher>,
    /// A request waits for its turn: no adapter comes to those that run, and none is given to another request.
    closed: bool,
}

impl RunningLoras {
    /// Whether the request of this adapter may be admitted now; if not, none of an adapter behind it may.
    pub(super) fn admits(&mut self, lora: Option<u32>, max_loras: usize) -> bool {
        let Some(id) = lora else { return true };
        self.closed |= !self.ids.contains(&id) && self.ids.len() >= max_loras;
        !self.closed
    }

    /// A request of this adapter runs from now on.
    pub(super) fn add(&mut self, lora: Option<u32>) {
        self.ids.extend(lora);
    }
}

impl Scheduler {
    /// Adapters of the requests that run.
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

    /// How many different ones run.
    pub(super) fn num_running_loras(&self) -> usize {
        self.running_loras().ids.len()
    }
}
