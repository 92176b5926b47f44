//! A row of device state and the lease on it: who runs there, with which blocks, and what is in flight.
//!
//! The row index names the lease. A row is live while its request runs. When the request ends or is preempted, the row is closed: what
//! is in flight for it will be dropped, and it keeps its blocks and claims until the last such launch has settled.

use super::prefill_costs::LaunchWork;
use super::request::{Request, RequestIndex};
use crate::drafts::DrafterKind;

pub(super) type RowIndex = u32;

/// In place of a block that has come back to the pool.
pub(super) const NO_BLOCK: i64 = -1;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RowState {
    #[default]
    Free,
    Live,
    Closed,
}

/// Two cache lines in the order given: in a large batch every line that a launch looks at is a miss.
#[derive(Clone, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Row {
    /// Settled tokens and limit of the running request, the K that it drafts now, and the most it may: kept here too, so that planning
    /// does not look at requests.
    pub(super) n: usize,
    pub(super) limit: usize,
    pub(super) k: u32,
    pub(super) max_k: u32,
    /// The most tokens that entries in flight can emit.
    pub(super) emit_upper: u32,
    /// Positions with valid draft KV after all planned launches. Exact while `drafting` is 0, otherwise a settled value.
    pub(super) draft_len: usize,
    /// Its block table's entries that the device knows of; later ones are reserved.
    pub(super) num_sent: usize,
    /// Entries in flight; those that emit tokens; those that draft on the device.
    pub(super) in_flight: u32,
    pub(super) emitting: u32,
    pub(super) drafting: u32,
    /// The running request; meaningful while live.
    pub(super) request: RequestIndex,

    /// Its block table, [`NO_BLOCK`] before `first_block`.
    pub(super) blocks: Vec<i64>,
    /// Tokens at admission: target prefill covers `[.., prefill_end)`, and `[.., num_computed)` of it is planned.
    pub(super) prefill_end: usize,
    pub(super) num_computed: usize,
    /// Blocks `[0, num_registered)` have been offered to the prefix cache or come from it.
    pub(super) num_registered: usize,
    /// Blocks `[0, num_draft_marked)` need no further look for mark D.
    pub(super) num_draft_marked: usize,
    /// Entries with K = 0 planned since the last one with K > 0: how much the lag after drafting may have grown.
    pub(super) idle_drafts: u32,
    pub(super) state: RowState,
    /// No planner has been told of the request yet.
    pub(super) fresh: bool,
    /// Whose drafts it has next, and whether [`super::Scheduler::speculate`] has said so for the next launch.
    pub(super) drafter: DrafterKind,
    pub(super) decided: bool,
    /// Its draft KV from block `num_draft_marked` on is to be built again, once no launch in flight drafts for it.
    pub(super) rebuild: bool,
    /// `draft_len` moved and the device has not been told: its next chunk tells it, if need be a chunk without a position.
    pub(super) draft_len_moved: bool,
    /// Blocks that lie behind every window to come, and are no longer its own.
    pub(super) first_block: usize,
    /// The last launch with a catch-up chunk of its own.
    pub(super) last_catch_up: u64,
}

impl Row {
    pub(super) fn is_prefilling(&self) -> bool {
        self.num_computed < self.prefill_end
    }

    /// Those of its blocks that have been registered or come from the prefix cache.
    pub(super) fn registered_blocks(&self) -> &[i64] {
        &self.blocks[self.first_block.min(self.num_registered)..self.num_registered]
    }

    /// Fewest tokens the row has once everything in flight has happened.
    pub(super) fn lower_bound(&self) -> usize {
        self.n + self.emitting as usize
    }

    /// Takes it that draft KV is valid up to `end` at most.
    pub(super) fn lower_draft_len(&mut self, end: usize) {
        if end < self.draft_len {
            self.draft_len = end;
            self.draft_len_moved = true;
        }
    }

    /// Makes a free row live, with room for `max_blocks` blocks, so that it allocates nothing while it runs.
    pub(super) fn open(&mut self, index: RequestIndex, request: &Request, max_blocks: usize) {
        let mut blocks = std::mem::take(&mut self.blocks);
        blocks.clear();
        blocks.reserve(max_blocks);
        let n = request.tokens.len();
        let k = if request.draft_failed { 0 } else { request.k as u32 };
        *self = Self {
            state: RowState::Live,
            request: index,
            n,
            limit: request.limit,
            k,
            max_k: k,
            fresh: true,
            blocks,
            prefill_end: n,
            ..Self::default()
        };
    }
}

/// `Row::idle_drafts` where an entry in flight or before it was to draft and did not.
pub(super) const UNKNOWN_LAG: u32 = 1 << 30;

/// One row's part in a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) row: RowIndex,
    /// The most tokens it can emit: K + 1 of a decode entry, 1 of a prompt's last chunk, 0 of another chunk.
    pub(super) emit_upper: u32,
    /// The end of a chunk that does not end its prompt.
    pub(super) chunk_end: u32,
    /// Whose its drafts are.
    pub(super) drafter: DrafterKind,
}

impl Entry {
    /// Draft tokens; 0 of a chunk.
    pub(super) fn k(self) -> u32 {
        self.emit_upper.saturating_sub(1)
    }

    /// Whether drafts of its own making are in flight: their KV is written.
    pub(super) fn drafts_on_device(self) -> bool {
        self.emit_upper > 1 && self.drafter == DrafterKind::Device
    }

    /// Whether it emits; if not, it is a chunk that does not end its prompt.
    pub(super) fn emits(self) -> bool {
        self.emit_upper > 0
    }
}

/// A planned launch that has not settled.
#[derive(Clone, Debug, Default)]
pub(super) struct Launch {
    pub(super) id: u64,
    pub(super) entries: Vec<Entry>,
    pub(super) work: LaunchWork,
}
